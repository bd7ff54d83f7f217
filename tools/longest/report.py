"""Tables of the results."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import isclose

from tools.bench.report import Page, Table
from tools.longest.cases import MIB, Case, Outcome, Recipe

TOLERANCE = 1e-4
"""Relative tolerance of loss and gradient norm in fp32, after an optimizer step."""


@dataclass(frozen=True)
class Proof:
    """The result of a recipe.

    Attributes:
        right: without the mechanism and without a limit.
        lacking, having: without and with the mechanism, under the limit.
    """

    recipe: Recipe
    right: Outcome
    lacking: Outcome
    having: Outcome

    @property
    def holds(self) -> bool:
        """Fails without the mechanism, finishes with it, and with the right loss."""
        return self.verdict == "holds"

    @property
    def verdict(self) -> str:
        """The result in words."""
        if not self.lacking.died:
            return "finishes without the mechanism, too"
        if self.having.died:
            return f"dies with the mechanism, too: {self.having.died}"
        for name in ("loss", "norm"):
            got, right = getattr(self.having, name), getattr(self.right, name)
            if not isclose(got, right, rel_tol=TOLERANCE):
                return f"{name} {got:.6f}, where {right:.6f} is right"
        return "holds"


@dataclass(frozen=True)
class Found:
    """The longest sequence of a case.

    Attributes:
        outcome: of the long step; ``None``: no length finished.
        planned: the plan's prediction, for internsp.
    """

    case: Case
    length: int
    outcome: Outcome | None
    planned: int | None


def proved(proofs: Sequence[Proof]) -> Page:
    """The table of recipes."""
    return Page(_facts(), [Table(_recipes(proofs), "Dies without, finishes with", _words(proofs))])


def table(limit: int, found: Sequence[Found]) -> Page:
    """The table of longest sequences in ``limit`` MiB."""
    title = f"The longest sequence in {limit} MiB a process"
    return Page(_facts(), [Table(_longest(found), title)])


def _facts() -> list[str]:
    names = ("torch", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return [
        f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()} "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}, {versions}; "
        "gloo, fp32, one thread a process",
        "seconds are those of one step beside whatever else the machine did, and are not for "
        "comparison; memory figures do not depend on that",
    ]


def _recipes(proofs: Sequence[Proof]) -> list[list[str]]:
    rows = [["mechanism", "tokens", "ranks", "limit", "needs without, MiB", "without", "with",
             "peak with, MiB", "loss without a limit", "loss with", "s", "verdict"]]  # fmt: skip
    for proof in proofs:
        recipe, having = proof.recipe, proof.having
        lived = not having.died
        rows.append([
            f"{recipe.title}: {recipe.says}", f"{recipe.length:,}", str(recipe.world),
            f"{recipe.limit} MiB", f"{proof.right.peak / MIB:.1f}",
            "dies" if proof.lacking.died else "finishes", "finishes" if lived else "dies",
            f"{having.peak / MIB:.1f}" if lived else "", f"{proof.right.loss:.5f}",
            f"{having.loss:.5f}" if lived else "", f"{having.seconds:.1f}" if lived else "",
            proof.verdict,
        ])  # fmt: skip
    return rows


def _words(proofs: Sequence[Proof]) -> list[str]:
    return [f'{p.recipe.title} without it: "{p.lacking.died}"' for p in proofs if p.lacking.died]


def _longest(found: Sequence[Found]) -> list[list[str]]:
    rows = [["trained by", "ranks", "tokens", "tokens a rank", "peak of a rank, MiB", "s",
             "planned", "plan's error"]]  # fmt: skip
    for one in found:
        done, plan = one.outcome, one.planned
        parallel = one.case.sections.get("parallel", {})
        each = one.length // int(parallel.get("sequence", 1))
        rows.append([
            one.case.name, str(one.case.world), f"{one.length:,}", f"{each:,}",
            "" if done is None else f"{done.peak / MIB:.1f}",
            "" if done is None else f"{done.seconds:.1f}",
            "" if plan is None else f"{plan:,}",
            "" if plan is None or not one.length else f"{100 * (plan / one.length - 1):+.0f} %",
        ])  # fmt: skip
    return rows
