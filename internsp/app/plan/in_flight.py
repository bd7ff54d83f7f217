"""Activation memory on pipeline ranks, of all micro-batches in flight; one without a pipeline.

A rank's passes are simulated in their order: a forward adds the bytes that its micro-batch keeps,
its backward removes them. In addition, torch's stages and schedules hold a receive buffer for each
message of a step, and each sent tensor until the schedule drops its work handle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from typing import NamedTuple

from internsp.app.plan.activations import ActivationModel, Activations, exchange_rows
from internsp.app.plan.observe import ModelPart, Observations
from internsp.app.plan.rank import RankPlan
from internsp.app.plan.step import Plan, message_bytes
from internsp.base.sizes import size_in_bytes
from internsp.pipeline.hooks import FULL, INPUT, ComputeAction

BUFFERS = "buffers for messages between stages"


class Moving(NamedTuple):
    """Bytes of a pipeline rank's activations in a step.

    Attributes:
        stay: (component, bytes) from the first pass to the end of the step.
        rows: (component, bytes) beside these at the peak; the first is what is kept.
        left: of what is kept, what is left at the last backward of a block, without a pipeline.
        host: in host memory at the peak.
    """

    stay: list[tuple[str, int]]
    rows: list[tuple[str, int]]
    left: int
    host: int


class StepActivations:
    """Activation memory of all pipeline ranks, for any sequence length."""

    def __init__(self, plan: Plan, observations: Observations | None = None) -> None:
        self.plan = plan
        known = observations or Observations()
        made = cache(partial(ActivationModel, plan.config, observations=known))
        self.models: dict[int, ActivationModel] = {}
        last = max(chunk.stage for rank in plan.ranks for chunk in rank.chunks)
        for rank in plan.ranks:
            for chunk in rank.chunks:
                stage, kinds = chunk.stage, plan.kinds[chunk.blocks.start : chunk.blocks.stop]
                parts = {action.part for action in rank.actions if action.stage == stage}
                model_part = ModelPart(plan.shape, stage == 0, stage == last, INPUT in parts)
                self.models[stage] = made(model_part, kinds, chunk.recomputed)

    def at(self, rank: int, length: int) -> Moving:
        """Activation memory of a pipeline rank, for sequences of ``length`` tokens in all."""
        plan, config = self.plan.ranks[rank], self.plan.config
        several = len(self.plan.ranks) > 1
        message = message_bytes(config, self.plan.shape, length) if several else 0
        activations = {chunk.stage: self.models[chunk.stage].at(length) for chunk in plan.chunks}
        model_parts = {stage: self.models[stage].model_part for stage in activations}
        number = config.train.micro_batches
        ends = sum((not part.first) + (not part.last) for part in model_parts.values())
        one = activations[plan.chunks[0].stage]
        stay = [(BUFFERS, number * ends * message)] if several else []
        stay.append(("token ids, labels and positions", number * one.batch))
        offload = config.activation_checkpoint.offload
        limit = size_in_bytes(offload) if isinstance(offload, str) else None
        holds_sends = self.plan.kind.name != "1F1B"
        simulation = _PassSimulation(plan, activations, model_parts, message, limit, holds_sends)
        return Moving(stay, simulation.rows, one.kept - one.freed, simulation.host)


class _PassSimulation:
    """Simulates one rank's passes and records the peak.

    Args:
        activations: of one micro-batch, by stage.
        message: bytes of a message between stages.
        limit: bytes of host memory for activations of a chunk; ``None``: no limit.
        holds_sends: a sent tensor is held to the end of the step; else until the next one is sent.
    """

    def __init__(
        self,
        rank: RankPlan,
        activations: Mapping[int, Activations],
        model_parts: Mapping[int, ModelPart],
        message: int,
        limit: int | None,
        holds_sends: bool,
    ) -> None:
        self.activations, self.message = activations, message
        self.limit, self.holds_sends = limit, holds_sends
        own = set(activations)
        self.sends = {s: not model_parts[s].last and s + 1 not in own for s in own}
        self.returns = {s: not model_parts[s].first and s - 1 not in own for s in own}
        # The output for a next stage on this same rank is counted in that stage's receive buffer.
        self.in_receive_buffer = {
            s: 0 if self.sends[s] or model_parts[s].last else message for s in own
        }
        self.kept: dict[tuple[int, int], tuple[int, int]] = {}  # as _kept returns
        self.hosted = {s: one.host // max(one.offloaded, 1) for s, one in activations.items()}
        self.leaving: Counter[str] = Counter()
        self.rows: list[tuple[str, int]] = []
        self.host = self._most = 0
        # torch's 1F1B keeps the last message that it sent before its first backward.
        first = next((n for n, action in enumerate(rank.actions) if action.part), 0)
        self.held = None
        if not holds_sends and first > 1:
            self.held = rank.actions[first - 2].micro_batch
        for action in rank.actions:
            self._pass(action)

    def _pass(self, action: ComputeAction) -> None:
        stage, key = action.stage, (action.stage, action.micro_batch)
        one = self.activations[stage]
        if not action.part:
            self.kept[key] = self._kept(stage, one)
            hosted = (away * self.hosted[s] for (s, _), (_, away) in self.kept.items())
            self.host = max(self.host, sum(hosted))
            self._peak(one.forward, {})
            return
        self._peak(one.working, one.exchanges)
        _, away = self.kept.pop(key)
        if action.part == INPUT:
            self.kept[key] = (max(one.between_parts - self.in_receive_buffer[stage], 0), away)
        elif self.sends[stage] and (self.holds_sends or action.micro_batch == self.held):
            self.leaving["outputs"] += self.message
        if self.returns[stage] and action.part in (INPUT, FULL):
            held = self.leaving["gradients"] if self.holds_sends else 0
            self.leaving["gradients"] = held + self.message

    def _kept(self, stage: int, one: Activations) -> tuple[int, int]:
        """What a micro-batch keeps on the device, and how many of its blocks are on the host."""
        away = one.offloaded
        if self.limit is not None and one.host:
            used = sum(blocks for (s, _), (_, blocks) in self.kept.items() if s == stage)
            away = min(away, max(self.limit // sum(one.host_pieces) - used, 0))
        kept = one.kept - self.in_receive_buffer[stage]
        return kept + (one.offloaded - away) * one.block, away

    def _peak(self, working: int, exchanges: Mapping[str, int]) -> None:
        kept = sum(each for each, _ in self.kept.values())
        leaving = sum(self.leaving.values())
        total = kept + leaving + working + sum(exchanges.values())
        if total <= self._most:
            return
        self._most = total
        in_flight = f", {len(self.kept)} in flight" if self.message else ""
        self.rows = [
            (f"activations that are kept{in_flight}", kept),
            *([("hidden states and gradients that were sent", leaving)] if leaving else []),
            ("block or loss at work", working),
            *exchange_rows(exchanges),
        ]
