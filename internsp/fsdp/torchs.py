"""What torch's FSDP2 keeps for itself, in one form for torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from internsp.schedule.extended import ExtendedGather

_SHARDED = "_internsp_sharded"
"""An attribute of a program's parameter in whose place ``fully_shard`` has put a sharded one."""


def param_groups(state: Any) -> Sequence[Any]:
    """torch's ``FSDPParamGroup`` of an ``FSDPState``: one for each mesh of its parameters."""
    if hasattr(state, "_fsdp_param_groups"):
        found: Sequence[Any] = state._fsdp_param_groups
        return found
    group = state._fsdp_param_group  # torch 2.11
    return [] if group is None else [group]


@contextmanager
def ties_checked(parts: Sequence[Any]) -> Iterator[None]:
    """Refuse, around torch's ``fully_shard``, a weight that an earlier call has sharded: later ones
    do so at the first forward, torch 2.11 unties it.

    Raises:
        ValueError: there is one.
    """
    if hasattr(FSDPState, "_validate_no_duplicate_params"):
        yield
        return
    modules = [m for part in parts if isinstance(part, nn.Module) for m in part.modules()]
    held = [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
    for module, name, parameter in held:
        if hasattr(parameter, _SHARDED):
            raise ValueError(
                f"{name} of a {type(module).__name__} is shared with a module that another call of "
                "fully_shard has sharded: use fully_shard([module_a, module_b]) for both"
            )
    yield
    for module, name, parameter in held:
        if module._parameters[name] is not parameter:
            setattr(parameter, _SHARDED, True)


def unsharded_spec(param: Any) -> Any:
    """The ``DTensorSpec`` of a parameter that torch's ``parallelize_module`` has sharded before
    ``fully_shard``; ``None`` of another one."""
    if hasattr(param, "_unsharded_dtensor_spec"):
        return param._unsharded_dtensor_spec
    return param._tp_spec if param.is_dtensor else None  # torch 2.11


def mesh_over(param: Any) -> DeviceMesh:
    """The mesh over which a parameter is sharded: dimensions of data ranks before that of others.

    A program that names dimensions of data (torch 2.13) may have them in any order, and several
    over which a weight is sharded as over one.
    """
    data, mesh = param.mesh_info.mesh, param._spmd_mesh
    named = getattr(param.mesh_info, "dp_mesh_dims", None)
    if named is None:
        return mesh
    given = {*named.shard_names, *named.replicate_names}
    others = [mesh[name] for name in mesh.mesh_dim_names if name not in given]
    others = [other for other in others if other.size() > 1]
    return DeviceMesh._concatenate([data, *others]) if others else data


def extension(param: Any, name: str = "") -> ExtendedGather | None:
    """The all-gather functions of a parameter's class; ``None`` if it has none. Without them later,
    a gather raises a StructureError with ``name``."""
    if not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
        return None
    from internsp.wp.extended import functions_of  # few models have any

    return functions_of(
        param.sharded_param, name, param.shard_mesh_from_root, param._orig_size,
        param._module_info.module, param.mp_policy, param.device, param.fsdp_placement.dim,
    )  # fmt: skip


def gathered(param: Any, functions: ExtendedGather) -> Tensor:
    """What ``functions`` make of a parameter's shards, in memory of its own. Collective."""
    sent, metadata = functions.pre()
    everyone = []
    for part in sent:
        mine = part.reshape(-1, *part.shape[1:])
        rows = DTensor.from_local(mine.view(torch.uint8), param.shard_mesh_from_root, [Shard(0)])
        everyone.append(rows.full_tensor().view(part.dtype))
    return functions.post(tuple(everyone), metadata)


def gives_zeros(group: Any) -> bool:
    """Whether unused parameters of a group get zeros (torch 2.13 can be told so)."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def input_buffers(group: Any) -> int:
    """How many reductions of a group may be in flight (torch 2.13 can be told)."""
    return int(getattr(group, "reduce_scatter_max_input_buffers", 1))
