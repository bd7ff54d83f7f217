"""One row of ``metrics.jsonl`` for each optimizer step: written line by line, read tolerantly."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from internsp.errors import InternspError

_INTEGERS = (
    "step", "tokens", "gathered_bytes", "reduced_bytes", "peak_memory_bytes", "skipped_steps",
)  # fmt: skip
_OPTIONAL = ("eval_loss", "comm_seconds", "stage_wait_seconds", "skipped_steps")


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one optimizer step did.

    Attributes:
        step: number of the optimizer step.
        loss: nats per valid token, over all ranks and micro-batches.
        grad_norm: global gradient norm before clipping.
        lr: learning rate that the step used.
        tokens: valid tokens of the step, over all ranks.
        step_seconds: wall time of the step on this rank.
        tokens_per_second: ``tokens / step_seconds``.
        exposed_comm_seconds: time in which this rank's computing thread waited for communication.
        gathered_bytes: payload of weight gathers that this rank received.
        reduced_bytes: payload of gradient reductions that this rank sent.
        peak_memory_bytes: peak memory of this rank.
        eval_loss: held-out loss, nats per valid token, where the step was followed by an
            evaluation.
        comm_seconds: time in which communication was in flight, hidden or not, where it was
            measured (see :func:`internsp.report.timeline.step_times`).
        stage_wait_seconds: time in which this rank of a pipeline had no pass to run.
        skipped_steps: how many steps of the run, up to this one, have changed nothing, because
            gradients were not finite. A step that was skipped has a ``grad_norm`` that is not.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_seconds: float
    tokens_per_second: float
    exposed_comm_seconds: float
    gathered_bytes: int
    reduced_bytes: int
    peak_memory_bytes: int
    eval_loss: float | None = None
    comm_seconds: float | None = None
    stage_wait_seconds: float | None = None
    skipped_steps: int | None = None

    @property
    def exposed_step_share(self) -> float:
        """Exposed communication as a fraction of the step (0 for a step of no time)."""
        return self.exposed_comm_seconds / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def stage_wait_share(self) -> float | None:
        """Waiting for other stages as a fraction of the step; ``None`` without a pipeline."""
        if self.stage_wait_seconds is None:
            return None
        return self.stage_wait_seconds / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def exposed_comm_share(self) -> float | None:
        """Exposed communication as a fraction of all communication, where that was measured."""
        if self.comm_seconds is None:
            return None
        return self.exposed_comm_seconds / self.comm_seconds if self.comm_seconds > 0 else 0.0

    def to_row(self) -> dict[str, Any]:
        """The JSON object of this step; optional keys without a value are left out.

        JSON has no NaN and no infinity: they are written as the strings ``"NaN"``,
        ``"Infinity"`` and ``"-Infinity"``, which ``float`` (and JavaScript's ``Number``) read.
        """
        row: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            row[field.name] = _json_number(value)
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> StepMetrics:
        """The inverse of :meth:`to_row`; keys of later versions are ignored.

        Raises:
            KeyError: a required key is missing.
            TypeError, ValueError: a value is not a number.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = field.name
            if name in _OPTIONAL and row.get(name) is None:
                continue
            values[name] = int(row[name]) if name in _INTEGERS else float(row[name])
        return cls(**values)


class MetricsWriter:
    """Appends one JSON line a step and flushes it, so that a killed run keeps what it reported.

    Args:
        path: the ``metrics.jsonl`` to write; its folder is made if need be.
        resume_step: number of the first step that will be written. Rows of that step and of
            later ones (of the run that was interrupted), and a torn last line, are removed
            first. None starts the file anew.
        run: id of the run, written into every row where given.
    """

    def __init__(
        self, path: str | Path, resume_step: int | None = None, run: str | None = None
    ) -> None:
        self.path = Path(path)
        self._run = {} if run is None else {"run": run}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and self.path.exists():
            _keep_rows_before(self.path, resume_step)
            self._file = self.path.open("a", encoding="utf-8")
        else:
            self._file = self.path.open("w", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """Append one row and hand it to the operating system before returning."""
        row = metrics.to_row() | self._run
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; more than once is fine."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[StepMetrics]:
    """Read a ``metrics.jsonl``, also of a run that is still writing or was killed.

    A last line that is torn is left out. Blank lines are skipped.

    Raises:
        InternspError: another line is not a row of metrics; the message names the line.
        OSError: the file cannot be read.
    """
    return [StepMetrics.from_row(row) for _, row in _rows(Path(path))]


def _json_number(value: float) -> float | str:
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Every whole row with the text of its line."""
    # A run cut off by a power failure can leave NUL bytes or half a character at the end.
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    rows = []
    last = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            StepMetrics.from_row(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if i == last:
                break
            raise InternspError(
                f"{path}, line {i + 1} is not a row of metrics ({error!r}); "
                "remove the line, or start the run under another name"
            ) from error
        rows.append((line, row))
    return rows


def _keep_rows_before(path: Path, step: int) -> None:
    kept = [line for line, row in _rows(path) if int(row["step"]) < step]
    # Replaced as a whole: a run killed here keeps either the old file or the new one.
    fresh = path.with_name(path.name + ".new")
    fresh.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(fresh, path)
