"""Messages between the ranks that own different experts: counts, then rows with uneven splits.

Two custom operators carry a message, ``internsp_experts::start`` and ``internsp_experts::finish``,
as in :mod:`internsp.sp.exchange`: ``start`` launches one all-to-all and returns a *token* that
stands for it, ``finish`` waits and returns what has arrived. Each is the other's adjoint, so that a
backward sends gradients the way back in one message, too. A first message tells every rank how many
rows come from where (:func:`exchange_counts`): the only place where the host waits for other ranks'
data-dependent numbers. Selective checkpointing keeps the results of both, so that a recompute sends
nothing and never routes anew.

A message has for each row: its values ``[h]``, ``k`` weights and ``k`` numbers of experts, as bytes
one after another. The way back, and gradients, have no numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from internsp.base.handles import HandleTable
from internsp.base.in_flight import phase_of
from internsp.errors import CollectiveError
from internsp.sp.exchange import ExchangeGroup

_INDEX = torch.int32  # of experts' numbers in a message


class OwnerGroup(ExchangeGroup):
    """The ranks that own different experts of a model, and the messages in flight between them.

    Its ``reporter`` counts launches, and names the block and phase where a message fails.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handle = _GROUPS.add(self)


_GROUPS: HandleTable[OwnerGroup] = HandleTable("group of ranks that own experts")


def _bytes(values: Tensor) -> Tensor:
    """``[N, n]`` as bytes ``[N, n * size]``; a view if it can be one."""
    if not values.numel():  # its strides may be any
        size = values.shape[1] * values.element_size()
        return torch.empty(len(values), size, dtype=torch.uint8, device=values.device)
    return values.contiguous().view(torch.uint8)


def _values(piece: Tensor, kind: torch.dtype) -> Tensor:
    """Bytes ``[N, n * size]`` as values ``[N, n]``: a copy, at an address that ``kind`` needs."""
    shape = len(piece), piece.shape[1] // kind.itemsize
    made = torch.empty(shape, dtype=kind, device=piece.device)
    if made.numel():
        made.view(torch.uint8).copy_(piece)
    return made


def _start_impl(
    rows: Tensor,
    weights: Tensor,
    index: Tensor,
    handle: int,
    send: Sequence[int],
    receive: Sequence[int],
    adjoint: bool,
    name: str,
    what: str,
) -> Tensor:
    group = _GROUPS.find(handle)
    packed = torch.cat([_bytes(part) for part in (rows, weights, index.to(_INDEX))], dim=1)
    width = packed.shape[1]
    received = packed.new_empty(sum(receive) * width)
    phase, nbytes = phase_of(adjoint), (sum(send) - send[group.rank]) * width
    group.reporter.launched("A2A", f"{what} of {name}", phase)
    message = group.in_flight.launch(
        name, f"{name} {what}", phase, nbytes, packed, received,
        lambda: group.all_to_all(
            received, packed.view(-1), [n * width for n in receive], [n * width for n in send]
        ),
    )  # fmt: skip
    return group.in_flight.add(message)


def _finish_impl(
    token: Tensor,
    like: Tensor,
    weights_like: Tensor,
    handle: int,
    send: Sequence[int],
    receive: Sequence[int],
    numbers: int,
    name: str,
    what: str,
) -> tuple[Tensor, Tensor, Tensor]:
    group = _GROUPS.find(handle)
    found = group.in_flight.take(token)
    if found is None:
        raise CollectiveError(
            f"Rank {group.rank}: the message with {what} of {name} was already waited for, or "
            "dropped after an exception. Run the model's forward again."
        )
    group.in_flight.wait(found, name, f"{name} {what}", f"the {what} of {name}")
    values = like.shape[1] * like.element_size()
    of_weights = weights_like.shape[1] * weights_like.element_size()
    table = found.received.view(sum(receive), values + of_weights + numbers * _INDEX.itemsize)
    pieces = table.split([values, of_weights, numbers * _INDEX.itemsize], dim=1)
    kinds = (like.dtype, weights_like.dtype, _INDEX)
    rows, weights, index = (_values(piece, kind) for piece, kind in zip(pieces, kinds, strict=True))
    return rows, weights, index


_start = torch.library.custom_op("internsp_experts::start", _start_impl, mutates_args=())
_finish = torch.library.custom_op("internsp_experts::finish", _finish_impl, mutates_args=())


def _start_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, _, handle, send, receive, _, name, what = inputs
    # The graph keeps the group alive until the graph itself is freed.
    ctx.group = _GROUPS.find(handle)
    ctx.likes = rows.new_empty(0, rows.shape[1]), weights.new_empty(0, weights.shape[1])
    ctx.spec = (handle, receive, send, 0, name, what)


def _start_backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, _ = _finish(token, *ctx.likes, *ctx.spec)
    return rows, weights, None, *(None,) * 6


def _finish_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, _, handle, send, receive, _, name, what = inputs
    ctx.group = _GROUPS.find(handle)
    ctx.spec = (handle, receive, send, True, name, what)


def _finish_backward(ctx: Any, rows: Tensor, weights: Tensor, index: Any) -> tuple[Any, ...]:
    nothing = torch.empty(rows.shape[0], 0, dtype=_INDEX, device=rows.device)
    return _start(rows, weights, nothing, *ctx.spec), *(None,) * 8


_start.register_autograd(_start_backward, setup_context=_start_context)
_finish.register_autograd(_finish_backward, setup_context=_finish_context)


class Message:
    """A message that has been launched. :meth:`wait` returns what has arrived, once.

    Args:
        rows: ``[N, h]``, sorted by the rank to which they go.
        weights: ``[N, k]`` of any floating dtype; ``k`` may be 0.
        index: ``[N, j]``, numbers of experts; ``j`` may be 0.
        send, receive: rows for and from each rank of the group.
        name: of the module that holds the experts; ``what``: what travels, for trace and errors.
    """

    def __init__(
        self, rows: Tensor, weights: Tensor, index: Tensor, group: OwnerGroup,
        send: Sequence[int], receive: Sequence[int], name: str, what: str,
    ) -> None:  # fmt: skip
        spec = (group.handle, list(send), list(receive))
        self._token = _start(rows, weights, index, *spec, False, name, what)
        likes = rows.detach()[:0], weights.detach()[:0]
        self._rest = (*likes, *spec, index.shape[1], name, what)

    def wait(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows ``[M, h]``, weights ``[M, k]`` and numbers ``[M, j]``, sorted by the sender."""
        found: tuple[Tensor, Tensor, Tensor] = _finish(self._token, *self._rest)
        return found


def exchange_counts(table: Tensor, group: OwnerGroup, name: str) -> tuple[list[Any], list[Any]]:
    """Send row ``p`` of ``table [size, n]`` (int64) to rank ``p``; all at once to the host.

    Returns:
        What was sent, and what has arrived: for each rank of the group ``n`` numbers.
    """
    nothing, each = table[:, :0], [1] * group.size
    received, _, _ = Message(table, nothing, nothing, group, each, each, name, "counts").wait()
    sent, arrived = torch.stack([table, received]).tolist()
    return sent, arrived
