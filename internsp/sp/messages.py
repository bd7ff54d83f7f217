"""Messages between the ranks that share heads, in stages: what one stage of an attention sublayer
receives from each rank, sends to each, and waits for (gloo, on the host).

A message begins when its sender has been told that it is expected, and on a busy link the telling
takes as long as a small message. So the receives of a stage are posted while the stage before it
runs: which one follows which is what followed it the last time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from internsp.errors import CollectiveError, LayoutError
from internsp.sp.exchange import Channel
from internsp.sp.heads import HeadPlan
from internsp.sp.stages import QKV, peers_of

# An exception may come between a stage and its wait; the oldest that it left behind are dropped.
_MOST_STAGES = 64


@dataclass(frozen=True)
class Shape:
    """What the messages of one attention depend on: equal on all ranks, but for ``rank``.

    Attributes:
        lengths: positions of each rank.
        depth: elements of a head.
    """

    plan: HeadPlan
    rank: int
    lengths: tuple[int, ...]
    batch: int
    depth: int
    dtype: torch.dtype

    @property
    def peers(self) -> list[int]:
        """The others, in the order in which they are sent to."""
        return peers_of(self.rank, len(self.lengths))

    @property
    def mine(self) -> int:
        """Own positions."""
        return self.lengths[self.rank]

    def at(self, rank: int) -> slice:
        """The positions of a rank."""
        stop = sum(self.lengths[: rank + 1])
        return slice(stop - self.lengths[rank], stop)

    def heads(self, role: str, rank: int) -> slice:
        """Heads of a rank: of queries and the output, or of keys and values."""
        return slice(*(self.plan.key_value if role in "kv" else self.plan.query)[rank])

    def count(self, role: str, rank: int) -> int:
        """How many these are."""
        heads = self.heads(role, rank)
        return heads.stop - heads.start

    def width(self, role: str) -> int:
        """Heads of all ranks."""
        return self.plan.kv_heads if role in "kv" else self.plan.heads

    def rows(self, heads: slice) -> slice:
        """Rows of the projection, columns of the out-projection, that belong to ``heads``."""
        return slice(heads.start * self.depth, heads.stop * self.depth)

    def others(self, role: str) -> list[slice]:
        """Heads that are not this rank's own: before and behind those."""
        own = self.heads(role, self.rank)
        spans = slice(0, own.start), slice(own.stop, self.width(role))
        return [span for span in spans if span.stop > span.start]

    def shared(self, role: str) -> bool:
        """Whether several ranks have one head, so that its gradient is the sum of theirs."""
        ranks = range(len(self.lengths))
        return sum(self.count(role, rank) for rank in ranks) > self.width(role)

    def whole(self, role: str) -> tuple[int, ...]:
        """All positions of the own heads: ``[S, B, heads, d]``."""
        return sum(self.lengths), self.batch, self.count(role, self.rank), self.depth

    def local(self, role: str, rank: int) -> tuple[int, ...]:
        """Own positions of the heads of ``rank``: ``[s, B, heads, d]``."""
        return self.mine, self.batch, self.count(role, rank), self.depth


class Place(NamedTuple):
    """Which stage it is: of an attention in a pass.

    Attributes:
        what: ``qkv`` or ``out``.
        phase: forward, recompute or backward; each rank of the group has the same.
    """

    unit: str
    what: str
    phase: str

    @property
    def roles(self) -> tuple[str, ...]:
        """What a rank receives from each other."""
        return QKV if self.what == "qkv" else ("out",)

    @property
    def gathers(self) -> bool:
        """Whether all positions of the own heads arrive, or the own positions of theirs."""
        return (self.what == "qkv") != (self.phase == "backward")


@dataclass(eq=False)
class Stage:
    """Messages of one stage that are on their way.

    Kept (:class:`Stages`) until it is waited for: gloo writes into what has been posted.

    Attributes:
        arriving: by role, :meth:`Shape.whole`; or by rank, its roles one after another, 1-D.
    """

    channel: Channel
    place: Place
    shape: Shape
    arriving: dict[Any, Tensor] = field(init=False)
    _tag: int = field(init=False)
    _works: list[Any] = field(default_factory=list)
    _sent: list[Tensor] = field(default_factory=list)
    _events: list[int] = field(default_factory=list)
    _over: bool = False

    def __post_init__(self) -> None:
        channel, shape = self.channel, self.shape
        self._tag = channel.next_tag()
        roles = self.place.roles
        like: dict[str, Any] = {"dtype": shape.dtype, "device": "cpu"}
        if self.place.gathers:
            wholes = {role: torch.empty(shape.whole(role), **like) for role in roles}
            posted = [(wholes[role][shape.at(p)], p) for role in roles for p in shape.peers]
            self.arriving = dict(wholes)
        else:
            each = shape.mine * shape.batch * shape.depth
            counts = {p: each * sum(shape.count(role, p) for role in roles) for p in shape.peers}
            self.arriving = {p: torch.empty(n, **like) for p, n in counts.items()}
            posted = [(self.arriving[p], p) for p in shape.peers]
        for place, peer in posted:
            if place.numel():  # of nothing there is no message, at either end
                self._works.append(channel.receive(place, peer, self._tag))

    def serves(self, place: Place, shape: Shape) -> bool:
        """Whether what has been posted is what the stage at ``place`` receives."""
        own = self.place
        return (own.what, own.gathers, self.shape) == (place.what, place.gathers, shape)

    def pieces(self, peer: int) -> dict[str, Tensor]:
        """What arrives from ``peer``, by role: ``[B, s, heads, d]``, views."""
        roles = self.place.roles
        shapes = [self.shape.local(role, peer) for role in roles]
        parts = self.arriving[peer].split([torch.Size(shape).numel() for shape in shapes])
        return {
            role: part.view(shape).transpose(0, 1)
            for role, part, shape in zip(roles, parts, shapes, strict=True)
        }

    def send(self, part: Tensor, role: str, peer: int) -> None:
        """Send ``part``, contiguous and not written to before the wait.

        Messages of one stage to one rank arrive in the order in which they are sent.

        Raises:
            LayoutError: another dtype than the receiver has posted, which gloo would answer by
                ending the process.
        """
        if part.dtype != self.shape.dtype:
            raise LayoutError(
                f"Rank {self.shape.rank}: {role} of {self.place.unit or 'attention'} became "
                f"{part.dtype} where {self.shape.dtype} was given: queries, keys and values must "
                "have one dtype, and what turns them must keep it."
            )
        if not part.numel():
            return
        trace = self.channel.trace
        if trace is not None:
            unit, _, phase = self.place
            event = trace.record("A2A", unit, role, phase, part.nbytes, in_flight=True)
            self._events.append(event)
        self._sent.append(part)
        self._works.append(self.channel.send(part, peer, self._tag))

    def wait(self) -> None:
        """Block until all has arrived and left; a second call returns at once.

        Raises:
            CollectiveError: another rank has failed, or closed the connection.
        """
        if self._over:
            return
        self._over = True
        stages_of(self.channel).forget(self)
        unit, what, phase = self.place
        trace = self.channel.trace
        begin = None if trace is None else trace.now()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"Rank {self.channel.rank} of its sequence group: messages of {what} of "
                f"{unit or 'attention'} did not arrive in {phase}: {error}"
            ) from error
        if trace is not None:
            end = trace.now()
            trace.waited(begin, end)
            trace.record("A2A_WAIT", unit, what, phase, start=begin, end=end)
            for event in self._events:
                trace.finish(event, end)
        self._works.clear()
        self._sent.clear()


class _Following(NamedTuple):
    """The stage that came next, and whose heads its messages were."""

    place: Place
    plan: HeadPlan
    depth: int


class Stages:
    """The stages of one channel, one after another: the same on all ranks of the group."""

    def __init__(self) -> None:
        self._flying: dict[Stage, None] = {}
        self._posted: list[Stage] = []  # of those, ahead and not begun
        self._last: Place | None = None
        self._following: dict[Place, _Following] = {}

    def begin(self, channel: Channel, place: Place, shape: Shape) -> Stage:
        """The stage at ``place``, whose receives are posted."""
        stage = self._ahead(place, shape)
        if stage is None:
            stage = self._post(channel, place, shape)
        else:
            self._posted.remove(stage)
            stage.place = place
        if self._last is not None:
            self._following[self._last] = _Following(place, shape.plan, shape.depth)
        self._last = place
        return stage

    def look_ahead(self, stage: Stage) -> None:
        """Post the receives of the stage that is likely to follow.

        Not from a forward to a backward, which an evaluation has not, and not to the next forward,
        whose lengths may be others. Where another follows (a block is left out), the receives wait
        for the next stage that is alike, on every rank.
        """
        found = self._following.get(stage.place)
        if found is None or (found.place.phase == "forward") != (stage.place.phase == "forward"):
            return
        shape = replace(stage.shape, plan=found.plan, depth=found.depth)
        if self._ahead(found.place, shape) is None:
            self._posted.append(self._post(stage.channel, found.place, shape))

    def forget(self, stage: Stage) -> None:
        """It is waited for."""
        self._flying.pop(stage, None)

    def _ahead(self, place: Place, shape: Shape) -> Stage | None:
        return next((stage for stage in self._posted if stage.serves(place, shape)), None)

    def _post(self, channel: Channel, place: Place, shape: Shape) -> Stage:
        while len(self._flying) >= _MOST_STAGES:
            oldest = next(iter(self._flying))
            self.forget(oldest)
            if oldest in self._posted:
                self._posted.remove(oldest)
        stage = Stage(channel, place, shape)
        self._flying[stage] = None
        return stage


def stages_of(channel: Channel) -> Stages:
    """Those of ``channel``."""
    if channel.stages is None:
        channel.stages = Stages()
    found: Stages = channel.stages
    return found
