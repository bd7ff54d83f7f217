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

from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import ShardedParameter


def grad_ready_order(communicator: ISPCommunicator) -> list[ShardedParameter]:
    """Cut weights in the order in which a weight part computes their gradients."""
    return list(reversed(communicator.replicated.sharded))


def overwritten(communicator: ISPCommunicator) -> set[int]:
    """Storages of the slots that several blocks take by turns, as ``data_ptr``."""
    users = Counter(unit.slot for unit in communicator.blocks)
    slots = [slot for slot in communicator.state.pool.slots if users[slot.index] > 1]
    return set().union(*(slot.storages() for slot in slots))


@contextmanager
def rehearsal(communicator: ISPCommunicator) -> Iterator[None]:
    """Whatever runs inside leaves no trace: no gradient, no count, no event, nothing in a slot."""
    state = communicator.state
    counters, enabled, seconds = (
        replace(state.counters), state.trace.enabled, state.trace.exposed_seconds
    )  # fmt: skip
    state.trace.enabled = False
    communicator.begin_part(weights=False)
    try:
        yield
    finally:
        communicator.end_part()
        communicator.forget_slots()
        vars(state.counters).update(vars(counters))
        state.trace.enabled, state.trace.exposed_seconds = enabled, seconds
