"""One parameter of a parallel model: its shard, its DTensor, its reduced gradient (design.md 4)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from internsp.base.bits import bits_of
from internsp.base.host import GRADIENTS, WEIGHTS, HostLink
from internsp.base.trace import Work
from internsp.dtensor.mixed import read_each, without_torch_function
from internsp.dtensor.parameter import (
    Aliases,
    Meet,
    Reads,
    StepCount,
    detach_aliases,
    make_shard_parameter,
    move_aliases,
    note_alias,
    tensors_over,
)
from internsp.dtensor.placed import dtensor_like, dtensor_over, local_values
from internsp.dtensor.tensor_parallel import TensorPart, own_part
from internsp.errors import LayoutError, StaleWeightError, StructureError
from internsp.mesh import ParallelMesh, WeightAxis
from internsp.schedule.layout import ShardLayout
from internsp.wp.reduced import ReducedGradient

if TYPE_CHECKING:  # these hold weights; a weight only names them
    from internsp.schedule.encoding import Encoding
    from internsp.wp.communicator import WPCommunicator
    from internsp.wp.replicated import ReplicatedParameters
    from internsp.wp.slots import Unit

VersionAndDtype = tuple[int, torch.dtype]

_requires_grad: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class ModelParameter:
    """A parameter of a parallel model: base of the sharded and of the replicated one.

    The module's parameter is a ``DTensor`` whose local tensor is ``storage`` without its padding.

    Attributes:
        name: fully qualified name, in the first module if several share the parameter.
        shape: shape of the unsharded parameter on this rank.
        device: the device that computes with it.
        axis: the mesh axis over which it is sharded or replicated; dense weights and experts may
            have different ones.
        tensor: its placement on the tensor ranks; ``None`` if its layer is not tensor parallel.
        ready: the optimizer's all-gather of new values into ``storage`` (WP-3), until it was
            waited for, which sets it to ``None``; on a device with streams until the next one.
        stepped: counts the steps that have written it; a ``ZeroOptimizer``'s parameters share one.
        offload: what of it lies in host memory (``weight_parallel.offload``).
        frozen: whether it was frozen when the last backward began, on all ranks: its gradients are
            dropped; a sharded one is reduced with zeros, in the declared order.
        shares_slot: whether other weights use its bytes between forward and backward.
        communicator: unshards it and reduces its gradient.
        tied: name in the whole model of a weight that other pipeline stages hold, too; else empty.
        counted: whether norms and checkpoints count this copy; of several copies the first one is.
        meet: called before ``full_tensor()`` with what is to be gathered; raises unless all ranks
            call it (:func:`internsp.parallel.checks.register_read_checks`). With ``everyone``:
            before a sum, of all ranks that hold a part or a replica of it. ``None``: no check.
        reads: reads it in a forward (:class:`internsp.modules.reads.ForwardReads`).
        aliases: tensors that ``p.data``, ``p.detach()`` and ``p.to_local()`` returned
            (:mod:`internsp.dtensor.parameter`).
    """

    tied = ""
    counted = True
    shares_slot = True
    frozen = False
    storage: Tensor
    parameter: nn.Parameter
    communicator: WPCommunicator[Member]

    def __init__(
        self, name: str, parameter: nn.Parameter, axis: WeightAxis, shape: Sequence[int],
        device: torch.device, offload: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.shape, self.device, self.offload = torch.Size(shape), device, frozenset(offload)
        self.name, self.axis = name, axis
        self.tensor = TensorPart.of(parameter, axis)
        self.ready: Work | None = None
        self.stepped = StepCount()
        self.meet: Meet | None = None
        self.reads: Reads | None = None
        self.aliases: Aliases = {}
        self._unseen_writes = 0

    def _register(
        self, storage: Tensor, placement: Placement, shape: Sequence[int], trained: bool
    ) -> None:
        """Make the module's parameter: a ``DTensor`` of ``shape`` over ``storage``."""
        self.storage = storage
        placements = self.axis.placements(placement, self.tensor.placement if self.tensor else None)
        whole = dtensor_over(self.local(storage), self.axis.param_mesh, placements, shape)
        self._counter = whole  # shares the parameter's version counter, and is faster to read
        self.parameter = make_shard_parameter(nn.Parameter(whole, requires_grad=trained), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: torch's asynchronous checkpoints copy a state dict with all that its tensors
        refer to, and this is not a part of their values."""
        return self

    def assign(self, communicator: WPCommunicator[Self]) -> None:
        """Let ``communicator`` unshard it and reduce its gradient."""
        # Layers hand it weights of either class, each to its own communicator.
        self.communicator = cast("WPCommunicator[Member]", communicator)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is stored."""
        return self.storage.dtype

    @property
    def name_in_model(self) -> str:
        """Its name in the whole model, of which this may be one pipeline stage."""
        return self.tied or self.name

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained now; a user may freeze it at any time."""
        # Without __torch_function__, through which each read of an attribute would go.
        return bool(without_torch_function(_requires_grad, (), (self.parameter,), {}))

    def wrap(self, storage: Tensor) -> DTensor:
        """A tensor like ``storage`` as a ``DTensor`` like the parameter (no copy, no message)."""
        return dtensor_like(self.parameter, self.local(storage))

    def local(self, storage: Tensor) -> Tensor:
        """A tensor like ``storage`` as the parameter's local tensor: without padding (a view)."""
        return storage

    def own(self, values: Tensor) -> Tensor:
        """This rank's part of ``values`` (in the parameter's own shape), like the local tensor."""
        return values if self.tensor is None else self.tensor.local_part(values)

    def part_of(self, values: Tensor, what: str = "") -> Tensor:
        """This rank's part of ``values``, like the local tensor.

        No message, except for a ``DTensor`` with another placement, which all ranks gather
        together.

        Args:
            values: unsharded (in the parameter's own shape, the same on all ranks), a ``DTensor``,
                or this rank's part itself.
            what: what ``values`` are, for errors; by default the parameter.

        Raises:
            LayoutError: ``values`` have another shape, or are on the meta device.
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
        """A tensor like ``storage`` with ``part`` (like the local tensor) and zeros as padding."""
        made = part.new_zeros(self.storage.shape, device=self.storage.device)
        self.local(made).copy_(part)
        return made

    def relocate(self, storage: Tensor) -> None:
        """Move the values into ``storage`` (same shape), a part of an optimizer's flat bucket."""
        storage.copy_(self.storage)
        self.hold(storage)
        move_aliases(self.parameter, self.aliases, self.local(storage))
        # `.data =` on a DTensor leaves its local tensor where it was.
        self.parameter._local_tensor.data = self.local(storage)  # type: ignore[attr-defined]
        self._counter._local_tensor = self.parameter._local_tensor  # type: ignore[attr-defined]

    def hold(self, storage: Tensor) -> None:
        """Let ``storage``, in which the parameter lies, be its storage."""
        self.storage = storage

    def wait_until_ready(self) -> None:
        """Wait on the current stream until ``storage`` holds the last step's values (WP-3)."""
        if self.ready is not None:
            self.ready.wait()

    def load(self, values: Tensor) -> None:
        """Copy ``values``, unsharded or a ``DTensor`` with the same placement, into the storage.

        Raises:
            LayoutError: ``values`` have another shape or placement.
        """
        self.wait_until_ready()  # an optimizer's all-gather in flight would overwrite the values
        local = local_values(self.name, values, self.parameter)
        if local is None:
            local = self.own(values.detach())
        detach_aliases(self.parameter, self.aliases, values)
        with torch.no_grad():
            self.local(self.storage).copy_(local.detach())

    def version(self) -> int:
        """A number that changes whenever the values may have changed.

        The sum of the version counters of the ``DTensor`` and of its local tensor, and of the
        steps. After other writes that raise neither counter (``foreach``, numpy), call
        :meth:`invalidate`.
        """
        local = self.parameter._local_tensor  # type: ignore[attr-defined]
        seen: int = self._counter._version + local._version
        return seen + self.stepped.steps + self._unseen_writes

    def invalidate(self) -> None:
        """Raise the version: the values were written in a way that no version counter shows."""
        self._unseen_writes += 1

    def share(self, stepped: StepCount) -> None:
        """Count steps in ``stepped`` from now on. The version only rises."""
        self._unseen_writes += self.stepped.steps + 1
        self.stepped = stepped


def note_held(members: Iterable[ModelParameter]) -> None:
    """Note what the program has of parameters that are about to move, also what no call showed
    (``p.to_local().detach()``, a state dict of before :mod:`internsp.fsdp`'s first forward)."""
    owner: dict[Tensor, Any] = {m.parameter._local_tensor: m for m in members}  # type: ignore[attr-defined]
    for local, held in tensors_over(owner):
        member = owner[local]
        known = member.parameter, member._counter, member._counter._local_tensor, member.storage
        if not any(held is each for each in known):
            note_alias(member.aliases, held)


class SlotViews(NamedTuple):
    """The bytes of a weight in a slot, in the dtype of its last gather.

    Attributes:
        flat: all of them, padded and flat.
        unsharded: without padding, in the weight's shape.
        own_bits: those of this rank's rows, as integers.
    """

    flat: Tensor
    unsharded: Tensor
    own_bits: Tensor


class ShardedParameter(ModelParameter):
    """A parameter of which this rank holds a shard.

    ``storage`` is the padded shard ``[rows, ...]``, contiguous, sharded dimension first; the
    module's parameter is a ``DTensor`` whose local tensor is a view of the valid rows.

    If ranks own different experts, ``layout`` describes this rank's unsharded weight, and the
    ``DTensor`` has the weights of all ranks one after another on dimension 0. If the layer is
    tensor parallel, ``layout`` describes this tensor rank's part.

    Attributes:
        reduced: its reduced gradient.
        compute_dtype: dtype in which it is gathered now; the shard is cast before (WP-1).
        base_compute_dtype: ``compute_dtype`` where no autocast changes it.
        sent_as: configured dtype of its reductions; ``None``: the compute dtype, as always in a
            weight group of one.
        reduce_dtype: dtype of its reductions now.
        gradient_bytes: bytes of the padded gradient in that dtype.
        trained: whether it required a gradient when the last forward began, or the backward that
            runs, on all ranks: it has a reduction.
        needs_wait: whether its gather comes from other ranks or the host, and is waited for.
        needs_gather: false if the shard already is the unsharded weight.
        autocasts: whether an active autocast decides the compute dtype (a linear layer's weight).
        unit: the unit in which it is gathered: its block, or one outside of the blocks.
        slices: number of near ranks that keep slices of it after a step's first gather, or 0.
        encoding: how its shard travels, if not as its values.
        of_class: whether its shard is of a class of its own, and ``storage`` has no values
            (:class:`internsp.wp.extended.ExtendedParameter`).
        used_version: version and dtype of its contents in the slot; ``None`` if there are none.
        in_slot: views of its bytes in the slot (:meth:`internsp.wp.slots.Slot.acquire`).
    """

    slices = 0
    of_class = False
    encoding: Encoding | None = None
    unit: Unit
    in_slot: SlotViews

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
        super().__init__(name, parameter, axis, layout.shape, device, offload)
        self.layout = layout
        self.sent_as = sent_as if layout.size > 1 else None
        self.base_compute_dtype = compute_dtype or parameter.dtype
        self.compute_in(self.base_compute_dtype)
        self.needs_wait = layout.size > 1 or self.hosted
        self.needs_gather = self.needs_wait or self.compute_dtype != parameter.dtype
        # torch itself autocasts a weight that needs no gather, as on one process.
        self.autocasts = autocasts and self.compute_dtype == torch.float32 and self.needs_gather
        self.reduced = ReducedGradient(layout.shard_shape, link if GRADIENTS in offload else None)
        self.used_version: VersionAndDtype | None = None
        storage = self._make_storage(parameter, link)
        self._flat = storage.data.view(-1)
        shape = (layout.shape[0] * axis.expert, *layout.shape[1:])
        if self.tensor is not None:
            shape = self.tensor.shape
        self.trained = parameter.requires_grad
        self._register(storage, Shard(layout.dim), shape, self.trained)

    def _make_storage(self, parameter: nn.Parameter, link: HostLink | None) -> Tensor:
        """The padded shard of ``parameter``'s values."""
        if self.hosted and link is not None:
            storage = link.zeros(WEIGHTS, self.layout.shard_shape, parameter.dtype)
        else:
            storage = self.zeros(parameter.dtype)
        if parameter.device.type != "meta":
            with torch.no_grad():
                rows = self.layout.cut(own_part(parameter), self.rank)
                storage[: len(rows)].copy_(rows)
        return storage

    @property
    def rank(self) -> int:
        """This rank's number in the weight group."""
        return self.axis.rank

    @property
    def hosted(self) -> bool:
        """Whether the shard (``storage`` and the parameter) lies in host memory."""
        return WEIGHTS in self.offload

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the padded unsharded weight in the configured compute dtype."""
        return self.layout.padded_numel * self.base_compute_dtype.itemsize

    def views_in(self, place: Tensor) -> SlotViews:
        """Views of its bytes in a slot, ``place``, in the compute dtype."""
        nbytes = self.layout.padded_numel * self.compute_dtype.itemsize
        flat = place[:nbytes].view(self.compute_dtype)
        count = self.layout.shard_numel
        own = bits_of(flat.narrow(0, self.rank * count, count))
        return SlotViews(flat, self.layout.unsharded_view(flat), own)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Gather it in ``dtype`` from now on, and reduce its gradients in it unless configured."""
        self.compute_dtype, self.reduce_dtype = dtype, self.sent_as or dtype
        self.gradient_bytes = self.layout.padded_numel * self.reduce_dtype.itemsize

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """Zeros like the padded shard, on the device that computes."""
        return torch.zeros(self.layout.shard_shape, dtype=dtype, device=self.device)

    def local(self, storage: Tensor) -> Tensor:
        """The valid rows of a tensor like ``storage``, dimensions in the parameter's order."""
        layout = self.layout
        rows = storage[: layout.valid_rows(self.rank)] if layout.padded else storage
        return rows.movedim(0, layout.dim) if layout.dim else rows

    def own(self, values: Tensor) -> Tensor:
        """See :class:`ModelParameter`."""
        values = super().own(values)
        if self.tensor is None:  # other ranks' experts lie before and behind this rank's
            count = self.layout.shape[0]
            values = values.narrow(0, self.axis.expert_rank * count, count)
        return self.layout.cut(values, self.rank).movedim(0, self.layout.dim)

    def hold(self, storage: Tensor) -> None:
        """See :class:`ModelParameter`."""
        super().hold(storage)
        self._flat = storage.data.view(-1)

    def current_version(self) -> VersionAndDtype:
        """Version and dtype that contents of a slot must have to be this weight's (WP-11)."""
        return self.version(), self.compute_dtype

    def require_version(self, used_version: VersionAndDtype) -> None:
        """Check that the values are still those of ``used_version``, which a view of this weight
        was made from: its backward computes with them (WP-14). Restores the view's dtype.

        Raises:
            StaleWeightError: the values have changed since.
        """
        version, dtype = used_version
        if dtype is not self.compute_dtype:  # autocast had set this dtype in the view's forward
            self.compute_in(dtype)
        if version != self.version():
            raise stale(self.name, dist.get_rank())

    def agrees(self) -> bool:
        """Whether this rank's rows of what was gathered still have the bits of the shard.

        Also true if the versions differ: :meth:`require_version` notices this.
        """
        if self.used_version != (self.version(), self.compute_dtype):
            return True
        shard, dtype, own = self.fresh(), self.in_slot.flat.dtype, self.in_slot.own_bits
        sent = shard if shard.dtype == dtype else shard.to(dtype)
        return torch.equal(own, sent.view(own.dtype))

    def read(self) -> Tensor:
        """The unsharded weight, with a version counter of its own: an alias of its bytes in the
        slot, or of its shard if that needs no gather."""
        if self.needs_gather:
            return self.in_slot.unsharded.data
        # ``.data`` also makes it no view of another tensor for autograd.
        return self.layout.unsharded_view(self.to_send()).data

    def to_send(self) -> Tensor:
        """Input of an all-gather: the padded shard, flat, in the compute dtype, fresh (WP-3).

        In a weight group of one in its own dtype: the copy into the slot does the cast. Sets
        ``used_version``.
        """
        dtype = self.compute_dtype
        self.used_version = self.version(), dtype
        fresh = self.fresh()
        return fresh if fresh.dtype == dtype or self.layout.size == 1 else fresh.to(dtype)

    def fresh(self) -> Tensor:
        """The padded shard, flat, in its own dtype, after the optimizer's all-gather (WP-3)."""
        if self.ready is not None:
            self.wait_until_ready()
        local = self.parameter._local_tensor  # type: ignore[attr-defined]
        # Without rows on this rank it has no address, and a copy would raise the version.
        if local.numel() and local.data_ptr() != self.storage.data_ptr():
            # A program gave the parameter's local tensor other storage (`.data =`, `to_empty`).
            if local.dtype != self.dtype:
                raise StructureError(
                    f"{self.name} was cast from {self.dtype} to {local.dtype} after parallelize(): "
                    "cast the model before, or set weight_parallel.compute_dtype"
                )
            self.local(self.storage).copy_(local)
        return self._flat


class ReplicatedParameter(ModelParameter):
    """A parameter of which every rank holds a replica; a ``DTensor`` on the mesh of dense weights.

    There is nothing to gather, so that it is its own communicator to layers (the methods are those
    of :class:`internsp.wp.communicator.WPCommunicator`).

    Args:
        compute_dtype: the dtype that its module computes in; ``None``: the parameter's own.

    Attributes:
        axis: the axis of dense weights, over whose ZeRO group an optimizer shards its state.
        used_version: the version at its last use; -1 before the first.
        sums: adds up the gradients of replicated parameters, this one's at ``index``
            (:class:`internsp.wp.replicated.ReplicatedParameters`).
        total: its part of that sum, in its shape, once there is one.
    """

    shares_slot = False  # a write by the user is noticed when its gradient is ready
    sums: ReplicatedParameters
    index: int
    total: Tensor | None = None

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        mesh: ParallelMesh,
        compute_dtype: torch.dtype | None,
    ) -> None:
        mine = own_part(parameter)
        super().__init__(name, parameter, mesh.dense, mine.shape, mesh.device)
        # Layers call what is defined below, and no more, for a weight that shares no slot.
        self.assign(cast("WPCommunicator[ReplicatedParameter]", self))
        self.compute_dtype = compute_dtype or parameter.dtype
        self.used_version = -1
        storage = torch.zeros(mine.shape, dtype=parameter.dtype, device=mesh.device)
        if parameter.device.type != "meta":
            storage.copy_(mine)
        self._register(storage, Replicate(), parameter.shape, parameter.requires_grad)

    def require_version(self, used_version: int) -> None:
        """Check that the values are still those of ``used_version`` (WP-14).

        Raises:
            StaleWeightError: the values have changed since.
        """
        if used_version != self.version():
            raise stale(self.name, dist.get_rank())

    # as a communicator: ``weight`` is this parameter itself

    @property
    def weight_part(self) -> bool:
        """See :attr:`internsp.wp.communicator.WPCommunicator.weight_part`."""
        return self.sums.events.weight_part

    def unshard(self, weight: ReplicatedParameter) -> Tensor:
        """The local replica, in the compute dtype, fresh (WP-3)."""
        if self.ready is not None:
            self.wait_until_ready()
        local: Tensor = self.parameter._local_tensor.data  # type: ignore[attr-defined]
        self.used_version = self.version()
        # `.to()` of the same dtype would return the tensor, too, but takes time to find out.
        return local if local.dtype == self.compute_dtype else local.to(self.compute_dtype)

    def may_unshard_in_backward(self, weight: ReplicatedParameter) -> bool:
        """Always true."""
        return True

    def on_grad_ready(self, weight: ReplicatedParameter, gradient: Tensor) -> None:
        """Add this rank's gradient to the flat gradient."""
        sums = self.sums
        if sums.events.backward < 0:
            sums.events.begin_at_gradient()
        if not self.frozen:
            self.add_gradient(gradient)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add a gradient of this rank to the flat gradient. No message."""
        sums = self.sums
        if sums.streams:
            sums.take_turn()
        total = sums.views()[self.index] if self.total is None else self.total
        total.add_(gradient)
        sums.given.add(self.index)


Member = ReplicatedParameter | ShardedParameter
"""A parameter of a parallel model."""


def trained(members: Iterable[Member]) -> list[bool]:
    """``requires_grad`` of each parameter, read in one call."""
    return read_each(_requires_grad, [member.parameter for member in members])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of ``flat`` in the shapes of ``like``; one call, faster than a split and views."""
    views: Sequence[Tensor] = torch._utils._unflatten_dense_tensors(flat, like)
    return views


def stale(name: str, rank: int) -> StaleWeightError:
    """The error for a weight that changed between its use in forward and its backward (WP-14)."""
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
