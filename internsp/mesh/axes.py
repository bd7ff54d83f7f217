"""Computes degrees from the named axes of a user's ``DeviceMesh``. Pure; no communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh

from internsp.base.names import nearest
from internsp.errors import MeshError

Axes = str | Sequence[str]
"""Names of axes: one, several, or none (``()``)."""


def degrees_of(
    device_mesh: DeviceMesh, world_size: int, given: Mapping[str, Axes]
) -> tuple[dict[str, int], tuple[int, ...] | None]:
    """Degrees and rank order of the :class:`MeshShape` that is equal to ``device_mesh``.

    Args:
        given: names of axes by ``weight``, ``replicas``, ``sequence``, ``pipeline``, ``tensor``.

    Returns:
        Degrees by name (``weight``, ``sequence``, ``pipeline``, ``tensor``), and ``order`` of
        :class:`MeshShape` (``None``: ascending ranks).

    Raises:
        MeshError: see :meth:`internsp.ParallelMesh.from_device_mesh`.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(
            f"device_mesh is a {type(device_mesh).__name__}, not torch.distributed's DeviceMesh; "
            "ParallelMesh.create makes a mesh from degrees"
        )
    names = device_mesh.mesh_dim_names
    if names is None:
        raise MeshError(
            "the axes of this DeviceMesh have no names: give init_device_mesh its mesh_dim_names"
        )
    chosen: dict[str, tuple[str, ...]] = {}
    for what, axes in given.items():
        if not isinstance(axes, str | Sequence):
            raise MeshError(
                f"{what} = {axes!r} is no name of an axis of the DeviceMesh; degrees are the sizes "
                "of its axes, and ParallelMesh.create makes a mesh from degrees"
            )
        chosen[what] = (axes,) if isinstance(axes, str) else tuple(axes)
    _check_axis_names(names, chosen)
    size = device_mesh.mesh.numel()
    if size != world_size:
        raise MeshError(
            f"this DeviceMesh ({', '.join(map(repr, names))}) has {size} of {world_size} ranks: "
            "give the one of all ranks, of which it may be a part, and name all of its axes"
        )
    sizes = dict(zip(names, device_mesh.mesh.shape, strict=True))
    order = _order(device_mesh, sizes, chosen)
    degrees = {
        what: math.prod(sizes[axis] for axis in chosen[what])
        for what in ("weight", "sequence", "pipeline", "tensor")
    }
    return degrees, None if order == tuple(range(size)) else order


def _check_axis_names(names: Sequence[str], chosen: Mapping[str, Sequence[str]]) -> None:
    listed = ", ".join(map(repr, names))
    owner: dict[str, str] = {}
    for what, axes in chosen.items():
        for axis in axes:
            if axis not in names:
                near = nearest(str(axis), names)
                hint = f"; did you mean {near!r}?" if near else ""
                raise MeshError(f"{what} names {axis!r}, but this DeviceMesh has {listed}{hint}")
            # Sequences are split independently, so they may share axes with weights or replicas.
            shared = what == "sequence" and owner.get(axis) in ("weight", "replicas")
            if axis in owner and not shared:
                raise MeshError(
                    f"axis {axis!r} is named twice, by {owner[axis]} and by {what}: along one axis "
                    "weights are sharded, or replicated, or split into pipeline stages"
                )
            owner.setdefault(axis, what)
    for axis in names:
        if axis not in owner:
            raise MeshError(
                f"axis {axis!r} of this DeviceMesh is left without a meaning: name it in "
                f"{', '.join(chosen)} (it has {listed})"
            )


def _order(
    device_mesh: DeviceMesh, sizes: Mapping[str, int], chosen: Mapping[str, Sequence[str]]
) -> tuple[int, ...]:
    """Global ranks in the order that :class:`MeshShape` expects: axes from outer to inner.

    Pipeline stages come first, then the axes of neither weights nor sequences, of one of the two,
    of both, and last those of tensor ranks.
    """
    weight, sequence, pipeline, tensor = (
        {axis for axis in chosen[what] if sizes[axis] > 1}
        for what in ("weight", "sequence", "pipeline", "tensor")
    )
    if not (weight <= sequence or sequence <= weight):
        over, other = sorted(weight), sorted(sequence)
        raise MeshError(
            f"weights are sharded over {over} and sequences split over {other}, which cross: one "
            "of the two must include the other. Shard weights over both (weight = "
            f"{tuple(axis for axis in sizes if axis in weight | sequence)!r}), or sequences"
        )

    either, both = weight | sequence, weight & sequence
    # Stable: axes with equal keys keep the mesh's order.
    order = sorted(sizes, key=lambda a: (a in tensor, a not in pipeline, a in either, a in both))
    ranks = device_mesh.mesh.permute([list(sizes).index(axis) for axis in order])
    return tuple(ranks.flatten().tolist())
