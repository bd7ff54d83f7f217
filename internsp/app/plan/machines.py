"""Reductions between the machines of a device's near domains: in two levels, or at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from internsp.app.config import Config
from internsp.app.plan.configured import reduce_dtype
from internsp.app.plan.devices import Device
from internsp.base.sizes import human
from internsp.mesh.shape import MeshShape
from internsp.schedule.chunk import ChunkLayout
from internsp.structure.near import ranks_near

KEY = "weight_parallel.reduce"


def on_machines(config: Config, world_size: int, device: Device | None) -> Config:
    """``config`` with the number that ``reduce = "auto"`` takes on machines of
    ``device.near_ranks`` ranks; as it is where sums go at once, or without a device."""
    if device is None or config.weight_parallel.reduce != "auto":
        return config
    if not (near := _near(config, world_size, device)):
        return config
    weights = config.weight_parallel.model_copy(update={"reduce": near})
    return config.model_copy(update={"weight_parallel": weights})


def sums_lines(config: Config, chunks: Sequence[ChunkLayout], world_size: int, device: Device
) -> Iterator[str]:  # fmt: skip
    """What reductions receive from other machines, as planned and by the other forms.

    Args:
        config: with its key as :func:`on_machines` leaves it.
    """
    planned: int | str = chunks[0].reduce_near
    near = chunks[0].reduce_near or _near(config, world_size, device)
    shape = MeshShape(world_size, **config.degrees())
    itemsize = reduce_dtype(config).itemsize
    at_once = levels = ring = 0.0
    for weight in {w for c in chunks for u in c.units for w in u.weights if w.trainable}:
        size = shape.axis(weight.expert).size
        if near and size > near:
            part = weight.gradient_bytes / size
            at_once += (size - near) * part
            levels += (size // near - 1) * part * max(itemsize, 4) / itemsize
            ring += (size - 1) / near * part
    if not at_once:
        return
    if config.weight_parallel.reduce == "backend":
        planned = '"backend"'
    forms = {
        near: f"in two levels {human(int(levels))}",
        0: f"at once {human(int(at_once))}",
        '"backend"': f"in a ring over all adapters {human(int(ring))}",
    }
    first = forms.pop(planned)
    others = ", ".join(f"{text} ({KEY} = {key})" for key, text in forms.items())
    yield (
        f"Gradients that a rank's backward receives from other machines of {near} ranks: "
        f"{first}; {others}"
    )


def _near(config: Config, world_size: int, device: Device) -> int:
    machines = {rank: rank // device.near_ranks for rank in range(world_size)}
    shape = MeshShape(world_size, machines=machines, **config.degrees())
    return ranks_near(shape, reduce_dtype(config))
