"""How keys and values are sent between the ranks of a ring, step by step, as plain data.

A :class:`Route` lists one rank's steps: the block with which it computes, and the parts of blocks
that it sends and receives meanwhile. The forms are

- *ring* (arXiv 2310.01889), and *reverse*, the same in the other direction: at each hop a block
  goes to the next rank of the ring, but only the part that this rank and the ranks after it need;
- *double* (arXiv 2406.18485): a ring of inner rings of near ranks. A block goes around an inner
  ring while the part that the next inner ring needs is already on its way to that ring;
- *direct*: in the first step each block's owner sends each rank the part that it needs. This never
  sends more bytes than a ring, since no rank forwards a block; but a rank holds all parts at once.

In all forms each rank that has used keys and values sends their gradients directly to their owner.
Pure: no tensor, no group. Every rank computes which part of each block each rank needs, by a few
comparisons of two ranks' ranges, and from that what all ranks send in each form; it computes steps
and kernel calls for itself only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from internsp.errors import ConfigError
from internsp.sp.ranges import (
    KernelCall,
    MaskSpec,
    NeededSpans,
    Ranges,
    count_positions,
    kernel_calls,
    needed_spans,
    union,
)

FORMS = ("auto", "ring", "reverse", "double", "direct")


@dataclass(frozen=True)
class Transfer:
    """A part of a block that one rank sends to another.

    Attributes:
        block: the block, as the rank that owns it.
        peer: the rank at the other end.
        spans: the part, as half-open ranges of offsets into the block.
    """

    block: int
    peer: int
    spans: Ranges


@dataclass(frozen=True)
class Step:
    """One step of a rank: launch ``sends`` and ``receives``, then compute with ``block``.

    Attributes:
        block: the block, as the rank that owns it.
        calls: the kernel calls; empty where the rank needs nothing of the block.
        receives: the parts with which later steps compute, or which later steps forward.
        gradient_send: in backward, after the step: the gradients that go to the block's owner.
        gradient_receive: in backward, after the step: the gradients of the rank's own block, from
            the rank that has computed with it in this step.
    """

    block: int
    calls: tuple[KernelCall, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    gradient_send: Transfer | None
    gradient_receive: Transfer | None


@dataclass(frozen=True)
class Route:
    """One rank's steps of a ring attention.

    Attributes:
        form: the form, not ``auto``.
        steps: the first computes with the rank's own block; in each step every rank computes with
            a different block.
    """

    form: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Traffic:
    """What all ranks of a ring send, for a plan.

    Attributes:
        sent: by rank, positions whose keys and values it sends in a forward.
        in_flight: by rank, the most of them that it receives in two consecutive steps.
        returned: by rank, positions whose gradients of keys and values it sends in a backward.
    """

    sent: list[int]
    in_flight: list[int]
    returned: list[int]


def traffic(held: tuple[Ranges, ...], spec: MaskSpec, form: str, inner: int) -> Traffic:
    """What all ranks send by their :func:`route`, without steps and kernel calls."""
    require_form(len(held), form, inner)
    rings = _choose(held, spec, form, inner)
    returned = [
        sum(map(count_positions, needed)) - count_positions(needed[rank])
        for rank, needed in enumerate(rings.needed_spans)
    ]
    received = [[0] * len(held) for _ in held]
    for move in rings.moves():
        received[move.receiver][move.step] += count_positions(move.spans)
    in_flight = [max(map(sum, zip(came, [*came[1:], 0], strict=True))) for came in received]
    return Traffic(rings.sent, in_flight, returned)


@lru_cache(maxsize=64)
def route(
    held: tuple[Ranges, ...], spec: MaskSpec, rank: int, form: str = "auto", inner: int = 1
) -> Route:
    """The route of one rank.

    Args:
        held: the ranges of each rank of the group.
        form: ``auto`` takes the form in which the busiest rank sends least, then the one in which
            all ranks together send least; among equals the first of ``ring``, ``reverse`` (the
            opposite direction) and ``direct``.
        inner: ranks of an inner ring, for ``double``; a divisor of the number of ranks. An inner
            ring is consecutive ranks of ``held``, which is in the order of the ring (whether or
            not ranks that share heads are between them in the mesh). Choose as many ranks as have
            fast links to each other.

    Raises:
        ConfigError: see :func:`require_form`.
    """
    require_form(len(held), form, inner)
    rings = _choose(held, spec, form, inner)
    size, steps = len(held), []
    sends: list[list[Transfer]] = [[] for _ in range(size)]
    receives: list[list[Transfer]] = [[] for _ in range(size)]
    for move in rings.moves():
        if move.sender == rank:
            sends[move.step].append(Transfer(move.block, move.receiver, move.spans))
        elif move.receiver == rank:
            receives[move.step].append(Transfer(move.block, move.sender, move.spans))
    for at in range(size):
        block, user = rings.rank_at(rank, at, -1), rings.rank_at(rank, at)
        sent, received = rings.needed_spans[rank][block], rings.needed_spans[user][rank]
        steps.append(
            Step(
                block,
                kernel_calls(held[rank], held[block], spec),
                tuple(sends[at]),
                tuple(receives[at]),
                Transfer(block, block, sent) if sent and block != rank else None,
                Transfer(rank, user, received) if received and user != rank else None,
            )
        )
    return Route(rings.form, tuple(steps))


def require_form(size: int, form: str, inner: int) -> None:
    """Check that a ring of ``size`` ranks can use a form.

    Raises:
        ConfigError: an unknown form; an ``inner`` that does not divide ``size`` or has no effect.
    """
    if form not in FORMS:
        raise ConfigError(f"No form {form!r} of attention over ranges; choose one of {FORMS}.")
    if inner < 1 or size % inner:
        raise ConfigError(f"Inner rings of {inner} do not divide a ring of {size} ranks.")
    if inner > 1 and form != "double":
        raise ConfigError(f"Inner rings of {inner} are of the form 'double', not of {form!r}.")


class _Move(NamedTuple):
    """A part of a block, ``spans``, that one rank sends to another in a step."""

    step: int
    sender: int
    receiver: int
    block: int
    spans: Ranges


@lru_cache(maxsize=64)
def _choose(held: tuple[Ranges, ...], spec: MaskSpec, form: str, inner: int) -> _Rings:
    """The chosen form, with the transfers of all ranks."""
    needed, size = needed_spans(held, spec), len(held)
    makers: dict[str, Callable[[], _Rings]] = {
        "ring": lambda: _Rings("ring", needed, size, 1),
        "reverse": lambda: _Rings("reverse", needed, size, -1),
        "double": lambda: _Rings("double", needed, inner, 1),
        "direct": lambda: _Direct("direct", needed, size, 1),
    }
    if form != "auto":
        return makers[form]()
    made = [makers[name]() for name in ("ring", "reverse", "direct")]
    return min(made, key=lambda rings: (max(rings.sent), sum(rings.sent)))


@dataclass(frozen=True)
class _Rings:
    """Inner rings of ``inner`` ranks each, and a ring over them; one inner ring is a plain ring.

    Step ``o * inner + i`` of a block is its i-th step in the o-th inner ring that it visits.
    ``direction`` is 1 or -1.
    """

    form: str
    needed_spans: NeededSpans
    inner: int
    direction: int

    def rank_at(self, block: int, step: int, way: int = 1) -> int:
        """The rank that computes with ``block`` in ``step``; ``way`` -1: the block of a rank."""
        (ring, place), (o, i) = divmod(block, self.inner), divmod(step, self.inner)
        turn, outer = way * self.direction, len(self.needed_spans) // self.inner
        return (ring + turn * o) % outer * self.inner + (place + turn * i) % self.inner

    def moves(self) -> Iterator[_Move]:
        """What all ranks send; parts without positions are left out."""
        return (move for move in self._moves() if move.spans)

    def _moves(self) -> Iterator[_Move]:
        """Each rank sends a block on with what the ranks after it in the same inner ring need; the
        first of an inner ring also sends it to the next one, with what all later ones need."""
        size, inner = len(self.needed_spans), self.inner
        near: list[_Move] = []  # launched last in a step: links between inner rings are slower
        for block in range(size):
            visits = [self.rank_at(block, step) for step in range(size)]
            needed = [self.needed_spans[rank][block] for rank in visits]
            rings = (needed[at : at + inner] for at in range(0, size, inner))
            in_ring = [spans for ring in rings for spans in _suffix_unions(ring)]  # from a step on
            onward = _suffix_unions(in_ring[::inner])  # from an inner ring on
            for step, rank in enumerate(visits):
                if step % inner == 0 and step + inner < size:
                    later = onward[step // inner + 1]
                    yield _Move(step, rank, visits[step + inner], block, later)
                if (step + 1) % inner:
                    near.append(_Move(step, rank, visits[step + 1], block, in_ring[step + 1]))
        yield from near

    @cached_property
    def sent(self) -> list[int]:
        """Positions that each rank sends."""
        found = [0] * len(self.needed_spans)
        for move in self.moves():
            found[move.sender] += count_positions(move.spans)
        return found


class _Direct(_Rings):
    """Each block's owner sends the parts that other ranks need, in the first step."""

    def _moves(self) -> Iterator[_Move]:
        size = len(self.needed_spans)
        for hop in range(1, size):  # the nearest first, so that not all send to one rank at once
            for owner in range(size):
                peer = self.rank_at(owner, hop)
                yield _Move(0, owner, peer, owner, self.needed_spans[peer][owner])


def _suffix_unions(each: Sequence[Ranges]) -> list[Ranges]:
    """For each i, the union of the i-th element and all elements after it."""
    return list(accumulate(reversed(each), _joined))[::-1]


@lru_cache(maxsize=1 << 14)
def _joined(after: Ranges, own: Ranges) -> Ranges:
    return union((*own, *after)) if own and after else own or after
