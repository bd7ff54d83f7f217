"""One attention sublayer over an exchange of heads: projections, attention and out-projection in
parts, so that messages are on their way while the products that need none of them are made.

An all-to-all for each of q, k, v and the output makes a block wait for its links four times a
pass: what a peer needs leaves when the last of it is made, and behind weights that are on the same
link. Here each part leaves as a message of its own as soon as it is made, the peers' parts first
(:mod:`.stages` has the order), and the own parts are computed meanwhile:

=========  ========================================================================================
forward    the peers' heads of q, k and v are projected and sent, then the own heads are, into the
           whole tensors; attention; the peers' positions are sent; own heads' columns of the
           out-projection; then the peers'
backward   what the peers need before the out-projection is sent, then the own part and the weight's
           gradient are made; attention's backward; the peers' positions of dq, dk and dv in one
           message each; gradients from own heads, for the input and the weights; then from theirs
=========  ========================================================================================

Served on the host over gloo, by projections that are ordinary linear layers. One that is not (an
adapter, a hook of a user's) is called as it is, and its result sent in parts: the messages are the
same, so that one rank alone may have a hook.

Between the stages stand autograd functions of their own: attention is any kernel's, and gradients
of the out-projection are ready before attention's backward. What selective checkpointing keeps is
made by custom operators, as in :mod:`.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from internsp.errors import LayoutError
from internsp.sp.exchange import Channel, PendingExchange, phase_of
from internsp.sp.handles import Handles
from internsp.sp.messages import Place, Shape, Stage, stages_of
from internsp.sp.stages import (
    AHEAD,
    MAKE,
    OWN,
    QKV,
    RECEIVE,
    REST,
    SEND,
    WAIT,
    WEIGHT,
    Action,
    order,
)

_order = lru_cache(maxsize=64)(order)


Turn = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""What is done to projected queries or keys ``[B, s, h, d]``, linear and the same to each head (a
rotary embedding), and its adjoint; both leave the shape."""


def _nothing(x: Tensor) -> Tensor:
    return x


def _nothing_more() -> None:
    return


UNTURNED: Turn = (_nothing, _nothing)


class Whole(PendingExchange):
    """Queries, keys or values that have been exchanged in parts: ``[B, S, own heads, d]``."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(None, (), tensor)


class Parts:
    """One forward of one attention sublayer, and its backward.

    Args:
        unit: of the trace.
        overlap: see :func:`internsp.sp.stages.order`.
    """

    def __init__(self, channel: Channel, shape: Shape, unit: str, overlap: bool) -> None:
        self.channel, self.shape, self.unit, self.overlap = channel, shape, unit, overlap
        self.order = _order(channel.rank, channel.size, overlap)
        self.turns = dict.fromkeys(QKV, UNTURNED)
        self.delivered: Stage | None = None  # in forward
        self.returned: Stage | None = None  # in backward
        self.handle = _PARTS.give(self)

    def begin(self, what: str, adjoint: bool) -> Stage:
        """A new stage."""
        place = Place(self.unit, what, phase_of(adjoint))
        return stages_of(self.channel).begin(self.channel, place, self.shape)

    def perform(
        self,
        actions: Iterable[Action],
        stage: Stage,
        make: Callable[[str, int], Tensor],
        own: Callable[[str], None],
        then: Callable[[], None] = _nothing_more,
    ) -> None:
        """Do what the order says.

        Args:
            make: gives what is sent of a role to a peer.
            own: makes this rank's own part of a role.
            then: what else the stage computes: the weight's gradient, or the rest.
        """
        part = None
        for kind, what, peer in actions:
            if kind == MAKE:
                part = make(what, peer).contiguous()
            elif kind == SEND:
                assert part is not None, "made just before"
                stage.send(part, what, peer)
            elif kind == AHEAD:
                stages_of(self.channel).look_ahead(stage)
            elif kind == OWN:
                own(what)
            elif kind == WAIT:
                stage.wait()
            elif kind in (WEIGHT, REST):
                then()
            else:
                assert kind == RECEIVE, "posted when the stage began, or ahead of it"

    # what a model calls

    def project(
        self, x: Tensor, linears: Sequence[Any], turns: Sequence[Turn]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``x`` ``[B, s, hidden]``, of all positions and own heads.

        Args:
            linears: the three projections, :func:`divisible` ones.
            turns: what is done to the result of each.

        Returns:
            ``[B, S, own heads, d]`` of each.

        Raises:
            LayoutError: a weight of another size than that of its heads.
        """
        self.turns = dict(zip(QKV, turns, strict=True))
        weights, biases, guards = zip(*(linear.opened() for linear in linears), strict=True)
        for role, weight in zip(QKV, weights, strict=True):
            self.require(f"the projection of {role}", len(weight), role)
        whole = _Project.apply(self, x, *weights, *biases)
        for guard in guards:
            whole = guard(whole)
        q, k, v = whole
        return q, k, v

    def divide(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`project` of what is projected already, ``[B, s, all heads, d]`` each."""
        q, k, v = _Divide.apply(self, q, k, v)
        return q, k, v

    def require(self, what: str, size: int, role: str) -> None:
        """That a weight has as many rows, or columns, as the heads of its role make."""
        heads, depth = self.shape.width(role), self.shape.depth
        if size != heads * depth:
            raise LayoutError(
                f"Rank {self.shape.rank}: {what} of {self.unit or 'attention'} has {size} rows or "
                f"columns for {heads} heads of {depth}: give it {heads * depth}."
            )

    def output(self, out: Tensor, linear: Any) -> Tensor:
        """The out-projection of attention's result ``[B, S, own heads, d]``, at own positions.

        ``linear`` is called, so that what is hooked on its call happens.
        """
        if divisible(linear):
            made: Tensor = linear(OnTheWay(self, out, _Deliver.apply(self, out)))
        else:
            made = linear(self.collect(out).flatten(-2))
        return made

    def collect(self, out: Tensor) -> Tensor:
        """All heads at own positions ``[B, s, heads, d]``, of attention's result."""
        whole: Tensor = _Collect.apply(self, out.detach(), _Deliver.apply(self, out))
        return whole.unflatten(-1, (self.shape.plan.heads, self.shape.depth))


class OnTheWay:
    """Attention's result, given to a linear layer in place of a tensor, and not yet whole."""

    def __init__(self, parts: Parts, out: Tensor, token: Tensor) -> None:
        self._parts, self._out, self._token = parts, out, token

    def through(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Its product with a weight ``[out, in]``: ``[B, s, out]``.

        Raises:
            LayoutError: ``in`` is not that of all heads.
        """
        self._parts.require("the out-projection", weight.shape[1], "out")
        made: Tensor = _Output.apply(self._parts, self._out.detach(), self._token, weight, bias)
        return made


_PARTS: Handles[Parts] = Handles("attention sublayer")


def divisible(linear: Any) -> bool:
    """Whether a projection's products may be made in parts."""
    # Of its class: a wrapper may answer for what it wraps, and would be passed over.
    asked = getattr(type(linear), "in_parts", None)
    return asked is not None and bool(asked(linear))


def others_hooks(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs a hook that is not ours, which would see parts."""
    everywhere: Any = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return True
    if module._backward_hooks or module._backward_pre_hooks or module._forward_hooks:
        return True
    return any(_package(hook) != "internsp" for hook in module._forward_pre_hooks.values())


def _package(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0]


# Forward. The operators' results are what selective checkpointing keeps.


@torch.library.custom_op("internsp_sp::heads_in_parts", mutates_args=())
def _heads_in_parts(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], parts: int
) -> list[Tensor]:
    """``biases``: empty where there is none."""
    this = _PARTS.find(parts)
    stage = this.begin("qkv", False)
    shape = stage.shape

    def make(role: str, rank: int) -> Tensor:
        which, rows = QKV.index(role), shape.rows(shape.heads(role, rank))
        bias = biases[which][rows] if len(biases[which]) else None
        made = F.linear(x, weights[which][rows], bias)
        made = made.unflatten(-1, (shape.count(role, rank), shape.depth))
        return this.turns[role][0](made).transpose(0, 1)

    return _exchanged(this, stage, make)


@torch.library.custom_op("internsp_sp::given_in_parts", mutates_args=())
def _given_in_parts(given: Sequence[Tensor], parts: int) -> list[Tensor]:
    this = _PARTS.find(parts)
    stage = this.begin("qkv", False)

    def make(role: str, rank: int) -> Tensor:
        return given[QKV.index(role)][:, :, stage.shape.heads(role, rank)].transpose(0, 1)

    return _exchanged(this, stage, make)


def _exchanged(this: Parts, stage: Stage, make: Callable[[str, int], Tensor]) -> list[Tensor]:
    """Queries, keys and values ``[S, B, own heads, d]``; ``make`` gives ``[s, B, heads, d]``."""
    shape = stage.shape

    def own(role: str) -> None:
        stage.arriving[role][shape.at(shape.rank)] = make(role, shape.rank)

    this.perform(this.order.heads, stage, make, own)
    return [stage.arriving[role] for role in QKV]


@torch.library.custom_op("internsp_sp::deliver", mutates_args=())
def _deliver(out: Tensor, parts: int) -> Tensor:
    this = _PARTS.find(parts)
    stage = this.delivered = this.begin("out", False)
    by_position = out.transpose(0, 1)
    sends = [action for action in this.order.output if action.kind in (MAKE, SEND, AHEAD)]
    this.perform(sends, stage, lambda _, peer: by_position[stage.shape.at(peer)], _not_here)
    return out.new_zeros(1, dtype=torch.float32)


def _not_here(role: str) -> None:
    raise AssertionError(f"the own part of {role} is made by the function that follows")


@torch.library.custom_op("internsp_sp::collect", mutates_args=())
def _collect(token: Tensor, parts: int) -> list[Tensor]:
    """From each peer, the next neighbor first: ``[B, s, its heads, d]``."""
    this = _PARTS.find(parts)
    stage, this.delivered = this.delivered, None
    assert stage is not None, "delivered just before, in the same forward"
    stage.wait()
    return [stage.pieces(peer)["out"] for peer in stage.shape.peers]


def _collected(parts: Parts, out: Tensor, token: Tensor, own: Callable[[Tensor], None]) -> Tensor:
    """All heads of the own positions, ``[B, s, all heads * d]``.

    Args:
        out: ``[B, S, own heads, d]``.
        own: called with it when it has the own heads only, while the others are on their way.
    """
    shape = parts.shape
    # Not a view, so that what gets it may write into it.
    flat = out.new_empty(shape.batch, shape.mine, shape.width("out") * shape.depth)
    whole = flat.unflatten(-1, (shape.width("out"), shape.depth))
    pieces: Sequence[Tensor] = ()
    for kind, _, _ in parts.order.output:
        if kind == OWN:
            whole[:, :, shape.heads("out", shape.rank)] = out[:, shape.at(shape.rank)]
            own(flat)
        elif kind == WAIT:
            pieces = _collect(token, parts.handle)
        elif kind == REST:
            for peer, piece in zip(shape.peers, pieces, strict=True):
                whole[:, :, shape.heads("out", peer)] = piece
    return flat


class _Project(torch.autograd.Function):
    """``x`` and the projections' weights -> whole queries, keys and values of the own heads."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, x: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        """``given``: three weights, three biases."""
        ctx.parts = parts
        weights = [weight for weight in given[:3] if weight is not None]
        biases = [x.new_empty(0) if bias is None else bias for bias in given[3:]]
        ctx.save_for_backward(x, *weights)
        whole = _heads_in_parts(x, weights, biases, parts.handle)
        return tuple(one.transpose(0, 1) for one in whole)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of the input and the weights, from the own heads while the peers' are on their way."""
        parts: Parts = ctx.parts
        x, *weights = ctx.saved_tensors
        of_x, *wanted = ctx.needs_input_grad[1:]
        rows = x.flatten(0, 1)
        inputs: list[Tensor] = []  # the input's gradient, once there is one
        matrices = [
            torch.empty_like(w) if want else None
            for w, want in zip(weights, wanted[:3], strict=True)
        ]
        biases = [
            w.new_empty(len(w)) if want else None
            for w, want in zip(weights, wanted[3:], strict=True)
        ]

        def take(role: str, heads: slice, gradient: Tensor) -> None:
            which, span = QKV.index(role), parts.shape.rows(heads)
            gradient = parts.turns[role][1](gradient)
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

        _heads_gradient(parts, gradients, take)
        return None, inputs[0].view_as(x) if of_x else None, *matrices, *biases


class _Divide(torch.autograd.Function):
    """Projected queries, keys and values ``[B, s, all heads, d]`` -> whole ones of own heads."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, *given: Tensor) -> tuple[Tensor, ...]:
        """See the class."""
        ctx.parts = parts
        whole = _given_in_parts(given, parts.handle)
        return tuple(one.transpose(0, 1) for one in whole)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of what was given."""
        parts: Parts = ctx.parts
        shape = parts.shape
        like = gradients[0]
        found = {
            role: like.new_empty(shape.batch, shape.mine, shape.width(role), shape.depth)
            for role in QKV
        }

        def take(role: str, heads: slice, gradient: Tensor) -> None:
            found[role][:, :, heads] = gradient

        _heads_gradient(parts, gradients, take)
        return None, *found.values()


class _Deliver(torch.autograd.Function):
    """Attention's result is sent to the ranks whose positions it is at; a token stands for it."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, out: Tensor) -> Tensor:
        """``out``: ``[B, S, own heads, d]``."""
        ctx.parts = parts
        return _deliver(out, parts.handle)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """What :func:`_output_gradient` has launched."""
        parts: Parts = ctx.parts
        stage, parts.returned = parts.returned, None
        assert stage is not None, "the token's own gradient came before"
        stage.wait()
        return None, stage.arriving["out"].transpose(0, 1)


class _Output(torch.autograd.Function):
    """The out-projection of what was delivered."""

    @staticmethod
    def forward(
        ctx: Any, parts: Parts, out: Tensor, token: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """``out``: ``[B, S, own heads, d]``, for the own part. Returns ``[B, s, out]``."""
        shape = parts.shape
        ctx.parts = parts
        # Not a view of the product, so that what gets it may write into it.
        made = out.new_empty(shape.batch, shape.mine, len(weight))
        product = made.view(shape.batch * shape.mine, len(weight))

        def own(whole: Tensor) -> None:
            span = shape.rows(shape.heads("out", shape.rank))
            rows, columns = whole.flatten(0, 1)[:, span], weight[:, span].t()
            if bias is None:
                torch.mm(rows, columns, out=product)
            else:
                torch.addmm(bias, rows, columns, out=product)

        whole = _collected(parts, out, token, own)
        rows = whole.flatten(0, 1)
        for heads in shape.others("out"):
            span = shape.rows(heads)
            product.addmm_(rows[:, span], weight[:, span].t())
        ctx.save_for_backward(weight, whole)
        return made

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The weight's gradient; what was delivered gets its own by messages."""
        parts: Parts = ctx.parts
        shape = parts.shape
        _, _, of_token, of_weight, of_bias = ctx.needs_input_grad
        weight, whole = ctx.saved_tensors
        rows = gradient.flatten(0, 1)
        found: list[Tensor | None] = []

        def make(rank: int) -> Tensor:
            product = rows @ weight[:, shape.rows(shape.heads("out", rank))]
            size = shape.batch, shape.mine, shape.count("out", rank), shape.depth
            return product.view(size).transpose(0, 1)

        def meanwhile() -> None:
            if of_weight:
                found.append(rows.t() @ whole.flatten(0, 1))

        if of_token:
            _output_gradient(parts, make, meanwhile)
        else:
            meanwhile()
        token = gradient.new_zeros(1, dtype=torch.float32) if of_token else None
        return None, None, token, *(found or [None]), rows.sum(0) if of_bias else None


class _Collect(torch.autograd.Function):
    """What was delivered, as one tensor ``[B, s, all heads * d]``."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, out: Tensor, token: Tensor) -> Tensor:
        """``out``: ``[B, S, own heads, d]``, for the own part."""
        ctx.parts = parts
        return _collected(parts, out, token, lambda whole: None)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """See :func:`_output_gradient`."""
        parts: Parts = ctx.parts
        shape = parts.shape
        by_head = gradient.unflatten(-1, (shape.width("out"), shape.depth))

        def make(rank: int) -> Tensor:
            return by_head[:, :, shape.heads("out", rank)].transpose(0, 1)

        _output_gradient(parts, make, _nothing_more)
        return None, None, gradient.new_zeros(1, dtype=torch.float32)


# Backward.


def _output_gradient(
    parts: Parts, make: Callable[[int], Tensor], meanwhile: Callable[[], None]
) -> None:
    """Launch the way back of what was delivered; :class:`_Deliver` waits for it.

    Args:
        make: the gradient of a rank's heads at own positions, ``[s, B, heads, d]``.
        meanwhile: what else can be computed now.
    """
    stage = parts.returned = parts.begin("out", True)
    shape = stage.shape
    # The wait is left to what needs the result, so that the weight's gradient leaves before.
    actions = [a for a in parts.order.output_gradient if a.kind != WAIT or not parts.overlap]

    def own(role: str) -> None:
        stage.arriving["out"][shape.at(shape.rank)] = make(shape.rank)

    parts.perform(actions, stage, lambda _, peer: make(peer), own, meanwhile)


def _heads_gradient(
    parts: Parts, gradients: Sequence[Tensor], take: Callable[[str, slice, Tensor], None]
) -> None:
    """Send the peers' positions of ``gradients`` (of q, k and v, ``[B, S, own heads, d]``), and
    hand on those of own positions, every head once.

    Args:
        take: gets the role, some heads, and their gradient ``[B, s, heads, d]``.
    """
    stage = parts.begin("qkv", True)
    shape = stage.shape
    of = {role: g.transpose(0, 1) for role, g in zip(QKV, gradients, strict=True)}

    def own_part(role: str) -> Tensor:
        return of[role][shape.at(shape.rank)].transpose(0, 1)

    def make(_: str, peer: int) -> Tensor:
        return torch.cat([of[role][shape.at(peer)].flatten() for role in QKV])

    def own(role: str) -> None:
        if not shape.shared(role):
            take(role, shape.heads(role, shape.rank), own_part(role))

    def rest() -> None:
        pieces = {peer: stage.pieces(peer) for peer in shape.peers}
        for role in QKV:
            size = (shape.batch, shape.mine, shape.width(role), shape.depth)
            if shape.shared(role):
                # Sums are taken in fp32 or wider, in the order of the ranks.
                wide = torch.promote_types(shape.dtype, torch.float32)
                whole = gradients[0].new_zeros(size, dtype=wide)
                for rank in range(len(shape.lengths)):
                    own_one = rank == shape.rank
                    piece = own_part(role) if own_one else pieces[rank][role]
                    whole[:, :, shape.heads(role, rank)] += piece
                take(role, slice(0, shape.width(role)), whole.to(shape.dtype))
                continue
            whole = gradients[0].new_empty(size)
            for peer in shape.peers:
                whole[:, :, shape.heads(role, peer)] = pieces[peer][role]
            for heads in shape.others(role):
                take(role, heads, whole[:, :, heads])

    parts.perform(parts.order.heads_gradient, stage, make, own, rest)
