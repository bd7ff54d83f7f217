"""Blocks that stay unsharded until the optimizer step: which, their memory, gathers saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from internsp.config import WeightParallelConfig
from internsp.config.kept import size_in_bytes
from internsp.config.sizes import human
from internsp.plan.chunk import ChunkPlan, Schedule
from internsp.wp.schedule import slot_sizes


def kept(
    config: WeightParallelConfig,
    sizes: Sequence[int],
    depth: int,
    decided: Mapping[int, bool],
) -> frozenset[int]:
    """The blocks of a chunk that stay unsharded until the optimizer step.

    Args:
        sizes: bytes of each block's unsharded weights.
        depth: blocks gathered ahead, at most.
        decided: what a rule of the plan says of some of them; the configuration's number or size
            is of the others.
    """
    others = [block for block in range(len(sizes)) if block not in decided]
    chosen = _kept(config, [sizes[block] for block in others], depth)
    return frozenset(others[i] for i in chosen) | {block for block in decided if decided[block]}


def _kept(config: WeightParallelConfig, sizes: Sequence[int], depth: int) -> Sequence[int]:
    keep = config.keep_unsharded
    if keep == "all":
        return range(len(sizes))
    if isinstance(keep, str):
        budget = size_in_bytes(keep)
        assert budget is not None, "the configuration has checked it"
        return fitting(sizes, depth, budget)
    return spread(len(sizes), keep or 0)


def spread(blocks: int, count: int) -> tuple[int, ...]:
    """``count`` of ``blocks`` indices: those that save the most time by staying unsharded.

    They save equally many gathers wherever they lie, one in each backward (the forward after a
    step gathers them anyway), so what counts is where the link is short of time. It is so all
    along a backward: evenly spread they relieve it all along, and each lends its time on the link
    to its neighbors. The last block is none of them: backward finds the last blocks in their
    slots, a stretch without gathers that needs no relief. Played on a link 1.1 to 2.8 times slower
    than compute, this choice saves at least 89 % of what the best one does (all choices of 8
    blocks, samples of 16 and 24), the last blocks as little as 17 %, the first ones 40 %;
    ``tests/unit/test_wp_kept.py`` plays it.
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


def cost(sizes: Sequence[int], depth: int, kept: Collection[int]) -> int:
    """Bytes of slots beyond those of a chunk without ``kept`` blocks."""
    return sum(slot_sizes(sizes, depth, kept)) - sum(slot_sizes(sizes, depth, ()))


def all_moving(chunk: ChunkPlan) -> ChunkPlan:
    """The same chunk in which no block stays unsharded, to compare with."""
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
    """Blocks that stay unsharded on one rank, beside the same rank without any.

    Attributes:
        blocks: names, chunk by chunk.
        nbytes: slots beyond those that it would need anyway.
        gathers, gathered_bytes: saved in one step (bytes: payload that it receives).
    """

    blocks: tuple[str, ...]
    nbytes: int
    gathers: int
    gathered_bytes: int

    @classmethod
    def of(
        cls,
        chunks: Sequence[ChunkPlan],
        schedule: Schedule,
        simulate: Callable[[list[ChunkPlan]], Schedule],
    ) -> KeptBlocks:
        """Compare ``schedule`` with what ``simulate`` makes of chunks without them."""
        others = [all_moving(chunk) for chunk in chunks]
        without = simulate(others)
        return cls(
            tuple(c.blocks[i].name for c in chunks for i in sorted(c.policy.kept)),
            sum(map(sum, (c.slots() for c in chunks))) - sum(map(sum, (c.slots() for c in others))),
            without.count("AG") - schedule.count("AG"),
            without.nbytes("AG") - schedule.nbytes("AG"),
        )

    def line(self) -> str:
        """For a person."""
        return (
            f"{len(self.blocks)} blocks stay unsharded ({', '.join(self.blocks)}): "
            f"{human(self.nbytes)} more unsharded weights, {self.gathers} gathers "
            f"({human(self.gathered_bytes)}) fewer a step"
        )
