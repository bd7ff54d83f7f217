"""A weight whose shard has a class with all-gather functions of its own (FSDP2's extensions)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Shard

from internsp.base.host import HostLink
from internsp.dtensor.parameter import make_shard_parameter
from internsp.dtensor.placed import dtensor_over, local_values, strides
from internsp.errors import StructureError
from internsp.mesh import WeightAxis
from internsp.schedule.extended import ExtendedGather
from internsp.wp.parameter import ShardedParameter, SlotViews

if TYPE_CHECKING:
    from internsp.schedule.extended import ExtendedShard


class ExtendedParameter(ShardedParameter):
    """A sharded parameter of a program's class.

    ``storage`` has the shape of a padded shard and no memory.

    Args:
        sharded: becomes its parameter: a ``DTensor`` whose local tensor is of the class.
    """

    of_class = True

    def __init__(self, sharded: nn.Parameter, *arguments: Any) -> None:
        self._sharded = sharded
        super().__init__(*arguments)

    def _make_storage(self, parameter: nn.Parameter, link: HostLink | None) -> Tensor:
        """A placeholder."""
        return torch.zeros((), dtype=parameter.dtype, device=self.device).expand(
            self.layout.shard_shape
        )

    def _register(
        self, storage: Tensor, placement: Placement, shape: Sequence[int], trained: bool
    ) -> None:
        """Take the parameter that there is."""
        self.storage = storage
        self._counter = cast("DTensor", self._sharded.detach())
        self.parameter = make_shard_parameter(self._sharded, self)

    @property
    def slot_nbytes(self) -> int:
        """See :class:`ShardedParameter`."""
        return self._extended.slot_nbytes

    def views_in(self, place: Tensor) -> SlotViews:
        """See :class:`ShardedParameter`: the bytes of the tensors that make it up."""
        return SlotViews(place, place, place)

    def read(self) -> Tensor:
        """See :class:`ShardedParameter`: in its class."""
        made = self._extended.unsharded
        assert made is not None, "gathered before"
        with torch.inference_mode(False):  # in which a class cannot be detached
            return made.detach()

    @property
    def _extended(self) -> ExtendedShard:
        return cast("ExtendedShard", self.encoding)

    def fresh(self) -> Tensor:
        """See :class:`ShardedParameter`; a placeholder, as its class reads the shard itself."""
        return self._flat

    def own(self, values: Tensor) -> Tensor:
        """See :class:`ModelParameter`: by the operation that FSDP2 cuts with. By others a class may
        give values in the place of itself, which its ``copy_`` may drop."""
        return _cut(super(ShardedParameter, self).own(values), self.axis, self.layout.dim)

    def load(self, values: Tensor) -> None:
        """See :class:`ModelParameter`. What the program took before keeps the old values."""
        with torch.no_grad():
            for alias in [known() for known in list(self.aliases.values())]:
                if isinstance(alias, DTensor):  # its class does not say where its memory lies
                    alias._local_tensor = alias._local_tensor.clone()
            local = local_values(self.name, values, self.parameter)
            local = self.own(values) if local is None else local
            self.parameter._local_tensor.copy_(local.detach())  # type: ignore[attr-defined]


def shard(
    name: str, parameter: nn.Parameter, module: nn.Module, axis: WeightAxis,
    policy: MixedPrecisionPolicy, device: torch.device, hosted: bool,
) -> ExtendedGather:  # fmt: skip
    """This rank's rows of ``parameter``, by the operations by which FSDP2 cuts them, which its
    class therefore has; and the functions of the class.

    Args:
        module: holds the parameter.
        policy: the dtype that the class is asked for.
        device: computes with it.
        hosted: the shard lies in host memory.
    """
    whole, place = parameter.detach(), torch.device("cpu") if hosted else device
    whole = whole if whole.device == place else whole.to(place)
    mine, rows = _cut(whole, axis, 0), -(-len(whole) // axis.size)
    padded = whole.new_zeros(torch.Size([rows, *whole.shape[1:]]))  # in memory of its own
    local = padded.narrow(0, 0, len(mine))
    if len(mine):
        local.copy_(mine)
    placed = dtensor_over(local, axis.param_mesh, axis.placements(Shard(0)), parameter.shape)
    sharded = nn.Parameter(placed, parameter.requires_grad)
    mesh = axis.param_mesh["weight"]
    return functions_of(sharded, name, mesh, parameter.shape, module, policy, device)


def _cut(whole: Tensor, axis: WeightAxis, dim: int) -> Tensor:
    """This rank's part of ``whole``, without padding; it may be empty."""
    chunks = whole.chunk(axis.size, dim)
    return chunks[axis.rank] if axis.rank < len(chunks) else whole.narrow(dim, 0, 0)


def functions_of(
    sharded: nn.Parameter, name: str, mesh: DeviceMesh, shape: Sequence[int], module: nn.Module,
    policy: MixedPrecisionPolicy, device: torch.device, dim: int = 0,
) -> ExtendedGather:  # fmt: skip
    """The all-gather functions of a parameter's class, called as FSDP2 calls them.

    Args:
        sharded: a ``DTensor`` whose local tensor has them, whichever that is by then.
        mesh: one-dimensional, of the weight group.
        shape: of the whole parameter.
        module: holds the parameter.
        device: computes with it; a shard may lie in host memory.
        dim: the sharded dimension.
    """
    size, stride = torch.Size(shape), strides(shape)
    rows = -(-size[dim] // mesh.size())

    def local() -> Any:
        return sharded._local_tensor  # type: ignore[attr-defined]

    def pre() -> tuple[Sequence[Tensor], object]:
        shard = local() if local().device == device else local().to(device, non_blocking=True)
        if not hasattr(shard, "fsdp_pre_all_gather"):
            raise StructureError(
                f"{name} has lost fsdp_pre_all_gather since its gather was planned: keep the "
                "functions on its local tensor"
            )
        call = shard.fsdp_pre_all_gather
        if len(inspect.signature(call).parameters) == 1:
            sent, metadata = call(mesh)
        else:
            sent, metadata = call(mesh, size, stride, module, policy)
        padded = torch.Size([*size[:dim], rows, *size[dim + 1 :]])
        if shard.size() != padded and any(part.size() != padded for part in sent):
            raise StructureError(
                f"fsdp_pre_all_gather of {name} gave {[list(part.size()) for part in sent]} of a "
                f"shard {list(shard.size())}, which is padded to {list(padded)} where it is sent: "
                "return tensors of that shape, or choose a number of rows that the ranks divide"
            )
        return sent, metadata

    def post(gathered: tuple[Tensor, ...], metadata: object) -> Tensor:
        if dim:  # torch joins them there, and keeps the shape of rows
            gathered = tuple(map(joined, gathered))
        dtype = policy.param_dtype or sharded.dtype
        made, _ = local().fsdp_post_all_gather(gathered, metadata, dtype)
        if not made.is_contiguous():
            raise StructureError(
                f"fsdp_post_all_gather of {name} gave strides {list(made.stride())}, and its "
                "memory is read row by row: return .contiguous()"
            )
        # Rows of padding are left out; classes define it, since FSDP2 calls it.
        return torch.as_strided(made, size, stride, 0)

    def joined(part: Tensor) -> Tensor:
        ranks = part.view(mesh.size(), *local().shape)
        return torch.cat([*ranks], dim).view(part.shape)

    return ExtendedGather(sharded, pre, post)
