"""``tools/quantize_losses.py``: losses of runs that differ in weight_parallel.quantize."""

from __future__ import annotations

from pathlib import Path

import pytest

from internsp.app.report.metrics import StepMetrics
from tests.support.metrics import step
from tools.quantize_losses import main, table


def row(number: int, loss: float, held_out: float | None = None) -> StepMetrics:
    return step(number, loss, eval_loss=held_out, gathered_bytes=1 << 20)


def test_the_table_has_the_first_every_tenth_and_the_last_step() -> None:
    runs = {
        "none": [row(n, 3.0 - n / 100, 2.5 if n == 12 else None) for n in range(1, 13)],
        "int8": [row(n, 3.0, 2.75 if n == 12 else None) for n in range(1, 13)],
    }
    assert table(runs, 10)[2:] == [
        "| 1 | 2.9900 | 3.0000 |",
        "| 10 | 2.9000 | 3.0000 |",
        "| 12 | 2.8800 | 3.0000 |",
        "| held out | 2.5000 | 2.7500 |",
        "| gathered a step | 1.00 MiB | 1.00 MiB |",
    ]


@pytest.mark.slow(8)
@pytest.mark.ranks
def test_quantized_runs_learn_as_the_plain_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(__file__).parents[1] / "data"
    tiny = ("model.layers=2", "model.hidden_size=64", "weight_parallel.coalesce_bytes=0")
    assert main(["--text", str(text), "--steps", "6", "--every", "6", "--options", *tiny]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, last = ([float(x) for x in line.split("|")[2:5]] for line in lines[2:4])
    for kind in (1, 2):
        assert first[kind] == pytest.approx(first[0], rel=1e-3)
        assert (first[kind], last[kind]) != (first[0], last[0])
        assert last[kind] == pytest.approx(last[0], rel=1e-2)
    assert max(last) < min(first)
    gathered = [float(x.split()[0]) for x in lines[-1].split("|")[2:5]]
    assert gathered[1] == gathered[2] < gathered[0] / 2


def test_a_failed_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kinds", "int9"]) == 2
    assert 'did you mean "int8"' in capsys.readouterr().err
