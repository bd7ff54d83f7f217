"""The optimizer's state as a dictionary that ``torch.distributed.checkpoint`` saves and fills.

Entries are named by parameter and are tensors of the parameter's shape, of which each rank saves
and loads its own index ranges (:mod:`internsp.optim.slices`): any mesh loads what any mesh saved.
Every rank's dictionary has the same keys before the first step as after it: a parameter that was
never used has zeros, and ``USED`` = 0 says that they are not to be loaded. A weight that is tied
over stages has one entry, under its name in the whole model, which each of these stages saves and
loads with the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from internsp.base.stand_in import StateNames
from internsp.errors import LayoutError
from internsp.optim.bucket import Bucket, Segment
from internsp.optim.gathered_state import MASTER
from internsp.optim.matrices import Matrix, MatrixSteps
from internsp.optim.slices import Slices
from internsp.wp.parameter import Member

StateDict = dict[str, Any]
USED = "used"
"""Key of a tensor without dimensions: 1 if a step has made the parameter's state, else 0."""


def local_state(
    buckets: Sequence[Bucket],
    steps: MatrixSteps,
    settings: Sequence[StateDict],
    names: dict[tuple[int, torch.dtype], StateNames],
    frozen: Sequence[Member] = (),
) -> StateDict:
    """This rank's state: ``{parameter's name: {kind: Slices, or a value of the whole parameter}}``.

    Tensors are the live ones, not copies. No communication. The state of a matrix that is stepped
    unsharded is in its owner's dictionary.

    Args:
        steps: the steps of whole matrices.
        names: cache of state names by group and dtype; this call adds to it.
        frozen: parameters in groups that were never trained: ``USED`` alone stands for them.
    """
    state: StateDict = {}
    for bucket, segment in _segments(buckets):
        if bucket.inner is None:
            if bucket.has_master:
                masters = Slices.of(segment.region, segment.tensor)
                state.setdefault(segment.member.name_in_model, {})[MASTER] = masters
            continue
        assert bucket.method.slice_optimizer is not None, "it has an inner optimizer"
        key = segment.group, bucket.master.dtype
        if key not in names:
            like = bucket.master.new_zeros(2)
            names[key] = StateNames(like, bucket.method.slice_optimizer, settings[segment.group])
        live = bucket.inner.state.get(segment.tensor, {})
        entry: StateDict = {USED: torch.tensor(bool(live), dtype=torch.uint8)}
        for name, dtype in names[key].slices.items():
            values = live[name] if live else torch.zeros_like(segment.tensor, dtype=dtype)
            entry[name] = Slices.of(segment.region, values)
        for name, value in names[key].values.items():
            if name in live:
                entry[name] = live[name]
            else:  # a copy, which may be written to
                entry[name] = value.clone() if isinstance(value, Tensor) else value
        if bucket.has_master:
            entry[MASTER] = Slices.of(segment.region, segment.tensor)
        state[segment.member.name_in_model] = entry
    for matrix in steps.own:
        _local_matrix_state(matrix, steps.state_names(matrix, settings), state)
    for member in frozen:
        state[member.name_in_model] = {USED: torch.zeros((), dtype=torch.uint8)}
    return state


def _local_matrix_state(matrix: Matrix, names: StateNames, state: StateDict) -> None:
    entry = state.setdefault(matrix.member.name_in_model, {})
    live, like = matrix.state, matrix.bucket.master
    entry[USED] = torch.tensor(bool(live), dtype=torch.uint8)
    for name, dtype in names.slices.items():
        values = live[name] if live else like.new_zeros(matrix.shape, dtype=dtype)
        made = matrix.slices(values)
        if name in entry:  # of another matrix of the stack
            made = Slices(made.shape, values, {**entry[name].parts, **made.parts})
        entry[name] = made
    for name, first in names.values.items():
        value = live.get(name, first.clone() if isinstance(first, Tensor) else first)
        entry[name] = matrix.slices(value) if isinstance(value, Tensor) and value.dim() else value


def load_local_state(
    buckets: Sequence[Bucket],
    steps: MatrixSteps,
    state: StateDict,
    frozen: Sequence[Member] = (),
) -> None:
    """Load what :func:`local_state` returned on this mesh, with its old or other values. Values are
    copied. No communication.

    Raises:
        LayoutError: an entry is missing, or has other index ranges. Nothing was loaded then.
    """
    trained = [m.name for m in frozen if bool(state.get(m.name_in_model, {}).get(USED, False))]
    if trained:
        raise LayoutError(
            f"the optimizer state is of a run that has trained {', '.join(trained)}, frozen here "
            "since the optimizer was made: unfreeze them (requires_grad_(True)) before "
            "local_state_dict(), load, and freeze them again"
        )
    segments = list(_segments(buckets))
    for bucket, segment in segments:
        _check(bucket, segment, state.get(segment.member.name_in_model))
    for matrix in steps.own:
        _check_matrix(matrix, state.get(matrix.member.name_in_model))
    for matrix in steps.own:
        _load_matrix_state(matrix, state[matrix.member.name_in_model])
    for bucket, segment in segments:
        if bucket.inner is None and not bucket.has_master:
            continue
        entry = dict(state[segment.member.name_in_model])
        if bucket.has_master:
            _fill(segment.tensor, entry[MASTER], segment)
        entry.pop(MASTER, None)
        if bucket.inner is None:
            continue
        used = bool(entry.pop(USED))
        bucket.inner.state.pop(segment.tensor, None)
        if used:
            bucket.inner.state[segment.tensor] = {
                kind: bucket.copy_to_state_memory(segment, kind, _segment_values(value, segment))
                for kind, value in entry.items()
            }


def _segments(buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, Segment]]:
    return ((bucket, segment) for bucket in buckets for segment in bucket.segments)


def _check(bucket: Bucket, segment: Segment, entry: StateDict | None) -> None:
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


def _check_matrix(matrix: Matrix, entry: StateDict | None) -> None:
    name = matrix.member.name
    if entry is None or USED not in entry:
        raise LayoutError(f"the optimizer state has no [{USED!r}] of {name}")
    for kind, value in entry.items():
        if kind == MASTER or not isinstance(value, Slices):
            continue
        box = matrix.offsets if value.shape == matrix.member.parameter.shape else (0,) * value.dim()
        if box not in value.parts:
            raise LayoutError(
                f"the optimizer state has {kind} of {name} at {_index_ranges(value)}, "
                "not where this rank's matrix begins: save and load it through "
                "torch.distributed.checkpoint, which gives each rank its own"
            )


def _load_matrix_state(matrix: Matrix, entry: StateDict) -> None:
    own: StateDict = {}
    for kind, value in entry.items():
        if isinstance(value, Slices) and kind != MASTER:
            boxed = value.shape == matrix.member.parameter.shape
            part = value.parts[matrix.offsets if boxed else (0,) * value.dim()]
            own[kind] = (part.view(matrix.shape) if boxed else part).detach().clone()
        elif kind not in (MASTER, USED):
            own[kind] = value.detach().clone() if isinstance(value, Tensor) else value
    matrix.load_state(own if bool(entry[USED]) else {})


def _index_ranges(slices: Slices) -> list[list[str]]:
    """For each box, its index range in each dimension."""
    return [
        [f"{start}:{start + size}" for start, size in zip(offsets, part.shape, strict=True)]
        for offsets, part in slices.parts.items()
    ]


def _fill(target: Tensor, value: Slices, segment: Segment) -> None:
    parts = segment.region.box_views(target)
    for offsets, part in value.parts.items():
        parts[offsets].copy_(part)


def _segment_values(value: Any, segment: Segment) -> Any:
    """The values of a segment, 1-D; ``value`` itself if it is not ``Slices``."""
    if isinstance(value, Slices):
        made = torch.empty_like(segment.tensor, dtype=value.dtype)
        _fill(made, value, segment)
        return made
    return value
