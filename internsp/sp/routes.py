"""How keys and values travel between the ranks that hold ranges of one sequence, as plain data.

A :class:`Route` says for one rank, step by step, which block it computes with, and which parts of
which blocks it sends on and receives meanwhile. Two forms exist, and a ring in two levels:

- a *ring* (arXiv 2310.01889): each block goes from neighbor to neighbor, either way around, and
  only what ranks further on still need of it;
- a ring of rings (*double*, arXiv 2406.18485): around the near ranks of an inner ring, while what
  the next one needs is already on its way to it;
- *direct*: each block's owner sends each rank at once what it needs. Never more bytes than a ring,
  since nothing is passed on; but all of it is held at the same time.

The gradients of keys and values go straight home from each rank that has used them, in all forms.
Pure: no tensor, no group. Every rank works out what each needs of each block, by a few comparisons
of two ranks' ranges, and from it what all send in each form; its steps and the calls of kernels are
its own alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from internsp.errors import ConfigError
from internsp.sp.ranges import Needs, Part, Ranges, Seen, needs, parts, united

FORMS = ("auto", "ring", "reverse", "double", "direct")


@dataclass(frozen=True)
class Move:
    """Parts of a block on their way from one rank to another.

    Attributes:
        peer: the other rank.
        what: half-open spans of the block, counted in what its owner holds.
    """

    block: int
    peer: int
    what: Ranges

    @property
    def positions(self) -> int:
        """How many positions travel."""
        return _count(self.what)


@dataclass(frozen=True)
class Step:
    """One step of a rank: launch ``sends`` and ``receives``, then compute with ``block``.

    Attributes:
        parts: the calls, empty where the rank needs nothing of the block.
        receives: what later steps compute with, or send on.
        home: in backward, after the step: the gradients that go to the block's owner.
        arrives: in backward, after the step: the gradients of the rank's own block that come from
            the rank that has computed with it.
    """

    block: int
    parts: tuple[Part, ...]
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    home: Move | None
    arrives: Move | None


@dataclass(frozen=True)
class Route:
    """One rank's way through attention over ranges.

    Attributes:
        form: which it is.
        steps: the first computes with the rank's own block; in each, all ranks have another block.
    """

    form: str
    steps: tuple[Step, ...]

    @property
    def sent_positions(self) -> int:
        """Positions whose keys and values this rank sends in a forward, and again in a backward."""
        return sum(move.positions for step in self.steps for move in step.sends)

    @property
    def returned_positions(self) -> int:
        """Positions whose gradients of keys and values it sends in a backward."""
        return sum(step.home.positions for step in self.steps if step.home is not None)


def routes(held: tuple[Ranges, ...], seen: Seen, form: str = "auto", inner: int = 1) -> Routes:
    """The routes of all ranks; see :func:`route`."""
    return tuple(route(held, seen, rank, form, inner) for rank in range(len(held)))


def route(
    held: tuple[Ranges, ...], seen: Seen, rank: int, form: str = "auto", inner: int = 1
) -> Route:
    """The route of one rank.

    Args:
        held: the ranges of each rank of the group.
        form: ``auto`` takes the one in which the busiest rank sends least, then all together; of
            equals the first of ``ring``, ``reverse`` (the other way around) and ``direct``.
        inner: ranks of an inner ring, for ``double``; a divisor of the ranks. They follow one
            another in ``held``, which is the order of the ring, whether its ranks are neighbors in
            the sequence or have others between them that share their heads: of those, as many as
            have fast links to each other.

    Raises:
        ConfigError: see :func:`require_form`.
    """
    require_form(len(held), form, inner)
    way = _chosen(held, seen, form, inner)
    steps = []
    for at, (block, sends, receives) in enumerate(way.steps(rank)):
        user = way.user(rank, at)
        home, arrives = way.needs[rank][block], way.needs[user][rank]
        steps.append(
            Step(
                block,
                parts(held[rank], held[block], seen),
                _some(sends),
                _some(receives),
                Move(block, block, home) if home and block != rank else None,
                Move(rank, user, arrives) if arrives and user != rank else None,
            )
        )
    return Route(way.form, tuple(steps))


def require_form(size: int, form: str, inner: int) -> None:
    """A ring of ``size`` ranks can send so.

    Raises:
        ConfigError: an unknown form; ``inner`` that does not divide the ranks, or without effect.
    """
    if form not in FORMS:
        raise ConfigError(f"No form {form!r} of attention over ranges; choose one of {FORMS}.")
    if inner < 1 or size % inner:
        raise ConfigError(f"Inner rings of {inner} do not divide a ring of {size} ranks.")
    if inner > 1 and form != "double":
        raise ConfigError(f"Inner rings of {inner} are of the form 'double', not of {form!r}.")


Routes = tuple[Route, ...]


_Raw = tuple[int, list[Move], list[Move]]  # block, sends, receives


@lru_cache(maxsize=64)
def _chosen(held: tuple[Ranges, ...], seen: Seen, form: str, inner: int) -> _Rings:
    """The form that is taken, as it is for all ranks."""
    everyone, size = needs(held, seen), len(held)
    makers: dict[str, Callable[[], _Rings]] = {
        "ring": lambda: _Rings("ring", everyone, size, 1),
        "reverse": lambda: _Rings("reverse", everyone, size, -1),
        "double": lambda: _Rings("double", everyone, inner, 1),
        "direct": lambda: _Direct("direct", everyone, size, 1),
    }
    if form != "auto":
        return makers[form]()
    made = [makers[name]() for name in ("ring", "reverse", "direct")]
    sent = [way.sent() for way in made]
    return min(zip(made, sent, strict=True), key=lambda each: (max(each[1]), sum(each[1])))[0]


@dataclass(frozen=True)
class _Rings:
    """Rings of ``inner`` ranks each, and one ring over them; with all ranks inner, a plain ring.

    Step ``o * inner + i`` is the i-th in the o-th inner ring that a block visits.
    """

    form: str
    needs: Needs
    inner: int
    way: int

    @property
    def outer(self) -> int:
        return len(self.needs) // self.inner

    def _shifted(self, rank: int, o: int, i: int) -> int:
        """The rank that is so many inner rings, and in its own so many ranks, further on."""
        ring, place = divmod(rank, self.inner)
        ring, place = ring + self.way * o, place + self.way * i
        return ring % self.outer * self.inner + place % self.inner

    def user(self, block: int, step: int) -> int:
        """The rank that computes with a block in a step."""
        return self._shifted(block, *divmod(step, self.inner))

    @cached_property
    def _left(self) -> list[list[Ranges]]:
        """``[block][step]``: what is needed of a block from a step on in that inner ring."""
        found = []
        for block in range(len(self.needs)):
            visits = [self.needs[self.user(block, s)][block] for s in range(len(self.needs))]
            rings = (visits[at : at + self.inner] for at in range(0, len(visits), self.inner))
            found.append([what for ring in rings for what in _from_each_on(ring)])
        return found

    @cached_property
    def _onward(self) -> list[list[Ranges]]:
        """``[block][o]``: what is needed of a block in its o-th inner ring and all after it."""
        return [_from_each_on(left[:: self.inner]) for left in self._left]

    def _next(self, block: int, step: int) -> list[tuple[tuple[int, int], Ranges]]:
        """What goes on of a block in a step: how far (inner rings, ranks), and what of it."""
        o, i = divmod(step, self.inner)
        found = []
        if i == 0 and o + 1 < self.outer:
            found.append(((1, 0), self._onward[block][o + 1]))
        if i + 1 < self.inner:
            found.append(((0, 1), self._left[block][step + 1]))
        return found

    def sent(self) -> list[int]:
        """Positions that each rank sends."""
        found = [0] * len(self.needs)
        for block in range(len(found)):
            for step in range(len(found)):
                for _, what in self._next(block, step):
                    found[self.user(block, step)] += _count(what)
        return found

    def steps(self, rank: int) -> list[_Raw]:
        """Of one rank."""
        found: list[_Raw] = []
        for step in range(len(self.needs)):
            o, i = divmod(step, self.inner)
            block = self._shifted(rank, -o, -i)
            sends = [Move(block, self._shifted(rank, *far), what)
                     for far, what in self._next(block, step)]  # fmt: skip
            receives = []
            for far, _ in self._next(block, step):  # those before it do the same
                source = self._shifted(rank, -far[0], -far[1])
                coming = self._shifted(source, -o, -i)
                what = next(what for to, what in self._next(coming, step) if to == far)
                receives.append(Move(coming, source, what))
            found.append((block, sends, receives))
        return found


class _Direct(_Rings):
    """Each block's owner sends all of it that others need, in the first step."""

    def sent(self) -> list[int]:
        ranks = range(len(self.needs))
        return [sum(_count(self.needs[peer][rank]) for peer in ranks if peer != rank)
                for rank in ranks]  # fmt: skip

    def steps(self, rank: int) -> list[_Raw]:
        others = [self._shifted(rank, 0, -k) for k in range(1, len(self.needs))]
        sends = [Move(rank, peer, self.needs[peer][rank]) for peer in reversed(others)]
        receives = [Move(block, block, self.needs[rank][block]) for block in others]
        return [(rank, sends, receives), *((block, [], []) for block in others)]


def _from_each_on(each: Sequence[Ranges]) -> list[Ranges]:
    """Of some unions of spans that of the i-th and all after it, for each i."""

    def joined(after: Ranges, own: Ranges) -> Ranges:
        return united((*own, *after)) if own and after else own or after

    return list(accumulate(reversed(each), joined))[::-1]


def _count(what: Ranges) -> int:
    return sum(stop - start for start, stop in what)


def _some(moves: list[Move]) -> tuple[Move, ...]:
    """Those that carry anything; both ends leave the others out."""
    return tuple(move for move in moves if move.what)
