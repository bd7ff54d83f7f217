"""Every command's output: on a terminal of 40 columns, without color, in a notebook, in a
pipe."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from internsp.app.report.metrics import read_metrics
from tests.support.command import begin

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "tests" / "data" / "text"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
LIVE = {"TERM": "xterm-256color"}
PLAIN = {
    "no color": {"TERM": "xterm-256color", "NO_COLOR": "1"},
    "dumb": {"TERM": "dumb"},
    "notebook": {"TERM": "xterm-color", "JPY_PARENT_PID": "1"},
}
TRAIN = ("train", "config.toml", "--train.peak_tflops", "0.01")


def environment(more: dict[str, str]) -> dict[str, str]:
    gone = ("COLUMNS", "LINES", "NO_COLOR", "TERM", "CI", "FORCE_COLOR", "JPY_PARENT_PID")
    kept = {name: value for name, value in os.environ.items() if name not in gone}
    return {**kept, "PYTHONIOENCODING": "utf-8", **more}


def on_terminal(folder: Path, more: dict[str, str], *words: str, status: int = 0) -> str:
    """The output of a command on a terminal of 40 columns."""
    import fcntl
    import termios

    above, below = pty.openpty()
    fcntl.ioctl(below, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    command = ("-m", "internsp", *words)
    process = begin(command, folder, below, below, environment(more), terminal=below)
    os.close(below)
    written = b""
    try:
        while more_of_it := os.read(above, 65536):
            written += more_of_it
    except OSError:  # end of file on Linux, once the other end is closed
        pass
    os.close(above)
    text = written.decode().replace("\r\n", "\n")
    process.join(60)
    assert process.exitcode == status, text
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("terminal")
    (made / "config.toml").write_text(
        "[model]\nhidden_size = 32\nlayers = 1\nheads = 4\n[data]\nsequence_length = 32\n"
        f'[[data.mixture]]\nname = "für"\nsource = "text"\npaths = ["{TEXT}"]\n'
        '[train]\nname = "seen"\nsteps = 3\n'
        "global_batch = 2\neval_every = 2\neval_batches = 1\n",
        encoding="utf-8",
    )
    return made


@pytest.fixture(scope="module")
def live(folder: Path) -> str:
    return on_terminal(folder, LIVE, *TRAIN)


@pytest.mark.thorough(2)
@pytest.mark.unmeasured
def test_a_live_run_shows_a_bar_and_leaves_its_last_figures(folder: Path, live: str) -> None:
    assert "seen 3/3 ━" in ESCAPES.sub("", live)
    rows = read_metrics(folder / "runs" / "seen" / "metrics.jsonl")
    last = ESCAPES.sub("", live[live.rindex("step 3/3") :])
    assert f"loss {rows[-1].loss:.4f}" in last
    assert f"held-out {rows[-1].eval_loss:.4f}" in last
    assert live.count("\x1b[?25l") == live.count("\x1b[?25h") == 1  # the cursor is visible again
    assert all(row.mfu == pytest.approx((row.tflops or 0) / 0.01) for row in rows)
    assert "MFU (median)" in (folder / "runs" / "seen" / "report.html").read_text()


@pytest.mark.unmeasured
@pytest.mark.parametrize("kind", [*PLAIN])
def test_a_plain_terminal_gets_lines_without_escape_sequences(
    kind: str, folder: Path, live: str
) -> None:
    words = TRAIN if kind == "notebook" else ("plan", "config.toml", "--train.micro_batches", "2")
    text = on_terminal(folder, PLAIN[kind], *words)
    assert "\x1b" not in text
    assert "\r" not in text
    assert ("step 3/3" if kind == "notebook" else "parameters in 1 blocks, on 1 rank") in text


@pytest.mark.unmeasured
def test_other_commands_are_plain_and_a_pipe_gets_whole_lines(folder: Path, live: str) -> None:
    run = "runs/seen"
    for words, status, wanted in (
        (("report", run, run + "/../seen"), 2, "is given twice"),
        (("report", run), 0, "wrote runs/seen/report.html"),
        (("generate", run, "--tokens", "8", "--temperature", "5"), 0, "\n"),
        (("export", run, "--to", "exported"), 0, "exported"),
        (("init", "new"), 0, "next: internsp train new/demo.toml"),
    ):
        text = on_terminal(folder, LIVE, *words, status=status)
        assert "\x1b" not in text, words
        assert wanted in text
    piped = (*TRAIN, "--train.name", "piped")
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(  # not forked: a process has the encoding that it begins with
        [sys.executable, "-m", "internsp", *piped], cwd=folder,
        env=environment(LIVE | ascii_alone), capture_output=True, encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert sum(line.startswith("step 3/3  loss") and "left 0:00" in line for line in lines) == 1
    assert any("M parameters, world 1 = " in line and "ZeRO over 1" in line for line in lines)
    assert lines[-1].split(maxsplit=2)[2] == "internsp generate runs/piped"
    kept = (folder / "runs" / "piped" / "config.toml").read_text(encoding="utf-8")
    assert 'name = "für"' in kept, "in whatever locale"
