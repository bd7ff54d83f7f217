"""What torch's FSDP2 keeps for itself, in one form for torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def param_groups(state: Any) -> Sequence[Any]:
    """torch's ``FSDPParamGroup`` of an ``FSDPState``: none without parameters, else one."""
    if hasattr(state, "_fsdp_param_groups"):
        found: Sequence[Any] = state._fsdp_param_groups
        return found
    group = state._fsdp_param_group  # torch 2.11
    return [] if group is None else [group]


def unsharded_spec(param: Any) -> Any:
    """The ``DTensorSpec`` of a parameter that torch's ``parallelize_module`` has sharded before
    ``fully_shard``; ``None`` of another one."""
    if hasattr(param, "_unsharded_dtensor_spec"):
        return param._unsharded_dtensor_spec
    return param._tp_spec if param.is_dtensor else None  # torch 2.11


def gives_zeros(group: Any) -> bool:
    """Whether unused parameters of a group get zeros (torch 2.13 can be told so)."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def input_buffers(group: Any) -> int:
    """How many reductions of a group may be in flight (torch 2.13 can be told)."""
    return int(getattr(group, "reduce_scatter_max_input_buffers", 1))
