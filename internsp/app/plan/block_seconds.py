"""Seconds of one block in a micro-batch: computation, and messages that it waits for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from internsp.app.plan.compute import (
    STREAMED,
    Work,
    attention,
    block_products,
    block_products_backward,
    fed,
    passes,
)
from internsp.app.plan.devices import Device
from internsp.app.plan.links import Group, beside
from internsp.app.plan.workload import Workload
from internsp.experts.rule import expected_owners


@dataclass(frozen=True)
class BlockSeconds:
    """One block's seconds in a micro-batch; pairs are forward and backward.

    Attributes:
        forward, backward, again: computation, without and of the recompute.
        sequences: exchanges of parts of sequences that attention waits for.
        experts: exchanges of tokens between experts' ranks.
        slowdown: how much longer computation takes beside a message.
        on_host: the host computes it, so that launches take its time.
        tensor: messages of tensor parallelism, beside nothing: of other programs.
        hidden_tensor: those beside products.
    """

    forward: Work
    backward: Work
    again: Work
    sequences: tuple[float, float]
    experts: tuple[float, float]
    slowdown: float
    on_host: bool
    tensor: tuple[float, float] = (0.0, 0.0)
    hidden_tensor: tuple[float, float] = (0.0, 0.0)

    def slowed(self, at: int) -> float:
        """Seconds by which hidden tensor messages make forward (0) or backward (1) longer."""
        whole = (self.forward, self.backward)[at]
        work = whole.total - whole.attention  # beside attention a ring's messages run
        return beside(work, self.hidden_tensor[at], self.slowdown) - work

    def at(self, at: int) -> float:
        """All seconds of forward (0), or of backward with its recompute (1)."""
        work = self.forward.total if at == 0 else self.backward.total + self.again.total
        waited = self.tensor[at] + self.sequences[at] + self.experts[at]
        return work + waited + self.slowed(at)

    @property
    def messages(self) -> float:
        """Seconds of all of its messages."""
        kinds = (self.tensor, self.hidden_tensor, self.sequences, self.experts)
        return sum(sum(kind) for kind in kinds)


def block_seconds(load: Workload, device: Device) -> BlockSeconds:
    """What a block of ``load`` takes on ``device``."""
    habits, again = load.habits, load.recompute
    multiplied, last = block_products(load, device)
    attends, reads = attention(load, device), passes(load, device)
    forward = Work(multiplied, attends[0], reads[0])
    backward = Work(block_products_backward(load, device), attends[1], reads[1])
    products = again.products * multiplied
    if again.products and not habits.whole_recompute:
        products = max(0.0, again.products * (multiplied - last))
    read = again.passes * reads[0]
    if load.tiled:  # in each block, with the last product; a recompute stops before them
        own = fed(load, device)
        products = again.products * (multiplied - own.products) + own.products
        read = again.passes * (reads[0] - own.passes) + own.passes
    repeated = Work(products, again.attention * attends[0], read)
    whole = 1 if again.products and again.attention else 0
    return BlockSeconds(
        forward, backward, repeated, _context(load, device, attends, whole),
        _experts(load, device, whole), device.fitted.slowdown, device.kind == "cpu",
    )  # fmt: skip


def _context(
    load: Workload, device: Device, attends: tuple[float, float], again: int
) -> tuple[float, float]:
    """Exchanges of sequences of one block that attention waits for."""
    degrees, model = load.degrees, load.model
    if degrees.context == 1:
        return 0.0, 0.0
    features = model.head_dim / degrees.tensor
    by_heads = degrees.context // degrees.ring
    forward = backward = 0.0
    near, far = degrees.tensor, degrees.tensor * by_heads
    if degrees.ring_near:
        near, far = degrees.tensor * degrees.ring, degrees.tensor
    if by_heads > 1:
        group = Group(by_heads, near, device)
        sent = load.tokens * 2 * features
        to = group.exchange(sent * (model.heads + 2 * model.kv_heads))
        back = group.exchange(sent * model.heads)
        forward += to + back
        backward += (to + back) * (1 + again)
    if degrees.ring > 1:
        group = Group(degrees.ring, far, device)
        one = group.pass_on(load.tokens * 4 * model.kv_heads * features / by_heads)
        steps = degrees.ring - 1
        ahead, behind = (seconds / degrees.ring for seconds in attends)  # beside its messages
        forward += steps * max(0.0, one - ahead)
        backward += steps * (max(0.0, 2 * one - behind) + again * max(0.0, one - ahead))
        # Each part's output is merged with that of the others, in 32 bits.
        merged = load.tokens * model.heads * features * 12 / by_heads
        merged *= steps / (device.bandwidth * STREAMED)
        forward += merged
        backward += merged * (1 + again)
    return forward, backward


def _experts(load: Workload, device: Device, again: int) -> tuple[float, float]:
    degrees, model = load.degrees, load.model
    if not model.experts or degrees.expert == 1:
        return 0.0, 0.0
    group = Group(degrees.expert, degrees.owners_stride, device)
    copies, repeated = float(model.topk), 2
    if load.habits.once_an_owner:
        copies, repeated = expected_owners(model.experts, model.topk, degrees.expert), 1
    one = group.exchange(load.tokens / degrees.tensor * copies * model.hidden * 2)
    return 2 * one, (2 + repeated * again) * one
