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

from internsp.errors import ConfigError
from internsp.sp.ranges import (
    KernelCall,
    MaskSpec,
    NeededSpans,
    Ranges,
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
        sum(map(_positions, needed)) - _positions(needed[rank])
        for rank, needed in enumerate(rings.needed_spans)
    ]
    received = [[0] * len(held) for _ in held]
    for _, peer, step, positions in rings.moves():
        received[peer][step] += positions
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
    steps = []
    for at, (block, sends, receives) in enumerate(rings.steps(rank)):
        user = rings.rank_at(rank, at)
        sent, received = rings.needed_spans[rank][block], rings.needed_spans[user][rank]
        steps.append(
            Step(
                block,
                kernel_calls(held[rank], held[block], spec),
                _nonempty(sends),
                _nonempty(receives),
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


_RawStep = tuple[int, list[Transfer], list[Transfer]]  # block, sends, receives


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

    @property
    def outer(self) -> int:
        return len(self.needed_spans) // self.inner

    def rank_at(self, block: int, step: int, way: int = 1) -> int:
        """The rank that computes with ``block`` in ``step``; ``way`` -1: the block of a rank."""
        (ring, place), (o, i) = divmod(block, self.inner), divmod(step, self.inner)
        turn = way * self.direction
        return (ring + turn * o) % self.outer * self.inner + (place + turn * i) % self.inner

    def _visits(self, block: int) -> list[int]:
        """The ranks that compute with ``block``, by step."""
        return [self.rank_at(block, step) for step in range(len(self.needed_spans))]

    @cached_property
    def _needed_in_ring(self) -> list[list[Ranges]]:
        """``[block][step]``: the part of a block needed from a step on in the same inner ring."""
        found = []
        for block in range(len(self.needed_spans)):
            visits = [self.needed_spans[rank][block] for rank in self._visits(block)]
            rings = (visits[at : at + self.inner] for at in range(0, len(visits), self.inner))
            found.append([spans for ring in rings for spans in _suffix_unions(ring)])
        return found

    @cached_property
    def _needed_onward(self) -> list[list[Ranges]]:
        """``[block][o]``: the part of a block needed in its o-th inner ring and all later ones."""
        return [_suffix_unions(left[:: self.inner]) for left in self._needed_in_ring]

    def _forwarded(self, block: int, step: int) -> list[tuple[int, Ranges]]:
        """The parts of a block sent on in a step: the step in which they are used, and the spans.

        It is the next in the same inner ring, or the first in the next inner ring.
        """
        found = []
        if step % self.inner == 0 and step + self.inner < len(self.needed_spans):
            onward = self._needed_onward[block][step // self.inner + 1]
            found.append((step + self.inner, onward))
        if (step + 1) % self.inner:
            found.append((step + 1, self._needed_in_ring[block][step + 1]))
        return found

    def moves(self) -> Iterator[tuple[int, int, int, int]]:
        """What is sent: from a rank, to a rank, in a step, and how many positions."""
        for block in range(len(self.needed_spans)):
            visits = self._visits(block)
            for step, rank in enumerate(visits):
                for use, spans in self._forwarded(block, step):
                    if spans:
                        yield rank, visits[use], step, _positions(spans)

    @cached_property
    def sent(self) -> list[int]:
        """Positions that each rank sends."""
        found = [0] * len(self.needed_spans)
        for rank, _, _, positions in self.moves():
            found[rank] += positions
        return found

    def steps(self, rank: int) -> list[_RawStep]:
        """The steps of one rank."""
        blocks = [self.rank_at(rank, step, -1) for step in range(len(self.needed_spans))]
        found: list[_RawStep] = []
        for step, block in enumerate(blocks):
            sends, receives = [], []
            for use, spans in self._forwarded(block, step):
                incoming = blocks[use]
                sends.append(Transfer(block, self.rank_at(block, use), spans))
                received = dict(self._forwarded(incoming, step))[use]
                receives.append(Transfer(incoming, self.rank_at(incoming, step), received))
            found.append((block, sends, receives))
        return found


class _Direct(_Rings):
    """Each block's owner sends the parts that other ranks need, in the first step."""

    def moves(self) -> Iterator[tuple[int, int, int, int]]:
        for peer, needed in enumerate(self.needed_spans):
            for rank, spans in enumerate(needed):
                if spans and rank != peer:
                    yield rank, peer, 0, _positions(spans)

    def steps(self, rank: int) -> list[_RawStep]:
        others = [self.rank_at(rank, k, -1) for k in range(1, len(self.needed_spans))]
        sends = [Transfer(rank, peer, self.needed_spans[peer][rank]) for peer in reversed(others)]
        receives = [Transfer(block, block, self.needed_spans[rank][block]) for block in others]
        return [(rank, sends, receives), *((block, [], []) for block in others)]


def _suffix_unions(each: Sequence[Ranges]) -> list[Ranges]:
    """For each i, the union of the i-th element and all elements after it."""
    return list(accumulate(reversed(each), _joined))[::-1]


@lru_cache(maxsize=1 << 14)
def _joined(after: Ranges, own: Ranges) -> Ranges:
    return union((*own, *after)) if own and after else own or after


def _positions(spans: Ranges) -> int:
    return sum(stop - start for start, stop in spans)


def _nonempty(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """The transfers that have positions; both ends omit the others."""
    return tuple(transfer for transfer in transfers if transfer.spans)
