"""Ring attention: attention of a sequence whose positions are sharded over the ranks of a ring.

Each rank computes with its own queries. It receives blocks of keys and values as its route says
(:mod:`.routes`), each while it computes with the block before, and merges the results
(:mod:`.partial`). In backward the blocks are sent once more, and each rank sends its gradients of a
block directly to the block's owner. The owner adds them in the order of the steps, so that the
result is the same, bit for bit, in every run.

Two custom operators implement it, so that selective checkpointing keeps output and log-sum-exp and
recompute repeats neither messages nor attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from internsp.base.handles import HandleTable
from internsp.base.in_flight import phase_of
from internsp.sp.exchange import ExchangeGroup
from internsp.sp.partial import BlockAttention
from internsp.sp.ranges import KernelCall, MaskSpec, Ranges, count_positions
from internsp.sp.routes import Route, Transfer, require_form, route


@dataclass(eq=False)
class Ring:
    """The arguments of a ring attention that are not tensors; its call and its graph keep it alive.

    Attributes:
        group: the ranks of the ring, in the order of their positions' ranges in ``route``.
        route: this rank's steps.
        kv_index: the key/value head of each query head, on this rank.
    """

    group: ExchangeGroup
    route: Route
    spec: MaskSpec
    kv_index: tuple[int, ...]
    scale: float
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = _RINGS.add(self)


_RINGS: HandleTable[Ring] = HandleTable("group of this attention")


@dataclass(frozen=True)
class RingGroup:
    """The ranks between which keys and values are sent, in the order of the ring, and how.

    Args:
        form, inner: see :func:`internsp.sp.routes.route`.

    Raises:
        ConfigError: a form that the group cannot use.
    """

    group: ExchangeGroup
    form: str = "auto"
    inner: int = 1

    def __post_init__(self) -> None:
        require_form(self.group.size, self.form, self.inner)

    def ring(
        self, held: tuple[Ranges, ...], spec: MaskSpec, kv_index: tuple[int, ...], scale: float
    ) -> Ring:
        """The ring in which each rank holds the ranges ``held``; other arguments as in ``Ring``."""
        own = route(held, spec, self.group.rank, self.form, self.inner)
        return Ring(self.group, own, spec, kv_index, scale)


@dataclass
class _Block:
    """Keys and values of the ``spans`` of a block, one span after another: ``[B, n, kv, ...]``.

    Attributes:
        storage: both as one flat tensor, where they lie in one.
    """

    spans: Ranges
    k: Tensor
    v: Tensor
    storage: Tensor | None = None

    @classmethod
    def empty(cls, spans: Ranges, k: Tensor, v: Tensor) -> _Block:
        """An uninitialized block of ``spans``, shaped like ``k`` and ``v``, in one storage."""
        count = count_positions(spans)
        shapes = [(x.shape[0], count, *x.shape[2:]) for x in (k, v)]
        sizes = [shape[0] * count * shape[2] * shape[3] for shape in shapes]
        flat = k.new_empty(sum(sizes))
        own_k, own_v = (x.view(s) for x, s in zip(flat.split(sizes), shapes, strict=True))
        return cls(spans, own_k, own_v, flat)

    def flat(self) -> Tensor:
        """Keys and values as one flat tensor, as they are sent."""
        if self.storage is not None:
            return self.storage
        return torch.cat([self.k.reshape(-1), self.v.reshape(-1)])

    def select(self, spans: Ranges) -> _Block:
        """The part of the block that covers ``spans``."""
        if spans == self.spans:
            return self
        local = [slice(*self.local_span(span)) for span in spans]
        parts = (torch.cat([x[:, one] for one in local], 1) for x in (self.k, self.v))
        return _Block(spans, *parts)

    def add(self, other: _Block) -> None:
        """Add a part of the block, in place."""
        at = 0
        for span in other.spans:
            start, stop = self.local_span(span)
            self.k[:, start:stop] += other.k[:, at : at + stop - start]
            self.v[:, start:stop] += other.v[:, at : at + stop - start]
            at += stop - start

    def local_span(self, span: tuple[int, int]) -> tuple[int, int]:
        """Start and stop, in these tensors, of a span of the block."""
        at = 0
        for start, stop in self.spans:
            if start <= span[0] and span[1] <= stop:
                return at + span[0] - start, at + span[1] - start
            at += stop - start
        raise AssertionError(f"{span} is not among {self.spans}")

    def localized(self, calls: tuple[KernelCall, ...]) -> tuple[KernelCall, ...]:
        """``calls`` with the offsets of their keys into these tensors instead of the block."""
        if self.spans and self.spans[0][0] == 0 and len(self.spans) == 1:
            return calls
        return tuple(
            KernelCall(p.row, p.q, self.local_span(p.k), p.kind, p.distance) for p in calls
        )


_MOST_TAGS = 1 << 30


class _Transfers:
    """The messages of one forward or backward of one attention: of ``kv`` or of ``gradients``."""

    def __init__(
        self, ring: Ring, k: Tensor, v: Tensor, adjoint: bool, unit: str, label: str
    ) -> None:
        self.ring, self.unit, self.label, self.like = ring, unit, label, (k, v)
        self.phase = phase_of(adjoint)
        ring.group.reporter.launched("RING", f"{label} of {unit}", self.phase)
        own = ring.route.steps[0].block
        self.held = {own: _Block(((0, k.shape[1]),), k, v)}
        self._receives: dict[int, tuple[Any, _Block, int]] = {}
        self._sends: list[tuple[Any, Tensor]] = []
        self._tag = ring.group.next_tag()
        self._works: list[Any] = []  # of messages in flight
        # Uses left of each block; after the last one its memory is freed.
        self._uses_left = {
            block: sum(
                (step.block == block) + sum(transfer.block == block for transfer in step.sends)
                for step in ring.route.steps
            )
            for block in range(len(ring.route.steps))
        }

    def launch(
        self, sends: list[tuple[Transfer, _Block]], receives: list[tuple[Transfer, _Block]]
    ) -> None:
        """Start the messages of a step; two ranks have at most one in each direction."""
        group = self.ring.group
        sent = [(block.flat(), transfer) for transfer, block in sends]
        # Empty on ranks without heads; then the peer's is empty, too.
        sent = [(flat, transfer) for flat, transfer in sent if flat.numel()]
        received: list[tuple[Transfer, _Block, int]] = []
        for transfer, block in receives:
            if not block.flat().numel():
                self.held[transfer.block] = block
                continue
            event = group.trace.record(
                "RING", self.unit, self.label, self.phase, block.flat().nbytes, in_flight=True
            )
            received.append((transfer, block, event))
        if not sent and not received:
            return
        first = self._tag * len(self.ring.route.steps) % _MOST_TAGS
        with self._naming():
            made = group.batch_isend_irecv([
                *((True, flat, to.peer, first + to.block) for flat, to in sent),
                *((False, block.flat(), to.peer, first + to.block) for to, block, _ in received),
            ])  # fmt: skip
        self._works += made
        group.keep(self._tag, self._works)
        works = iter(made)
        self._sends += [(next(works), flat) for flat, _ in sent]
        for transfer, block, event in received:
            self._receives[transfer.block] = next(works), block, event

    def wait(self, block: int) -> _Block:
        """Return a block, after waiting for it if its receive is in flight."""
        incoming = self._receives.pop(block, None)
        if incoming is None:
            return self.held[block]
        work, found, event = incoming
        trace = self.ring.group.trace
        begin = trace.now()
        with self._naming():
            work.wait()
        self._works.remove(work)  # it holds the block's memory
        end = trace.now()
        trace.waited(begin, end)
        trace.record("RING_WAIT", self.unit, self.label, self.phase, start=begin, end=end)
        trace.finish(event, end)
        self.held[block] = found
        return found

    def step(self, number: int) -> tuple[tuple[KernelCall, ...], _Block | None]:
        """Launch a step's messages; return its kernel calls and, if there are any, their block."""
        step = self.ring.route.steps[number]
        sends = [
            (transfer, self.wait(transfer.block).select(transfer.spans)) for transfer in step.sends
        ]
        receives = [
            (transfer, _Block.empty(transfer.spans, *self.like)) for transfer in step.receives
        ]
        self.launch(sends, receives)
        for transfer in step.sends:
            self._release(transfer.block)
        if not step.calls:
            self._release(step.block)
            return (), None
        block = self.wait(step.block)
        self._release(step.block)
        return block.localized(step.calls), block

    def _release(self, block: int) -> None:
        """Count a use of a block as done; free its memory after the last one."""
        self._uses_left[block] -= 1
        if not self._uses_left[block]:
            self.held.pop(block, None)

    def wait_sends(self) -> None:
        """Wait for all sends."""
        with self._naming():
            for work, _ in self._sends:
                work.wait()
        self._sends.clear()
        self.ring.group.release(self._tag)

    def _naming(self) -> AbstractContextManager[Any]:
        """Name the attention where another rank has closed the connection."""
        what = f"{self.label} of {self.unit or 'attention'} ({self.phase})"
        return self.ring.group.reporter.naming(what)


def _forward_impl(q: Tensor, k: Tensor, v: Tensor, handle: int, unit: str) -> tuple[Tensor, Tensor]:
    ring = _RINGS.find(handle)
    attend = BlockAttention(q, v.shape[3], ring.kv_index, ring.spec, ring.scale)
    batch, length, heads, _ = q.shape
    out = q.new_zeros((batch, length, heads, v.shape[3]), dtype=attend.acc_dtype)
    lse = q.new_full((batch, heads, length), -torch.inf, dtype=attend.acc_dtype)
    transfers = _Transfers(ring, k, v, False, unit, "kv")
    for number in range(len(ring.route.steps)):
        calls, block = transfers.step(number)
        if block is not None and q.numel():
            attend.forward(out, lse, block.k, block.v, calls)
    transfers.wait_sends()
    return out.to(q.dtype), lse


def _backward_impl(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int, unit: str
) -> tuple[Tensor, Tensor, Tensor]:
    ring = _RINGS.find(handle)
    attend = BlockAttention(q, v.shape[3], ring.kv_index, ring.spec, ring.scale)
    acc_dtype = attend.acc_dtype
    dq = torch.zeros_like(q, dtype=acc_dtype)
    own = _Block(((0, k.shape[1]),), *(torch.zeros_like(x, dtype=acc_dtype) for x in (k, v)))
    transfers = _Transfers(ring, k, v, True, unit, "kv")
    gradients = _Transfers(ring, k, v, True, unit, "gradients")
    receiving: list[Transfer] = []
    for number, step in enumerate(ring.route.steps):
        calls, block = transfers.step(number)
        total = own
        if block is not None and number:
            zeros = (torch.zeros_like(x, dtype=acc_dtype) for x in (block.k, block.v))
            total = _Block(block.spans, *zeros)
        if block is not None and q.numel():
            attend.backward(grad, out, lse, block.k, block.v, calls, dq, total.k, total.v)
        sends, receives = [], []
        if step.gradient_send is not None:
            part = total.select(step.gradient_send.spans)
            sends.append(
                (step.gradient_send, _Block(part.spans, part.k.to(k.dtype), part.v.to(v.dtype)))
            )
        if step.gradient_receive is not None:
            part = _Block.empty(step.gradient_receive.spans, k, v)
            receives.append((step.gradient_receive, part))
        if receiving:  # receive of the step before: at most one message from a rank is in flight
            own.add(gradients.wait(receiving.pop().block))
        gradients.launch(sends, receives)
        receiving += [transfer for transfer, _ in receives]
    if receiving:
        own.add(gradients.wait(receiving.pop().block))
    transfers.wait_sends()
    gradients.wait_sends()
    return dq.to(q.dtype), own.k.to(k.dtype), own.v.to(v.dtype)


OPERATORS: dict[str, Callable[..., Any]] = {
    "internsp_sp::ring": _forward_impl,
    "internsp_sp::ring_backward": _backward_impl,
}
"""Implementations of the operators, see :data:`internsp.sp.exchange.OPERATORS`."""
_forward = torch.library.custom_op("internsp_sp::ring", _forward_impl, mutates_args=())
_backward = torch.library.custom_op("internsp_sp::ring_backward", _backward_impl, mutates_args=())


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, handle, unit = inputs
    out, lse = output
    ctx.ring, ctx.unit = _RINGS.find(handle), unit
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.mark_non_differentiable(lse)


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.ring.handle, ctx.unit), None, None


_forward.register_autograd(_gradient, setup_context=_setup)


@torch.compiler.disable
def ring_attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor, unit: str = "") -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of the ring.

    Blocks until this rank's messages are complete.

    Args:
        q: ``[B, n, h, d]``, this rank's positions, in the order of its ranges.
        k: ``[B, n, kv, d]``, likewise.
        v: ``[B, n, kv, d of v]``, likewise.
        unit: the attention module's name in the trace.

    Returns:
        ``[B, n, h, d of v]``.
    """
    out: Tensor = _forward(q, k, v, ring.handle, unit)[0]
    return out
