"""What a pipeline needs of a communicator: shared slots, and shape inference.

Zero-bubble schedules (arXiv 2401.10241) split a backward into an input backward (B), which computes
input gradients, and a later weight backward (W). The stage tells the communicator which of the two
runs, since nothing in the autograd graph distinguishes them from a user's own
``torch.autograd.grad``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from internsp.wp.communicator import ISPCommunicator


def shared_slot_storages(communicator: ISPCommunicator) -> set[int]:
    """Storages (``data_ptr``) of the slots that several blocks share by overwriting each other."""
    users = Counter(unit.slot for unit in communicator.blocks)
    slots = [slot for slot in communicator.state.pool.slots if users[slot.index] > 1]
    return set().union(*(slot.storages() for slot in slots))


@contextmanager
def shape_inference(communicator: ISPCommunicator) -> Iterator[None]:
    """Context for torch's shape inference, whose forward is not part of a step.

    It leaves no gradients, counters, trace events or slot contents behind.
    """
    state = communicator.state
    counters, enabled, seconds = (
        replace(state.collectives.counters), state.trace.enabled, state.trace.exposed_seconds
    )  # fmt: skip
    state.trace.enabled = False
    communicator.events.begin_backward_part(weights=False)
    try:
        yield
    finally:
        communicator.events.end_backward_part()
        communicator.state.invalidate_slots()
        vars(state.collectives.counters).update(vars(counters))
        state.trace.enabled, state.trace.exposed_seconds = enabled, seconds
