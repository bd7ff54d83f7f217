"""Runs with values that are not finite: steps are skipped, reported, counted, never saved."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from internsp.app.config import Config
from internsp.app.report.metrics import read_metrics
from internsp.app.session.session import Session
from internsp.app.train.run import train
from internsp.app.train.step import StepRunner
from internsp.errors import NotFiniteError
from tests.ranks.test_train import config
from tests.support.ranks import run_ranks

WEIGHT2 = {"weight": 2, "sequence": 2}
SHORT: dict[str, Any] = {"steps": 6, "eval_batches": 1, "max_skipped_steps": 3}


def settings(**changes: dict[str, Any]) -> Config:
    changes["train"] = {**SHORT, **changes.get("train", {})}
    return config(**{"parallel": WEIGHT2, "checkpoint": {"save": True, "every": 2}, **changes})


def faulty(session: Session, rank: int, fault: str, steps: tuple[int, ...]) -> None:
    """Something is not finite on ``rank`` in ``steps`` (from 1)."""
    real, now = StepRunner.queue, [0]

    def queue(self: StepRunner, number: int, stop: Any, **more: Any) -> Any:
        now[0] = number + 1
        if session.mesh.rank == rank and fault == "weight" and now[0] in steps:
            for communicator in session.communicators:
                communicator.replicated.sharded[1].storage.data.view(-1)[0] = math.nan
                communicator.invalidate()
        return real(self, number, stop, **more)

    StepRunner.queue = queue  # type: ignore[method-assign]

    def spoil(module: Any, args: Any, output: Any) -> Any:
        if session.mesh.rank != rank or now[0] not in steps or not torch.is_grad_enabled():
            return None
        first: Tensor = output[0] if isinstance(output, tuple) else output
        if fault == "gradient":
            first.register_hook(lambda gradient: gradient * math.nan)
        if fault == "loss":  # a constant: it has no gradient
            return (first + math.inf, *output[1:])
        return None

    session.modules[-1].register_forward_hook(spoil)


Outcome = tuple[str, str]


def run(
    rank: int, world_size: int, made: Config, folder: str, bad: int, fault: str,
    steps: tuple[int, ...],
) -> Outcome:  # fmt: skip
    """What a run prints, and what it raises."""
    create, real = Session.create, StepRunner.queue

    def spoiled(*args: Any) -> Session:
        session = create(*args)
        faulty(session, bad, fault, steps)
        return session

    Session.create = spoiled  # type: ignore[method-assign,assignment]
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            train(made, Path(folder))
    except NotFiniteError as error:
        return text.getvalue(), str(error)
    finally:
        Session.create, StepRunner.queue = create, real  # type: ignore[method-assign]
    return text.getvalue(), ""


def several(rank: int, world_size: int, runs: list[tuple[Any, ...]]) -> list[Outcome]:
    return [run(rank, world_size, *one) for one in runs]


def skipped(folder: Path) -> list[int | None]:
    return [row.skipped_steps for row in read_metrics(folder / "metrics.jsonl")]


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").glob("step-*"))


@pytest.mark.unmeasured
def test_steps_are_skipped_counted_and_said_and_a_run_of_them_stops_with_what_it_had(
    tmp_path: Path,
) -> None:
    some, stuck, loss, again = (tmp_path / n for n in ("some", "stuck", "loss", "again"))
    unclipped = settings(optimizer={"max_grad_norm": None}, train={"dtype": "bfloat16"})
    resumed = settings(checkpoint={"save": False, "resume": str(stuck)}, train={"steps": 7})
    alert = f"""sh -c 'echo "$1" >> {tmp_path / "told"}' alert"""
    ranks = run_ranks(
        several,
        2,
        [
            (unclipped, str(some), 1, "gradient", (2, 3)),
            (settings(report={"alert": alert}), str(stuck), 1, "gradient", (3, 4, 5)),
            (settings(), str(loss), 1, "loss", (2,)),
            (resumed, str(again), 1, "gradient", (6,)),
        ],
    )
    (text, raised), (stuck_text, stopped), (loss_text, fine), (_, ended) = ranks[0]
    assert raised == fine == ended == ""
    assert skipped(some) == [0, 1, 2, 2, 2, 2]
    rows = read_metrics(some / "metrics.jsonl")
    assert [math.isfinite(row.grad_norm) for row in rows] == [True, False, False, True, True, True]
    assert all(math.isfinite(row.loss) for row in rows)
    assert "step 2 was skipped: gradients are not finite on rank" in text
    assert "and" in text
    assert "more parameters (1 in a row, train.max_skipped_steps = 3)" in text
    assert "gradients were not finite: 2." in (some / "report.html").read_text()
    # Too many: all ranks stop after the third, with the weights of step 2, and can resume.
    assert skipped(stuck) == [0, 0, 1, 2, 3]
    assert stopped.startswith("gradients were not finite in 3 steps in a row, the last of them ")
    assert "step 5: not finite on rank" in stopped
    assert "train.max_skipped_steps" in stopped
    assert [raised for _, raised in ranks[1]] == ["", stopped, "", ""]
    assert saved(stuck) == ["step-000002", "step-000004", "step-000005"]
    assert "step-000005" in stuck_text
    assert "The run failed: gradients were not finite" in (stuck / "report.html").read_text()
    assert skipped(again) == [1, 1], "a run of another folder counts its own"
    told = sorted((tmp_path / "told").read_text().splitlines())
    assert len(told) == 2, "one rank tells, a kind once in ten minutes"
    assert told[0].startswith("run: step 3 was skipped: gradients are not finite on rank")
    assert told[1].startswith("run: the run failed: NotFiniteError: gradients were not finite in 3")
    # A loss alone is only reported.
    assert skipped(loss) == [0] * 6
    assert "step 2: the loss is inf, but its gradients are finite: the step was taken" in loss_text


@pytest.mark.unmeasured
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks = run_ranks(run, 2, settings(), str(folder), 1, "weight", (4,))
    for rank, (text, raised) in enumerate(ranks):
        assert raised.startswith("gradients were not finite in 3 steps in a row")
        if rank == 0:
            assert "no checkpoint of step 4 is written" in text
            assert "no checkpoint of step 6 is written" in text
            assert "weights or optimizer state are not finite on rank 1: " in text
    assert saved(folder) == ["step-000002"]
    last = tmp_path / "last"
    late = settings(train={"max_skipped_steps": 9})
    for _, raised in run_ranks(run, 2, late, str(last), 1, "weight", (6,)):
        assert "no checkpoint of step 6 is written" in raised, "a run with nothing to show fails"
    assert saved(last) == ["step-000002", "step-000004"]


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.thorough(1))])
@pytest.mark.unmeasured
def test_a_pipeline_skips_on_all_stages_and_names_those_of_all(fused: bool, tmp_path: Path) -> None:
    made = settings(
        parallel={"pipeline": 2}, train={"micro_batches": 2}, model={"layers": 4},
        optimizer={"options": ["fused = true"] * fused},
    )  # fmt: skip
    ranks = run_ranks(run, 2, made, str(tmp_path / "run"), 1, "gradient", (2, 4, 5, 6))
    for _, raised in ranks:
        assert raised.startswith("gradients were not finite in 3 steps in a row")
        assert "not finite on ranks 0, 1: " in raised  # it went back through the first stage
        assert "embed.weight" in raised
        more = re.search(r"and (\d+) more parameters", raised)
        assert more is not None
        assert 6 + int(more[1]) == 4 * 9 + 3, "all weights of four blocks, embedding, norm, head"
    assert skipped(tmp_path / "run") == [0, 1, 1, 2, 3, 4]
