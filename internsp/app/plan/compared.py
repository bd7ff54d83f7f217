"""Predicted beside measured seconds of a step, by component: which part of the model was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from internsp.app.config import Config
from internsp.app.plan.configured import workload_of
from internsp.app.plan.devices import FITTED_FILE, Device, devices
from internsp.app.plan.replayed import replayed
from internsp.app.plan.seconds import Part
from internsp.app.report.timeline import WAITS, measure, spans, step_times, subtract, where_waited
from internsp.base.trace import Event
from internsp.errors import ConfigError
from internsp.mesh import MeshShape

COMPUTATION = "computation"
_COMPONENTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gathers in the open": ((Part.GATHERS,), ("AG",)),
    "reductions in the open": ((Part.REDUCTIONS,), ("RS",)),
    "replicas": ((Part.REPLICAS,), ("EX", "PUBLISH")),
    "exchanges of sequences and tokens": (
        (Part.SEQUENCES, Part.EXPERTS, Part.TENSOR), ("A2A", "RING"),
    ),
    "other waits": ((Part.BUBBLE,), ("",)),
}  # fmt: skip
"""By component, the parts of a prediction, and kinds of what a trace's waits waited for."""


def compared(
    config: Config, shape: MeshShape, device: Device, timeline: Mapping[int, Sequence[Event]]
) -> list[tuple[str, float, float]]:
    """(component, predicted, measured) seconds of a traced step, a mean of ranks.

    Empty without a trace, where steps have different numbers of sequences, or ``device`` has no
    rate for the products' dtype.
    """
    traces = [events for events in timeline.values() if events]
    known = workload_of(config, shape).dtype in device.peak
    if not traces or config.train.batch_tokens or not known:
        return []
    found = replayed(config, shape.world_size, device)
    parts = {
        name: sum(found.parts.get(part, 0.0) - found.slowed.get(part, 0.0) for part in own)
        for name, (own, _) in _COMPONENTS.items()
    }
    optimizer = found.parts.get(Part.OPTIMIZER, 0.0)
    rest = found.total - optimizer - sum(parts.values())
    ours = {COMPUTATION: rest, **parts, Part.OPTIMIZER: optimizer}
    every = [_measured(events) for events in traces]
    rows = [(name, ours[name], fmean(one[name] for one in every)) for name in ours]
    return [row for row in rows if max(row[1:]) > 0]


def _measured(events: Sequence[Event]) -> dict[str, float]:
    waits = where_waited(events)
    parts = {
        name: sum(seconds for (kind, _, _), seconds in waits.items() if kind in kinds)
        for name, (_, kinds) in _COMPONENTS.items()
    }
    stepped = measure(subtract(spans(events, ("STEP",)), spans(events, WAITS)))
    rest = step_times(events).compute - stepped
    stepped += sum(seconds for (kind, _, _), seconds in waits.items() if kind == "MATRIX")
    return {COMPUTATION: rest, **parts, Part.OPTIMIZER: stepped}


def device_of_run(folder: Path, kind: str, name: str) -> Device | None:
    """The device that a run was on.

    It is the one that ``internsp plan --calibrate`` wrote beside the run's folder, else the known
    one that torch calls ``name``, else what is assumed of a CPU.
    """
    known = devices()
    try:
        own = devices(folder.resolve().parent / FITTED_FILE)
    except ConfigError:
        own = known
    fitted = [one for key, one in own.items() if key not in known and one.kind == kind]
    if fitted:
        return fitted[0]
    if kind == "cpu":
        return known["cpu"]
    return next((one for one in known.values() if name and one.torch_name == name), None)
