"""Pipelines on the command line: the demo compared with one process, and ranks that die."""

from __future__ import annotations

import logging
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from internsp.app.config import Config
from internsp.app.launch.launch import ChildError, start
from internsp.app.process.stop import StopRequest
from internsp.app.report.metrics import read_metrics
from internsp.app.train.run import train
from internsp.pipeline import ComputeAction, SchedulerHook
from tests.support.command import begin

ROOT = Path(__file__).parents[2]
TIMEOUT = 30  # seconds: the groups'


def started(name: str, output: Path, *options: str) -> BaseProcess:
    """The command with eight steps of a configuration of this repository, on shorter sequences."""
    words = [
        "-m", "internsp", "train", f"configs/{name}.toml", "--output", str(output),
        "--train.steps", "8", "--data.sequence_length", "128", "--train.eval_batches", "0",
        "--checkpoint.save", "false", *options,
    ]  # fmt: skip
    output.mkdir()
    with (output / "log").open("w") as log:
        return begin(words, ROOT, log.fileno(), log.fileno())


@pytest.mark.slow(25)
def test_the_demo_through_a_pipeline_has_the_losses_of_one_process(tmp_path: Path) -> None:
    alone = ("--parallel.weight", "1", "--parallel.sequence", "1", "--launch.processes", "1")
    one, four = tmp_path / "one", tmp_path / "four"
    runs = {one: started("demo", one, *alone), four: started("pipeline_demo", four)}
    try:
        for output, run in runs.items():
            run.join(400)
            assert run.exitcode == 0, (output / "log").read_text()
    finally:
        for run in runs.values():
            run.kill()
            run.join()
    wanted, found = ([r.loss for r in read_metrics(o / "metrics.jsonl")] for o in (one, four))
    assert len(found) == len(wanted) == 8
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5
    assert wanted[-1] < wanted[0] - 1


class _Ends(SchedulerHook):
    """In the second step one rank is killed, or its loss raises."""

    def __init__(self, how: str, output: Path) -> None:
        self.how, self.output, self.steps = how, output, 0

    def after_last_micro_batch(self, action: ComputeAction) -> None:
        self.steps += action.chunk == 0

    def before_criterion(self, action: ComputeAction, output: Tensor) -> None:
        if self.how == "loss" and self.steps == 1 and action.micro_batch == 1:
            self._note()
            raise ArithmeticError("spilt in the loss")

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        if self.how == "kill" and self.steps == 1 and action.micro_batch == 1:
            self._note()
            os.kill(os.getpid(), signal.SIGKILL)

    def _note(self) -> None:
        (self.output / "failed").write_text(str(time.time()))


def _one_fails(config: Config, output: Path, stop: StopRequest) -> None:
    rank = os.environ["RANK"]
    drowning = logging.getLogger("torch.distributed.pipelining.schedules")
    assert not drowning.isEnabledFor(logging.ERROR), "each rank would log its whole schedule"
    (output / f"process{rank}").write_text(str(os.getpid()))
    culprit, how = ("2", "kill") if config.train.seed == 0 else ("3", "loss")
    train(config, output, [_Ends(how, output)] if rank == culprit else [], stop)


def settings(seed: int) -> Config:
    return Config.model_validate(
        {
            "model": {"hidden_size": 32, "layers": 4, "heads": 4},
            "data": {
                "source": "text", "paths": [str(ROOT / "tests" / "data")], "sequence_length": 33,
            },
            "parallel": {"pipeline": 2, "weight": 2, "timeout_seconds": TIMEOUT},
            "pipeline": {"schedule": "Interleaved1F1B", "chunks": 2},
            "weight_parallel": {"min_shard_elements": 128},
            "train": {"steps": 5, "global_batch": 8, "micro_batches": 4, "seed": seed},
            "checkpoint": {"save": False},
            "launch": {"processes": 4},
        }
    )  # fmt: skip


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("seed", "cause"),
    [
        (0, r"rank 2 was ended by SIGKILL \(out of memory\?\)"),
        (1, r"(?s)rank 3 failed: .*ArithmeticError: spilt in the loss"),
    ],
)
def test_all_processes_of_a_run_end_with_the_first_cause_when_one_fails(
    seed: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ChildError, match=cause):
        start(_one_fails, settings(seed), tmp_path)
    assert time.time() - float((tmp_path / "failed").read_text()) < TIMEOUT
    for rank in range(4):
        number = int((tmp_path / f"process{rank}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
