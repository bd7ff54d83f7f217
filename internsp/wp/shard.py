"""One sharded weight: its layout, padding and DTensor parameter (DESIGN 4, "what it is").

A weight ``[n, ...]`` is cut on one dimension into ``ceil(n / W)`` rows a rank. Only the global
tail is padded, so a gather of the padded shards *is* the padded whole, in one piece::

    n = 5, W = 4    rank 0: r0 r1   rank 1: r2 r3   rank 2: r4 --   rank 3: -- --
    gathered slot   r0 r1 r2 r3 r4 -- -- --         whole = the first 5 rows, contiguous

For a cut on another dimension the shard is kept with that dimension first, and the whole is a
transposed view of the slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from internsp.errors import LayoutError, StaleWeightError, StructureError
from internsp.mesh import WeightAxis
from internsp.wp.parameter import Aliases, own, part

Tag = tuple[int, torch.dtype]


@dataclass(frozen=True)
class ShardLayout:
    """Pure arithmetic of one cut weight.

    Attributes:
        shape: of the unsharded weight.
        dim: the dimension that is cut (not negative).
        size: ranks in the weight group.
    """

    shape: tuple[int, ...]
    dim: int
    size: int

    @classmethod
    def create(cls, shape: tuple[int, ...], dim: int, size: int) -> ShardLayout:
        """Normalise ``dim`` (negative counts from the end).

        Raises:
            LayoutError: when ``dim`` is out of range.
        """
        if not -len(shape) <= dim < len(shape):
            raise LayoutError(f"cannot cut dimension {dim} of a weight of shape {list(shape)}")
        return cls(tuple(shape), dim % len(shape), size)

    @cached_property
    def front(self) -> tuple[int, ...]:
        """The shape with the cut dimension first."""
        return (self.shape[self.dim], *self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @cached_property
    def rows(self) -> int:
        """Rows of every padded shard."""
        return math.ceil(self.shape[self.dim] / self.size)

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Of the padded shard, cut dimension first."""
        return (self.rows, *self.front[1:])

    @cached_property
    def padded(self) -> bool:
        """Whether the tail of the gathered whole is padding."""
        return self.size * self.rows != self.shape[self.dim]

    @cached_property
    def shard_numel(self) -> int:
        """Elements of the padded shard."""
        return math.prod(self.shard_shape)

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the padded unsharded weight: what a slot holds and a gather moves."""
        return self.size * self.shard_numel

    def valid_rows(self, rank: int) -> int:
        """Rows of ``rank``'s shard that are not padding (may be zero)."""
        return min(max(self.shape[self.dim] - rank * self.rows, 0), self.rows)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """``rank``'s rows of ``whole``, without padding, cut dimension first (a view)."""
        start = min(rank * self.rows, self.shape[self.dim])
        return whole.movedim(self.dim, 0).narrow(0, start, self.valid_rows(rank))

    def unsharded_view(self, padded: Tensor) -> Tensor:
        """The unsharded weight as a view of the flat, padded, gathered elements."""
        rows = padded[: self.padded_numel].view(self.size * self.rows, *self.front[1:])
        return rows[: self.shape[self.dim]].movedim(0, self.dim)

    def pack(self, gradient: Tensor, out: Tensor) -> None:
        """Write an unsharded gradient into ``out`` (flat, padded) with a zero tail."""
        flat = out.view(self.size * self.rows, *self.front[1:])
        flat[: self.shape[self.dim]].copy_(gradient.movedim(self.dim, 0))
        flat[self.shape[self.dim] :].zero_()

    def add(self, gradient: Tensor, out: Tensor) -> None:
        """Add an unsharded gradient to ``out``, as :meth:`pack` has made it."""
        flat = out.view(self.size * self.rows, *self.front[1:])
        flat[: self.shape[self.dim]].add_(gradient.movedim(self.dim, 0))

    def in_rows(self, gradient: Tensor) -> bool:
        """Whether ``gradient``'s rows are, as they lie, those of the shards."""
        return self.dim == 0 and gradient.is_contiguous()

    def packed_as_is(self, gradient: Tensor) -> Tensor | None:
        """``gradient`` flat, as it travels, without a copy, or ``None`` if it needs one."""
        if self.padded:
            return None
        front = gradient.movedim(self.dim, 0) if self.dim else gradient
        return front.view(-1) if front.is_contiguous() else None


class ShardedParameter:
    """A parameter at rest as this rank's rows.

    ``storage`` is the padded shard ``[rows, ...]``, contiguous, cut dimension first; the module's
    parameter is a ``DTensor`` whose local tensor is a view of its valid rows.

    Where ranks own different experts, ``layout`` is of this rank's unsharded weight, and the
    ``DTensor`` is of all ranks' weights of that name, one after another on dimension 0.

    Attributes:
        name: fully qualified, of the first owner when several modules share the weight.
        axis: along which it is cut; dense weights and experts may have different ones.
        reduced_grad: the gradient summed from finished reductions so far in this backward, like
            ``storage`` but fp32 or wider (unless ``borrowed``); ``None`` before the first reduction
            is finished.
        borrowed: ``reduced_grad`` is autograd's own tensor; see :meth:`own_reduced_grad`.
        ready: set by an optimizer that is still publishing: waits until ``storage`` is new (WP-3).
        compute_dtype: what a gather moves; the shard is cast before it travels (WP-1).
        sent_as: what its gradient is reduced in; ``None``: in the compute dtype.
        slot_nbytes: bytes of the padded whole in the configured compute dtype.
        device_type: where it computes.
        moves: whether it is gathered: false where the shard is the unsharded weight already.
        autocasts: whether an active autocast decides the compute dtype (a linear layer's weight).
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        layout: ShardLayout,
        axis: WeightAxis,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        autocasts: bool,
    ) -> None:
        self.name = name
        self.layout = layout
        self.axis = axis
        self.rank = axis.rank
        self._valid = layout.valid_rows(axis.rank)
        self.dtype = parameter.dtype
        self.compute_dtype = compute_dtype or parameter.dtype
        self.base_compute_dtype = self.compute_dtype
        self.sent_as: torch.dtype | None = None
        self.slot_nbytes = layout.padded_numel * self.compute_dtype.itemsize
        self.moves = layout.size > 1 or self.compute_dtype != self.dtype
        # A weight that is whole at rest is autocast by torch itself, as on one process.
        self.autocasts = autocasts and self.compute_dtype == torch.float32 and self.moves
        self.device_type = device.type
        self.reduced_grad: Tensor | None = None
        self.borrowed = False
        self.ready: Ready | None = None
        self.meet: Callable[[str], None] | None = None
        self.aliases: Aliases = {}
        self._generation = 0
        self.storage = torch.zeros(layout.shard_shape, dtype=self.dtype, device=device)
        if parameter.device.type != "meta":
            with torch.no_grad():
                rows = layout.cut(parameter.detach(), self.rank)
                self.storage[: len(rows)].copy_(rows)
        self._flat = self.storage.data.view(-1)
        shape = (layout.shape[0] * axis.expert, *layout.shape[1:])
        whole = DTensor.from_local(
            self.local(self.storage),
            axis.param_mesh,
            axis.placements(layout.dim),
            run_check=False,
            shape=torch.Size(shape),
            stride=_strides(shape),
        )
        self.parameter = own(nn.Parameter(whole, requires_grad=parameter.requires_grad), self)

    def wrap(self, storage: Tensor) -> DTensor:
        """A tensor like ``storage`` as a ``DTensor`` like the parameter (no copy, no message)."""
        return dtensor_like(self.parameter, self.local(storage))

    def local(self, storage: Tensor) -> Tensor:
        """The valid rows of a tensor like ``storage``, dimensions in the parameter's order."""
        rows = storage if self._valid == self.layout.rows else storage[: self._valid]
        return rows.movedim(0, self.layout.dim) if self.layout.dim else rows

    def rows_of(self, values: Tensor) -> Tensor:
        """This rank's rows of whole values in the parameter's shape, cut dimension first."""
        count = self.layout.shape[0]
        own = values.narrow(0, self.axis.expert_rank * count, count)
        return self.layout.cut(own, self.rank)

    def relocate(self, storage: Tensor) -> None:
        """Move the shard into ``storage`` (same shape): an optimizer packs a unit's shards."""
        storage.copy_(self.storage)
        self.storage, self._flat = storage, storage.data.view(-1)
        # `.data =` on a DTensor leaves its local tensor where it was.
        self.parameter._local_tensor.data = self.local(storage)  # type: ignore[attr-defined]

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained, now: a user may freeze and thaw it."""
        return self.parameter.requires_grad

    @property
    def trained(self) -> bool:
        """See :class:`internsp.wp.schedule.Weight`."""
        return self.parameter.requires_grad

    @property
    def travels(self) -> bool:
        """See :class:`internsp.wp.schedule.Weight`."""
        return self.layout.size > 1

    @property
    def gradient_bytes(self) -> int:
        """See :class:`internsp.wp.schedule.Weight`."""
        return self.layout.padded_numel * self.reduce_dtype.itemsize

    def version(self) -> int:
        """A number that changes whenever the shard's values may have (see :func:`version_of`)."""
        return version_of(self.parameter) + self._generation

    def tag(self) -> Tag:
        """What a slot with this weight holds: the same values in two dtypes differ (WP-11)."""
        return version_of(self.parameter) + self._generation, self.compute_dtype

    def follow_autocast(self) -> None:
        """Before a use: under autocast a linear layer's weight travels in its dtype (WP-1).

        Decided where the weight is used, because autocast may surround a part of the model only;
        what is gathered ahead takes the dtype of the last use.
        """
        active = torch.is_autocast_enabled(self.device_type)
        self.compute_dtype = (
            torch.get_autocast_dtype(self.device_type) if active else self.base_compute_dtype
        )

    def invalidate(self) -> None:
        """The shard was written behind autograd's back."""
        self._generation += 1

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What a reduction moves; with nobody to send to, the gradient stays as it is."""
        if self.sent_as is None or self.layout.size == 1:
            return self.compute_dtype
        return self.sent_as

    def to_send(self) -> Tensor:
        """The padded shard, flat, in the compute dtype, fresh (WP-3): what a gather reads."""
        fresh = self.fresh()
        # With nobody to send to, the copy into the slot casts.
        alone = self.layout.size == 1
        return fresh if alone or self.dtype == self.compute_dtype else fresh.to(self.compute_dtype)

    def fresh(self) -> Tensor:
        """The padded shard, flat, in its own dtype, once an optimizer has published it (WP-3)."""
        if self.ready is not None:
            ready, self.ready = self.ready, None
            ready.wait()
        local = self.parameter._local_tensor  # type: ignore[attr-defined]
        if local.data_ptr() != self.storage.data_ptr():
            # Somebody gave the parameter's local tensor other storage (`.data =`, `to_empty`).
            if local.dtype != self.dtype:
                raise StructureError(
                    f"{self.name} was cast from {self.dtype} to {local.dtype} after parallelize(): "
                    "cast the model before, or set weight_parallel.compute_dtype"
                )
            self.local(self.storage).copy_(local)
        return self._flat

    def take(self, values: Tensor) -> None:
        """Copy values, whole or a ``DTensor`` placed alike, into the shard.

        Raises:
            LayoutError: they have another shape or placement.
        """
        self.fresh()  # what an optimizer still publishes would overwrite them
        local = local_of(self.name, values, self.parameter)
        if local is None:
            local = self.rows_of(values.detach()).movedim(0, self.layout.dim)
        part(self.parameter, self.aliases, values)
        with torch.no_grad():
            self.local(self.storage).copy_(local.detach())

    def add_reduced_grad(self, total: Tensor) -> None:
        """Add ``total`` (like ``storage``, fp32 or wider), which is given away."""
        before = self.reduced_grad
        self.reduced_grad = total if before is None else self.own_reduced_grad().add_(total)

    def borrow_grad(self, gradient: Tensor) -> None:
        """:meth:`add_reduced_grad` of autograd's own tensor, not copied until it is changed."""
        if self.reduced_grad is not None:
            self.own_reduced_grad().add_(gradient.view(self.layout.shard_shape))
            return
        self.reduced_grad, self.borrowed = gradient.view(self.layout.shard_shape), True

    def own_reduced_grad(self) -> Tensor:
        """``reduced_grad``, to be changed in place: fp32 or wider, and memory of its own."""
        assert self.reduced_grad is not None, "the caller has looked"
        if self.borrowed:
            wide = torch.promote_types(self.reduced_grad.dtype, torch.float32)
            self.reduced_grad, self.borrowed = self.reduced_grad.to(wide, copy=True), False
        return self.reduced_grad

    def drop_reduced_grad(self) -> None:
        """Forget the sum."""
        self.reduced_grad, self.borrowed = None, False


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of ``flat`` in the shapes of ``like``, in one call: a split and views take longer."""
    views: Sequence[Tensor] = torch._utils._unflatten_dense_tensors(flat, like)
    return views


def version_of(parameter: nn.Parameter) -> int:
    """Counts the writes to a ``DTensor`` parameter that autograd knows of.

    Operations on the ``DTensor`` raise its own version counter, operations on its local tensor
    that one's. What raises neither (``foreach`` and fused operations, ``.data``) must be told to
    the parameter's owner by ``invalidate``.
    """
    return parameter._version + parameter._local_tensor._version  # type: ignore[attr-defined]


def local_of(name: str, values: Tensor, parameter: nn.Parameter) -> Tensor | None:
    """The local part of ``values``, or ``None`` when they are whole and plain.

    Raises:
        LayoutError: they do not fit ``parameter``.
    """
    placements = parameter.placements  # type: ignore[attr-defined]
    if values.shape != parameter.shape:
        raise LayoutError(
            f"{name} has shape {list(parameter.shape)}, the given values {list(values.shape)}"
        )
    if not isinstance(values, DTensor):
        return None
    if values.placements != placements:
        raise LayoutError(
            f"{name} is placed {placements}, the given values {values.placements}: redistribute "
            "them first"
        )
    return values._local_tensor


def dtensor_like(parameter: nn.Parameter, local: Tensor) -> DTensor:
    """``local`` as a ``DTensor`` placed like ``parameter``, in its own dtype.

    Not by ``from_local``, which takes ten times as long, for every gradient of every step; nor by
    ``DTensor()``, whose ``__init__`` does nothing but keep the compiler out.
    """
    spec = parameter._spec  # type: ignore[attr-defined]
    if local.dtype != parameter.dtype:
        meta = spec.tensor_meta
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride
        )
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


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


class Ready:
    """What a publishing optimizer leaves on a shard: ``wait`` makes it readable (WP-3)."""

    def wait(self) -> None:
        """Block (CPU) or order streams until the new values are in the shard."""
        raise NotImplementedError


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.insert(0, step)
        step *= n
    return tuple(strides)
