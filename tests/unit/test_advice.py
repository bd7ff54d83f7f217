"""The report's advice, from hand-made traces: each situation gets its own remedy."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from internsp.app.report import advice
from internsp.app.report.advice import advise
from internsp.base.trace import Event
from internsp.config import WeightParallelConfig
from internsp.mesh import MeshShape

MIB = 1 << 20


def event(
    kind: str, start: float, end: float | None = None, unit: str = "", phase: str = "",
    nbytes: int = 0, weight: str = "w",
) -> Event:  # fmt: skip
    return Event(kind, unit, weight, phase, start, start if end is None else end, nbytes)


def step(gathers: dict[str, tuple[float, float, float]], end: float = 10.0) -> list[Event]:
    """Blocks used one after another: unit -> (launch of its gather, arrival, time of first use)."""
    events = []
    for unit, (launch, arrival, wanted) in gathers.items():
        events.append(event("AG", launch, arrival, unit, "forward", MIB))
        if arrival > wanted:
            events.append(event("WAIT", wanted, arrival, unit, "forward"))
        events.append(event("USE", max(arrival, wanted), unit=unit, phase="forward"))
    return [*events, event("STEP", end, end, weight="")]


def setting(
    weight: int = 2, sequence: int = 1, zero: int = 1, micro_batches: int = 1, **values: Any
) -> tuple[WeightParallelConfig, MeshShape, int, int]:
    """The arguments of ``advise`` behind the traces."""
    weights = WeightParallelConfig(**values.pop("weights", {}))
    shape = MeshShape(weight * sequence * zero, weight=weight, sequence=sequence, zero=zero)
    return weights, shape, micro_batches, 8


def the_only(sentences: list[str]) -> str:
    assert len(sentences) == 1, sentences
    return sentences[0]


LATE = step({"layers.0": (0, 0.02, 0), "layers.1": (2, 4, 3), "layers.2": (5, 7, 6)})


def test_late_gathers_name_the_worst_block_and_a_deeper_prefetch() -> None:
    text = the_only(advise({0: LATE}, *setting()))
    assert text.startswith("Gathers start too late: blocks waited 2 s")
    assert "most layers.1 in forward (1 s)" in text
    assert "prefetch_depth = 2 (one more slot)" in text
    assert 'gather_before = "qkv"' in text
    assert "the link was free for 5.98 s" in text


def test_remedies_that_are_taken_already_are_not_advised() -> None:
    taken = {"prefetch_depth": 7, "gather_before": "qkv", "granularity": "module"}
    text = the_only(advise({0: LATE}, *setting(weights=taken)))
    assert "prefetch_depth" not in text, "there are no more blocks to gather ahead"
    assert "gather_before" not in text


def test_a_link_that_is_always_busy_is_too_slow_for_this_size() -> None:
    events = step({f"layers.{i}": (2 * i, 2 * i + 2, 2 * i + 0.5) for i in range(5)})
    text = advise({0: events, 1: events}, *setting(weight=4, micro_batches=2))[0]
    assert text.startswith("The link is too slow for this size: 5.0 MiB")
    assert "in flight for 10 s (512.0 KiB/s)" in text
    assert "2.5 s of compute" in text
    assert "4 times as long" in text
    assert 'keep_unsharded = "all"' in text
    assert 'accumulation = "full"' in text
    assert 'keep_unsharded (now "none")' in text
    assert "parallel.weight = 2, which sends 33% less" in text
    assert not any("too late" in t for t in advise({0: events}, *setting()))


def test_ways_that_do_not_exist_are_left_out_of_them() -> None:
    events = step({f"layers.{i}": (2 * i, 2 * i + 2, 2 * i + 0.5) for i in range(5)})
    one = advise({0: events}, *setting())[0]
    assert 'keep_unsharded = "all"' not in one, "with one micro-batch nothing is kept"
    assert "parallel.weight =" not in one, "a group of two has no smaller one that still cuts"
    assert "parallel.weight =" not in advise({0: events}, *setting(weight=5))[0], "no half divides"
    kept = setting(micro_batches=2, weights={"keep_unsharded": "all"})
    assert "keep_unsharded" not in advise({0: events}, *kept)[0], "all of them are kept"
    assert "accumulation" not in one


def test_without_overlap_the_first_advice_is_to_turn_it_on() -> None:
    text = the_only(advise({0: LATE}, *setting(weights={"overlap": False})))
    assert text.startswith("Set weight_parallel.overlap = true")
    assert "2.02 s of a step of 10 s" in text


def test_the_first_gather_cannot_be_hidden_only_paid_less_often() -> None:
    events = step({"layers.0": (0, 1, 0), "layers.1": (2, 3, 4)})
    text = the_only(advise({0: events}, *setting()))
    assert text == (
        "Some communication has nothing to hide behind: the first gathers of a forward 1 s. More "
        "tokens or micro-batches in a step make that matter less."
    )


def test_gradients_waited_for_within_backward_and_after_it_are_told_apart() -> None:
    events = [
        event("USE", 0, unit="layers.2", phase="backward"),
        event("RS", 1, 4, "layers.2", "backward", MIB),
        event("WAIT", 3, 4, "layers.2", "finish"),
        event("USE", 6, unit="layers.0", phase="backward"),
        event("RS", 8, 10, "layers.0", "backward", MIB),
        event("WAIT", 8.5, 10, "layers.0", "finish"),
    ]
    after, inside = advise({0: events}, *setting(weights={"reductions_in_flight": 3}, zero=2))
    assert "nothing to hide behind: the last gradients of backward 1.5 s. More tokens" in after
    assert "fewer ranks in parallel.optimizer_ranks (now 2)" in after
    assert inside.startswith("Backward waited 1 s for gradients")
    assert "no more than 3 blocks'" in inside
    assert "reductions_in_flight = 4" in inside


def test_exchanges_name_their_block_and_leave_the_link_to_them() -> None:
    events = [
        event("A2A", 1, 3, "layers.1", "backward", MIB),
        event("A2A_WAIT", 1, 3, "layers.1", "backward"),
        event("USE", 10, unit="layers.1", phase="backward"),
        event("USE", 0, unit="layers.1", phase="forward"),
    ]
    text = the_only(advise({0: events}, *setting(sequence=4, weights={"gather_before": "qkv"})))
    assert "waited for 2 s, most in layers.1 in backward" in text
    assert "parallel.sequence from 4" in text
    assert 'gather_before = "out_proj"' in text


def test_parameters_on_their_way_are_the_optimizers() -> None:
    events = [
        event("PUBLISH", 0, 2, "bucket", "step", MIB, ""),
        event("WAIT", 1, 2, "bucket", "publish", 0, ""),
        event("USE", 10, unit="layers.1", phase="forward"),
    ]
    text = the_only(advise({0: events}, *setting(zero=8)))
    assert "new parameters from the optimizer 1 s. More" in text
    assert "parallel.optimizer_ranks (now 8)" in text


def test_a_slow_rank_comes_first_and_is_named() -> None:
    fast = [event("WAIT", 4, 10, "layers.1", "forward"), event("USE", 0, unit="layers.1")]
    slow = [event("USE", 0, unit="layers.1"), event("USE", 10, unit="layers.1")]
    text = advise({0: fast, 3: slow}, *setting())[0]
    assert text.startswith("Rank 3 computes 6 s longer than rank 0")


def test_means_are_taken_over_the_ranks() -> None:
    one, two = advise({0: LATE, 1: LATE}, *setting()), advise({0: LATE}, *setting())
    assert one == two
    other = step({"layers.0": (0, 0.02, 0), "layers.1": (2, 4, 3), "layers.2": (5, 9, 6)})
    (late,) = [t for t in advise({0: LATE, 1: other}, *setting()) if t.startswith("Gathers start")]
    assert "most layers.2 in forward (2 s)" in late, "of 1 s on one rank and 3 s on the other"


def test_a_step_that_hides_everything_has_nothing_to_change() -> None:
    events = step({"layers.0": (0, 0.01, 0), "layers.1": (2, 3, 4)})
    text = the_only(advise({0: events}, *setting()))
    assert text.startswith("Nothing to change: computing stood")
    assert "0.1%" in text
    assert advise({}, *setting()) == advise({0: []}, *setting()) == []


TIMES = st.integers(0, 20).map(lambda tenths: tenths / 10)
EVENTS = st.lists(
    st.builds(
        lambda kind, start, length, unit, phase: event(kind, start, start + length, unit, phase, 8),
        st.sampled_from(
            ["AG", "RS", "A2A", "PUBLISH", "WAIT", "A2A_WAIT", "USE", "STEP", "FINISH"]
        ),
        TIMES,
        TIMES,
        st.sampled_from(["", "embed", "layers.0", "layers.1"]),
        st.sampled_from(["", "forward", "recompute", "backward", "finish", "publish", "settle"]),
    ),
    max_size=12,
)


@pytest.mark.thorough(1)
@given(EVENTS, EVENTS, st.booleans(), st.integers(1, 4), st.integers(1, 4))
def test_whatever_was_traced_there_is_a_sentence_or_nothing_to_say(
    one: list[Event], two: list[Event], overlap: bool, weight: int, sequence: int
) -> None:
    chosen = setting(weights={"overlap": overlap}, weight=weight, sequence=sequence)
    sentences = advise({0: one, 1: two}, *chosen)
    assert bool(sentences) == bool(one or two)
    assert all(text.endswith(".") and "nan" not in text for text in sentences), sentences


def test_the_most_seconds_at_stake_come_first() -> None:
    events = [
        *step({"layers.0": (0, 1, 0), "layers.1": (2, 5.5, 3)}),
    ]
    first, second = advise({0: events}, *setting())
    assert first.startswith("Gathers start too late")
    assert second.startswith("Some communication has nothing to hide behind")


def test_a_pipelines_bubble_is_told_and_what_shrinks_it() -> None:
    first = [
        event("FORWARD", 0, 2, "stage 0, micro-batch 0"),
        event("BACKWARD", 6, 10, "stage 0, micro-batch 0", "full"),
    ]
    last = [
        event("FORWARD", 3, 4, "stage 1, micro-batch 0"),
        event("BACKWARD", 4, 5, "stage 1, micro-batch 0", "full"),
    ]
    ends = [event("STEP", 10, 10, weight="")]
    told = [t for t in advise({0: first + ends, 1: last + ends}, *setting()) if "stages" in t]
    assert the_only(told).startswith("Ranks had no pass to run for 2 s between their first")
    assert "train.micro_batches" in told[0]
    whole = [event("FORWARD", 0, 2), event("BACKWARD", 6, 10, phase="full")]
    assert not [t for t in advise({0: whole + ends}, *setting()) if "stages" in t]


def test_the_page_about_the_report_explains_each_advice() -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "read_the_report.md"
    begins = re.findall(r"^\| \*([^*]+)\* \|", page.read_text(), re.MULTILINE)
    source = inspect.getsource(advice)
    assert len(begins) == source.count("yield Advice(") + 1
    for words in begins:
        for part in words.split("..."):
            assert part.strip() in source, words
