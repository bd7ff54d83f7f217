"""The memory of activations on the ranks of a pipeline: of all micro-batches that are in flight.

A rank's passes are played in their order: a forward adds what its micro-batch keeps, its backward
takes it away. Beside them is what torch's stages and schedules hold: a buffer for each message of a
step, and what is sent until its work is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from internsp.config import Config
from internsp.config.kept import size_in_bytes
from internsp.pipeline.hooks import FULL, INPUT, ComputeAction
from internsp.plan.activations import ActivationModel, Activations, moving_rows
from internsp.plan.observe import Place
from internsp.plan.pipeline import PipelinePlan, RankPlan, message_bytes

BUFFERS = "buffers for messages between stages"


@dataclass(frozen=True)
class InFlight:
    """Of one rank.

    Attributes:
        buffers: bytes that stay from step to step.
        rows: (component, bytes) on the device at the peak, without these.
        host: bytes in host memory at the peak.
    """

    buffers: int
    rows: tuple[tuple[str, int], ...]
    host: int


class PipelineActivations:
    """Of all ranks of a pipeline, for any length of sequences."""

    def __init__(self, config: Config, plan: PipelinePlan) -> None:
        self.config, self.plan = config, plan
        made: dict[tuple[Place, int, int], ActivationModel] = {}
        self.models: dict[int, ActivationModel] = {}
        last = max(chunk.stage for rank in plan.ranks for chunk in rank.chunks)
        for rank in plan.ranks:
            for chunk in rank.chunks:
                stage, layers = chunk.stage, len(chunk.blocks)
                parts = {action.part for action in rank.actions if action.stage == stage}
                place = Place(plan.shape, stage == 0, stage == last, INPUT in parts)
                again = sum(unit.recomputed for unit in chunk.plan.blocks)
                key = place, layers, again
                if key not in made:
                    made[key] = ActivationModel(config, plan.shape, place, layers, again)
                self.models[stage] = made[key]

    def at(self, rank: int, length: int) -> InFlight:
        """Of a pipeline rank, for sequences of ``length`` tokens over all ranks."""
        plan = self.plan.ranks[rank]
        chosen = self.config.data.model_copy(update={"sequence_length": length})
        message = message_bytes(
            self.config.model_copy(update={"data": chosen}), self.plan.shape
        )
        found = {chunk.stage: self.models[chunk.stage].at(length) for chunk in plan.chunks}
        places = {stage: self.models[stage].place for stage in found}
        number = self.plan.micro_batches
        ends = sum((not place.first) + (not place.last) for place in places.values())
        batch = number * next(iter(found.values())).batch
        offload = self.config.activation_checkpoint.offload
        limit = size_in_bytes(offload) if isinstance(offload, str) else None
        stays = self.plan.kind.name != "1F1B"
        played = _Played(plan, found, places, message, limit, stays)
        ids = [("token ids, labels and positions", batch)]
        return InFlight(number * ends * message, (*ids, *played.rows), played.host)


class _Played:
    """One rank's passes.

    Args:
        limit: bytes of host memory for activations of a chunk; ``None``: any.
        stays: what is sent is held to the end of the step; else until the next of its kind.
    """

    def __init__(
        self,
        rank: RankPlan,
        found: Mapping[int, Activations],
        places: Mapping[int, Place],
        message: int,
        limit: int | None,
        stays: bool,
    ) -> None:
        self.found, self.message, self.limit, self.stays = found, message, limit, stays
        own = set(found)
        self.sends = {s: not places[s].last and s + 1 not in own for s in own}
        self.returns = {s: not places[s].first and s - 1 not in own for s in own}
        # What goes to this rank's next stage lies in that one's buffer.
        self.less = {s: 0 if self.sends[s] or places[s].last else message for s in own}
        self.kept: dict[tuple[int, int], tuple[int, int]] = {}  # on the device, on the host
        self.leaving: Counter[str] = Counter()
        self.rows: list[tuple[str, int]] = []
        self.host = self._most = 0
        # torch's 1F1B holds on to the last message that it sent before its first backward.
        first = next((n for n, action in enumerate(rank.actions) if action.part), 0)
        self.held = None if stays else rank.actions[first - 2].micro_batch if first > 1 else None
        for action in rank.actions:
            self._pass(action)

    def _pass(self, action: ComputeAction) -> None:
        stage, key = action.stage, (action.stage, action.micro_batch)
        one = self.found[stage]
        if not action.part:
            self.kept[key] = self._keeps(stage, one)
            self.host = max(self.host, sum(host for _, host in self.kept.values()))
            self._peak(one.forward, {})
            return
        self._peak(one.working, one.moving)
        _, host = self.kept.pop(key)
        if action.part == INPUT:
            self.kept[key] = (max(one.between - self.less[stage], 0), host)
        elif self.sends[stage] and (self.stays or action.micro_batch == self.held):
            self.leaving["outputs"] += self.message
        if self.returns[stage] and action.part in (INPUT, FULL):
            held = self.leaving["gradients"] if self.stays else 0
            self.leaving["gradients"] = held + self.message

    def _keeps(self, stage: int, one: Activations) -> tuple[int, int]:
        kept = one.kept - self.less[stage]
        if self.limit is None or not one.host:
            return kept, one.host
        used = sum(host for (s, _), (_, host) in self.kept.items() if s == stage)
        leaves = min(one.away, max(self.limit - used, 0) * one.away // one.host)
        return kept + (one.away - leaves) * one.block, leaves * one.host // one.away

    def _peak(self, working: int, moving: Mapping[str, int]) -> None:
        kept = sum(each for each, _ in self.kept.values())
        leaving = sum(self.leaving.values())
        total = kept + leaving + working + sum(moving.values())
        if total <= self._most:
            return
        self._most = total
        self.rows = [
            (f"activations that are kept, {len(self.kept)} in flight", kept),
            *([("hidden states and gradients that were sent", leaving)] if leaving else []),
            ("block or loss at work", working),
            *moving_rows(moving),
        ]
