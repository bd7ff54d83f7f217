"""Attach the owners of experts to a model, in place."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.base.in_flight import Reporter
from internsp.base.trace import Trace
from internsp.errors import StructureError
from internsp.experts.dispatch import Exchanged
from internsp.experts.exchange import OwnerGroup
from internsp.experts.owners import dispatched, of_transformers
from internsp.failure.comm_context import CommContext
from internsp.mesh import ParallelMesh
from internsp.sp.exchange import ExchangeGroup
from internsp.sp.hf.attach import copy_configs

_NUMBERS = itertools.count(1)


def attach_experts(
    model: nn.Module, mesh: ParallelMesh, trace: Trace, context: CommContext
) -> None:
    """Connect the routers and experts of ``model`` with other ranks, from its next forward on.

    Routers sum their counts over all ranks of the stage; where ranks own experts, tokens are
    exchanged.

    Args:
        context: of the model's collectives: counts launches and names failures.
    """
    if mesh.pipeline > 1:
        _require_no_losses(model)
    if mesh.stage_group.size() > 1:
        naming = Reporter(naming=context.awaiting)
        ranks = ExchangeGroup.of(mesh.stage_group, trace, naming)
        for module in model.modules():
            if hasattr(module, "router_ranks"):
                module.router_ranks = ranks  # type: ignore[assignment]
    found = dispatched(model) if mesh.expert > 1 else {}
    if found:
        _attach_owners(model, found, mesh.expert_group, trace, context)


def _require_no_losses(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not hasattr(module, "router_ranks") or module.loss_scale is not None:
            continue
        if module.auxiliary or module.z_loss:
            raise StructureError(
                f"{name} has an auxiliary loss or a z_loss, which no stage of a pipeline but the "
                "last could add to the loss: give Pipeline.create a router_scale, by which its "
                "criterion multiplies a sum of token losses, or balance by balance_rate"
            )


def _attach_owners(
    model: nn.Module,
    found: Mapping[str, nn.Module],
    group: dist.ProcessGroup,
    trace: Trace,
    context: CommContext,
) -> None:
    owners = OwnerGroup(
        group, trace, dist.get_rank(group), dist.get_world_size(group),
        context.reporter("experts", waits=True),
    )  # fmt: skip
    by_kind: dict[str, dict[nn.Module, Exchanged]] = {}
    for name, module in found.items():
        number: Any = module.num_experts
        theirs = of_transformers(module)
        lowest = 0 if theirs else -1
        made = Exchanged(owners, name, number * owners.size, partial(_own, module), lowest)
        if theirs:
            config: Any = module.config
            by_kind.setdefault(config._experts_implementation or "eager", {})[module] = made
        else:
            module.dispatch = made  # type: ignore[assignment]
    if by_kind:
        copy_configs(model)
    for kind, dispatches in by_kind.items():
        _register(kind, dispatches)


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _register(plain: str, dispatches: Mapping[nn.Module, Exchanged]) -> None:
    """Register an entry of transformers' ``ExpertsInterface`` for one model's experts alone.

    It wraps the entry ``plain``, which the model's config named before. It stays registered when
    the model is gone, since a config copied from this model's may still name it; it then calls the
    plain one.
    """
    from transformers.integrations.moe import ExpertsInterface

    entry = f"internsp_{next(_NUMBERS)}_{plain}"
    of_module = weakref.WeakKeyDictionary(dispatches)

    @torch.compiler.disable
    def experts(module: nn.Module, *args: Any, **options: Any) -> Any:
        compute = _plain(plain, module)
        dispatch = of_module.get(module)
        if dispatch is None:
            return compute(module, *args, **options)
        if options:  # families name their arguments differently
            bound = inspect.signature(compute).bind(module, *args, **options)
            args = bound.args[1:]
        return dispatch(partial(compute, module), *args, lambda: None)[0]

    ExpertsInterface.register(entry, experts)
    for module, dispatch in dispatches.items():
        config: Any = module.config
        config._experts_implementation_internal = entry
        module.register_forward_pre_hook(partial(_require_entry, entry, dispatch.name))


def _require_entry(entry: str, name: str, module: nn.Module, _: Any) -> None:
    config: Any = module.config
    if config._experts_implementation != entry:
        raise StructureError(
            f"the experts implementation of {name} was set to "
            f"{config._experts_implementation!r} after parallelize(), which would compute all "
            f"tokens with rank {dist.get_rank()}'s experts: choose experts_implementation "
            "before parallelize()"
        )


def _plain(name: str, module: nn.Module) -> Callable[..., Tensor]:
    """The experts' forward that is called ``name``, a function of the module and its inputs."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    own: Any = type(module).forward
    found: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS.get_interface(name, own.__wrapped__)
    return found
