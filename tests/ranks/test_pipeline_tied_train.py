"""``internsp train`` of a tied head through a pipeline: numbers, checkpoints, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from internsp.app.checkpoint import manifest
from internsp.app.checkpoint.export import export
from internsp.app.config import Config
from internsp.app.plan.pipeline import tables
from internsp.app.plan.step import make_plan
from internsp.app.process.stop import StopRequest
from internsp.app.report.metrics import read_metrics
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from tests.ranks.test_pipeline_train import Changes, config, pipelined, rows_of, run
from tests.support.ranks import run_ranks

TIED: Changes = {"model": {"tie_embeddings": True}}
SHORT: dict[str, Any] = {"steps": 4, "eval_batches": 1, "eval_every": 4}


def changes(*more: Changes) -> Changes:
    made: Changes = {**TIED, "train": SHORT}
    for each in more:
        for section, values in each.items():
            made[section] = made.get(section, {}) | values
    return made


OFFLOADED = {"offload": ["weights", "optimizer", "gradients"]}
QUANTIZED = {
    "accumulation": "full", "quantize": "int8", "coalesce_bytes": 0,
}  # fmt: skip
RUNS: dict[int, list[Changes]] = {
    2: [
        {**pipelined("1F1B"), "optimizer": {"groups": [{"match": ["embed"], "lr": 1e-2}]}},
        pipelined("ZBVZeroBubble", 2),
    ],
    4: [
        {**pipelined("DualPipeV", 2), "weight_parallel": OFFLOADED},
        {**pipelined("Interleaved1F1B", 2, weight=2), "optimizer": {"name": "sgd"}},
        {
            **pipelined("InterleavedZeroBubble", 2, sequence=2, weight=2),
            "weight_parallel": QUANTIZED,
        },
        {**pipelined("GPipe"), "train": {"dtype": "bfloat16"}},
    ],
}


@pytest.mark.parametrize(
    ("world", "chosen"),
    [
        (2, RUNS[2]), pytest.param(4, RUNS[4][1:2], marks=pytest.mark.thorough(5)),
        pytest.param(4, [*RUNS[4][:1], *RUNS[4][2:]], marks=pytest.mark.thorough(15)),
    ],
    ids=["two", "four", "four, others"],
)  # fmt: skip
def test_a_run_is_one_processs(world: int, chosen: list[Changes], tmp_path: Path) -> None:
    runs = [changes(each) for each in chosen]
    alone = [{k: v for k, v in each.items() if k not in ("parallel", "pipeline")} for each in runs]
    for each in alone:
        each.pop("weight_parallel", None)
    wanted = rows_of(tmp_path, 1, alone)
    for want, rows, made in zip(wanted, rows_of(tmp_path, world, runs), runs, strict=True):
        coarse = made["train"].get("dtype") or made.get("weight_parallel", {}).get("quantize")
        for one, other in zip(want, rows, strict=True):
            close = pytest.approx((one.loss, one.grad_norm), rel=2e-2 if coarse else 1e-5)
            assert (other.loss, other.grad_norm) == close, made
        assert rows[-1].eval_loss == pytest.approx(want[-1].eval_loss, rel=1e-2 if coarse else 1e-5)


@pytest.mark.unmeasured
def test_a_checkpoint_has_one_copy_and_goes_on_on_any_mesh(tmp_path: Path) -> None:
    keep = {"checkpoint": {"save": True, "every": 2}}
    meshes: dict[str, tuple[int, Changes]] = {
        "one": (1, {}), "two": (2, pipelined("1F1B")), "V": (2, pipelined("ZBVZeroBubble", 2)),
    }  # fmt: skip
    rows, names, tensors = {}, {}, {}
    for name, (world, mesh) in meshes.items():
        folder = tmp_path / name
        run_ranks(run, world, [(config(**changes(mesh, keep)), str(folder))], timeout=120)
        rows[name] = [(row.loss, row.grad_norm) for row in read_metrics(folder / "metrics.jsonl")]
        step = folder / "checkpoints" / "step-000004"
        found = manifest.read(step).tensors
        names[name] = {(n, t.shape) for n, t in found.items() if not n.startswith("random.")}
        export(step, tmp_path / f"{name}-export")
        tensors[name] = load_file(tmp_path / f"{name}-export" / "model.safetensors")
    assert names["one"] == names["two"] == names["V"]
    assert not [n for n, _ in names["one"] if "head" in n]
    assert "optimizer.embed.weight.exp_avg" in dict(names["one"])
    for name in ("two", "V"):
        assert tensors[name].keys() == tensors["one"].keys()
        for key, value in tensors["one"].items():
            torch.testing.assert_close(tensors[name][key], value, rtol=1e-4, atol=1e-4)
    for before, after in (("two", "one"), ("one", "V"), ("V", "two")):
        world, mesh = meshes[after]
        start = {"checkpoint": {"resume": str(tmp_path / before / "checkpoints" / "step-000002")}}
        folder = tmp_path / f"{before}-{after}"
        run_ranks(run, world, [(config(**changes(mesh, start)), str(folder))], timeout=120)
        found = [(row.loss, row.grad_norm) for row in read_metrics(folder / "metrics.jsonl")]
        for one, other in zip(rows[before][2:], found, strict=True):
            assert other == pytest.approx(one, rel=1e-5), (before, after)


def exchanged(rank: int, world_size: int, settings: Config) -> list[int]:
    session = Session.create(settings)
    session.trace.enabled = True
    StepRunner(session).step(0, StopRequest())
    return [e.nbytes for e in session.trace.events if (e.kind, e.unit) == ("EX", "embed.weight")]


def test_the_plan_names_what_is_tied_and_what_a_step_sends_of_it() -> None:
    for mesh in (pipelined("1F1B"), pipelined("ZBVZeroBubble", 2)):
        settings = config(**changes(mesh))
        plan = make_plan(settings, 4)
        ((_, copies, nbytes),) = plan.tied
        in_a_v = mesh["pipeline"]["chunks"] == 2
        last = 3 if in_a_v else 1
        assert copies == ("embed.weight of stage 0", f"head.weight of stage {last}")
        assert (nbytes == 0) == in_a_v
        assert run_ranks(exchanged, 4, settings) == [[nbytes] * (not in_a_v)] * 4
        console = Console(width=160, record=True)
        for printed in tables(plan):
            console.print(printed)
        assert "Weights of several stages" in console.export_text()
