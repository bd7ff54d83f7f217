"""A chunk whose blocks run in another order than declared, as recorded in a first step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.terms import Policy


def with_run_order(plan: ChunkLayout, order: Sequence[int]) -> ChunkLayout:
    """``plan`` with its blocks in the order in which they run.

    Args:
        order: indices of declared blocks; some may be missing, some repeated, none twice in a row.
    """
    slots = slots_for_order(order, plan.policy)
    moved = {unit: replace(unit, slot=slots[unit.block]) for unit in plan.blocks}
    return replace(plan, blocks=tuple(moved.values()), order=tuple(order))


def slots_for_order(order: Sequence[int], policy: Policy) -> list[int]:
    """The slot of each declared block, where blocks run in ``order``: as many slots as before.

    A block that runs twice has one slot all the same, since what its first run saved for backward
    are views of that slot. Each block gets a shared slot that no block within ``policy.depth``
    of it has, so that it can be prefetched; or else the slot that the fewest of those blocks have.
    """
    slots = [policy.slot(block) for block in range(policy.blocks)]
    moving = [block for block in order if block not in policy.kept]
    shared = policy.slots - len(policy.kept)
    # For each slot, the position in the order of the last block that had it.
    last = [-1 - slot for slot in reversed(range(shared))]
    chosen: dict[int, int] = {}
    for position, block in enumerate(moving):
        if block not in chosen:
            near = [
                other
                for at, one in enumerate(moving)
                if one == block
                for other in moving[max(at - policy.depth, 0) : at + policy.depth + 1]
            ]
            taken = [chosen[other] for other in near if other in chosen]
            chosen[block] = min(range(shared), key=lambda slot: (taken.count(slot), last[slot]))
        last[chosen[block]] = position
    for block, slot in chosen.items():
        slots[block] = slot
    return slots
