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

*Head ranges* (``head_ranges``) give the heads of each peer: for each peer, for each part of the
tensor (queries, keys, values), a half-open range of the head dimension, all flattened into one
tuple of ints. Ranges of different peers may overlap (a key/value head that several ranks read);
their gradients are then summed in fp32 or wider.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.base.accelerator import HOST
from internsp.base.handles import HandleTable
from internsp.base.in_flight import MessagesInFlight, Reporter, phase_of
from internsp.base.trace import Trace
from internsp.errors import CollectiveError, LayoutError

if TYPE_CHECKING:
    from internsp.sp.gloo.messages import PeerExchanges


@dataclass(eq=False)
class ExchangeGroup:
    """A process group of sequence ranks with its trace, and the exchanges that are in flight on it.

    Custom operators name it by its ``handle``. It lives as long as the modules that use it.

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
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.trace = self.given or Trace()
        self.in_flight = MessagesInFlight(self.trace, self.reporter)
        self.handle = _GROUPS.add(self)

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
        for known in _GROUPS.alive():
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
            got: elements to receive from each rank.
            sent: elements to send to each rank.
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

    def next_tag(self) -> int:
        """Return the tag of the next messages between pairs of ranks.

        All exchange groups of one process group share the counter, so that a receive that was
        posted and then given up never matches a later message.
        """
        return next(_TAGS.setdefault(self.process_group, itertools.count(1))) % _MOST_TAGS

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

    def _pair(self, *flat: Tensor) -> None:
        """Report messages between pairs of ranks, which gloo counts as collectives of the group."""
        on_host = sum(each.device.type == HOST for each in flat)
        if on_host:
            self.reporter.pairs[self.process_group.group_name] += on_host

    def __deepcopy__(self, memo: dict[int, Any]) -> ExchangeGroup:
        """Return itself: a copied model communicates over the same group."""
        return self


_TAGS: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
_MOST_TAGS = 1 << 30
_GROUPS: HandleTable[ExchangeGroup] = HandleTable("sequence group of this exchange")


@lru_cache(maxsize=256)
def _peer_ranges(
    head_ranges: tuple[int, ...], size: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """``head_ranges`` as ``[peer][part] = (start, stop)``."""
    pairs = [(head_ranges[i], head_ranges[i + 1]) for i in range(0, len(head_ranges), 2)]
    parts = len(pairs) // size
    return tuple(tuple(pairs[peer * parts : (peer + 1) * parts]) for peer in range(size))


def _head_counts(head_ranges: Sequence[int], size: int) -> list[int]:
    """Number of heads of each peer, summed over the parts."""
    return [sum(b - a for a, b in ranges) for ranges in _peer_ranges(tuple(head_ranges), size)]


def _pack(x: Tensor, head_ranges: Sequence[int], size: int) -> Tensor:
    """Pack ``[B, s, H, d]`` into the flat send buffer: ``[s, B, heads, d]`` for each peer."""
    batch, length, _, depth = x.shape
    by_position = x.transpose(0, 1)
    pieces = [
        by_position[:, :, a:b]
        for ranges in _peer_ranges(tuple(head_ranges), size)
        for a, b in ranges
    ]
    counts = _head_counts(head_ranges, size)
    send = x.new_empty(length * batch * depth * sum(counts))
    parts = len(pieces) // size
    rows = length * batch * depth
    for peer, block in enumerate(send.split([rows * count for count in counts])):
        view = block.view(length, batch, counts[peer], depth)
        torch.cat(pieces[peer * parts : (peer + 1) * parts], dim=2, out=view)
    return send


def _unpack(
    received: Tensor, head_ranges: Sequence[int], size: int, shape: tuple[int, ...]
) -> Tensor:
    """Unpack the flat receive buffer, ``[s, B, heads, d]`` from each peer, to ``[B, s, H, d]``."""
    batch, length, width, depth = shape
    counts = _head_counts(head_ranges, size)
    disjoint = sum(counts) == width  # the ranges cover all heads
    wide = torch.promote_types(received.dtype, torch.float32)
    # Gradients of one head from several peers are summed, in fp32 or wider.
    out = received.new_empty(shape) if disjoint else received.new_zeros(shape, dtype=wide)
    blocks = received.split([length * batch * depth * count for count in counts])
    peers = zip(blocks, counts, _peer_ranges(tuple(head_ranges), size), strict=True)
    for block, count, ranges in peers:
        by_batch = block.view(length, batch, count, depth).transpose(0, 1)
        offset = 0
        for first, stop in ranges:
            piece = by_batch[:, :, offset : offset + stop - first]
            target = out[:, :, first:stop]
            _ = target.copy_(piece) if disjoint else target.add_(piece)
            offset += stop - first
    return out.to(received.dtype)


def _start_impl(
    x: Tensor,
    handle: int,
    lengths: Sequence[int],
    head_ranges: Sequence[int],
    to_heads: bool,
    adjoint: bool,
    unit: str,
    label: str,
) -> Tensor:
    group = _GROUPS.find(handle)
    batch, depth = x.shape[0], x.shape[3]
    mine = _head_counts(head_ranges, group.size)
    rows = [length * batch * depth * mine[group.rank] for length in lengths]
    columns = [lengths[group.rank] * batch * depth * count for count in mine]
    if to_heads:
        send = _pack(x, head_ranges, group.size)
    else:
        send = x.transpose(0, 1).contiguous().view(-1)
    send_counts, receive_counts = (columns, rows) if to_heads else (rows, columns)
    received = send.new_empty(sum(receive_counts))
    nbytes = (sum(send_counts) - send_counts[group.rank]) * x.element_size()
    phase = phase_of(adjoint)
    group.reporter.launched("A2A", f"{label} of {unit}", phase)
    message = group.in_flight.launch(
        unit, label, phase, nbytes, send, received,
        lambda: group.all_to_all(received, send, receive_counts, send_counts),
    )  # fmt: skip
    return group.in_flight.add(message)


def _finish_impl(
    token: Tensor,
    handle: int,
    lengths: Sequence[int],
    head_ranges: Sequence[int],
    to_heads: bool,
    unit: str,
    label: str,
    shape: Sequence[int],
) -> Tensor:
    group = _GROUPS.find(handle)
    found = group.in_flight.take(token)
    if found is None:
        raise CollectiveError(
            f"Rank {group.rank}: the exchange of {label!r} in {unit or 'this module'} was already "
            "waited for, or dropped after an exception. Start it again and wait for it once."
        )
    group.in_flight.wait(found, unit, label, f"{label} of {unit or 'attention'}")
    batch, _, _, depth = shape
    if not to_heads:
        return _unpack(found.received, head_ranges, group.size, tuple(shape))
    mine = _head_counts(head_ranges, group.size)[group.rank]
    return found.received.view(sum(lengths), batch, mine, depth).transpose(0, 1)


OPERATORS: dict[str, Callable[..., Any]] = {
    "internsp_sp::start": _start_impl,
    "internsp_sp::finish": _finish_impl,
}
"""Implementations of the operators, for the plan, which counts the memory that they use."""
_start = torch.library.custom_op("internsp_sp::start", _start_impl, mutates_args=())
_finish = torch.library.custom_op("internsp_sp::finish", _finish_impl, mutates_args=())


def _start_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, handle, lengths, head_ranges, to_heads, _, unit, label = inputs
    group = _GROUPS.find(handle)
    batch, _, _, depth = x.shape
    # The autograd graph keeps the group alive until the graph itself is freed.
    ctx.group = group
    shape = (batch, lengths[group.rank], _width(head_ranges), depth)
    ctx.spec = (handle, lengths, head_ranges, not to_heads, unit, label, shape)


def _start_backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
    return _finish(token, *ctx.spec), *(None,) * 7


def _finish_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, handle, lengths, head_ranges, to_heads, unit, label, _ = inputs
    ctx.group = _GROUPS.find(handle)
    ctx.spec = (handle, lengths, head_ranges, not to_heads, True, unit, label)


def _finish_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _start(grad, *ctx.spec), *(None,) * 7


_start.register_autograd(_start_backward, setup_context=_start_context)
_finish.register_autograd(_finish_backward, setup_context=_finish_context)


def _width(head_ranges: Sequence[int]) -> int:
    """Number of heads on the sequence side: the largest bound, since the ranges cover all heads."""
    return max(head_ranges, default=0)


class PendingExchange:
    """An exchange that has been launched. :meth:`wait` returns its result, at every call."""

    def __init__(self, token: Tensor | None, spec: tuple[Any, ...], result: Tensor | None) -> None:
        self._token, self._spec, self._result = token, spec, result

    @torch.compiler.disable
    def wait(self) -> Tensor:
        """Block the compute stream (with gloo the calling thread) until the result has arrived."""
        if self._result is None:
            assert self._token is not None, "a pending exchange has a token or a result"
            self._result = _finish(self._token, *self._spec)
            self._token = None
        return self._result


class FinishedExchange(PendingExchange):
    """Queries, keys or values ``[B, S, own heads, d]`` whose exchange in parts is complete."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(None, (), tensor)


@torch.compiler.disable
def start_exchange(
    x: Tensor,
    group: ExchangeGroup | None,
    lengths: Sequence[int],
    head_ranges: Sequence[int],
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
        return PendingExchange(None, (), x)
    rank, lengths, head_ranges = group.rank, tuple(lengths), tuple(head_ranges)
    to_heads = to == "heads"
    width, mine = _width(head_ranges), _head_counts(head_ranges, group.size)[rank]
    wanted = (lengths[rank], width) if to_heads else (sum(lengths), mine)
    if x.dim() != 4 or len(lengths) != group.size or tuple(x.shape[1:3]) != wanted:
        raise LayoutError(
            f"Rank {rank}: the exchange of {label!r} to {to} needs [B, {wanted[0]}, {wanted[1]}, "
            f"d] over {group.size} ranks, got {list(x.shape)} and lengths {lengths}."
        )
    shape = (x.shape[0], lengths[rank], width, x.shape[3])
    token = _start(x, group.handle, lengths, head_ranges, to_heads, adjoint, unit, label)
    spec = (group.handle, lengths, head_ranges, to_heads, unit, label, shape)
    return PendingExchange(token, spec, None)
