"""Pure arithmetic of the benchmark: byte laws, rates, and the time of a step of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction

from tools.bench.bounds import MBIT

HYBRID = 2  # ranks of a weight group of FSDP2 in its hybrid form


def passes(layers: int, slots: int = 2, micro_batches: int = 1) -> Fraction:
    """Passes of all block weights over the link in a step, of the least that ``slots`` allow.

    A gather for forward, a gather for backward and a reduction: three passes a micro-batch, less
    the blocks that a pass leaves unsharded in the slots for the next one: ``3 - slots / layers`` of
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

    DDP keeps all weights unsharded and reduces once a step: two passes. FSDP2 reshards after every
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


def step_seconds(starts: Sequence[float], ends: Sequence[Sequence[float]]) -> list[float]:
    """Duration of each step of all ranks together, from stamps of one shared clock.

    Args:
        starts: of each rank, when it left the barrier before the first step.
        ends: of each rank, the end of each step.
    """
    marks = [max(starts)] + [max(column) for column in zip(*ends, strict=True)]
    return [after - before for before, after in itertools.pairwise(marks)]
