"""The one way from a parameter to the tensor that is computed with (DESIGN 4.1).

A differentiable view: forward answers with the unsharded weight in its slot, backward starts the
reduction of its gradient. :mod:`internsp.layers.parameters` says where such views are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from internsp.autograd import no_second_derivatives
from internsp.errors import GradientError, StaleWeightError


class Site(Protocol):
    """The place where one module uses one parameter. Made by a communicator, which see."""

    tag: Any
    """What :meth:`acquire` last handed out: changes whenever the parameter's values may have."""

    parameter: nn.Parameter
    """The very one that the module held when the model was made parallel."""

    @property
    def name(self) -> str:
        """The parameter's, fully qualified."""

    guarded: bool
    """Whether backward needs the tensor at the same place again (false for small replicas)."""

    def acquire(self) -> Tensor:
        """Wait for the tensor to compute with and return it (it aliases its slot)."""

    def release(self) -> None:
        """The module's forward is over."""

    def before_backward(self, tag: Any) -> None:
        """A node that saved the tensor is about to run: the same values must be there (WP-14)."""

    def before_nodes(self, tag: Any) -> None:
        """:meth:`before_backward` for nodes of any kind, which may run before a recompute does."""

    def at_hand(self) -> bool:
        """In backward: whether :meth:`acquire` needs no message that other ranks do not send."""

    def spoiled(self) -> None:
        """What :meth:`acquire` handed out was written into: its values are no longer right."""

    @property
    def apart(self) -> bool:
        """Whether weight gradients are being computed apart from input gradients (a pipeline)."""

    def on_grad_ready(self, gradient: Tensor, tag: Any) -> None:
        """The whole parameter's gradient exists; start its reduction. ``tag``: of its use."""


class Uses(Protocol):
    """What one node of the graph takes: the uses of one parameter, or of a whole block's."""

    @property
    def sites(self) -> Sequence[Site]:
        """One for each parameter."""

    def acquire(self) -> Sequence[Tensor]:
        """See :meth:`Site.acquire`, for each parameter."""

    def on_grad_ready(self, gradients: Sequence[Tensor | None], tags: Sequence[Any]) -> None:
        """See :meth:`Site.on_grad_ready`; ``None`` where there is no gradient.

        The last is ready first.
        """


class Use:
    """The use of one parameter by the module that owns it."""

    __slots__ = ("sites",)

    def __init__(self, site: Site) -> None:
        self.sites = (site,)

    def acquire(self) -> Sequence[Tensor]:
        """See :meth:`Uses.acquire`."""
        return (self.sites[0].acquire(),)

    def on_grad_ready(self, gradients: Sequence[Tensor | None], tags: Sequence[Any]) -> None:
        """See :meth:`Uses.ready`."""
        if gradients[0] is not None:
            self.sites[0].on_grad_ready(gradients[0], tags[0])


class ScopeUse(Use):
    """The use of one parameter by a block, past the module that owns it.

    Its values are made present by the gradients of the block's outputs, and by nothing else.
    """

    __slots__ = ("entered",)

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.entered = False

    def on_grad_ready(self, gradients: Sequence[Tensor | None], tags: Sequence[Any]) -> None:
        """See :meth:`Uses.ready`.

        Raises:
            StaleWeightError: backward did not come through an output of the block.
        """
        site = self.sites[0]
        if site.guarded and not self.entered and not site.apart:
            raise StaleWeightError(
                f"{site.name} was read past the forward of the module that owns it, and backward "
                "entered its block through a tensor that left it by another way than its output, "
                "so that the weight may not have been whole: return that tensor from the block"
            )
        self.entered = False
        super().on_grad_ready(gradients, tags)


class _Views(torch.autograd.Function):
    """Differentiable views: parameters (shards) -> whole tensors in their slots.

    Backward starts the reductions and returns ``None``: ``.grad`` stays unset until the finish,
    while the parameters stay visible in the graph.
    """

    @staticmethod
    def forward(ctx: Any, taken: Uses, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.taken = taken
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        views = tuple(taken.acquire())
        wanted = ctx.needs_input_grad[1:]
        if len(views) > 1 and not all(wanted):  # of several, those of frozen ones need no gradient
            frozen = [view for view, want in zip(views, wanted, strict=True) if not want]
            ctx.mark_non_differentiable(*frozen)
        ctx.tags = [site.tag for site in taken.sites]
        return views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        no_second_derivatives()
        answers: list[Tensor | None] = [None] * (len(gradients) + 1)
        ready = list(gradients)
        for i, (leaf, _) in enumerate(ctx.next_functions):
            gradient = ready[i]
            if gradient is None:
                continue
            wanted = _wanted(leaf)
            if wanted == _CAPTURED:
                answers[i + 1] = _answer(ctx.taken.sites[i], gradient, ctx.parameters[i])
            if wanted == _NO:
                ready[i] = None
        ctx.taken.on_grad_ready(ready, ctx.tags)
        return tuple(answers)


def view(use: Use) -> Tensor:
    """The tensor to compute with, of one parameter."""
    return _Views.apply(use, use.sites[0].parameter)[0]  # type: ignore[no-any-return]


def view_beneath(use: Use) -> Tensor:
    """:func:`view` under ``torch.vmap`` and its kin: beneath them, a tensor that all share."""
    with temporarily_clear_interpreter_stack():
        return view(use)


def views(taken: Uses, parameters: Sequence[nn.Parameter | None]) -> tuple[Tensor, ...]:
    """The tensors to compute with of several parameters, by one node of the graph.

    Their gradients are ready together, when backward has left all that used them.

    Args:
        taken: their uses, in the order of use.
        parameters: what the modules hold.
    """
    return _Views.apply(taken, *parameters)  # type: ignore[no-any-return]


def uses_of(node: Any) -> Uses | None:
    """What a node of the autograd graph takes, if it is the node of such views."""
    ours = isinstance(node, _Views._backward_cls)  # type: ignore[attr-defined]
    taken: Uses | None = node.taken if ours else None
    return taken


def _answer(site: Site, gradient: Tensor, shard: Tensor) -> Tensor:
    """What a captured shard is given: torch's split backward wants a tensor, without memory."""
    if not site.apart:
        raise GradientError(
            "torch.autograd.grad over a sharded weight is not supported: its gradient is "
            "reduced over ranks asynchronously; call backward() and read .grad"
        )
    return gradient.new_zeros((), dtype=shard.dtype).expand(shard.shape)


_NO, _ACCUMULATED, _CAPTURED = range(3)


def _wanted(leaf: Any) -> int:
    """What this backward does with a leaf's gradient: ``inputs=`` may leave it out.

    ``torch.autograd.grad`` captures it instead of accumulating it (WP-9), and then torch will not
    say whether it executes the leaf.
    """
    try:
        return _ACCUMULATED if torch._C._will_engine_execute_node(leaf) else _NO
    except RuntimeError:
        return _CAPTURED
