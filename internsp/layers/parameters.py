"""What a module's parameter attributes answer with: shards at rest, whole tensors in a forward.

``module._parameters`` becomes a :class:`Weights`. At rest it answers with the parameter, a
``DTensor``. In the forward of the module that owns it, of its block, or (beside the blocks) of the
model, a read answers with the differentiable view of :mod:`internsp.layers.views`, one a forward:
so anything that reads ``module.weight`` computes with the unsharded weight, whichever module reads
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from internsp.autograd import (
    Given,
    apart,
    before_backward_of,
    given,
    in_backward,
    no_second_derivatives,
    transforming,
    under_transform,
)
from internsp.errors import StructureError
from internsp.layers.views import ScopeUse, Site, Use, view, view_beneath
from internsp.wp.parameter import not_to_be_copied

Taken = dict[Site, tuple[Tensor, Use]]
"""The views that were made in one forward."""


class Scope:
    """A forward in which parameters are read: of a block, or of the model for those beside them.

    Attributes:
        taken: the views made since it began; ``None`` outside of it.
        use: what a view made in it is the use of. Beside the blocks slots are not shared, so that
            it does not matter by which way backward enters.
        recomputed: whether backward runs it again, long after it was called.
        members: what the modules in it hold.
    """

    __slots__ = ("members", "recomputed", "taken", "use")

    def __init__(self, use: type[Use] = ScopeUse, recomputed: bool = False) -> None:
        self.taken: Taken | None = None
        self.use, self.recomputed = use, recomputed
        self.members: list[Weights] = []


class Weights(dict[str, Any]):
    """``_parameters`` of a module: answers a read with what the moment asks for.

    ``items``, ``values`` and ``get`` answer with the parameters themselves, as ``state_dict``,
    ``parameters()`` and optimizers want them. It cannot be copied, so neither can the model.

    Attributes:
        sites: where the module uses which of them.
        scope: in which they may be read past the module's forward.
        taken: the views of a module that takes its own in its forward (:mod:`.adopt`).
    """

    __slots__ = ("owner", "scope", "sites", "taken")

    def __init__(self, parameters: Mapping[str, Any], owner: str, scope: Scope) -> None:
        super().__init__(parameters)
        self.owner, self.scope = owner, scope
        self.sites: dict[str, Site] = {}
        self.taken: Taken | None = None

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        site = self.sites.get(name)
        if site is None or parameter is None:
            return parameter
        taken = self.scope.taken if self.taken is None else self.taken
        if taken is None:
            if in_backward() and parameter is site.parameter and site.at_hand():
                return view(Use(site))  # a recompute that the user wrote
            return parameter
        if parameter is not site.parameter:
            return self.other(name)
        return self._read(site, taken)

    def __setitem__(self, name: str, value: Any) -> None:
        site = self.sites.get(name)
        if site is not None and value is not site.parameter:
            for taken in (self.taken, self.scope.taken):
                if taken is not None and site in taken and taken[site][0] is value:
                    value = site.parameter  # what was read is put back (torch.func.functional_call)
        super().__setitem__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_to_be_copied()

    def holds(self, name: str) -> bool:
        """Whether the module's parameter is still ours."""
        return self.get(name) is self.sites[name].parameter

    def other(self, name: str) -> Any:
        """What a user has put in the place of our parameter: a whole tensor is computed with.

        Raises:
            StructureError: it is a parameter, or a ``DTensor``.
        """
        parameter = self.get(name)
        if isinstance(parameter, (nn.Parameter, DTensor)):
            raise StructureError(
                f"parameter {self.sites[name].name} (of a {self.owner}) was replaced after "
                "parallelize(), so that its gradient would not be reduced: write into it, or use "
                "load_state_dict; torch.func.functional_call takes whole plain tensors "
                "(full_tensor().detach())"
            )
        return parameter

    def before_recomputed(self) -> None:
        """A forward of a block begins that recomputes its activations in backward.

        Raises:
            StructureError: a weight was replaced from outside, by ``torch.func.functional_call``:
                the recompute would be with ours, since that call is over by then.
        """
        for name, site in self.sites.items():
            if self.get(name) is not site.parameter:
                self.other(name)
                raise StructureError(
                    f"{site.name} was replaced around a block that recomputes its activations in "
                    "backward, when ours is in its place again: leave the block out of "
                    "activation_checkpoint, or copy the values into the parameter"
                )

    def in_scope(self, name: str) -> Any:
        """A read under ``torch.vmap`` and its kin, where a module cannot keep its own weights.

        Raises:
            StructureError: outside of the model's forward, or around a whole block.
        """
        site = self.sites[name]
        if self.scope.taken is None:
            raise under_transform(site.name)
        return self._read(site, self.scope.taken)

    def _read(self, site: Site, taken: Taken) -> Tensor:
        found = taken.get(site)
        if found is not None:
            tensor = found[0]
            # One made without a graph (torch.no_grad, a checkpoint) has no gradient to give.
            recorded = tensor.requires_grad or not torch.is_grad_enabled()
            if recorded or not site.parameter.requires_grad:
                return tensor
        use = Use(site) if taken is self.taken else self.scope.use(site)
        tensor = view_beneath(use) if transforming() else view(use)
        taken[site] = (tensor, use)
        return tensor


def enclose(module: nn.Module, scope: Scope) -> None:
    """Make ``module``'s forward the scope in which its parameters may be read.

    The forward is wrapped and not the call, so that a checkpoint around it finds the weights again
    in its recompute.
    """
    inner = module.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if scope.recomputed:
            for weights in scope.members:
                weights.before_recomputed()
        before = given((args, kwargs))
        outside, scope.taken = scope.taken, {}
        try:
            output = inner(*args, **kwargs)
        finally:
            taken, scope.taken = scope.taken, outside
        return leave(taken, output, before) if taken else output

    module.forward = forward  # type: ignore[method-assign]


def leave(taken: Taken, output: Any, before: Given) -> Any:
    """A forward that took weights is over: keep them for its backward, and end their use.

    Args:
        before: what the forward was given (:func:`internsp.autograd.given`).

    Returns:
        ``output``; what of it lies in a weight's memory is cloned.

    Raises:
        StructureError: the forward wrote into a weight.
    """
    for site, (tensor, _) in taken.items():
        unwritten(site, tensor)
    output = apart(output, [tensor for tensor, _ in taken.values()])
    kept = [(site, site.tag, use) for site, (_, use) in taken.items() if site.guarded]
    for site, _, _ in kept:
        site.release()
    if kept:
        before_backward_of(output, partial(_before_nodes, kept), before)
    return output


def _before_nodes(kept: list[tuple[Site, Any, Use]], gradients: tuple[Tensor, ...]) -> None:
    no_second_derivatives()
    for site, tag, use in reversed(kept):  # the last used first, as backward runs
        site.before_nodes(tag)
        if isinstance(use, ScopeUse):
            use.entered = True


def unwritten(site: Site, tensor: Tensor) -> None:
    """Check that a forward has not written into ``tensor``, a view that it was handed.

    Raises:
        StructureError: it has. What is written into a slot never reaches the shard.
    """
    if not tensor.is_inference() and tensor._version:
        site.spoiled()
        raise StructureError(
            f"{site.name} was written into during a forward (max_norm, an in-place operation, "
            "a normalisation of the weight): the write would reach this rank's copy only. Write "
            "into the parameter between optimizer steps, under torch.no_grad()"
        )


def attach(module: nn.Module, module_name: str, name: str, site: Site, scope: Scope) -> None:
    """Make ``module`` use parameter ``name`` through ``site`` from now on."""
    held = module._parameters
    if not isinstance(held, Weights):
        owner = f"{type(module).__name__} {module_name}".strip()
        held = module.__dict__["_parameters"] = Weights(held, owner, scope)
        scope.members.append(held)
    held.sites[name] = site


def sites(module: nn.Module) -> dict[str, Site]:
    """The sites attached to ``module`` itself, by parameter name."""
    held = module._parameters
    return held.sites if isinstance(held, Weights) else {}


