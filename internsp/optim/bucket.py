"""A unit's parameters in one flat piece of memory, cut into equal slices over the ZeRO group.

::

    flat     | w1 w1 w1 . | w2 w2 | w3 w3 w3 w3 . . |      (. = padding)
    slices   |    ZeRO rank 0    |    ZeRO rank 1   |
    segments   w1, w2[:1]           w2[1:], w3             one inner tensor each

Gradients travel by bucket, new values are published by bucket; optimizer state exists for this
rank's segments only (ZeRO, Rajbhandari et al., arXiv 1910.02054). A segment never spans two
parameters, so that each keeps its own settings, its own step count and its own "was not used".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from internsp.host import GRADIENTS, OPTIMIZER, WEIGHTS, HostLink, HostSum
from internsp.mesh import ParallelMesh, WeightAxis
from internsp.optim.methods import Method
from internsp.optim.slices import Region
from internsp.wp.collectives import Collectives, Handle, gather_slices
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.layout import laid_out
from internsp.wp.parameter import Member, ShardedParameter

_Place = tuple[frozenset[str], HostLink | None, torch.device]


@dataclass(eq=False)
class Segment:
    """The part of one parameter that lies in this rank's slice.

    Attributes:
        tensor: 1-D view of the slice's master values: what the inner optimizer works on.
        start: its first element in the slice.
        offset: its first element in the parameter's own flat storage.
        group: index of its settings.
    """

    member: Member
    tensor: Tensor
    start: int
    offset: int
    group: int

    @property
    def stop(self) -> int:
        """The end of it in the slice."""
        return self.start + self.tensor.numel()

    @cached_property
    def region(self) -> Region:
        """Where it lies in the whole parameter."""
        return Region.of(self.member, self.offset, self.offset + self.tensor.numel())


class Publication:
    """A bucket's all-gather in flight. All its members wait for the same one (WP-3)."""

    def __init__(self, collectives: Collectives, handle: Handle, unit: str) -> None:
        self._collectives = collectives
        self._handle = handle
        self._unit = unit

    @property
    def done(self) -> bool:
        """Whether it need not be waited for."""
        return self._handle.done

    def wait(self) -> None:
        """Wait on the current stream (CPU: block) until the whole bucket is new."""
        self._collectives.wait(self._handle, self._unit, "", "publish")
        self._handle.keep = ()


@dataclass(eq=False)
class Bucket:
    """One unit's parameters of one kind (dtype, axis, tensor parallel or not, what is offloaded,
    tied to which other stages' weights or to none, by which optimizer they are stepped).

    Moves their storage into ``flat`` when made.

    Attributes:
        axis: whose ZeRO group cuts it.
        method: the class of its optimizer.
        small: whether they are replicated: their gradient is summed over all ranks already.
        tensor: whether tensor ranks hold different values of them.
        flat: their storage, padded to a multiple of the ZeRO degree.
        gaps: padding within ``flat``, as ranges.
        owned: this rank's slice of ``flat``.
        master: the slice in fp32 or wider; ``owned`` itself where that is wide enough.
        gradient: the slice's reduced sum, like ``master``; ``None`` when there is none.
        offload: what lies in host memory: ``flat`` (weights); ``master``, where it is a copy, and
            the state (optimizer); ``gradient`` (gradients).
        link: copies that.
        sum: what ``gradient`` is a part of, where that is offloaded.
        inner: the optimizer of the segments; ``None`` when the slice is all padding, or where the
            state is that of whole matrices (:mod:`internsp.optim.matrices`).
    """

    name: str
    axis: WeightAxis
    method: Method
    small: bool
    tensor: bool
    flat: Tensor
    offsets: dict[Member, int]
    gaps: list[tuple[int, int]]
    owned: Tensor
    master: Tensor
    segments: list[Segment]
    offload: frozenset[str] = frozenset()
    link: HostLink | None = None
    sum: HostSum | None = None
    gradient: Tensor | None = None
    inner: torch.optim.Optimizer | None = None
    place: dict[Member, int] = field(default_factory=dict)
    groups: list[int] = field(default_factory=list)
    slabs: dict[str, Tensor] = field(default_factory=dict)
    """Offloaded state by its name, like ``master``."""

    @classmethod
    def create(
        cls,
        name: str,
        members: list[Member],
        place: dict[Member, int],
        mesh: ParallelMesh,
        method: Method,
        link: HostLink | None = None,
    ) -> Bucket:
        """Lay ``members`` (of one kind) out and move their storage. No message."""
        dtype, axis = members[0].dtype, members[0].axis
        numels = [member.storage.numel() for member in members]
        starts, length = laid_out(numels, dtype.itemsize, axis.zero)
        offsets = dict(zip(members, starts, strict=True))
        filled = [start + numel for start, numel in zip(starts, numels, strict=True)]
        gaps = list(zip(filled, [*starts[1:], length * axis.zero], strict=True))
        offload = members[0].offload
        link = link if offload else None
        place_of = offload, link, mesh.device
        flat = _zeros(WEIGHTS, place_of, length * axis.zero, dtype)
        for member, start in offsets.items():
            part = flat[start : start + member.storage.numel()]
            member.relocate(part.view(member.storage.shape))
            member.invalidate()
        owned = flat[axis.zero_rank * length : (axis.zero_rank + 1) * length]
        wide = torch.promote_types(dtype, torch.float32)
        master = owned
        if wide != dtype:
            master = _zeros(OPTIMIZER, place_of, length, wide)
            master.copy_(owned)
        total = HostSum(link, length, wide) if link and GRADIENTS in offload else None
        small, tensor = not isinstance(members[0], ShardedParameter), _tensor(members[0])
        segments = _segments(offsets, master, place)
        return cls(
            name, axis, method, small, tensor, flat, offsets, gaps, owned, master, segments,
            offload, link, total, place=place,
        )  # fmt: skip

    def group_of(self, member: Member) -> int:
        """The index of a member's settings."""
        return self.place[member]

    @property
    def counted(self) -> bool:
        """False of a tied weight's copy: another stage counts it."""
        return all(member.counted for member in self.offsets)

    @property
    def nbytes(self) -> int:
        """Of the shard's sums, in fp32 or wider."""
        return self.flat.numel() * self.master.element_size()

    @property
    def has_master(self) -> bool:
        """Whether 16-bit parameters have a copy in fp32."""
        return self.master is not self.owned

    @property
    def hosted(self) -> bool:
        """Whether the weights lie in host memory."""
        return WEIGHTS in self.offload

    @property
    def master_hosted(self) -> bool:
        """Whether the master values do."""
        return (OPTIMIZER if self.has_master else WEIGHTS) in self.offload

    def home(self, segment: Segment, name: str, dtype: torch.dtype) -> Tensor:
        """Where a segment's state of this name lies in host memory."""
        assert self.link is not None, "the caller has looked"
        if name not in self.slabs:
            self.slabs[name] = self.link.zeros(OPTIMIZER, (self.master.numel(),), dtype)
        return self.slabs[name][segment.start : segment.stop]

    def kept(self, segment: Segment, name: str, value: Any) -> Any:
        """``value`` of a segment's state, copied to where it belongs."""
        if not isinstance(value, Tensor):
            return value
        if not value.dim():
            return value.detach().clone()
        if OPTIMIZER in self.offload:
            return self.home(segment, name, value.dtype).copy_(value)
        return value.detach().to(self.device, copy=True)

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        return self.master.device if self.link is None else self.link.device

    def make_inner(self, settings: list[dict[str, Any]]) -> None:
        """Make the optimizer of this rank's segments with the settings of their groups."""
        self.groups = sorted({segment.group for segment in self.segments})
        if self.groups and self.method.on_slices is not None:
            self.inner = self.method.on_slices(
                [
                    {**settings[g], "params": [s.tensor for s in self.segments if s.group == g]}
                    for g in self.groups
                ]
            )

    def adopt(self, masters: bool = True) -> None:
        """Take over values that were written from outside since the last step.

        A parameter may have new storage (``.data =``), and 16-bit values may have been loaded or
        edited: where they are no longer the rounded master, they are the truth.

        Args:
            masters: of 16-bit values too; the step of what is offloaded does it on the device.
        """
        for member in self.offsets:
            local = member.parameter._local_tensor  # type: ignore[attr-defined]
            if local.numel() and local.data_ptr() != member.storage.data_ptr():
                member.local(member.storage).copy_(local)
                member.relocate(member.storage)
        if self.has_master and masters:
            self.master.copy_(self.adopted(self.master, self.owned.to(self.master.device)))

    @staticmethod
    def adopted(master: Tensor, owned: Tensor) -> Tensor:
        """``master``, but ``owned`` where that is no longer its rounded value."""
        return torch.where(master.to(owned.dtype) == owned, master, owned)

    def add(self, total: Tensor) -> None:
        """Add ``total``, like ``gradient`` but on the device and given away."""
        if self.sum is not None:
            if self.gradient is None:
                self.sum.clear()
            self.sum.add(total)
            self.gradient = self.sum.values
        else:
            self.gradient = total if self.gradient is None else self.gradient.add_(total)

    def configure(self, settings: list[dict[str, Any]]) -> None:
        """Give the inner optimizer the settings of its groups."""
        if self.inner is not None:
            for inner, index in zip(self.inner.param_groups, self.groups, strict=True):
                inner.update(settings[index])

    def update(self, used: set[Member], factor: float) -> None:
        """One step of the inner optimizer with ``factor`` times the gradient."""
        if self.inner is None:
            return
        self.scale(factor)
        assert self.gradient is not None, "finish_reductions gives each bucket a gradient"
        for segment in self.segments:
            if segment.member in used:  # an unused one is skipped, as torch skips grad None
                segment.tensor.grad = self.gradient[segment.start : segment.stop]
        self.inner.step()
        for segment in self.segments:
            segment.tensor.grad = None
        self.round_off()

    def scale(self, factor: float) -> None:
        """Multiply the gradient."""
        assert self.gradient is not None, "finish_reductions gives each bucket a gradient"
        if factor != 1.0:
            self.gradient.mul_(factor)

    def round_off(self) -> None:
        """Give 16-bit values what their new masters are."""
        if self.has_master:
            self.owned.copy_(self.master)

    def gathered(self, own: Tensor) -> dict[Member, Tensor]:
        """The members' parts of a slice like ``gradient``, each like its storage.

        Collective over the ZeRO group; blocks.
        """
        whole = torch.empty(self.flat.numel(), dtype=own.dtype, device=self.device)
        work = gather_slices(whole, own.to(self.device), self.axis.zero_group)
        if work is not None:
            work.wait()
        return {
            member: whole[start : start + member.storage.numel()].view(member.storage.shape)
            for member, start in self.offsets.items()
        }

    def put(self, own: Tensor, member: Member, values: Tensor) -> None:
        """Write into ``own``, a slice like ``gradient``, its part of ``values`` (like storage)."""
        flat = values.view(-1)
        for segment in self.segments:
            if segment.member is member:
                part = flat[segment.offset : segment.offset + segment.tensor.numel()]
                own[segment.start : segment.stop].copy_(part)

    def drop_gradient(self, member: Member) -> None:
        """Make zeros of what this rank's slice has of ``member``'s gradient."""
        assert self.gradient is not None, "the caller has looked"
        if self.link is not None:
            self.link.rest()
        self.zero(self.gradient, member)

    def zero(self, slice_: Tensor, member: Member) -> None:
        """Make zeros of what ``slice_``, like ``gradient``, has of ``member``'s."""
        for segment in self.segments:
            if segment.member is member:
                slice_[segment.start : segment.stop].zero_()

    def announce(self, publication: Publication) -> None:
        """New values are on their way: gathers wait for them, old slots are stale (WP-3, WP-11)."""
        for member in self.offsets:
            member.ready = None if publication.done else publication
            member.invalidate()

    def state_nbytes(self) -> int:
        """Bytes of master values, and of state that has an element for each of a weight's."""
        total = self.master.numel() * self.master.element_size() if self.has_master else 0
        if self.inner is None:
            return total
        values = [v for state in self.inner.state.values() for v in state.values()]
        return total + sum(v.nbytes for v in values if isinstance(v, Tensor) and v.dim())


def _zeros(what: str, like: _Place, numel: int, dtype: torch.dtype) -> Tensor:
    offload, link, device = like
    if link is not None and what in offload:
        return link.zeros(what, (numel,), dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


def _segments(
    offsets: dict[Member, int], master: Tensor, place: dict[Member, int]
) -> list[Segment]:
    """The parameters' own elements (no padding) within this rank's slice."""
    length = master.numel()
    begin = next(iter(offsets)).axis.zero_rank * length
    segments = []
    for member, start in offsets.items():
        valid = member.local(member.storage).numel()  # padded rows come last
        first, last = max(start, begin), min(start + valid, begin + length)
        if first < last:
            tensor = master[first - begin : last - begin]
            segments.append(Segment(member, tensor, first - begin, first - start, place[member]))
    return segments


def _tensor(member: Member) -> bool:
    return member.tensor is not None and member.tensor.cut


def make_buckets(
    communicator: ISPCommunicator, place: dict[Member, int], methods: Sequence[Method]
) -> list[Bucket]:
    """All buckets in the order in which forward needs them: small, embedding, blocks, head.

    Args:
        place: the group of each parameter.
        methods: of each group.
    """
    units: list[tuple[str, list[Member]]] = [("small", list(communicator.replicated.members))]
    if communicator.embedding is not None:
        units.append((communicator.embedding.unit.name, list(communicator.embedding.unit.weights)))
    units += [(unit.name, list(unit.weights)) for unit in communicator.blocks]
    if communicator.head is not None:
        units.append((communicator.head.unit.name, list(communicator.head.unit.weights)))
    known = {member for _, members in units for member in members}
    rest: list[Member] = [w for w in communicator.replicated.sharded if w not in known]
    # Where in forward they run is unknown: published first, so that no use waits for long.
    units.insert(1, ("others", rest))
    buckets, placed = [], set[Member]()
    for name, members in units:
        # A tied weight is in two units. It has one storage, and one gradient, which is the sum of
        # both uses': it belongs to the first that forward needs, and to no second bucket.
        trained = [m for m in members if m in place and m not in placed]
        placed.update(trained)
        mesh = communicator.mesh
        # Slices of a weight that other stages have too must end where theirs do: it goes alone.
        kinds = [
            (m.dtype, m.axis, _tensor(m), m.offload, m.tied, methods[place[m]])
            for m in trained
        ]
        for kind in dict.fromkeys(kinds):
            same = [m for m, k in zip(trained, kinds, strict=True) if k == kind]
            link = communicator.state.link
            buckets.append(Bucket.create(name, same, place, mesh, kind[-1], link))
    assert len(placed) == len(place), "assign() takes none that is not this communicator's"
    return buckets
