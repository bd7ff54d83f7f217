"""Parameters that torch's ``parallelize_module`` has sharded already: tensor and weight parallel.

A layer's weight is a ``DTensor`` on a mesh of tensor ranks. The local tensor of each tensor rank is
a weight like any other: sharded over the weight group of that tensor rank, unsharded in its slot
while a block uses it; each tensor rank has a stage of its own, so that weight groups, replicas,
sequences and sums over ranks do not depend on it. The layer gets a ``DTensor`` on the tensor mesh
again, as its inputs and outputs are ``DTensor`` on that mesh, too::

    sharded      [Replicate, tensor placement, Shard(0)]   on ("replica", "tensor", "weight")
    unsharded    [tensor placement]                         on the user's tensor mesh
    its gradient the same placement, whatever autograd gives; then reduced as any gradient

The user's mesh may have dimensions of data ranks, too, where all of a program's tensors are
``DTensor`` on one mesh: the weight is ``Replicate`` there, and its gradient, a sum that is still to
be made, is reduced as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from internsp.dtensor.mixed import ParameterTensor
from internsp.dtensor.placed import strides
from internsp.errors import StructureError
from internsp.mesh import ParallelMesh, WeightAxis


@dataclass(frozen=True, eq=False)
class TensorPart:
    """How a parameter is placed on the tensor ranks.

    Attributes:
        mesh: the user's.
        placements: on each dimension of ``mesh``; ``Shard`` or ``Replicate``.
        dims: those of ``mesh`` that are of tensor ranks; the others are of data ranks.
        shape: of the parameter over all tensor ranks.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    dims: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, parameter: nn.Parameter, axis: WeightAxis) -> TensorPart | None:
        """Of a parameter that is sharded along ``axis``; ``None`` if it is no ``DTensor``."""
        if not isinstance(parameter, DTensor):
            return None
        mesh, data = parameter.device_mesh, {*axis.data_ranks()}
        ranks = [dist.get_process_group_ranks(mesh.get_group(d)) for d in range(mesh.ndim)]
        dims = tuple(dim for dim, own in enumerate(ranks) if not data.issuperset(own))
        return cls(mesh, tuple(parameter.placements), dims, tuple(parameter.shape))

    @property
    def placement(self) -> Placement:
        """On the library's own mesh, where tensor ranks are one dimension."""
        return self.placements[self.dims[0]] if self.dims else Replicate()

    @property
    def sharded(self) -> dict[int, Shard]:
        """The dimensions of ``mesh`` along which tensor ranks hold different values."""
        placed = {dim: self.placements[dim] for dim in self.dims}
        return {dim: each for dim, each in placed.items() if isinstance(each, Shard)}

    @property
    def first(self) -> bool:
        """Whether this is the first of the ranks of ``mesh`` that hold the same values."""
        copies = {*self.dims} - {*self.sharded}
        return not any(self.mesh.get_local_rank(dim) for dim in copies)

    def local_part(self, full: Tensor) -> Tensor:
        """This tensor rank's part of ``full``, the values over all tensor ranks (a view)."""
        for dim, shard in self.sharded.items():
            pieces, rank = full.chunk(self.mesh.size(dim), shard.dim), self.mesh.get_local_rank(dim)
            full = pieces[rank] if rank < len(pieces) else full.narrow(shard.dim, 0, 0)
        return full

    def as_dtensor(self, local: Tensor) -> DTensor:
        """``local``, unsharded over the weight group, as the ``DTensor`` that the layer reads. No
        communication."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=strides(self.shape),
        )

    def local_gradient(self, gradient: Tensor) -> Tensor:
        """This tensor rank's part of a gradient; blocks if tensor ranks must sum it first."""
        if not isinstance(gradient, DTensor):
            return gradient
        wanted = [*gradient.placements]  # a sum over data ranks is left to the reduction
        for dim in self.dims:
            wanted[dim] = self.placements[dim]
        if (*wanted,) != gradient.placements:
            gradient = gradient.redistribute(placements=wanted)
        local: Any = gradient._local_tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def largest_part(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the first tensor rank's part, which is the largest.

    It decides what is sharded and what is replicated, which must be the same on all tensor ranks,
    also where their parts differ in size.
    """
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                shape[placement.dim] = -(-shape[placement.dim] // parameter.device_mesh.size(dim))
    return tuple(shape)


def own_part(parameter: nn.Parameter) -> Tensor:
    """The parameter's values on this rank, before they are sharded over the weight group."""
    local: Tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return local.detach()


def require_on_tensor_ranks(model: nn.Module, mesh: ParallelMesh) -> None:
    """Check that every ``DTensor`` of ``model`` can be sharded further. No communication.

    Raises:
        StructureError: names the parameter, what is wrong with it, and the remedy.
    """
    found = False
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and not isinstance(parameter, ParameterTensor):
            _require(name, parameter, mesh)
            found = True
    if mesh.tensor > 1 and not found:
        raise StructureError(
            f"the mesh has {mesh.tensor} tensor ranks, but no parameter is a DTensor on them: call "
            "torch's parallelize_module(model, mesh.tensor_mesh, plan) before "
            "internsp.parallelize(), or make the mesh without tensor ranks"
        )


def _require(name: str, parameter: DTensor, mesh: ParallelMesh) -> None:
    theirs = parameter.device_mesh
    ranks = sorted(theirs.mesh.flatten().tolist())
    on = f"{name} is a DTensor already, on ranks {ranks} (this is rank {mesh.rank})"
    if mesh.tensor == 1:
        raise StructureError(
            f"{on}: parallelize a model once, and not after FSDP; if it is tensor parallel, make "
            "the mesh with its ranks (ParallelMesh.create(tensor=...), or from_device_mesh(..., "
            "tensor=the name of its axis))"
        )
    weights = mesh.shape.grid[mesh.pipeline_rank, :, mesh.tensor_rank].tolist()
    both = sorted(set(ranks) & set(weights) - {mesh.rank})
    if both:
        raise StructureError(
            f"{on}, of which {both} hold the same part of the layers as this rank by internsp's "
            "mesh: a rank cannot be a tensor rank and a weight or replica rank at once; the tensor "
            f"ranks of this mesh are {mesh.shape.grid[mesh.pipeline_rank, 0].tolist()} and alike"
        )
    _, inside, _ = mesh.shape.coordinates(mesh.rank)
    own: list[int] = mesh.shape.grid[mesh.pipeline_rank, inside].tolist()
    if theirs.ndim != 1 or ranks != own:
        raise StructureError(
            f"{on}, in {theirs.ndim} dimension(s), but the tensor ranks of internsp's mesh are "
            f"{own}: hand parallelize_module mesh.tensor_mesh, or the axis that from_device_mesh "
            "was given as tensor"
        )
    (placement,) = parameter.placements
    if type(placement) not in (Shard, Replicate):
        raise StructureError(
            f"{name} is placed {placement} on its tensor ranks (this is rank {mesh.rank}): only "
            "what is placed Shard or Replicate there can be cut further; redistribute it first"
        )
