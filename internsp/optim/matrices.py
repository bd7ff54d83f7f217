"""Steps that need a whole matrix: each has one owner, to which the ranks send their parts of it.

A weight's elements lie in slices over its weight ranks and, within each shard, over their ZeRO
ranks (:mod:`internsp.optim.bucket`). Of these ``n`` ranks one is its owner: it has the optimizer's
state of it, receives values and gradient, steps, and sends the new values back. Of torch's Muon it
receives and sends the update alone, and state stays in slices (:mod:`internsp.optim.muon`). As many
matrices as there are ranks are one round, of which every rank owns one at the most::

    round 0    gather 0   .   step 0      scatter 0   .                  .
    round 1       .    gather 1   .         step 1    scatter 1          .
    round 2       .       .    gather 2       .         step 2    scatter 2

A round is gathered while the one before it is stepped, and its new values leave while the next one
is: two whole matrices are on a rank at a time, and the values of a third leave. Rounds, owners and
the order of messages follow from the model and the mesh alone: they are the same on all ranks
(WP-2). Masters and gradients stay in slices, as they are for elementwise optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.mesh import ParallelMesh
from internsp.optim import muon
from internsp.optim.bucket import Bucket, Segment
from internsp.optim.slices import Slices
from internsp.optim.state_names import Names
from internsp.wp.collectives import Collectives, Handle
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ShardedParameter

State = dict[str, Any]
Place = tuple[int, int, int]
"""A rank's number in a group, its weight rank and its ZeRO rank."""


@dataclass(eq=False)
class Matrix:
    """What is stepped as one: a parameter, or one matrix of a stack.

    Attributes:
        index: in the stack; 0 where the parameter is one.
        shape: as the optimizer sees it.
        dim: the dimension that comes first in storage.
        pieces: first element and number of elements by rank of the group.
        start: of this rank's piece, in its bucket's slice.
        owner: rank in the group.
        inner: its optimizer, on its owner; ``None`` elsewhere, and where state is in slices.
        tensor: what that steps; without memory between two steps.
        segment: of this rank, in which its piece lies; ``None``: it has none.
    """

    member: Member
    bucket: Bucket
    index: int
    shape: tuple[int, ...]
    dim: int
    group: int
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    start: int = 0
    owner: int = -1
    inner: torch.optim.Optimizer | None = None
    tensor: Tensor | None = None
    segment: Segment | None = None

    @property
    def split(self) -> bool:
        """Whether its state is in slices, and only the update travels."""
        return self.bucket.method.on_slices is not None

    @property
    def sent(self) -> tuple[int, torch.dtype]:
        """How many tensors like it travel to its owner (one comes back), and in which dtype."""
        return (1, muon.SENT) if self.split else (2, self.bucket.master.dtype)

    def pieces_to_send(self, numel: int, settings: Mapping[str, Any]) -> list[Tensor]:
        """This rank's piece of what its owner needs."""
        bucket, reach = self.bucket, slice(self.start, self.start + numel)
        assert bucket.gradient is not None, "finish_reductions gives each bucket a gradient"
        if not self.split:
            return [bucket.master[reach], bucket.gradient[reach]]
        assert isinstance(bucket.inner, muon.MuonSlices), "what Method.on_slices says"
        assert self.segment is not None, "its piece lies in one"
        momentum = bucket.inner.momentum(self.segment.tensor)
        own = momentum[self.start - self.segment.start :][:numel]
        return [muon.update(own, bucket.gradient[reach], settings)]

    def take_piece(self, values: Tensor, settings: Mapping[str, Any]) -> None:
        """Make this rank's piece new by what its owner has sent."""
        piece = self.bucket.master[self.start : self.start + values.numel()]
        if self.split:
            muon.apply(piece, values, self.shape, settings)
        else:
            piece.copy_(values)

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def cost(self) -> int:
        """Operations of a step, as far as matrices are multiplied."""
        return self.numel * (min(self.shape[-2:]) if len(self.shape) > 1 else 1)

    @property
    def state(self) -> State:
        """The live state, on its owner; empty before its first step, and on other ranks."""
        if self.inner is None or self.tensor is None or self.tensor not in self.inner.state:
            return {}
        return self.inner.state[self.tensor]

    @property
    def _front(self) -> tuple[int, ...]:
        at = self.dim
        return (self.shape[at], *self.shape[:at], *self.shape[at + 1 :]) if self.shape else ()

    def whole(self, flat: Tensor) -> Tensor:
        """Its elements, in the order of storage, in its shape, contiguous."""
        return flat.view(self._front).movedim(0, self.dim).contiguous() if self.shape else flat[0]

    def flat(self, whole: Tensor) -> Tensor:
        """The reverse of :meth:`whole`."""
        return (whole.movedim(self.dim, 0) if self.shape else whole).reshape(-1)

    @cached_property
    def box(self) -> tuple[int, ...]:
        """Of each dimension of the parameter, the first index: where it lies in there."""
        parameter: Any = self.member.parameter
        offset = [0] * parameter.dim()
        member = self.member
        if isinstance(member, ShardedParameter) and member.axis.expert > 1:
            offset[0] = member.axis.expert_rank * member.layout.shape[0]
        if len(self.shape) < len(offset):
            offset[0] += self.index
        return tuple(offset)

    def take(self, state: State) -> None:
        """On its owner: go on from ``state``, which is given away; empty: none was taken yet."""
        assert self.inner is not None, "on its owner"
        assert self.tensor is not None, "made with it"
        self.inner.state.pop(self.tensor, None)
        if state:
            self.inner.state[self.tensor] = state

    def slices(self, values: Tensor) -> Slices:
        """State of this matrix, as :mod:`torch.distributed.checkpoint` takes it."""
        parameter = self.member.parameter
        if values.shape != self.shape:  # of the whole: rows' and columns' statistics, and the like
            return Slices(values.shape, values, {(0,) * values.dim(): values})
        boxed = values.view(*(1,) * (parameter.dim() - values.dim()), *values.shape)
        return Slices(parameter.shape, values, {self.box: boxed})

    def make(self, settings: Mapping[str, Any]) -> None:
        """On its owner: make the optimizer."""
        like = self.bucket.master
        self.tensor = torch.zeros(self.shape, dtype=like.dtype, device=like.device)
        self.inner = self.bucket.method.make(self.tensor, settings)
        self.rest()

    def rest(self) -> None:
        """Let go of what a step needed."""
        assert self.tensor is not None, "on its owner"
        # Some optimizers make state like the parameter at their first step: its shape is kept, but
        # of one element's memory.
        self.tensor.grad = None
        self.tensor.data = self.tensor.new_zeros(()).expand(self.shape)

    def step(self, arrived: list[Tensor], settings: Mapping[str, Any]) -> Tensor:
        """What its owner makes of what the pieces are, put together (flat, as in storage).

        Args:
            arrived: given away: emptied.
        """
        if self.split:
            return self.flat(muon.orthogonalized(self.whole(arrived.pop()), settings))
        assert self.inner is not None, "on its owner"
        assert self.tensor is not None, "made with it"
        self.inner.param_groups[0].update(settings)
        gradient = self.whole(arrived.pop())
        self.tensor.data = self.whole(arrived.pop())
        self.tensor.grad = gradient
        try:
            self.inner.step()
            return self.flat(self.tensor.data)
        finally:
            self.rest()


@dataclass
class Arrival:
    """Parts of one round's matrices on their way to their owners, or back.

    Attributes:
        received: of several kinds, one after another, by rank.
    """

    handle: Handle
    received: Tensor
    sent: Tensor


class Round:
    """Matrices of which each rank of a group owns one at the most.

    Args:
        collectives: of the group; this rank's number in it is ``collectives.rank``.
    """

    def __init__(self, number: int, matrices: Sequence[Matrix], collectives: Collectives) -> None:
        self.name = f"matrices {number}"
        self.matrices = sorted(matrices, key=lambda matrix: matrix.owner)
        self._collectives = collectives

    @property
    def own(self) -> Matrix | None:
        """The one that this rank owns."""
        rank = self._collectives.rank
        return next((matrix for matrix in self.matrices if matrix.owner == rank), None)

    def gather(
        self,
        pieces: Callable[[Matrix, int], Sequence[Tensor]],
        number: int,
        dtype: torch.dtype,
        taking: Sequence[Matrix],
    ) -> Arrival:
        """Start sending this rank's pieces to the owners.

        Args:
            pieces: of a matrix what is sent, ``number`` tensors of so many elements in ``dtype``.
            taking: the round's matrices that take part, in its order, the same on all ranks.
        """
        rank, size = self._collectives.rank, self._collectives.size
        parts: list[Tensor] = []
        sent, received = [0] * size, [0] * size
        for matrix in taking:
            numel = self._numel(matrix)
            sent[matrix.owner] = numel * number
            if numel:
                parts += pieces(matrix, numel)
            if matrix.owner == rank:
                for peer, (_, count) in matrix.pieces.items():
                    received[peer] = count * number
        return self._launch(taking, parts, received, sent, number, dtype)

    def gathered(self, arrival: Arrival, number: int) -> list[Tensor]:
        """On an owner, after the wait: each kind of its matrix, flat, as in storage."""
        self.wait(arrival)
        own = self.own
        assert own is not None, "the caller has looked"
        found = [arrival.received.new_empty(own.numel) for _ in range(number)]
        at = 0
        for _, (first, count) in sorted(own.pieces.items()):
            for whole in found:
                whole[first : first + count].copy_(arrival.received[at : at + count])
                at += count
        arrival.received = arrival.received.new_empty(0)  # before the step
        return found

    def scatter(
        self, whole: Tensor | None, dtype: torch.dtype, taking: Sequence[Matrix]
    ) -> Arrival:
        """Start sending the owners' matrices back to where their pieces lie.

        Args:
            whole: this rank's own one, flat; ``None``: it has none that takes part.
        """
        rank, size = self._collectives.rank, self._collectives.size
        parts, sent, received = [], [0] * size, [0] * size
        for matrix in taking:
            received[matrix.owner] = self._numel(matrix)
            if matrix.owner == rank:
                assert whole is not None, "its owner has stepped it"
                for peer, (first, count) in sorted(matrix.pieces.items()):
                    sent[peer] = count
                    parts.append(whole[first : first + count])
        return self._launch(taking, parts, received, sent, 1, dtype)

    def scattered(
        self, arrival: Arrival, taking: Sequence[Matrix]
    ) -> Iterator[tuple[Matrix, Tensor]]:
        """After the wait: this rank's piece of each matrix, where it has one."""
        self.wait(arrival)
        at = 0
        for matrix in taking:
            numel = self._numel(matrix)
            if numel:
                yield matrix, arrival.received[at : at + numel]
                at += numel

    def wait(self, arrival: Arrival) -> None:
        """Wait on the current stream (CPU: block)."""
        self._collectives.wait(arrival.handle, self.name, "", "step")
        arrival.handle.keep, arrival.sent = (), arrival.sent.new_empty(0)

    def _numel(self, matrix: Matrix) -> int:
        return matrix.pieces.get(self._collectives.rank, (0, 0))[1]

    def _launch(
        self,
        taking: Sequence[Matrix],
        parts: Sequence[Tensor],
        received: list[int],
        sent: list[int],
        number: int,
        dtype: torch.dtype,
    ) -> Arrival:
        empty = taking[0].bucket.master.new_empty(0, dtype=dtype)
        packed = torch.cat(list(parts)) if parts else empty
        # In a group of one nothing travels.
        arrived = packed
        if self._collectives.size > 1:
            arrived = packed.new_empty(sum(received))
        total = sum(matrix.numel for matrix in taking) * number * dtype.itemsize
        handle = self._collectives.exchange_parts(
            arrived, packed, received, sent, self.name, taking[0].member.name, total
        )
        return Arrival(handle, arrived, packed)


class MatrixSteps:
    """All whole-matrix steps of one communicator's parameters.

    Args:
        buckets: all of them; those of elementwise methods are passed over.

    Attributes:
        matrices: in the order of the model.
        rounds: in the order of their steps: those that cost most first.
    """

    def __init__(
        self,
        communicator: ISPCommunicator,
        buckets: Sequence[Bucket],
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        state, mesh = communicator.state, communicator.mesh
        self._trace = state.trace
        self._names: dict[tuple[int, torch.dtype, tuple[int, ...]], Names] = {}
        self.matrices: list[Matrix] = []
        self.rounds: list[Round] = []
        alike: dict[tuple[str, int, torch.dtype], list[Matrix]] = {}
        groups: dict[str, Collectives] = {}
        load: dict[str, dict[int, int]] = {}
        for bucket in buckets:
            if not bucket.method.whole:
                continue
            group, places = _places(bucket, mesh)
            name = group.group_name
            if name not in groups:
                shared = state.collectives
                groups[name] = Collectives(
                    group, shared.overlap, state.trace, state.counters, shared.ledger, mesh.device
                )
                load[name] = dict.fromkeys(sorted(peer for peer, _, _ in places), 0)
            for member, start in bucket.offsets.items():
                for made in _matrices(member, bucket, start, places, groups[name].rank):
                    alike.setdefault((name, *made.sent), []).append(made)
                    self.matrices.append(made)
        for (group_name, *_), matrices in alike.items():
            self._form_rounds(matrices, groups[group_name], load[group_name])
        self.own: list[Matrix] = []
        for each in self.rounds:
            if each.own is not None and not each.own.split:
                each.own.make(settings[each.own.group])
                self.own.append(each.own)

    @property
    def held(self) -> list[Matrix]:
        """Those whose state is their owners'."""
        return [matrix for matrix in self.matrices if not matrix.split]

    def _form_rounds(
        self, matrices: list[Matrix], collectives: Collectives, load: dict[int, int]
    ) -> None:
        """Matrices of about the same cost in one round; each goes to who has least so far."""
        order = sorted(matrices, key=lambda matrix: -matrix.cost)  # stable: then as in the model
        for first in range(0, len(order), len(load)):
            some = order[first : first + len(load)]
            free = sorted(load, key=lambda peer: (load[peer], peer))
            for matrix, peer in zip(sorted(some, key=lambda m: -m.numel), free, strict=False):
                matrix.owner = peer
                load[peer] += matrix.numel
            self.rounds.append(Round(len(self.rounds), some, collectives))

    def step(
        self,
        used: set[Member],
        settings: Sequence[Mapping[str, Any]],
        meanwhile: Callable[[], None],
        done: Callable[[Bucket], None],
    ) -> None:
        """Step what was ``used``; buckets have their gradients as they are to be taken.

        Collective; blocks.

        Args:
            meanwhile: called when the first messages are on their way.
            done: called with each bucket when this rank's slice of it is new.
        """
        left = dict.fromkeys([matrix.bucket for matrix in self.matrices], 0)
        for matrix in self.matrices:
            left[matrix.bucket] += matrix.member in used
        some = [(each, [m for m in each.matrices if m.member in used]) for each in self.rounds]
        some = [(each, taking) for each, taking in some if taking]

        def gather(number: int) -> Arrival | None:
            if number == len(some):
                return None
            each, taking = some[number]
            return each.gather(
                lambda matrix, numel: matrix.pieces_to_send(numel, settings[matrix.group]),
                *taking[0].sent, taking,
            )  # fmt: skip

        coming = gather(0)
        meanwhile()
        for bucket, count in left.items():
            if not count:
                done(bucket)
        leaving: tuple[Round, list[Matrix], Arrival] | None = None
        for number, (each, taking) in enumerate(some):
            assert coming is not None, "launched a round before"
            here, coming = coming, gather(number + 1)
            new = self._stepped(each, taking, here, settings)
            del here  # its memory
            self._arrive(leaving, left, settings, done)
            leaving = each, taking, each.scatter(new, taking[0].sent[1], taking)
        self._arrive(leaving, left, settings, done)

    def _stepped(
        self,
        each: Round,
        taking: Sequence[Matrix],
        coming: Arrival,
        settings: Sequence[Mapping[str, Any]],
    ) -> Tensor | None:
        own = each.own
        if own is None or own not in taking:
            each.wait(coming)
            return None
        arrived = each.gathered(coming, own.sent[0])
        start = self._trace.now()
        new = own.step(arrived, settings[own.group])
        self._trace.record("STEP", own.member.name, start=start, end=self._trace.now())
        return new

    def _arrive(
        self,
        leaving: tuple[Round, list[Matrix], Arrival] | None,
        left: dict[Bucket, int],
        settings: Sequence[Mapping[str, Any]],
        done: Callable[[Bucket], None],
    ) -> None:
        """New values come back to this rank's slices."""
        if leaving is None:
            return
        each, taking, back = leaving
        for matrix, values in each.scattered(back, taking):
            matrix.take_piece(values, settings[matrix.group])
        for matrix in taking:
            left[matrix.bucket] -= 1
            if not left[matrix.bucket]:
                matrix.bucket.round_off()
                done(matrix.bucket)

    # state

    def names(self, matrix: Matrix, settings: Sequence[Mapping[str, Any]]) -> Names:
        """What its state consists of: found out once for each shape, by a step of a stand-in."""
        like = matrix.bucket.master
        key = matrix.group, like.dtype, matrix.shape
        if key not in self._names:
            stand_in = like.new_zeros(matrix.shape)
            cls = matrix.bucket.method.cls
            self._names[key] = Names(stand_in, cls, dict(settings[matrix.group]))
        return self._names[key]

    def spread(self, settings: Sequence[Mapping[str, Any]]) -> dict[Bucket, dict[str, Tensor]]:
        """State that has an element for each of a parameter's, as slices like masters. Collective;
        blocks."""
        found: dict[Bucket, dict[str, Tensor]] = {}
        for each, name, dtype, taking in self._kinds(settings):
            own, whole = each.own, None
            like = taking[0].bucket.master.new_empty(0, dtype=dtype)
            if own in taking:
                assert own is not None, "it is in the list"
                value = own.state.get(name)
                whole = like.new_zeros(own.numel) if value is None else own.flat(value)
            back = each.scatter(whole, dtype, taking)
            for matrix, values in each.scattered(back, taking):
                of = found.setdefault(matrix.bucket, {})
                if name not in of:
                    of[name] = torch.zeros_like(matrix.bucket.master, dtype=dtype)
                of[name][matrix.start : matrix.start + values.numel()].copy_(values)
        return found

    def bring(
        self,
        slices: Mapping[Bucket, Mapping[str, Tensor]],
        settings: Sequence[Mapping[str, Any]],
    ) -> dict[Matrix, State]:
        """The reverse of :meth:`spread`: of each matrix of this rank what it is given. Collective;
        blocks."""
        found: dict[Matrix, State] = {matrix: {} for matrix in self.own}
        for each, name, dtype, taking in self._kinds(settings):

            def piece(matrix: Matrix, numel: int, name: str = name) -> list[Tensor]:
                return [slices[matrix.bucket][name][matrix.start : matrix.start + numel]]

            coming = each.gather(piece, 1, dtype, taking)
            own = each.own
            if own is None or own not in taking:
                each.wait(coming)
            else:
                found[own][name] = own.whole(each.gathered(coming, 1)[0])
        return found

    def _kinds(
        self, settings: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[Round, str, torch.dtype, list[Matrix]]]:
        for each in self.rounds:
            held = [matrix for matrix in each.matrices if not matrix.split]
            of = {matrix: self.names(matrix, settings).slices for matrix in held}
            for name, dtype in sorted({(n, d) for s in of.values() for n, d in s.items()}, key=str):
                yield each, name, dtype, [m for m in held if of[m].get(name) == dtype]

    def state_nbytes(self) -> int:
        """Of this rank's matrices."""
        values = [v for matrix in self.own for v in matrix.state.values()]
        return sum(v.nbytes for v in values if isinstance(v, Tensor) and v.dim())


def _places(bucket: Bucket, mesh: ParallelMesh) -> tuple[dist.ProcessGroup, list[Place]]:
    """A group that has all ranks among which a bucket's parameters are cut, and their places.

    It may have more ranks than these: of other owners of experts, and those that hold the same
    slices, which exchange their own matrices in the same rounds.
    """
    axis = bucket.axis
    ranks = range(axis.zero)
    if bucket.small or axis.size == 1:  # weight ranks hold the same of what is replicated
        return axis.zero_group, [(z, 0, z) for z in ranks]
    if axis.zero == 1:
        return axis.weight_group, [(w, w, 0) for w in range(axis.size)]
    first = axis.replica_rank // axis.zero * axis.zero
    return mesh.stage_group, [
        (((first + z) * axis.expert + axis.expert_rank) * axis.size + w, w, z)
        for z in ranks
        for w in range(axis.size)
    ]


def _matrices(
    member: Member, bucket: Bucket, start: int, places: Sequence[Place], rank: int
) -> list[Matrix]:
    """What is stepped as one of ``member``, which begins at ``start`` in the bucket's storage."""
    shape, dim, shard, rows = tuple(member.shape), 0, 0, member.storage.numel()
    if isinstance(member, ShardedParameter):
        layout = member.layout
        dim, shard, rows = layout.dim, layout.shard_numel, math.prod(layout.front[1:])
    count = 1
    if bucket.method.stacks and len(shape) == 3:
        count, shape = shape[0], shape[1:]
    numel, length = math.prod(shape), bucket.master.numel()
    found = []
    for index in range(count):
        made = Matrix(member, bucket, index, shape, dim, bucket.group_of(member))
        begin = index * numel
        for peer, w, z in places:
            valid = rows
            if isinstance(member, ShardedParameter):
                valid = member.layout.valid_rows(w) * rows
            # In the bucket's storage: the slice's, the parameter's own, and the matrix's elements.
            at = start + begin - w * shard
            low = max(z * length, start, at)
            high = min((z + 1) * length, start + valid, at + numel)
            if low < high:
                made.pieces[peer] = low - at, high - low
                if peer == rank:
                    made.start = low - z * length
                    made.segment = next(s for s in bucket.segments if s.member is member)
        found.append(made)
    return found
