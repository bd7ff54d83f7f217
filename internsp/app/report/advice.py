"""Advice on settings, from the measured times of one traced step.

:func:`advise` is a pure function from the events of each rank and the step's settings to sentences,
the one with the most seconds to gain first. A sentence names the block and the phase in which the
computing thread waited, and what would hide or avoid that communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from internsp.app.report.timeline import (
    Interval,
    intersect,
    mean_waits,
    measure,
    spans,
    step_times,
    subtract,
)
from internsp.app.report.timeline import (
    human_seconds as _ms,
)
from internsp.base.sizes import human
from internsp.base.trace import Event
from internsp.config import WeightParallelConfig
from internsp.config.words import in_words
from internsp.mesh import MeshShape

Traces = Mapping[int, Sequence[Event]]

NOTICED = 0.02
"""Share of a step from which exposed communication, or a difference between ranks, is mentioned."""

FULL = 0.95
"""If weights are in flight for this share of compute, no more communication can be hidden."""

_PASSES = ("forward", "recompute", "backward")


class Advice(NamedTuple):
    """A sentence, and the seconds of a step that could be gained."""

    seconds: float
    text: str


def advise(
    traces: Traces, weights: WeightParallelConfig, shape: MeshShape, micro_batches: int, blocks: int
) -> list[str]:
    """Advice, most seconds first; a single sentence if nothing is worth changing.

    Args:
        traces: rank -> its events of one step; ranks without events are ignored.
        micro_batches: those of the step.
        blocks: transformer blocks of the model.
    """
    traced = {rank: list(events) for rank, events in sorted(traces.items()) if events}
    if not traced:
        return []
    step = _Step(traced, weights, shape, micro_batches, blocks)
    found = [*_uneven(step), *_stages(step)]
    if step.exposed > NOTICED * step.seconds:
        found += _synchronous(step)
        if weights.overlap:
            found += [*_full_link(step), *_late_gathers(step), *_reductions(step)]
        found += [*_unhidden(step), *_exchanges(step)]
    if worth := [a for a in found if a.seconds > NOTICED / 2 * step.seconds]:
        return [a.text for a in sorted(worth, key=lambda a: -a.seconds)]
    share = step.exposed / step.seconds if step.seconds > 0 else 0.0
    return [
        f"Nothing to change: computing stood still for {share:.1%} of the step, and no single "
        "wait is long enough to be worth a setting."
    ]


class _Step:
    """A step: what it was traced of, and its times in seconds, as means over the ranks.

    Attributes:
        seconds: of the step.
        computes: compute of each rank.
        in_flight: time in which weights or gradients were in flight.
        nbytes: payload of these collectives.
        waits: seconds waited by kind, unit and phase, longest first.
        late, first: waits for gathers by unit and phase, longest first; ``first`` has those that
            were launched in a forward before any weight was used.
    """

    def __init__(
        self, traces: Traces, weights: WeightParallelConfig, shape: MeshShape,
        micro_batches: int, blocks: int,
    ) -> None:  # fmt: skip
        self.traces, self.weights, self.shape = traces, weights, shape
        self.micro_batches, self.blocks = micro_batches, blocks
        times = {rank: step_times(events) for rank, events in traces.items()}
        self.seconds = fmean(one.step for one in times.values())
        self.exposed = fmean(one.exposed for one in times.values())
        self.computes = {rank: one.compute for rank, one in times.items()}
        self.compute = fmean(self.computes.values())
        sent = ("AG", "RS")
        self.in_flight = fmean(measure(spans(events, sent)) for events in traces.values())
        nbytes = (e.nbytes for events in traces.values() for e in events if e.kind in sent)
        self.nbytes = sum(nbytes) / len(traces)
        self.waits = dict(sorted(mean_waits(traces).items(), key=lambda item: -item[1]))
        events = next(iter(traces.values()))
        used = min((e.start for e in events if e.kind == "USE"), default=math.inf)
        before = {(e.unit, "forward") for e in events if e.kind == "AG" and e.start < used}
        gathers = {at: seconds for at, seconds in self.waited("AG").items() if at[1] in _PASSES}
        self.first = {at: seconds for at, seconds in gathers.items() if at in before}
        self.late = {at: seconds for at, seconds in gathers.items() if at not in before}

    def waited(self, kind: str) -> dict[tuple[str, str], float]:
        """Waits of a kind by unit and phase, longest first."""
        return {
            (unit, phase): seconds
            for (k, unit, phase), seconds in self.waits.items()
            if k == kind and seconds > 0
        }


def _uneven(step: _Step) -> Iterator[Advice]:
    """A rank that computes longer makes the others wait; no communication setting helps."""
    compute = step.computes
    slow, fast = max(compute, key=lambda r: compute[r]), min(compute, key=lambda r: compute[r])
    gap = compute[slow] - compute[fast]
    if gap <= max(NOTICED * step.seconds, 0.1 * step.compute):
        return
    yield Advice(
        gap,
        f"Rank {slow} computes {_ms(gap)} longer than rank {fast}, and the ranks wait for each "
        "other: even out the work (documents and valid tokens of each rank, other programs on "
        "its processor) before touching communication.",
    )


def _stages(step: _Step) -> Iterator[Advice]:
    """Time in which a pipeline's rank had no pass to run: the bubble, or a slow stage."""
    waiting = 0.0
    for events in step.traces.values():
        staged = [e for e in events if e.unit.startswith("stage ")]
        passes = spans(staged, ("FORWARD", "BACKWARD"))
        if passes:
            first_to_last = (min(start for start, _ in passes), max(end for _, end in passes))
            waiting += measure(subtract([first_to_last], passes)) / len(step.traces)
    if waiting <= 0:
        return
    yield Advice(
        waiting,
        f"Ranks had no pass to run for {_ms(waiting)} between their first and their last one "
        f"({waiting / step.seconds:.0%} of a step): they waited for other stages. More "
        "train.micro_batches make that matter less, and so do schedules with more chunks or "
        "a split backward, whose times internsp plan compares (pipeline.schedule).",
    )


def _synchronous(step: _Step) -> Iterator[Advice]:
    if step.weights.overlap or step.shape.weight == 1:
        return
    yield Advice(
        step.exposed,
        f"Set weight_parallel.overlap = true: it is off, so every gather and every reduction "
        f"is waited for at once ({_ms(step.exposed)} of a step of {_ms(step.seconds)}).",
    )


def _full_link(step: _Step) -> Iterator[Advice]:
    """Weights and gradients are in flight for longer than there is compute to hide them."""
    at_stake = step.in_flight - step.compute
    if step.shape.weight == 1 or step.in_flight <= 0 or step.in_flight < FULL * step.compute:
        return
    waiting = sum(seconds for (kind, _, _), seconds in step.waits.items() if kind in ("AG", "RS"))
    rate = step.nbytes / step.in_flight
    longer = step.in_flight / step.compute if step.compute > 0 else float("inf")
    ways = [f"a micro-batch or sequences {longer:.2g} times as long or more"]
    if step.micro_batches > 1 and step.weights.keep_unsharded != "all":
        ways.append(
            'weight_parallel.keep_unsharded = "all", which gathers once for all '
            f"{step.micro_batches} micro-batches and needs a slot for every block"
        )
    if step.micro_batches > 1 and step.weights.accumulation == "sharded":
        ways.append(
            'weight_parallel.accumulation = "full", which reduces once for all micro-batches and '
            "keeps unsharded gradients until then"
        )
    if step.weights.keep_unsharded != "all":
        now = in_words(step.weights.keep_unsharded or "none")
        ways.append(
            f"more blocks in weight_parallel.keep_unsharded (now {now}), which are gathered once "
            "a step, as far as memory allows"
        )
    if step.shape.weight > 2 and step.shape.weight % 2 == 0:
        fewer = step.shape.weight // 2
        saved = 1 - (fewer - 1) / fewer * step.shape.weight / (step.shape.weight - 1)
        ways.append(
            f"parallel.weight = {fewer}, which sends {saved:.0%} less for twice the shards and "
            "may keep the group on one machine's faster links"
        )
    yield Advice(
        max(at_stake, waiting),
        f"The link is too slow for this size: {human(step.nbytes)} of weights and gradients "
        f"were in flight for {_ms(step.in_flight)} ({human(rate)}/s), and there are "
        f"{_ms(step.compute)} of compute to hide them behind. What helps: "
        f"{'; '.join(ways)}.",
    )


def _late_gathers(step: _Step) -> Iterator[Advice]:
    """All-gathers start too late: blocks wait although the link is sometimes free."""
    total = sum(step.late.values())
    if not step.late or step.in_flight >= FULL * step.compute:
        return
    (unit, phase), worst = next(iter(step.late.items()))
    ways: list[str] = []
    depth = step.weights.prefetch_depth
    if depth + 1 < step.blocks:
        ways.append(f"weight_parallel.prefetch_depth = {depth + 1} (one more slot)")
    weights = step.weights
    if weights.gather_before in ("out_proj", "mlp") and not weights.gather_before_modules:
        ways.append(
            'weight_parallel.gather_before = "qkv" (the block\'s entry'
            + (", where the all-to-alls want the link too)" if step.shape.sequence > 1 else ")")
        )
    if step.weights.granularity == "block":
        ways.append("more, smaller blocks in a slot's time: a longer sequence or micro-batch")
    yield Advice(
        total,
        f"Gathers start too late: blocks waited {_ms(total)} for their weights, most "
        f"{unit or 'a unit'} in {phase} ({_ms(worst)}), while the link was free for "
        f"{_ms(max(step.seconds - step.in_flight, 0.0))}. What helps: {'; '.join(ways)}.",
    )


def _reductions(step: _Step) -> Iterator[Advice]:
    """Waits within backward for reduce-scatters, at the limit of those in flight."""
    inside = fmean(measure(intersect(*_finishes(events))) for events in step.traces.values())
    if inside > 0 and step.in_flight < FULL * step.compute:
        limit = step.weights.reductions_in_flight
        yield Advice(
            inside,
            f"Backward waited {_ms(inside)} for gradients of earlier blocks because no more "
            f"than {limit} blocks' may be in flight: weight_parallel.reductions_in_flight = "
            f"{limit + 1} lets it go on, for one more block of gradients in memory.",
        )


def _unhidden(step: _Step) -> Iterator[Advice]:
    """What no compute of the step can hide: its first gathers and its last reductions, and new
    parameters that come late."""
    published = sum(step.waited("PUBLISH").values())
    first = sum(step.first.values()) if step.weights.overlap else 0.0
    after = fmean(measure(subtract(*_finishes(events))) for events in step.traces.values())
    waited = {
        "the first gathers of a forward": first, "the last gradients of backward": after,
        "new parameters from the optimizer": published,
    }  # fmt: skip
    parts = ", ".join(f"{what} {_ms(seconds)}" for what, seconds in waited.items() if seconds > 0)
    if parts:
        yield Advice(
            sum(waited.values()),
            f"Some communication has nothing to hide behind: {parts}. More tokens or micro-batches "
            "in a step make that matter less"
            + (
                f", and so do fewer ranks in parallel.optimizer_ranks (now {step.shape.zero_size})."
                if step.shape.zero_size > 1
                else "."
            ),
        )


def _finishes(events: Sequence[Event]) -> tuple[list[Interval], list[Interval]]:
    """Waits for reductions, and the time until the last weight was used."""
    last = max((e.start for e in events if e.kind == "USE"), default=0.0)
    return spans([e for e in events if e.phase == "finish"], ("WAIT",)), [(0.0, last)]


def _exchanges(step: _Step) -> Iterator[Advice]:
    """Attention needs the complete all-to-all, so only other compute can hide it."""
    waited = step.waited("A2A")
    total = sum(waited.values())
    if not waited or step.shape.sequence == 1:
        return
    (unit, phase), worst = next(iter(waited.items()))
    text = (
        f"Sequence all-to-alls were waited for {_ms(total)}, most in {unit or 'attention'} in "
        f"{phase} ({_ms(worst)}): keep each sequence group on the fastest links, or lower "
        f"parallel.sequence from {step.shape.sequence} where memory allows"
    )
    if step.weights.gather_before == "qkv":
        text += '; weight_parallel.gather_before = "out_proj" leaves them the link'
    yield Advice(total, text + ".")
