"""metrics.jsonl survives kills, resumes and NaN; the display shows the values of the rows."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import resource
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from internsp.app.report.display import Display, duration
from internsp.app.report.metrics import MetricsWriter, read_metrics
from internsp.app.train.step import peak_memory_bytes
from internsp.errors import InternspError
from tests.support.metrics import step


def test_rows_read_back_equal_and_are_on_disk_before_the_writer_closes(tmp_path):
    rows = [step(1), step(2, eval_loss=2.25), step(3, mfu=0.2)]
    with closing(MetricsWriter(tmp_path / "deep" / "metrics.jsonl")) as writer:
        for row in rows:
            writer.write(row)
        assert read_metrics(writer.path) == rows
    keys = set(json.loads(writer.path.read_text().splitlines()[0]))
    assert keys == {
        *("step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second"),
        *("exposed_comm_seconds", "gathered_bytes", "reduced_bytes", "peak_memory_bytes"),
    }


def test_values_that_json_lacks_are_written_as_valid_json_and_read_back(tmp_path):
    with closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
        writer.write(step(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf))

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    json.loads(writer.path.read_text(), parse_constant=refuse)
    (row,) = read_metrics(writer.path)
    assert math.isnan(row.loss)
    assert (row.grad_norm, row.lr) == (math.inf, -math.inf)


@pytest.mark.parametrize("torn", ['{"step": 5, "lo', '{"step": 5, "loss": 1.0}', "\x00\x00", "7"])
def test_resuming_removes_later_rows_and_a_torn_last_line(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    with closing(MetricsWriter(path)) as writer:
        for number in range(1, 5):
            writer.write(step(number, loss=float(number)))
    path.write_text(path.read_text() + torn)
    assert [m.step for m in read_metrics(path)] == [1, 2, 3, 4]
    with closing(MetricsWriter(path, resume_step=3)) as writer:
        writer.write(step(3, loss=30.0))
    assert [(m.step, m.loss) for m in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.parametrize("resumed", [False, True])
def test_the_last_step_written_again_takes_the_place_of_its_row(tmp_path, resumed):
    path = tmp_path / "m.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write(step(1, loss=1.0))
        if not resumed:
            writer.write(step(2, loss=2.0))
    with closing(MetricsWriter(path, resume_step=2)) as writer:
        for loss in (2.25, 2.25, 2.5):
            writer.write(step(2, loss=loss))
            assert [(m.step, m.loss) for m in read_metrics(path)] == [(1, 1.0), (2, loss)]
        writer.write(step(3, loss=3.0))
    assert [(m.step, m.loss) for m in read_metrics(path)] == [(1, 1.0), (2, 2.5), (3, 3.0)]


def test_a_row_written_again_after_its_folder_has_moved_touches_no_other_runs_file(tmp_path):
    path = tmp_path / "run" / "m.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write(step(1, loss=1.0))
        writer.write(step(2, loss=2.0))
        moved = path.parent.rename(tmp_path / "moved") / path.name
        path.parent.mkdir()
        path.write_text("of another run\n" * 99)
        writer.write(step(2, loss=2.5))
    assert [(m.step, m.loss) for m in read_metrics(moved)] == [(1, 1.0), (2, 2.5)]
    assert path.read_text() == "of another run\n" * 99


def test_a_new_run_does_not_keep_rows_of_an_older_one(tmp_path):
    for number in (1, 9):
        with closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
            writer.write(step(number))
    assert [m.step for m in read_metrics(tmp_path / "m.jsonl")] == [9]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    good = step(1).model_dump_json()
    path.write_text(f"{good}\nnonsense\n{good}\n")
    with pytest.raises(InternspError, match=r"m\.jsonl, line 2 is not a row .*Invalid JSON"):
        read_metrics(path)
    path.write_text(f"{good}\n{good}\n{step(2).model_dump_json(exclude={'lr'})}\n{good}\n")
    with pytest.raises(InternspError, match=r"line 3 .* \(lr: Field required\)"):
        read_metrics(path)


def test_keys_of_later_versions_are_ignored_and_stay_in_the_file(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(json.loads(step(1).model_dump_json()) | {"later": [1]}) + "\n")
    assert read_metrics(path) == [step(1)]
    with closing(MetricsWriter(path, resume_step=2, run="an id")) as writer:
        writer.write(step(2))
    kept, fresh = map(json.loads, path.read_text().splitlines())
    assert kept["later"] == [1]
    assert fresh["run"] == "an id"


def test_shares_of_exposed_communication_are_fractions_of_what_they_say():
    assert step(1).exposed_step_share == pytest.approx(0.1)
    assert step(1, exposed_comm_seconds=None).exposed_step_share is None
    assert step(1, step_seconds=0.0).exposed_step_share == 0.0
    assert step(1).stage_wait_share is None


def test_plain_lines_come_at_first_every_nth_evaluated_and_last_step():
    stream = io.StringIO()
    display = Display(10, title="demo", log_every=4, stream=stream, environ={})
    assert not display.live
    for number in range(1, 11):
        display.update(step(number, **({"eval_loss": 2.25} if number == 6 else {})))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "demo: 10 steps"
    assert [line.split("/")[0].split()[-1] for line in lines[1:]] == ["1", "4", "6", "8", "10"]
    assert lines[2] == (
        "step  4/10  loss 2.5000  lr 3.00e-04  grad norm 0.75  tokens/s 2,000"
        "  exposed 10% of step  left 0:03"
    )
    assert "  loss 2.5000  held-out 2.2500  lr" in lines[3]
    assert lines[3].endswith("left 0:02")


def test_a_resumed_run_counts_on_and_the_summary_shows_files():
    stream = io.StringIO()
    display = Display(10, log_every=1, done_steps=8, stream=stream, environ={})
    display.update(step(9, loss=3.0))
    display.finish({"report": "runs/x/report.html"}, interrupted=True)
    text = stream.getvalue()
    assert "step  9/10" in text
    assert "stopped after 9/10 steps" in text
    assert "  report  runs/x/report.html\n" in text


def test_no_run_has_more_steps_than_it_is_said_to_have() -> None:
    stream = io.StringIO()
    Display(3, done_steps=4, stream=stream, environ={}).finish()  # train.steps was lowered
    assert "finished after 4/4 steps" in stream.getvalue()
    display = Display(1, total_tokens=9, stream=stream, environ={})  # an estimate
    display.update(step(1, tokens=5))
    display.update(step(2, tokens=5))
    assert "step 2/2" in stream.getvalue()


@pytest.mark.parametrize(
    ("losses", "skipped", "told"),
    [
        ([5.5, 3.5, 4.5], 1, "  loss        5.5000 -> 4.5000 (mean of the last 3 steps)\n"
         "  skipped     1 step: gradients were not finite\n"),
        ([5.5, math.nan], 2, "  loss        5.5000 -> nan (mean of the last 2 steps)\n"
         "  skipped     2 steps: gradients were not finite\n"),
        ([5.5], 0, "  loss        5.5000 -> 5.5000\n  throughput"),
        ([9.0, 8.0, *[2.0] * 10], 0, "  loss        9.0000 -> 2.0000 (mean of the last 10 st"),
    ],
    ids=["skipped", "diverged", "one", "many"],
)  # fmt: skip
def test_the_summary_has_a_mean_of_losses_and_says_what_was_skipped(losses, skipped, told):
    stream = io.StringIO()
    display = Display(len(losses), stream=stream, environ={})
    for number, loss in enumerate(losses, start=1):
        display.update(step(number, loss=loss, skipped_steps=skipped))
    display.finish()
    assert told in stream.getvalue()


def test_a_log_in_ascii_does_not_end_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    display = Display(1, stream=stream, environ={})
    display.note("naïve")
    assert raw.getvalue().endswith(b"na?ve\n")


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


class AsciiTerminal(Terminal):
    encoding = "ascii"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("epochs", "shown"),
    [
        ({"": 1.5}, "tokens 7  epoch 1.50  tokens/s"),
        ({"a": 0.5, "dir/b": 2.0}, "tokens 7  tokens/s"),  # metrics.jsonl has them
        ({}, "tokens 7  tokens/s"),  # a program's own data
    ],
)
def test_a_line_has_the_passes_over_a_single_text(epochs: dict[str, float], shown: str) -> None:
    stream = io.StringIO()
    Display(2, stream=stream, environ={}).update(step(1, 1.0, total_tokens=7, epochs=epochs))
    assert shown in stream.getvalue()


@pytest.mark.parametrize(
    ("stream", "environ", "live"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
        (AsciiTerminal(), {"TERM": "xterm"}, False),
    ],
)
def test_only_a_willing_terminal_gets_the_bar(stream, environ, live):
    display = Display(1, stream=stream, environ=environ)
    display.close()
    assert display.live is live


def test_a_terminal_gets_the_lines_above_a_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    display = Display(2, title="demo", stream=stream, environ={})
    display.update(step(1, loss=3.25))
    display.note("a note")
    display.update(step(2, loss=1.125, eval_loss=1.5))
    display.finish(files={"report": "report.html"})
    display.close()
    text = stream.getvalue()
    assert "demo 2/2 ━" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "a note" in text
    last, summary = text.split("step 2/2")[-1].split("finished after 2/2 steps")
    for shown in ("1.1250", "1.5000", "3.00e-04", "0.75", "2,000", "10% of step", "left 0:00"):
        assert shown in last
    assert "\x1b[?25h" in last  # the cursor is back before the summary
    assert "report  report.html" in summary


def test_time_left_is_the_median_step_times_the_steps_left_or_those_of_the_tokens_left():
    for total_tokens, left in ((0, "left 0:20\n"), (1300, "left 0:20\n")):
        stream = io.StringIO()
        display = Display(13, total_tokens=total_tokens, stream=stream, environ={})
        for seconds in (60.0, 2.0, 2.0):  # a slow first step does not distort the estimate
            display.update(step(1, step_seconds=seconds, tokens=100))
        assert stream.getvalue().endswith(left)
    assert [duration(s) for s in (0.4, 75.2, 7389)] == ["0:00", "1:15", "2:03:09"]


@pytest.mark.parametrize("gone", ["reader", "space", "terminal", "terminal of a bar"])
def test_a_run_goes_on_without_what_it_writes_to(gone: str) -> None:
    """`| head`, a full disk, a terminal that is closed while SIGHUP is ignored."""
    if gone == "reader":
        other, writing = os.pipe()
    elif gone == "space":
        other, writing = os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    else:
        other, writing = pty.openpty()
    environ = {"TERM": "xterm"} if "bar" in gone else {"NO_COLOR": "1"}
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        display = Display(10, log_every=1, stream=stream, environ=environ)
        os.close(other)
        assert display.live == ("bar" in gone)
        display.update(step(1))
        display.finish()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
def test_peak_memory_is_this_processes_own_and_not_its_parents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parents = SimpleNamespace(ru_maxrss=1 << 40)  # what a child of a large process is told
    monkeypatch.setattr(resource, "getrusage", lambda who: parents)
    assert 1 << 20 < peak_memory_bytes(torch.device("cpu")) < 1 << 40
