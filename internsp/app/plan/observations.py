"""Measured steps, each of them once: sharding weights in another way changes no activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from internsp.app.config import Config
from internsp.app.plan.live import Outputs
from internsp.app.plan.observe import WHOLE, ModelPart, Observed, observe
from internsp.mesh import MeshShape

# What no measurement reads, or what is an argument of its own.
_UNREAD: Mapping[str, Any] = {
    "launch": True, "optimizer": True, "checkpoint": True, "pipeline": True,
    "parallel": {"weight", "sequence", "pipeline", "optimizer_ranks", "expert", "expert_weight"},
    "weight_parallel": {"offload"},
    "train": {"global_batch", "micro_batches"},
    "activation_checkpoint": {"fraction", "blocks", "offload", "tiles"},
}  # fmt: skip


class Observations:
    """Calls :func:`internsp.app.plan.observe.observe`, and remembers what it measured."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Observed] = {}
        self._outputs = Outputs()

    def of(
        self, config: Config, rows: int, positions: int, tiles: int, layers: int, again: int,
        offload: Any, part: ModelPart = WHOLE, backward: bool = True,
    ) -> Observed:  # fmt: skip
        """As :func:`observe` says."""
        shape, told = part.shape, config.model_dump_json(exclude=_UNREAD)
        where = replace(part, shape=MeshShape(1)), shape.sequence_axes, part.is_whole_model
        key = (told, rows, positions, tiles, layers, again, offload, where, backward)
        if key not in self._known:
            self._known[key] = observe(
                config, rows, positions, tiles, layers, again, offload, part, backward,
                self._outputs,
            )  # fmt: skip
        return self._known[key]
