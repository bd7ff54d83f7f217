"""How a module gets the tensor it computes with: the one mechanism of DESIGN 4.1.

A module with its own parameters calls :func:`whole` for each, once a forward, and :func:`guard`
on its output. Where no communicator is attached both do nothing, so that the module is ordinary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from internsp.errors import GradientError, StructureError
from internsp.wp.communicator import tensors
from internsp.wp.shard import not_to_be_copied

SITES = "_weight_sites"
"""Where a module's own ``__dict__`` keeps its sites."""


class Site(Protocol):
    """The place where one module uses one parameter. Made by a communicator, which see."""

    tag: Any
    """What :meth:`acquire` last handed out: changes whenever the parameter's values may have."""

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

    @property
    def apart(self) -> bool:
        """Whether weight gradients are being computed apart from input gradients (a pipeline)."""

    def born(self, gradient: Tensor, tag: Any) -> None:
        """The whole parameter's gradient exists; start its reduction. ``tag``: of its use."""


class Uses(Protocol):
    """What one node of the graph takes: the uses of one parameter, or of a whole block's."""

    @property
    def sites(self) -> Sequence[Site]:
        """One for each parameter."""

    def acquire(self) -> Sequence[Tensor]:
        """See :meth:`Site.acquire`, for each parameter."""

    def born(self, gradients: Sequence[Tensor | None], tags: Sequence[Any]) -> None:
        """See :meth:`Site.born`; ``None`` where there is no gradient. The last is born first."""


class _Use:
    """The use of one parameter."""

    __slots__ = ("sites",)

    def __init__(self, site: Site) -> None:
        self.sites = (site,)

    def acquire(self) -> Sequence[Tensor]:
        return (self.sites[0].acquire(),)

    def born(self, gradients: Sequence[Tensor | None], tags: Sequence[Any]) -> None:
        if gradients[0] is not None:
            self.sites[0].born(gradients[0], tags[0])


class _Views(torch.autograd.Function):
    """Differentiable views: parameters (shards) -> whole tensors in their slots.

    Backward starts the reductions and returns ``None``: ``.grad`` stays unset until the drain,
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
        if torch.is_grad_enabled():
            raise GradientError(
                "create_graph=True is not supported through a sharded weight: its gradient leaves "
                "the graph when its reduction starts; compute second derivatives on one process"
            )
        answers: list[Tensor | None] = [None] * (len(gradients) + 1)
        born = list(gradients)
        for i, (leaf, _) in enumerate(ctx.next_functions):
            gradient = born[i]
            if gradient is None:
                continue
            wanted = _wanted(leaf)
            if wanted == _CAPTURED:
                answers[i + 1] = _answer(ctx.taken.sites[i], gradient, ctx.parameters[i])
            if wanted == _NO:
                born[i] = None
        ctx.taken.born(born, ctx.tags)
        return tuple(answers)


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


class _Sites(dict[str, Site]):
    """The sites of one module. They cannot be copied, so neither can a parallel model."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_to_be_copied()


def attach(module: nn.Module, name: str, site: Site) -> None:
    """Make ``module`` use parameter ``name`` through ``site`` from now on."""
    module.__dict__.setdefault(SITES, _Sites())[name] = site


def sites(module: nn.Module) -> dict[str, Site]:
    """The sites attached to ``module`` itself, by parameter name."""
    return module.__dict__.get(SITES, {})


def whole(module: nn.Module, name: str) -> Any:
    """The plain tensor to compute with for ``module``'s parameter ``name``.

    That is the whole weight in its slot (waits for its gather), the local replica of a small
    parameter, or the parameter itself where no communicator is attached; ``None`` for an absent
    one. Make it where it is used, once a forward: autograd runs nodes by recency, so a view made
    early gives its gradient late.
    """
    parameter = module._parameters[name]
    attached = module.__dict__.get(SITES)
    if attached is None:
        return parameter
    if not isinstance(parameter, DTensor):
        if type(parameter) is nn.Parameter:
            raise replaced(module, name)
        return parameter  # somebody has put the whole one in
    return _Views.apply(_Use(attached[name]), parameter)[0]


def replaced(module: nn.Module, name: str) -> StructureError:
    """The error for a parameter that is no longer the one that ``parallelize`` made."""
    return StructureError(
        f"parameter {name} of a {type(module).__name__} was replaced after parallelize(), "
        "so that nobody would reduce its gradient: write into it, or use load_state_dict"
    )


def whole_block(
    taken: Uses, parameters: Sequence[nn.Parameter | None]
) -> tuple[Tensor, ...]:
    """:func:`whole` for the parameters of several modules at once, at their block's entry.

    One node of the graph for all: their gradients are born together, after the block's backward.

    Args:
        taken: their uses, in the order of use.
        parameters: what the modules hold.
    """
    views: tuple[Tensor, ...] = _Views.apply(taken, *parameters)
    return views


Output = TypeVar("Output")


def guard(module: nn.Module, output: Output) -> Output:
    """Call on what was computed from :func:`whole`: keeps the weights present for its backward.

    Returns ``output`` itself. Ends the use in forward, and hooks the gradients of all tensors in
    ``output`` so that the weights are whole again, with the same values, before backward runs
    through any of them (WP-14).
    """
    attached = module.__dict__.get(SITES)
    if attached is not None and isinstance(module._parameters[next(iter(attached))], DTensor):
        guard_sites(attached.values(), output)
    return output


def guard_sites(used: Iterable[Site], output: Any, inputs: Any = ()) -> None:
    """:func:`guard` for ``output`` computed from several modules' parameters and ``inputs``."""
    tags = [(site, site.tag) for site in used if site.guarded]
    for site, _ in tags:
        site.release()
    if tags:
        before_backward_of(output, partial(_before_backward, tags), inputs)


def before_backward_of(
    output: Any, call: Callable[[tuple[Tensor, ...]], None], inputs: Any = ()
) -> None:
    """Have ``call`` called before backward runs through any tensor in ``output``.

    Args:
        inputs: tensors among them that ``output`` only passes on are left out: their backward
            is somebody else's.
    """
    given = {id(tensor) for tensor in tensors(inputs)}
    for tensor in (output,) if isinstance(output, Tensor) else tensors(output):
        if tensor.grad_fn is not None and id(tensor) not in given:
            # A hook of the node, not of the tensor: the same moment at half the cost.
            tensor.grad_fn.register_prehook(call)


def _before_backward(tags: list[tuple[Site, Any]], gradients: tuple[Tensor, ...]) -> None:
    for site, tag in reversed(tags):  # the last used first, as backward runs
        site.before_backward(tag)
