"""Optimizer state in the form of torch's optimizers: by parameter, ``DTensor`` placed like it.

State lies in slices over the replicas of a shard (:mod:`internsp.optim.bucket`). Here the slices of
a parameter are gathered into a ``DTensor`` like the parameter, which other meshes, other optimizers
and ``torch.distributed.checkpoint.state_dict`` understand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from internsp.base.host import OPTIMIZER
from internsp.base.stand_in import State, StateNames
from internsp.errors import LayoutError
from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket, Segment
from internsp.optim.matrices import MatrixSteps
from internsp.wp.parameter import Member

MASTER = "master"


def _is_slice(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def gather_state(
    buckets: Sequence[Bucket],
    steps: MatrixSteps,
    settings: Sequence[State],
    group_index: dict[Member, int],
    mesh: ParallelMesh,
) -> dict[Member, State]:
    """The state of every parameter; of unused ones as before a first step. Collective; blocks.

    Args:
        steps: the steps of whole matrices.
        group_index: index of each parameter's group in ``param_groups``.
    """
    values = _gather_values(buckets, steps, mesh)
    state_to_slices, whole_names = (
        steps.state_to_slices(settings),
        whole_matrix_names(steps, settings),
    )
    found: dict[Member, State] = {}
    for bucket in buckets:
        if bucket.method.slice_optimizer is None:
            names = {member: whole_names[member] for member in bucket.offsets}
            gathered = {
                n: bucket.all_gather_slices(own)
                for n, own in state_to_slices.get(bucket, {}).items()
            }
        else:
            by_group = _slice_names(bucket, settings)
            names = {member: by_group[group_index[member]] for member in bucket.offsets}
            dtypes = {n: d for each in by_group.values() for n, d in each.slices.items()}
            gathered = {
                n: bucket.all_gather_slices(_slice(bucket, n, d)) for n, d in dtypes.items()
            }
        if bucket.has_master:
            gathered[MASTER] = bucket.all_gather_slices(bucket.master)
        if OPTIMIZER in bucket.offload:
            gathered = {n: {m: v.cpu() for m, v in of.items()} for n, of in gathered.items()}
        for member in bucket.offsets:
            own = names[member]
            kept = [*own.slices, *([MASTER] if bucket.has_master else [])]
            # Cloned: torch can neither copy nor pickle a DTensor that is a view of a larger buffer.
            state: State = {name: member.wrap(gathered[name][member].clone()) for name in kept}
            for name, first in own.values.items():
                value = values.get(member.name, {}).get(name, first)
                state[name] = value.clone() if isinstance(value, Tensor) else value
                if member in whole_names and _is_slice(value):  # statistics of rows or columns
                    state[name] = _replicated(member, state[name].to(mesh.device))
            found[member] = state
    return found


def whole_matrix_names(steps: MatrixSteps, settings: Sequence[State]) -> dict[Member, StateNames]:
    """The state names of each parameter whose state lies with the owners of its matrices."""
    return {matrix.member: steps.state_names(matrix, settings) for matrix in steps.with_owner_state}


def _replicated(member: Member, value: Tensor) -> DTensor:
    mesh = member.parameter.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _slice_names(bucket: Bucket, settings: Sequence[State]) -> dict[int, StateNames]:
    """By group, the names of the state whose values lie in the bucket's slices.

    Of a parameter without dimensions the shape of a value does not tell: a moment has none, and a
    step count has none either. A stand-in of two elements tells.
    """
    cls = bucket.method.slice_optimizer
    if cls is None:
        return {}
    like, held = bucket.master.new_zeros(2), {bucket.group_of(m) for m in bucket.offsets}
    return {group: StateNames(like, cls, settings[group]) for group in sorted(held)}


def _slice(bucket: Bucket, name: str, dtype: torch.dtype) -> Tensor:
    """This rank's slice of one kind of state; zeros where a segment has no state yet."""
    own = torch.zeros_like(bucket.master, dtype=dtype)
    for segment, state in _segment_states(bucket):
        if name in state:
            own[segment.start : segment.stop].copy_(state[name])
    return own


def _segment_states(bucket: Bucket) -> Iterator[tuple[Segment, State]]:
    for segment in bucket.segments if bucket.inner is not None else ():
        assert bucket.inner is not None, "the loop is empty without one"
        yield segment, bucket.inner.state.get(segment.tensor, {})


def _gather_values(
    buckets: Sequence[Bucket], steps: MatrixSteps, mesh: ParallelMesh
) -> dict[str, State]:
    """By parameter, the state that is not laid out like the parameter: values such as the step
    count, which ranks without a slice of the parameter do not have, and statistics of rows and
    columns, which only a matrix's owner has. Collective; blocks."""
    mine = {
        segment.member.name: {
            n: v.cpu() if isinstance(v, Tensor) else v for n, v in state.items() if not _is_slice(v)
        }
        for bucket in buckets
        for segment, state in _segment_states(bucket)
        if state
    }
    for matrix in steps.own:
        mine[matrix.member.name] = {
            n: v.cpu() if isinstance(v, Tensor) else v
            for n, v in matrix.state.items()
            if not (_is_slice(v) and v.shape == matrix.shape)
        }
    everyone: list[dict[str, State]] = [mine]
    if mesh.shape.stage_size > 1:
        everyone = [{}] * mesh.shape.stage_size
        dist.all_gather_object(everyone, mine, group=mesh.stage_group)
    found: dict[str, State] = {}
    for each in everyone:
        found |= each
    return found


def load_state(
    buckets: Sequence[Bucket],
    steps: MatrixSteps,
    settings: Sequence[State],
    states: dict[Member, State],
) -> None:
    """Load this rank's slices of ``states``; values are copied. Parameters without state there lose
    theirs.

    No communication, except for ``DTensor`` that are placed otherwise than the parameter, and for
    state of whole-matrix steps, which is sent to its owners. All ranks must call it.

    Raises:
        LayoutError: state of another shape.
    """
    whole_names = whole_matrix_names(steps, settings)
    _check_shapes(whole_names, states)
    slices: dict[Bucket, dict[str, Tensor]] = {}
    for bucket in buckets:
        in_slices = _slice_names(bucket, settings)
        for member in bucket.offsets:
            state = dict(states.get(member, {}))
            names = whole_names.get(member)
            known = names if names is not None else in_slices[bucket.group_of(member)]
            parts = {
                name: member.like_storage(member.part_of(value, f"{name} of {member.name}"))
                for name, value in state.items()
                if isinstance(value, Tensor)
                and (
                    name in (*known.slices, MASTER)
                    # Of another class: the best that is known is its shape.
                    or (names is None and name not in known.values and _is_slice(value))
                )
            }
            master = parts.pop(MASTER, None)
            if master is not None and bucket.has_master:
                bucket.write_slice(bucket.master, member, master.to(bucket.master.dtype))
            for name, dtype in names.slices.items() if names is not None else ():
                of = slices.setdefault(bucket, {})
                if name not in of:
                    of[name] = torch.zeros_like(bucket.master, dtype=dtype)
                if name in parts:
                    bucket.write_slice(of[name], member, parts[name].to(of[name]))
            for segment, _ in _segment_states(bucket):
                if segment.member is member:
                    _load_segment(bucket, segment, state, parts)

    for matrix, slices_of_matrix in steps.state_from_slices(slices, settings).items():
        state, names = states.get(matrix.member, {}), whole_names[matrix.member]
        own: State = dict(slices_of_matrix)
        for name in names.values:
            if name in state:
                value = state[name]
                if isinstance(value, DTensor):
                    value = value.full_tensor()
                if isinstance(value, Tensor):
                    value = value.detach().clone()
                    value = value.to(matrix.bucket.device) if value.dim() else value
                own[name] = value
        matrix.load_state(own if _has_stepped(state.get("step"), own) else {})


def _has_stepped(step: Any, own: State) -> bool:
    """Whether a step has used the state. State without a step is left out, as an optimizer's first
    step may differ from later ones."""
    values = [v for v in own.values() if _is_slice(v)]
    return step != 0 and (step is not None or any(bool(value.any()) for value in values))


def _check_shapes(names: dict[Member, StateNames], states: dict[Member, State]) -> None:
    """Raise ``LayoutError`` for state of another shape, on all ranks alike: before any
    collective."""
    for member, own in names.items():
        for name, first in own.values.items():
            given = states.get(member, {}).get(name)
            if not (isinstance(first, Tensor) and first.dim() and given is not None):
                continue
            shape = list(given.shape) if isinstance(given, Tensor) else None
            if shape != list(first.shape):
                raise LayoutError(
                    f"{name} of {member.name} is of shape {list(first.shape)}, the given state has "
                    f"{shape}"
                )


def _load_segment(bucket: Bucket, segment: Segment, state: State, parts: dict[str, Tensor]) -> None:
    assert bucket.inner is not None, "a bucket with segments has an inner optimizer"
    bucket.inner.state.pop(segment.tensor, None)
    index = slice(segment.offset, segment.offset + segment.tensor.numel())
    own: State = {
        n: bucket.copy_to_state_memory(segment, n, part.view(-1)[index])
        for n, part in parts.items()
    }
    if not _has_stepped(state.get("step"), own):
        return
    for name, value in state.items():
        if name not in own and name != MASTER:
            own[name] = value.detach().clone() if isinstance(value, Tensor) else value
    bucket.inner.state[segment.tensor] = own


class StateView:
    """``optimizer.state``: by parameter, this rank's slices of its state (1-D; ``None``: unused),
    or the whole state of a matrix that this rank owns.

    The names are there before the first step: else torch's state dict helpers would make a step.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        steps: MatrixSteps,
        settings: Sequence[State],
        group_index: dict[Member, int],
    ) -> None:
        self._steps, self._settings, self._group_index = steps, settings, group_index
        self._held = {id(m.parameter): (m, bucket) for bucket in buckets for m in bucket.offsets}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Tensor]:
        return (member.parameter for member, _ in self._held.values())

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._held

    def __getitem__(self, parameter: Tensor) -> State:
        if id(parameter) not in self._held:  # never trained, as torch's has nothing then
            return {}
        member, bucket = self._held[id(parameter)]
        matrices = [m for m in self._steps.with_owner_state if m.member is member]
        if matrices:
            names = self._steps.state_names(matrices[0], self._settings)
        else:
            settings = self._settings[self._group_index[member]]
            assert bucket.method.slice_optimizer is not None, "else it has matrices"
            names = StateNames(bucket.master.new_zeros(2), bucket.method.slice_optimizer, settings)
        found: State = dict.fromkeys((*names.slices, *names.values))
        for matrix in matrices:
            found |= matrix.state
        for segment, state in _segment_states(bucket):
            if segment.member is member:
                found |= state
                if bucket.has_master:
                    found[MASTER] = segment.tensor
        return found
