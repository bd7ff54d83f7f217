"""Seconds of a step, by what they are spent on: the closed form that a search evaluates. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from internsp.app.plan.block_seconds import BlockSeconds, block_seconds
from internsp.app.plan.compute import STREAMED, head, model_flops
from internsp.app.plan.devices import Device
from internsp.app.plan.links import Group, beside
from internsp.app.plan.workload import Workload

PRODUCTS, ATTENTION, PASSES = "products", "attention", "element-wise passes"
RECOMPUTE, HEAD = "recompute", "head and loss"
GATHERS, REDUCTIONS = "exposed gathers", "exposed reductions"
SEQUENCES, TENSOR, EXPERTS = "exchanges of sequences", "tensor messages", "experts"
BUBBLE, REPLICAS, OPTIMIZER = "pipeline bubble", "replicas", "optimizer"
COPIES, HOST = "copies of offload", "host launches"

Parts = defaultdict[str, float]

_HOST_ADAM = 1.2e9  # elements a second that one process steps on its share of a host
_HOST_BACKWARD = 1.6  # launches of a backward, in those of a forward
_HOST_LINK = 20e9  # bytes a second and direction between a device and its host


@dataclass(frozen=True)
class StepSeconds:
    """A predicted step.

    Attributes:
        parts: seconds by what they are spent on.
        messages: seconds of messages, hidden or not.
        compute: seconds of computation.
        slowed: of ``parts``, seconds in which nothing waits: computation is slower beside messages.
    """

    parts: dict[str, float]
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
        """Share of the peak, by the count of :mod:`internsp.app.report.flops`: all keys count."""
        done = model_flops(load.model, load.sequence, causal=False) * self.rate(load)
        return done / device.peak[load.dtype]


def step_seconds(load: Workload, device: Device) -> StepSeconds:
    """Predict the seconds of one step of ``load`` on ``device``."""
    degrees, number = load.degrees, load.micro_batches
    block = block_seconds(load, device)
    blocks = load.model.layers / degrees.pipeline  # on average
    last = sum(ends(load, device))
    parts = _micro_batch(load, block, blocks)
    messages = blocks * block.messages
    forward, backward = paces(load, block)
    gathers, reductions, sent = _sharded(load, device, forward, backward, blocks)
    parts[GATHERS], parts[REDUCTIONS] = gathers, reductions
    one = sum(parts.values())
    for name in parts:
        parts[name] *= number
    messages = (messages + sent) * number
    alone = last if degrees.pipeline == 1 else 0.0
    parts[HEAD] = number * alone
    beside_it = blocks * backward + alone, blocks * forward
    parts[REPLICAS], sent = _replicas(load, device, *beside_it)
    messages += sent
    if degrees.pipeline > 1:
        _add_bubble(load, device, parts, one, last)
    parts[PASSES] += number * _accumulated(load, device)
    _add_optimizer(load, device, parts, blocks)
    compute = sum(parts[name] for name in (PRODUCTS, ATTENTION, PASSES, RECOMPUTE, HEAD))
    return StepSeconds({k: v for k, v in parts.items() if v > 0}, messages, compute)


def least_seconds(load: Workload, device: Device) -> float:
    """A lower bound of :func:`step_seconds`: without messages of weights, optimizer and bubble.

    It is the same for any weight degree, number of replicas and optimizer's ranks.
    """
    block = block_seconds(load, device)
    last = sum(ends(load, device)) / load.degrees.pipeline
    parts = _micro_batch(load, block, load.model.layers / load.degrees.pipeline)
    return load.micro_batches * (sum(parts.values()) + last)


def _micro_batch(load: Workload, block: BlockSeconds, blocks: float) -> Parts:
    """What one micro-batch takes on a stage with an average share of the blocks."""
    parts: Parts = defaultdict(float)
    parts[PRODUCTS] = blocks * (block.forward.products + block.backward.products)
    parts[ATTENTION] = blocks * (block.forward.attention + block.backward.attention)
    parts[PASSES] = blocks * (block.forward.passes + block.backward.passes)
    parts[RECOMPUTE] = blocks * block.again.total
    parts[TENSOR] = blocks * (sum(block.tensor) + block.slowed(0) + block.slowed(1))
    parts[SEQUENCES] = blocks * sum(block.sequences)
    parts[EXPERTS] = blocks * sum(block.experts)
    forward, backward = paces(load, block)
    parts[HOST] = blocks * (forward - block.at(0) + backward - block.at(1))
    return parts


def paces(load: Workload, block: BlockSeconds) -> tuple[float, float]:
    """Seconds of a block's forward and backward, no less than the host's launches of them."""
    host = load.habits.launches
    behind = _HOST_BACKWARD * host + (host if block.again.total else 0.0)
    return max(host, block.at(0)), max(behind, block.at(1))


def ends(load: Workload, device: Device) -> tuple[float, float]:
    """Seconds of embedding, head and loss, forward and backward: launched as a block is."""
    host, (before, after) = load.habits.launches, head(load, device)
    return max(host, before.total), max(_HOST_BACKWARD * host, after.total)


def _sharded(
    load: Workload, device: Device, forward: float, backward: float, blocks: float
) -> tuple[float, float, float]:
    """Exposed gathers, exposed reductions and all messages of sharded weights, a micro-batch."""
    degrees, habits, model = load.degrees, load.habits, load.model
    over = degrees.sharded
    if over == 1 and degrees.expert_shards < 2:
        return 0.0, 0.0, 0.0
    group = Group(over, degrees.tensor, device)
    slowdown = device.fitted.slowdown
    held = model.dense_parameters / degrees.tensor
    own = model.experts * model.expert_parameters / degrees.expert
    if not degrees.expert_shards:
        held, own = held + own, 0.0
    few = Group(degrees.expert_shards, degrees.expert_stride, device)
    gather = group.gather(held * habits.gather_bytes) + few.gather(own * habits.gather_bytes)
    reduce = group.gather(held * habits.reduce_bytes) + few.gather(own * habits.reduce_bytes)
    gather += (habits.collectives - 1) * group.latency
    reduce += (habits.collectives - 1) * group.latency
    if degrees.copies > 1:
        copies = Group(degrees.copies, degrees.tensor * over, device)
        reduce += copies.all_reduce(held * habits.reduce_bytes / over) / load.micro_batches
    if own:
        alike = Group(degrees.expert_copies, degrees.expert * degrees.expert_shards, device)
        sent = own * habits.reduce_bytes / degrees.expert_shards
        reduce += alike.all_reduce(sent) / load.micro_batches
    often = 1 / load.micro_batches if habits.keeps_gathers and degrees.pipeline > 1 else 1.0
    twice = 0.0 if degrees.kind == "zero2" or (habits.keeps_gathers and degrees.pipeline > 1) else 1
    rest = model.embedding / degrees.tensor / degrees.pipeline
    outer = group.gather(rest * habits.gather_bytes), group.gather(rest * habits.reduce_bytes)
    if not habits.overlaps:
        gathers = blocks * gather * (often + twice) + outer[0]
        reductions = blocks * reduce * often + outer[1]
        return gathers, reductions, gathers + reductions
    # One block's gather is in the open before the first, one's reduction after the last.
    others = max(blocks - 1, 0)
    ahead = others * (beside(forward, gather * often, slowdown) - forward)
    both = gather * twice + reduce * often
    behind = others * (beside(backward, both, slowdown) - backward)
    share = gather * twice / both
    exposed = ahead + behind * share + (gather + outer[0]) * often
    late = behind * (1 - share) + (reduce + outer[1]) * often
    sent = blocks * (gather * (often + twice) + reduce * often) + (outer[0] + outer[1]) * often
    return exposed, late, sent


def _replicas(
    load: Workload, device: Device, backward: float, forward: float
) -> tuple[float, float]:
    """Exposed seconds a step of gradients and weights of unsharded replicas, and all of them."""
    degrees, habits, model = load.degrees, load.habits, load.model
    alone = degrees.data * degrees.context == 1
    if degrees.sharded > 1 or degrees.expert_shards > 1 or alone:
        return 0.0, 0.0
    stride = degrees.tensor
    copies = degrees.data * degrees.context
    group = Group(copies, stride, device)
    dense = model.layers * model.dense_parameters / degrees.pipeline
    dense += model.embedding * (1 if degrees.pipeline > 1 or model.tied else 2)
    reduced = group.gather(dense / degrees.tensor * habits.reduce_bytes)
    returned = group.gather(dense / degrees.tensor * habits.gather_bytes)
    if degrees.kind != "none" and 0 < degrees.optimizer < copies:
        within = Group(degrees.optimizer, stride, device)
        across = Group(copies // degrees.optimizer, stride * degrees.optimizer, device)
        whole = dense / degrees.tensor * habits.reduce_bytes
        reduced = within.gather(whole) + across.all_reduce(whole / degrees.optimizer)
        returned = within.gather(dense / degrees.tensor * habits.gather_bytes)
    if degrees.kind == "none":
        returned = reduced
    if model.experts:
        own = model.layers * model.experts * model.expert_parameters / degrees.pipeline
        among = max(1, copies // degrees.expert)
        few = Group(among, stride * degrees.expert, device)
        reduced += few.gather(own / degrees.expert * habits.reduce_bytes)
        returned += few.gather(own / degrees.expert * habits.gather_bytes)
    if not habits.overlaps:
        return reduced + returned, reduced + returned
    slowdown = device.fitted.slowdown
    exposed = beside(backward, reduced, slowdown) - backward
    exposed += beside(forward, returned, slowdown) - forward
    return exposed, reduced + returned


def _add_bubble(load: Workload, device: Device, parts: Parts, one: float, last: float) -> None:
    """Add what a pipeline waits for: its first and last micro-batches, uneven stages, messages."""
    degrees, number = load.degrees, load.micro_batches
    stages, chunks, layers = degrees.pipeline, degrees.interleave, load.model.layers
    # The fullest stage has a block more in each chunk, or the head besides as many as others.
    most = chunks * -(-layers // (stages * chunks))
    slowest = max(one * most * stages / layers, one if layers % (stages * chunks) else one + last)
    parts[HEAD] += number * last / stages
    parts[BUBBLE] += number * (slowest - one - last / stages)
    parts[BUBBLE] += (stages - 1) / chunks * one
    group = Group(2, degrees.devices // stages, device)
    # Each tensor rank sends its part, also where all have the whole.
    one_way = group.pass_on(load.tokens * load.model.hidden * 2 / degrees.tensor)
    # The program that overlaps tensor messages overlaps these.
    hides = load.habits.tensor_overlap or load.habits.sends_ahead
    often = stages - 1 + (0 if hides else number * chunks)
    parts[BUBBLE] += 2 * one_way * often


def _add_optimizer(
    load: Workload, device: Device, parts: Parts, blocks: float
) -> None:
    """Add the optimizer's step, and copies of what is in host memory."""
    shard = _shard(load)
    if "optimizer" in load.offload:
        parts[COPIES] += shard * (2 + 2 + 4) / _HOST_LINK
        parts[OPTIMIZER] = shard / _HOST_ADAM
    else:
        each = {"eager": 100, "kernels": 34, "compiled": 44}[load.habits.fused]
        parts[OPTIMIZER] = shard * each / (device.bandwidth * STREAMED)
    if "activations" in load.offload:  # beside all of the step, there and back
        moved = 2 * blocks * load.tokens * load.model.hidden * 2 * load.micro_batches
        parts[COPIES] += max(0.0, moved / _HOST_LINK - sum(parts.values()))


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
        model.layers * model.experts * model.expert_parameters
        / (degrees.pipeline * degrees.expert)
    )
    return held * load.habits.accumulates / (device.bandwidth * STREAMED)
