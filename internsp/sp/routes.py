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
Pure: no tensor, no group. Every rank makes the routes of all and takes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from internsp.errors import ConfigError
from internsp.sp.ranges import Part, Ranges, Seen, needed, parts, united

FORMS = ("auto", "ring", "reverse", "double", "direct")
Needs = tuple[tuple[Ranges, ...], ...]
"""``needs[rank][block]``: what a rank sees of a block, counted in what the block's owner holds."""


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
        return sum(stop - start for start, stop in self.what)


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
    """The routes of all ranks.

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
    return _routes(held, seen, form, inner)


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


@lru_cache(maxsize=64)
def _routes(held: tuple[Ranges, ...], seen: Seen, form: str, inner: int) -> Routes:
    size = len(held)
    needs = tuple(
        tuple(needed(held[rank], held[block], seen) for block in range(size))
        for rank in range(size)
    )
    makers: dict[str, Callable[[], list[list[_Raw]]]] = {
        "ring": lambda: _double(needs, size, 1),
        "reverse": lambda: _double(needs, size, -1),
        "double": lambda: _double(needs, inner, 1),
        "direct": lambda: _direct(needs),
    }
    if form != "auto":
        return _finished(form, makers[form](), held, seen, needs)
    made = [
        _finished(form, makers[form](), held, seen, needs) for form in ("ring", "reverse", "direct")
    ]
    sent = [[route.sent_positions for route in each] for each in made]
    return min(zip(made, sent, strict=True), key=lambda each: (max(each[1]), sum(each[1])))[0]


_Raw = tuple[int, list[Move], list[Move]]  # block, sends, receives


def _double(needs: Needs, near: int, way: int) -> list[list[_Raw]]:
    """Rings of ``near`` ranks each, and one ring over them; with all ranks near, a plain ring."""
    size = len(needs)
    far = size // near

    def rank_of(outer: int, inner: int) -> int:
        return outer % far * near + inner % near

    def block_at(rank: int, o: int, i: int) -> int:
        return rank_of(rank // near - way * o, rank % near - way * i)

    def within(block: int, o: int, i: int) -> Ranges:
        """What is needed of a block from step ``i`` on in the near group it visits as its o-th."""
        outer, inner = block // near + way * o, block % near
        ranks = [rank_of(outer, inner + way * k) for k in range(i, near)]
        return united(span for rank in ranks for span in needs[rank][block])

    def onward(block: int, o: int) -> Ranges:
        """What is needed of it in that group and in all that it visits after."""
        return united(span for p in range(o, far) for span in within(block, p, 0))

    steps: list[list[_Raw]] = [[] for _ in range(size)]
    for rank in range(size):
        outer, inner = divmod(rank, near)
        for o in range(far):
            for i in range(near):
                block = block_at(rank, o, i)
                sends, receives = [], []
                if i == 0 and o + 1 < far:
                    sends.append(Move(block, rank_of(outer + way, inner), onward(block, o + 1)))
                    source = rank_of(outer - way, inner)
                    coming = block_at(source, o, 0)
                    receives.append(Move(coming, source, onward(coming, o + 1)))
                if i + 1 < near:
                    sends.append(Move(block, rank_of(outer, inner + way), within(block, o, i + 1)))
                    source = rank_of(outer, inner - way)
                    coming = block_at(source, o, i)
                    receives.append(Move(coming, source, within(coming, o, i + 1)))
                steps[rank].append((block, _some(sends), _some(receives)))
    return steps


def _direct(needs: Needs) -> list[list[_Raw]]:
    size = len(needs)
    steps: list[list[_Raw]] = []
    for rank in range(size):
        others = [(rank - k) % size for k in range(1, size)]
        sends = _some([Move(rank, peer, needs[peer][rank]) for peer in reversed(others)])
        receives = _some([Move(block, block, needs[rank][block]) for block in others])
        steps.append([(rank, sends, receives), *((block, [], []) for block in others)])
    return steps


def _some(moves: list[Move]) -> list[Move]:
    """Those that carry anything; both ends leave the others out."""
    return [move for move in moves if move.what]


def _finished(
    form: str, raw: Sequence[list[_Raw]], held: tuple[Ranges, ...], seen: Seen, needs: Needs
) -> Routes:
    def gradients(user: int, block: int, peer: int) -> Move | None:
        what = needs[user][block] if user != block else ()
        return Move(block, peer, what) if what else None

    found = []
    for rank, steps in enumerate(raw):
        own = []
        for at, (block, sends, receives) in enumerate(steps):
            user = next(r for r, others in enumerate(raw) if others[at][0] == rank)
            own.append(
                Step(
                    block,
                    parts(held[rank], held[block], seen),
                    tuple(sends),
                    tuple(receives),
                    gradients(rank, block, block),
                    gradients(user, rank, user),
                )
            )
        found.append(Route(form, tuple(own)))
    return tuple(found)
