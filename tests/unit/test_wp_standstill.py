"""When a rank may give up a wait: never while another order of events could still end it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from internsp.failure.standstill import Kind, Report, Wait, hopeless

GATHER, REDUCE = "gathers", "reductions"


def report(rank: int, kind: Kind, gathers: int, reductions: int, **given: object) -> Report:
    made = Report(
        rank, kind, 0, (gathers, reductions), {GATHER: gathers, REDUCE: reductions, "own": rank},
        "something", recent=((7,) * gathers, (8,) * reductions),
    )  # fmt: skip
    return replace(made, **given)  # type: ignore[arg-type]


def waits(rank: int, gathers: int, reductions: int, entry: int = 0, **given: object) -> Report:
    group, number, tag = ((GATHER, gathers, 7), (REDUCE, reductions, 8))[entry]
    wait = Wait((group,), entry, number, tag)
    return report(rank, Kind.WAITS, gathers, reductions, wait=wait, **given)


FAILED = report(1, Kind.FAILED, 5, 5)
MEETS = report(1, Kind.MEETS, 5, 5, ranks=(0, 1))
REFUSED = report(1, Kind.REFUSED, 5, 5, refusals=1)
LOST = report(1, Kind.LOST, 5, 5)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (waits(0, 6, 5), FAILED), (waits(0, 6, 5), LOST), (waits(0, 5, 6), REFUSED),
        (waits(0, 6, 5), MEETS), (replace(MEETS, rank=0), waits(1, 6, 5)),
        (replace(MEETS, rank=0), LOST), (waits(0, 6, 5), waits(1, 5, 6, 1)),
        (waits(0, 5, 5), waits(1, 6, 5, recent=((7, 7, 7, 7, 9, 7), (8,)))),
        (report(0, Kind.WAITS, 6, 5, wait=Wait(("own",))), report(1, Kind.FAILED, 6, 5,
         sequences={"own": -1})),
    ],
)  # fmt: skip
def test_a_wait_that_cannot_end_is_given_up(mine: Report, other: Report) -> None:
    assert hopeless(mine, [other])
    assert not hopeless(mine, [replace(other, epoch=1)]), "the ranks have recovered since"
    assert Report.loads(other.dumps()) == other


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (waits(0, 5, 5), FAILED),  # it has launched the same: this one may fail alike
        (waits(0, 4, 5), FAILED),
        (waits(0, 6, 5, refusals=1), REFUSED),  # refused on both, and this one has gone on
        (waits(0, 5, 5), MEETS),  # a slow transfer
        (replace(MEETS, rank=0), FAILED),  # it may come to the same place, to save something
        (replace(MEETS, rank=0), MEETS),
        (replace(MEETS, rank=0), waits(1, 5, 5)),
        (waits(0, 6, 5), waits(1, 5, 5)),  # that one waits for a slow transfer
        (waits(0, 6, 5), waits(1, 5, 6)),  # ahead of each other, but both for what is on its way
        (waits(0, 6, 5), waits(1, 5, 6, 1, sequences={"others": 5})),  # in no group of this one
    ],
)
def test_a_wait_that_may_end_is_not_given_up(mine: Report, other: Report) -> None:
    assert not hopeless(mine, [other])
