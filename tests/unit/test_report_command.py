"""``internsp report``: a page regenerated from a run's files, and comparison of runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from internsp.app import cli
from internsp.app.report.compare import differences, read_runs, table
from internsp.app.report.metrics import MetricsWriter, StepMetrics
from internsp.app.report.page import CURVES, Report, load_report, median
from internsp.base.trace import Event


def made(folder: Path, losses: list[float], lr: float, rate: float = 100.0) -> Path:
    """The files of a run; with the rate 200 it has experts."""
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step, loss in enumerate(losses, start=1):
        writer.write(StepMetrics(
            step=step, loss=loss, grad_norm=1.0, lr=lr, tokens=10, step_seconds=0.1,
            tokens_per_second=rate, exposed_comm_seconds=0.02, gathered_bytes=1, reduced_bytes=1,
            peak_memory_bytes=1 << 20, mfu=0.41,
            **({"expert_load": 1.5, "router_entropy": 2.0} if rate == 200.0 else {}),
        ))  # fmt: skip
    writer.close()
    text = f'[optimizer]\nlr = {lr}\n[train]\nname = "{folder.name}"\nsteps = 9\n'
    (folder / "config.toml").write_text(text)
    return folder


def report(folder: Path) -> Report:
    run = load_report(folder)
    return Report(
        title=folder.name, config_toml=run.config_toml, metrics=run.metrics,
        mesh={"world": 2, "weight": 2},
        memory=[("weights", 4096)], notes=["A note."], advice=["More."],
        timeline={0: [Event("FORWARD", "", "", "forward", 0.0, 1.0, 0),
                      Event("AG", "layers.0", "wq", "forward", 0.1, 0.4, 64)], 1: []},
    )  # fmt: skip


def test_a_page_made_again_is_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "a", [3.0, 2.0], 1e-3)
    whole = report(run)
    whole.save(run / "report.json")
    assert cli.main(["report", str(run)]) == 0
    assert (run / "report.html").read_text() == whole.render()
    assert f"wrote {run}/report.html" in capsys.readouterr().out


def test_a_run_that_was_killed_has_a_page_of_what_it_wrote(tmp_path: Path) -> None:
    run = made(tmp_path / "a", [3.0, 2.0], 1e-3)
    assert cli.main(["report", str(run), "--to", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "it was killed, or is still going on" in page
    assert "No step was traced" in page
    assert "41.0%" in page, "MFU"
    assert not (run / "report.html").exists()


def test_runs_side_by_side_have_a_table_and_the_settings_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tmp_path / "a", [3.0, 2.0], 1e-3)
    second = made(tmp_path / "b", [3.0, 1.0, float("nan")], 2e-3, rate=200.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["report", str(first), str(second)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split()[:5] == ["a", "2", "2.0000", "-", "100"]
    assert out[2].split()[:5] == ["b", "3", "nan", "-", "200"]
    assert ["optimizer.lr", "0.001", "0.002"] in [line.split() for line in out]
    assert not [line for line in out if "train.name" in line]
    assert not list(tmp_path.glob("**/*.html"))
    assert cli.main(["report", str(first), str(second), "--to", "page.html"]) == 2
    assert "--to: it is for the page of one run; leave it out" in capsys.readouterr().err


def test_a_page_has_a_chart_of_every_figure_that_the_run_has(tmp_path: Path) -> None:
    page = load_report(made(tmp_path / "b", [3.0, 1.0], 2e-3, rate=200.0)).render()
    drawn = {chart.title for chart in CURVES if chart.key != "dropped_tokens"}
    assert {"Loss (nats per token)", *drawn} <= set(re.findall("<h2>(.*?)</h2>", page))
    assert "capacity dropped" not in page, "the run has not the figure"
    for style in ("s1", "s2", "s3", "s4"):  # the legend's, too
        assert re.search(rf"\.{style} {{ fill:[^}}]*background:", page), style
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_a_page_that_cannot_be_written_is_one_line_with_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "a", [2.0], 1e-3)
    words = ["report", str(run), "--to", str(run / "metrics.jsonl" / "page.html")]
    assert cli.main(words) == 3
    said = capsys.readouterr().err
    assert said.startswith("internsp: report: [Errno")
    assert (said.count("\n"), "metrics.jsonl" in said) == (1, True)


def test_a_median_is_of_the_steps_in_which_a_figure_is_known_and_finite(tmp_path: Path) -> None:
    rows = read_runs([made(tmp_path / "a", [3.0, float("inf"), 2.0, 1.0], 1e-3)])[0].metrics
    rows[3] = rows[3].model_copy(update={"mfu": None})
    assert median(rows, "loss", "{:.1f}") == "2.0"
    assert median(rows, "step_seconds", "{:.0f} ms", 1e3) == "100 ms"
    assert median(rows, "mfu", "{:.2f}") == "0.41"
    assert median(rows[3:], "mfu", "{:.2f}") == median([], "loss", "{}") == ""


def test_folders_of_one_name_are_told_apart_and_what_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [made(tmp_path / part / "run", [2.0], 1e-3) for part in "xy"]
    assert [row[0] for row in table(read_runs(runs))[1:]] == [str(run) for run in runs]
    for run, key in zip(runs, ("reduce", "reduce_near_ranks"), strict=True):  # and an older name
        with (run / "config.toml").open("a") as file:
            file.write(f"[weight_parallel]\n{key} = 2\n")
    assert differences(read_runs(runs)) == [["setting", *map(str, runs)]]
    for words, wanted in (
        ([str(tmp_path)], "is not the folder of a run"),
        ([str(runs[0]), str(runs[0])], "given twice"),
    ):
        assert cli.main(["report", *words]) == 2
        assert wanted in capsys.readouterr().err
    report(runs[0]).save(runs[0] / "report.json")
    saved = json.loads((runs[0] / "report.json").read_text())
    for change, wanted in (
        ({"timeline": {"0": [["AG"]]}}, "zip() argument 2 is shorter"),
        ({"timeline": {"0": [["AG", 1, "", "", 0, 1, 2]]}}, "1 validation error for Report\n"),
        ({"memory": [["weights", "many"]]}, "1 validation error for Report\n"),
        ({"mesh": [2]}, "1 validation error for Report\n"),
    ):
        (runs[0] / "report.json").write_text(json.dumps({**saved, **change}))
        assert cli.main(["report", str(runs[0])]) == 2
        assert f"report.json is damaged: {wanted}" in capsys.readouterr().err
    (runs[0] / "report.json").unlink()
    for content in (b"[train\n", b"\xff\xfe\n", b"train = 1\n"):
        (runs[1] / "config.toml").write_bytes(content)
        assert cli.main(["report", str(runs[1])]) == 0, "its page is of its metrics"
        assert cli.main(["report", *map(str, runs)]) == 2
        assert "y/run/config.toml is damaged" in capsys.readouterr().err
