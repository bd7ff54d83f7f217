"""The exchange of sequence parallelism: sequence shards of all heads <-> all positions of a share
of the heads, in one ``all_to_all_single`` (DeepSpeed-Ulysses, arXiv 2309.14509).

Two custom operators carry it, ``internsp_sp::start`` and ``internsp_sp::finish``. ``start`` packs
and launches and returns a *token*, a tensor of one element that only stands for the exchange in
flight; ``finish`` waits and returns the result. Thus

- several exchanges can be in flight, and they are waited for in the order of need. In backward
  each operator is the other's adjoint, so the engine launches the exchanges of all gradients as
  they are ready and waits for them one by one;
- no tensor with undefined contents is ever visible to autograd or to anomaly detection, and
  nothing is copied a second time;
- selective checkpointing sees an operator whose result can be kept (:mod:`.checkpointing`), and
  since the trace is written inside the operator, it shows only exchanges that really ran.

``torch.compile`` leaves its graph here on purpose: inside a graph inductor may reorder operators by
the sizes it sees, and those differ between ranks (WP-2, WP-13).

A *cut* says which heads each peer gets: for each peer, for each part, a half-open range of the
head dimension, all flattened into one tuple of ints. Ranges of different peers may overlap
(a key/value head read by several ranks); their gradients are then summed in fp32 or wider.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.errors import CollectiveError, LayoutError
from internsp.sp.handles import Handles
from internsp.trace import Trace


@dataclass(eq=False)
class _Flight:
    """What must outlive the launch: the work, its buffers, and the memory of the token, whose
    identity is the key and must not be given to another token meanwhile."""

    work: Any
    send: Tensor
    received: Tensor
    token: torch.UntypedStorage
    event: int
    phase: str


@dataclass(eq=False)
class Channel:
    """One sequence group with its trace; the exchanges and messages in flight are kept here.

    Operators know it by its ``handle``; channels die with their users.
    """

    group: dist.ProcessGroup
    trace: Trace | None
    rank: int
    size: int
    flights: dict[int, _Flight] = field(default_factory=dict)
    stages: Any = None  # of messages between pairs, see :mod:`.messages`
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = _CHANNELS.give(self)

    @classmethod
    def of(cls, group: dist.ProcessGroup | Channel, trace: Trace | None = None) -> Channel:
        """The channel of this group and this trace object; the same pair gives the same channel."""
        if isinstance(group, Channel):
            return group
        for channel in _CHANNELS.living():
            if channel.group is group and channel.trace is trace:
                return channel
        return cls(group, trace, dist.get_rank(group), dist.get_world_size(group))

    # What really sends: a benchmark overrides the three.

    def all_to_all(
        self, received: Tensor, send: Tensor, got: list[int], sent: list[int]
    ) -> Any:
        """Send ``sent[p]`` elements to each rank ``p`` and receive ``got[p]``; gives the work."""
        return dist.all_to_all_single(received, send, got, sent, group=self.group, async_op=True)

    def receive(self, place: Tensor, peer: int, tag: int) -> Any:
        """Post the receive of a message (gloo); gives the work."""
        return self.group.recv([place], peer, tag)

    def send(self, part: Tensor, peer: int, tag: int) -> Any:
        """Send one; gives the work."""
        return self.group.send([part], peer, tag)

    def next_tag(self) -> int:
        """Of the next messages between pairs; one count for all channels of a group, since what was
        posted and given up must never be taken for another's."""
        return next(_TAGS.setdefault(self.group, itertools.count(1))) % _MOST_TAGS

    def messages(self, operations: Sequence[tuple[bool, Tensor, int, int]]) -> Sequence[Any]:
        """Start messages together; returns what is waited for, of each.

        Args:
            operations: whether it leaves (or comes), what it is read from (or written to), the
                rank in the group on the other side, and a number that both sides give it.
        """
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend if leaves else dist.irecv, flat, group=self.group, group_peer=peer,
                    tag=number,
                )
                for leaves, flat, peer, number in operations
            ]
        )  # fmt: skip
        # A backend may have one work for all.
        return works if len(works) == len(operations) else [works[0]] * len(operations)

    def __deepcopy__(self, memo: dict[int, Any]) -> Channel:
        """A copied model keeps talking through the same group."""
        return self


_TAGS: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
_MOST_TAGS = 1 << 30
_CHANNELS: Handles[Channel] = Handles("sequence group of this exchange")
# An exchange that was started and never waited for (an exception came between) would keep its
# buffers for ever. No program has this many in flight; the oldest are then dropped.
_MOST_IN_FLIGHT = 64


@lru_cache(maxsize=256)
def _peer_ranges(cut: tuple[int, ...], size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """``cut`` by peer and part."""
    pairs = [(cut[i], cut[i + 1]) for i in range(0, len(cut), 2)]
    parts = len(pairs) // size
    return tuple(tuple(pairs[peer * parts : (peer + 1) * parts]) for peer in range(size))


def _counts(cut: Sequence[int], size: int) -> list[int]:
    """Heads each peer gets, over all parts."""
    return [sum(b - a for a, b in ranges) for ranges in _peer_ranges(tuple(cut), size)]


@lru_cache(maxsize=256)
def _disjoint(cut: tuple[int, ...], size: int, width: int) -> bool:
    """Whether each of ``width`` heads goes to exactly one peer."""
    taken = [0] * width
    for ranges in _peer_ranges(cut, size):
        for first, stop in ranges:
            for head in range(first, stop):
                taken[head] += 1
    return all(count == 1 for count in taken)


def _pack(x: Tensor, cut: Sequence[int], size: int) -> Tensor:
    """``[B, s, H, d]`` to the flat send buffer: for each peer, ``[s, B, its heads, d]``."""
    batch, length, _, depth = x.shape
    by_position = x.transpose(0, 1)
    pieces = [
        by_position[:, :, a:b] for ranges in _peer_ranges(tuple(cut), size) for a, b in ranges
    ]
    counts = _counts(cut, size)
    send = x.new_empty(length * batch * depth * sum(counts))
    parts = len(pieces) // size
    rows = length * batch * depth
    for peer, block in enumerate(send.split([rows * count for count in counts])):
        view = block.view(length, batch, counts[peer], depth)
        torch.cat(pieces[peer * parts : (peer + 1) * parts], dim=2, out=view)
    return send


def _unpack(received: Tensor, cut: Sequence[int], size: int, shape: tuple[int, ...]) -> Tensor:
    """The flat receive buffer, ``[s, B, heads, d]`` from each peer, to ``[B, s, H, d]``."""
    batch, length, width, depth = shape
    disjoint = _disjoint(tuple(cut), size, width)
    wide = torch.promote_types(received.dtype, torch.float32)
    # Several peers' gradients of one head are a sum, and sums are taken in fp32 or wider.
    out = received.new_empty(shape) if disjoint else received.new_zeros(shape, dtype=wide)
    counts = _counts(cut, size)
    blocks = received.split([length * batch * depth * count for count in counts])
    for block, count, ranges in zip(blocks, counts, _peer_ranges(tuple(cut), size), strict=True):
        by_batch = block.view(length, batch, count, depth).transpose(0, 1)
        offset = 0
        for first, stop in ranges:
            piece = by_batch[:, :, offset : offset + stop - first]
            target = out[:, :, first:stop]
            _ = target.copy_(piece) if disjoint else target.add_(piece)
            offset += stop - first
    return out.to(received.dtype)


def phase_of(adjoint: bool) -> str:
    """Found from where the operator runs, never from a flag that someone must set (WP-9)."""
    if adjoint:
        return "backward"
    return "recompute" if torch._C._current_graph_task_id() != -1 else "forward"


def _launched(
    x: Tensor,
    channel: int,
    lengths: Sequence[int],
    cut: Sequence[int],
    to_heads: bool,
    adjoint: bool,
    unit: str,
    label: str,
) -> Tensor:
    link = _CHANNELS.find(channel)
    batch, depth = x.shape[0], x.shape[3]
    mine = _counts(cut, link.size)
    rows = [length * batch * depth * mine[link.rank] for length in lengths]
    columns = [lengths[link.rank] * batch * depth * count for count in mine]
    send = _pack(x, cut, link.size) if to_heads else x.transpose(0, 1).contiguous().view(-1)
    sent, got = (columns, rows) if to_heads else (rows, columns)
    received = send.new_empty(sum(got))
    phase = phase_of(adjoint)
    event = -1
    if link.trace is not None:
        nbytes = (sum(sent) - sent[link.rank]) * x.element_size()
        event = link.trace.record(
            "A2A", unit=unit, weight=label, phase=phase, nbytes=nbytes, in_flight=True
        )
    work = link.all_to_all(received, send, got, sent)
    # The token lives where x lives, so that autograd runs both operators on one thread and one
    # stream, in the same order on all ranks (WP-2); its memory, not its value, is the key.
    token = x.new_zeros(1, dtype=torch.float32)
    while len(link.flights) >= _MOST_IN_FLIGHT:
        link.flights.pop(next(iter(link.flights)))
    link.flights[_key(token)] = _Flight(work, send, received, token.untyped_storage(), event, phase)
    return token


def _key(token: Tensor) -> int:
    """Of its memory, which a plan's tensors have no address of."""
    return int(token.untyped_storage()._cdata)


def _waited(
    token: Tensor,
    channel: int,
    lengths: Sequence[int],
    cut: Sequence[int],
    to_heads: bool,
    adjoint: bool,
    unit: str,
    label: str,
    shape: Sequence[int],
) -> Tensor:
    link = _CHANNELS.find(channel)
    flight = link.flights.pop(_key(token), None)
    if flight is None:
        raise CollectiveError(
            f"Rank {link.rank}: the exchange of {label!r} in {unit or 'this module'} was already "
            "waited for, or dropped after an exception. Start it again and wait for it once."
        )
    trace = link.trace
    begin = None if trace is None else trace.now()
    flight.work.wait()
    if trace is not None:
        end = trace.now()
        trace.waited(begin, end)
        trace.record("A2A_WAIT", unit, label, flight.phase, start=begin, end=end)
        trace.finish(flight.event, end)
    batch, _, _, depth = shape
    if not to_heads:
        return _unpack(flight.received, cut, link.size, tuple(shape))
    mine = _counts(cut, link.size)[link.rank]
    return flight.received.view(sum(lengths), batch, mine, depth).transpose(0, 1)


OPERATORS: dict[str, Callable[..., Any]] = {
    "internsp_sp::start": _launched,
    "internsp_sp::finish": _waited,
}
"""What the operators do, for a plan, which counts the memory that they take."""
_start = torch.library.custom_op("internsp_sp::start", _launched, mutates_args=())
_finish = torch.library.custom_op("internsp_sp::finish", _waited, mutates_args=())


def _start_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, handle, lengths, cut, to_heads, _, unit, label = inputs
    channel = _CHANNELS.find(handle)
    batch, _, _, depth = x.shape
    # The graph keeps the channel alive until it is freed itself.
    ctx.channel = channel
    shape = (batch, lengths[channel.rank], _width(cut), depth)
    ctx.spec = (handle, lengths, cut, not to_heads, True, unit, label, shape)


def _start_backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
    return _finish(token, *ctx.spec), *(None,) * 7


def _finish_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, handle, lengths, cut, to_heads, _, unit, label, _ = inputs
    ctx.channel = _CHANNELS.find(handle)
    ctx.spec = (handle, lengths, cut, not to_heads, True, unit, label)


def _finish_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _start(grad, *ctx.spec), *(None,) * 8


_start.register_autograd(_start_backward, setup_context=_start_context)
_finish.register_autograd(_finish_backward, setup_context=_finish_context)


def _width(cut: Sequence[int]) -> int:
    """Heads on the sequence side, of a cut that leaves none at the end."""
    return max(cut, default=0)


class PendingExchange:
    """An exchange that has been launched. :meth:`wait` gives its result, once or again."""

    def __init__(self, token: Tensor | None, spec: tuple[Any, ...], result: Tensor | None) -> None:
        self._token, self._spec, self._result = token, spec, result

    @torch.compiler.disable
    def wait(self) -> Tensor:
        """Block the computing stream (the calling thread on gloo) until the result is there."""
        if self._result is None:
            assert self._token is not None, "a pending exchange has a token or a result"
            self._result = _finish(self._token, *self._spec)
            self._token = None
        return self._result


@torch.compiler.disable
def start_exchange(
    x: Tensor,
    channel: Channel | None,
    lengths: Sequence[int],
    cut: Sequence[int],
    *,
    to: str,
    unit: str = "",
    label: str = "",
    adjoint: bool = False,
) -> PendingExchange:
    """Launch an exchange and return at once; every rank of the group calls it in the same order.

    Args:
        x: ``[B, s, H, d]`` with ``to="heads"``, this rank's positions of all heads; or
            ``[B, S, h, d]`` with ``to="sequence"``, all positions of this rank's heads. Do not
            write to it before the wait.
        channel: the group; None for no exchange (one rank).
        lengths: positions of each rank, uneven and zero allowed; their sum is ``S``.
        cut: heads of each peer (see the module's text).
        unit, label: names for the trace.
        adjoint: called from a backward formula, for the trace.

    Returns:
        A pending exchange whose result is ``[B, S, h, d]`` or ``[B, s, H, d]``, differentiable.

    Raises:
        LayoutError: a shape that does not fit the lengths and the cut.
    """
    if to not in ("heads", "sequence"):
        raise ValueError(f"An exchange goes to 'heads' or to 'sequence', not to {to!r}.")
    if channel is None:
        return PendingExchange(None, (), x)
    rank, lengths, cut = channel.rank, tuple(lengths), tuple(cut)
    to_heads = to == "heads"
    width, mine = _width(cut), _counts(cut, channel.size)[rank]
    wanted = (lengths[rank], width) if to_heads else (sum(lengths), mine)
    if x.dim() != 4 or len(lengths) != channel.size or tuple(x.shape[1:3]) != wanted:
        raise LayoutError(
            f"Rank {rank}: the exchange of {label!r} to {to} needs [B, {wanted[0]}, {wanted[1]}, "
            f"d] over {channel.size} ranks, got {list(x.shape)} and lengths {lengths}."
        )
    shape = (x.shape[0], lengths[rank], width, x.shape[3])
    token = _start(x, channel.handle, lengths, cut, to_heads, adjoint, unit, label)
    spec = (channel.handle, lengths, cut, to_heads, adjoint, unit, label, shape)
    return PendingExchange(token, spec, None)


def exchange(
    x: Tensor,
    channel: Channel | None,
    lengths: Sequence[int],
    cut: Sequence[int],
    *,
    to: str,
    unit: str = "",
    label: str = "",
    adjoint: bool = False,
) -> Tensor:
    """:func:`start_exchange` and its wait in one call."""
    return start_exchange(
        x, channel, lengths, cut, to=to, unit=unit, label=label, adjoint=adjoint
    ).wait()
