"""Chooses the blocks that stay unsharded until the optimizer step; their memory, gathers saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from internsp.base.sizes import human, size_in_bytes
from internsp.config import WeightParallelConfig
from internsp.schedule.chunk import ChunkLayout, Schedule
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
    chosen = _choose(config, [sizes[block] for block in others], depth)
    return frozenset(others[i] for i in chosen) | {block for block in decided if decided[block]}


def _choose(config: WeightParallelConfig, sizes: Sequence[int], depth: int) -> Sequence[int]:
    keep = config.keep_unsharded
    if keep == "all":
        return range(len(sizes))
    if isinstance(keep, str):
        budget = size_in_bytes(keep)
        assert budget is not None, "the configuration has checked it"
        return blocks_within(sizes, depth, budget)
    return evenly_spread(len(sizes), keep or 0)


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


def without_kept_blocks(chunk: ChunkLayout) -> ChunkLayout:
    """The same chunk with no block that stays unsharded, for a comparison."""
    policy = replace(chunk.policy, kept=frozenset())
    fewer = chunk.policy.slots - policy.slots
    moved = {
        unit.name: replace(
            unit, slot=policy.slot(unit.block) if unit.block >= 0 else unit.slot - fewer
        )
        for unit in chunk.units
    }
    return replace(
        chunk,
        policy=policy,
        blocks=tuple(moved[unit.name] for unit in chunk.blocks),
        embedding=chunk.embedding and moved[chunk.embedding.name],
        head=chunk.head and moved[chunk.head.name],
        others=tuple(moved[unit.name] for unit in chunk.others),
        enclosing=tuple(
            replace(each, rest=replace(each.rest, slot=each.rest.slot - fewer))
            for each in chunk.enclosing
        ),
    )


@dataclass(frozen=True)
class KeptBlocks:
    """Blocks that stay unsharded on one rank, compared with the same rank without any.

    Attributes:
        blocks: names, chunk by chunk.
        nbytes: of slots that the rank would not need without them.
        gathers, gathered_bytes: saved in one step (bytes: payload that the rank receives).
    """

    blocks: tuple[str, ...]
    nbytes: int
    gathers: int
    gathered_bytes: int

    @classmethod
    def of(
        cls,
        chunks: Sequence[ChunkLayout],
        schedule: Schedule,
        simulate: Callable[[list[ChunkLayout]], Schedule],
    ) -> KeptBlocks:
        """Compare ``schedule`` with the one that ``simulate`` returns without kept blocks."""
        others = [without_kept_blocks(chunk) for chunk in chunks]
        without = simulate(others)
        return cls(
            tuple(c.blocks[i].name for c in chunks for i in sorted(c.policy.kept)),
            sum(map(sum, (c.slots() for c in chunks))) - sum(map(sum, (c.slots() for c in others))),
            without.count("AG") - schedule.count("AG"),
            without.nbytes("AG") - schedule.nbytes("AG"),
        )

    def line(self) -> str:
        """The comparison as a sentence."""
        return (
            f"{len(self.blocks)} blocks stay unsharded ({', '.join(self.blocks)}): "
            f"{human(self.nbytes)} more unsharded weights, {self.gathers} gathers "
            f"({human(self.gathered_bytes)}) fewer a step"
        )
