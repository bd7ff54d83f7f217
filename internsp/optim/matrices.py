"""Steps that need a whole matrix: each matrix has one owner, to which all ranks send their pieces.

A weight's elements lie in slices over its weight ranks and, within each shard, over their ZeRO
ranks (:mod:`internsp.optim.bucket`). One of these ``n`` ranks is the matrix's owner: it holds the
optimizer's state for it, receives values and gradient, steps, and sends the new values back. For
torch's Muon it receives and returns the update alone, and state stays in slices
(:mod:`internsp.optim.muon`). As many matrices as there are ranks form one round, in which every
rank owns at most one::

    round 0    gather 0   .   step 0      scatter 0   .                  .
    round 1       .    gather 1   .         step 1    scatter 1          .
    round 2       .       .    gather 2       .         step 2    scatter 2

A round is gathered while the round before it is stepped, and its new values are sent while the next
round is stepped: a rank holds two whole matrices at a time, and the new values of a third. Rounds,
owners and the order of collectives follow from the model and the mesh alone, so they are the same
on all ranks (WP-2). Masters and gradients stay in slices, as for elementwise optimizers.
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

from internsp.base.stand_in import State, StateNames, copied
from internsp.mesh import ParallelMesh
from internsp.optim import muon
from internsp.optim.bucket import Bucket, Segment
from internsp.optim.slices import Slices
from internsp.wp.collectives import Collectives, Handle
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ShardedParameter

RankPosition = tuple[int, int, int]
"""A rank's number in the group that exchanges matrices, its weight rank and its ZeRO rank."""


@dataclass(eq=False)
class Matrix:
    """What is stepped as one: a parameter, or one matrix of a 3-D parameter (a stack of matrices).

    Attributes:
        index: index in the stack; 0 where the parameter is one matrix.
        shape: the shape that the optimizer sees.
        dim: the dimension that comes first in storage.
        group: index of the parameter's group in ``param_groups``.
        pieces: by rank of the exchanging group, the first element and the number of elements of the
            piece that lies in that rank's slice.
        start: index of this rank's piece in its bucket's slice.
        owner: the owner's rank in the group.
        inner: the matrix's optimizer, on its owner; ``None`` on other ranks, and where state is in
            slices.
        segment: this rank's segment in which its piece lies; ``None``: this rank has no piece.
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
    segment: Segment | None = None

    @property
    def state_sliced(self) -> bool:
        """Whether the state is in slices, so that only the update is sent."""
        return self.bucket.method.slice_optimizer is not None

    @property
    def send_spec(self) -> tuple[int, torch.dtype]:
        """How many tensors of this size the owner gets (it returns one), and their dtype."""
        return (1, muon.UPDATE_DTYPE) if self.state_sliced else (2, self.bucket.master.dtype)

    def pieces_to_send(self, numel: int, settings: Mapping[str, Any]) -> list[Tensor]:
        """This rank's piece (``numel`` elements) of each tensor that the owner needs."""
        bucket, index = self.bucket, slice(self.start, self.start + numel)
        if not self.state_sliced:
            return [bucket.master[index], bucket.reduced[index]]
        assert isinstance(bucket.inner, muon.MuonSlices), "the method's slice_optimizer"
        assert self.segment is not None, "its piece lies in one"
        momentum = bucket.inner.momentum(self.segment.tensor)
        own = momentum[self.start - self.segment.start :][:numel]
        return [muon.momentum_update(own, bucket.reduced[index], settings)]

    def write_piece(self, values: Tensor, settings: Mapping[str, Any]) -> None:
        """Update this rank's piece of the master values with what the owner has sent."""
        piece = self.bucket.master[self.start : self.start + values.numel()]
        if self.state_sliced:
            muon.apply_update(piece, values, self.shape, settings)
        else:
            piece.copy_(values)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def cost(self) -> int:
        """Operations of a step, up to a factor: those of its matrix products."""
        return self.numel * (min(self.shape[-2:]) if len(self.shape) > 1 else 1)

    @property
    def state(self) -> State:
        """The live state, on its owner; empty before its first step, and on other ranks."""
        return {} if self.inner is None else self.inner.state.get(self._owned[1], {})

    @property
    def _owned(self) -> tuple[torch.optim.Optimizer, Tensor]:
        """On its owner: the optimizer and its parameter, which has no memory between two steps."""
        assert self.inner is not None, "on its owner"
        return self.inner, self.inner.param_groups[0]["params"][0]

    def from_storage(self, flat: Tensor) -> Tensor:
        """The matrix in its shape, contiguous, from its elements in the order of storage."""
        if not self.shape:
            return flat[0]
        at, shape = self.dim, self.shape
        stored = flat.view(shape[at], *shape[:at], *shape[at + 1 :])
        return stored.movedim(0, at).contiguous()

    def to_storage(self, matrix: Tensor) -> Tensor:
        """The reverse of :meth:`from_storage`: 1-D, in the order of storage."""
        return (matrix.movedim(self.dim, 0) if self.shape else matrix).reshape(-1)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the matrix lies in the unsharded parameter: its first index in each dimension."""
        parameter: Any = self.member.parameter
        offset = [0] * parameter.dim()
        member = self.member
        if isinstance(member, ShardedParameter) and member.axis.expert > 1:
            offset[0] = member.axis.expert_rank * member.layout.shape[0]
        if len(self.shape) < len(offset):
            offset[0] += self.index
        return tuple(offset)

    def load_state(self, state: State) -> None:
        """On its owner: continue from ``state``, which must not be used elsewhere; empty: as before
        the first step."""
        inner, tensor = self._owned
        inner.state.pop(tensor, None)
        if state:
            inner.state[tensor] = state

    def slices(self, values: Tensor) -> Slices:
        """``values``, a state of this matrix, in the form that
        :mod:`torch.distributed.checkpoint` saves."""
        parameter = self.member.parameter
        if values.shape != self.shape:  # statistics of rows or columns, and the like
            return Slices(values.shape, values, {(0,) * values.dim(): values})
        boxed = values.view(*(1,) * (parameter.dim() - values.dim()), *values.shape)
        return Slices(parameter.shape, values, {self.offsets: boxed})

    def make_optimizer(self, settings: Mapping[str, Any]) -> None:
        """On its owner: make the optimizer."""
        like = self.bucket.master
        tensor = torch.zeros(self.shape, dtype=like.dtype, device=like.device)
        self.inner = self.bucket.method.make_optimizer(tensor, settings)
        self.free_step_memory()

    def free_step_memory(self) -> None:
        """Free the memory of gradient and values, which only a step needs."""
        _, tensor = self._owned
        # The shape is kept, with the memory of one element: some optimizers make state like the
        # parameter at their first step.
        tensor.grad = None
        tensor.data = tensor.new_zeros(()).expand(self.shape)

    def step(self, arrived: list[Tensor], settings: Mapping[str, Any]) -> Tensor:
        """On its owner: step, and return the new values or the update, 1-D, in the order of
        storage.

        Args:
            arrived: the tensors that the pieces make up, each 1-D, in the order of storage. The
                list is emptied, so that their memory can be freed early.
        """
        if self.state_sliced:
            return self.to_storage(muon.orthogonalize(self.from_storage(arrived.pop()), settings))
        inner, tensor = self._owned
        inner.param_groups[0].update(copied(settings))
        gradient = self.from_storage(arrived.pop())
        tensor.data = self.from_storage(arrived.pop())
        tensor.grad = gradient
        try:
            inner.step()
            return self.to_storage(tensor.data)
        finally:
            self.free_step_memory()


@dataclass
class PendingExchange:
    """An all-to-all in flight: pieces of one round's matrices on their way to their owners, or
    back.

    Attributes:
        active: the round's matrices that take part, in its order, the same on all ranks.
        received: the output: by sending rank, the pieces one after another (first value, then
            gradient, where both are sent).
    """

    round: Round
    active: Sequence[Matrix]
    handle: Handle
    received: Tensor

    @property
    def own(self) -> Matrix | None:
        """The matrix that this rank owns, if it takes part."""
        return self.round.own(self.active)

    def wait(self) -> None:
        """Wait on the current stream (CPU: block)."""
        self.round.collectives.wait(self.handle, self.round.name, "", "step")
        self.handle.keep = ()

    def gathered(self, number: int) -> list[Tensor]:
        """Wait; returns the ``number`` tensors of :attr:`own`, 1-D, as in storage."""
        self.wait()
        if self.own is None:
            return []
        found = [self.received.new_empty(self.own.numel) for _ in range(number)]
        at = 0
        for _, (first, count) in sorted(self.own.pieces.items()):
            for tensor in found:
                tensor[first : first + count].copy_(self.received[at : at + count])
                at += count
        self.received = self.received.new_empty(0)  # frees it before the step
        return found

    def scattered(self) -> Iterator[tuple[Matrix, Tensor]]:
        """Wait, and return this rank's piece of each matrix of which it has one."""
        self.wait()
        at = 0
        for matrix in self.active:
            numel = self.round.piece_numel(matrix)
            if numel:
                yield matrix, self.received[at : at + numel]
                at += numel


class Round:
    """Matrices of which each rank of a group owns at most one.

    Args:
        collectives: those of the group; this rank's number in it is ``collectives.rank``.
    """

    def __init__(self, number: int, matrices: Sequence[Matrix], collectives: Collectives) -> None:
        self.name = f"matrices {number}"
        self.matrices = sorted(matrices, key=lambda matrix: matrix.owner)
        self.collectives = collectives

    def own(self, among: Sequence[Matrix]) -> Matrix | None:
        """The one of the round's matrices ``among`` that this rank owns, if any."""
        rank = self.collectives.rank
        return next((matrix for matrix in among if matrix.owner == rank), None)

    def piece_numel(self, matrix: Matrix) -> int:
        """Number of elements of this rank's piece."""
        return matrix.pieces.get(self.collectives.rank, (0, 0))[1]

    def gather(
        self,
        pieces: Callable[[Matrix, int], Sequence[Tensor]],
        number: int,
        dtype: torch.dtype,
        active: Sequence[Matrix],
    ) -> PendingExchange:
        """Start sending this rank's pieces to the owners. Does not block with overlap.

        Args:
            pieces: returns what is sent of a matrix, given the number of elements of this rank's
                piece: ``number`` tensors of ``dtype``.
        """
        parts = [t for m in active if (n := self.piece_numel(m)) for t in pieces(m, n)]
        return self._all_to_all(active, parts, number, dtype, back=False)

    def scatter(
        self, own_values: Tensor | None, dtype: torch.dtype, active: Sequence[Matrix]
    ) -> PendingExchange:
        """Start sending the owners' matrices back to the slices in which their pieces lie.

        Args:
            own_values: the matrix that this rank owns, 1-D; ``None``: it owns none that takes part.
        """
        own, parts = self.own(active), []
        if own is not None:
            assert own_values is not None, "its owner has stepped it"
            spans = (span for _, span in sorted(own.pieces.items()))
            parts = [own_values[first : first + count] for first, count in spans]
        return self._all_to_all(active, parts, 1, dtype, back=True)

    def _all_to_all(
        self,
        active: Sequence[Matrix],
        parts: Sequence[Tensor],
        number: int,
        dtype: torch.dtype,
        back: bool,
    ) -> PendingExchange:
        """Send ``number`` tensors of each piece to its owner, or ``back`` to its slice."""
        empty = active[0].bucket.master.new_empty(0, dtype=dtype)
        packed = torch.cat(list(parts)) if parts else empty
        of_pieces, of_own = ([0] * self.collectives.size for _ in range(2))
        for matrix in active:
            of_pieces[matrix.owner] = self.piece_numel(matrix) * number
        own = self.own(active)
        for peer, (_, count) in own.pieces.items() if own is not None else ():
            of_own[peer] = count * number
        received, sent = (of_pieces, of_own) if back else (of_own, of_pieces)
        # In a group of one nothing is sent.
        arrived = packed
        if self.collectives.size > 1:
            arrived = packed.new_empty(sum(received))
        total = sum(matrix.numel for matrix in active) * number * dtype.itemsize
        handle = self.collectives.exchange_parts(
            arrived, packed, received, sent, self.name, active[0].member.name, total
        )
        return PendingExchange(self, active, handle, arrived)


class MatrixSteps:
    """All whole-matrix steps of one communicator's parameters.

    Attributes:
        matrices: all matrices, in the order of the model; those that were frozen at first come
            last.
        rounds: the rounds in the order of their steps: those that cost most first, of each call of
            :meth:`add`.
        own: the matrices whose state this rank holds as their owner.
    """

    def __init__(self, communicator: ISPCommunicator) -> None:
        self._communicator = communicator
        self._trace = communicator.state.trace
        self._names: dict[tuple[int, torch.dtype, tuple[int, ...]], StateNames] = {}
        self.matrices: list[Matrix] = []
        self.rounds: list[Round] = []
        self.own: list[Matrix] = []
        self._load: dict[str, dict[int, int]] = {}

    def add(self, buckets: Sequence[Bucket], settings: Sequence[Mapping[str, Any]]) -> None:
        """Add the matrices of ``buckets``; those of elementwise methods are skipped."""
        state, mesh = self._communicator.state, self._communicator.mesh
        alike: dict[tuple[str, int, torch.dtype], list[Matrix]] = {}
        groups: dict[str, Collectives] = {}
        load, made_before = self._load, len(self.rounds)
        for bucket in buckets:
            if not bucket.method.whole_matrix:
                continue
            group, positions = _group_and_positions(bucket, mesh)
            name = group.group_name
            if name not in groups:
                shared = state.collectives
                groups[name] = Collectives(
                    group,
                    shared.overlap,
                    state.trace,
                    state.collectives.counters,
                    shared.comm_context,
                    mesh.device,
                )
                peers = sorted(peer for peer, _, _ in positions)
                load.setdefault(name, dict.fromkeys(peers, 0))
            for member, start in bucket.offsets.items():
                for made in _matrices(member, bucket, start, positions, groups[name].rank):
                    alike.setdefault((name, *made.send_spec), []).append(made)
                    self.matrices.append(made)
        for (group_name, *_), matrices in alike.items():
            # Rounds of about the same cost; a matrix goes to who owns the fewest elements so far.
            owned = load[group_name]
            order = sorted(matrices, key=lambda m: -m.cost)  # stable: then as in the model
            for first in range(0, len(order), len(owned)):
                members = order[first : first + len(owned)]
                free = sorted(owned, key=lambda peer: (owned[peer], peer))
                largest = sorted(members, key=lambda m: -m.numel)
                for matrix, peer in zip(largest, free, strict=False):
                    matrix.owner = peer
                    owned[peer] += matrix.numel
                self.rounds.append(Round(len(self.rounds), members, groups[group_name]))
        for round_ in self.rounds[made_before:]:
            own = round_.own(round_.matrices)
            if own is not None and not own.state_sliced:
                own.make_optimizer(settings[own.group])
                self.own.append(own)

    def step(
        self,
        used: set[Member],
        settings: Sequence[Mapping[str, Any]],
        during_first_gather: Callable[[], None],
    ) -> None:
        """Step the matrices of the parameters in ``used``, and start the all-gather of each bucket
        once this rank's slice of it has its new values. The buckets' gradients must be scaled
        already.

        Collective; blocks, but not for the all-gathers.

        Args:
            during_first_gather: called while the first round's gather is in flight.
        """
        pending = dict.fromkeys([matrix.bucket for matrix in self.matrices], 0)
        for matrix in self.matrices:
            pending[matrix.bucket] += matrix.member in used
        rounds = [(r, [m for m in r.matrices if m.member in used]) for r in self.rounds]
        rounds = [(round_, active) for round_, active in rounds if active]

        def gather(number: int) -> PendingExchange | None:
            if number == len(rounds):
                return None
            round_, active = rounds[number]
            return round_.gather(
                lambda matrix, numel: matrix.pieces_to_send(numel, settings[matrix.group]),
                *active[0].send_spec, active,
            )  # fmt: skip

        gathering = gather(0)
        during_first_gather()
        for bucket, count in pending.items():
            if not count:
                bucket.publish(self._communicator.state)
        scattering: PendingExchange | None = None
        for number, (round_, active) in enumerate(rounds):
            assert gathering is not None, "launched a round before"
            current, gathering = gathering, gather(number + 1)
            new_values = self._step_own(current, settings)
            del current  # frees the received pieces' memory
            self._finish_scatter(scattering, pending, settings)
            scattering = round_.scatter(new_values, active[0].send_spec[1], active)
        self._finish_scatter(scattering, pending, settings)

    def _step_own(
        self, gathering: PendingExchange, settings: Sequence[Mapping[str, Any]]
    ) -> Tensor | None:
        own = gathering.own
        arrived = gathering.gathered(gathering.active[0].send_spec[0])
        if own is None:
            return None
        start = self._trace.now()
        new_values = own.step(arrived, settings[own.group])
        self._trace.record("STEP", own.member.name, start=start, end=self._trace.now())
        return new_values

    def _finish_scatter(
        self,
        scattering: PendingExchange | None,
        pending: dict[Bucket, int],
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        """Wait for a round's new values and write this rank's pieces into its slices."""
        if scattering is None:
            return
        for matrix, values in scattering.scattered():
            matrix.write_piece(values, settings[matrix.group])
        for matrix in scattering.active:
            pending[matrix.bucket] -= 1
            if not pending[matrix.bucket]:
                matrix.bucket.copy_master_to_owned()
                matrix.bucket.publish(self._communicator.state)

    # state

    def state_names(self, matrix: Matrix, settings: Sequence[Mapping[str, Any]]) -> StateNames:
        """The names of a matrix's state, found once for each shape by a step of a stand-in."""
        like = matrix.bucket.master
        key = matrix.group, like.dtype, matrix.shape
        if key not in self._names:
            stand_in = like.new_zeros(matrix.shape)
            cls = matrix.bucket.method.cls
            self._names[key] = StateNames(stand_in, cls, dict(settings[matrix.group]))
        return self._names[key]

    def state_to_slices(
        self, settings: Sequence[Mapping[str, Any]]
    ) -> dict[Bucket, dict[str, Tensor]]:
        """Owners' state with one element for round_ element of a parameter, scattered into slices
        laid out like masters. Collective; blocks."""
        found: dict[Bucket, dict[str, Tensor]] = {}
        for round_, name, dtype, active in self._state_exchanges(settings):
            own, own_values = round_.own(active), None
            if own is not None:
                like, value = own.bucket.master.new_empty(0, dtype=dtype), own.state.get(name)
                own_values = like.new_zeros(own.numel) if value is None else own.to_storage(value)
            for matrix, values in round_.scatter(own_values, dtype, active).scattered():
                of = found.setdefault(matrix.bucket, {})
                if name not in of:
                    of[name] = torch.zeros_like(matrix.bucket.master, dtype=dtype)
                of[name][matrix.start : matrix.start + values.numel()].copy_(values)
        return found

    def state_from_slices(
        self,
        slices: Mapping[Bucket, Mapping[str, Tensor]],
        settings: Sequence[Mapping[str, Any]],
    ) -> dict[Matrix, State]:
        """The reverse of :meth:`state_to_slices`: the state of each matrix that this rank owns,
        gathered from ``slices``. Collective; blocks."""
        found: dict[Matrix, State] = {matrix: {} for matrix in self.own}
        for round_, name, dtype, active in self._state_exchanges(settings):

            def piece(matrix: Matrix, numel: int, name: str = name) -> list[Tensor]:
                return [slices[matrix.bucket][name][matrix.start : matrix.start + numel]]

            own = round_.own(active)
            arrived = round_.gather(piece, 1, dtype, active).gathered(1)
            if own is not None:
                found[own][name] = own.from_storage(arrived[0])
        return found

    def _state_exchanges(
        self, settings: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[Round, str, torch.dtype, list[Matrix]]]:
        for round_ in self.rounds:
            held = [matrix for matrix in round_.matrices if not matrix.state_sliced]
            of = {matrix: self.state_names(matrix, settings).slices for matrix in held}
            for name, dtype in sorted({(n, d) for s in of.values() for n, d in s.items()}, key=str):
                yield round_, name, dtype, [m for m in held if of[m].get(name) == dtype]

    def state_nbytes(self) -> int:
        """Bytes of the state that this rank holds as an owner."""
        values = [v for matrix in self.own for v in matrix.state.values()]
        return sum(v.nbytes for v in values if isinstance(v, Tensor) and v.dim())


def _group_and_positions(
    bucket: Bucket, mesh: ParallelMesh
) -> tuple[dist.ProcessGroup, list[RankPosition]]:
    """A group of all ranks over which a bucket's parameters are cut, and the positions of these
    ranks.

    The group may have further ranks, which exchange their own matrices in the same rounds: ranks
    that own other experts, and ranks that hold the same slices.
    """
    axis = bucket.axis
    ranks = range(axis.zero)
    if bucket.replicated or axis.size == 1:  # all weight ranks hold the same replicated parameters
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
    member: Member, bucket: Bucket, start: int, positions: Sequence[RankPosition], rank: int
) -> list[Matrix]:
    """The matrices of ``member``, whose storage begins at ``start`` in the bucket's buffer."""
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
        made = Matrix(member, bucket, index, shape, dim, bucket.group_index[member])
        begin = index * numel
        for peer, w, z in positions:
            valid = rows
            if isinstance(member, ShardedParameter):
                valid = member.layout.valid_rows(w) * rows
            # The intersection, in the bucket's buffer, of the slice, the parameter's own elements
            # (no padding) and the matrix.
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
