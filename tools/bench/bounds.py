"""Pure arithmetic of the benchmark: byte laws, rates, bounds, agreement, medians."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

MBIT = 125_000.0  # bytes per second
HYBRID = 2  # ranks of a weight group of FSDP2 in its hybrid form


def passes(layers: int, slots: int = 2, micro_batches: int = 1) -> Fraction:
    """Passes of all block weights over the link in a step, of the least that ``slots`` allow.

    A gather for forward, a gather for backward and a reduction: three passes a micro-batch, less
    the blocks that a pass leaves whole in the slots for the next one: ``3 - slots / layers`` of
    one micro-batch, ``(3L - 2) / L`` for two slots. Gradients are reduced in every micro-batch.
    """
    turns = 2 * micro_batches - 1  # forward to backward, and backward to the next forward
    return 3 * micro_batches - turns * Fraction(min(slots, layers), layers)


def least_bytes(
    weight_bytes: int, layers: int, ranks: int, slots: int = 2, micro_batches: int = 1
) -> float:
    """Bytes each rank must send in a step when unsharded weights take no more than ``slots``
    blocks.

    Args:
        weight_bytes: of all blocks' unsharded weights, in the dtype that travels.
    """
    share = Fraction(ranks - 1, ranks)
    return float(passes(layers, slots, micro_batches) * weight_bytes * share)


def own_least_bytes(family: str, forms: Iterable[str], weight_bytes: int, ranks: int,
                    layers: int, micro_batches: int = 1) -> float | None:
    """Bytes a variant must send under its own memory rule (``None``: it sends nothing).

    DDP keeps all weights whole and reduces once a step: two passes. FSDP2 reshards after every
    block: two gathers and a reduction a micro-batch; without resharding after forward one gather,
    with its last block kept a block's gather less, with unsharded gradients summed (``full``) one
    reduction a step. In groups of two (``hybrid``) the others' half of the weights travels, and
    once a step the sum of each shard's gradients among the ranks that hold the same one.
    """
    group = HYBRID if "hybrid" in forms else ranks
    one = weight_bytes * (group - 1) / group
    if family == "compute":
        return None
    if family == "ddp":
        return 2 * one
    if family == "ours":
        return least_bytes(weight_bytes, layers, ranks, micro_batches=micro_batches)
    gathers = 1.0 if "whole" in forms else 2.0 - ("last" in forms) / layers
    reductions = 1 if "full" in forms else micro_batches
    replicas = ranks // group
    between = 2 * weight_bytes / group * (replicas - 1) / replicas
    return (gathers * micro_batches + reductions) * one + between


def rate_for(ratio: float, nbytes: float, compute_seconds: float) -> float:
    """The rate in Mbit/s at which ``nbytes`` take ``ratio`` times ``compute_seconds``."""
    return nbytes / (ratio * compute_seconds) / MBIT


def ideal_seconds(compute_seconds: float, nbytes: float, rate_mbit: float | None) -> float:
    """``max(compute, bytes / rate)``; without a limit just compute."""
    if rate_mbit is None:
        return compute_seconds
    return max(compute_seconds, nbytes / (rate_mbit * MBIT))


@dataclass(frozen=True)
class Line:
    """One line of a schedule, as :class:`internsp.plan.chunk.Line` has it, which imports torch."""

    kind: str
    phase: str
    weight: str
    nbytes: int = 0


@dataclass(frozen=True)
class Played:
    """What :func:`play` found, in seconds."""

    step: float
    computing: float
    waiting: float
    link_busy: float


def play(
    lines: Sequence[Line], seconds: Mapping[tuple[str, str], float], rate_mbit: float,
    latency: float = 0.0,
) -> Played:
    """Play a schedule on one computing thread and one link that sends one message at a time.

    ``AG`` and ``RS`` enter the link in the order of launch and take ``nbytes / rate``; ``USE``
    computes; ``WAIT`` lasts until the last message launched for its weight has arrived. Every rank
    does the same at the same time and the link is full duplex, so one rank stands for all. It is a
    bound: nothing here costs processor time but the model itself.

    Args:
        seconds: compute time of a use, by ``(phase, weight)``.
        latency: seconds added to the arrival of each message.
    """
    now = free = waiting = computing = busy = 0.0
    arrives: dict[str, float] = {}
    for line in lines:
        if line.kind in ("AG", "RS"):
            took = line.nbytes / (rate_mbit * MBIT)
            free = max(free, now) + took
            busy += took
            arrives[line.weight] = free + latency
        elif line.kind == "WAIT":
            until = max(now, arrives.get(line.weight, now))
            waiting += until - now
            now = until
        elif line.kind == "USE":
            took = seconds.get((line.phase, line.weight), 0.0)
            computing += took
            now += took
    return Played(now, computing, waiting, busy)


def shares(numels: Mapping[str, int], phases: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Compute seconds of every use: each phase's total spread over weights by their size."""
    total = sum(numels.values())
    return {
        (phase, weight): seconds * numel / total
        for phase, seconds in phases.items()
        for weight, numel in numels.items()
    }


def disagreement(
    losses: Sequence[float], reference: Sequence[float], first: float = 2e-3, decrease: float = 0.05
) -> str | None:
    """Why two loss curves are not the same training, or ``None`` where they agree.

    The first loss tests weights, data and forward. What the loss has lost since tests gradients
    and their scale: summed where another averages, it is off by the number of ranks.

    Args:
        first: allowed relative difference of the first loss.
        decrease: allowed relative difference of the decrease since then (bf16 rounds it).
    """
    if not losses or len(losses) > len(reference):
        return f"{len(losses)} losses where the reference has {len(reference)}"
    start, expected = losses[0], reference[0]
    if not abs(start - expected) <= first * abs(expected):
        return f"first loss {start:.6g}, reference {expected:.6g}"
    for step in range(1, len(losses)):
        lost, should = start - losses[step], expected - reference[step]
        if not abs(lost - should) <= decrease * abs(should):
            return (
                f"the loss fell by {lost:.4g} in {step} steps, the reference's by {should:.4g}"
            )
    return None


def step_seconds(starts: Sequence[float], ends: Sequence[Sequence[float]]) -> list[float]:
    """Duration of each step of all ranks together, from stamps of one shared clock.

    Args:
        starts: of each rank, when it left the barrier before the first step.
        ends: of each rank, the end of each step.
    """
    marks = [max(starts)] + [max(column) for column in zip(*ends, strict=True)]
    return [after - before for before, after in itertools.pairwise(marks)]


@dataclass(frozen=True)
class Spread:
    """Median and range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median, and the quartiles (of fewer than four values: the extremes)."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)


def intersect(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Length of the overlap of two sets of intervals, each counted once."""
    total = 0.0
    for low, high in union(a):
        for other_low, other_high in union(b):
            total += max(0.0, min(high, other_high) - max(low, other_low))
    return total


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted, disjoint intervals that cover the same."""
    out: list[tuple[float, float]] = []
    for low, high in sorted(intervals):
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out
