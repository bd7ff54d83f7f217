"""The optimizer's state by parameter, in the two forms in which it is saved.

State lies in slices over the replicas of a shard (:mod:`internsp.optim.bucket`), or whole with the
owner of a matrix (:mod:`internsp.optim.matrices`).

- **Local**: tensors of the parameter's shape, of which each rank saves and loads its own index
  ranges (:mod:`internsp.optim.slices`) through ``torch.distributed.checkpoint``: any mesh loads
  what any mesh saved, and nothing is sent. Entries have the parameters' names. Every rank's
  dictionary has the same keys before the first step as after it: a parameter that was never used
  has zeros, and ``USED`` = 0 says that they are not to be loaded. A weight that is tied over stages
  has one entry, under its name in the whole model, which each of these stages saves and loads with
  the same values.
- **Gathered**: by parameter, ``DTensor`` placed like it, as of torch's own optimizers, which other
  meshes, other optimizers and ``torch.distributed.checkpoint.state_dict`` understand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from internsp.base.host import OPTIMIZER
from internsp.base.stand_in import State, StateNames
from internsp.errors import LayoutError
from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket, Segment
from internsp.optim.matrices import Matrix, MatrixSteps
from internsp.optim.slices import Slices
from internsp.wp.parameter import Member

MASTER = "master"
USED = "used"
"""Key of a tensor without dimensions: 1 if a step has made the parameter's state, else 0."""


class OptimizerState:
    """What the buckets and matrices of an optimizer hold, with the settings of the moment.

    Args:
        steps: the steps of whole matrices.
        settings: each group's settings.
    """

    def __init__(
        self, buckets: Sequence[Bucket], steps: MatrixSteps, settings: Sequence[State]
    ) -> None:
        self.buckets, self.steps, self._settings = buckets, steps, settings
        self._matrix = {matrix.member: matrix for matrix in steps.matrices}
        self._names: dict[tuple[int, torch.dtype], StateNames] = {}

    def names(self, member: Member, bucket: Bucket) -> StateNames:
        """What the state of a bucket's member consists of."""
        cls = bucket.method.slice_optimizer
        if cls is None:
            return self.steps.state_names(self._matrix[member], self._settings)
        key = bucket.group_index[member], bucket.master.dtype
        if key not in self._names:
            like = torch.zeros(2, dtype=key[1], device=bucket.device)  # where it is stepped
            self._names[key] = StateNames(like, cls, self._settings[key[0]])
        return self._names[key]

    def _segments(self) -> Iterator[tuple[Bucket, Segment, State]]:
        """All segments with their live state: none before a first step, or of an owner's matrix."""
        for bucket in self.buckets:
            for segment in bucket.segments:
                yield bucket, segment, _live(bucket, segment)

    def by_parameter(self) -> dict[Tensor, State]:
        """This rank's slices of each parameter's state (1-D; ``None``: unused), or the whole state
        of a matrix that this rank owns; empty where a parameter was never trained.

        The names are there before the first step: else torch's state dict helpers would make one.
        """
        found: defaultdict[Tensor, State] = defaultdict(dict)
        for bucket in self.buckets:
            for member in bucket.offsets:
                names = self.names(member, bucket)
                found[member.parameter].update(dict.fromkeys((*names.slices, *names.values)))
        for matrix in self.steps.own:
            found[matrix.member.parameter].update(matrix.state)
        for bucket, segment, live in self._segments():
            found[segment.member.parameter].update(live)
            if bucket.inner is not None and bucket.has_master:
                found[segment.member.parameter][MASTER] = segment.tensor
        return found

    # local

    def local(self, frozen: Sequence[Member]) -> State:
        """This rank's state: ``{parameter's name: {kind: Slices, or a value of all of it}}``.

        Tensors are the live ones, not copies. No communication. The state of a matrix that is
        stepped unsharded is in its owner's dictionary.

        Args:
            frozen: parameters in groups that were never trained: ``USED`` alone stands for them.
        """
        state: State = {}
        for bucket, segment, live in self._segments():
            entry: State = {}
            if bucket.inner is not None:
                names = self.names(segment.member, bucket)
                entry[USED] = torch.tensor(bool(live), dtype=torch.uint8)
                for name, dtype in names.slices.items():
                    values = live.get(name)
                    if values is None:
                        values = torch.zeros_like(segment.tensor, dtype=dtype)
                    entry[name] = Slices.of(segment.region, values)
                for name, value in names.values.items():
                    entry[name] = live[name] if name in live else _copy(value)
            if bucket.has_master:
                entry[MASTER] = Slices.of(segment.region, segment.tensor)
            if entry:
                state[segment.member.name_in_model] = entry
        for matrix in self.steps.own:
            self._add_matrix(matrix, state.setdefault(matrix.member.name_in_model, {}))
        for member in frozen:
            state[member.name_in_model] = {USED: torch.zeros((), dtype=torch.uint8)}
        return state

    def _add_matrix(self, matrix: Matrix, entry: State) -> None:
        names = self.steps.state_names(matrix, self._settings)
        live, like = matrix.state, matrix.bucket.master
        entry[USED] = torch.tensor(bool(live), dtype=torch.uint8)
        for name, dtype in names.slices.items():
            values = live[name] if live else like.new_zeros(matrix.shape, dtype=dtype)
            made = matrix.slices(values)
            if name in entry:  # of another matrix of the stack
                made = Slices(made.shape, values, {**entry[name].parts, **made.parts})
            entry[name] = made
        for name, first in names.values.items():
            value = live[name] if name in live else _copy(first)
            entry[name] = matrix.slices(value) if _has_elements(value) else value

    def load_local(self, state: State, frozen: Sequence[Member]) -> None:
        """Load what :meth:`local` returned on this mesh, with its old or other values. Values are
        copied. No communication.

        Raises:
            LayoutError: an entry is missing, or has other index ranges. Nothing was loaded then.
        """
        trained = [m.name for m in frozen if bool(state.get(m.name_in_model, {}).get(USED, False))]
        if trained:
            raise LayoutError(
                f"the optimizer state is of a run that has trained {', '.join(trained)}, frozen "
                "here since the optimizer was made: unfreeze them (requires_grad_(True)) before "
                "local_state_dict(), load, and freeze them again"
            )
        for bucket, segment, _ in self._segments():
            _check_segment(bucket, segment, state.get(segment.member.name_in_model))
        for matrix in self.steps.own:
            _check_matrix(matrix, state.get(matrix.member.name_in_model))
        for matrix in self.steps.own:
            entry = state[matrix.member.name_in_model]
            used = bool(entry[USED])
            matrix.load_state(_values_of_matrix(matrix, entry) if used else {})
        for bucket, segment, _ in self._segments():
            entry = state.get(segment.member.name_in_model, {})
            if bucket.has_master:
                segment.tensor.copy_(_values_of_segment(segment, entry[MASTER]))
            if bucket.inner is not None:
                values = {
                    kind: _values_of_segment(segment, value)
                    for kind, value in entry.items()
                    if kind not in (MASTER, USED)
                }
                first = self.names(segment.member, bucket).values
                _set_live(bucket, segment, values if bool(entry[USED]) else {}, first)

    # gathered

    def gather(self, mesh: ParallelMesh) -> dict[Member, State]:
        """The state of every parameter; of unused ones as before a first step. Collective;
        blocks."""
        values = self._gather_values(mesh)
        of_matrices = self.steps.state_to_slices(self._settings)
        found: dict[Member, State] = {}
        for bucket in self.buckets:
            names = {member: self.names(member, bucket) for member in bucket.offsets}
            owned = bucket.method.slice_optimizer is None
            slices = dict(of_matrices.get(bucket, {})) if owned else _slices(bucket, names)
            if bucket.has_master:
                slices[MASTER] = bucket.master
            gathered = {name: bucket.all_gather_slices(own) for name, own in slices.items()}
            if OPTIMIZER in bucket.offload:
                gathered = {n: {m: v.cpu() for m, v in of.items()} for n, of in gathered.items()}
            for member, own in names.items():
                kept = [*own.slices, *([MASTER] if bucket.has_master else [])]
                # Cloned: torch can neither copy nor pickle a DTensor that is a view of a larger
                # buffer.
                state: State = {n: member.wrap(gathered[n][member].clone()) for n in kept}
                for name, first in own.values.items():
                    value = _copy(values.get(member.name, {}).get(name, first))
                    if owned and _has_elements(value):  # statistics of rows or columns
                        on: Any = member.parameter.device_mesh  # type: ignore[attr-defined]
                        local, everywhere = value.to(mesh.device), [Replicate()] * on.ndim
                        value = DTensor.from_local(local, on, everywhere, run_check=False)
                    state[name] = value
                found[member] = state
        return found

    def _gather_values(self, mesh: ParallelMesh) -> dict[str, State]:
        """By parameter, the state that is not laid out like the parameter: values such as the step
        count, which ranks without a slice of the parameter do not have, and statistics of rows and
        columns, which only a matrix's owner has. Collective; blocks."""
        mine = {
            segment.member.name: {n: v for n, v in live.items() if not _has_elements(v)}
            for _, segment, live in self._segments()
            if live
        }
        for matrix in self.steps.own:
            mine[matrix.member.name] = {
                name: value
                for name, value in matrix.state.items()
                if not _has_elements(value) or value.shape != matrix.shape
            }
        mine = {m: {n: _sent(v) for n, v in state.items()} for m, state in mine.items()}
        found: dict[str, State] = {}
        for each in Objects(mesh.stage_group).gather(mine):
            found |= each
        return {m: {n: _received(v) for n, v in state.items()} for m, state in found.items()}

    def load_gathered(self, states: dict[Member, State]) -> None:
        """Load this rank's part of ``states``; values are copied. Parameters without state there
        lose theirs.

        No communication, except for ``DTensor`` that are placed otherwise than the parameter, and
        for state of whole-matrix steps, which is sent to its owners. All ranks must call it.

        Raises:
            LayoutError: state of another shape.
        """
        self._check_shapes(states)
        of_matrices: dict[Bucket, dict[str, Tensor]] = {}
        for bucket in self.buckets:
            owned = bucket.method.slice_optimizer is None
            for member in bucket.offsets:
                state, names = states.get(member, {}), self.names(member, bucket)
                parts = {
                    name: member.like_storage(member.part_of(value, f"{name} of {member.name}"))
                    for name, value in state.items()
                    if isinstance(value, Tensor)
                    and (
                        name in (*names.slices, MASTER)
                        # Of another class: the best that is known is its shape.
                        or (not owned and name not in names.values and value.dim())
                    )
                }
                master = parts.pop(MASTER, None)
                if master is not None and bucket.has_master:
                    bucket.write_slice(bucket.master, member, master.to(bucket.master.dtype))
                if owned:
                    slices = of_matrices.setdefault(bucket, {})
                    for name, dtype in names.slices.items():
                        if name not in slices:
                            slices[name] = torch.zeros_like(bucket.master, dtype=dtype)
                        if name in parts:
                            bucket.write_slice(slices[name], member, parts[name].to(slices[name]))
                elif bucket.inner is not None:
                    for segment in bucket.segments:
                        if segment.member is member:
                            own = _cut(segment, state, parts, names.values)
                            _set_live(bucket, segment, own, names.values)
        self._load_matrices(of_matrices, states)

    def _load_matrices(
        self, slices: dict[Bucket, dict[str, Tensor]], states: dict[Member, State]
    ) -> None:
        for matrix, own in self.steps.state_from_slices(slices, self._settings).items():
            state = states.get(matrix.member, {})
            first = self.steps.state_names(matrix, self._settings).values
            for name in first:
                if name in state:
                    value = state[name]
                    if isinstance(value, DTensor):
                        value = value.full_tensor()
                    value = _copy(value)
                    own[name] = value.to(matrix.bucket.device) if _has_elements(value) else value
            matrix.load_state(own if _has_stepped(own, state, first) else {})

    def _check_shapes(self, states: dict[Member, State]) -> None:
        """Raise ``LayoutError`` for state of another shape, on all ranks alike: before any
        collective."""
        for member, matrix in self._matrix.items():
            if matrix.state_sliced:
                continue
            for name, first in self.names(member, matrix.bucket).values.items():
                given = states.get(member, {}).get(name)
                if not _has_elements(first) or given is None:
                    continue
                shape = list(given.shape) if isinstance(given, Tensor) else None
                if shape != list(first.shape):
                    raise LayoutError(
                        f"{name} of {member.name} is of shape {list(first.shape)}, the given state "
                        f"has {shape}"
                    )


class _Number(NamedTuple):
    """A tensor of one number on its way: pickled as a tensor it takes a hundred times as long."""

    value: Any
    dtype: torch.dtype


def _sent(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.cpu() if value.dim() else _Number(value.item(), value.dtype)


def _received(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Number) else value


def _has_elements(value: Any) -> bool:
    """Whether it is a tensor with dimensions: no value such as the step count."""
    return isinstance(value, Tensor) and value.dim() > 0


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _live(bucket: Bucket, segment: Segment) -> State:
    return {} if bucket.inner is None else bucket.inner.state.get(segment.tensor, {})


def _set_live(bucket: Bucket, segment: Segment, values: State, first: State) -> None:
    """Continue from copies of ``values``; empty: as before the first step.

    Args:
        first: the class's own values before that: a fused one wants its count of steps in fp32 on
            the device, others on the host.
    """
    assert bucket.inner is not None, "the caller checks"
    bucket.inner.state.pop(segment.tensor, None)
    if values:
        bucket.inner.state[segment.tensor] = {
            name: bucket.copy_to_state_memory(segment, name, _as(value, first.get(name)))
            for name, value in values.items()
        }


def _as(value: Any, first: Any) -> Any:
    alike = isinstance(value, Tensor) and isinstance(first, Tensor) and not value.dim()
    return value.to(first) if alike else value


def _slices(bucket: Bucket, names: dict[Member, StateNames]) -> dict[str, Tensor]:
    """This rank's slice of each kind of a bucket's state; zeros where a segment has none yet."""
    dtypes = {name: d for each in names.values() for name, d in each.slices.items()}
    found = {n: torch.zeros_like(bucket.master, dtype=dtype) for n, dtype in dtypes.items()}
    for segment in bucket.segments:
        live = _live(bucket, segment)
        for name in found.keys() & live.keys():
            found[name][segment.start : segment.stop].copy_(live[name])
    return found


def _cut(segment: Segment, state: State, parts: dict[str, Tensor], first: State) -> State:
    """A segment's part of a parameter's ``state``, of which ``parts`` are like its storage; empty
    if no step has used it.

    Args:
        first: the class's values before a first step.
    """
    index = slice(segment.offset, segment.offset + segment.tensor.numel())
    own: State = {name: part.view(-1)[index] for name, part in parts.items()}
    if not _has_stepped(own, state, first):
        return {}
    return own | {n: v for n, v in state.items() if n not in own and n != MASTER}


def _has_stepped(own: State, state: State, first: State) -> bool:
    """Whether a step has used the state. State without a step is left out, as an optimizer's first
    step may differ from later ones.

    Args:
        own: what this rank holds of ``state``. It may be zeros where others' part is not: rows of
            an embedding that no token had.
        first: the class's values before a first step; those of a parameter without dimensions are
            its moments, too.
    """
    step = state.get("step")
    if step is not None:
        return bool(step != 0)
    counted = (bool(state[name] != value) for name, value in first.items()
               if name in state and not _has_elements(state[name]))  # fmt: skip
    return any(counted) or any(bool(v.any()) for v in own.values() if _has_elements(v))


def _check_segment(bucket: Bucket, segment: Segment, entry: State | None) -> None:
    name = segment.member.name
    wanted = {*([] if bucket.inner is None else [USED]), *([MASTER] if bucket.has_master else [])}
    if not wanted:
        return
    if entry is None or not wanted <= entry.keys():
        raise LayoutError(f"the optimizer state has no {sorted(wanted)} of {name}")
    here = _index_ranges(Slices.of(segment.region, segment.tensor))
    for kind, value in entry.items():
        if bucket.inner is None and kind != MASTER:
            continue  # state of a matrix: its owner checks it
        if isinstance(value, Slices) and (there := _index_ranges(value)) != here:
            raise LayoutError(
                f"the optimizer state has {kind} of {name} at {there}, this rank has {here}: save "
                "and load it through torch.distributed.checkpoint, which gives each rank its own"
            )


def _check_matrix(matrix: Matrix, entry: State | None) -> None:
    name = matrix.member.name
    if entry is None or USED not in entry:
        raise LayoutError(f"the optimizer state has no [{USED!r}] of {name}")
    for kind, value in entry.items():
        if kind != MASTER and isinstance(value, Slices) and _box(matrix, value) not in value.parts:
            raise LayoutError(
                f"the optimizer state has {kind} of {name} at {_index_ranges(value)}, "
                "not where this rank's matrix begins: save and load it through "
                "torch.distributed.checkpoint, which gives each rank its own"
            )


def _box(matrix: Matrix, value: Slices) -> tuple[int, ...]:
    """Where a matrix begins in ``value``: a state like the parameter, or statistics."""
    boxed = value.shape == matrix.member.parameter.shape
    return matrix.offsets if boxed else (0,) * value.dim()


def _values_of_matrix(matrix: Matrix, entry: State) -> State:
    """Copies of a matrix's values in an entry."""
    own: State = {}
    for kind, value in entry.items():
        if kind in (MASTER, USED):
            continue
        if isinstance(value, Slices):
            boxed = value.shape == matrix.member.parameter.shape
            part = value.parts[_box(matrix, value)]
            value = part.view(matrix.shape) if boxed else part  # noqa: PLW2901
        own[kind] = _copy(value)
    return own


def _index_ranges(slices: Slices) -> list[list[str]]:
    """For each box, its index range in each dimension."""
    return [
        [f"{start}:{start + size}" for start, size in zip(offsets, part.shape, strict=True)]
        for offsets, part in slices.parts.items()
    ]


def _values_of_segment(segment: Segment, value: Any) -> Any:
    """The values of a segment, 1-D; ``value`` itself if it is not ``Slices``."""
    if not isinstance(value, Slices):
        return value
    made = torch.empty_like(segment.tensor, dtype=value.dtype)
    parts = segment.region.box_views(made)
    for offsets, part in value.parts.items():
        parts[offsets].copy_(part)
    return made
