"""The optimizer's state as a dictionary that ``torch.distributed.checkpoint`` can save and fill.

Entries are named by parameter and are tensors of the parameter's shape, of which each rank gives
and takes its own index ranges (:mod:`internsp.optim.slices`): any mesh loads what any mesh saved.
Every rank's dictionary has the same keys before the first step as after it: a parameter that was
never used has zeros, and a mark that they are not to be taken. A weight that several stages have
has one entry, by the whole model's name, of which they give and take the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from internsp.errors import LayoutError
from internsp.optim.bucket import Bucket, Segment
from internsp.optim.matrices import Matrix, MatrixSteps
from internsp.optim.slices import Slices
from internsp.optim.state_names import Names
from internsp.optim.whole_state import MASTER

StateDict = dict[str, Any]
USED = "used"
"""1 where a step has made the state of a parameter, a tensor without dimensions."""


def collect(
    buckets: Sequence[Bucket],
    steps: MatrixSteps,
    settings: Sequence[StateDict],
    names: dict[tuple[int, torch.dtype], Names],
) -> StateDict:
    """This rank's state: ``{parameter's name: {kind: Slices, or a value of the whole}}``.

    Tensors are the live ones, not copies. No message. State of whole-matrix steps is their owner's.

    Args:
        steps: of whole matrices.
        names: what was found out before, by group and dtype; added to.
    """
    state: StateDict = {}
    for bucket, segment in _segments(buckets):
        if bucket.inner is None:
            if bucket.has_master:
                masters = Slices.of(segment.region, segment.tensor)
                state.setdefault(segment.member.name_in_model, {})[MASTER] = masters
            continue
        assert bucket.method.on_slices is not None, "it has an inner optimizer"
        key = segment.group, bucket.master.dtype
        if key not in names:
            like = bucket.master.new_zeros(2)
            names[key] = Names(like, bucket.method.on_slices, settings[segment.group])
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
        _collect_matrix(matrix, steps.names(matrix, settings), state)
    return state


def _collect_matrix(matrix: Matrix, names: Names, state: StateDict) -> None:
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


def restore(buckets: Sequence[Bucket], steps: MatrixSteps, state: StateDict) -> None:
    """Take what :func:`collect` gave on this mesh, refilled or not. Values are copied.

    Raises:
        LayoutError: an entry is missing, or is of other index ranges. Nothing was taken then.
    """
    segments = list(_segments(buckets))
    for bucket, segment in segments:
        _check(bucket, segment, state.get(segment.member.name_in_model))
    for matrix in steps.own:
        _check_matrix(matrix, state.get(matrix.member.name_in_model))
    for matrix in steps.own:
        _restore_matrix(matrix, state[matrix.member.name_in_model])
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
                kind: bucket.kept(segment, kind, _whole(value, segment))
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
    here = _places(Slices.of(segment.region, segment.tensor))
    for kind, value in entry.items():
        if bucket.inner is None and kind != MASTER:
            continue  # the owner's
        if isinstance(value, Slices) and (there := _places(value)) != here:
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
        box = matrix.box if value.shape == matrix.member.parameter.shape else (0,) * value.dim()
        if box not in value.parts:
            raise LayoutError(
                f"the optimizer state has {kind} of {name} at {_places(value)}, not where this "
                "rank's matrix begins: save and load it through torch.distributed.checkpoint, "
                "which gives each rank its own"
            )


def _restore_matrix(matrix: Matrix, entry: StateDict) -> None:
    own: StateDict = {}
    for kind, value in entry.items():
        if isinstance(value, Slices) and kind != MASTER:
            boxed = value.shape == matrix.member.parameter.shape
            part = value.parts[matrix.box if boxed else (0,) * value.dim()]
            own[kind] = (part.view(matrix.shape) if boxed else part).detach().clone()
        elif kind not in (MASTER, USED):
            own[kind] = value.detach().clone() if isinstance(value, Tensor) else value
    matrix.take(own if bool(entry[USED]) else {})


def _places(slices: Slices) -> list[list[str]]:
    """Of each box its ranges."""
    return [
        [f"{start}:{start + size}" for start, size in zip(offsets, part.shape, strict=True)]
        for offsets, part in slices.parts.items()
    ]


def _fill(target: Tensor, value: Slices, segment: Segment) -> None:
    parts = segment.region.cut(target)
    for offsets, part in value.parts.items():
        parts[offsets].copy_(part)


def _whole(value: Any, segment: Segment) -> Any:
    """The values of a segment in one piece."""
    if isinstance(value, Slices):
        made = torch.empty_like(segment.tensor, dtype=value.dtype)
        _fill(made, value, segment)
        return made
    return value
