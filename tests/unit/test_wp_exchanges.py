"""When replicas exchange reduced gradients: one order, each once, complete, within a limit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from internsp.schedule.chunk import WeightLayout
from internsp.schedule.reductions import Exchanges, Reductions
from internsp.schedule.terms import (
    EXCHANGE,
    FINISH_EXCHANGE,
    FINISH_OLDEST,
    REDUCE_SCATTER,
    Action,
    Parcel,
    Unit,
)

UNITS = 5


def made(limit: int = 2) -> tuple[Reductions[WeightLayout], list[Parcel[WeightLayout]]]:
    """One unit with two weights in a parcel of one byte; no limit on reductions in flight."""
    parcels = [
        Parcel(f"u{unit}", tuple(WeightLayout(f"u{unit}.w{i}", 0, 8, 0, 0) for i in (0, 1)), 1)
        for unit in range(UNITS)
    ]
    reductions: Reductions[WeightLayout] = Reductions(limit=1000)
    reductions.exchanges.declare(parcels, limit)
    return reductions, parcels


def backward(
    reductions: Reductions[WeightLayout], parcels: list[Parcel[WeightLayout]], early: bool
) -> list[Action[WeightLayout]]:
    out: list[Action[WeightLayout]] = []
    reductions.exchanges.begin(early)
    for parcel in parcels:
        unit = Unit(parcel.name, parcel.weights)
        for weight in parcel.weights:
            reductions.launch(unit, (weight,), out, last=True)
    return out


def names(actions: list[Action[WeightLayout]]) -> list[str]:
    return [a.parcel.name for a in actions if a.parcel is not None]


def test_a_parcel_leaves_when_the_second_unit_behind_it_is_reduced() -> None:
    reductions, parcels = made()
    out = backward(reductions, parcels, early=True)
    assert names(out) == ["u0", "u1", "u2"]
    for parcel in parcels[:3]:
        at = next(i for i, a in enumerate(out) if a.kind == EXCHANGE and a.parcel is parcel)
        for kind, before in ((FINISH_OLDEST, True), (REDUCE_SCATTER, True)):
            found = [
                i for i, a in enumerate(out) if a.kind == kind and a.weights[0] in parcel.weights
            ]
            assert len(found) == 2
            assert all((i < at) == before for i in found), "complete"
        two_on = next(
            i for i, a in enumerate(out)
            if a.kind == REDUCE_SCATTER
            and a.weights[0] in parcels[parcels.index(parcel) + 2].weights
        )  # fmt: skip
        assert at < two_on


@settings(max_examples=60)
@given(st.lists(st.booleans(), min_size=1, max_size=4), st.integers(0, 3))
def test_the_order_does_not_depend_on_how_early_exchanges_start(
    backwards: list[bool], limit: int
) -> None:
    """For any expected number of backwards; a wrong expectation exchanges the rest again."""
    reductions, parcels = made(limit)
    out: list[Action[WeightLayout]] = []
    for early in backwards:
        out += backward(reductions, parcels, early)
        out += reductions.finish()
    out += reductions.complete()
    order = [parcel.name for parcel in parcels]
    found = names(out)
    assert found[: len(order)] == order
    wrong = [a for a in order if found.count(a) > 1]
    assert found[len(order) :] == wrong, "again, once, in the same order"
    if True in backwards[:-1]:  # what had left by then was reduced once more
        assert wrong[:3] == order[:3]
    else:
        assert not wrong
    flying = most = 0
    for action in out:
        flying += (action.kind == EXCHANGE) - (action.kind == FINISH_EXCHANGE)
        most = max(most, flying)
        assert flying >= 0
    assert not flying
    assert most <= max(limit, 1)
    # Each step starts fresh.
    again = [*backward(reductions, parcels, True), *reductions.complete()]
    assert names(again) == order


def test_a_frozen_weight_is_not_waited_for_and_one_with_more_to_come_is() -> None:
    frozen, due = (WeightLayout(n, 0, 8, 0, 0, trainable=t) for n, t in (("a", False), ("b", True)))
    exchanges: Exchanges[WeightLayout] = Exchanges()
    exchanges.declare([Parcel("one", (frozen, due), 1)], 1)
    exchanges.begin(True)
    out: list[Action[WeightLayout]] = []
    exchanges.reduced((due,), last=False)
    exchanges.finished((due,))
    exchanges.advance(out)
    assert not out
    exchanges.reduced((due,), last=True)
    exchanges.advance(out)
    assert not out, "in flight"
    exchanges.finished((due,))
    exchanges.advance(out)
    assert names(out) == ["one"]


def test_nothing_is_left_after_a_failure() -> None:
    reductions, parcels = made()
    backward(reductions, parcels, early=True)
    reductions.reset()
    assert names(backward(reductions, parcels, early=False)) == []
    assert names(reductions.complete()) == [parcel.name for parcel in parcels]
