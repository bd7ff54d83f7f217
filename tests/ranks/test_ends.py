"""How a run ends after a fault: messages, checkpoints, and their timing."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from internsp.app.checkpoint import manifest
from internsp.app.checkpoint.disk import steps_in
from internsp.app.config import Config
from internsp.app.launch.launch import ChildError, start
from internsp.app.process.stop import StopRequest
from internsp.app.report.metrics import read_metrics
from internsp.app.train.run import train
from internsp.app.train.step import StepRunner
from internsp.pipeline import ComputeAction, SchedulerHook
from tests.support.command import begin, internsp

TEXT = Path(__file__).parents[1] / "data" / "text"
TIMEOUT = 4  # seconds: the groups'


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return


def settings(name: str, **sections: dict[str, Any]) -> Config:
    """A tiny run of two ranks; the run's name selects the fault that the functions below inject."""
    given: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 32, "layers": 2, "heads": 4},
        "data": {
            "source": "text", "paths": [str(TEXT)], "sequence_length": 33, "held_out": 0.1,
        },
        "parallel": {"weight": 2, "timeout_seconds": TIMEOUT},
        "weight_parallel": {"min_shard_elements": 128},
        "train": {
            "name": name, "steps": 3, "global_batch": 4, "eval_batches": 1,
        },
        "launch": {"processes": 2},
    }  # fmt: skip
    given = {k: given.get(k, {}) | sections.get(k, {}) for k in (*given, *sections)}
    return Config.model_validate(given)


class _Happens(SchedulerHook):
    """Inject the fault into this rank in its second step."""

    def __init__(self, signal_number: int) -> None:
        self.signal, self.steps, self.process = signal_number, 0, os.getpid()

    def before_forward(self, action: ComputeAction, *args: Any) -> None:
        self.steps += 1
        if self.steps == 2:
            os.kill(self.process, self.signal)


def _fail(*_: object, **__: object) -> None:
    raise ArithmeticError("spilt at the end")


def eventful(config: Config, output: Path, stop: StopRequest) -> None:
    """Run one rank; the run's name contains the fault and the rank that it concerns."""
    what, rank = config.train.name.split("-")
    if os.environ["RANK"] != rank:
        train(config, output, stop=stop)
        return
    if what == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    if what == "evaluation":
        StepRunner.evaluate = _fail  # type: ignore[assignment]
    number = {"stopped": signal.SIGSTOP, "asked": signal.SIGTERM, "saves": signal.SIGUSR1}.get(what)
    train(config, output, [_Happens(number)] if number else [], stop)


def test_what_fails_after_training_costs_neither_checkpoint_nor_metrics_nor_report(
    tmp_path: Path,
) -> None:
    name, rank = "evaluation-1", 1
    cause = rf"(?s)^rank {rank} failed: Traceback.*ArithmeticError: spilt at the end\n"
    output = tmp_path / "two words"
    with pytest.raises(ChildError, match=cause) as caught:
        start(eventful, settings(name), output)
    assert caught.value.exit_status == 1
    seen, onward = "\n".join(caught.value.__notes__).splitlines()
    log = output / "logs" / f"rank-0000{rank}.log"
    last = r"last collective: (all-gather|reduce-scatter) of \S+ \((forward|backward)\)"
    assert re.search(rf"rank {rank} was at step 3, {last}", seen)
    assert seen.endswith(f"; its log: {log}")
    assert f"to go on after step 3: internsp train '{output / 'config.toml'}'" in onward
    assert "ArithmeticError: spilt at the end" in log.read_text()
    assert (output / "checkpoints" / "step-000003").exists()
    rows = read_metrics(output / "metrics.jsonl")
    assert [row.step for row in rows] == [1, 2, 3]
    page = (output / "report.html").read_text()
    assert "The run failed: " in page
    assert "layers.1" in page  # the timeline


def test_a_disk_that_is_full_on_one_rank_is_one_line_with_status_3(tmp_path: Path) -> None:
    with pytest.raises(ChildError) as caught:
        start(eventful, settings("full-1"), tmp_path)
    assert caught.value.exit_status == 3
    (line,) = str(caught.value).splitlines()
    assert line.startswith("rank ")
    assert " failed: MachineError: checkpoint " in line
    assert " was not saved: rank 1: OSError: [Errno 27] File too large" in line
    assert (tmp_path / "report.html").exists()


def test_a_rank_that_is_stopped_is_named_soon_after_the_timeout(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ChildError, match=r"^rank 1 was stopped") as caught:
        start(eventful, settings("stopped-1"), tmp_path)
    assert time.monotonic() - began < TIMEOUT + 10
    assert "\nLater, rank 0: CollectiveError: " in str(caught.value)


def test_sigterm_to_one_rank_ends_all_after_the_step_by_its_name(tmp_path: Path) -> None:
    config = settings("asked-1", train={"name": "asked-1", "steps": 50})
    assert start(eventful, config, tmp_path) == 0, "a scheduler has asked, and all is saved"
    assert (tmp_path / "checkpoints" / "step-000002").exists()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    page = (tmp_path / "report.html").read_text()
    assert "stopped before its last step by SIGTERM to rank 1" in page


def test_sigusr1_to_one_rank_saves_after_the_step_and_the_run_goes_on(tmp_path: Path) -> None:
    config = settings("saves-1", train={"name": "saves-1", "steps": 5})
    assert start(eventful, config, tmp_path) == 0
    assert [step for step, _ in steps_in(tmp_path / "checkpoints")] == [5, 2]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    page = (tmp_path / "report.html").read_text()
    assert "stopped before its last step" not in page


def asking(config: Config, output: Path, stop: StopRequest) -> None:
    """Rank 1 sends the launcher a stop request in the second step."""
    if os.environ["RANK"] == "1":
        happens = _Happens(signal.SIGUSR1)
        launcher = multiprocessing.parent_process()
        assert launcher is not None
        happens.process = launcher.pid or 0
        train(config, output, [happens], stop)
    else:
        train(config, output, stop=stop)


def test_sigusr1_to_the_launcher_saves_once_although_nothing_else_is_saved(tmp_path: Path) -> None:
    train_too = {"name": "saves-0", "steps": 12}
    config = settings("saves-0", train=train_too, checkpoint={"save": False})
    assert start(asking, config, tmp_path) == 0
    ((step, path),) = steps_in(tmp_path / "checkpoints")
    assert 2 <= step <= 12
    content = manifest.read(path)
    manifest.check_files(path, content, content.files)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_one_that_never_starts_ends_by_a_signal_at_once(
    number: signal.Signals, tmp_path: Path
) -> None:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    (tmp_path / "config.toml").write_text(settings("alone").to_toml(), "utf-8")
    words = ["-m", "internsp", "train", "config.toml", "--parallel.timeout_seconds", "60"]
    with (tmp_path / "log").open("w") as log:
        rank = begin(
            words, tmp_path, log.fileno(), log.fileno(),
            {**os.environ, **ranks, "MASTER_PORT": str(port)},
        )  # fmt: skip
    while socket.socket().connect_ex(("localhost", port)):  # its store is there: it waits
        assert rank.exitcode is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    os.kill(rank.pid or 0, number)
    rank.join(20)
    status = rank.exitcode
    rank.kill()
    assert status == -number


def test_a_folder_whose_name_is_too_long_for_a_socket_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(settings("long").to_toml(), "utf-8")
    long, statuses = tmp_path / ("long" * 30), []
    long.mkdir()
    for folder in (tempfile.gettempdir(), str(long)):
        there = {**os.environ, "TMPDIR": folder}
        done = internsp("train", "config.toml", cwd=tmp_path, environment=there, check=False)
        statuses.append(done.returncode)
    assert statuses == [0, 3]
    assert f"{long}: AF_UNIX path too long: set TMPDIR to a shorter" in done.stderr
