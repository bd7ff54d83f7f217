"""Predictors that must do worse: each lacks one thing that the planner knows.

What a control meets although it knows less, the planner's tables do not show.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from internsp.app.plan.compute import model_flops
from internsp.app.plan.devices import Device
from internsp.app.plan.seconds import Part, StepSeconds
from internsp.app.plan.workload import Recompute, Workload
from tools.planner.fit import FIRST
from tools.planner.others import step_seconds
from tools.planner.rows import Row, workload_of
from tools.planner.score import Prediction, Predictor, predictions


def constant_share(load: Workload, device: Device) -> StepSeconds:
    """The usual count of operations at one share of the peak, 0.4, whatever the layout is."""
    done = model_flops(load.model, load.sequence, causal=False) * load.step_tokens
    seconds = done / load.degrees.devices / device.peak[load.dtype] / 0.4
    return StepSeconds({Part.PRODUCTS: seconds}, 0.0, seconds)


def infinite_links(load: Workload, device: Device) -> StepSeconds:
    """Messages take no time."""
    return step_seconds(load, replace(device, near=1e18, far=1e18))


def no_slowdown(load: Workload, device: Device) -> StepSeconds:
    """Products run as fast beside a message as without one."""
    return step_seconds(load, replace(device, fitted=replace(device.fitted, slowdown=0.0)))


def no_recompute(load: Workload, device: Device) -> StepSeconds:
    """Nothing is computed twice."""
    return step_seconds(replace(load, recompute=Recompute()), device)


def exchanged(load: Workload, device: Device) -> StepSeconds:
    """Tensor and pipeline degrees change places."""
    was = load.degrees
    degrees = replace(was, tensor=was.pipeline, pipeline=was.tensor)
    return step_seconds(replace(load, degrees=degrees), device)


def unfitted(load: Workload, device: Device) -> StepSeconds:
    """Usual constants for every device: nothing is fitted."""
    return step_seconds(load, replace(device, fitted=FIRST))


def shuffled(rows: Sequence[Row], seed: int = 0) -> list[Prediction]:
    """The measured times a token of a device's rows, dealt out again among them."""
    found = predictions(rows)
    order = random.Random(seed)
    by_device: dict[str, list[Prediction]] = {}
    for each in found:
        if each.error is not None:
            by_device.setdefault(each.row.text("device"), []).append(each)
    mixed = []
    for own in by_device.values():
        # A row's prediction is scaled so that its row's error is another's: measured seconds by
        # operation are exchanged, not seconds, which would only compare sizes.
        speeds = [_speed(each) for each in own]
        dealt = speeds[:]
        order.shuffle(dealt)
        for each, mine, other in zip(own, speeds, dealt, strict=True):
            cells = dict(each.row.cells)
            cells["seconds_per_step"] = str((each.row.seconds or 0.0) * mine / other)
            mixed.append(Prediction(**{**vars(each), "row": Row(cells)}))
    return mixed


def _speed(each: Prediction) -> float:
    """Operations a second that the row measured."""
    load, _ = workload_of(each.row)
    done = model_flops(load.model, load.sequence) * load.step_tokens / load.degrees.devices
    return done / (each.row.seconds or 1.0)


CONTROLS: dict[str, Predictor] = {
    "one constant share of peak": constant_share,
    "links of infinite speed": infinite_links,
    "no slowdown beside messages": no_slowdown,
    "no recompute": no_recompute,
    "tensor and pipeline exchanged": exchanged,
    "nothing fitted": unfitted,
}
