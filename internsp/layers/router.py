"""A router: the experts of each token, their weights, and what keeps experts equally loaded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from internsp.base.autograd import in_backward
from internsp.experts.totals import Total
from internsp.sp.exchange import ExchangeGroup


@dataclass(frozen=True)
class Routes:
    """Where each token goes.

    Attributes:
        index: int64 ``[T, k]``, numbers of experts; -1 where a capacity drops the token.
        weights: ``[T, k]`` in the tokens' dtype or fp32, whichever is wider.
        logits: ``[T, experts]``, likewise.
        shares: ``[T, experts]``, each expert's share of a token's scores; they sum to 1.
        counts: float64 ``[experts]``, tokens of each expert on this rank.
    """

    index: Tensor
    weights: Tensor
    logits: Tensor
    shares: Tensor
    counts: Tensor


class Router(nn.Module):
    """Chooses the ``top_k`` of ``experts`` with the largest scores for each token.

    Scores are computed in fp32 or wider. Its losses are **sums over this rank's tokens**, as the
    token loss is: a loop adds :func:`router_loss` to it before it divides.

    Args:
        width: features of a token.
        score: ``softmax`` over all experts, or ``sigmoid`` of each.
        normalize: the weights of a token's experts sum to ``scale``.
        scale: factor of the weights.
        groups, top_groups: experts lie in ``groups`` of equal size; a token chooses among those of
            the ``top_groups`` whose two best experts have the largest sum (DeepSeek-V3).
        auxiliary: factor of the load-balancing loss ``experts * sum(load * share)`` of each token,
            where ``load`` are the shares of all ranks' tokens (Switch Transformer).
        z_loss: factor of the squared log-sum-exp of a token's logits (ST-MoE).
        capacity_factor: in training an expert takes at most ``ceil(capacity_factor * top_k * T /
            experts)`` of the ``T`` tokens of one forward on this rank (GShard): first choices
            before second ones, and earlier tokens before later ones. The others pass without it,
            and their other weights stay. 0: nothing is dropped.
        balance_rate: each optimizer step moves the bias of an overloaded expert down by this, of
            another one up (:func:`balance_experts`); the bias decides the choice, not the weights.
            0: no bias.

    Attributes:
        bias: fp32 ``[experts]``, a buffer that is saved; ``None`` without a ``balance_rate``.
        load: float64 ``[experts]``, tokens of each expert on this rank since the last
            :func:`balance_experts`; a recompute does not count.
        entropy: float64 scalar, the sum of ``-sum(share * log(share))`` of the same tokens, in
            nats; ``log(experts)`` each if all experts have equal scores.
        dropped: float64 scalar, how often a capacity has kept one of these tokens from an expert.
        loss: computes the losses of the last forward in training, and waits for the other ranks'
            counts; ``None`` before and without any.
        router_ranks: those that share the router, set by ``parallelize``.
        loss_scale: in a pipeline, whose stages have no loss to add to: returns by what the losses
            are multiplied. They then train without :func:`router_loss`.
    """

    bias: Tensor | None
    load: Tensor
    entropy: Tensor
    dropped: Tensor

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        auxiliary: float = 0.0,
        z_loss: float = 0.0,
        capacity_factor: float = 0.0,
        balance_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_sizes(width=width, experts=experts, top_k=top_k)
        self.experts, self.top_k, self.score, self.normalize = experts, top_k, score, normalize
        self.scale, self.groups, self.top_groups = scale, groups, top_groups
        self.auxiliary, self.z_loss, self.balance_rate = auxiliary, z_loss, balance_rate
        self.capacity_factor = capacity_factor
        _require_fits(self)
        self.weight = nn.Parameter(torch.empty(experts, width, device=device, dtype=dtype))
        # Where a program asks for a weight without values, which it loads, these have theirs.
        on_meta = device is not None and torch.device(device).type == "meta"
        options: dict[str, Any] = {} if on_meta else {"device": device}
        for name, shape in (("load", (experts,)), ("entropy", ()), ("dropped", ())):
            counter = torch.empty(shape, dtype=torch.float64, **options)
            self.register_buffer(name, counter, persistent=False)
        bias = torch.empty(experts, dtype=torch.float32, **options) if balance_rate else None
        self.register_buffer("bias", bias)
        self.loss: Callable[[], Tensor] | None = None
        self.router_ranks: ExchangeGroup | None = None
        self.loss_scale: Callable[[], Tensor | float] | None = None
        self.reset_parameters()

    @property
    def over_all_positions(self) -> list[str]:
        """The options in use whose numbers follow from all tokens of a forward, not from each."""
        names = "auxiliary", "z_loss", "capacity_factor"
        return [name for name in names if getattr(self, name)]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give the weight its first values, and the bias and the counters zeros."""
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        for buffer in self.buffers(recurse=False):
            buffer.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast; the bias stays in fp32 and the load in float64, which count small steps."""
        super()._apply(fn, recurse)
        self.load, self.entropy = self.load.double(), self.entropy.double()
        self.dropped = self.dropped.double()
        if self.bias is not None:
            self.bias = self.bias.float()
        return self

    def forward(self, tokens: Tensor) -> Routes:
        """``tokens [T, width]``; ``T`` may be 0."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        logits = F.linear(tokens.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        shares = scores
        if self.score == "sigmoid":
            shares = scores / scores.sum(-1, keepdim=True)
        index = self._choose(scores.detach())
        weights = scores.gather(1, index)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = index.flatten()
        counts = torch.zeros_like(self.load).index_add_(
            0, chosen, torch.ones_like(chosen, dtype=self.load.dtype)
        )
        if self.training and not in_backward():  # no recompute
            self.load += counts
            self.entropy += torch.special.entr(shares.detach()).sum()
        if self.training and self.capacity_factor:
            late = self._late(index, counts)
            index, weights = index.masked_fill(late, -1), weights.masked_fill(late, 0)
            if not in_backward():
                self.dropped += late.sum()
        return Routes(index, weights * self.scale, logits, shares, counts)

    @torch.no_grad()
    def _choose(self, scores: Tensor) -> Tensor:
        """Numbers of experts ``[T, k]``."""
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        if self.groups > 1:
            grouped = scores.view(len(scores), self.groups, self.experts // self.groups)
            best = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1)
            chosen = best.topk(self.top_groups, dim=-1).indices
            others = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
            scores = grouped.masked_fill(others[:, :, None], -torch.inf).flatten(1)
        return scores.topk(self.top_k, dim=-1).indices

    def _late(self, index: Tensor, counts: Tensor) -> Tensor:
        """Which choices ``[T, k]`` come when their expert is full."""
        chosen = index.t().flatten()
        order = chosen.argsort(stable=True)
        first = (counts.cumsum(0) - counts).long()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - first[chosen[order]]
        capacity = math.ceil(self.capacity_factor * len(chosen) / self.experts)
        return (place >= capacity).view(index.shape[::-1]).t()

    def settle(self, routes: Routes) -> Callable[[Tensor], Tensor]:
        """Begin the losses of ``routes``: nothing waits here for the other ranks' counts.

        The losses are kept in a few numbers, since the shares of all tokens would be held for them.

        Returns:
            Takes the experts' results and returns them; with a ``loss_scale`` their backward is
            that of the losses, too.
        """
        if not self.training or not (self.auxiliary or self.z_loss):
            return _as_it_is
        shares, squares = routes.shares.sum(0), routes.logits.new_zeros(())
        if self.z_loss:
            squares = routes.logits.logsumexp(-1).square().sum()
        again = in_backward()  # a recompute
        total = None
        if self.auxiliary and not again:
            total = Total(routes.counts, self.router_ranks)
        parts = _LossParts(self, shares, squares, total)
        if self.loss_scale is not None:
            return parts.attach
        if again:
            return _as_it_is
        if self.loss is not None and torch.is_grad_enabled():
            warnings.warn(
                "the losses of a router's last forward were never added to a loss, so that "
                "auxiliary and z_loss train nothing: add internsp.router_loss(model) to each sum "
                "of token losses",
                stacklevel=2,
            )
        self.loss = parts.loss
        return _as_it_is


def _as_it_is(made: Tensor) -> Tensor:
    return made


@dataclass(frozen=True)
class _LossParts:
    """A router's losses, which are linear in two sums over this rank's tokens.

    Attributes:
        shares: ``[experts]``, of the tokens' scores.
        squares: of the squared log-sum-exp of their logits.
        total: the counts of all ranks, in flight.
    """

    router: Router
    shares: Tensor
    squares: Tensor
    total: Total | None

    def attach(self, made: Tensor) -> Tensor:
        attached: Tensor = _Attached.apply(made, self, self.shares, self.squares)
        return attached

    def factors(self) -> tuple[Tensor, float]:
        """What the two sums are multiplied with; blocks until the counts have arrived."""
        load = torch.zeros_like(self.shares)
        if self.total is not None:
            counts = self.total.wait()
            load = (counts / counts.sum().clamp(min=1)).to(load.dtype)
        return self.router.auxiliary * self.router.experts * load, self.router.z_loss

    def loss(self) -> Tensor:
        """The sum of both losses."""
        of_shares, of_squares = self.factors()
        return self.shares @ of_shares + of_squares * self.squares


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, parts: _LossParts, *sums: Tensor) -> Tensor:
        ctx.parts = parts
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_shares, of_squares = ctx.parts.factors()
        scale = ctx.parts.router.loss_scale()
        return grads[0], None, of_shares * scale, of_shares.new_tensor(of_squares) * scale


def require_sizes(least: int = 1, **sizes: int) -> None:
    """Check that ``sizes`` are whole numbers of at least ``least``.

    Raises:
        ValueError: one is not.
    """
    for name, size in sizes.items():
        if not isinstance(size, Integral) or size < least:
            raise ValueError(f"{name} = {size!r}: give a whole number of at least {least}")


def _require_fits(router: Router) -> None:
    experts, top_k, factor = router.experts, router.top_k, router.capacity_factor
    groups, top_groups = router.groups, router.top_groups
    if router.score not in ("softmax", "sigmoid"):
        raise ValueError(f"score = {router.score!r}: give softmax or sigmoid")
    for name in ("scale", "auxiliary", "z_loss", "balance_rate"):
        if not _is_finite(getattr(router, name)):
            raise ValueError(f"{name} = {getattr(router, name)!r}: give a number of at least 0")
    if not _is_finite(factor):
        raise ValueError(
            f"capacity_factor = {factor!r}: an expert takes so many times its equal share "
            "of the tokens; choose 1.25, or 0 to drop nothing"
        )
    if top_k > experts:
        raise ValueError(f"top_k = {top_k} of {experts} experts: choose 1 to {experts}")
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        raise ValueError(
            f"{experts} experts in {groups} groups of which {top_groups} are chosen: the groups "
            "must be equal, and at most all of them chosen"
        )
    if top_k > top_groups * (experts // groups):
        raise ValueError(
            f"top_k = {top_k} is more than the {top_groups * (experts // groups)} experts of "
            f"{top_groups} groups: choose more groups, or fewer experts"
        )


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < math.inf


def routers(modules: Iterable[nn.Module]) -> list[Router]:
    """Every router of ``modules``, once."""
    found = (m for module in modules for m in module.modules() if isinstance(m, Router))
    return list(dict.fromkeys(found))


def router_loss(*modules: nn.Module) -> Tensor | float:
    """The sum of the losses of all routers since their last forward; 0.0 if there are none.

    Each loss is taken once. Blocks until the other ranks' counts have arrived. Add it to a sum of
    token losses, before it is divided by a number of tokens.
    """
    total: Tensor | float = 0.0
    for router in routers(modules):
        if router.loss is not None:
            total, router.loss = total + router.loss(), None
    return total


@torch.no_grad()
def balance_experts(*modules: nn.Module) -> None:
    """Move the biases of all routers towards equal loads; call it after each optimizer step.

    Loads are those of all ranks and micro-batches since the last call, in one message for each
    parallel model. Collective if a router with a bias is shared by several ranks; blocks.
    """
    every = routers(modules)
    balanced = [router for router in every if router.bias is not None]
    for router in every:
        router.entropy.zero_()
        router.dropped.zero_()
        if router.bias is None:
            router.load.zero_()
    for ranks in dict.fromkeys(router.router_ranks for router in balanced):
        these = [router for router in balanced if router.router_ranks is ranks]
        loads = Total(torch.cat([router.load for router in these]), ranks).wait()
        for router, load in zip(these, loads.split([r.experts for r in these]), strict=True):
            assert router.bias is not None, "chosen above"
            change = (load.mean() - load).sign().to(router.bias.dtype)
            router.bias += router.balance_rate * change
            router.load.zero_()
