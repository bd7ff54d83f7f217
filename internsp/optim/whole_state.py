"""An optimizer's state as torch's optimizers give it: by parameter, placed as the parameter is.

State lies in slices over the replicas of a shard (:mod:`internsp.optim.bucket`). Here the slices of
a parameter are gathered into ``DTensor`` like the parameter, which other meshes, other optimizers
and ``torch.distributed.checkpoint.state_dict`` understand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from internsp.errors import LayoutError
from internsp.host import OPTIMIZER
from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket, Segment
from internsp.optim.matrices import MatrixSteps
from internsp.optim.state_names import Names, State
from internsp.wp.parameter import Member

MASTER = "master"


def _is_slice(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def collect(
    buckets: Sequence[Bucket],
    steps: MatrixSteps,
    settings: Sequence[State],
    place: dict[Member, int],
    mesh: ParallelMesh,
) -> dict[Member, State]:
    """Every parameter's state, unused ones' as before a first step. Collective; blocks.

    Args:
        steps: of whole matrices.
        place: the group of each parameter.
    """
    values = _values(buckets, steps, mesh)
    spread, of_whole = steps.spread(settings), names_of_whole(steps, settings)
    found: dict[Member, State] = {}
    for bucket in buckets:
        if bucket.method.on_slices is None:
            names = {member: of_whole[member] for member in bucket.offsets}
            gathered = {n: bucket.gathered(own) for n, own in spread.get(bucket, {}).items()}
        else:
            like, cls = bucket.master.new_zeros(2), bucket.method.on_slices
            by_group = {
                group: Names(like, cls, settings[group])
                for group in {place[member] for member in bucket.offsets}
            }
            names = {member: by_group[place[member]] for member in bucket.offsets}
            dtypes = {n: d for each in by_group.values() for n, d in each.slices.items()}
            gathered = {n: bucket.gathered(_slice(bucket, n, d)) for n, d in dtypes.items()}
        if bucket.has_master:
            gathered[MASTER] = bucket.gathered(bucket.master)
        if OPTIMIZER in bucket.offload:
            gathered = {n: {m: v.cpu() for m, v in of.items()} for n, of in gathered.items()}
        for member in bucket.offsets:
            own = names[member]
            kept = [*own.slices, *([MASTER] if bucket.has_master else [])]
            # Copied out of the flat buffer: torch copies or pickles no DTensor of a view's storage.
            state: State = {name: member.wrap(gathered[name][member].clone()) for name in kept}
            for name, first in own.values.items():
                value = values.get(member.name, {}).get(name, first)
                state[name] = value.clone() if isinstance(value, Tensor) else value
                if member in of_whole and _is_slice(value):  # of rows, of columns
                    state[name] = _replicated(member, state[name].to(mesh.device))
            found[member] = state
    return found


def names_of_whole(steps: MatrixSteps, settings: Sequence[State]) -> dict[Member, Names]:
    """Of each parameter that is stepped whole."""
    return {matrix.member: steps.names(matrix, settings) for matrix in steps.held}


def _replicated(member: Member, value: Tensor) -> DTensor:
    mesh = member.parameter.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _slice(bucket: Bucket, name: str, dtype: torch.dtype) -> Tensor:
    """This rank's slice of one kind of state; zeros where there is none."""
    own = torch.zeros_like(bucket.master, dtype=dtype)
    for segment, state in _live(bucket):
        if name in state:
            own[segment.start : segment.stop].copy_(state[name])
    return own


def _live(bucket: Bucket) -> Iterator[tuple[Segment, State]]:
    for segment in bucket.segments if bucket.inner is not None else ():
        assert bucket.inner is not None, "the line above"
        yield segment, bucket.inner.state.get(segment.tensor, {})


def _values(buckets: Sequence[Bucket], steps: MatrixSteps, mesh: ParallelMesh) -> dict[str, State]:
    """State without elements (a step's number), which no rank without a slice of it knows, and what
    owners of whole matrices have of rows and columns."""
    mine = {
        segment.member.name: {
            n: v.cpu() if isinstance(v, Tensor) else v for n, v in state.items() if not _is_slice(v)
        }
        for bucket in buckets
        for segment, state in _live(bucket)
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


def restore(
    buckets: Sequence[Bucket],
    steps: MatrixSteps,
    settings: Sequence[State],
    states: dict[Member, State],
) -> None:
    """Take this rank's slices of ``states``; values are copied. Where there is none, forget it.

    No message, except for ``DTensor`` that are placed otherwise, and state of whole-matrix steps,
    which goes to its owners. All ranks call it.

    Raises:
        LayoutError: state of another shape.
    """
    of_whole = names_of_whole(steps, settings)
    _check_shapes(of_whole, states)
    slices: dict[Bucket, dict[str, Tensor]] = {}
    for bucket in buckets:
        for member in bucket.offsets:
            state = dict(states.get(member, {}))
            names = of_whole.get(member)
            parts = {
                name: member.like_storage(member.part_of(value, f"{name} of {member.name}"))
                for name, value in state.items()
                if _is_slice(value) and (names is None or name in names.slices or name == MASTER)
            }
            master = parts.pop(MASTER, None)
            if master is not None and bucket.has_master:
                bucket.put(bucket.master, member, master.to(bucket.master.dtype))
            for name, dtype in names.slices.items() if names is not None else ():
                of = slices.setdefault(bucket, {})
                if name not in of:
                    of[name] = torch.zeros_like(bucket.master, dtype=dtype)
                if name in parts:
                    bucket.put(of[name], member, parts[name].to(of[name]))
            for segment, _ in _live(bucket):
                if segment.member is member:
                    _take(bucket, segment, state, parts)

    for matrix, whole in steps.bring(slices, settings).items():
        state, names = states.get(matrix.member, {}), of_whole[matrix.member]
        own: State = dict(whole)
        for name in names.values:
            if name in state:
                value = state[name]
                if isinstance(value, DTensor):
                    value = value.full_tensor()
                if isinstance(value, Tensor):
                    value = value.detach().clone()
                    value = value.to(matrix.bucket.device) if value.dim() else value
                own[name] = value
        matrix.take(own if _stepped(state.get("step"), own) else {})


def _stepped(step: Any, own: State) -> bool:
    """What no step has used has no state, as its first step may differ from later ones."""
    values = [v for v in own.values() if _is_slice(v)]
    return step != 0 and (step is not None or any(bool(value.any()) for value in values))


def _check_shapes(names: dict[Member, Names], states: dict[Member, State]) -> None:
    """The same on all ranks, before any message."""
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


def _take(bucket: Bucket, segment: Segment, state: State, parts: dict[str, Tensor]) -> None:
    assert bucket.inner is not None, "a bucket with segments has an inner optimizer"
    bucket.inner.state.pop(segment.tensor, None)
    reach = slice(segment.offset, segment.offset + segment.tensor.numel())
    own: State = {n: bucket.kept(segment, n, part.view(-1)[reach]) for n, part in parts.items()}
    if not _stepped(state.get("step"), own):
        return
    for name, value in state.items():
        if name not in own and name != MASTER:
            own[name] = value.detach().clone() if isinstance(value, Tensor) else value
    bucket.inner.state[segment.tensor] = own


class States:
    """``optimizer.state``: by parameter, this rank's slices of its state (1-D; ``None``: unused),
    or all that an owner of a whole matrix has of it.

    Names are there before the first step, as torch's state dict helpers would else make a step.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        steps: MatrixSteps,
        settings: Sequence[State],
        place: dict[Member, int],
    ) -> None:
        self._steps, self._settings, self._place = steps, settings, place
        self._held = {id(m.parameter): (m, bucket) for bucket in buckets for m in bucket.offsets}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Tensor]:
        return (member.parameter for member, _ in self._held.values())

    def __getitem__(self, parameter: Tensor) -> State:
        member, bucket = self._held[id(parameter)]
        matrices = [m for m in self._steps.held if m.member is member]
        if matrices:
            names = self._steps.names(matrices[0], self._settings)
        else:
            settings = self._settings[self._place[member]]
            assert bucket.method.on_slices is not None, "else it has matrices"
            names = Names(bucket.master.new_zeros(2), bucket.method.on_slices, settings)
        found: State = dict.fromkeys((*names.slices, *names.values))
        for matrix in matrices:
            found |= matrix.state
        for segment, state in _live(bucket):
            if segment.member is member:
                found |= state
                if bucket.has_master:
                    found[MASTER] = segment.tensor
        return found
