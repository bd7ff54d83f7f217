"""The table: one row per family, one column per setting with the largest difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from textwrap import shorten
from typing import Any

from rich.table import Table

from tests.families.configs import ROUGH, SETTINGS
from tests.families.options import CHECKPOINTING, MESHES, Setting
from tools.bench.report import Page
from tools.bench.report import Table as Rows

TOLERANCE, SINGLE = 1e-10, 1e-5
LONGEST = 400  # characters of an error message

Differences = dict[str, tuple[float, str]]
"""The largest difference of each kind (loss, gradient, parameter, logits), and where it is."""


@dataclass(frozen=True)
class Found:
    """The result of one comparison.

    Attributes:
        apart: differences over all ranks, each over the largest element.
        widened: the same in fp64 throughout, if ``apart`` is larger than fp64's rounding.
        error: why nothing was compared, if so.
        refused: the error is one of internsp's refusals.
    """

    family: str
    setting: Setting
    apart: Differences
    widened: Differences | None = None
    error: str = ""
    refused: bool = False

    @property
    def right(self) -> bool:
        """The difference is rounding: fp64's, or fp32's, which disappears in fp64."""
        if self.error:
            return self.refused
        return max(v for v, _ in self.apart.values()) <= ROUGH.get(self.family, SINGLE) and (
            worst(self.apart) <= TOLERANCE
            if self.widened is None
            else max(v for v, _ in self.widened.values()) <= TOLERANCE
        )


def worst(apart: Differences) -> float:
    """The largest difference except the loss, which transformers computes in fp32."""
    return max((v for kind, (v, _) in apart.items() if kind != "loss"), default=0.0)


def columns(found: Sequence[Found]) -> dict[str, Callable[[Setting], bool]]:
    """Column headers with the settings that they cover; only those that were compared."""
    heads: dict[str, Callable[[Setting], bool]] = {}
    for mesh in MESHES:
        heads[mesh] = lambda s, mesh=mesh: s.mesh == mesh  # type: ignore[misc]
    for form in CHECKPOINTING:
        heads[form] = lambda s, form=form: s.checkpointing == form  # type: ignore[misc]
    for name, tied in (("untied", False), ("tied", True)):
        heads[name] = lambda s, tied=tied: s.tied == tied  # type: ignore[misc]
    return {head: of for head, of in heads.items() if any(of(one.setting) for one in found)}


def cell(found: Iterable[Found]) -> str:
    """The largest difference among them, or the outcome to show instead."""
    those = list(found)
    if not those:
        return "-"
    if any(not one.right for one in those):
        wrong = max((worst(one.apart) for one in those if not one.error), default=0.0)
        return f"WRONG {wrong:.0e}" if wrong > TOLERANCE else "FAILED"
    compared = [worst(one.apart) for one in those if not one.error]
    if not compared:
        return "refused"
    return f"{max(compared):.0e}" + ("*" if len(compared) < len(those) else "")


def rows(found: Sequence[Found]) -> list[list[str]]:
    """The header, then the families."""
    heads = columns(found)
    lines = [["family", *heads, "in fp64"]]
    for family, group in groupby(sorted(found, key=lambda one: one.family), lambda one: one.family):
        those = list(group)
        cells = [cell(one for one in those if of(one.setting)) for of in heads.values()]
        wide = [worst(one.widened) for one in those if one.widened is not None]
        lines.append([family, *cells, f"{max(wide):.0e}" if wide else ""])
    return lines


def remarks(found: Sequence[Found]) -> list[str]:
    """Each refusal and failure once, with the families and settings it concerns."""
    about: dict[tuple[str, str], list[Setting]] = {}
    for one in found:
        if not one.right and not one.error:
            kinds = {k: v for k, v in (one.widened or one.apart).items() if v[0] > TOLERANCE}
            places = [f"{kind} {where} by {v:.1e}" for kind, (v, where) in kinds.items()]
            about.setdefault((one.family, "differs: " + ", ".join(places)), []).append(one.setting)
        elif one.error:
            about.setdefault((one.family, one.error), []).append(one.setting)
    return [
        f"{family} ({_together(which)}): {shorten(why, LONGEST, placeholder=' ...')}"
        for (family, why), which in about.items()
    ]


def _together(settings: Sequence[Setting]) -> str:
    meshes = dict.fromkeys(s.mesh for s in settings)
    forms = dict.fromkeys(s.checkpointing for s in settings)
    return f"{' '.join(meshes)}; {' '.join(forms)}"


def facts(found: Sequence[Found]) -> list[str]:
    """The conditions of the comparison."""
    loss = max((one.apart["loss"][0] for one in found if one.apart), default=0.0)
    kinds = sorted({one.family for one in found if one.widened is not None})
    right, families = sum(one.right for one in found), {one.family for one in found}
    lines = [
        f"{len(families)} families, {len(found)} comparisons, {right} right; of these "
        f"{sum(one.refused for one in found)} refused in words",
        "the largest difference from one process over the largest element of the tensor, of every "
        "gradient of two steps, of every parameter after them, of an evaluation's logits; at most "
        f"{TOLERANCE:g}, or {SINGLE:g} where the model itself computes in fp32",
        f"the loss, which transformers computes in fp32: at most {loss:.0e}",
        "a column is the largest over all settings of that mesh (weight x sequence), form of "
        "checkpointing, or head; * where some of them were refused, - where there are none",
    ]
    lines += [
        f"{family} with weight_parallel {settings}, as its refusal says"
        for family, settings in SETTINGS.items()
        if family in families
    ]
    lines += [
        f"{family} as the model is: at most {bound:g}, which its own fp32 makes of rounding"
        for family, bound in ROUGH.items()
        if family in families
    ]
    if kinds:
        lines.append(
            "the model's own fp32 in gradients, too (last column: the same with every fp32 made "
            f"fp64): {', '.join(kinds)}"
        )
    return lines


def page(found: Sequence[Found]) -> Page:
    """Markdown for a documentation page."""
    return Page(facts(found), [Rows(rows(found), remarks=remarks(found))])


def printed(found: Sequence[Found]) -> Table:
    """The rows for the terminal."""
    head, *lines = rows(found)
    table = Table()
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def summary(found: Sequence[Found]) -> list[dict[str, Any]]:
    """The results as JSON values."""
    return [asdict(one) | {"right": one.right} for one in found]


def restored(summaries: Iterable[dict[str, Any]]) -> list[Found]:
    """Read stored results; of duplicates the later one counts."""
    found: dict[tuple[str, Setting], Found] = {}
    for line in summaries:
        given = {name: value for name, value in line.items() if name != "right"}
        for kind in ("apart", "widened"):
            apart = given[kind]
            given[kind] = apart and {k: (v, where) for k, (v, where) in apart.items()}
        one = Found(**given | {"setting": Setting(**given["setting"])})
        found[one.family, one.setting] = one
    return list(found.values())
