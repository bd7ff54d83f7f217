"""Seconds of a step, by what they are spent on: the closed form that a search evaluates. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

from internsp.app.plan.block_seconds import BlockSeconds, block_seconds
from internsp.app.plan.compute import STREAMED, head, model_flops
from internsp.app.plan.devices import Device
from internsp.app.plan.links import Group
from internsp.app.plan.weight_seconds import (
    WeightMessages,
    exposed,
    exposed_replicas,
)
from internsp.app.plan.workload import Workload
from internsp.pipeline.chunks import partition_costs


class Part(StrEnum):
    """What seconds of a step are spent on."""

    PRODUCTS = "products"
    ATTENTION = "attention"
    PASSES = "element-wise passes"
    RECOMPUTE = "recompute"
    HEAD = "head and loss"
    GATHERS = "exposed gathers"
    REDUCTIONS = "exposed reductions"
    SEQUENCES = "exchanges of sequences"
    TENSOR = "tensor messages"
    EXPERTS = "experts"
    BUBBLE = "pipeline bubble"
    REPLICAS = "replicas"
    OPTIMIZER = "optimizer"
    COPIES = "copies of offload"
    HOST = "host launches"


Parts = defaultdict[str, float]
_COMPUTED = (Part.PRODUCTS, Part.ATTENTION, Part.PASSES, Part.RECOMPUTE, Part.HEAD)

_HOST_ADAM = 1.2e9  # elements a second that one process steps on its share of a host
_HOST_LINK = 20e9  # bytes a second and direction between a device and its host
_HOST_SHARE = 0.7  # of the host's link, that copies both ways at once reach (h200.md: 0.68)
_COPIED = 2 + 2 + 4  # bytes of an element that a step in host memory brings and takes


@dataclass(frozen=True)
class StepSeconds:
    """A predicted step.

    Attributes:
        parts: seconds by what they are spent on.
        messages: seconds of messages, hidden or not.
        compute: seconds of computation.
        slowed: of ``parts``, seconds in which nothing waits: computation is slower beside messages.
    """

    parts: Mapping[str, float]
    messages: float
    compute: float
    slowed: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    def rate(self, load: Workload) -> float:
        """Tokens a second and device."""
        return load.step_tokens / self.total / load.degrees.devices

    def mfu(self, load: Workload, device: Device) -> float:
        """Share of the peak, as ``flops_per_token`` of a run's metrics counts: all keys count."""
        done = model_flops(load.model, load.sequence, causal=False) * self.rate(load)
        return done / device.peak[load.dtype]


@dataclass(frozen=True)
class Computed:
    """What a step computes, for any sharding of weights.

    Attributes:
        parts: seconds of a micro-batch on a stage with an average share of the blocks.
        blocks: of a stage, on average.
        forward, backward: a block's pace.
        ends: embedding, head and loss.
        messages: seconds of all messages of a micro-batch.
        weights: of the backward of a stage's blocks, gradients of weights.
        ranks: the pipeline ranks one of which finishes last.
        passed: seconds of a step's messages between stages that nothing hides.
    """

    parts: Mapping[str, float]
    blocks: float
    forward: float
    backward: float
    ends: float
    messages: float
    weights: float
    ranks: Sequence[_Rank] = ()
    passed: float = 0.0

    @classmethod
    def of(
        cls, load: Workload, device: Device, block: BlockSeconds, both: tuple[float, float]
    ) -> Computed:
        """From a block's seconds, and those of the :func:`ends`."""
        blocks = load.model.layers / load.degrees.pipeline
        forward, backward = paces(load, block)
        return cls(
            _micro_batch(load, block, blocks), blocks, forward, backward, sum(both),
            blocks * block.messages, blocks * block.backward.products / 2,
            _ranks(stage_blocks(load), load.degrees.pipeline, load.degrees.v_shaped),
            _passed(load, device),
        )  # fmt: skip


@dataclass(frozen=True)
class Stepped:
    """The optimizer's seconds, those of its copies, and of a micro-batch's sum of gradients."""

    optimizer: float
    copies: float
    accumulated: float

    @classmethod
    def of(cls, load: Workload, device: Device) -> Stepped:
        """Of ``load``."""
        return cls(*_optimizer(load, device), _accumulated(load, device))


_Seconds = TypeVar("_Seconds", WeightMessages, Stepped)


def least_of(found: Sequence[_Seconds]) -> _Seconds:
    """The least of each of their seconds: no step that has one of them is shorter."""
    return type(found[0])(*map(min, zip(*(vars(one).values() for one in found), strict=True)))


def step_seconds(load: Workload, device: Device) -> StepSeconds:
    """Predict the seconds of one step of ``load`` on ``device``."""
    computed = Computed.of(load, device, block_seconds(load, device), ends(load, device))
    sent = WeightMessages.of(load, device)
    return composed(load, device, computed, sent, Stepped.of(load, device))


def composed(
    load: Workload, device: Device, computed: Computed, sent: WeightMessages, stepped: Stepped
) -> StepSeconds:
    """The step of these parts: more of any does not make it shorter.

    Args:
        load: how its weights are sharded is not read.
    """
    number, slowdown = load.micro_batches, device.fitted.slowdown
    forward, backward, blocks = computed.forward, computed.backward, computed.blocks
    gathers, reductions, moved = exposed(load, sent, forward, backward, blocks, slowdown)
    parts: Parts = defaultdict(float, computed.parts)
    parts[Part.GATHERS], parts[Part.REDUCTIONS] = gathers, reductions
    one = sum(parts.values())
    for name in parts:
        parts[name] *= number
    messages = (computed.messages + moved) * number + sent.reduced + sent.returned
    stages = load.degrees.pipeline
    parts[Part.HEAD] = number * computed.ends / stages
    alone = computed.ends if stages == 1 else 0.0
    parts[Part.REPLICAS] = exposed_replicas(
        load, sent, blocks * forward, blocks * backward + alone, slowdown
    )
    if stages > 1:
        parts[Part.BUBBLE] = _bubble(load, one, computed, gathers / 2 + reductions)
    parts[Part.PASSES] += number * stepped.accumulated
    parts[Part.OPTIMIZER], parts[Part.COPIES] = stepped.optimizer, stepped.copies
    if "activations" in load.offload:  # beside all of the step, there and back
        copied = 2 * blocks * load.tokens * load.model.hidden * 2 * number / _HOST_LINK
        parts[Part.COPIES] += max(0.0, copied - sum(parts.values()))
    compute = sum(parts[name] for name in _COMPUTED)
    return StepSeconds({k: v for k, v in parts.items() if v > 0}, messages, compute)


def _micro_batch(load: Workload, block: BlockSeconds, blocks: float) -> Parts:
    """What one micro-batch takes on a stage with an average share of the blocks."""
    parts: Parts = defaultdict(float)
    parts[Part.PRODUCTS] = blocks * (block.forward.products + block.backward.products)
    parts[Part.ATTENTION] = blocks * (block.forward.attention + block.backward.attention)
    parts[Part.PASSES] = blocks * (block.forward.passes + block.backward.passes)
    parts[Part.RECOMPUTE] = blocks * block.again.total
    parts[Part.TENSOR] = blocks * (sum(block.tensor) + block.slowed(0) + block.slowed(1))
    parts[Part.SEQUENCES] = blocks * sum(block.sequences)
    parts[Part.EXPERTS] = blocks * sum(block.experts)
    forward, backward = paces(load, block)
    parts[Part.HOST] = blocks * (forward - block.at(0) + backward - block.at(1))
    return parts


def paces(load: Workload, block: BlockSeconds) -> tuple[float, float]:
    """Seconds of a block's forward and backward, no less than the host's launches of them.

    What launches on a processor also computes: its seconds are added.
    """
    habits, host = load.habits, load.habits.launches
    behind = habits.launches_behind * host + (host if block.again.total else 0.0)
    if block.on_host:
        return host + block.at(0), behind + block.at(1)
    added = block.tensor if habits.traced else (0.0, 0.0)
    return max(host + added[0], block.at(0)), max(behind + added[1], block.at(1))


def ends(load: Workload, device: Device) -> tuple[float, float]:
    """Seconds of embedding, head and loss, forward and backward: launched as a block is."""
    habits, (before, after) = load.habits, head(load, device)
    behind = habits.launches_behind * habits.launches
    return max(habits.launches, before.total), max(behind, after.total)


def _bubble(load: Workload, one: float, computed: Computed, waited: float) -> float:
    """What a pipeline waits for: its first and last micro-batches, uneven stages, messages.

    Args:
        one: seconds of a micro-batch on a stage with an average share of the blocks.
        waited: of them, those that its backward waits for messages.
    """
    degrees, number, last = load.degrees, load.micro_batches, computed.ends
    mean = number * (one + last / degrees.pipeline)
    if degrees.v_shaped:
        slowest = max(each.seconds(one, last) for each in computed.ranks)
        idle = idle_in_a_v(load, computed, waited, number * slowest - mean)
        return idle + computed.passed
    ahead = computed.forward / (computed.forward + computed.backward)
    end = max(
        number * each.seconds(one, last) + each.idle(one, last, ahead) / degrees.interleave
        for each in computed.ranks
    )
    return end - mean + computed.passed


def _passed(load: Workload, device: Device) -> float:
    degrees, number = load.degrees, load.micro_batches
    stages, chunks = degrees.pipeline, degrees.interleave
    # Each tensor rank sends its part, also where all have the whole.
    stride, parts = degrees.devices // stages, degrees.tensor
    if load.habits.traced:
        stride, parts = device.near_ranks, 1
    one_way = Group(2, stride, device).pass_on(load.tokens * load.model.hidden * 2 / parts)
    # The program that overlaps tensor messages overlaps these.
    hides = load.habits.tensor_overlap or load.habits.sends_ahead
    often = chunks * (stages - 1) + (0 if hides else number * chunks)
    return 2 * one_way * often


@dataclass(frozen=True)
class _Rank:
    """A pipeline rank: its blocks, those of the ranks before and after it, in means of a rank.

    Attributes:
        behind: number of the ranks after it.
        head: whether it has the head.
    """

    own: float
    before: float
    after: float
    behind: int
    head: bool

    def seconds(self, one: float, last: float) -> float:
        """Of its micro-batch, of which a mean rank takes ``one``, and the head ``last``."""
        return self.own * one + (last if self.head else 0.0)

    def idle(self, one: float, last: float, forward: float) -> float:
        """Until its first micro-batch comes and after its last one, and until that one is back.

        Args:
            forward: share of a forward: in the meantime, one for each rank behind it is computed.
        """
        back = self.after * one + (0.0 if self.head else last)
        return self.before * one + max(0.0, back - self.behind * forward * self.own * one)


@lru_cache(maxsize=10_000)
def _ranks(blocks: tuple[int, ...], stages: int, v_shaped: bool) -> tuple[_Rank, ...]:
    """The pipeline ranks one of which finishes last."""
    sums = [sum(blocks[rank::stages]) for rank in range(stages)]
    if v_shaped:
        sums = [blocks[rank] + blocks[-1 - rank] for rank in range(stages)]
    mean = sum(blocks) / stages
    head = 0 if v_shaped else stages - 1
    # Of ranks with as many blocks, the last one has the least to do while it waits.
    chosen = sorted({*{own: rank for rank, own in enumerate(sums) if rank != head}.values(), head})
    return tuple(
        _Rank(
            sums[rank] / mean, sum(sums[:rank]) / mean, sum(sums[rank + 1 :]) / mean,
            stages - 1 - rank, rank == head,
        )
        for rank in chosen
    )  # fmt: skip


def stage_blocks(load: Workload) -> tuple[int, ...]:
    """Blocks of each chunk of a pipeline, in the order of the model."""
    model, degrees = load.model, load.degrees
    parts = degrees.pipeline * degrees.interleave
    if not load.habits.balances_head:
        few, more = divmod(model.layers, parts)
        return (few + 1,) * more + (few,) * (parts - more)
    width = model.shared_ffn if model.experts else model.ffn
    cost = model.attention_parameters + (2 + model.gated) * model.hidden * width
    cost += model.experts * model.expert_parameters // degrees.expert
    return _divided(model.layers, parts, 4 * model.embedding / 3 / cost)


@lru_cache(maxsize=10_000)
def _divided(blocks: int, parts: int, head: float) -> tuple[int, ...]:
    return tuple(len(each) for each in partition_costs([1.0] * blocks, parts, head))


def idle_in_a_v(load: Workload, computed: Computed, waited: float, uneven: float) -> float:
    """Idle seconds of torch's ZBVZeroBubble where a forward takes no longer than a backward.

    From replays of its order: each stage waits for an input's gradient of a chunk, or, where those
    of weights are too short to fill the time, for what two of the one take longer than two of the
    other; and, with less than two micro-batches a stage, for those that are missing. A stage that
    has more to do than others hides that.
    """
    stages, number = load.degrees.pipeline, load.micro_batches
    weights = computed.weights / 2
    inputs = (computed.blocks * computed.backward + waited) / 2 - weights
    fewer = 2 * weights * min(number - stages, stages - 1)
    idle = max((stages - 1) * inputs, 2 * (stages - 1) * inputs - fewer)
    return max(idle, uneven + (stages - 2) * weights)


def _optimizer(load: Workload, device: Device) -> tuple[float, float]:
    """Seconds of the optimizer's step, and of copies where the host steps its own memory."""
    habits, shard, away = load.habits, _shard(load), "optimizer" in load.offload
    if away and not habits.passes_state:
        return shard / _HOST_ADAM, shard * _COPIED / _HOST_LINK
    each = habits.step_bytes or {"eager": 100, "kernels": 34, "compiled": 44}[habits.fused]
    seconds = each / (device.bandwidth * STREAMED)
    if away:
        passed = habits.state_bytes + habits.shard_bytes * ("weights" in load.offload)
        seconds += passed / (device.host * _HOST_SHARE)
    return shard * seconds, 0.0


def _shard(load: Workload) -> float:
    """Elements that one rank steps."""
    degrees, model = load.degrees, load.model
    over = degrees.tensor * degrees.pipeline
    own = (model.parameters - model.layers * model.experts * model.expert_parameters) / over
    copies = degrees.data * degrees.context
    among = 1
    if degrees.kind in ("zero3", "zero2"):
        among = degrees.sharded
    elif degrees.kind == "zero1":
        among = degrees.optimizer or copies
    experts = model.layers * model.experts * model.expert_parameters / degrees.pipeline
    if degrees.expert_shards:
        few = degrees.expert_optimizer * degrees.expert_shards
        return own / among + experts / degrees.expert / few
    return own / among + experts / degrees.expert / max(1, among // degrees.expert)


def _accumulated(load: Workload, device: Device) -> float:
    """Seconds in which a micro-batch's gradients are added to those of the others."""
    degrees, model = load.degrees, load.model
    held: float = model.layers * model.dense_parameters + model.embedding
    held /= degrees.tensor * degrees.pipeline * degrees.sharded
    held += (
        model.layers * model.experts * model.expert_parameters / (degrees.pipeline * degrees.expert)
    )
    return held * load.habits.accumulates / (device.bandwidth * STREAMED)
