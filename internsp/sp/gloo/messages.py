"""Point-to-point exchanges between the ranks that share heads (gloo, on the host): the receives,
sends and wait of one stage of an attention sublayer.

gloo starts to send a message only after the receiver has notified the sender of its posted receive,
and on a busy link that notification takes as long as a small message. The receives of an exchange
are therefore posted while the exchange before it runs. Which exchange comes next is predicted from
the last time: the one that followed then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from internsp.errors import LayoutError
from internsp.sp.exchange import ExchangeGroup
from internsp.sp.gloo.stages import QKV, peers_of
from internsp.sp.heads import HeadPlan

_MOST_TAGS = 1 << 30
# An exception may leave an exchange without a wait; beyond this count the oldest is dropped.
_MOST_IN_FLIGHT = 64


@dataclass(frozen=True)
class ExchangeShape:
    """The sizes of one attention's messages: equal on all ranks, except for ``rank``.

    Attributes:
        lengths: number of positions of each rank.
        depth: elements of a head, ``d``.
    """

    plan: HeadPlan
    rank: int
    lengths: tuple[int, ...]
    batch: int
    depth: int
    dtype: torch.dtype

    @property
    def peers(self) -> list[int]:
        """The other ranks, in the order in which this rank sends to them."""
        return peers_of(self.rank, len(self.lengths))

    @property
    def own_length(self) -> int:
        """Number of this rank's positions."""
        return self.lengths[self.rank]

    def positions(self, rank: int) -> slice:
        """The positions of a rank, as a slice of all positions."""
        stop = sum(self.lengths[: rank + 1])
        return slice(stop - self.lengths[rank], stop)

    def heads(self, role: str, rank: int) -> slice:
        """The heads of a rank: query heads for ``q`` and ``out``, else key/value heads."""
        return slice(*self.plan.of(role)[0][rank])

    def head_count(self, role: str, rank: int) -> int:
        """Number of heads of a rank."""
        heads = self.heads(role, rank)
        return heads.stop - heads.start

    def total_heads(self, role: str) -> int:
        """Number of heads of all ranks."""
        return self.plan.of(role)[1]

    def features(self, heads: slice) -> slice:
        """The features of ``heads``: rows of a projection, columns of the out-projection."""
        return slice(heads.start * self.depth, heads.stop * self.depth)

    def peer_heads(self, role: str) -> list[slice]:
        """The heads of other ranks: the ranges before and after this rank's own heads."""
        own = self.heads(role, self.rank)
        spans = slice(0, own.start), slice(own.stop, self.total_heads(role))
        return [span for span in spans if span.stop > span.start]

    def has_shared_heads(self, role: str) -> bool:
        """Whether several ranks have one head, so that the sum of their gradients is the head's."""
        ranks = range(len(self.lengths))
        return sum(self.head_count(role, rank) for rank in ranks) > self.total_heads(role)

    def gathered_shape(self, role: str) -> tuple[int, ...]:
        """Shape of all positions of this rank's heads: ``[S, B, heads, d]``."""
        return sum(self.lengths), self.batch, self.head_count(role, self.rank), self.depth


class ExchangeKey(NamedTuple):
    """Names one exchange: which attention, which stage, which phase.

    Attributes:
        unit: the attention module's name in the trace.
        what: ``qkv`` or ``out``.
        phase: forward, recompute or backward; the same on each rank of the group.
    """

    unit: str
    what: str
    phase: str

    @property
    def roles(self) -> tuple[str, ...]:
        """What a rank receives from each peer."""
        return QKV if self.what == "qkv" else ("out",)

    @property
    def gathers(self) -> bool:
        """Whether a rank receives all positions of its heads; else its positions of all heads."""
        return (self.what == "qkv") != (self.phase == "backward")


@dataclass(eq=False)
class PeerExchange:
    """The messages of one exchange, in flight from its construction, which posts the receives.

    :class:`PeerExchanges` keeps it until its wait, since gloo writes into the posted buffers.

    Attributes:
        received: the receive buffers: by role, with :meth:`ExchangeShape.gathered_shape`; or by
            rank, 1-D, with the rank's roles one after another.
        started: whether its start has come; until then its receives are only posted ahead.
    """

    group: ExchangeGroup
    key: ExchangeKey
    shape: ExchangeShape
    received: dict[Any, Tensor] = field(init=False)
    _tag: int = field(init=False)
    _works: list[Any] = field(default_factory=list)
    _sent: list[Tensor] = field(default_factory=list)
    _events: list[int] = field(default_factory=list)
    _waited: bool = False
    started: bool = False

    @torch.inference_mode(False)  # training may take what an evaluation has posted ahead
    def __post_init__(self) -> None:
        group, shape = self.group, self.shape
        self._tag = group.next_tag() % _MOST_TAGS
        roles = self.key.roles
        like: dict[str, Any] = {"dtype": shape.dtype, "device": "cpu"}
        if self.key.gathers:
            wholes = {role: torch.empty(shape.gathered_shape(role), **like) for role in roles}
            posted = [(wholes[role][shape.positions(p)], p) for role in roles for p in shape.peers]
            self.received = dict(wholes)
        else:
            each = shape.own_length * shape.batch * shape.depth
            counts = {
                p: each * sum(shape.head_count(role, p) for role in roles) for p in shape.peers
            }
            self.received = {p: torch.empty(n, **like) for p, n in counts.items()}
            posted = [(self.received[p], p) for p in shape.peers]
        with self._naming():
            for buffer, peer in posted:
                if buffer.numel():  # neither end has a message without elements
                    self._works.append(group.irecv(buffer, peer, self._tag))

    def from_peer(self, peer: int) -> dict[str, Tensor]:
        """What was received from ``peer``, by role: views ``[B, s, heads, d]``."""
        roles = self.key.roles
        own, batch, depth = self.shape.own_length, self.shape.batch, self.shape.depth
        shapes = [(own, batch, self.shape.head_count(role, peer), depth) for role in roles]
        parts = self.received[peer].split([torch.Size(shape).numel() for shape in shapes])
        return {
            role: part.view(shape).transpose(0, 1)
            for role, part, shape in zip(roles, parts, shapes, strict=True)
        }

    def send(self, part: Tensor, role: str, peer: int) -> None:
        """Start to send ``part``, which must be contiguous and not be written to before the wait.

        Messages of one exchange to one rank arrive in the order in which they are sent.

        Raises:
            LayoutError: ``part`` has another dtype than the receive that the peer has posted; gloo
                would end the process.
            CollectiveError: see :meth:`wait`.
        """
        if part.dtype != self.shape.dtype:
            raise LayoutError(
                f"Rank {self.shape.rank}: {role} of {self.key.unit or 'attention'} became "
                f"{part.dtype} where {self.shape.dtype} was given: queries, keys and values must "
                "have one dtype, and their rotations must keep it."
            )
        if not part.numel():
            return
        unit, _, phase = self.key
        event = self.group.trace.record("A2A", unit, role, phase, part.nbytes, in_flight=True)
        self._events.append(event)
        self._sent.append(part)
        with self._naming():
            self._works.append(self.group.isend(part, peer, self._tag))
        self.group.keep(self._tag, self._works)

    def wait(self) -> None:
        """Block until all sends and receives are complete; a second call returns at once.

        Raises:
            CollectiveError: another rank has failed or has closed the connection.
        """
        if self._waited:
            return
        self._waited = True
        peer_exchanges(self.group).remove(self)
        unit, what, phase = self.key
        trace = self.group.trace
        begin = trace.now()
        with self._naming():
            for work in self._works:
                work.wait()
        self.group.release(self._tag)
        end = trace.now()
        trace.waited(begin, end)
        trace.record("A2A_WAIT", unit, what, phase, start=begin, end=end)
        for event in self._events:
            trace.finish(event, end)
        self._works.clear()
        self._sent.clear()

    def _naming(self) -> AbstractContextManager[Any]:
        """Name the exchange where another rank has closed the connection: gloo says so when a
        message starts, too."""
        unit, what, phase = self.key
        return self.group.reporter.naming(f"{what} of {unit or 'attention'} ({phase})")


class PeerExchanges:
    """The exchanges of one group, in the same order on all ranks of the group."""

    def __init__(self) -> None:
        self._in_flight: dict[PeerExchange, None] = {}
        self._previous: ExchangeKey | None = None
        self._successors: dict[ExchangeKey, tuple[ExchangeKey, ExchangeShape]] = {}

    def start(self, group: ExchangeGroup, key: ExchangeKey, shape: ExchangeShape) -> PeerExchange:
        """Return the exchange ``key`` with its receives posted."""
        group.reporter.launched("A2A", f"{key.what} of {key.unit}", key.phase)
        exchange = self._find_preposted(key, shape) or self._post(group, key, shape)
        exchange.key, exchange.started = key, True
        if self._previous is not None:
            self._successors[self._previous] = key, shape
        self._previous = key
        return exchange

    def prepost_receives(self, exchange: PeerExchange) -> None:
        """Post the receives of the exchange that is likely to follow.

        Nothing is posted in a forward for a backward, since an evaluation has none, nor in a
        backward for the next forward, whose lengths may differ. If another exchange follows (a
        block is skipped), the next exchange with equal sizes gets the receives, on every rank.
        """
        key, last = self._successors.get(exchange.key, (None, exchange.shape))
        if key is None or (key.phase == "forward") != (exchange.key.phase == "forward"):
            return
        shape = replace(exchange.shape, plan=last.plan, depth=last.depth)  # of this batch
        if self._find_preposted(key, shape) is None:
            self._post(exchange.group, key, shape)

    def remove(self, exchange: PeerExchange) -> None:
        """Drop an exchange whose wait has begun."""
        self._in_flight.pop(exchange, None)

    def _find_preposted(self, key: ExchangeKey, shape: ExchangeShape) -> PeerExchange | None:
        wanted = key.what, key.gathers, shape
        posted = (each for each in self._in_flight if not each.started)
        return next((e for e in posted if (e.key.what, e.key.gathers, e.shape) == wanted), None)

    def _post(self, group: ExchangeGroup, key: ExchangeKey, shape: ExchangeShape) -> PeerExchange:
        while len(self._in_flight) >= _MOST_IN_FLIGHT:
            self.remove(next(iter(self._in_flight)))
        exchange = PeerExchange(group, key, shape)
        self._in_flight[exchange] = None
        return exchange


def peer_exchanges(group: ExchangeGroup) -> PeerExchanges:
    """The exchanges of ``group``."""
    if group.peer_exchanges is None:
        group.peer_exchanges = PeerExchanges()
    return group.peer_exchanges
