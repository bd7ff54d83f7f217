"""Pure: a chunk whose blocks run in another order than declared, as a first step has shown it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from internsp.plan.chunk import ChunkPlan
from internsp.wp.schedule import Policy, slot_sizes


def in_order(plan: ChunkPlan, order: Sequence[int]) -> ChunkPlan:
    """``plan`` with its blocks in the order in which they run.

    Args:
        order: indices of declared blocks; some may be missing, some recur, none twice in a row.
    """
    slots = slots_in(order, plan.policy)
    moved = {unit: replace(unit, slot=slots[unit.block]) for unit in plan.blocks}
    return replace(plan, blocks=tuple(moved.values()), order=tuple(order))


def slots_in(order: Sequence[int], policy: Policy) -> list[int]:
    """The slot of each declared block, where they run in ``order``: as many slots as before.

    A block that runs twice has one slot all the same, since what its first run saved lies there.
    Of the shared slots it gets one that no block has which comes within ``policy.depth`` of it, so
    that it can be gathered ahead, or where there is none the one that the fewest of these have.
    """
    slots = [policy.slot(block) for block in range(policy.blocks)]
    moving = [block for block in order if block not in policy.kept]
    shared = len(slot_sizes([0] * policy.blocks, policy.depth, policy.kept)) - len(policy.kept)
    last = [-1 - slot for slot in reversed(range(shared))]  # which place of the order had it last
    chosen: dict[int, int] = {}
    for place, block in enumerate(moving):
        if block not in chosen:
            near = [
                other
                for at, one in enumerate(moving)
                if one == block
                for other in moving[max(at - policy.depth, 0) : at + policy.depth + 1]
            ]
            taken = [chosen[other] for other in near if other in chosen]
            chosen[block] = min(range(shared), key=lambda slot: (taken.count(slot), last[slot]))
        last[chosen[block]] = place
    for block, slot in chosen.items():
        slots[block] = slot
    return slots
