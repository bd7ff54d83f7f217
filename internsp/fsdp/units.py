"""Reads what a program has told FSDP2: units, parameters, dtypes. It is what our plan is made of.

torch's own ``fully_shard`` has sharded the parameters and noted every argument on its states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from internsp.config import WeightParallelConfig
from internsp.errors import StructureError
from internsp.fsdp.torchs import extension, param_groups, unsharded_spec
from internsp.structure.assign import (
    ParameterOwner,
    ParameterSharding,
    WeightOptions,
    owners_of,
)
from internsp.structure.dtypes import WeightDtypes
from internsp.structure.inner import Named
from internsp.structure.named import NamedUnit, arrange

_KNOWN = "_internsp_known"


def note_parameters(module: nn.Module, state: Any) -> None:
    """Note on torch's ``FSDPState`` the parameters that ``fully_shard`` has seen in ``module``."""
    known = vars(state).setdefault(_KNOWN, set())
    known.update((each, name) for each in module.modules() for name in each._parameters)


def require_noted(root: nn.Module, units: Sequence[ProgramUnit]) -> None:
    """Check at the first forward that ``fully_shard`` has seen every trained parameter.

    Raises:
        StructureError: one was added since. FSDP2 trains it on each rank apart, without a word.
    """
    known = {each for unit in units for each in vars(unit.state)[_KNOWN]}
    sharded = {param.sharded_param for param in params_of(units)}
    for path, module in root.named_modules():
        for name, parameter in module._parameters.items():
            trained = parameter is not None and parameter.requires_grad
            if trained and (module, name) not in known and parameter not in sharded:
                raise StructureError(
                    f"{f'{path}.{name}'.lstrip('.')} was added after fully_shard(), so that no "
                    "rank would share its gradient: build the whole model first, adapters included"
                )


class ProgramUnit(NamedUnit):
    """One call of ``fully_shard``; ``state`` is torch's ``FSDPState`` of it."""

    def __init__(self, state: Any, modules: Sequence[Named]) -> None:
        super().__init__(modules)
        self.state = state
        self.keeps = bool(self.groups) and self.groups[0].post_forward_mesh_info is None

    @property
    def groups(self) -> Sequence[Any]:
        """torch's ``FSDPParamGroup`` of it: one for each mesh of its parameters."""
        return param_groups(self.state)

    def near_ranks(self, part: Any) -> int:
        """Ranks of the smaller group that keeps ``part`` after forward, torch's group or parameter
        of it; 0: none."""
        if self.kind != "block" or self.keeps:
            return 0
        size: int = part.post_forward_mesh_info.shard_mesh_size
        return 0 if size == part.mesh_info.shard_mesh_size else size


def units_of(root: nn.Module, states: Sequence[Any]) -> list[ProgramUnit]:
    """The units below ``root``, arranged, in the order in which their modules are registered."""
    names = {module: name for name, module in root.named_modules()}
    found = {state: ProgramUnit(state, [(names[m], m) for m in state._modules]) for state in states}
    for state, unit in found.items():
        lists = {
            "forward_prefetch": state._states_to_forward_prefetch,
            "backward_prefetch": state._states_to_backward_prefetch,
        }
        unit.ahead = {key: [found[s] for s in own if s in found] for key, own in lists.items()}
    arrange([*found.values()])
    return [*found.values()]


def groups_of(units: Sequence[ProgramUnit]) -> list[Any]:
    """torch's groups of parameters."""
    return [group for unit in units for group in unit.groups]


def params_of(units: Sequence[ProgramUnit]) -> list[Any]:
    """torch's ``FSDPParam`` of every parameter."""
    return [param for group in groups_of(units) for param in group.fsdp_params]


def by_mesh(units: Sequence[ProgramUnit]) -> list[list[Any]]:
    """torch's ``FSDPParam`` of every parameter, by the ranks over which they are sharded; first
    those of dense weights, which have as many ranks as others or more, tensor ranks counted."""
    params, found = params_of(units), dict[str, list[Any]]()
    # Of each mesh once: torch computes its ranks anew, which takes longer than all else here.
    ranks = {mesh: str(mesh.mesh.tolist()) for mesh in {p.mesh_info.mesh for p in params}}
    for param in params:
        found.setdefault(ranks[param.mesh_info.mesh], []).append(param)
    return sorted(found.values(), key=lambda own: -max(p._spmd_mesh.size() for p in own))


def shardings_of(
    root: nn.Module, units: Sequence[ProgramUnit], config: WeightParallelConfig
) -> dict[Any, ParameterSharding]:
    """How each parameter is sharded, by torch's ``FSDPParam``, in the order of registration, but
    small ones first: those of a unit share a launch if neighbors.

    The modules hold a :func:`stand_in` of each parameter after this call.

    Raises:
        StructureError: a parameter has a class of its own with all-gather functions.
    """
    told, experts = {}, {param for params in by_mesh(units)[1:] for param in params}
    for unit in units:
        for param in params_of([unit]):
            like = stand_in(param)
            param._setattr_on_modules(like)
            told[like] = unit, param
    found = []
    for like, owners in owners_of(root).items():
        if like in told:
            unit, param = told[like]
            made = _sharding(unit, units[0], param, like, owners, config)
            found.append((param, replace(made, expert=param in experts)))

    def place(item: tuple[Any, ParameterSharding]) -> tuple[bool, bool]:
        own = item[1]
        large = own.parameter.numel() * own.dtypes.compute.itemsize > config.coalesce_bytes
        return large, not large and own.autocasts

    return dict(sorted(found, key=place))


def _sharding(
    unit: ProgramUnit, root: ProgramUnit, param: Any, like: nn.Parameter,
    owners: tuple[ParameterOwner, ...], config: WeightParallelConfig,
) -> ParameterSharding:  # fmt: skip
    parameter = param.sharded_param
    extended, near = extension(param, owners[0].full_name), unit.near_ranks(param)
    if not near and unit.kind == "block":
        near = config.near_ranks
    # A frozen one may lie in host memory: torch gives its class a copy on the device.
    hosted = param.offload_to_cpu and parameter.requires_grad
    if extended is not None:
        from internsp.structure.own_class import require_slots  # few models have any

        kind = type(parameter._local_tensor).__name__
        require_slots(owners[0].full_name, kind, near, hosted, config)
    compute, reduce = param.param_dtype or parameter.dtype, param.reduce_dtype
    if compute.itemsize == 1 and compute.is_floating_point:
        if parameter.requires_grad:
            raise StructureError(
                f"{owners[0].full_name} is stored as {compute}, in which nothing is summed: freeze "
                "it, or give it to fully_shard(ignored_params={...}); it stays whole then"
            )
        reduce = torch.float32  # never used, but in plans
    dtypes = WeightDtypes(compute, reduce, parameter.grad_dtype or parameter.dtype)
    # FSDP2 shards norms and biases, too. The root's launch at the model's entry takes them along,
    # in the place of one of a few bytes for each block in forward, in backward and for gradients.
    coalesce = config.coalesce_bytes if extended is None else -1
    if parameter.ndim < 2 and parameter.numel() * compute.itemsize <= coalesce:
        unit = root
    options = WeightOptions(
        coalesce, ("weights",) if param.offload_to_cpu and extended is None else (),
        near, config.quantize, extended,
    )  # fmt: skip
    block = unit.number if unit.kind == "block" else -1
    linear = getattr(owners[0].module, "autocasts", isinstance(owners[0].module, nn.Linear))
    linear = linear and extended is None
    dim = param.fsdp_placement.dim
    return ParameterSharding(like, owners, unit.name, block, dim, False, linear, dtypes, options)


def stand_in(param: Any) -> nn.Parameter:
    """A parameter like the one that FSDP2 has sharded, before that: without memory, or values.

    The library makes its own shards of it, as of any parameter; the program's take their place.
    """
    parameter = param.sharded_param
    like = torch.zeros((), dtype=parameter.dtype, device=param.device)
    whole: Any = like.expand(param._orig_size)
    spec = unsharded_spec(param)
    if spec is not None:  # of a layer that torch's parallelize_module has sharded
        whole = DTensor.__new__(DTensor, whole, spec, requires_grad=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
