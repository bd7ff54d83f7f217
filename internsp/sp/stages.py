"""Pure: in which order a rank makes, sends and awaits the parts of one attention sublayer.

What a peer waits for is made first, and leaves at once; what this rank needs itself is made while
that is on its way. Every rank of the group has the same list but for the names of ranks, so each
message that one sends is one that another receives (WP-2).
"""

from __future__ import annotations

from typing import NamedTuple

QKV = ("q", "k", "v")

RECEIVE, MAKE, SEND, AHEAD, WAIT = "RECEIVE", "MAKE", "SEND", "AHEAD", "WAIT"
OWN, REST, WEIGHT = "OWN", "REST", "WEIGHT"


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        kind: ``RECEIVE`` (a buffer is posted, if it was not :data:`AHEAD` of time), ``MAKE`` (what
            the peer will get is computed), ``SEND``, ``AHEAD`` (the next stage's buffers are
            posted, where it is known), ``OWN`` (this rank's own part is computed), ``WEIGHT`` (the
            out-projection's weight gradient is), ``WAIT`` (until all that was posted and sent is
            over), ``REST`` (what can be computed with the peers' parts only is).
        what: ``q``, ``k``, ``v`` or ``out``; ``qkv``: of all three.
        peer: rank in the group; -1: all others, or none.
    """

    kind: str
    what: str
    peer: int = -1

    def line(self) -> str:
        """As the plan prints it."""
        to = {"RECEIVE": "from", "MAKE": "for", "SEND": "to"}.get(self.kind)
        return f"{self.kind} {self.what}" + (f" {to} {self.peer}" if to else "")


class Order(NamedTuple):
    """One rank's actions, in the four stages of a forward and its backward.

    Attributes:
        heads: projections of queries, keys and values.
        output: behind attention, to the out-projection's result.
        output_gradient: from the out-projection's result to before it.
        heads_gradient: behind attention's backward, to the projections' input and weights.
    """

    heads: tuple[Action, ...]
    output: tuple[Action, ...]
    output_gradient: tuple[Action, ...]
    heads_gradient: tuple[Action, ...]


def peers_of(rank: int, size: int) -> list[int]:
    """The others, the next neighbor first: so not all send to one at once."""
    return [(rank + i) % size for i in range(1, size)]


def order(rank: int, size: int, overlap: bool = True) -> Order:
    """The actions of ``rank`` among ``size`` that share heads.

    Args:
        overlap: when false nothing is computed between a stage's last message and its wait: the
            same products and messages, and so the same bits (WP-12).
    """
    peers = peers_of(rank, size)
    receives = {what: [Action(RECEIVE, what, p) for p in peers] for what in (*QKV, "out", "qkv")}

    def sent(*names: str) -> list[Action]:
        each = [(what, peer) for what in names for peer in peers]
        return [Action(kind, *one) for one in each for kind in (MAKE, SEND)]

    def stage(
        before: list[Action], what: str, own: list[Action], *after: str
    ) -> tuple[Action, ...]:
        wait, rest = [Action(WAIT, what)], [Action(kind, what) for kind in after]
        before = [*before, Action(AHEAD, what)]
        return (*before, *(own + wait if overlap else wait + own), *rest)

    own = [Action(OWN, what) for what in QKV]
    out = [Action(OWN, "out")]
    return Order(
        stage([a for w in QKV for a in receives[w]] + sent(*QKV), "qkv", own),
        stage(receives["out"] + sent("out"), "out", out, REST),
        stage(receives["out"] + sent("out"), "out", [*out, Action(WEIGHT, "out")]),
        stage(receives["qkv"] + sent("qkv"), "qkv", own, REST),
    )
