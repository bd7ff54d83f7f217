"""Complete training runs: the same values on every mesh, resumed or not, in every precision."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import internsp
from internsp.app.checkpoint.disk import candidates
from internsp.app.config import Config
from internsp.app.plan.step import make_plan
from internsp.app.process.stop import StopRequest
from internsp.app.report.metrics import StepMetrics, read_metrics
from internsp.app.train.loop import Loop
from internsp.app.train.run import train
from internsp.app.train.step import StepRunner
from internsp.errors import ConfigError
from internsp.sp import SequenceLayout
from tests.support.few import few
from tests.support.ranks import ranks, run_ranks
from tests.support.sections import mesh_sections

TEXT = Path(__file__).parents[1] / "data" / "text"
Changes = dict[str, dict[str, Any]]


def config(**changes: dict[str, Any]) -> Config:
    """A tiny run on the committed text; ``changes`` by section."""
    sections: Changes = {
        # A large eps and init keep the norms well conditioned: bytes that hardly occur have tiny
        # embeddings, whose gradients magnify rounding.
        "model": {
            "hidden_size": 32, "layers": 3, "heads": 4, "kv_heads": 2, "norm_eps": 1e-2,
            "init_std": 0.05,
        },
        "data": {"source": "text", "paths": [str(TEXT)], "sequence_length": 33, "held_out": 0.1},
        "weight_parallel": {"min_shard_elements": 128},
        "activation_checkpoint": {"mode": "full", "fraction": 0.5},
        "optimizer": {"lr": 3e-3, "warmup_steps": 5},
        "train": {
            "steps": 25, "global_batch": 4, "eval_batches": 2, "loss_chunk": 20,
            "log_every": 50,
        },
        "checkpoint": {"save": False},
    }  # fmt: skip
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


def run(rank: int, world_size: int, runs: list[tuple[Config, str]]) -> None:
    for settings, folder in runs:
        train(settings, Path(folder))


def rows_of_runs(
    tmp_path: Path, world: int, changes: list[Changes]
) -> list[list[StepMetrics]]:
    """Run each change on ``world`` ranks; the metrics of each."""
    folders = [tmp_path / f"{world}-{i}" for i in range(len(changes))]
    runs = [(config(**c), str(f)) for c, f in zip(changes, folders, strict=True)]
    run_ranks(run, world, runs, timeout=240)
    return [read_metrics(f / "metrics.jsonl") for f in folders]


def gap(rows: list[StepMetrics], wanted: list[StepMetrics]) -> tuple[float, float]:
    """The largest relative differences of loss and gradient norm over all steps."""
    assert [r.step for r in rows] == [w.step for w in wanted]
    assert [r.tokens for r in rows] == [w.tokens for w in wanted]
    pairs = list(zip(rows, wanted, strict=True))
    return (
        max(abs(r.loss / w.loss - 1) for r, w in pairs),
        max(abs(r.grad_norm / w.grad_norm - 1) for r, w in pairs),
    )


SHORT: Changes = {"train": {"steps": 12}}
OPTIMIZERS: list[Changes] = [
    {**SHORT, "optimizer": {"name": "adamw", "max_grad_norm": 1.0}},
    {**SHORT, "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "max_grad_norm": 1.0}},
]
# Not compared here: each mesh of four with the other optimizer, and fifty steps; see
# test_zero_parity.py.
MESHES: list[tuple[int, dict[str, Any], tuple[int, ...]]] = [
    (2, {"weight": 2, "sequence": 2}, (0, 1)),
    (4, {"weight": 2, "sequence": 4}, (0,)),
    (4, {"weight": 1, "sequence": 2, "optimizer_ranks": 2}, (1,)),
    (4, {"weight": 4, "sequence": 4, "ring": 2}, (0,)),
]


@pytest.mark.slow(12)
@few("meshes", MESHES, 2)
def test_every_step_equals_one_process_on_every_mesh(
    tmp_path: Path, meshes: list[tuple[int, dict[str, Any], tuple[int, ...]]]
) -> None:
    wanted = rows_of_runs(tmp_path, 1, OPTIMIZERS)
    for rows in wanted:
        assert rows[-1].loss < 0.97 * rows[0].loss, "it has begun to learn"
    for world in (2, 4):
        chosen = [(m, o) for size, m, optimizers in meshes if size == world for o in optimizers]
        changes = [{**OPTIMIZERS[o], **mesh_sections(**mesh)} for mesh, o in chosen]
        for (mesh, o), rows in zip(chosen, rows_of_runs(tmp_path, world, changes), strict=True):
            loss, norm = gap(rows, wanted[o])
            assert loss < 1e-5, (mesh, o)
            assert norm < 1e-5, (mesh, o)
            assert rows[-1].eval_loss == pytest.approx(wanted[o][-1].eval_loss, rel=1e-5)


@pytest.mark.thorough(7)
@pytest.mark.unmeasured
def test_full_accumulation_gives_the_same_steps_and_sends_less(tmp_path: Path) -> None:
    base: Changes = {
        "parallel": {"weight": 2, "sequence": 2}, "train": {"steps": 6, "micro_batches": 4},
    }  # fmt: skip
    full: Changes = {**base, "weight_parallel": {"accumulation": "full"}}
    wanted, rows = rows_of_runs(tmp_path, 2, [base, full])
    assert max(gap(rows, wanted)) < 1e-5
    plans = [make_plan(config(**changes), 2).ranks[0].schedule for changes in (base, full)]
    assert plans[0].nbytes("RS") == 4 * plans[1].nbytes("RS")
    saved = plans[0].nbytes("RS") - plans[1].nbytes("RS")
    assert wanted[1].reduced_bytes - rows[1].reduced_bytes == saved


@pytest.mark.slow(6)
def test_bf16_with_fp32_master_weights_stays_within_two_percent_of_fp32(tmp_path: Path) -> None:
    parallel: Changes = {"parallel": {"weight": 2, "sequence": 2}}
    short = {"steps": 6}
    wanted, parameters, compute = rows_of_runs(
        tmp_path,
        2,
        [
            {**parallel, "train": short},
            {**parallel, "train": {**short, "dtype": "bfloat16"}},
            {**parallel, "train": short, "weight_parallel": {"compute_dtype": "bfloat16"}},
        ],
    )
    assert gap(parameters, wanted)[0] < 0.02
    assert gap(compute, wanted)[0] < 0.02
    assert parameters[-1].loss != wanted[-1].loss
    # Half the bytes travel.
    assert compute[-1].gathered_bytes * 2 == wanted[-1].gathered_bytes


def test_fp16_scales_its_loss_and_learns(tmp_path: Path) -> None:
    changes: Changes = {
        "parallel": {"weight": 2, "sequence": 2},
        "train": {"steps": 20, "dtype": "float16"},
        "optimizer": {"loss_scale_init": 2.0**24},  # too large: the first steps are skipped
    }
    (rows,) = rows_of_runs(tmp_path, 2, [changes])
    assert not math.isfinite(rows[0].grad_norm)
    assert math.isfinite(rows[-1].grad_norm)
    assert rows[-1].loss < 0.9 * rows[0].loss


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    parallel: Changes = {"parallel": {"weight": 2, "sequence": 2}}
    whole: Changes = {**parallel, "train": {"steps": 7}, "checkpoint": {"save": True, "every": 5}}
    (wanted,) = rows_of_runs(tmp_path, 2, [whole])
    folder = tmp_path / "2-0"
    saved = folder / "checkpoints" / "step-000005"
    assert candidates(saved) == [saved]
    assert candidates(folder)[0].name == "step-000007"
    again = config(**{**whole, "checkpoint": {"save": False, "resume": str(saved)}})
    run_ranks(run, 2, [(again, str(tmp_path / "resumed"))])
    rows = read_metrics(tmp_path / "resumed" / "metrics.jsonl")
    assert [r.step for r in rows] == list(range(6, 8))
    assert [(r.loss, r.grad_norm, r.lr) for r in rows] == [
        (w.loss, w.grad_norm, w.lr) for w in wanted[5:]
    ]


def refusals(rank: int, world_size: int, settings: Config, folder: str) -> str:
    with pytest.raises(ConfigError) as refused:
        train(settings, Path(folder))
    return str(refused.value)


def test_a_checkpoint_of_another_model_is_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    short: Changes = {"train": {"steps": 2}, "checkpoint": {"save": True}}
    parallel: Changes = {"parallel": {"weight": 2, "sequence": 2}}
    rows_of_runs(tmp_path, 2, [{**parallel, **short}])
    resume = {"checkpoint": {"save": False, "resume": str(tmp_path / "2-0")}}
    other = config(**{**parallel, **short, **resume, "model": {"intermediate_size": 64}})
    for text in run_ranks(refusals, 2, other, str(tmp_path / "other")):
        assert "model.intermediate_size: 96 in the checkpoint, 64 now" in text
    absent = config(**{**short, "checkpoint": {"resume": str(tmp_path / "nothing")}})
    for text in run_ranks(refusals, 2, absent, str(tmp_path / "other")):
        assert "no checkpoint at" in text


def stopped(rank: int, world_size: int, settings: Config, folder: str) -> int:
    """Only rank 1 gets a stop request, before its first step."""
    with StopRequest() as stop:
        stop.requested = rank == 1
        train(settings, Path(folder), stop=stop)
    return len(read_metrics(Path(folder) / "metrics.jsonl")) if rank == 0 else -1


def test_a_stop_asked_of_one_rank_ends_all_after_the_step_with_checkpoint_and_report(
    tmp_path: Path,
) -> None:
    settings = config(
        parallel={"weight": 2, "sequence": 2}, train={"profile": "timeline"},
        checkpoint={"save": True},
    )  # fmt: skip
    assert run_ranks(stopped, 2, settings, str(tmp_path / "run")) == [1, -1]
    assert (tmp_path / "run" / "checkpoints" / "step-000001" / "manifest.json").exists()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "stopped before its last step" in page
    assert "layers.1" in page  # the timeline has bars of blocks
    assert "rates of cpu. Most wrong is " in page
    for rank in (0, 1):
        trace = json.loads((tmp_path / "run" / "traces" / f"rank{rank}.json").read_text())
        assert any(row["name"].startswith("RS layers.1") for row in trace["traceEvents"])


@ranks(2)
def test_the_page_shows_the_step_of_middle_length_the_same_on_all_ranks(
    rank: int, world_size: int
) -> None:
    loop = object.__new__(Loop)
    steps: list[tuple[float, list[Any]]] = [(9.0, ["first"]), (3.0, [1]), (1.0, [2]), (2.0, [3])]
    for count, wanted in ((4, [3]), (3, [2]), (2, [1]), (1, ["first"]), (0, [])):
        loop.traced = [(took * (-1) ** rank, events) for took, events in steps[:count]]
        assert loop._typical() == wanted


def test_a_step_without_a_token_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    """The tokens are read after backward, and before any weight changes."""
    losses = []
    for empty in (True, False):
        with internsp.Trainer(config(), output=tmp_path / str(empty)) as trainer:
            session = trainer._session
            runner = StepRunner(session)
            runner.step(0, StopRequest())
            if empty:
                before = [whole(p) for p in session.modules[0].parameters()]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(runner, "_layout", partial(without_tokens, runner._layout))
                    with pytest.raises(ConfigError, match="so there is nothing to learn"):
                        runner.step(1, StopRequest())
                after = [whole(p) for p in session.modules[0].parameters()]
                assert all(map(torch.equal, before, after))
            losses.append([runner.step(n, StopRequest()).metrics.loss for n in (1, 2)])
    assert losses[0] == losses[1]


def test_a_step_that_is_read_late_is_refused_then_by_its_own_number(tmp_path: Path) -> None:
    fused = config(optimizer={"options": ["fused = true"]})
    with internsp.Trainer(fused, output=tmp_path / "late") as trainer:
        runner = StepRunner(trainer._session)
        runner.step(0, StopRequest())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "_layout", partial(without_tokens, runner._layout))
            assert runner.queue(1, StopRequest()) is None
        with pytest.raises(ConfigError, match="step 2: no token of the batch"):
            runner.queue(2, StopRequest())


def whole(parameter: Any) -> Tensor:
    found: Tensor = parameter.full_tensor()
    return found.clone()


def without_tokens(layout_of: Callable[..., SequenceLayout], *given: Any) -> SequenceLayout:
    found = layout_of(*given)
    return replace(
        found, labels=torch.full_like(found.labels, -100), valid_tokens=0, total_valid_tokens=0
    )


@pytest.mark.thorough(1)
def test_a_fresh_run_sets_an_older_one_aside(tmp_path: Path) -> None:
    short: Changes = {"train": {"steps": 1}}
    rows_of_runs(tmp_path, 1, [short])
    first = (tmp_path / "1-0" / "metrics.jsonl").read_text()
    rows_of_runs(tmp_path, 1, [{"train": {"steps": 2}}])
    assert (tmp_path / "1-0.1" / "metrics.jsonl").read_text() == first
    assert len(read_metrics(tmp_path / "1-0" / "metrics.jsonl")) == 2


def test_a_row_of_metrics_says_what_traveled(tmp_path: Path) -> None:
    parallel: Changes = {"parallel": {"weight": 2, "sequence": 2}, "train": {"steps": 2}}
    rows_of_runs(tmp_path, 2, [parallel])
    rows = [json.loads(line) for line in (tmp_path / "2-0" / "metrics.jsonl").open()]
    assert rows[0].keys() >= {
        "step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second",
        "exposed_comm_seconds", "gathered_bytes", "reduced_bytes", "peak_memory_bytes",
    }  # fmt: skip
    plan = make_plan(config(**parallel), 2)
    assert rows[1]["gathered_bytes"] == plan.ranks[0].schedule.nbytes("AG")
    assert 0 < rows[1]["exposed_comm_seconds"] < rows[1]["step_seconds"]
