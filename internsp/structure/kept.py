"""Chooses the blocks that stay unsharded until the optimizer step; their memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from internsp.base.sizes import human, size_in_bytes
from internsp.config import WeightParallelConfig
from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.terms import slot_sizes


def choose_kept_blocks(
    config: WeightParallelConfig,
    sizes: Sequence[int],
    depth: int,
    decided: Mapping[int, bool],
) -> frozenset[int]:
    """The blocks of a chunk that stay unsharded until the optimizer step.

    Args:
        sizes: bytes of each block's unsharded weights.
        depth: blocks prefetched, at most.
        decided: whether rules of the plan keep a block, by index; the configuration's number or
            size applies to the other blocks.
    """
    others = [block for block in range(len(sizes)) if block not in decided]
    keep, others_sizes = config.keep_unsharded, [sizes[block] for block in others]
    chosen: Sequence[int] = range(len(others))  # "all"
    if not isinstance(keep, str):
        chosen = evenly_spread(len(others), keep or 0)
    elif keep != "all":
        budget = size_in_bytes(keep)
        assert budget is not None, "the configuration has checked it"
        chosen = blocks_within(others_sizes, depth, budget)
    return frozenset(others[i] for i in chosen) | {block for block in decided if decided[block]}


def evenly_spread(blocks: int, count: int) -> tuple[int, ...]:
    """Indices of ``count`` of ``blocks`` blocks that save the most time by staying unsharded.

    Every choice saves equally many gathers, one a block in each backward (the forward after a step
    gathers all blocks anyway), so the best choice is the one that relieves the link where it is
    the bottleneck. It is so throughout backward: evenly spread blocks relieve it throughout, and
    their neighbors use the time on the link that each frees. The last block is not chosen, since
    backward finds the last blocks in their slots and gathers nothing there. Simulated on a link
    1.1 to 2.8 times slower than compute, this choice saves at least 89 % of what the best one does
    (all choices of 8 blocks, samples of 16 and 24), the last blocks as little as 17 %, the first
    ones 40 %; ``tests/unit/test_wp_kept.py`` repeats the simulation.
    """
    if count >= blocks:
        return tuple(range(blocks))
    return tuple((blocks - 1) * (2 * i + 1) // (2 * count) for i in range(count))


def blocks_within(sizes: Sequence[int], depth: int, budget: int) -> tuple[int, ...]:
    """As many blocks as fit into ``budget`` bytes on top of the slots that the chunk needs anyway.

    Args:
        sizes: bytes of each block's unsharded weights.
    """
    if not any(sizes):
        return ()  # nothing is sharded, so nothing is ever gathered
    for count in range(len(sizes), 0, -1):
        chosen = evenly_spread(len(sizes), count)
        if extra_slot_bytes(sizes, depth, frozenset(chosen)) <= budget:
            return chosen
    return ()


def extra_slot_bytes(sizes: Sequence[int], depth: int, kept: Collection[int]) -> int:
    """Bytes of slots that ``kept`` blocks need on top of those of a chunk without any."""
    return sum(slot_sizes(sizes, depth, kept)) - sum(slot_sizes(sizes, depth, ()))


def kept_line(chunks: Sequence[ChunkLayout]) -> str:
    """Which blocks of a rank's chunks stay unsharded, and what slots they need, as a sentence."""
    names = [chunk.blocks[i].name for chunk in chunks for i in sorted(chunk.policy.kept)]
    more = 0
    for chunk in chunks:
        sizes, policy = [unit.slot_bytes for unit in chunk.blocks], chunk.policy
        more += extra_slot_bytes(sizes, policy.depth, policy.kept)
    return (
        f"{len(names)} blocks stay unsharded ({', '.join(names)}): {human(more)} more unsharded "
        "weights, and no gather of them in backward"
    )
