"""A run from Python: a function, a Trainer with user-defined parts, launchers' variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import internsp
from internsp.app.config import load_config
from internsp.app.process.environment import launched
from internsp.app.report.metrics import read_metrics
from internsp.app.session.own import Custom
from internsp.errors import ConfigError
from tests.support.command import TORCHRUN, begin, python
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "tests" / "data" / "text"
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 32, "layers": 2, "heads": 4},
    "data": {"source": "text", "paths": [str(TEXT)], "sequence_length": 32, "held_out": 0.1},
    "weight_parallel": {"min_shard_elements": 128},
    "optimizer": {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"},
    "train": {"name": "mine", "steps": 4, "global_batch": 4, "eval_every": 2, "eval_batches": 1,
              "dtype": "float64"},
    "checkpoint": {"every": 2},
}  # fmt: skip


def sections(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {**SECTIONS.get(name, {}), **changes.get(name, {})}
            for name in {**SECTIONS, **changes}}  # fmt: skip


class Notes(internsp.Callback):
    """Every call, in order."""

    def __init__(self, stop_after: int = 0) -> None:
        self.said: list[str] = []
        self.stop_after = stop_after

    def on_step(self, trainer: internsp.Trainer, metrics: internsp.StepMetrics) -> None:
        assert trainer.step == metrics.step
        self.said.append(f"step {metrics.step}")
        if metrics.step == self.stop_after:
            trainer.stop()

    def on_evaluation(self, trainer: internsp.Trainer, metrics: internsp.StepMetrics) -> None:
        assert metrics.eval_loss is not None
        self.said.append(f"evaluation {metrics.step}")

    def on_checkpoint(self, trainer: internsp.Trainer, path: Path) -> None:
        assert (path / "manifest.json").exists()
        self.said.append(path.name)

    def on_end(self, trainer: internsp.Trainer) -> None:
        assert trainer.mesh.rank or (trainer.output / "report.html").exists()
        self.said.append("end")


class Tiny(nn.Module):
    """A user's model: an ordinary forward of ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(50, 16, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=torch.float64) for _ in range(2))
        self.head = nn.Linear(16, 50, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        logits: Tensor = self.head(h)
        return logits


def loss(model: nn.Module, layout: internsp.SequenceLayout) -> Tensor:
    return nn.functional.cross_entropy(
        model(layout.input_ids).flatten(0, 1), layout.labels.flatten(), ignore_index=-100,
        reduction="sum",
    )  # fmt: skip


def rows(step: int, data_rank: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step)
    whole = torch.randint(0, 50, (4, 9), generator=generator)
    return whole[data_rank * count : (data_rank + 1) * count]


def own_data(mesh: internsp.ParallelMesh) -> Iterator[Tensor]:
    count = 4 // mesh.data
    return (rows(step, mesh.data_rank, count) for step in range(3))


def own_optimizer(communicator: internsp.ISPCommunicator) -> internsp.ZeroOptimizer:
    return internsp.ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1, momentum=0.9)


def with_everything_own(rank: int, world: int, folder: str) -> tuple[list[str], dict[str, Tensor]]:
    notes = Notes()
    given = sections(
        parallel={"weight": 2}, train={"steps": 9, "eval_every": 0},
        weight_parallel={"min_shard_elements": 16, "blocks": ["layers.*"], "gather_before": "qkv"},
    )  # fmt: skip
    trainer = internsp.Trainer(
        given, output=folder, model=Tiny(), loss=loss, data=own_data, optimizer=own_optimizer,
        callbacks=[notes],
    )  # fmt: skip
    trainer.train()
    whole = {n: p.full_tensor().detach() for n, p in trainer.model.named_parameters()}
    with pytest.raises(ConfigError, match="a run is trained once"):
        trainer.train()
    return notes.said, whole


def test_own_model_loss_data_and_optimizer_step_as_on_one_process(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        ids = rows(step, 0, 4)
        logits = model(ids[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for said, found in run_ranks(with_everything_own, 2, str(tmp_path / "run")):
        for name, wanted in model.named_parameters():
            torch.testing.assert_close(found[name], wanted.detach(), rtol=0, atol=1e-10)
        # A checkpoint is written while the following steps run.
        assert [s for s in said if "-" not in s] == ["step 1", "step 2", "step 3", "end"]
        assert [s for s in said if "-" in s] == ["step-000002", "step-000003"]
        assert said.index("step-000002") > said.index("step 2")
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


class Counting(Tiny):
    """Every rank counts the tokens of its own rows, and a later step depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16, dtype=torch.float64)
        self.register_buffer("counts", torch.zeros(256))

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.counts += torch.bincount(ids.flatten(), minlength=256)
        rare = (self.counts / self.counts.sum()).argsort()[:50].double() / 256
        return super().forward(ids) + rare


def local_loss(model: nn.Module, layout: internsp.SequenceLayout) -> Tensor:
    return nn.functional.cross_entropy(
        model(layout.input_ids).flatten(0, 1), layout.labels.flatten() % 50, reduction="sum"
    )


def counting(
    rank: int, world: int, folder: str, steps: int, weight: int
) -> tuple[Tensor, dict[str, Tensor]]:
    given = sections(
        parallel={"weight": weight}, train={"steps": steps, "eval_every": 0},
        weight_parallel={"min_shard_elements": 16, "blocks": ["layers.*"], "gather_before": "qkv"},
        checkpoint={"every": 2, "resume": "auto"},
    )  # fmt: skip
    trainer = internsp.Trainer(given, output=folder, model=Counting(), loss=local_loss)
    trainer.train()
    assert trainer.step == steps
    model: Any = trainer.model
    return model.counts, {n: p.full_tensor().detach() for n, p in model.named_parameters()}


@pytest.mark.unmeasured
def test_a_resumed_rank_has_its_own_buffers_again(tmp_path: Path) -> None:
    wanted = run_ranks(counting, 2, str(tmp_path / "whole"), 4, 2)
    assert not torch.equal(wanted[0][0], wanted[1][0]), "each rank has rows of its own"
    for weight in (2, 1):  # the same mesh, and another
        folder = str(tmp_path / f"resumed {weight}")
        run_ranks(counting, 2, folder, 2, 2)
        found = run_ranks(counting, 2, folder, 4, weight)
        same = [
            torch.equal(one, other) and all(torch.equal(mine[n], its[n]) for n in mine)
            for (one, mine), (other, its) in zip(found, wanted, strict=True)
        ]
        assert all(same) == (weight == 2)
        run_ranks(counting, 2, folder, 4, weight)  # nothing is left to do


def shallower(rank: int, world: int, folder: str, weight: int) -> str:
    model = Counting()
    del model.layers[1:]
    given = sections(
        parallel={"weight": weight}, train={"steps": 4, "eval_every": 0},
        weight_parallel={"min_shard_elements": 16, "blocks": ["layers.*"], "gather_before": "qkv"},
        checkpoint={"resume": "auto"},
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        internsp.Trainer(given, output=folder, model=model, loss=local_loss).train()
    return str(caught.value)


def test_a_model_that_has_lost_layers_does_not_go_on_without_them(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_ranks(counting, 2, folder, 2, 2)
    wanted = r"step-000002 has model\.layers\.1\..*, which this model does not have"
    for weight in (2, 1):
        assert all(re.search(wanted, text) for text in run_ranks(shallower, 2, folder, weight))


def stopped(rank: int, world: int, folder: str) -> list[str]:
    notes = Notes(stop_after=3 if rank == 1 else 0)
    given = sections(parallel={"weight": 2}, train={"steps": 9})
    internsp.Trainer(given, output=folder, callbacks=[notes]).train()
    return notes.said


def test_callbacks_are_told_in_order_on_every_rank_and_one_rank_may_stop_all(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(stopped, 2, str(tmp_path / "run"))
    assert first == second
    # The step that was running when rank 1 requested the stop is the last one.
    assert [s for s in first if "-" not in s] == [
        "step 1", "evaluation 2", "step 2", "step 3", "evaluation 4", "step 4", "end",
    ]  # fmt: skip
    assert [s for s in first if "-" in s] == ["step-000002", "step-000004"]


def apart(rank: int, world: int, folder: str) -> str:
    def data(mesh: internsp.ParallelMesh) -> Iterator[Tensor]:
        return (rows(step, 0, 4) + rank for step in range(3))

    given = sections(parallel={"weight": 2, "sequence": 2})
    with pytest.raises(ConfigError) as caught:
        internsp.Trainer(given, output=folder, data=data).train()
    return str(caught.value)


def test_ranks_of_a_sequence_that_are_given_other_rows_are_told(tmp_path: Path) -> None:
    for text in run_ranks(apart, 2, str(tmp_path / "run")):
        assert "gives ranks 0 and 1 other rows" in text
        assert "mesh.data_rank" in text


@pytest.mark.parametrize(
    ("parts", "section", "key", "value"),
    [
        (Custom(model=Tiny()), "model", "dropout", 0.1),
        (Custom(data=own_data), "train", "batch_tokens", 100),
    ],
)
def test_what_a_part_of_ones_own_would_leave_without_effect_is_refused(
    parts: Custom, section: str, key: str, value: float
) -> None:
    parts.check(load_config(sections()))
    with pytest.raises(ConfigError, match=rf"^{section}\.{key}: "):
        parts.check(load_config(sections(**{section: {key: value}})))


def listed(rank: int, world: int, folder: str) -> tuple[list[list[float]], list[str]]:
    """Losses of an iterator's and a list's batches; errors of invalid ones."""

    class Losses(internsp.Callback):
        def __init__(self) -> None:
            self.found: list[float] = []

        def on_step(self, trainer: internsp.Trainer, metrics: internsp.StepMetrics) -> None:
            self.found.append(metrics.loss)

    def run(name: str, **parts: Any) -> list[float]:
        losses = Losses()
        internsp.Trainer(
            sections(
                train={"steps": 9, "eval_every": 0}, checkpoint={"save": False, "every": 0},
                weight_parallel={"blocks": ["layers.*"], "gather_before": "qkv"},
            ), output=f"{folder}/{name}", callbacks=[losses],
            **{"model": Tiny(), "loss": loss, "data": own_data, **parts},
        ).train()  # fmt: skip
        return losses.found

    def refused(name: str, **parts: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            run(name, **parts)
        return str(caught.value)

    def short(mesh: internsp.ParallelMesh) -> Iterator[Tensor]:
        yield rows(0, mesh.data_rank, 2)
        yield rows(1, mesh.data_rank, 2)[mesh.data_rank :]  # one row too few on one rank

    return [run("iterator"), run("list", data=lambda mesh: list(own_data(mesh)))], [
        refused("short", data=short),
        refused("parts", data=lambda mesh: [(rows(0, mesh.data_rank, 2), [[0]] * 2, 1)]),
        refused("starts", data=lambda mesh: [(rows(0, mesh.data_rank, 2), torch.zeros(2, 1))]),
        refused("many", data=lambda _: [rows(0, 0, 2) + 300], model=None, loss=None),
        refused("mean", loss=lambda model, at: loss(model, at).expand(2)),
        refused("detached", loss=lambda model, at: loss(model, at).detach()),
        refused("plain", optimizer=lambda _: torch.optim.SGD(Tiny().parameters(), lr=0.1)),
    ]


def test_a_list_of_batches_is_gone_through_once_and_wrong_parts_are_named(tmp_path: Path) -> None:
    for (iterated, listed_), errors in run_ranks(listed, 2, str(tmp_path)):
        short, parts, starts, many, mean, detached, plain = errors
        assert len(iterated) == 3
        assert listed_ == iterated
        assert "rank 1: data gives 1 rows where" in short
        assert "drop_last=True" in short
        assert "rank 0: data gives no int64 tensor [rows, tokens]" in parts
        assert "rank 0: data gives document starts that are no list of whole numbers" in starts
        assert re.search(r"data gives ids from 3\d\d to .* below model.vocab_size = ", many)
        assert "loss gives [2], no scalar tensor" in mean
        assert "loss gives a value without gradients" in detached
        assert "optimizer gives SGD, no ZeroOptimizer" in plain


SCRIPT = """
import internsp

if __name__ == "__main__":
    folder = internsp.train("config.toml")
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    print("steps", len(rows), folder)
"""
NOTEBOOK = """
import internsp
trainer = internsp.Trainer({"train": {"steps": 2, "eval_batches": 0},
    "model": {"layers": 1, "hidden_size": 32}, "data": {"sequence_length": 32, "source": "text",
    "paths": ["text"], "held_out": 0}})
trainer.train()
ids = __import__("torch").arange(8)[None]
print("logits", list(trainer.model(ids).shape))
trainer.close()
"""


def made(folder: Path, code: str) -> None:
    """A program, its configuration and its data."""
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("def f(x):\n    return x + 1\n" * 400)
    (folder / "config.toml").write_text(
        '[model]\nlayers = 1\nhidden_size = 32\n[data]\nsource = "text"\npaths = ["text"]\n'
        'sequence_length = 32\nheld_out = 0\n[train]\nname = "mine"\nsteps = 2\n'
        "eval_batches = 0\n[parallel]\nweight = 2\n[launch]\nprocesses = 2\n"
    )
    (folder / "script.py").write_text(code)


@pytest.mark.slow(12)
@pytest.mark.parametrize(
    ("code", "before", "wanted"),
    [
        pytest.param(SCRIPT, (), "steps 2 runs/mine", id="script"),
        pytest.param(
            SCRIPT,
            (*TORCHRUN, "--nproc-per-node", "2", "--standalone"),
            "steps 2 runs/mine",
            id="torchrun",
        ),
        pytest.param(NOTEBOOK, (), "logits [1, 8, 257]", id="one process, as in a notebook"),
    ],
)
def test_a_program_trains(code: str, before: tuple[str, ...], wanted: str, tmp_path: Path) -> None:
    made(tmp_path, code)
    assert wanted in python(*before, "script.py", cwd=tmp_path).stdout


@pytest.mark.slow(12)
def test_the_example_of_own_parts_runs(tmp_path: Path) -> None:
    done = python(str(ROOT / "examples" / "trainer_parts.py"), cwd=tmp_path)
    assert done.stdout.splitlines()[-1].startswith("4 ")
    assert done.stdout.endswith("runs/run\n")


SLURM = {
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[007-010,012],other3",
}  # fmt: skip


def test_srun_gives_ranks_without_torchrun_and_a_batch_script_does_not() -> None:
    found = launched(SLURM, joins=True)
    assert (found.rank, found.world_size, found.problems) == (5, 8, ())
    assert found.variables == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "22387",
    }  # fmt: skip
    assert launched({**SLURM, "MASTER_ADDR": "own"}, joins=True).variables["MASTER_ADDR"] == "own"
    for nodes, first in (("a1,b2", "a1"), ("n[3,5]-ib", "n3-ib"), ("one", "one")):
        given = {**SLURM, "SLURM_STEP_NODELIST": nodes}
        assert launched(given, joins=True).variables["MASTER_ADDR"] == first
    batch = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "77"}
    assert launched(batch, joins=True) == launched({}, joins=True)
    torchrun = {**SLURM, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    assert launched(torchrun, joins=True).variables == {}


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_NODELIST"])
def test_several_tasks_without_ranks_are_no_runs_of_their_own(missing: str) -> None:
    found = launched({k: v for k, v in SLURM.items() if k != missing}, joins=True)
    assert "is set and" in str(found.problems[0])


def test_processes_of_mpirun_without_ranks_are_refused() -> None:
    (problem,) = launched({"OMPI_COMM_WORLD_SIZE": "8"}, joins=True).problems
    assert "each of these processes would be a run of its own" in str(problem)


@pytest.mark.slow(12)
def test_two_tasks_of_srun_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def f(x):\n    return x + 1\n" * 400)
    (tmp_path / "config.toml").write_text(
        '[model]\nlayers = 1\nhidden_size = 32\n[data]\nsource = "text"\npaths = ["a.txt"]\n'
        "sequence_length = 32\nheld_out = 0\n[train]\nsteps = 2\n"
        "eval_batches = 0\n[parallel]\nweight = 2\n"
    )
    words = ("-m", "internsp", "train", "config.toml")
    with (tmp_path / "log").open("w") as log:
        ranks = [
            begin(
                words, tmp_path, log.fileno(), log.fileno(),
                {**os.environ, **SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank),
                 "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())},
            )
            for rank in range(2)
        ]  # fmt: skip
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [0, 0], (tmp_path / "log").read_text()
    assert len(read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")) == 2
    assert not (tmp_path / "runs" / "run.1").exists()


def test_what_a_trainer_cannot_do_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"launch": {"processes": 2}}, {}, "start the program with torchrun"),
        ({}, {"loss": loss}, "loss is for a model of your own"),
        ({}, {"model": Tiny().to("meta")}, "embed.weight of your model is on the meta device"),
        ({"train": {"stepz": 3}}, {}, "did you mean train.steps"),
    ]  # fmt: skip
    for changes, more, wanted in cases:
        with pytest.raises(ConfigError, match=wanted):
            internsp.Trainer(sections(**changes), output=tmp_path / "run", **more)
    assert not torch.distributed.is_initialized()
    assert not (tmp_path / "run").exists()
    with internsp.Trainer(sections(), output=tmp_path / "run") as trainer:
        pass
    with pytest.raises(ConfigError, match=r"its process group is gone \(close"):
        trainer.train()


def test_a_stop_before_the_first_step_ends_the_run_after_it(tmp_path: Path) -> None:
    with internsp.Trainer(sections(train={"steps": 3}), output=tmp_path) as trainer:
        trainer.stop()
        trainer.train()
    assert trainer.step == 1
