"""One attention sublayer with its exchange of heads: projections, attention and out-projection are
computed in parts, so that messages are in flight while products that do not need them are computed.

An all-to-all for each of q, k, v and the output makes a block wait for its links four times a
pass: an all-to-all starts only when all its data are computed, and it queues behind the weights on
the same link. Here each part is sent as a message of its own as soon as it is computed, the peers'
parts first (:mod:`.stages` has the order), and the rank's own parts are computed meanwhile:

=========  ========================================================================================
forward    project the peers' heads of q, k and v and send them, then project the own heads;
           attention; send the peers' positions of the output; multiply the own heads with their
           columns of the out-projection, then the peers' heads with theirs
backward   compute and send the peers' part of attention's output gradient; compute the own part and
           the out-projection's weight gradient; attention's backward; send the peers' positions
           of dq, dk and dv, one message to each peer; compute the gradients of the input and the
           weights from the own heads, then from the peers' heads
=========  ========================================================================================

Used on the host over gloo, for projections that are ordinary linear layers. Another module (an
adapter, a layer with a user's hook) is called as it is, and its output is sent in parts: the
messages are the same, so that a hook may exist on one rank alone.

Each stage is an autograd function of its own, since any kernel may compute attention, and since the
out-projection's gradients are ready before attention's backward. The results that selective
checkpointing keeps come from custom operators, as in :mod:`.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from internsp.base.handles import HandleTable
from internsp.base.in_flight import phase_of
from internsp.errors import LayoutError
from internsp.sp.exchange import ExchangeGroup
from internsp.sp.gloo.messages import ExchangeKey, ExchangeShape, PeerExchange, peer_exchanges
from internsp.sp.gloo.stages import (
    COMPUTE,
    OWN,
    PREPOST,
    QKV,
    RECEIVE,
    REST,
    SEND,
    WAIT,
    WEIGHT,
    Action,
    exchange_order,
)
from internsp.sp.heads import HeadPlan, Rotation

_order = lru_cache(maxsize=64)(exchange_order)


def _no_op(*_: str) -> None:
    return


class FusedSublayer:
    """One forward of one attention sublayer with an exchange in parts, and its backward.

    Args:
        x: its input ``[B, s, ...]``.
        group: the ranks that share heads.
        lengths: number of positions of each of them.
        depth: elements of a head, ``d``.
        unit: the attention module's name in the trace.
        overlap: see :func:`internsp.sp.gloo.stages.exchange_order`.
    """

    def __init__(
        self, x: Tensor, group: ExchangeGroup, plan: HeadPlan, lengths: tuple[int, ...], depth: int,
        unit: str, overlap: bool,
    ) -> None:  # fmt: skip
        self.group, self.unit, self.overlap = group, unit, overlap
        self.shape = ExchangeShape(plan, group.rank, lengths, len(x), depth, x.dtype)
        self.order = _order(group.rank, group.size, overlap)
        self.rotations: dict[str, Rotation] = {}  # of each projection that is computed in parts
        self.sent_out: PeerExchange | None = None  # from the forward's sends to its wait
        self.sent_out_gradient: PeerExchange | None = None  # likewise in backward
        self.handle = _SUBLAYERS.add(self)

    def start_exchange(self, what: str, adjoint: bool) -> PeerExchange:
        """Start the exchange of a stage (``qkv`` or ``out``) and return it."""
        key = ExchangeKey(self.unit, what, phase_of(adjoint))
        return peer_exchanges(self.group).start(self.group, key, self.shape)

    def run(
        self,
        actions: Iterable[Action],
        exchange: PeerExchange,
        make: Callable[[str, int], Tensor],
        own: Callable[[str], None],
        then: Callable[[], None] = _no_op,
    ) -> None:
        """Execute a stage's actions in order.

        Args:
            make: computes what a peer gets, from the role and the peer's rank.
            own: computes this rank's own part of a role.
            then: computes the weight gradient (``WEIGHT``) or the part of the peers (``REST``).
        """
        part = None
        for kind, what, peer in actions:
            if kind == COMPUTE:
                part = make(what, peer).contiguous()
            elif kind == SEND:
                assert part is not None, "computed by the action before"
                exchange.send(part, what, peer)
            elif kind == PREPOST:
                peer_exchanges(self.group).prepost_receives(exchange)
            elif kind == OWN:
                own(what)
            elif kind == WAIT:
                exchange.wait()
            elif kind in (WEIGHT, REST):
                then()
            else:
                assert kind == RECEIVE, "posted at the start of the exchange or before it"

    # Called by the attention module

    @staticmethod
    def takes(x: object) -> bool:
        """Whether heads of ``x`` are exchanged in parts; the same on all ranks."""
        return (
            isinstance(x, Tensor)
            and x.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cpu")
        )

    @staticmethod
    def can_compute(linear: Any) -> bool:
        """Whether a projection's products may be computed in parts, without calling the module."""
        # Looked up on the class: a wrapper may forward attributes of the module that it wraps, and
        # the wrapper's own forward would be skipped.
        check = getattr(type(linear), "can_compute_in_parts", None)
        return check is not None and check(linear) and not FusedSublayer.is_hooked(linear)

    @staticmethod
    def is_hooked(module: nn.Module) -> bool:
        """Whether a call of ``module`` runs a hook of the user's, which would see only parts."""
        everywhere: Any = nn.modules.module
        if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
            return True
        if module._backward_hooks or module._backward_pre_hooks or module._forward_hooks:
            return True
        before = [getattr(hook, "func", hook) for hook in module._forward_pre_hooks.values()]
        packages = {str(getattr(hook, "__module__", "")).partition(".")[0] for hook in before}
        return not packages <= {"internsp"}

    def project(
        self, x: Tensor, linears: Sequence[Any], rotations: Sequence[Rotation]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project ``x`` ``[B, s, hidden]`` to queries, keys and values, and exchange these.

        Args:
            linears: the three projections; :meth:`can_compute` is true for each.
            rotations: the function applied to the output of each.

        Returns:
            Queries, keys and values, each ``[B, S, own heads, d]``.

        Raises:
            LayoutError: the size of a weight does not fit the number of heads.
        """
        self.rotations = dict(zip(QKV, rotations, strict=True))
        weights, biases, guards = zip(
            *(linear.unshard_weight_and_bias() for linear in linears), strict=True
        )
        for role, weight in zip(QKV, weights, strict=True):
            self.require_size(f"the projection of {role}", len(weight), role)
        whole = _Project.apply(self, x, *weights, *biases)
        for guard in guards:
            whole = guard(whole)
        q, k, v = whole
        return q, k, v

    def exchange_qkv(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange projected queries, keys and values, each ``[B, s, all heads, d]``."""
        q, k, v = _ExchangeQKV.apply(self, q, k, v)
        return q, k, v

    def require_size(self, what: str, size: int, role: str) -> None:
        """Check that a weight has one row, or column, for each feature of its role's heads."""
        heads, depth = self.shape.total_heads(role), self.shape.depth
        if size != heads * depth:
            raise LayoutError(
                f"Rank {self.shape.rank}: {what} of {self.unit or 'attention'} has {size} rows or "
                f"columns for {heads} heads of {depth}: give it {heads * depth}."
            )

    def out_projection(self, out: Tensor, linear: Any) -> Tensor:
        """Apply the out-projection ``linear`` to attention's output ``[B, S, own heads, d]``.

        Returns its output at this rank's positions. ``linear`` is called as a module, so that its
        hooks run.
        """
        if not self.can_compute(linear):
            return linear(self.gather_out(out).flatten(-2))  # type: ignore[no-any-return]
        token = _SendOut.apply(self, out)

        def product(weight: Tensor, bias: Tensor | None) -> Tensor:
            self.require_size("the out-projection", weight.shape[1], "out")
            made: Tensor = _OutProjection.apply(self, out.detach(), token, weight, bias)
            return made

        return linear(product)  # type: ignore[no-any-return]

    def gather_out(self, out: Tensor) -> Tensor:
        """Exchange attention's output: all heads at own positions, ``[B, s, heads, d]``."""
        whole: Tensor = _GatherOut.apply(self, out.detach(), _SendOut.apply(self, out))
        return whole.unflatten(-1, (self.shape.plan.heads, self.shape.depth))


_SUBLAYERS: HandleTable[FusedSublayer] = HandleTable("attention sublayer")


# Forward. Selective checkpointing keeps the results of these operators.


@torch.library.custom_op("internsp_sp::project_qkv", mutates_args=())
def _project_qkv(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], handle: int
) -> list[Tensor]:
    """Project and exchange. An empty bias means that the projection has none."""
    sublayer = _SUBLAYERS.find(handle)
    exchange = sublayer.start_exchange("qkv", False)
    shape = exchange.shape

    def make(role: str, rank: int) -> Tensor:
        which, rows = QKV.index(role), shape.features(shape.heads(role, rank))
        bias = biases[which][rows] if len(biases[which]) else None
        made = F.linear(x, weights[which][rows], bias)
        made = made.unflatten(-1, (shape.head_count(role, rank), shape.depth))
        return sublayer.rotations[role][0](made).transpose(0, 1)

    return _run_qkv(sublayer, exchange, make)


@torch.library.custom_op("internsp_sp::exchange_qkv", mutates_args=())
def _exchange_qkv(given: Sequence[Tensor], handle: int) -> list[Tensor]:
    sublayer = _SUBLAYERS.find(handle)
    exchange = sublayer.start_exchange("qkv", False)

    def make(role: str, rank: int) -> Tensor:
        return given[QKV.index(role)][:, :, exchange.shape.heads(role, rank)].transpose(0, 1)

    return _run_qkv(sublayer, exchange, make)


def _run_qkv(
    sublayer: FusedSublayer, exchange: PeerExchange, make: Callable[[str, int], Tensor]
) -> list[Tensor]:
    """Run the ``qkv`` stage; return queries, keys and values, each ``[S, B, own heads, d]``.

    Args:
        make: the part of a role for a rank, ``[s, B, heads, d]``.
    """
    shape = exchange.shape

    def own(role: str) -> None:
        exchange.received[role][shape.positions(shape.rank)] = make(role, shape.rank)

    sublayer.run(sublayer.order.heads, exchange, make, own)
    return [exchange.received[role] for role in QKV]


@torch.library.custom_op("internsp_sp::send_out", mutates_args=())
def _send_out(out: Tensor, handle: int) -> Tensor:
    sublayer = _SUBLAYERS.find(handle)
    exchange = sublayer.sent_out = sublayer.start_exchange("out", False)
    by_position = out.transpose(0, 1)
    sends = [action for action in sublayer.order.output if action.kind in (COMPUTE, SEND, PREPOST)]
    sublayer.run(
        sends, exchange, lambda _, peer: by_position[exchange.shape.positions(peer)], _no_op
    )
    return out.new_zeros(1, dtype=torch.float32)


@torch.library.custom_op("internsp_sp::receive_out", mutates_args=())
def _receive_out(token: Tensor, handle: int) -> list[Tensor]:
    """Wait; return each peer's part ``[B, s, heads of the peer, d]``, the next neighbor first."""
    sublayer = _SUBLAYERS.find(handle)
    exchange, sublayer.sent_out = sublayer.sent_out, None
    assert exchange is not None, "sent just before, in the same forward"
    exchange.wait()
    return [exchange.from_peer(peer)["out"] for peer in exchange.shape.peers]


def _gather_positions(
    sublayer: FusedSublayer, out: Tensor, token: Tensor, own: Callable[[Tensor], None]
) -> Tensor:
    """Gather all heads of the own positions, ``[B, s, all heads * d]``.

    Args:
        out: ``[B, S, own heads, d]``.
        own: called with the result when only the own heads are in it, before the wait.
    """
    shape = sublayer.shape
    # Not a view, so that its receiver may write into it.
    flat = out.new_empty(shape.batch, shape.own_length, shape.total_heads("out") * shape.depth)
    whole = flat.unflatten(-1, (shape.total_heads("out"), shape.depth))
    pieces: Sequence[Tensor] = ()
    for kind, _, _ in sublayer.order.output:
        if kind == OWN:
            whole[:, :, shape.heads("out", shape.rank)] = out[:, shape.positions(shape.rank)]
            own(flat)
        elif kind == WAIT:
            pieces = _receive_out(token, sublayer.handle)
        elif kind == REST:
            for peer, piece in zip(shape.peers, pieces, strict=True):
                whole[:, :, shape.heads("out", peer)] = piece
    return flat


class _Project(torch.autograd.Function):
    """``x`` and the projections' weights -> queries, keys, values ``[B, S, own heads, d]``."""

    @staticmethod
    def forward(
        ctx: Any, sublayer: FusedSublayer, x: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        """``given``: three weights, then three biases."""
        ctx.sublayer = sublayer
        weights = [weight for weight in given[:3] if weight is not None]
        biases = [x.new_empty(0) if bias is None else bias for bias in given[3:]]
        ctx.save_for_backward(x, *weights)
        whole = _project_qkv(x, weights, biases, sublayer.handle)
        return tuple(one.transpose(0, 1) for one in whole)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input and weights: from the own heads, then from the peers' heads."""
        sublayer: FusedSublayer = ctx.sublayer
        x, *weights = ctx.saved_tensors
        of_x, *wanted = ctx.needs_input_grad[1:]
        rows = x.flatten(0, 1)
        inputs: list[Tensor] = []  # the input's gradient, from the first term on
        matrices = [
            torch.empty_like(w) if want else None
            for w, want in zip(weights, wanted[:3], strict=True)
        ]
        biases = [
            w.new_empty(len(w)) if want else None
            for w, want in zip(weights, wanted[3:], strict=True)
        ]

        def accumulate(role: str, heads: slice, gradient: Tensor) -> None:
            which, span = QKV.index(role), sublayer.shape.features(heads)
            gradient = sublayer.rotations[role][1](gradient)
            gradient = gradient.reshape(len(rows), span.stop - span.start)
            weight, of_weight, of_bias = weights[which][span], matrices[which], biases[which]
            if of_weight is not None:
                torch.mm(gradient.t(), rows, out=of_weight[span])
            if of_bias is not None:
                torch.sum(gradient, 0, out=of_bias[span])
            if inputs:
                inputs[0].addmm_(gradient, weight)
            elif of_x:
                inputs.append(gradient @ weight)

        _qkv_backward(sublayer, gradients, accumulate)
        return None, inputs[0].view_as(x) if of_x else None, *matrices, *biases


class _ExchangeQKV(torch.autograd.Function):
    """Queries, keys, values ``[B, s, all heads, d]`` -> ``[B, S, own heads, d]``."""

    @staticmethod
    def forward(ctx: Any, sublayer: FusedSublayer, *given: Tensor) -> tuple[Tensor, ...]:
        """See the class."""
        ctx.sublayer = sublayer
        whole = _exchange_qkv(given, sublayer.handle)
        return tuple(one.transpose(0, 1) for one in whole)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the queries, keys and values that were given."""
        sublayer: FusedSublayer = ctx.sublayer
        shape = sublayer.shape
        like = gradients[0]
        found = {
            role: like.new_empty(
                shape.batch, shape.own_length, shape.total_heads(role), shape.depth
            )
            for role in QKV
        }

        def accumulate(role: str, heads: slice, gradient: Tensor) -> None:
            found[role][:, :, heads] = gradient

        _qkv_backward(sublayer, gradients, accumulate)
        return None, *found.values()


class _SendOut(torch.autograd.Function):
    """Send attention's output to the ranks that hold its positions; return a token for it."""

    @staticmethod
    def forward(ctx: Any, sublayer: FusedSublayer, out: Tensor) -> Tensor:
        """``out``: ``[B, S, own heads, d]``."""
        ctx.sublayer = sublayer
        return _send_out(out, sublayer.handle)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Wait for the exchange that :func:`_start_out_backward` has launched."""
        sublayer: FusedSublayer = ctx.sublayer
        exchange, sublayer.sent_out_gradient = sublayer.sent_out_gradient, None
        assert exchange is not None, "the backward of the token's receiver has run"
        exchange.wait()
        return None, exchange.received["out"].transpose(0, 1)


class _OutProjection(torch.autograd.Function):
    """The out-projection of the output that was sent."""

    @staticmethod
    def forward(
        ctx: Any,
        sublayer: FusedSublayer,
        out: Tensor,
        token: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """``out``: ``[B, S, own heads, d]``, read for the own part. Returns ``[B, s, out]``."""
        shape = sublayer.shape
        ctx.sublayer = sublayer
        # Not a view of the product, so that its receiver may write into it.
        made = out.new_empty(shape.batch, shape.own_length, len(weight))
        product = made.view(shape.batch * shape.own_length, len(weight))

        def own(whole: Tensor) -> None:
            span = shape.features(shape.heads("out", shape.rank))
            rows, columns = whole.flatten(0, 1)[:, span], weight[:, span].t()
            if bias is None:
                torch.mm(rows, columns, out=product)
            else:
                torch.addmm(bias, rows, columns, out=product)

        whole = _gather_positions(sublayer, out, token, own)
        rows = whole.flatten(0, 1)
        for heads in shape.peer_heads("out"):
            span = shape.features(heads)
            product.addmm_(rows[:, span], weight[:, span].t())
        ctx.save_for_backward(weight, whole)
        return made

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The weight's gradient; attention's output gets its gradient by messages."""
        sublayer: FusedSublayer = ctx.sublayer
        shape = sublayer.shape
        _, _, of_token, of_weight, of_bias = ctx.needs_input_grad
        weight, whole = ctx.saved_tensors
        rows = gradient.flatten(0, 1)
        found: list[Tensor | None] = []

        def make(rank: int) -> Tensor:
            product = rows @ weight[:, shape.features(shape.heads("out", rank))]
            size = shape.batch, shape.own_length, shape.head_count("out", rank), shape.depth
            return product.view(size).transpose(0, 1)

        def weight_gradient() -> None:
            if of_weight:
                found.append(rows.t() @ whole.flatten(0, 1))

        if of_token:
            _start_out_backward(sublayer, make, weight_gradient)
        else:
            weight_gradient()
        token = gradient.new_zeros(1, dtype=torch.float32) if of_token else None
        return None, None, token, *(found or [None]), rows.sum(0) if of_bias else None


class _GatherOut(torch.autograd.Function):
    """The output that was sent, received as one tensor ``[B, s, all heads * d]``."""

    @staticmethod
    def forward(ctx: Any, sublayer: FusedSublayer, out: Tensor, token: Tensor) -> Tensor:
        """``out``: ``[B, S, own heads, d]``, read for the own part."""
        ctx.sublayer = sublayer
        return _gather_positions(sublayer, out, token, lambda whole: None)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """See :func:`_start_out_backward`."""
        sublayer: FusedSublayer = ctx.sublayer
        shape = sublayer.shape
        by_head = gradient.unflatten(-1, (shape.total_heads("out"), shape.depth))

        def make(rank: int) -> Tensor:
            return by_head[:, :, shape.heads("out", rank)].transpose(0, 1)

        _start_out_backward(sublayer, make, _no_op)
        return None, None, gradient.new_zeros(1, dtype=torch.float32)


# Backward.


def _start_out_backward(
    sublayer: FusedSublayer, make: Callable[[int], Tensor], weight_gradient: Callable[[], None]
) -> None:
    """Launch the exchange of attention's output gradient; :class:`_SendOut` waits for it.

    Args:
        make: the gradient of a rank's heads at own positions, ``[s, B, heads, d]``.
        weight_gradient: computes the weight gradient while the messages are in flight.
    """
    exchange = sublayer.sent_out_gradient = sublayer.start_exchange("out", True)
    shape = exchange.shape
    # _SendOut.backward waits, so that the weight gradient's reduction can be launched before.
    actions = [a for a in sublayer.order.output_gradient if a.kind != WAIT or not sublayer.overlap]

    def own(role: str) -> None:
        exchange.received["out"][shape.positions(shape.rank)] = make(shape.rank)

    sublayer.run(actions, exchange, lambda _, peer: make(peer), own, weight_gradient)


def _qkv_backward(
    sublayer: FusedSublayer,
    gradients: Sequence[Tensor],
    accumulate: Callable[[str, slice, Tensor], None],
) -> None:
    """Exchange the gradients of q, k and v (``[B, S, own heads, d]``) back to own positions.

    Args:
        accumulate: called with a role, some of its heads, and their gradient at own positions
            ``[B, s, heads, d]``; every head comes once.
    """
    exchange = sublayer.start_exchange("qkv", True)
    shape = exchange.shape
    of = {role: g.transpose(0, 1) for role, g in zip(QKV, gradients, strict=True)}

    def own_part(role: str) -> Tensor:
        return of[role][shape.positions(shape.rank)].transpose(0, 1)

    def make(_: str, peer: int) -> Tensor:
        return torch.cat([of[role][shape.positions(peer)].flatten() for role in QKV])

    def own(role: str) -> None:
        if not shape.has_shared_heads(role):
            accumulate(role, shape.heads(role, shape.rank), own_part(role))

    def rest() -> None:
        pieces = {peer: exchange.from_peer(peer) for peer in shape.peers}
        for role in QKV:
            size = (shape.batch, shape.own_length, shape.total_heads(role), shape.depth)
            if shape.has_shared_heads(role):
                # Summed in fp32 or wider, in the order of the ranks.
                wide = torch.promote_types(shape.dtype, torch.float32)
                whole = gradients[0].new_zeros(size, dtype=wide)
                for rank in range(len(shape.lengths)):
                    own_one = rank == shape.rank
                    piece = own_part(role) if own_one else pieces[rank][role]
                    whole[:, :, shape.heads(role, rank)] += piece
                accumulate(role, slice(0, shape.total_heads(role)), whole.to(shape.dtype))
                continue
            whole = gradients[0].new_empty(size)
            for peer in shape.peers:
                whole[:, :, shape.heads(role, peer)] = pieces[peer][role]
            for heads in shape.peer_heads(role):
                accumulate(role, heads, whole[:, :, heads])

    sublayer.run(sublayer.order.heads_gradient, exchange, make, own, rest)
