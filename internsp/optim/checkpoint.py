"""The optimizer's state as a dictionary that ``torch.distributed.checkpoint`` can save and fill.

Every entry has a key that no rank with other values shares, and every rank's dictionary has the
same keys before the first step as after it: a parameter that was never used has the state that its
first step would make, with a mark that it is not to be taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from internsp.errors import MeshError
from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket, Segment
from internsp.optim.elementwise import OptimizerClass
from internsp.optim.whole_state import first_state

StateDict = dict[str, Any]


def mesh_degrees(mesh: ParallelMesh) -> dict[str, int]:
    """What decides how state is cut."""
    degrees = {"weight": mesh.weight, "zero": mesh.zero, "pipeline": mesh.pipeline}
    if mesh.tensor > 1:
        degrees["tensor"] = mesh.tensor
    if mesh.experts is not mesh.dense:
        axis = mesh.experts
        degrees |= {"expert_weight": axis.size, "expert": axis.expert, "expert_zero": axis.zero}
    return degrees


def check_mesh(state: StateDict, mesh: ParallelMesh) -> None:
    """Raises:
    MeshError: the state was cut for another mesh.
    """
    there, here = state.get("mesh"), mesh_degrees(mesh)
    if there != here:
        raise MeshError(
            f"this optimizer state was saved on a mesh {there}, but this one is {here}; resume "
            "with the same degrees (weights alone may be loaded on any mesh)"
        )


def collect(buckets: list[Bucket], cls: OptimizerClass, mesh: ParallelMesh) -> StateDict:
    """This rank's state: ``{"state": {key: {...}}, "used": {rank's key: uint8 per segment}}``.

    Tensors are the live ones, not copies.
    """
    state: StateDict = {}
    used = []
    for bucket in buckets:
        for segment in bucket.segments:
            own = _live(bucket, segment)
            used.append(bool(own))
            entry = dict(own or _first(bucket, segment, cls))
            if bucket.has_master:
                entry["master"] = segment.tensor
            if entry:
                state[segment.key] = entry
    return {"state": state, "used": {_rank_key(mesh): torch.tensor(used, dtype=torch.uint8)}}


def restore(buckets: list[Bucket], state: StateDict, mesh: ParallelMesh) -> None:
    """Take this rank's part of ``state``. Values are copied.

    Raises:
        MeshError: an entry is missing or has another size.
    """
    key = _rank_key(mesh)
    segments = [(bucket, segment) for bucket in buckets for segment in bucket.segments]
    used = state["used"].get(key)
    if used is None or len(used) != len(segments):
        raise MeshError(
            f"the optimizer state has no entry for [{key}] with {len(segments)} pieces; it is "
            "another rank's, or of another model"
        )
    flags = [bool(flag) for flag in used.tolist()]
    for (bucket, segment), flag in zip(segments, flags, strict=True):
        entry = dict(state["state"].get(segment.key, {}))
        _check(segment, entry)
        if bucket.has_master:
            if "master" not in entry:
                raise MeshError(f"the optimizer state has no master values of {segment.key}")
            segment.tensor.copy_(entry.pop("master"))
        assert bucket.inner is not None, "a bucket with segments has an inner optimizer"
        bucket.inner.state.pop(segment.tensor, None)
        if flag:
            bucket.inner.state[segment.tensor] = {
                k: bucket.kept(segment, k, v) for k, v in entry.items()
            }


def _rank_key(mesh: ParallelMesh) -> str:
    key = f"stage {mesh.pipeline_rank}"
    if mesh.tensor > 1:
        key += f", tensor {mesh.tensor_rank} of {mesh.tensor}"
    for axis in mesh.axes:
        own = f"expert {axis.expert_rank} of {axis.expert}, " if axis.expert > 1 else ""
        key += (
            f", {own}{axis.name} {axis.rank} of {axis.size}, zero {axis.zero_rank} of {axis.zero}"
        )
    return key


def _live(bucket: Bucket, segment: Segment) -> dict[str, Any]:
    if bucket.inner is None:
        return {}
    return bucket.inner.state.get(segment.tensor, {})


def _first(bucket: Bucket, segment: Segment, cls: OptimizerClass) -> dict[str, Any]:
    """The state that a first step would make, from a step of a stand-in."""
    assert bucket.inner is not None, "a bucket with segments has an inner optimizer"
    settings = bucket.inner.param_groups[bucket.groups.index(segment.group)]
    return first_state(segment.tensor, cls, settings)


def _check(segment: Segment, entry: dict[str, Any]) -> None:
    for name, value in entry.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != segment.tensor.shape:
            raise MeshError(
                f"{name} of {segment.key} has {list(value.shape)} elements in the optimizer state, "
                f"here {list(segment.tensor.shape)}; it is of another model or mesh"
            )
