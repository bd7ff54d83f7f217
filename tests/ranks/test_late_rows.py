"""Runs with a fused optimizer: a step's row is told while the next one is queued."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from internsp.app.config import Config
from internsp.app.report.metrics import read_metrics
from internsp.app.session import optimizers, session
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from tests.ranks import test_train_not_finite as not_finite
from tests.ranks.test_train import config
from tests.support.ranks import ranks, run_ranks

OWN = {
    "step_seconds", "tokens_per_second", "exposed_comm_seconds", "peak_memory_bytes", "tflops",
    "mfu", "run",
}  # fmt: skip


def settings(**changes: dict[str, Any]) -> Config:
    changes["train"] = {"steps": 12, "eval_batches": 1, "eval_every": 9} | changes.get("train", {})
    save = {"save": True, "every": 8} | changes.pop("checkpoint", {})
    optimizer = {"options": ["fused = true"]}
    return config(parallel=not_finite.WEIGHT2, optimizer=optimizer, checkpoint=save, **changes)


def steps(folder: Path) -> list[int]:
    return [row.step for row in read_metrics(folder / "metrics.jsonl")]


def run(
    rank: int, world: int, made: Config, folder: str, late: bool = True, bad: tuple[int, ...] = (),
    event: str = "",
) -> tuple[str, str, list[tuple[int, int]]]:  # fmt: skip
    """What a run prints and raises, and which steps were told when which one was queued.

    Args:
        event: what rank 1 is asked for as step 10 begins, or an ``"error"`` in step 7.
    """
    queue, wanted = StepRunner.queue, StepRunner.late
    seen: list[tuple[int, int]] = []

    def noted(self: StepRunner, number: int, stop: Any, **more: Any) -> Any:
        if number == 9 and rank == 1:
            stop.saves += event == "save"
            if event == "stop":
                stop.request(signal.SIGTERM)
        if number == 6 and event == "error":
            self.session.step = spilt  # type: ignore[method-assign]
        done = queue(self, number, stop, **more)
        if done is not None:
            seen.append((done.metrics.step, number + 1))
        return done

    StepRunner.queue = noted  # type: ignore[method-assign]
    if not late:
        StepRunner.late = False  # type: ignore[method-assign,assignment]
    try:
        return *not_finite.run(rank, world, made, folder, 1, "gradient", bad), seen
    except ArithmeticError as error:
        return "", str(error), seen
    finally:
        StepRunner.queue, StepRunner.late = queue, wanted  # type: ignore[method-assign]


class Mark(NamedTuple):
    """A point of a device's stream."""

    step: int
    time: float


class Numbers:
    """A device's clock by which each wait takes as many seconds as its step has as number."""

    step = 0

    def restart(self) -> None:
        """The clocks of host and device are one."""

    def mark(self) -> Mark:
        return Mark(self.step, time.perf_counter())

    def seconds(self, mark: Mark) -> float:
        return mark.time

    def between(self, start: Mark, end: Mark) -> float:
        return float(start.step)


def measured(rank: int, world: int, folder: str) -> str:
    queue, clock = StepRunner.queue, Numbers()

    def noted(self: StepRunner, number: int, *args: Any, **more: Any) -> Any:
        clock.step = number + 1
        return queue(self, number, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "device_clock", lambda _: clock)
        patch.setattr(StepRunner, "queue", noted)
        many = {"steps": 22, "eval_every": 0, "log_every": 10}
        return run(rank, world, settings(train=many, checkpoint={"save": False}), folder)[0]


def spilt() -> None:
    raise ArithmeticError("spilt in step 7")


def several(rank: int, world: int, runs: list[tuple[Any, ...]]) -> list[Any]:
    return [run(rank, world, *each) for each in runs]


def test_a_device_measures_waits_in_one_step_of_ten_and_tells_them_of_that_step(
    tmp_path: Path,
) -> None:
    printed, _ = run_ranks(measured, 2, str(tmp_path))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    found = {row.step: row.exposed_comm_seconds for row in rows}
    waits = {step: seconds / step for step, seconds in found.items() if seconds is not None}
    assert sorted(waits) == [1, 3, 4, 5, 10, 20]  # the first, those that are traced, one of ten
    assert waits[10] == waits[20] > 10  # steps that are read while the next one is queued
    lines = [line for line in printed.splitlines() if "/22  loss" in line]
    assert ["exposed" in line for line in lines] == [True, True, True, False], printed


@pytest.mark.unmeasured
def test_rows_remarks_and_checkpoints_are_those_of_steps_that_are_read_at_once(
    tmp_path: Path,
) -> None:
    bad, folders = (1, 7, 8, 12), [tmp_path / name for name in ("late", "now")]
    runs = [(settings(), str(folders[n]), n == 0, bad) for n in range(2)]
    (late, now), _ = run_ranks(several, 2, runs)
    # Steps 1 and 3 to 5 are traced; a checkpoint follows 8, an evaluation 9, the end 12.
    assert late[2] == [(6, 7), (10, 11)]
    assert now[2] == []
    assert late[1] == now[1] == ""
    rows, others = (
        [str(row.model_dump(exclude=OWN)) for row in read_metrics(folder / "metrics.jsonl")]
        for folder in folders
    )
    assert rows == others
    assert steps(folders[0]) == [*range(1, 13)]
    found = read_metrics(folders[0] / "metrics.jsonl")
    assert [row.skipped_steps for row in found] == [1, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 4]
    assert all(row.step_seconds > 0 for row in found)
    for text in (late[0], now[0]):
        for step in range(1, 13):
            assert (f"step {step} was skipped" in text) == (step in bad), step
    assert not_finite.saved(folders[0]) == ["step-000008", "step-000012"]


@pytest.mark.unmeasured
def test_a_request_an_error_and_too_many_skipped_steps_lose_no_row(tmp_path: Path) -> None:
    stop, save, error, stuck = (tmp_path / name for name in ("stop", "save", "error", "stuck"))
    made = settings()
    runs = [
        (made, str(stop), True, (), "stop"),
        (made, str(save), True, (), "save"),
        (made, str(error), True, (), "error"),
        (settings(train={"max_skipped_steps": 2}), str(stuck), True, (9, 10, 11)),
    ]
    (stopped, saves, failed, skipped), _ = run_ranks(several, 2, runs)
    # Step 10 tells of the request when 11 is queued.
    assert steps(stop) == [*range(1, 12)]
    assert not_finite.saved(stop) == ["step-000008", "step-000011"]
    assert "after step 11" in stopped[0]
    assert steps(save) == [*range(1, 13)]
    assert "asked by SIGUSR1: saving step 11" in saves[0]
    assert failed[1] == "spilt in step 7"
    assert steps(error) == [*range(1, 7)]
    assert "in 2 steps in a row, the last of them step 10: not finite on rank" in skipped[1]
    assert steps(stuck) == [*range(1, 12)]
    assert not_finite.saved(stuck) == ["step-000008", "step-000011"]


@pytest.mark.parametrize("chosen", [(), ("foreach = true",), ("momentum",), ("offload",)])
@ranks(2)
def test_a_run_takes_torchs_fused_step_on_a_device(
    chosen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "has_streams", lambda device: device.type == "cpu")
    momentum, offload = chosen == ("momentum",), chosen == ("offload",)
    session = Session.create(
        config(
            parallel={"weight": 2},
            optimizer={"name": "sgd", "weight_decay": 0.0}
            if momentum
            else {"options": [] if offload else list(chosen)},
            weight_parallel={"offload": ["optimizer"]} if offload else {},
        )
    )
    fused = [group.get("fused") for group in session.optimizer.param_groups]
    assert all(fused) == (chosen != ("foreach = true",))
    assert StepRunner(session).late == all(fused)
    monkeypatch.setattr(torch.optim.AdamW, "step", no_kernel)
    if not chosen:  # a device for which torch has no fused kernels
        arguments: dict[str, Any] = {}
        assert not optimizers._fused(torch.optim.AdamW, arguments, session.communicators[0])


def no_kernel(*_: Any) -> None:
    raise RuntimeError("fused=True requires all the params to be floating point Tensors of ...")
