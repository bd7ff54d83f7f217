"""Formulas of the benchmark: bytes, rates, and the time of a step of all ranks. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction

from tools.bench.bounds import MBIT

HYBRID = 2  # ranks of a weight group in FSDP2's hybrid form


def passes(layers: int, micro_batches: int = 1) -> Fraction:
    """How often all block weights cross the link in a step, at least, with two slots.

    An all-gather for forward, one for backward and a reduce-scatter: three times per micro-batch,
    less the two blocks that stay unsharded in the slots from one pass to the next: ``(3L - 2) / L``
    for one micro-batch. Gradients are reduced in every micro-batch.
    """
    turns = 2 * micro_batches - 1  # forward to backward, and backward to the next forward
    return 3 * micro_batches - turns * Fraction(min(2, layers), layers)


def least_bytes(weight_bytes: int, layers: int, ranks: int, micro_batches: int = 1) -> float:
    """Bytes each rank must send in a step if unsharded weights take no more than two blocks.

    Args:
        weight_bytes: of all blocks' unsharded weights, in the dtype that is sent.
    """
    share = Fraction(ranks - 1, ranks)
    return float(passes(layers, micro_batches) * weight_bytes * share)


def own_least_bytes(
    family: str,
    forms: Iterable[str],
    weight_bytes: int,
    ranks: int,
    layers: int,
    micro_batches: int = 1,
) -> float | None:
    """Bytes a variant must send in a step with its own memory use (``None``: it sends nothing).

    DDP keeps all weights unsharded and all-reduces once a step: twice the weights. FSDP2 reshards
    after every block: two all-gathers and a reduce-scatter per micro-batch; without resharding
    after forward one all-gather, with only its last block kept one block's all-gather less, with
    unsharded gradients summed (``full``) one reduce-scatter per step. In groups of two
    (``hybrid``) half of the weights is sent, and once a step each shard's gradient is summed over
    the ranks that hold it.
    """
    group = HYBRID if "hybrid" in forms else ranks
    one = weight_bytes * (group - 1) / group
    if family == "compute":
        return None
    if family == "ddp":
        return 2 * one
    if family == "ours":
        return least_bytes(weight_bytes, layers, ranks, micro_batches)
    gathers = 1.0 if "whole" in forms else 2.0 - ("last" in forms) / layers
    reductions = 1 if "full" in forms else micro_batches
    replicas = ranks // group
    between = 2 * weight_bytes / group * (replicas - 1) / replicas
    return (gathers * micro_batches + reductions) * one + between


def rate_for(ratio: float, nbytes: float, compute_seconds: float) -> float:
    """The rate in Mbit/s at which ``nbytes`` take ``ratio`` times ``compute_seconds``."""
    return nbytes / (ratio * compute_seconds) / MBIT


def ideal_seconds(compute_seconds: float, nbytes: float, rate_mbit: float | None) -> float:
    """``max(compute, bytes / rate)``; without a limit ``compute``."""
    if rate_mbit is None:
        return compute_seconds
    return max(compute_seconds, nbytes / (rate_mbit * MBIT))


def step_seconds(starts: Sequence[float], ends: Sequence[Sequence[float]]) -> list[float]:
    """Duration of each step over all ranks, from times on one shared clock.

    Args:
        starts: for each rank, when it left the barrier before the first step.
        ends: for each rank, the end of each step.
    """
    marks = [max(starts)] + [max(column) for column in zip(*ends, strict=True)]
    return [after - before for before, after in itertools.pairwise(marks)]
