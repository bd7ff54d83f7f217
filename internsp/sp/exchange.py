"""The exchange of sequence parallelism: one ``all_to_all_single`` between a rank's own positions of
all heads and all positions of the rank's own heads (DeepSpeed-Ulysses, arXiv 2309.14509).

Two custom operators implement it, ``internsp_sp::start`` and ``internsp_sp::finish``. ``start``
packs the send buffer, launches the all-to-all and returns a *token*, a tensor of one element that
stands for the exchange in flight; ``finish`` waits and returns the result. Because of this split,

- several exchanges can be in flight, and each is waited for when its result is needed. In backward
  each operator is the other's adjoint, so autograd launches the exchanges of all gradients as they
  become ready and waits for them one by one;
- no tensor with undefined contents is ever visible to autograd or to anomaly detection, and
  nothing is copied a second time;
- selective checkpointing sees an operator whose result can be kept (:mod:`.checkpointing`), and
  since the trace is written inside the operator, it shows only exchanges that really ran.

``torch.compile`` breaks its graph here on purpose: inside a graph, inductor may reorder operators
by the sizes that it sees, and those differ between ranks (WP-2, WP-13).

*Head ranges* give the heads of each peer, for each part of the tensor (queries, keys, values).
Those of different peers may overlap (a key/value head that several ranks read); their gradients are
then summed in fp32 or wider.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.base.accelerator import HOST
from internsp.base.handles import HandleTable
from internsp.base.in_flight import MessagesInFlight, Reporter, phase_of
from internsp.base.trace import Trace
from internsp.errors import CollectiveError, LayoutError
from internsp.sp.heads import HeadRanges

if TYPE_CHECKING:
    from internsp.sp.gloo.messages import PeerExchanges


@dataclass(eq=False)
class ExchangeGroup:
    """A process group with its trace, and the exchanges that are in flight on it.

    It lives as long as the modules that use it.

    Attributes:
        reporter: counts exchanges, and names one that fails, with the first cause.
    """

    process_group: dist.ProcessGroup
    given: Trace | None
    rank: int
    size: int
    reporter: Reporter = field(default_factory=Reporter)
    peer_exchanges: PeerExchanges | None = None  # messages between pairs of ranks
    trace: Trace = field(init=False)
    in_flight: MessagesInFlight = field(init=False)

    def __post_init__(self) -> None:
        self.trace = self.given or Trace()
        self.in_flight = MessagesInFlight(self.trace, self.reporter)
        _GROUPS[self] = None

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | ExchangeGroup,
        trace: Trace | None = None,
        reporter: Reporter | None = None,
    ) -> ExchangeGroup:
        """Return the exchange group of these: one object for equal ones.

        Args:
            reporter: a model's; without one, any.
        """
        if isinstance(group, ExchangeGroup):
            return group
        for known in list(_GROUPS):
            same = known.process_group is group and known.given is trace
            if same and (reporter is None or known.reporter is reporter):
                return known
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(group, trace, rank, size, reporter or Reporter())

    # These methods call torch.distributed; a benchmark overrides the first three.

    def all_to_all(
        self, received: Tensor, send: Tensor, receive_counts: list[int], send_counts: list[int]
    ) -> Any:
        """Start an all-to-all and return its work handle.

        Args:
            receive_counts, send_counts: elements from and to each rank.
        """
        return dist.all_to_all_single(
            received, send, receive_counts, send_counts, group=self.process_group, async_op=True
        )

    def irecv(self, buffer: Tensor, peer: int, tag: int) -> Any:
        """Post a receive into ``buffer`` (gloo) and return its work handle."""
        self._pair(buffer)
        return self.process_group.recv([buffer], peer, tag)

    def isend(self, buffer: Tensor, peer: int, tag: int) -> Any:
        """Start to send ``buffer`` (gloo) and return the work handle."""
        self._pair(buffer)
        return self.process_group.send([buffer], peer, tag)

    def batch_isend_irecv(
        self, operations: Sequence[tuple[bool, Tensor, int, int]]
    ) -> Sequence[Any]:
        """Start several sends and receives together; return the work handle of each.

        Args:
            operations: for each, whether it sends (or receives), its buffer, the peer's rank in the
                group, and a tag on which both sides agree.
        """
        self._pair(*(flat for _, flat, _, _ in operations))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend if sends else dist.irecv, flat, group=self.process_group,
                    group_peer=peer, tag=tag,
                )
                for sends, flat, peer, tag in operations
            ]
        )  # fmt: skip
        # A backend may return one work handle for all operations.
        return works if len(works) == len(operations) else [works[0]] * len(operations)

    def all_reduce(
        self, tensor: Tensor, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """All-reduce ``tensor`` in place; ``what`` names it in an error. Blocks."""
        with self.reporter.naming(what):
            dist.all_reduce(tensor, op, group=self.process_group)

    def next_tag(self) -> int:
        """A tag that no message of the process group has had: a receive that was posted and then
        given up never matches a later message."""
        return next(_TAGS.setdefault(self.process_group, itertools.count(1)))

    def keep(self, tag: int, works: list[Any]) -> None:
        """Keep the work handles of messages until :meth:`release`, also after an exception and the
        end of their model: where gloo finds the sender of a message dropped, all later messages of
        the connection wait. Beyond a count the oldest are dropped."""
        kept = _KEPT.setdefault(self.process_group, {})
        kept[tag] = works
        while len(kept) > _MOST_KEPT:
            del kept[next(iter(kept))]

    def release(self, tag: int) -> None:
        """The messages of ``tag`` were waited for."""
        _KEPT.get(self.process_group, {}).pop(tag, None)

    def _pair(self, *flat: Tensor) -> None:
        """Report messages between pairs of ranks, which gloo counts as collectives of the group."""
        on_host = sum(each.device.type == HOST for each in flat)
        if on_host:
            self.reporter.pairs[self.process_group.group_name] += on_host

    def __deepcopy__(self, memo: dict[int, Any]) -> ExchangeGroup:
        """Return itself: a copied model communicates over the same group."""
        return self


_GROUPS: weakref.WeakKeyDictionary[ExchangeGroup, None] = weakref.WeakKeyDictionary()
# By process group, which all exchange groups of it share.
_TAGS: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
_KEPT: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, list[Any]]]
_KEPT = weakref.WeakKeyDictionary()
_MOST_KEPT = 64


@dataclass(eq=False)
class _Exchange:
    """What the operators of one exchange, and of its adjoint in backward, need besides the tensor.

    They name it by its ``handle``. The pending exchange and the autograd graph keep it alive.

    Attributes:
        lengths: positions of each rank.
        batch, depth: ``B`` and ``d``.
        unit, label: names for the trace.
    """

    group: ExchangeGroup
    lengths: tuple[int, ...]
    head_ranges: HeadRanges
    batch: int
    depth: int
    unit: str
    label: str
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = _EXCHANGES.add(self)

    def finish(self, token: Tensor, to_heads: bool) -> Tensor:
        """Wait for the message of ``token`` and return its result."""
        result: Tensor = _finish(token, self.handle, to_heads)
        return result


_EXCHANGES: HandleTable[_Exchange] = HandleTable("exchange")


def _head_counts(head_ranges: HeadRanges) -> list[int]:
    """Number of heads of each peer, summed over the parts."""
    return [sum(stop - first for first, stop in ranges) for ranges in head_ranges]


def _width(head_ranges: HeadRanges) -> int:
    """Number of heads on the sequence side: the largest bound, since the ranges cover all heads."""
    return max((stop for ranges in head_ranges for _, stop in ranges), default=0)


def _pack(x: Tensor, head_ranges: HeadRanges) -> Tensor:
    """Pack ``[B, s, H, d]`` into the flat send buffer: ``[s, B, heads, d]`` for each peer."""
    batch, length, _, depth = x.shape
    by_position = x.transpose(0, 1)
    counts = _head_counts(head_ranges)
    send = x.new_empty(length * batch * depth * sum(counts))
    blocks = send.split([length * batch * depth * count for count in counts])
    for block, count, ranges in zip(blocks, counts, head_ranges, strict=True):
        pieces = [by_position[:, :, first:stop] for first, stop in ranges]
        torch.cat(pieces, dim=2, out=block.view(length, batch, count, depth))
    return send


def _unpack(received: Tensor, exchange: _Exchange) -> Tensor:
    """Unpack the flat receive buffer, ``[s, B, heads, d]`` from each peer, to ``[B, s, H, d]``."""
    batch, length, depth = exchange.batch, exchange.lengths[exchange.group.rank], exchange.depth
    counts, width = _head_counts(exchange.head_ranges), _width(exchange.head_ranges)
    shape = batch, length, width, depth
    disjoint = sum(counts) == width  # the ranges cover all heads
    wide = torch.promote_types(received.dtype, torch.float32)
    # Gradients of one head from several peers are summed, in fp32 or wider.
    out = received.new_empty(shape) if disjoint else received.new_zeros(shape, dtype=wide)
    blocks = received.split([length * batch * depth * count for count in counts])
    for block, count, ranges in zip(blocks, counts, exchange.head_ranges, strict=True):
        by_batch = block.view(length, batch, count, depth).transpose(0, 1)
        offset = 0
        for first, stop in ranges:
            piece = by_batch[:, :, offset : offset + stop - first]
            target = out[:, :, first:stop]
            _ = target.copy_(piece) if disjoint else target.add_(piece)
            offset += stop - first
    return out.to(received.dtype)


def _start_impl(x: Tensor, handle: int, to_heads: bool, adjoint: bool) -> Tensor:
    exchange = _EXCHANGES.find(handle)
    group, lengths, counts = exchange.group, exchange.lengths, _head_counts(exchange.head_ranges)
    each = exchange.batch * exchange.depth
    rows = [length * each * counts[group.rank] for length in lengths]
    columns = [lengths[group.rank] * each * count for count in counts]
    if to_heads:
        send, send_counts, receive_counts = _pack(x, exchange.head_ranges), columns, rows
    else:
        send, send_counts, receive_counts = x.transpose(0, 1).contiguous().view(-1), rows, columns
    received = send.new_empty(sum(receive_counts))
    nbytes = (sum(send_counts) - send_counts[group.rank]) * x.element_size()
    phase = phase_of(adjoint)
    group.reporter.launched("A2A", f"{exchange.label} of {exchange.unit}", phase)
    message = group.in_flight.launch(
        exchange.unit, exchange.label, phase, nbytes, send, received,
        lambda: group.all_to_all(received, send, receive_counts, send_counts),
    )  # fmt: skip
    return group.in_flight.add(message)


def _finish_impl(token: Tensor, handle: int, to_heads: bool) -> Tensor:
    exchange = _EXCHANGES.find(handle)
    group, unit, label = exchange.group, exchange.unit, exchange.label
    found = group.in_flight.take(token)
    if found is None:
        raise CollectiveError(
            f"Rank {group.rank}: the exchange of {label!r} in {unit or 'this module'} was already "
            "waited for, or dropped after an exception. Start it again and wait for it once."
        )
    group.in_flight.wait(found, unit, label, f"{label} of {unit or 'attention'}")
    if not to_heads:
        return _unpack(found.received, exchange)
    mine = _head_counts(exchange.head_ranges)[group.rank]
    shape = sum(exchange.lengths), exchange.batch, mine, exchange.depth
    return found.received.view(shape).transpose(0, 1)


OPERATORS: dict[str, Callable[..., Any]] = {
    "internsp_sp::start": _start_impl,
    "internsp_sp::finish": _finish_impl,
}
"""Implementations of the operators, for the plan, which counts the memory that they use."""
_start = torch.library.custom_op("internsp_sp::start", _start_impl, mutates_args=())
_finish = torch.library.custom_op("internsp_sp::finish", _finish_impl, mutates_args=())


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Of both operators: each is the other's adjoint, the other way."""
    _, handle, to_heads, *_ = inputs
    ctx.exchange, ctx.to_heads = _EXCHANGES.find(handle), not to_heads


def _start_backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
    return ctx.exchange.finish(token, ctx.to_heads), None, None, None


def _finish_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _start(grad, ctx.exchange.handle, ctx.to_heads, True), None, None


_start.register_autograd(_start_backward, setup_context=_context)
_finish.register_autograd(_finish_backward, setup_context=_context)


class PendingExchange:
    """An exchange that has been launched. :meth:`wait` returns its result, at every call."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish
        self._result: Tensor | None = None

    @torch.compiler.disable
    def wait(self) -> Tensor:
        """Block the compute stream (with gloo the calling thread) until the result has arrived."""
        if self._result is None:
            self._result = self._finish()
        return self._result


class FinishedExchange(PendingExchange):
    """Queries, keys or values ``[B, S, own heads, d]`` whose exchange in parts is complete."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(lambda: tensor)


@torch.compiler.disable
def start_exchange(
    x: Tensor,
    group: ExchangeGroup | None,
    lengths: Sequence[int],
    head_ranges: HeadRanges,
    *,
    to: Literal["heads", "sequence"],
    unit: str = "",
    label: str = "",
    adjoint: bool = False,
) -> PendingExchange:
    """Launch an exchange and return at once; every rank of the group calls it in the same order.

    Args:
        x: ``[B, s, H, d]`` with ``to="heads"``, this rank's positions of all heads; or
            ``[B, S, h, d]`` with ``to="sequence"``, all positions of this rank's heads. Do not
            write to it before the wait.
        group: the ranks that exchange; None for no exchange (one rank).
        lengths: positions of each rank, uneven and zero allowed; their sum is ``S``.
        head_ranges: heads of each peer (see the module's docstring).
        to: "heads" or "sequence", see ``x``.
        unit, label: names for the trace.
        adjoint: whether a backward formula makes the call, for the trace.

    Returns:
        A pending exchange whose result is ``[B, S, h, d]`` or ``[B, s, H, d]``, differentiable.

    Raises:
        LayoutError: the shape of ``x`` does not fit the lengths and the head ranges.
    """
    if group is None:
        return PendingExchange(lambda: x)
    rank, lengths, to_heads = group.rank, tuple(lengths), to == "heads"
    width, mine = _width(head_ranges), _head_counts(head_ranges)[rank]
    wanted = (lengths[rank], width) if to_heads else (sum(lengths), mine)
    if x.dim() != 4 or len(lengths) != group.size or tuple(x.shape[1:3]) != wanted:
        raise LayoutError(
            f"Rank {rank}: the exchange of {label!r} to {to} needs [B, {wanted[0]}, {wanted[1]}, "
            f"d] over {group.size} ranks, got {list(x.shape)} and lengths {lengths}."
        )
    exchange = _Exchange(group, lengths, head_ranges, x.shape[0], x.shape[3], unit, label)
    token = _start(x, exchange.handle, to_heads, adjoint)
    return PendingExchange(partial(exchange.finish, token, to_heads))


def gather_positions(
    x: Tensor, group: ExchangeGroup, lengths: Sequence[int], unit: str = "", label: str = ""
) -> Tensor:
    """Gather ``[B, s, H, d]`` of each rank into ``[B, S, H, d]`` on every rank, in rank order.

    Blocks. In backward the ranks' gradients of one position are summed.
    """
    everything = (((0, x.shape[2]),),) * group.size
    return start_exchange(x, group, lengths, everything, to="heads", unit=unit, label=label).wait()
