"""The order in which a rank computes, sends and awaits the parts of one attention sublayer. Pure.

A rank first computes what its peers need, and sends each part as soon as it is computed; it
computes what it needs itself while those messages are in flight. The lists of all ranks of a group
differ only in the ranks' numbers, so each message that one rank sends another receives (WP-2).
"""

from __future__ import annotations

from typing import NamedTuple

QKV = ("q", "k", "v")

RECEIVE, COMPUTE, SEND, PREPOST, WAIT = "RECEIVE", "COMPUTE", "SEND", "PREPOST", "WAIT"
OWN, REST, WEIGHT = "OWN", "REST", "WEIGHT"


class Action(NamedTuple):
    """One action of a rank.

    Attributes:
        kind: ``RECEIVE`` (post a receive, unless an earlier ``PREPOST`` has posted it), ``COMPUTE``
            (compute the peer's part), ``SEND`` (send it), ``PREPOST`` (post the receives of the
            next stage, where that stage is known), ``OWN`` (compute this rank's own part),
            ``WEIGHT`` (compute the out-projection's weight gradient), ``WAIT`` (wait for all sends
            and receives of the stage), ``REST`` (compute what needs the peers' parts).
        what: ``q``, ``k``, ``v`` or ``out``; ``qkv`` for all three together.
        peer: the peer's rank in the group; -1 for all peers or none.
    """

    kind: str
    what: str
    peer: int = -1

    def line(self) -> str:
        """The action as the plan prints it."""
        to = {"RECEIVE": "from", "COMPUTE": "for", "SEND": "to"}.get(self.kind)
        return f"{self.kind} {self.what}" + (f" {to} {self.peer}" if to else "")


class ExchangeOrder(NamedTuple):
    """One rank's actions in the four stages of a forward and its backward.

    Attributes:
        heads: the projections of queries, keys and values, before attention.
        output: from attention's output to the out-projection's output.
        output_gradient: from the out-projection's output gradient to attention's output gradient.
        heads_gradient: from the gradients of queries, keys and values to those of the projections'
            input and weights.
    """

    heads: tuple[Action, ...]
    output: tuple[Action, ...]
    output_gradient: tuple[Action, ...]
    heads_gradient: tuple[Action, ...]


def peers_of(rank: int, size: int) -> list[int]:
    """The other ranks, the next neighbor first, so that not all ranks send to one rank at once."""
    return [(rank + i) % size for i in range(1, size)]


def exchange_order(rank: int, size: int, overlap: bool = True) -> ExchangeOrder:
    """The actions of ``rank`` in a group of ``size`` ranks that share heads.

    Args:
        overlap: when false, nothing is computed between a stage's last message and its wait. The
            products and the messages are the same, and so are the results, bit for bit (WP-12).
    """
    peers = peers_of(rank, size)
    receives = {what: [Action(RECEIVE, what, p) for p in peers] for what in (*QKV, "out", "qkv")}

    def sent(*names: str) -> list[Action]:
        each = [(what, peer) for what in names for peer in peers]
        return [Action(kind, *one) for one in each for kind in (COMPUTE, SEND)]

    def stage(
        before: list[Action], what: str, own: list[Action], *after: str
    ) -> tuple[Action, ...]:
        wait, rest = [Action(WAIT, what)], [Action(kind, what) for kind in after]
        before = [*before, Action(PREPOST, what)]
        return (*before, *(own + wait if overlap else wait + own), *rest)

    own = [Action(OWN, what) for what in QKV]
    out = [Action(OWN, "out")]
    return ExchangeOrder(
        stage([a for w in QKV for a in receives[w]] + sent(*QKV), "qkv", own),
        stage(receives["out"] + sent("out"), "out", out, REST),
        stage(receives["out"] + sent("out"), "out", [*out, Action(WEIGHT, "out")]),
        stage(receives["qkv"] + sent("qkv"), "qkv", own, REST),
    )
