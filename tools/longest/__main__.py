"""The longest sequence under a memory limit: the gain of each mechanism, and other systems.

    python -m tools.longest --document docs/dev/results/long_sequences.md

Recipes: a step that runs out of memory without a mechanism, and with it, under the same limit,
finishes with the loss of a run without a limit. Then the longest sequence under one limit, found by
bisection, for Hugging Face's model, FSDP2 with activation checkpointing, and internsp with one
mechanism after another, each next to the result of ``internsp plan --longest``. Every attempt runs
in new processes (gloo), for two steps. Linux only: the limit is RLIMIT_DATA.

Exit status 1 if a recipe fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import tyro

from tools.bench.ranks import RankError, Refused, Session, Setup
from tools.bench.report import put, say
from tools.bench.signals import terminate_as_interrupt
from tools.longest.cases import MIB, OTHERS, OURS, RECIPES, Case, Outcome, Recipe, lack
from tools.longest.report import Found, Proof, proved, table

WORKER = "tools.longest.rank:Rank"
SHORTEST = 128  # tokens of the shortest sequence to try
WIDEN = (1.06, 1.15, 1.4)  # factors to widen the search bracket; the last one repeats

Name = Literal["ring", "offload", "tiling", "weight", "sequence"]


@dataclass(frozen=True)
class Options:
    """Options of the tool."""

    recipe: tuple[Name, ...] = get_args(Name)
    """Recipes to run."""
    table: bool = True
    """Search for the longest sequences."""
    limit: int = 32
    """MiB per process for model, optimizer and steps in this search."""
    precision: float = 0.03
    """Precision at which the search ends, as a share of the length."""
    timeout: float = 300.0
    """Seconds allowed for one attempt."""
    document: Path | None = None
    """A page, between the marks of which each part is written; none: only print."""


def attempt(case: Case, length: int, limit: int | None, timeout: float) -> Outcome:
    """Two steps in new processes; ``limit`` in bytes per process, ``None``: unlimited.

    Raises:
        RankError, Refused: a rank failed for another reason than lack of memory.
    """
    try:
        with Session(Setup(WORKER, (), case.world, timeout)) as session:
            found: list[Outcome] = session.ask("train", case=case, length=length, most=limit)
    except (RankError, Refused) as error:
        why = lack(str(error))
        if limit is None or not why:
            raise
        return Outcome(died=why)
    return max(found, key=lambda one: one.peak)


def prove(recipe: Recipe, timeout: float) -> Proof:
    """A recipe's three runs: without a limit, and with it without and with the mechanism."""
    limit = recipe.limit * MIB
    right = attempt(recipe.case(False), recipe.length, None, timeout)
    lacking = attempt(recipe.case(False), recipe.length, limit, timeout)
    having = attempt(recipe.case(True), recipe.length, limit, timeout)
    return Proof(recipe, right, lacking, having)


def bisect(
    tried: Callable[[int], Outcome], guess: int, multiple: int, precision: float
) -> tuple[int, Outcome | None]:
    """The longest length (a multiple) that finishes, within ``precision`` (a share of it).

    Args:
        guess: the first length to try.
    """
    low, high, best = 0, 0, None
    length = max(guess // multiple, 1) * multiple
    widened = 0
    while True:
        outcome = tried(length)
        if outcome.died:
            high = length
        else:
            low, best = length, outcome
        if high and high - low <= max(multiple, precision * high):
            return low, best
        factor = WIDEN[min(widened, len(WIDEN) - 1)]
        widened += 1
        if not high:
            length = max(int(low * factor) // multiple, low // multiple + 1) * multiple
        elif not low:
            if high <= max(SHORTEST, multiple):
                return 0, None
            length = max(int(high / factor) // multiple, 1) * multiple
        else:
            length = (low + high) // 2 // multiple * multiple
            length = min(max(length, low + multiple), high - multiple)


def planned(case: Case, limit: int) -> int:
    """The result of ``internsp plan --longest``."""
    from internsp.app.config import Config
    from internsp.app.plan.longest import MemoryBudget  # imports torch

    config = Config.model_validate(case.settings(4096))
    return MemoryBudget(config, case.world).longest(limit).length


def longest(case: Case, limit: int, options: Options, guess: int) -> Found:
    """Find the longest sequence of one case."""
    expected = planned(case, limit) if case.kind == "internsp" else None

    def tried(length: int) -> Outcome:
        outcome = attempt(case, length, limit, options.timeout)
        say(f"    {length:,}: {'dies' if outcome.died else 'finishes'}")
        return outcome

    length, outcome = bisect(tried, expected or guess, case.multiple, options.precision)
    return Found(case, length, outcome, expected)


def main(arguments: Sequence[str]) -> int:
    """Returns 0; 1 if a recipe fails; 2 after any other error."""
    terminate_as_interrupt()
    proofs: list[Proof] = []
    found: list[Found] = []
    options = tyro.cli(Options, args=arguments, description=__doc__)
    try:
        for recipe in RECIPES:
            if recipe.name in options.recipe:
                proofs.append(prove(recipe, options.timeout))
                say(f"{recipe.title}: {proofs[-1].verdict}")
        limit = options.limit * MIB
        for case in (*OTHERS, *OURS) if options.table else ():
            say(case.name)
            found.append(longest(case, limit, options, found[-1].length if found else 512))
    except (RankError, Refused, OSError) as error:
        say(error)
        return 2
    except KeyboardInterrupt as error:
        say(f"stopped ({error or 'SIGINT'})")
        return 130
    pages = {"recipes": proved(proofs)} if proofs else {}
    if found:
        pages["longest"] = table(options.limit, found)
    for mark, made in pages.items():  # a part that did not run keeps its figures
        print(made.text())
        if options.document is not None:
            command = ["python", "-m", "tools.longest", *arguments]
            put(options.document, mark, made.markdown(command))
    return 0 if all(proof.holds for proof in proofs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
