"""Pure: which blocks of a chunk stay whole until the optimizer step, and which slot each block has.

Resident blocks have slots of their own and are gathered once an optimizer step. All others share
``depth + 1`` slots, and take them by turns *among themselves*: a block's slot is fixed (saved views
alias it), and the blocks next to it in that order never have the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def spread(blocks: int, count: int) -> tuple[int, ...]:
    """``count`` of ``blocks`` indices: those that save the most time by staying whole.

    They save equally many gathers wherever they lie, one in each backward (the forward after a
    step gathers them anyway), so what counts is where the link is short of time. It is so all
    along a backward: evenly spread they relieve it all along, and each lends its time on the link
    to its neighbours. The last block is none of them: backward finds the last blocks in their
    slots, a stretch without gathers that needs no relief. Played on a link 1.1 to 2.8 times slower
    than compute, this choice saves at least 89 % of what the best one does (all choices of 8
    blocks, samples of 16 and 24), the last blocks as little as 17 %, the first ones 40 %;
    ``tests/unit/test_wp_resident.py`` plays it.
    """
    if count >= blocks:
        return tuple(range(blocks))
    return tuple((blocks - 1) * (2 * i + 1) // (2 * count) for i in range(count))


def fitting(sizes: Sequence[int], depth: int, budget: int) -> tuple[int, ...]:
    """As many blocks as ``budget`` bytes hold beside the slots that the chunk needs anyway.

    Args:
        sizes: bytes of each block's unsharded weights.
    """
    if not any(sizes):
        return ()  # whole at rest: nothing is ever gathered
    for count in range(len(sizes), 0, -1):
        chosen = spread(len(sizes), count)
        if cost(sizes, depth, frozenset(chosen)) <= budget:
            return chosen
    return ()


def cost(sizes: Sequence[int], depth: int, resident: Collection[int]) -> int:
    """Bytes of slots beyond those of a chunk without ``resident`` blocks."""
    return sum(slot_sizes(sizes, depth, resident)) - sum(slot_sizes(sizes, depth, ()))


def slot_sizes(sizes: Sequence[int], depth: int, resident: Collection[int]) -> list[int]:
    """Bytes of each slot of a chunk's blocks: the shared ones first, as large as the largest."""
    moving = [size for block, size in enumerate(sizes) if block not in resident]
    shared = [max(moving)] * min(depth + 1, len(moving)) if moving else []
    return [*shared, *(sizes[block] for block in sorted(resident))]


def slot_of(block: int, blocks: int, depth: int, resident: Collection[int]) -> int:
    """Index of ``block``'s slot in :func:`slot_sizes`."""
    before = sum(other < block for other in resident)
    shared = min(depth + 1, blocks - len(resident))
    return shared + before if block in resident else (block - before) % shared


def reach(coming: Iterable[int], depth: int, resident: Collection[int]) -> list[int]:
    """Of the blocks that come next those to have in flight: ``depth`` that share slots.

    Resident ones on the way need no shared slot, so they do not count; but no more than ``depth``
    of them are passed, or the first pass would gather a long run of them at once and get in the
    way of the sequence exchange.
    """
    chosen: list[int] = []
    left = {True: depth, False: depth}
    for block in coming:
        if not left[block in resident]:
            break
        left[block in resident] -= 1
        chosen.append(block)
        if not left[False]:
            break
    return chosen
