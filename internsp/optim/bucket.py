"""A bucket: one unit's parameters in one flat buffer, cut into equal slices over the ZeRO group.

::

    flat     | w1 w1 w1 . | w2 w2 | w3 w3 w3 w3 . . |      (. = padding)
    slices   |    ZeRO rank 0    |    ZeRO rank 1   |
    segments   w1, w2[:1]           w2[1:], w3             one tensor of the inner optimizer each

Gradients are reduce-scattered by bucket, and new values are all-gathered by bucket; optimizer state
exists for this rank's segments only (ZeRO, Rajbhandari et al., arXiv 1910.02054). A segment never
spans two parameters, so that each parameter keeps its own settings and its own step count, and can
be skipped when it was not used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from internsp.base.host import GRADIENTS, OPTIMIZER, WEIGHTS, HostLink, HostSum
from internsp.base.stand_in import copied
from internsp.errors import StructureError
from internsp.mesh import ParallelMesh
from internsp.optim.methods import Method
from internsp.optim.slices import Region
from internsp.optim.verdict import Verdict
from internsp.schedule.layout import laid_out
from internsp.wp.collectives import Collectives, Handle, gather_slices
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ShardedParameter
from internsp.wp.perform import Chunk


@dataclass(eq=False)
class Segment:
    """The part of one parameter that lies in this rank's slice.

    Attributes:
        tensor: 1-D view of the slice's master values, on which the inner optimizer works.
        start, stop: its index range in the slice.
        offset: index of the same element in the parameter's own flat storage.
    """

    member: Member
    tensor: Tensor
    start: int
    stop: int
    offset: int

    @cached_property
    def region(self) -> Region:
        """The index ranges of the segment in the unsharded parameter."""
        return Region(self.member, self.offset, self.offset + self.tensor.numel())


class ParameterAllGather:
    """A bucket's parameter all-gather in flight, ``ready`` of all its members (WP-3)."""

    def __init__(self, collectives: Collectives, handle: Handle, bucket: Bucket) -> None:
        self._collectives, self._handle, self._bucket = collectives, handle, bucket

    @property
    def done(self) -> bool:
        """Whether no reader has to wait any more; on a device each stream that reads has to."""
        return self._handle.work is None and self._handle.arrival is None

    def wait(self) -> None:
        """Wait on the current stream (CPU: block) until all new values have arrived."""
        self._collectives.wait(self._handle, self._bucket.name, "", "publish")
        self._handle.keep = ()
        if self.done:  # once is enough, and later reads cost nothing
            for member in self._bucket.offsets:
                member.ready = None


class Bucket:
    """One unit's parameters of one kind, in one flat buffer.

    A kind is: dtype, axis, the tensor ranks that hold different values, what is offloaded, the
    other stages with which a weight is tied, and the class of the optimizer. The constructor moves
    the parameters' storage into ``flat``, without communication.

    Args:
        members: of one kind.
        group_index: index of each parameter's group in ``param_groups``.
        order: when forward needs it, among all buckets.

    Attributes:
        axis: the weight axis, over whose ZeRO group ``flat`` is cut into slices.
        method: the class of the optimizer that steps these parameters.
        replicated: whether they are replicated parameters, whose gradients are all-reduced over all
            ranks before they reach the bucket.
        counted: whether the gradient norm counts this rank's: not the copies of a tied weight on
            later stages, nor those of what several ranks hold alike on all but the first.
        flat: the parameters' storage, padded to a multiple of the ZeRO degree.
        gaps: padding within ``flat``, as ranges of elements.
        owned: this rank's slice of ``flat``.
        master: the same slice in fp32 or wider; ``owned`` itself where that is wide enough.
        gradient: the slice's reduced gradient, like ``master``; ``None`` when there is none.
        offload: what lies in host memory: ``flat`` (weights); ``master``, where it is a copy, and
            the state (optimizer); ``gradient`` (gradients).
        link: copies between the device and host memory; ``None`` without offload.
        host_sum: the accumulator in host memory that holds ``gradient``, where gradients are
            offloaded.
        inner: the optimizer of the segments; ``None`` when the slice is all padding, or where each
            matrix's state lies with its owner (:mod:`internsp.optim.matrices`).
        groups: the indices of the groups that ``inner`` has, in its order.
        host_state: offloaded state in host memory: by the state's name, a 1-D tensor as long as
            ``master``.
    """

    def __init__(
        self,
        name: str,
        members: list[Member],
        group_index: dict[Member, int],
        mesh: ParallelMesh,
        method: Method,
        order: int,
        link: HostLink | None = None,
    ) -> None:
        self.name, self.method, self.group_index, self.order = name, method, group_index, order
        dtype, axis = members[0].dtype, members[0].axis
        numels = [member.storage.numel() for member in members]
        starts, length = laid_out(numels, dtype.itemsize, axis.zero)
        self.axis, self.offsets = axis, dict(zip(members, starts, strict=True))
        filled = [start + numel for start, numel in zip(starts, numels, strict=True)]
        self.gaps = list(zip(filled, [*starts[1:], length * axis.zero], strict=True))
        self.offload = members[0].offload
        self.link = link = link if self.offload else None

        def zeros(what: str, numel: int, dtype: torch.dtype) -> Tensor:
            if link is not None and what in self.offload:
                return link.zeros(what, (numel,), dtype)
            return torch.zeros(numel, dtype=dtype, device=mesh.device)

        self.flat = flat = zeros(WEIGHTS, length * axis.zero, dtype)
        for member, start in self.offsets.items():
            part = flat[start : start + member.storage.numel()]
            member.relocate(part.view(member.storage.shape))
        self.owned = flat[axis.zero_rank * length : (axis.zero_rank + 1) * length]
        wide = torch.promote_types(dtype, torch.float32)
        self.master = self.owned
        if wide != dtype:
            self.master = zeros(OPTIMIZER, length, wide)
            self.master.copy_(self.owned)
        self.host_sum = HostSum(link, length, wide) if link and GRADIENTS in self.offload else None
        self.replicated = not isinstance(members[0], ShardedParameter)
        alone = axis.replica_rank < axis.zero and (axis.rank == 0 or not self.replicated)
        self.counted = _counted(members[0], mesh) and alone
        self.segments = _segments(self.offsets, self.master)
        self.gradient: Tensor | None = None
        self.inner: torch.optim.Optimizer | None = None
        self.groups: list[int] = []
        self.host_state: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of reduced gradients before they are cut into slices, in fp32 or wider."""
        return self.flat.numel() * self.master.element_size()

    @property
    def has_master(self) -> bool:
        """Whether ``master`` is a copy in fp32, as the parameters are 16-bit."""
        return self.master is not self.owned

    @property
    def reduced(self) -> Tensor:
        """``gradient`` where reductions are finished."""
        assert self.gradient is not None, "finish_reductions gives each bucket a gradient"
        return self.gradient

    @property
    def hosted(self) -> bool:
        """Whether the weights lie in host memory."""
        return WEIGHTS in self.offload

    @property
    def master_hosted(self) -> bool:
        """Whether the master values lie in host memory."""
        return (OPTIMIZER if self.has_master else WEIGHTS) in self.offload

    def host_state_slice(self, segment: Segment, name: str, dtype: torch.dtype) -> Tensor:
        """Where state ``name`` of a segment lies in host memory; allocated on first use."""
        assert self.link is not None, "the caller checks"
        if name not in self.host_state:
            self.host_state[name] = self.link.zeros(OPTIMIZER, (self.master.numel(),), dtype)
        return self.host_state[name][segment.start : segment.stop]

    def copy_to_state_memory(self, segment: Segment, name: str, value: Any) -> Any:
        """A copy of ``value``, a state of ``segment``, where such state lies: in host memory if the
        optimizer state is offloaded, else on the device; tensors without dimensions where they are.
        """
        if not isinstance(value, Tensor):
            return value
        if not value.dim():
            return value.detach().clone()
        if OPTIMIZER in self.offload:
            return self.host_state_slice(segment, name, value.dtype).copy_(value)
        return value.detach().to(self.device, copy=True)

    @property
    def device(self) -> torch.device:
        """The device on which the step is computed."""
        return self.master.device if self.link is None else self.link.device

    def make_inner(self, settings: list[dict[str, Any]]) -> None:
        """Make the optimizer of this rank's segments with the settings of their groups."""
        self.groups = sorted({self.group_index[s.member] for s in self.segments})
        if self.groups and self.method.slice_optimizer is not None:
            self.inner = self.method.slice_optimizer(
                [
                    {
                        **copied(settings[g]),
                        "params": [
                            s.tensor for s in self.segments if self.group_index[s.member] == g
                        ],
                    }
                    for g in self.groups
                ]
            )

    def merge_external_writes(self, masters: bool = True) -> None:
        """Take over values that were written to the parameters, not by the optimizer, since its
        last step.

        A parameter may have new storage (``.data =``), and 16-bit values may have been loaded or
        edited: where they differ from the rounded master, they replace it.

        Args:
            masters: whether to update 16-bit parameters' masters too. The step of offloaded buckets
                does that itself, on the device.
        """
        for member in self.offsets:
            local = member.parameter._local_tensor  # type: ignore[attr-defined]
            if local.numel() and local.data_ptr() != member.storage.data_ptr():
                member.local(member.storage).copy_(local)
                member.relocate(member.storage)
        if self.has_master and masters:
            self.merge_into_master(self.master, self.owned.to(self.master.device))

    @staticmethod
    def merge_into_master(master: Tensor, owned: Tensor) -> None:
        """Write ``owned`` into ``master`` where it differs from the rounded master."""
        same = master.to(owned.dtype) == owned
        # Both of one dtype, and in place: a third of the bytes of a step is this comparison.
        torch.where(same, master, owned.to(master.dtype), out=master)

    def add_gradient(self, total: Tensor, dropped: Sequence[Member]) -> None:
        """Add ``total``, with zeros for ``dropped``, to the gradient. ``total`` is like
        ``gradient``, on the device; the bucket may keep its memory, so the caller must not use it
        again."""
        for member in dropped:
            self.zero_range(total, member)
        if self.host_sum is not None:
            if self.gradient is None:
                self.host_sum.clear()
            self.host_sum.add(total)
            self.gradient = self.host_sum.values
        else:
            self.gradient = total if self.gradient is None else self.gradient.add_(total)

    def set_settings(self, settings: list[dict[str, Any]]) -> None:
        """Give the inner optimizer the current settings of its groups, before each of its steps: it
        may change what it keeps there, and offloaded buckets are stepped in several pieces."""
        if self.inner is not None:
            for inner, index in zip(self.inner.param_groups, self.groups, strict=True):
                inner.update(copied(settings[index]))

    def begins(self, used: set[Member]) -> bool:
        """Whether a step of ``used`` is some segment's first, which makes its state."""
        return self.inner is not None and any(
            s.member in used and s.tensor not in self.inner.state for s in self.segments
        )

    def step(self, used: set[Member], verdict: Verdict) -> None:
        """One step of the inner optimizer as ``verdict`` says."""
        if self.inner is None:
            return
        inner = self.inner
        self.scale_gradient(self.take(verdict))
        gradient = self.reduced
        for segment in self.segments:
            if segment.member in used:  # unused parameters are skipped, as torch skips `.grad` None
                segment.tensor.grad = gradient[segment.start : segment.stop]
        inner.step()
        if verdict.found_inf is not None:
            self.note_stepped([s for s in self.segments if s.tensor.grad is not None])
        for segment in self.segments:
            segment.tensor.grad = None
        self.copy_master_to_owned()

    def take(self, verdict: Verdict) -> float | Tensor:
        """Let ``inner``'s steps take ``verdict`` from the device. Returns the factor that is left
        for the gradient."""
        inner: Any = self.inner
        inner.found_inf, inner.grad_scale = verdict.found_inf, None
        if isinstance(verdict.factor, Tensor) and self.master.dtype == torch.float32:
            inner.grad_scale = verdict.divisor  # it divides: no pass of its own over the gradient
            return 1.0
        return verdict.factor

    def note_stepped(self, segments: Sequence[Segment]) -> None:
        """Give ``segments`` an entry in ``inner``'s state, also those of SGD without momentum: a
        later step is not their first (:meth:`begins`)."""
        assert self.inner is not None, "it has stepped"
        for segment in segments:
            self.inner.state[segment.tensor]

    def scale_gradient(self, factor: float | Tensor) -> None:
        """Multiply the gradient by ``factor``."""
        if isinstance(factor, Tensor) or factor != 1.0:
            self.reduced.mul_(factor)

    def copy_master_to_owned(self) -> None:
        """Write the new master values to the 16-bit parameters, rounded."""
        if self.has_master:
            self.owned.copy_(self.master)

    def all_gather_slices(self, own: Tensor) -> dict[Member, Tensor]:
        """All-gather a slice that is laid out like ``gradient``: for each member the values, like
        its storage.

        Collective over the ZeRO group; blocks.
        """
        full = torch.empty(self.flat.numel(), dtype=own.dtype, device=self.device)
        work = gather_slices(full, own.to(self.device), self.axis.zero_group)
        if work is not None:
            work.wait()
        return {
            member: full[start : start + member.storage.numel()].view(member.storage.shape)
            for member, start in self.offsets.items()
        }

    def write_slice(self, own: Tensor, member: Member, values: Tensor) -> None:
        """Write into ``own``, a slice like ``gradient``, its part of ``values`` (like
        ``member``'s storage)."""
        flat = values.view(-1)
        for segment in self.segments:
            if segment.member is member:
                part = flat[segment.offset : segment.offset + segment.tensor.numel()]
                own[segment.start : segment.stop].copy_(part)

    def zero_range(self, slice_: Tensor, member: Member) -> None:
        """Set the part of ``member`` in ``slice_``, a slice like ``gradient``, to zero."""
        for segment in self.segments:
            if segment.member is member:
                slice_[segment.start : segment.stop].zero_()

    def publish(self, chunk: Chunk) -> None:
        """Start the all-gather of the new slices; later unshards of the members wait for it
        (WP-3)."""
        # `.data`: the collective must not raise a version counter that saved tensors share.
        flat, own = self.flat.data, self.owned.data
        link = self.link if self.hosted and self.axis.zero > 1 else None
        if link is not None:
            link.finish_copies_to_host()  # among them this step's copy of the slice
            flat = torch.empty_like(flat, device=link.device)
            begin = self.axis.zero_rank * own.numel()
            here = flat[begin : begin + own.numel()]
            link.copy_to_device([(here, own)]).wait()
            own = here
        publication = chunk.between[self.axis].publication
        handle = publication.all_gather_parameters(flat, own, self.name)
        if link is not None:  # copied back to host memory at once: device memory is scarce
            chunk.collectives.wait(handle, self.name, "", "publish")
            handle.keep = ()
            link.copy_to_host([(self.flat, flat)])
        all_gather = ParameterAllGather(chunk.collectives, handle, self)
        ready = None if all_gather.done else all_gather
        aliased = False
        for member in self.offsets:
            member.ready = ready
            aliased = aliased or bool(member.aliases)
        if aliased:  # and read without a call of ours
            all_gather.wait()

    def state_nbytes(self) -> int:
        """Bytes of the master values, and of state with one element for each of a weight's."""
        total = self.master.numel() * self.master.element_size() if self.has_master else 0
        if self.inner is None:
            return total
        values = [v for state in self.inner.state.values() for v in state.values()]
        return total + sum(v.nbytes for v in values if isinstance(v, Tensor) and v.dim())


def _segments(offsets: dict[Member, int], master: Tensor) -> list[Segment]:
    """This rank's slice as segments: the parameters' own elements, without padding."""
    length = master.numel()
    begin = next(iter(offsets)).axis.zero_rank * length
    segments = []
    for member, start in offsets.items():
        valid = member.local(member.storage).numel()  # padded rows come last
        first, last = max(start, begin), min(start + valid, begin + length)
        if first < last:
            tensor = master[first - begin : last - begin]
            segments.append(Segment(member, tensor, first - begin, last - begin, first - start))
    return segments


def _over_tensor_ranks(member: Member) -> tuple[Any, ...]:
    """Over which mesh, and which of its dimensions; empty: tensor ranks hold the same values."""
    part = member.tensor
    return () if part is None or not part.sharded else (part.mesh, *part.sharded)


def _counted(member: Member, mesh: ParallelMesh) -> bool:
    """Whether the norm counts this rank's part: of several copies the first one.

    Raises:
        StructureError: the norm's sum over tensor ranks would leave parts of it out.
    """
    part, owned = member.tensor, mesh.shape.experts_over_tensor and member.axis is mesh.experts
    ranks = {mesh.rank} if part is None else {*part.mesh.mesh.flatten().tolist()}
    if not owned and not ranks.issubset(mesh.model_ranks):
        raise StructureError(
            f"{member.name} lies on tensor ranks {sorted(ranks)}, other weights on "
            f"{mesh.tensor_ranks} (this is rank {mesh.rank}), and a ZeroOptimizer's norm is over "
            "one group of tensor ranks: take a torch optimizer in a plain loop"
        )
    first = owned or mesh.tensor_ranks[0] in ranks  # else another rank outside of it counts
    return member.counted and first and (part is None or part.first)


def make_buckets(
    communicator: ISPCommunicator,
    members: Collection[Member],
    group_index: dict[Member, int],
    methods: Sequence[Method],
) -> list[Bucket]:
    """The buckets of ``members``, in the order in which forward needs them: replicated, embedding,
    blocks, head.

    Args:
        group_index: index of each parameter's group in ``param_groups``; the buckets keep it.
        methods: the optimizer of each group.
    """
    units: list[tuple[str, list[Member]]] = [("small", list(communicator.replicated.members))]
    if communicator.embedding is not None:
        units.append((communicator.embedding.unit.name, list(communicator.embedding.unit.weights)))
    units += [(unit.name, list(unit.weights)) for unit in communicator.blocks]
    if communicator.head is not None:
        units.append((communicator.head.unit.name, list(communicator.head.unit.weights)))
    known = {member for _, members in units for member in members}
    remaining: list[Member] = [w for w in communicator.replicated.sharded if w not in known]
    # Where in forward these run is unknown: all-gathered first, so that none waits for long.
    units.insert(1, ("others", remaining))
    buckets, placed = [], set[Member]()
    for order, (name, of_unit) in enumerate(units):
        # A tied weight is in two units. It has one storage and one gradient, the sum over both
        # uses, so it goes into one bucket: that of the unit which forward needs first.
        trained = [m for m in of_unit if m in members and m not in placed]
        placed.update(trained)
        mesh = communicator.mesh
        # Slices of a weight that is tied over stages must end at the same elements on all stages:
        # such a weight has a bucket of its own.
        kinds = [
            (m.dtype, m.axis, _over_tensor_ranks(m), m.offload, m.tied, methods[group_index[m]])
            for m in trained
        ]
        for kind in dict.fromkeys(kinds):
            same = [m for m, k in zip(trained, kinds, strict=True) if k == kind]
            link = communicator.state.link
            buckets.append(Bucket(name, same, group_index, mesh, kind[-1], order, link))
    assert len(placed) == len(members), "optimizer_groups() refuses any other parameter"
    return buckets
