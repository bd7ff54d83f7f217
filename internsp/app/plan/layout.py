"""A layout of a step: what a search chooses among, as keys of a configuration and as a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from internsp.app.plan.workload import Recompute

CHECKPOINTS: dict[str, tuple[Mapping[str, Any], Recompute]] = {
    "none": ({"mode": "none"}, Recompute()),
    "selective": ({"mode": "selective"}, Recompute(1.0, 0.0, 1.0)),
    "half": ({"mode": "full", "fraction": 0.5}, Recompute(0.5, 0.5, 0.5)),
    "full": ({"mode": "full"}, Recompute(1.0, 1.0, 1.0)),
}
INTERLEAVED, V_SHAPED = "Interleaved1F1B", "ZBVZeroBubble"
SCHEDULES = (("1F1B", 1), (INTERLEAVED, 2), (V_SHAPED, 2))


@dataclass(frozen=True)
class Layout:
    """A candidate: degrees, micro-batches and what is recomputed.

    Attributes:
        optimizer_ranks: 0: all replicas.
        expert, expert_weight: of a model with experts; 0: there are none.
        offload: whether the optimizer's state and inputs of blocks are in host memory.
        tiled: whether feed-forwards are computed in tiles of the sequence.
    """

    pipeline: int
    schedule: tuple[str, int]
    sequence: int
    ring: int
    weight: int
    optimizer_ranks: int
    micro_batches: int
    checkpoint: str
    offload: bool
    expert: int = 0
    expert_weight: int = 0
    tiled: bool = False

    def settings(self) -> dict[str, Any]:
        """The keys of a configuration, as ``section.key``, and their values."""
        again = {"mode": "none", "fraction": 1.0, "offload": None} | dict(
            CHECKPOINTS[self.checkpoint][0]
        )
        if self.offload and again["mode"] == "full":
            again["offload"] = "all"
        found: dict[str, Any] = {
            "parallel.weight": self.weight,
            "parallel.sequence": self.sequence,
            "parallel.pipeline": self.pipeline,
            "parallel.optimizer_ranks": self.optimizer_ranks or None,
            "pipeline.schedule": self.schedule[0],
            "pipeline.chunks": self.schedule[1],
            "sequence.ring": self.ring if self.ring > 1 else None,
            "train.micro_batches": self.micro_batches,
            "weight_parallel.offload": ("optimizer",) if self.offload else (),
        }
        found["activation_checkpoint.tiles"] = "auto" if self.tiled else 1
        if self.expert:
            found |= {"parallel.expert": self.expert, "parallel.expert_weight": self.expert_weight}
        return found | {f"activation_checkpoint.{key}": value for key, value in again.items()}

    @property
    def whole(self) -> bool:
        """Whether no weight is sharded."""
        return max(self.weight, self.expert_weight) == 1

    @property
    def axes(self) -> int:
        """How many things are not as on one device: ties go to the fewest."""
        degrees = (self.pipeline, self.sequence, self.ring, self.weight, self.micro_batches)
        away = 2 * self.offload
        experts = (self.expert > 1) + (self.expert > 0 and self.expert_weight != self.weight)
        again = self.checkpoint != "none"
        return sum(degree > 1 for degree in degrees) + experts + again + away + self.tiled

    def label(self) -> str:
        """One line of a table."""
        told = [f"weight {self.weight}"]
        if self.sequence > 1:
            around = f" (ring {self.ring})" if self.ring > 1 else ""
            told.append(f"sequence {self.sequence}{around}")
        if self.pipeline > 1:
            told.append(f"pipeline {self.pipeline} {self.schedule[0]}")
        if self.expert:
            told.append(f"experts {self.expert} x {self.expert_weight}")
        if self.optimizer_ranks:
            told.append(f"optimizer ranks {self.optimizer_ranks}")
        told.append(f"{self.micro_batches} micro-batches")
        told.append(f"checkpoint {self.checkpoint}")
        told += ["tiles"] * self.tiled + ["offloaded"] * self.offload
        return ", ".join(told)
