"""Predictions of the rows of a table, beside what was measured; and rows that look wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from statistics import median

from internsp.app.plan.devices import Device, devices
from internsp.app.plan.seconds import StepSeconds
from internsp.app.plan.workload import Workload
from tools.planner.bytes import step_bytes
from tools.planner.others import step_seconds
from tools.planner.rows import (
    Row,
    Unpredictable,
    contradictions,
    device_of,
    workload_of,
)

FAR_OFF, NEIGHBORS = 0.25, 4
_CONFIGURATION = (
    "gpus", "layers", "dtype", "compile", "seq_len", "micro_batch", "accumulation", "weight",
    "tensor", "pipeline", "interleave", "context", "expert_parallel", "replicas", "checkpointing",
    "offload", "software", "note",
)  # fmt: skip

Predictor = Callable[[Workload, Device], StepSeconds]


@dataclass(frozen=True)
class Prediction:
    """A row and what the planner says of it.

    Attributes:
        seconds: of the step; ``None``: the row cannot be predicted.
        gib: memory of a rank, as allocated.
        parts: seconds by what they are spent on.
        intensity: seconds of messages a second of computation.
        why: why it cannot be predicted.
        assumed: what the row does not say.
        flags: why the row looks wrong.
    """

    row: Row
    seconds: float | None = None
    gib: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    intensity: float = 0.0
    tokens: float = 0.0
    why: str = ""
    assumed: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """Relative error of seconds: positive if predicted too slow; ``None``: not measured."""
        if self.seconds is None or self.row.seconds is None:
            return None
        return self.seconds / self.row.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of memory."""
        if self.gib is None or self.row.gib is None:
            return None
        return self.gib / self.row.gib - 1

    @property
    def fitted_on(self) -> bool:
        """Whether a constant was fitted on the row."""
        return self.row.id in fitted_ids()


@cache
def fitted_ids() -> frozenset[str]:
    """Names of all rows that constants of built-in devices were fitted on."""
    return frozenset(name for device in devices().values() for name in device.fitted.rows)


def by_group(found: Sequence[Prediction]) -> Iterable[list[Prediction]]:
    """Those of each group that are measured and predicted."""
    groups: dict[str, list[Prediction]] = {}
    for each in found:
        if each.error is not None:
            groups.setdefault(each.row.group, []).append(each)
    return groups.values()


def predict(row: Row, predictor: Predictor = step_seconds) -> Prediction:
    """Predict one row; what cannot be predicted says why."""
    try:
        load, assumed = workload_of(row)
        device = device_of(row)
        if load.dtype not in device.peak:
            raise Unpredictable(f"dtype {load.dtype}: {device.name} has no peak for it")
        found = predictor(load, device)
        gib = step_bytes(load) / 2**30
        finite = isfinite(found.total) and found.total > 0 and found.compute > 0 and gib > 0
        intensity = found.messages / found.compute if finite else 0.0
        tokens = load.step_tokens / load.degrees.devices
    except Unpredictable as error:
        return Prediction(row, why=str(error))
    except (ArithmeticError, ValueError) as error:
        return Prediction(row, why=f"a value is out of range ({type(error).__name__}: {error})")
    if not finite:
        return Prediction(row, why="a value is out of range: its step takes no finite time")
    return Prediction(
        row,
        found.total,
        gib,
        found.parts,
        intensity,
        tokens,
        assumed=tuple(assumed),
    )


def predictions(rows: Sequence[Row], predictor: Predictor = step_seconds) -> list[Prediction]:
    """Predict all rows, and flag those that look wrong."""
    found = [predict(row, predictor) for row in rows]
    far = _far_from_neighbors(found)
    return [
        Prediction(**{
            **vars(each),
            "flags": (*contradictions(each.row), *far.get(id(each.row), ())),
        })
        for each in found
    ]  # fmt: skip


def _far_from_neighbors(found: Sequence[Prediction]) -> dict[int, tuple[str, ...]]:
    """Rows whose measured seconds, relative to the predicted, are unlike those of rows like them.

    Neighbors are the rows of a group that differ in the fewest columns.
    """
    far: dict[int, tuple[str, ...]] = {}
    for known in by_group(found):
        for each in known:
            others = sorted(
                (other for other in known if other is not each),
                key=lambda other: _differences(each.row, other.row),
            )[:NEIGHBORS]
            if len(others) < NEIGHBORS - 1:
                continue
            usual = median(1 + (other.error or 0.0) for other in others)
            off = usual / (1 + (each.error or 0.0)) - 1
            if abs(off) > FAR_OFF:
                text = f"{off:+.0%} from its neighbors, beyond what the configuration explains"
                far[id(each.row)] = (text,)
    return far


def _differences(one: Row, other: Row) -> int:
    return sum(one.text(column) != other.text(column) for column in _CONFIGURATION)
