"""Seconds of the messages of weights and of gradients, and how many of them are exposed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

from internsp.app.plan.devices import Device
from internsp.app.plan.links import Group, beside
from internsp.app.plan.workload import Habits, Workload


@dataclass(frozen=True)
class WeightMessages:
    """Seconds of messages of weights.

    Attributes:
        gather, again: of one block in a micro-batch, for its forward and for its backward.
        reduce: of its gradients in a micro-batch.
        copies: of its gradients in a step, among ranks that have the same shard.
        gather_ends, reduce_ends, copies_ends: of the embedding, or of the head.
        reduced, returned: where no weight is sharded, of all gradients in a step, and of weights.
    """

    gather: float = 0.0
    again: float = 0.0
    reduce: float = 0.0
    copies: float = 0.0
    gather_ends: float = 0.0
    reduce_ends: float = 0.0
    copies_ends: float = 0.0
    reduced: float = 0.0
    returned: float = 0.0

    @classmethod
    def of(cls, load: Workload, device: Device) -> WeightMessages:
        """Those of ``load``."""
        if max(load.degrees.sharded, load.degrees.expert_shards) <= 1:  # no weight is sharded
            return replicas(load, device)
        dense, experts = dense_messages(load, device), expert_messages(load, device)
        return cls(*map(add, vars(dense).values(), vars(experts).values()))


def dense_messages(load: Workload, device: Device) -> WeightMessages:
    """Of weights that every token uses; of experts', too, where they are sharded as others."""
    degrees, habits, model = load.degrees, load.habits, load.model
    over = degrees.sharded
    group = Group(over, degrees.tensor, device)
    held = model.dense_parameters / degrees.tensor
    if not degrees.expert_shards:
        held += model.experts * model.expert_parameters / degrees.expert
    more = habits.collectives - 1
    gather = group.gather(held * habits.gather_bytes) + more * group.latency
    reduce = _reduced(group, held, habits, more)
    copies = Group(degrees.copies, degrees.tensor * over, device)
    rest = model.embedding / degrees.tensor / degrees.pipeline
    return WeightMessages(
        gather,
        0.0 if degrees.kind == "zero2" else gather,
        reduce,
        copies.all_reduce(held * habits.reduce_bytes / over, habits.sends_parts),
        group.gather(rest * habits.gather_bytes),
        _reduced(group, rest, habits),
        copies.all_reduce(rest * habits.reduce_bytes / over, habits.sends_parts),
    )


def expert_messages(load: Workload, device: Device) -> WeightMessages:
    """Of experts' weights, where their shards have degrees of their own."""
    degrees, habits, model = load.degrees, load.habits, load.model
    if not degrees.expert_shards or not model.experts:
        return WeightMessages()
    own = model.experts * model.expert_parameters / degrees.expert
    few = Group(degrees.expert_shards, degrees.expert_stride, device)
    gather = few.gather(own * habits.gather_bytes)
    alike = Group(degrees.expert_copies, degrees.expert * degrees.expert_shards, device)
    return WeightMessages(
        gather,
        0.0 if degrees.kind == "zero2" else gather,
        _reduced(few, own, habits),
        alike.all_reduce(own * habits.reduce_bytes / degrees.expert_shards, habits.sends_parts),
    )


def _reduced(group: Group, elements: float, habits: Habits, more: int = 0) -> float:
    """Seconds of a reduce-scatter; in two levels, sums of neighbors travel as wide as they are.

    Args:
        more: further collectives in which ``elements`` are reduced.
    """
    near, nbytes = habits.reduce_near, elements * habits.reduce_bytes
    parts = habits.sends_parts and not habits.reduces_in_ring
    wide = max(habits.sum_bytes, habits.reduce_bytes)
    if near is None:
        near = group.within if group.within * habits.reduce_bytes > wide else 0
    if not 1 < near < group.size or group.size % near:
        return group.reduce(nbytes, parts) + more * group.reduce(0, parts)
    among = Group(near, group.stride, group.device)
    between = Group(group.size // near, group.stride * near, group.device)
    later = more * (among.reduce(0, parts) + between.reduce(0, parts))
    sums = between.reduce(elements / near * wide, parts)
    return among.reduce(nbytes, parts) + sums + later


def exposed(
    load: Workload,
    found: WeightMessages,
    forward: float,
    backward: float,
    blocks: float,
    slowdown: float,
) -> tuple[float, float, float]:
    """Exposed gathers, exposed reductions and all messages of sharded weights, a micro-batch.

    Args:
        forward, backward: seconds of one block's computation.
        blocks: of a stage, on average.
    """
    habits = load.habits
    keeps = habits.keeps_gathers and load.degrees.pipeline > 1
    often = 1 / load.micro_batches if keeps else 1.0
    gather, again = found.gather, 0.0 if keeps else found.again
    reduce, mean = found.reduce * often, found.copies / load.micro_batches
    if not habits.overlaps:
        gathers = blocks * (gather * often + again) + found.gather_ends
        reductions = blocks * (reduce + mean) + found.reduce_ends
        reductions += found.copies_ends / load.micro_batches
        return gathers, reductions, gathers + reductions
    # One block's gather is exposed before the first, one's reduction after the last.
    others = max(blocks - 1, 0)
    ahead = others * (beside(forward, gather * often, slowdown) - forward)
    both = again + reduce
    behind = others * (beside(backward, both, slowdown) - backward)
    share = again / both if both else 0.0
    # Copies exchange their sums once a step, in the last backward.
    last = others * (beside(backward, both + found.copies, slowdown) - backward) - behind
    rest = found.copies_ends / load.micro_batches
    ends = (found.gather_ends + found.reduce_ends) * often + rest
    early = ahead + behind * share + (gather + found.gather_ends) * often
    late = behind * (1 - share) + last / load.micro_batches
    late += reduce + mean + found.reduce_ends * often + rest
    return early, late, blocks * (gather * often + again + reduce + mean) + ends


def replicas(load: Workload, device: Device) -> WeightMessages:
    """Of replicas with whole weights."""
    degrees, habits, model = load.degrees, load.habits, load.model
    copies = degrees.data * degrees.context
    if copies == 1:
        return WeightMessages()
    stride, parts = degrees.tensor, habits.sends_parts
    dense = model.layers * model.dense_parameters / degrees.pipeline
    dense += model.embedding * (1 if degrees.pipeline > 1 or model.tied else 2)
    gradients = dense / degrees.tensor * habits.reduce_bytes
    weights = dense / degrees.tensor * habits.gather_bytes
    group = Group(copies, stride, device)
    reduced, returned = group.reduce(gradients, parts), group.gather(weights)
    if degrees.kind != "none" and 0 < degrees.optimizer < copies:
        within = Group(degrees.optimizer, stride, device)
        across = Group(copies // degrees.optimizer, stride * degrees.optimizer, device)
        reduced = within.reduce(gradients, parts)
        reduced += across.all_reduce(gradients / degrees.optimizer, parts)
        returned = within.gather(weights)
    if degrees.kind == "none":
        returned = reduced
    elif habits.owners:
        reduced = group.all_reduce(gradients, parts)
        within = Group(degrees.optimizer or copies, stride, device)
        sent = min(within.size, model.tensors)
        returned = within.gather(weights) + (sent - 1) * within.latency
    if model.experts:
        own = model.layers * model.experts * model.expert_parameters / degrees.pipeline
        among = max(1, copies // degrees.expert)
        few = Group(among, stride * degrees.expert, device)
        reduced += few.reduce(own / degrees.expert * habits.reduce_bytes, parts)
        returned += few.gather(own / degrees.expert * habits.gather_bytes)
    return WeightMessages(reduced=reduced, returned=returned)


def exposed_replicas(
    load: Workload,
    sent: WeightMessages,
    forward: float,
    backward: float,
    slowdown: float,
) -> float:
    """Exposed seconds a step of :func:`replicas`, beside a micro-batch's computation."""
    if not load.habits.overlaps:
        return sent.reduced + sent.returned
    found = beside(backward, sent.reduced, slowdown) - backward
    if load.habits.owners:
        return found + sent.returned
    return found + beside(forward, sent.returned, slowdown) - forward
