"""Steps that need a whole matrix: each has one owner, to which the ranks send their parts of it.

A weight's elements lie in slices over its weight ranks and, within each shard, over their ZeRO
ranks (:mod:`internsp.optim.bucket`). Of these ``n`` ranks one is a matrix's owner: it has the
optimizer's state of it, receives values and gradient, steps, and sends the new values back. As many
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket
from internsp.optim.slices import Slices
from internsp.optim.state_names import Names
from internsp.wp.collectives import Collectives, Handle
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import ShardedParameter
from internsp.wp.unfinished import Member

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
        inner: its optimizer, on its owner.
        tensor: what that steps; without memory between two steps.
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

    def step(self, values: Tensor, gradient: Tensor) -> Tensor:
        """One step of ``values`` (flat, as in storage); the new ones, alike."""
        assert self.inner is not None, "on its owner"
        assert self.tensor is not None, "made with it"
        self.tensor.data = self.whole(values)
        self.tensor.grad = self.whole(gradient)
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
        self, kinds: Callable[[Bucket], Sequence[Tensor]], number: int, of: Iterable[Matrix]
    ) -> Arrival | None:
        """Start sending this rank's pieces to the owners.

        Args:
            kinds: what is sent, slices like a bucket's ``master``.
            number: of them.
            of: the round's matrices that take part, the same on all ranks.
        """
        taking = [matrix for matrix in self.matrices if matrix in set(of)]
        rank, size = self._collectives.rank, self._collectives.size
        parts, sent, received = [], [0] * size, [0] * size
        for matrix in taking:
            numel = self._numel(matrix)
            sent[matrix.owner] = numel * number
            if numel:
                reach = slice(matrix.start, matrix.start + numel)
                parts += [values[reach] for values in kinds(matrix.bucket)]
            if matrix.owner == rank:
                for peer, (_, count) in matrix.pieces.items():
                    received[peer] = count * number
        return self._launch(taking, parts, received, sent, number, kinds)

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
        return found

    def scatter(self, whole: Tensor | None, like: Tensor, of: Iterable[Matrix]) -> Arrival | None:
        """Start sending the owners' matrices back to where their pieces lie.

        Args:
            whole: this rank's own one, flat; ``None``: it has none that takes part.
            like: dtype and device of what travels.
        """
        taking = [matrix for matrix in self.matrices if matrix in set(of)]
        rank, size = self._collectives.rank, self._collectives.size
        parts, sent, received = [], [0] * size, [0] * size
        for matrix in taking:
            received[matrix.owner] = self._numel(matrix)
            if matrix.owner == rank:
                assert whole is not None, "its owner has stepped it"
                for peer, (first, count) in sorted(matrix.pieces.items()):
                    sent[peer] = count
                    parts.append(whole[first : first + count])
        return self._launch(taking, parts, received, sent, 1, lambda bucket: [like])

    def scattered(self, arrival: Arrival, of: Iterable[Matrix]) -> Iterator[tuple[Matrix, Tensor]]:
        """After the wait: this rank's piece of each matrix, where it has one."""
        self.wait(arrival)
        at, taking = 0, set(of)
        for matrix in self.matrices:
            numel = self._numel(matrix) if matrix in taking else 0
            if numel:
                yield matrix, arrival.received[at : at + numel]
                at += numel

    def wait(self, arrival: Arrival) -> None:
        """Wait on the current stream (CPU: block)."""
        self._collectives.wait(arrival.handle, self.name, "", "step")
        arrival.handle.keep = ()

    def _numel(self, matrix: Matrix) -> int:
        return matrix.pieces.get(self._collectives.rank, (0, 0))[1]

    def _launch(
        self,
        taking: Sequence[Matrix],
        parts: Sequence[Tensor],
        received: list[int],
        sent: list[int],
        number: int,
        kinds: Callable[[Bucket], Sequence[Tensor]],
    ) -> Arrival | None:
        if not taking:
            return None
        like = kinds(taking[0].bucket)[0]
        packed = torch.cat(list(parts)) if parts else like.new_empty(0)
        # In a group of one nothing travels.
        arrived = packed
        if self._collectives.size > 1:
            arrived = packed.new_empty(sum(received))
        total = sum(matrix.numel for matrix in taking) * number * like.element_size()
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
        alike: dict[tuple[str, torch.dtype], list[Matrix]] = {}
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
                made = _matrices(member, bucket, start, places, groups[name].rank)
                alike.setdefault((name, bucket.master.dtype), []).extend(made)
                self.matrices += made
        for (group_name, _), matrices in alike.items():
            self._form_rounds(matrices, groups[group_name], load[group_name])
        for matrix in self.own:
            matrix.make(settings[matrix.group])

    @property
    def own(self) -> list[Matrix]:
        """Those that this rank owns."""
        return [each.own for each in self.rounds if each.own is not None]

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
        coming = some[0][0].gather(_values_and_gradient, 2, some[0][1]) if some else None
        meanwhile()
        for bucket, count in left.items():
            if not count:
                done(bucket)
        leaving: tuple[Round, list[Matrix], Arrival] | None = None
        for number, (each, taking) in enumerate(some):
            assert coming is not None, "launched a round before"
            here, coming = coming, None
            if number + 1 < len(some):
                ahead, those = some[number + 1]
                coming = ahead.gather(_values_and_gradient, 2, those)
            new = self._stepped(each, taking, here, settings)
            self._arrive(leaving, left, done)
            back = each.scatter(new, taking[0].bucket.master, taking)
            assert back is not None, "some take part"
            leaving = each, taking, back
        self._arrive(leaving, left, done)

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
        values, gradient = each.gathered(coming, 2)
        start = self._trace.now()
        assert own.inner is not None, "it is this rank's"
        own.inner.param_groups[0].update(settings[own.group])
        new = own.step(values, gradient)
        self._trace.record("STEP", own.member.name, start=start, end=self._trace.now())
        return new

    def _arrive(
        self,
        leaving: tuple[Round, list[Matrix], Arrival] | None,
        left: dict[Bucket, int],
        done: Callable[[Bucket], None],
    ) -> None:
        """New values come back to this rank's slices."""
        if leaving is None:
            return
        each, taking, back = leaving
        for matrix, values in each.scattered(back, taking):
            matrix.bucket.master[matrix.start : matrix.start + values.numel()].copy_(values)
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
            back = each.scatter(whole, like, taking)
            assert back is not None, "some take part"
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
        for each, name, _, taking in self._kinds(settings):
            coming = each.gather(lambda bucket, name=name: [slices[bucket][name]], 1, taking)  # type: ignore[misc]
            assert coming is not None, "some take part"
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
            of = {matrix: self.names(matrix, settings).slices for matrix in each.matrices}
            for name, dtype in sorted({(n, d) for s in of.values() for n, d in s.items()}, key=str):
                yield each, name, dtype, [m for m in each.matrices if of[m].get(name) == dtype]

    def state_nbytes(self) -> int:
        """Of this rank's matrices."""
        values = [v for matrix in self.own for v in matrix.state.values()]
        return sum(v.nbytes for v in values if isinstance(v, Tensor) and v.dim())


def _values_and_gradient(bucket: Bucket) -> Sequence[Tensor]:
    assert bucket.gradient is not None, "finish_reductions gives each bucket a gradient"
    return bucket.master, bucket.gradient


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
    dim, shard, rows = 0, 0, member.storage.numel()
    if isinstance(member, ShardedParameter):
        layout = member.layout
        shape, dim, shard = layout.shape, layout.dim, layout.shard_numel
        rows = math.prod(layout.front[1:])
    else:
        shape = tuple(member.shape)
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
        found.append(made)
    return found
