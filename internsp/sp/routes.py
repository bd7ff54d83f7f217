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

from collections.abc import Callable, Sequence
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

    @property
    def positions(self) -> int:
        """Number of positions sent."""
        return _positions(self.spans)


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

    @property
    def sent_positions(self) -> int:
        """Positions whose keys and values this rank sends in a forward, and again in a backward."""
        return sum(transfer.positions for step in self.steps for transfer in step.sends)

    @property
    def gradient_positions(self) -> int:
        """Positions whose gradients of keys and values this rank sends in a backward."""
        return sum(
            step.gradient_send.positions for step in self.steps if step.gradient_send is not None
        )


def routes(held: tuple[Ranges, ...], spec: MaskSpec, form: str = "auto", inner: int = 1) -> Routes:
    """The routes of all ranks; see :func:`route`."""
    return tuple(route(held, spec, rank, form, inner) for rank in range(len(held)))


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


Routes = tuple[Route, ...]


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
    sent = [rings.sent() for rings in made]
    return min(zip(made, sent, strict=True), key=lambda each: (max(each[1]), sum(each[1])))[0]


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

    def _rank_after(self, rank: int, o: int, i: int) -> int:
        """The rank that is ``o`` inner rings, and ``i`` ranks within its ring, after ``rank``."""
        ring, place = divmod(rank, self.inner)
        ring, place = ring + self.direction * o, place + self.direction * i
        return ring % self.outer * self.inner + place % self.inner

    def rank_at(self, block: int, step: int) -> int:
        """The rank that computes with ``block`` in ``step``."""
        return self._rank_after(block, *divmod(step, self.inner))

    @cached_property
    def _needed_in_ring(self) -> list[list[Ranges]]:
        """``[block][step]``: the part of a block needed from a step on in the same inner ring."""
        found = []
        for block in range(len(self.needed_spans)):
            steps = range(len(self.needed_spans))
            visits = [self.needed_spans[self.rank_at(block, step)][block] for step in steps]
            rings = (visits[at : at + self.inner] for at in range(0, len(visits), self.inner))
            found.append([spans for ring in rings for spans in _suffix_unions(ring)])
        return found

    @cached_property
    def _needed_onward(self) -> list[list[Ranges]]:
        """``[block][o]``: the part of a block needed in its o-th inner ring and all later ones."""
        return [_suffix_unions(left[:: self.inner]) for left in self._needed_in_ring]

    def _forwarded(self, block: int, step: int) -> list[tuple[tuple[int, int], Ranges]]:
        """The parts of a block sent on in a step: the hop (inner rings, ranks), and the spans."""
        o, i = divmod(step, self.inner)
        found = []
        if i == 0 and o + 1 < self.outer:
            found.append(((1, 0), self._needed_onward[block][o + 1]))
        if i + 1 < self.inner:
            found.append(((0, 1), self._needed_in_ring[block][step + 1]))
        return found

    def sent(self) -> list[int]:
        """Positions that each rank sends."""
        found = [0] * len(self.needed_spans)
        for block in range(len(found)):
            for step in range(len(found)):
                for _, spans in self._forwarded(block, step):
                    found[self.rank_at(block, step)] += _positions(spans)
        return found

    def steps(self, rank: int) -> list[_RawStep]:
        """The steps of one rank."""
        found: list[_RawStep] = []
        for step in range(len(self.needed_spans)):
            o, i = divmod(step, self.inner)
            block = self._rank_after(rank, -o, -i)
            sends = [Transfer(block, self._rank_after(rank, *hop), spans)
                     for hop, spans in self._forwarded(block, step)]  # fmt: skip
            receives = []
            for hop, _ in self._forwarded(block, step):  # the same hops, to this rank
                source = self._rank_after(rank, -hop[0], -hop[1])
                incoming = self._rank_after(source, -o, -i)
                spans = next(spans for to, spans in self._forwarded(incoming, step) if to == hop)
                receives.append(Transfer(incoming, source, spans))
            found.append((block, sends, receives))
        return found


class _Direct(_Rings):
    """Each block's owner sends the parts that other ranks need, in the first step."""

    def sent(self) -> list[int]:
        ranks = range(len(self.needed_spans))
        return [sum(_positions(self.needed_spans[peer][rank]) for peer in ranks if peer != rank)
                for rank in ranks]  # fmt: skip

    def steps(self, rank: int) -> list[_RawStep]:
        others = [self._rank_after(rank, 0, -k) for k in range(1, len(self.needed_spans))]
        sends = [Transfer(rank, peer, self.needed_spans[peer][rank]) for peer in reversed(others)]
        receives = [Transfer(block, block, self.needed_spans[rank][block]) for block in others]
        return [(rank, sends, receives), *((block, [], []) for block in others)]


def _suffix_unions(each: Sequence[Ranges]) -> list[Ranges]:
    """For each i, the union of the i-th element and all elements after it."""

    def joined(after: Ranges, own: Ranges) -> Ranges:
        return union((*own, *after)) if own and after else own or after

    return list(accumulate(reversed(each), joined))[::-1]


def _positions(spans: Ranges) -> int:
    return sum(stop - start for start, stop in spans)


def _nonempty(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """The transfers that have positions; both ends omit the others."""
    return tuple(transfer for transfer in transfers if transfer.spans)
