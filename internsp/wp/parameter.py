"""One sharded weight: its shard, its DTensor parameter, its reduced gradient (DESIGN 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from internsp.dtensor.mixed import each, plainly
from internsp.dtensor.parameter import Aliases, own, part
from internsp.dtensor.placed import dtensor_like, local_of, strides
from internsp.dtensor.tensor_parallel import TensorPart, own_part
from internsp.errors import LayoutError, StaleWeightError, StructureError
from internsp.host import GRADIENTS, WEIGHTS, HostLink, HostSum
from internsp.mesh import ParallelMesh, WeightAxis
from internsp.trace import Work
from internsp.wp.layout import ShardLayout

Tag = tuple[int, torch.dtype]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_requires_grad: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class ModelParameter:
    """A parameter of a parallel model, at rest: a :class:`ShardedParameter`, or a replicated one.

    The module's parameter is a ``DTensor`` over ``storage``, or over what of it is not padding.

    Attributes:
        name: fully qualified, of the first owner when several modules share the weight.
        shape: of what this rank has of it while it is unsharded.
        device: where it computes.
        axis: over whose ranks it is cut, or replicated; dense weights and experts may have
            different ones.
        tensor: where it lies on the tensor ranks; ``None``: its layer is not tensor parallel.
        ready: set by an optimizer that is still publishing: waits until ``storage`` is new (WP-3).
        offload: what of it lies in host memory (``weight_parallel.offload``).
        guarded: whether other weights take its bytes between forward and backward.
        communicator: unshards it and takes its gradient.
        tied: what the whole model calls a weight of which other stages have copies; else empty.
        counted: whether it is counted, and saved: of copies the first.
    """

    tied = ""
    counted = True
    guarded = True
    offload: frozenset[str] = frozenset()
    shape: torch.Size
    device: torch.device
    storage: Tensor
    parameter: nn.Parameter
    communicator: Any

    def __init__(self, name: str, parameter: nn.Parameter, axis: WeightAxis) -> None:
        self.name, self.dtype, self.axis = name, parameter.dtype, axis
        self.tensor = TensorPart.of(parameter)
        self.ready: Work | None = None
        self.meet: Callable[[str], None] | None = None
        self.aliases: Aliases = {}
        self._generation = 0

    def _hold(
        self, storage: Tensor, placement: Placement, shape: Sequence[int], trained: bool
    ) -> None:
        """Its values lie in ``storage``, as ``placement`` says, on the axis' mesh."""
        self.storage = storage
        whole = DTensor.from_local(
            self.local(storage),
            self.axis.param_mesh,
            self.axis.placements(placement, self.tensor.placement if self.tensor else None),
            run_check=False,
            shape=torch.Size(shape),
            stride=strides(tuple(shape)),
        )
        self._counter = whole  # has the parameter's version counter, and is read at once
        self.parameter = own(nn.Parameter(whole, requires_grad=trained), self)

    @property
    def name_in_model(self) -> str:
        """What the whole model calls it: of a copy the name of the weight."""
        return self.tied or self.name

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained, now: a user may freeze and thaw it."""
        # Past __torch_function__, by which every read of a parameter's attribute goes.
        return bool(plainly(_requires_grad, (), (self.parameter,), {}))

    def wrap(self, storage: Tensor) -> DTensor:
        """A tensor like ``storage`` as a ``DTensor`` like the parameter (no copy, no message)."""
        return dtensor_like(self.parameter, self.local(storage))

    def local(self, storage: Tensor) -> Tensor:
        """What the parameter's local tensor is of a tensor like ``storage``."""
        return storage

    def own(self, values: Tensor) -> Tensor:
        """What this rank has, like the local tensor, of values of the whole parameter."""
        return values if self.tensor is None else self.tensor.own(values)

    def part_of(self, values: Tensor, what: str = "") -> Tensor:
        """This rank's part of ``values``, like the local tensor.

        No message, except for a ``DTensor`` that is placed otherwise, which all ranks gather
        together.

        Args:
            values: whole (in the parameter's own shape, the same on all ranks), a ``DTensor``, or
                this rank's part itself.
            what: what they are, for errors; by default the parameter.

        Raises:
            LayoutError: they have another shape, or are on the meta device.
        """
        spec, local = self.parameter._spec, self.parameter._local_tensor  # type: ignore[attr-defined]
        shape, found = self.parameter.shape, values.shape
        fits = found == shape or (not isinstance(values, DTensor) and found == local.shape)
        if not fits or values.is_meta:
            given = "values on the meta device" if fits else f"the shape {list(found)}"
            raise LayoutError(
                f"{what or self.name} on rank {dist.get_rank()} was given {given}: it takes whole "
                f"values {list(shape)}, this rank's part {list(local.shape)}, or a DTensor "
                f"{list(shape)}"
            )
        if isinstance(values, DTensor):
            if values.placements == spec.placements and values.device_mesh == spec.mesh:
                return values._local_tensor.detach()
            values = values.full_tensor()
        elif found != shape:
            return values.detach()
        return self.own(values.detach())

    def like_storage(self, part: Tensor) -> Tensor:
        """``part``, like the local tensor, as a tensor like ``storage``."""
        made = part.new_zeros(self.storage.shape, device=self.storage.device)
        self.local(made).copy_(part)
        return made

    def relocate(self, storage: Tensor) -> None:
        """Move the values into ``storage`` (same shape): an optimizer packs a unit's."""
        storage.copy_(self.storage)
        self.storage = storage
        # `.data =` on a DTensor leaves its local tensor where it was.
        self.parameter._local_tensor.data = self.local(storage)  # type: ignore[attr-defined]
        self._counter._local_tensor = self.parameter._local_tensor  # type: ignore[attr-defined]

    def publish(self) -> None:
        """Wait until ``storage`` is what the optimizer has made of it (WP-3)."""
        if self.ready is not None:
            ready, self.ready = self.ready, None
            ready.wait()

    def take(self, values: Tensor) -> None:
        """Copy values, whole or a ``DTensor`` placed alike, into the storage.

        Raises:
            LayoutError: they have another shape or placement.
        """
        self.publish()  # what an optimizer still publishes would overwrite them
        local = local_of(self.name, values, self.parameter)
        if local is None:
            local = self.own(values.detach())
        part(self.parameter, self.aliases, values)
        with torch.no_grad():
            self.local(self.storage).copy_(local.detach())

    def version(self) -> int:
        """A number that changes whenever the values may have.

        Operations on the ``DTensor`` raise its own version counter, operations on its local tensor
        that one's. What raises neither (``foreach`` and fused operations, numpy) must be told by
        :meth:`invalidate`.
        """
        local = self.parameter._local_tensor  # type: ignore[attr-defined]
        return self._counter._version + local._version + self._generation

    def invalidate(self) -> None:
        """The values were written behind autograd's back."""
        self._generation += 1


class ShardedParameter(ModelParameter):
    """A parameter at rest as this rank's rows.

    ``storage`` is the padded shard ``[rows, ...]``, contiguous, cut dimension first; the module's
    parameter is a ``DTensor`` whose local tensor is a view of its valid rows.

    Where ranks own different experts, ``layout`` is of this rank's unsharded weight, and the
    ``DTensor`` is of all ranks' weights of that name, one after another on dimension 0. Where the
    layer is tensor parallel, ``layout`` is of this tensor rank's part.

    Attributes:
        reduced_grad: the gradient summed from finished reductions so far in this backward, like
            ``storage`` but fp32 or wider (unless ``borrowed``); ``None`` before the first reduction
            is finished. In host memory where gradients are offloaded: read :meth:`reduced`.
        borrowed: ``reduced_grad`` is autograd's own tensor; see :meth:`own_reduced_grad`.
        compute_dtype: what a gather moves; the shard is cast before it travels (WP-1).
        sent_as: what its gradient is reduced in; ``None``: in the compute dtype, as in a group of
            one always.
        trained: whether it was when the last forward began: all ranks have agreed on that.
        reduce_dtype, gradient_bytes: what a reduction moves, and the bytes of it, padded.
        slot_nbytes: bytes of the padded whole in the configured compute dtype.
        link: copies what is offloaded of it; ``None``: nothing is, of the whole chunk.
        hosted: whether the shard does, and so ``storage`` and the parameter.
        travels: whether it comes from elsewhere, other ranks or the host, and is waited for.
        moves: whether it is gathered: false where the shard is the unsharded weight already.
        autocasts: whether an active autocast decides the compute dtype (a linear layer's weight).
        unit: its block, or what it is beside the blocks; decides when it is gathered.
        slices: near ranks that keep slices of it after its first gather of a step; 0: none do.
        shown: version and dtype of what its bytes in the slot hold; ``None``: of nothing.
    """

    slices = 0
    unit: Any

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        layout: ShardLayout,
        axis: WeightAxis,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        autocasts: bool,
        sent_as: torch.dtype | None = None,
        offload: Collection[str] = (),
        link: HostLink | None = None,
    ) -> None:
        super().__init__(name, parameter, axis)
        self.layout, self.shape = layout, torch.Size(layout.shape)
        self.rank = axis.rank
        self._valid = layout.valid_rows(axis.rank)
        self.sent_as = sent_as if layout.size > 1 else None
        self.use_dtype(compute_dtype or parameter.dtype)
        self.base_compute_dtype = self.compute_dtype
        self.slot_nbytes = layout.padded_numel * self.compute_dtype.itemsize
        self.link, self.offload = link, frozenset(offload)
        self.hosted = WEIGHTS in self.offload
        self.travels = layout.size > 1 or self.hosted
        self.moves = self.travels or self.compute_dtype != self.dtype
        # A weight that is whole at rest is autocast by torch itself, as on one process.
        self.autocasts = autocasts and self.compute_dtype == torch.float32 and self.moves
        self.device = device
        self._sum: HostSum | None = None
        self.reduced_grad: Tensor | None = None
        self.borrowed = False
        self.shown: Tag | None = None
        if self.hosted and link is not None:
            storage = link.zeros(WEIGHTS, layout.shard_shape, self.dtype)
        else:
            storage = self.zeros(self.dtype)
        if parameter.device.type != "meta":
            with torch.no_grad():
                rows = layout.cut(own_part(parameter), self.rank)
                storage[: len(rows)].copy_(rows)
        self._flat = storage.data.view(-1)
        shape = (layout.shape[0] * axis.expert, *layout.shape[1:])
        if self.tensor is not None:
            shape = self.tensor.shape
        self.trained = parameter.requires_grad
        self._hold(storage, Shard(layout.dim), shape, self.trained)

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """Zeros like the padded shard, where it computes."""
        return torch.zeros(self.layout.shard_shape, dtype=dtype, device=self.device)

    def local(self, storage: Tensor) -> Tensor:
        """The valid rows of a tensor like ``storage``, dimensions in the parameter's order."""
        rows = storage if self._valid == self.layout.rows else storage[: self._valid]
        return rows.movedim(0, self.layout.dim) if self.layout.dim else rows

    def own(self, values: Tensor) -> Tensor:
        """See :class:`ModelParameter`."""
        values = super().own(values)
        if self.tensor is None:  # those of experts of other ranks lie before and behind
            count = self.layout.shape[0]
            values = values.narrow(0, self.axis.expert_rank * count, count)
        return self.layout.cut(values, self.rank).movedim(0, self.layout.dim)

    def relocate(self, storage: Tensor) -> None:
        """See :class:`ModelParameter`."""
        super().relocate(storage)
        self._flat = storage.data.view(-1)

    def use_dtype(self, dtype: torch.dtype) -> None:
        """Gather it in ``dtype`` from now on, and reduce its gradient accordingly."""
        self.compute_dtype = dtype
        self.reduce_dtype = self.sent_as or dtype
        self.gradient_bytes = self.layout.padded_numel * self.reduce_dtype.itemsize

    def tag(self) -> Tag:
        """What a slot with this weight holds: the same values in two dtypes differ (WP-11)."""
        return self.version(), self.compute_dtype

    def show_again(self, shown: Tag) -> None:
        """Backward needs what a view of ``shown`` had: check that it is still to be had (WP-14).

        Raises:
            StaleWeightError: the values have changed since.
        """
        version, dtype = shown
        if dtype is not self.compute_dtype:  # autocast was another there
            self.use_dtype(dtype)
        if version != self.version():
            raise stale(self.name, dist.get_rank())

    def agrees_with(self, gathered: Tensor) -> bool:
        """Whether this rank's rows of ``gathered`` (flat, padded) still are those of the shard.

        True also where the version tells that they are not: that is found where they are used.
        """
        if self.shown != self.tag():
            return True
        count = self.layout.shard_numel
        own, shard = gathered.narrow(0, self.rank * count, count), self.fresh()
        return same_bits(own, shard if shard.dtype == own.dtype else shard.to(own.dtype))

    def to_send(self) -> Tensor:
        """The padded shard, flat, in the compute dtype, fresh (WP-3): what a gather reads."""
        fresh = self.fresh()
        # In a group of one the copy into the slot casts.
        alone = self.layout.size == 1
        return fresh if alone or self.dtype == self.compute_dtype else fresh.to(self.compute_dtype)

    def fresh(self) -> Tensor:
        """The padded shard, flat, in its own dtype, once an optimizer has published it (WP-3)."""
        if self.ready is not None:
            self.publish()
        local = self.parameter._local_tensor  # type: ignore[attr-defined]
        if local.data_ptr() != self.storage.data_ptr():
            # The parameter's local tensor was given other storage (`.data =`, `to_empty`).
            if local.dtype != self.dtype:
                raise StructureError(
                    f"{self.name} was cast from {self.dtype} to {local.dtype} after parallelize(): "
                    "cast the model before, or set weight_parallel.compute_dtype"
                )
            self.local(self.storage).copy_(local)
        return self._flat

    def add_reduced_grad(self, total: Tensor) -> None:
        """Add ``total`` (like ``storage``, fp32 or wider), which is given away."""
        if self.link is not None and GRADIENTS in self.offload:
            if self._sum is None:
                self._sum = HostSum(self.link, total.numel(), total.dtype)
            self._sum.add(total)
            self.reduced_grad = self._sum.values.view(self.layout.shard_shape)
            return
        before = self.reduced_grad
        self.reduced_grad = total if before is None else self.own_reduced_grad().add_(total)

    def borrow_grad(self, gradient: Tensor) -> None:
        """:meth:`add_reduced_grad` of autograd's own tensor, not copied until it is changed."""
        if GRADIENTS in self.offload:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self.add_reduced_grad(gradient.to(wide, copy=True))
            return
        if self.reduced_grad is not None:
            self.own_reduced_grad().add_(gradient.view(self.layout.shard_shape))
            return
        self.reduced_grad, self.borrowed = gradient.view(self.layout.shard_shape), True

    def reduced(self) -> Tensor | None:
        """``reduced_grad`` on the device."""
        if self._sum is None or self.reduced_grad is None:
            return self.reduced_grad
        return self._sum.fetch().view(self.layout.shard_shape)

    def own_reduced_grad(self) -> Tensor:
        """:meth:`reduced`, to be changed in place: fp32 or wider, and memory of its own."""
        assert self.reduced_grad is not None, "the caller has looked"
        if self._sum is not None:
            return self._sum.fetch().view(self.layout.shard_shape)
        if self.borrowed:
            wide = torch.promote_types(self.reduced_grad.dtype, torch.float32)
            self.reduced_grad, self.borrowed = self.reduced_grad.to(wide, copy=True), False
        return self.reduced_grad

    def drop_reduced_grad(self) -> None:
        """Forget the sum."""
        self.reduced_grad, self.borrowed = None, False
        if self._sum is not None:
            self._sum.clear()


class ReplicatedParameter(ModelParameter):
    """A whole parameter on every rank, as a ``DTensor`` on the same mesh as the cut ones.

    To layers it is its own communicator (:class:`internsp.wp.communicator.WPCommunicator` names the
    methods): there is nothing to gather.

    Args:
        compute_dtype: what its module computes with (``None``: its own).

    Attributes:
        axis: the dense one, over whose ZeRO group an optimizer cuts it.
        shown: the version that was last computed with.
        sums: takes its gradient, as that of its ``index``
            (:class:`internsp.wp.replicated.ReplicatedParameters`).
    """

    guarded = False  # nothing overwrites it but a user, who is caught when its gradient is ready
    weight_part = False
    sums: Any
    index: int

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        mesh: ParallelMesh,
        compute_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(name, parameter, mesh.dense)
        self.communicator = self
        self.compute_dtype = compute_dtype or parameter.dtype
        self.shown = -1
        mine = own_part(parameter)
        self.shape = mine.shape
        storage = torch.zeros(mine.shape, dtype=parameter.dtype, device=mesh.device)
        if parameter.device.type != "meta":
            storage.copy_(mine)
        self.device = storage.device
        self._hold(storage, Replicate(), parameter.shape, parameter.requires_grad)

    def show_again(self, shown: int) -> None:
        """The gradient of what was ``shown`` is ready: check that the values are the same (WP-14).

        Raises:
            StaleWeightError: they have changed since.
        """
        if shown != self.version():
            raise stale(self.name, dist.get_rank())

    # as a communicator: ``weight`` is itself

    def unshard(self, weight: ReplicatedParameter) -> Tensor:
        """The local replica, in the compute dtype, published (WP-3)."""
        if self.ready is not None:
            self.publish()
        local: Tensor = self.parameter._local_tensor.data  # type: ignore[attr-defined]
        self.shown = self.version()
        # torch, too, would give what it was given, but takes its time to find out.
        return local if local.dtype == self.compute_dtype else local.to(self.compute_dtype)

    def at_hand(self, weight: ReplicatedParameter) -> bool:
        """Always."""
        return True

    def on_grad_ready(self, weight: ReplicatedParameter, gradient: Tensor) -> None:
        """Add this rank's part to the flat sum."""
        if self.sums.backward < 0:
            self.sums.began()
        if self not in self.sums.frozen:
            self.sums.add(self.index, gradient)


Member = ReplicatedParameter | ShardedParameter
"""A parameter of a parallel model."""


def trained(members: Iterable[Member]) -> list[bool]:
    """``requires_grad`` of each, read at once."""
    return each(_requires_grad, [member.parameter for member in members])


def bits_of(values: Tensor) -> Tensor:
    """``values`` as integers of their bits (so that NaN equals NaN)."""
    return values.view(_BITS[math.gcd(values.element_size(), 8)])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits."""
    return torch.equal(bits_of(one), bits_of(other))


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of ``flat`` in the shapes of ``like``, in one call: a split and views take longer."""
    views: Sequence[Tensor] = torch._utils._unflatten_dense_tensors(flat, like)
    return views


def stale(name: str, rank: int) -> StaleWeightError:
    """The error for values that changed between their use in forward and its backward (WP-14)."""
    return StaleWeightError(
        f"{name} changed on rank {rank} between its use in forward and its backward: its gradient "
        "would be computed with other values. Take the optimizer step, load_state_dict or edit "
        "after backward"
    )


def not_to_be_copied() -> StructureError:
    """The error for ``copy.deepcopy`` and ``pickle`` of a parallel model."""
    return StructureError(
        "a parallel model cannot be copied or pickled: its copy would share slots and groups. Copy "
        "it before parallelize(), or copy or save its state_dict()"
    )
