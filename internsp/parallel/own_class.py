"""Shards parameters of a class with all-gather functions of its own over a mesh."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from internsp.mesh import ParallelMesh
from internsp.schedule.extended import ExtendedGather
from internsp.structure.assign import ParameterOwner
from internsp.structure.dtypes import WeightDtypes
from internsp.wp.extended import shard


def extend(
    mesh: ParallelMesh, owner: ParameterOwner, parameter: nn.Parameter, expert: bool, hosted: bool,
    dtypes: WeightDtypes,
) -> ExtendedGather:  # fmt: skip
    """See :data:`internsp.structure.own_class.Extend`."""
    axis, policy = mesh.experts if expert else mesh.dense, MixedPrecisionPolicy(dtypes.compute)
    return shard(owner.full_name, parameter, owner.module, axis, policy, mesh.device, hosted)
