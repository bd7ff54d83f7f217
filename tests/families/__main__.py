"""Compares families of transformers, sharded over ranks, with one process.

    python -m tests.families --family llama mamba2 --mesh 2x1

Each family is a tiny model with random weights, built offline, in fp64 on gloo. The mesh "2x1"
shards weights over two ranks and no sequences, "1x2" sequences over two ranks that share heads,
"1x2r" sequences over a ring of two; further ranks compute other sequences. Compared: the loss and
every gradient of two steps of SGD, every parameter after them, and the logits of an evaluation.
Each mesh, form of checkpointing and head is tested at least once in each family, every pair in
some family; --thorough tests all combinations, which takes long: --json stores the results of a
part, and --parts prints stored parts together.

Exit status 1 if a result differs, or if an error is not one of internsp's refusals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console

from tests.families.options import Kind, Options, Setting
from tests.families.report import (
    TOLERANCE,
    Differences,
    Found,
    facts,
    page,
    printed,
    remarks,
    restored,
    summary,
    worst,
)
from tools.bench.ranks import RankError, Refused, Session, Setup
from tools.bench.report import put, say
from tools.bench.signals import terminate_as_interrupt

WORKER = "tests.families.rank:Comparison"
WIDTH = 200
# Classes of internsp.errors, by name, because this process imports no torch.
REFUSALS = ("StructureError", "ConfigError", "LayoutError")


def run(options: Options) -> Iterator[Found]:
    """Compare family by family, for each number of ranks."""
    everything = [
        (setting, family)
        for turn, (family, kind) in enumerate(_kinds(options).items())
        for setting in options.settings(kind, turn)
    ]
    everything.sort(key=lambda one: one[0].ranks)
    for ranks, group in groupby(everything, key=lambda one: one[0].ranks):
        left = list(group)
        while left:
            with Session(Setup(WORKER, (), ranks, options.timeout)) as session:
                while left:
                    setting, family = left.pop(0)
                    found = _compare(session, family, setting)
                    say(f"{family}, {setting}: {found.error or f'{worst(found.apart):.1e}'}")
                    yield found
                    if found.error and not found.refused:
                        break  # the ranks may be out of step: start new ones


def _kinds(options: Options) -> dict[str, Kind]:
    with Session(Setup(WORKER, (), 1, options.timeout)) as session:
        return {family: session.ask("kind", family=family)[0] for family in options.families()}


def _compare(session: Session, family: str, setting: Setting) -> Found:
    try:
        apart = _asked(session, family, setting, False)
        if worst(apart) > TOLERANCE:  # the same in fp64 throughout separates rounding from a fault
            return Found(family, setting, apart, _asked(session, family, setting, True))
    except Refused as error:
        kind, _, sentence = error.reason.partition(": ")
        refused = kind in REFUSALS
        return Found(family, setting, {}, None, sentence if refused else str(error), refused)
    except RankError as error:
        return Found(family, setting, {}, None, str(error))
    return Found(family, setting, apart)


def _asked(
    session: Session, family: str, setting: Setting, widened: bool
) -> Differences:
    answers = session.ask("compare", family=family, setting=setting, widened=widened)
    return {kind: max(answer[kind] for answer in answers) for kind in answers[0]}


def main(arguments: Sequence[str]) -> int:
    """Returns 0; 1 if a comparison failed; 2 if an option is invalid."""
    terminate_as_interrupt()
    found: list[Found] = []
    try:
        options = Options.read(arguments, __doc__)
        if options.parts:
            found = restored(x for path in options.parts for x in json.loads(path.read_text()))
        else:
            found.extend(run(options))
    except (RankError, Refused, ValueError, OSError) as error:
        say(error)
        return 2
    except KeyboardInterrupt as error:
        say(f"stopped ({error or 'SIGINT'})")
        return 130
    console = Console(width=WIDTH, markup=False, highlight=False)
    console.print(*facts(found), printed(found), *remarks(found), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(summary(found), indent=1) + "\n")
    if options.markdown is not None:
        command = ["python", "-m", "tests.families", *arguments]
        put(options.markdown, "families", page(found).markdown(command))
    return 0 if all(one.right for one in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
