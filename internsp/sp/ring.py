"""Attention of a sequence whose positions are cut over a group of ranks: keys and values travel.

Each rank computes with its own queries; blocks of keys and values come to it along its route
(:mod:`.routes`), the next while it computes with the one before. The results are merged
(:mod:`.partial`). In backward the blocks travel once more, and each rank's gradients of a block go
straight to the block's owner, which adds them in the order of the steps, so that the same run gives
the same bits.

Two custom operators, so that selective checkpointing keeps output and log-sum-exp and repeats
neither messages nor attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from internsp.sp.exchange import Channel, phase_of
from internsp.sp.handles import Handles
from internsp.sp.partial import Attend
from internsp.sp.ranges import Part, Ranges, Seen
from internsp.sp.routes import Move, Route, require_form, route


@dataclass(eq=False)
class Ring:
    """What one attention needs to know beside its tensors. Kept alive by its module and graph.

    Attributes:
        reads: the key/value head of each query head, on this rank.
    """

    channel: Channel
    route: Route
    seen: Seen
    reads: tuple[int, ...]
    scale: float
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = _RINGS.give(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        """A copied model keeps talking through the same group."""
        return self


_RINGS: Handles[Ring] = Handles("group of this attention")
_MOST_RINGS = 16  # batches whose routes are remembered


class Rings:
    """The rings of one group, each remembered for the next batch of the same cut.

    Args:
        channel: ranks between which keys and values travel, in the order of their parts.
        form, inner: how they travel, see :func:`internsp.sp.routes.routes`.

    Raises:
        ConfigError: a form that cannot be.
    """

    def __init__(self, channel: Channel, form: str = "auto", inner: int = 1) -> None:
        require_form(channel.size, form, inner)
        self.channel, self.form, self.inner = channel, form, inner
        self._known: dict[tuple[Any, ...], Ring] = {}

    def of(
        self, held: tuple[Ranges, ...], seen: Seen, reads: tuple[int, ...], scale: float
    ) -> Ring:
        """The ring for what each of its ranks holds; the rest as :class:`Ring` has it."""
        key = (held, seen, reads, scale)
        ring = self._known.get(key)
        if ring is None:
            own = route(held, seen, self.channel.rank, self.form, self.inner)
            ring = Ring(self.channel, own, seen, reads, scale)
            while len(self._known) >= _MOST_RINGS:
                self._known.pop(next(iter(self._known)))
            self._known[key] = ring
        return ring

    def __deepcopy__(self, memo: dict[int, Any]) -> Rings:
        """A copied model keeps talking through the same group."""
        return self


@dataclass
class _Block:
    """Keys and values of ``what`` of a block, one span after another."""

    what: Ranges
    k: Tensor
    v: Tensor

    @classmethod
    def empty(cls, what: Ranges, k: Tensor, v: Tensor, dtype: torch.dtype) -> _Block:
        """One for ``what``, like ``k`` and ``v``, in one piece of memory."""
        count = sum(stop - start for start, stop in what)
        shapes = [(x.shape[0], count, *x.shape[2:]) for x in (k, v)]
        sizes = [shape[0] * count * shape[2] * shape[3] for shape in shapes]
        flat = k.new_empty(sum(sizes), dtype=dtype)
        pieces = (x.view(shape) for x, shape in zip(flat.split(sizes), shapes, strict=True))
        return cls(what, *pieces)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.k, self.v

    def flat(self) -> Tensor:
        """Both, as they travel."""
        together = self.k.untyped_storage()._cdata == self.v.untyped_storage()._cdata
        if together and self.v.storage_offset() == self.k.storage_offset() + self.k.numel():
            size = self.k.numel() + self.v.numel()
            if self.k.is_contiguous() and self.v.is_contiguous():
                return self.k.as_strided((size,), (1,))
        return torch.cat([self.k.reshape(-1), self.v.reshape(-1)])

    def only(self, what: Ranges) -> _Block:
        """A part of it."""
        if what == self.what:
            return self
        places = [self.place(span) for span in what]
        return _Block(what, *(
            torch.cat([x[:, start:stop] for start, stop in places], 1) for x in self.pair
        ))  # fmt: skip

    def add(self, other: _Block) -> None:
        """Add what ``other`` has of it."""
        at = 0
        for span in other.what:
            start, stop = self.place(span)
            self.k[:, start:stop] += other.k[:, at : at + stop - start]
            self.v[:, start:stop] += other.v[:, at : at + stop - start]
            at += stop - start

    def place(self, span: tuple[int, int]) -> tuple[int, int]:
        """Where a span of the block lies in it."""
        at = 0
        for start, stop in self.what:
            if start <= span[0] and span[1] <= stop:
                return at + span[0] - start, at + span[1] - start
            at += stop - start
        raise AssertionError(f"{span} is not among {self.what}")

    def placed(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """``parts``, with their keys counted in what is held."""
        if self.what and self.what[0][0] == 0 and len(self.what) == 1:
            return parts
        return tuple(Part(p.row, p.q, self.place(p.k), p.kind, p.distance) for p in parts)


class _Travel:
    """The messages of one forward or backward of one attention: ``kv``, or ``gradients``."""

    def __init__(
        self, ring: Ring, k: Tensor, v: Tensor, adjoint: bool, unit: str, label: str
    ) -> None:
        self.ring, self.unit, self.label, self.like = ring, unit, label, (k, v)
        self.phase = phase_of(adjoint)
        own = ring.route.steps[0].block
        self.held = {own: _Block(((0, k.shape[1]),), k, v)}
        self._coming: dict[int, tuple[Any, Tensor, _Block, int]] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        # How often each block is still read: its memory is given back after the last time.
        self._left = {
            block: sum(
                (step.block == block) + sum(move.block == block for move in step.sends)
                for step in ring.route.steps
            )
            for block in range(len(ring.route.steps))
        }

    def launch(self, sends: list[tuple[Move, _Block]], receives: list[tuple[Move, _Block]]) -> None:
        """Start the messages of a step, of which two ranks have at most one in each direction."""
        channel, trace = self.ring.channel, self.ring.channel.trace
        operations: list[tuple[bool, Tensor, Move]] = []
        notes: list[tuple[_Block, int]] = []
        for move, block in sends:
            flat = block.flat()
            if flat.numel():  # a rank without heads has none, and so have those it talks to
                operations.append((True, flat, move))
                notes.append((block, -1))
        for move, block in receives:
            flat = block.flat()
            if not flat.numel():
                self.held[move.block] = block
                continue
            event = -1
            if trace is not None:
                event = trace.record(
                    "RING", unit=self.unit, weight=self.label, phase=self.phase,
                    nbytes=flat.numel() * flat.element_size(), in_flight=True,
                )  # fmt: skip
            operations.append((False, flat, move))
            notes.append((block, event))
        if not operations:
            return
        works = channel.messages(
            [(leaves, flat, move.peer, move.block) for leaves, flat, move in operations]
        )
        for work, (leaves, flat, move), (block, event) in zip(
            works, operations, notes, strict=True
        ):
            if leaves:
                self._sent.append((work, flat))
            else:
                self._coming[move.block] = (work, flat, block, event)

    def wait(self, block: int) -> _Block:
        """Wait for a block, if it is on its way."""
        coming = self._coming.pop(block, None)
        if coming is None:
            return self.held[block]
        work, _, found, event = coming
        trace = self.ring.channel.trace
        begin = None if trace is None else trace.now()
        work.wait()
        if trace is not None:
            end = trace.now()
            trace.waited(begin, end)
            trace.record("RING_WAIT", self.unit, self.label, self.phase, start=begin, end=end)
            trace.finish(event, end)
        self.held[block] = found
        return found

    def step(self, number: int) -> tuple[tuple[Part, ...], _Block | None]:
        """Launch a step's keys and values; its parts, and the block to compute them with."""
        step = self.ring.route.steps[number]
        sends = [(move, self.wait(move.block).only(move.what)) for move in step.sends]
        receives = [
            (move, _Block.empty(move.what, *self.like, self.like[0].dtype))
            for move in step.receives
        ]
        self.launch(sends, receives)
        for move in step.sends:
            self._done(move.block)
        if not step.parts:
            self._done(step.block)
            return (), None
        block = self.wait(step.block)
        self._done(step.block)
        return block.placed(step.parts), block

    def _done(self, block: int) -> None:
        """A use of a block is over: after the last its memory is given back."""
        self._left[block] -= 1
        if not self._left[block]:
            self.held.pop(block, None)

    def end(self) -> None:
        """All that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def _attended(q: Tensor, k: Tensor, v: Tensor, handle: int, unit: str) -> tuple[Tensor, Tensor]:
    ring = _RINGS.find(handle)
    attend = Attend(q, v.shape[3], ring.reads, ring.seen, ring.scale)
    batch, length, heads, _ = q.shape
    out = q.new_zeros((batch, length, heads, v.shape[3]), dtype=attend.wide)
    lse = q.new_full((batch, heads, length), -torch.inf, dtype=attend.wide)
    travel = _Travel(ring, k, v, False, unit, "kv")
    for number in range(len(ring.route.steps)):
        parts, block = travel.step(number)
        if block is not None and q.numel():
            attend.forward(out, lse, block.k, block.v, parts)
    travel.end()
    return out.to(q.dtype), lse


def _returned(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int, unit: str
) -> tuple[Tensor, Tensor, Tensor]:
    ring = _RINGS.find(handle)
    attend = Attend(q, v.shape[3], ring.reads, ring.seen, ring.scale)
    wide = attend.wide
    dq = torch.zeros_like(q, dtype=wide)
    own = _Block(((0, k.shape[1]),), *(torch.zeros_like(x, dtype=wide) for x in (k, v)))
    travel = _Travel(ring, k, v, True, unit, "kv")
    home = _Travel(ring, k, v, True, unit, "gradients")
    arriving: list[Move] = []
    for number, step in enumerate(ring.route.steps):
        parts, block = travel.step(number)
        total = own
        if block is not None and number:
            total = _Block(block.what, *(torch.zeros_like(x, dtype=wide) for x in block.pair))
        if block is not None and q.numel():
            attend.backward(grad, out, lse, block.k, block.v, parts, dq, total.k, total.v)
        sends, receives = [], []
        if step.home is not None:
            part = total.only(step.home.what)
            sends.append((step.home, _Block(part.what, part.k.to(k.dtype), part.v.to(v.dtype))))
        if step.arrives is not None:
            receives.append((step.arrives, _Block.empty(step.arrives.what, k, v, k.dtype)))
        if arriving:  # of the step before, so that two are never in flight from one rank
            own.add(home.wait(arriving.pop().block))
        home.launch(sends, receives)
        arriving += [move for move, _ in receives]
    if arriving:
        own.add(home.wait(arriving.pop().block))
    travel.end()
    home.end()
    return dq.to(q.dtype), own.k.to(k.dtype), own.v.to(v.dtype)


OPERATORS: dict[str, Callable[..., Any]] = {
    "internsp_sp::ring": _attended,
    "internsp_sp::ring_backward": _returned,
}
"""As :data:`internsp.sp.exchange.OPERATORS`."""
_forward = torch.library.custom_op("internsp_sp::ring", _attended, mutates_args=())
_backward = torch.library.custom_op("internsp_sp::ring_backward", _returned, mutates_args=())


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
    """Attention of this rank's positions to those of the whole group.

    Args:
        q: ``[B, n, h, d]``, this rank's positions, in the order of its ranges.
        k: ``[B, n, kv, d]``, likewise.
        v: ``[B, n, kv, d of v]``.

    Returns:
        ``[B, n, h, d of v]``.
    """
    out: Tensor = _forward(q, k, v, ring.handle, unit)[0]
    return out
