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

from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket, Segment
from internsp.optim.elementwise import OptimizerClass
from internsp.wp.host import OPTIMIZER
from internsp.wp.unfinished import Member
from internsp.wp.values import like_storage, own_part

State = dict[str, Any]
MASTER = "master"


def first_state(like: Tensor, cls: OptimizerClass, settings: dict[str, Any]) -> State:
    """The state that a first step would make for ``like``, from a step of a stand-in."""
    stand_in = torch.zeros_like(like)
    stand_in.grad = torch.zeros_like(stand_in)
    inner = cls([{**settings, "params": [stand_in]}])
    inner.step()
    return inner.state.get(stand_in, {})


class Names:
    """What the state of a group's parameters consists of, the same on all ranks.

    Attributes:
        slices: names of what has an element for each of the parameter's, with dtypes.
        values: names of the rest, as they are before the first step.
    """

    def __init__(self, like: Tensor, cls: OptimizerClass, settings: State) -> None:
        first = first_state(like.new_zeros(2), cls, settings)
        self.slices = {n: v.dtype for n, v in first.items() if _is_slice(v)}
        self.values = {n: v for n, v in first.items() if n not in self.slices}
        if "step" in self.values:  # nothing was stepped yet
            step = self.values["step"]
            self.values["step"] = torch.zeros_like(step) if isinstance(step, Tensor) else 0


def _is_slice(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def collect(
    buckets: Sequence[Bucket],
    cls: OptimizerClass,
    settings: Sequence[State],
    place: dict[Member, int],
    mesh: ParallelMesh,
) -> dict[Member, State]:
    """Every parameter's state, unused ones' as before a first step. Collective; blocks.

    Args:
        place: the group of each parameter.
    """
    values = _values(buckets, mesh)
    found: dict[Member, State] = {}
    for bucket in buckets:
        groups = {place[member] for member in bucket.offsets}
        names = {group: Names(bucket.master, cls, settings[group]) for group in groups}
        dtypes = {n: d for each in names.values() for n, d in each.slices.items()}
        gathered = {n: bucket.gathered(_slice(bucket, n, d)) for n, d in dtypes.items()}
        if bucket.has_master:
            gathered[MASTER] = bucket.gathered(bucket.master)
        if OPTIMIZER in bucket.offload:
            gathered = {n: {m: v.cpu() for m, v in of.items()} for n, of in gathered.items()}
        for member in bucket.offsets:
            own = names[place[member]]
            kept = [*own.slices, *([MASTER] if bucket.has_master else [])]
            state: State = {name: member.wrap(gathered[name][member]) for name in kept}
            for name, first in own.values.items():
                value = values.get(member.name, {}).get(name, first)
                state[name] = value.clone() if isinstance(value, Tensor) else value
            found[member] = state
    return found


def _slice(bucket: Bucket, name: str, dtype: torch.dtype) -> Tensor:
    """This rank's slice of one kind of state; zeros where there is none."""
    own = torch.zeros_like(bucket.master, dtype=dtype)
    for segment, state in _live(bucket):
        if name in state:
            own[segment.start : segment.stop].copy_(state[name])
    return own


def _live(bucket: Bucket) -> Iterator[tuple[Segment, State]]:
    for segment in bucket.segments:
        assert bucket.inner is not None, "a bucket with segments has an inner optimizer"
        yield segment, bucket.inner.state.get(segment.tensor, {})


def _values(buckets: Sequence[Bucket], mesh: ParallelMesh) -> dict[str, State]:
    """State without elements (a step's number), which no rank without a slice of it knows."""
    mine = {
        segment.member.name: {
            n: v.cpu() if isinstance(v, Tensor) else v for n, v in state.items() if not _is_slice(v)
        }
        for bucket in buckets
        for segment, state in _live(bucket)
        if state
    }
    everyone: list[dict[str, State]] = [mine]
    if mesh.shape.stage_size > 1:
        everyone = [{}] * mesh.shape.stage_size
        dist.all_gather_object(everyone, mine, group=mesh.stage_group)
    found: dict[str, State] = {}
    for each in everyone:
        found |= each
    return found


def restore(buckets: Sequence[Bucket], states: dict[Member, State]) -> None:
    """Take this rank's slices of ``states``; values are copied. Where there is none, forget it.

    No message, except for ``DTensor`` that are placed otherwise.

    Raises:
        LayoutError: state of another shape.
    """
    for bucket in buckets:
        for member in bucket.offsets:
            state = dict(states.get(member, {}))
            parts = {
                name: like_storage(member, own_part(member, value, f"{name} of {member.name}"))
                for name, value in state.items()
                if _is_slice(value)
            }
            master = parts.pop(MASTER, None)
            if master is not None and bucket.has_master:
                bucket.put(bucket.master, member, master.to(bucket.master.dtype))
            for segment, _ in _live(bucket):
                if segment.member is member:
                    _take(bucket, segment, state, parts)


def _take(bucket: Bucket, segment: Segment, state: State, parts: dict[str, Tensor]) -> None:
    assert bucket.inner is not None, "a bucket with segments has an inner optimizer"
    bucket.inner.state.pop(segment.tensor, None)
    reach = slice(segment.offset, segment.offset + segment.tensor.numel())
    own: State = {n: bucket.kept(segment, n, part.view(-1)[reach]) for n, part in parts.items()}
    step = state.get("step")
    # What no step has used has no state, as its first step may differ from later ones.
    if step == 0 or (step is None and not any(bool(part.any()) for part in own.values())):
        return
    for name, value in state.items():
        if name not in own and name != MASTER:
            own[name] = value.detach().clone() if isinstance(value, Tensor) else value
    bucket.inner.state[segment.tensor] = own


class States:
    """``optimizer.state``: by parameter, this rank's slices of its state (1-D; ``None``: unused).

    Names are there before the first step, as torch's state dict helpers would else make a step.
    """

    def __init__(
        self, buckets: Sequence[Bucket], names: dict[int, Names], place: dict[Member, int]
    ) -> None:
        self._names, self._place = names, place
        self._held = {id(m.parameter): (m, bucket) for bucket in buckets for m in bucket.offsets}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Tensor]:
        return (member.parameter for member, _ in self._held.values())

    def __getitem__(self, parameter: Tensor) -> State:
        member, bucket = self._held[id(parameter)]
        names = self._names[self._place[member]]
        found: State = dict.fromkeys((*names.slices, *names.values))
        for segment, state in _live(bucket):
            if segment.member is member:
                found |= state
                if bucket.has_master:
                    found[MASTER] = segment.tensor
        return found
