"""``tools/compare_runs.py``: equality of runs as a command."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from internsp.app.report.metrics import MetricsWriter, StepMetrics
from tests.support.metrics import step
from tools.compare_runs import compare, main


def row(number: int, loss: float, norm: float) -> StepMetrics:
    return step(number, loss, grad_norm=norm)


def write(folder: Path, rows: list[StepMetrics]) -> str:
    folder.mkdir()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for metrics in rows:
            writer.write(metrics)
    return str(folder)


def test_the_largest_difference_and_its_step_are_found() -> None:
    a = [row(1, 4.0, 1.0), row(2, 3.0, 2.0), row(3, 2.0, 1.0)]
    b = [row(1, 4.0, 1.0), row(2, 2.0, 2.0), row(4, 9.0, 9.0)]
    assert compare(a, b) == {"loss": (0.5, 2), "grad_norm": (0.0, 2)}
    assert compare([row(1, math.nan, 1.0)], [row(1, 1.0, 1.0)])["loss"][0] == math.inf


def test_the_exit_status_says_whether_runs_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a", [row(1, 4.0, 1.0), row(2, 3.0, 1.0)])
    b = write(tmp_path / "b", [row(1, 4.0, 1.0), row(2, 3.003, 1.0)])
    assert main([a, a]) == 0
    assert main([a, b]) == 1
    assert "0.000999 at step 2" in capsys.readouterr().out
    assert main([a, b, "--tolerance", "0.01"]) == 0
    assert main([a, str(tmp_path / "nothing")]) == 2
