"""Complete training runs through a pipeline: the same values, resumed, reported."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from internsp.app.checkpoint import manifest
from internsp.app.config import Config
from internsp.app.plan.step import make_plan
from internsp.app.process.stop import StopRequest
from internsp.app.report.metrics import StepMetrics, read_metrics
from internsp.app.train.run import train
from internsp.errors import OrderError
from internsp.pipeline import ComputeAction, Pipeline, SchedulerHook
from internsp.schedule.chunk import Schedule
from tests.support.few import few
from tests.support.ranks import run_ranks
from tests.support.sections import mesh_sections

TEXT = Path(__file__).parents[1] / "data" / "text"
Changes = dict[str, dict[str, Any]]


def config(**changes: dict[str, Any]) -> Config:
    """A tiny run on the committed text; ``changes`` by section."""
    sections: Changes = {
        "model": {"hidden_size": 32, "layers": 5, "heads": 4, "norm_eps": 1e-2, "init_std": 0.05},
        "data": {"source": "text", "paths": [str(TEXT)], "sequence_length": 33, "held_out": 0.1},
        "weight_parallel": {"min_shard_elements": 128},
        "optimizer": {"lr": 3e-3, "warmup_steps": 3},
        "train": {
            "steps": 4, "global_batch": 8, "micro_batches": 4, "eval_batches": 2,
            "loss_chunk": 20, "eval_every": 2, "log_every": 50,
        },
        "checkpoint": {"save": False},
    }  # fmt: skip
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


def run(rank: int, world_size: int, runs: list[tuple[Config, str]]) -> None:
    for settings, folder in runs:
        train(settings, Path(folder))


def rows_of(tmp_path: Path, world: int, changes: list[Changes]) -> list[list[StepMetrics]]:
    folders = [tmp_path / f"{world}-{i}" for i in range(len(changes))]
    runs = [(config(**c), str(f)) for c, f in zip(changes, folders, strict=True)]
    run_ranks(run, world, runs, timeout=240)
    return [read_metrics(f / "metrics.jsonl") for f in folders]


def pipelined(schedule: str, chunks: int = 1, **parallel: int) -> Changes:
    degrees = mesh_sections(pipeline=2, **parallel)
    return {**degrees, "pipeline": {"schedule": schedule, "chunks": chunks}}


RUNS: dict[int, list[Changes]] = {
    2: [
        pipelined("GPipe"),
        pipelined("ZBVZeroBubble", 2),
        {**pipelined("Interleaved1F1B", 2), "activation_checkpoint": {"mode": "full"}},
    ],
    4: [
        pipelined("DualPipeV", 2, weight=2),
        {"parallel": {"pipeline": 4}, "pipeline": {"schedule": "1F1B"}},
        {
            **pipelined("InterleavedZeroBubble", 2, sequence=2, weight=2),
            "weight_parallel": {"accumulation": "full"},
        },
        {
            **pipelined("1F1B", expert_weight=2),
            "weight_parallel": {"expert_parameters": ["feed_forward"]},
        },
        pipelined("1F1B", weight=2, sequence=2, ring=2),
    ],
}


@pytest.mark.slow(15)
@few("runs", [(world, changes) for world, each in RUNS.items() for changes in each], 5, 10)
def test_steps_and_evaluations_equal_one_process(
    tmp_path: Path, runs: list[tuple[int, Changes]]
) -> None:
    (wanted,) = rows_of(tmp_path, 1, [{"train": {"micro_batches": 1}}])
    for world in RUNS:
        changes = [given for size, given in runs if size == world]
        for i, rows in enumerate(rows_of(tmp_path, world, changes)):
            assert [r.tokens for r in rows] == [w.tokens for w in wanted]
            for row, want in zip(rows, wanted, strict=True):
                assert row.loss == pytest.approx(want.loss, rel=1e-5), changes[i]
                assert row.grad_norm == pytest.approx(want.grad_norm, rel=1e-5), changes[i]
                if want.eval_loss is not None:
                    assert row.eval_loss == pytest.approx(want.eval_loss, rel=1e-5), changes[i]
            assert [r.step for r in rows if r.eval_loss is not None] == [2, 4]
            report = (tmp_path / f"{world}-{i}" / "report.html").read_text()
            parallel = changes[i]["parallel"]
            if world == parallel["pipeline"] * parallel.get("weight", 1):  # no parameter all-gather
                planned = make_plan(config(**changes[i]), world).ranks[0].schedule
                assert rows[1].gathered_bytes == planned.nbytes("AG"), changes[i]
            name = changes[i]["pipeline"]["schedule"]
            assert f"<title>{name}, 4 micro-batches</title>" in report, "the schedule's picture"
            own = "expert_weight" in changes[i]["parallel"]
            assert ("expert replicas " in report) == own, changes[i]


@pytest.mark.unmeasured
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    base = pipelined("ZBVZeroBubble", 2)
    whole = str(tmp_path / "whole")
    first = {**base, "checkpoint": {"save": True, "every": 2}}
    step = str(Path(whole) / "checkpoints" / "step-000002")
    again = {**base, "checkpoint": {"save": False, "resume": step}}
    run_ranks(run, 2, [(config(**first), whole)], timeout=240)
    run_ranks(run, 2, [(config(**again), str(tmp_path / "again"))], timeout=240)
    wanted = read_metrics(Path(whole) / "metrics.jsonl")[2:]
    rows = read_metrics(tmp_path / "again" / "metrics.jsonl")
    assert [(r.step, r.loss, r.grad_norm) for r in rows] == [
        (w.step, w.loss, w.grad_norm) for w in wanted
    ]
    # As many chunks on other ranks (rank 0 has the first and third, not the first and last), or no
    # pipeline: sums are in another order, so equal to rounding.
    for number, changes in enumerate((pipelined("Interleaved1F1B", 2), pipelined("1F1B"))):
        other = config(**{**changes, "checkpoint": again["checkpoint"]})
        folder = tmp_path / f"other{number}"
        run_ranks(run, 2, [(other, str(folder))], timeout=120)
        found = read_metrics(folder / "metrics.jsonl")
        assert [r.step for r in found] == [w.step for w in wanted]
        assert [r.loss for r in found] == pytest.approx([w.loss for w in wanted], rel=1e-6)


@pytest.mark.thorough(2)
def test_a_checkpoint_has_the_parameter_names_of_the_whole_model(tmp_path: Path) -> None:
    keep: Changes = {"checkpoint": {"save": True}, "train": {"steps": 1}}
    run_ranks(run, 1, [(config(**keep), str(tmp_path / "one"))], timeout=120)
    changes = {**pipelined("Interleaved1F1B", 2), **keep}
    run_ranks(run, 2, [(config(**changes), str(tmp_path / "two"))], timeout=120)
    names = []
    for run_name in ("one", "two"):
        found = manifest.read(tmp_path / run_name / "checkpoints" / "step-000001").tensors
        names.append({(n, t.shape) for n, t in found.items() if not n.startswith("random.")})
    assert names[0] == names[1]
    assert all(torch.Size(size).numel() > 0 for _, size in names[0])


class _Count(SchedulerHook):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        self.calls.append("forward")

    def after_criterion(self, action: ComputeAction, loss: Any) -> None:
        self.calls.append("criterion")

    def after_backward(self, action: ComputeAction) -> None:
        self.calls.append("backward")

    def after_last_micro_batch(self, action: ComputeAction) -> None:
        self.calls.append("end")


def counted(rank: int, world_size: int, settings: Config, folder: str) -> list[str]:
    hook = _Count()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(settings, Path(folder), [hook])
    # torch's schedules check for steps that they have executed themselves.
    assert not [w for w in told if "lr_scheduler" in str(w.message)]
    return hook.calls


@pytest.mark.thorough(2)
def test_hooks_fire_in_the_trainer_with_a_pipeline_and_without(tmp_path: Path) -> None:
    short: Changes = {"train": {"steps": 2, "eval_batches": 0}}
    (whole,) = run_ranks(counted, 1, config(**short), str(tmp_path / "1"), timeout=120)
    assert whole == (["forward", "criterion", "backward"] * 4 + ["end"]) * 2
    settings = config(**short, **pipelined("GPipe"))
    first, last = run_ranks(counted, 2, settings, str(tmp_path / "2"), timeout=120)
    assert first == (["forward"] * 4 + ["backward"] * 4 + ["end"]) * 2
    looked: Changes = {
        "train": {"steps": 1, "eval_batches": 1, "eval_every": 1}
    }
    (alone,) = run_ranks(counted, 1, config(**looked), str(tmp_path / "3"), timeout=120)
    settings = config(**looked, **pipelined("1F1B"))
    *_, through = run_ranks(counted, 2, settings, str(tmp_path / "4"), timeout=120)
    assert alone[:13] == whole[:13]
    assert alone[13:] == through[13:] == ["forward", "criterion"] * 4 + ["end"]
    assert last == (["forward", "criterion"] * 4 + ["backward"] * 4 + ["end"]) * 2


def stopped(rank: int, world_size: int, settings: Config, folder: str) -> int:
    """Only the last stage gets a stop request, before its first step."""
    with StopRequest() as stop:
        stop.requested = rank == 1
        train(settings, Path(folder), stop=stop)
    return len(read_metrics(Path(folder) / "metrics.jsonl")) if rank == 0 else -1


@pytest.mark.thorough(1)
def test_a_stop_asked_of_one_stage_ends_all_after_the_step(tmp_path: Path) -> None:
    settings = config(**pipelined("GPipe"), train={"eval_batches": 0})
    assert run_ranks(stopped, 2, settings, str(tmp_path / "run")) == [1, -1]


def otherwise(rank: int, world_size: int, settings: Config, folder: str) -> str:
    """A plan with one reduction more than the step launches."""
    real = Pipeline.planned

    def longer(self: Pipeline, overlap: bool = True, runs: int = 1) -> Schedule:
        plan = real(self, overlap, runs)
        return Schedule([*plan.actions, next(a for a in plan.actions if a.kind == "RS")])

    Pipeline.planned = longer  # type: ignore[method-assign]
    try:
        train(settings, Path(folder))
    except OrderError as error:
        return str(error)
    finally:
        Pipeline.planned = real  # type: ignore[method-assign]
    return ""


def test_a_first_step_that_is_not_the_planned_one_is_refused(tmp_path: Path) -> None:
    settings = config(**pipelined("1F1B"), train={"eval_batches": 0})
    for rank, told in enumerate(run_ranks(otherwise, 2, settings, str(tmp_path / "run"))):
        assert f"rank {rank} launched" in told
        assert "the first difference is number" in told


@pytest.mark.thorough(1)
def test_metrics_are_json_on_every_step(tmp_path: Path) -> None:
    (rows,) = rows_of(tmp_path, 2, [pipelined("1F1B")])
    lines = (tmp_path / "2-0" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [row.step for row in rows]
    assert all(row.peak_memory_bytes > 0 and row.tokens_per_second > 0 for row in rows)
    assert all(0 < (row.stage_wait_share or 0) < 1 for row in rows)
