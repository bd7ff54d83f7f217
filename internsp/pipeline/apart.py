"""A backward in two parts, and a pass that leaves no trace: what a pipeline asks of a communicator.

Zero-bubble schedules (arXiv 2401.10241) compute input gradients first and weight gradients later.
The stage marks the parts, since nothing in the autograd graph tells them from a user's own
``torch.autograd.grad``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from internsp.wp.isp import ISPCommunicator
from internsp.wp.pending import Split
from internsp.wp.shard import ShardedWeight


def birth_order(communicator: ISPCommunicator) -> list[ShardedWeight]:
    """Cut weights in the order in which a weight part computes their gradients."""
    return list(reversed(communicator.small.sharded))


def overwritten(communicator: ISPCommunicator) -> set[int]:
    """Storages of the slots that several blocks take by turns, as ``data_ptr``."""
    users = Counter(unit.slot for unit in communicator.blocks)
    slots = [slot for slot in communicator.state.pool.slots if users[slot.index] > 1]
    return set().union(*(slot.storages() for slot in slots))


def begin_part(communicator: ISPCommunicator, weights: bool) -> None:
    """One part of a backward begins.

    A weight part gathers nothing. The loss computes its logits again there, but the head has a slot
    of its own, in which they are still from the forward: another version of the head would be
    refused (WP-14).

    Args:
        weights: the weight gradients; else those of the chunk's inputs.
    """
    communicator.recovery.check()
    state, head = communicator.state, communicator.head
    beside = [(outer, outer.unit) for outer in communicator.outer()]
    units = {w: u for u in (*communicator.blocks, *(u for _, u in beside)) for w in u.weights}
    if head is not None:
        units |= dict.fromkeys(head.unit.weights, head.unit)
    order = [(units[w], w) for w in birth_order(communicator) if w.requires_grad]
    state.split = Split(weights, order, communicator.reduce)
    communicator.small.apart = weights


def end_part(communicator: ISPCommunicator) -> None:
    """It is over; after the weights' own, gradients are as after any backward."""
    split, communicator.state.split = communicator.state.split, None
    communicator.small.apart = False
    if split is not None and split.weights:
        split.close()
        communicator.finish_backward()


@contextmanager
def rehearsal(communicator: ISPCommunicator) -> Iterator[None]:
    """Whatever runs inside leaves no trace: no gradient, no count, no event, nothing in a slot."""
    state = communicator.state
    counters, enabled, seconds = (
        replace(state.counters), state.trace.enabled, state.trace.exposed_seconds
    )  # fmt: skip
    state.trace.enabled = False
    begin_part(communicator, weights=False)
    try:
        yield
    finally:
        end_part(communicator)
        communicator.forget_slots()
        vars(state.counters).update(vars(counters))
        state.trace.enabled, state.trace.exposed_seconds = enabled, seconds
