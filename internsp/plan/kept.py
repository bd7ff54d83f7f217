"""What ``internsp plan`` says of blocks that stay unsharded: which, their memory, gathers saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from internsp.config.sizes import human
from internsp.plan.chunk import ChunkPlan, Schedule
from internsp.plan.units import all_moving


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
