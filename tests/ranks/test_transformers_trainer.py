"""transformers.Trainer with a parallel model: each logged value and weight as on one process.

The example of the documents is run. Its labels are masked unevenly, so that ranks have different
numbers of tokens. transformers computes its loss in fp32 for any dtype of the model: logged losses
agree to 2e-6, weights and gradient norms of the fp64 model to 1e-10 (of fp32 adapters on a bf16
model to 1e-6).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import internsp
from internsp.errors import ConfigError
from tests.support.compare import check
from tests.support.installed import need
from tests.support.models import Tiny
from tests.support.ranks import run_ranks

need("accelerate", "transformers.Trainer needs accelerate")
need("peft", "one case trains adapters of peft")
need("transformers", "the extra [hf] is not installed")

pytestmark = [pytest.mark.ranks, pytest.mark.unmeasured]
TEXT = Path(__file__).parents[1] / "data/text/01_why_cut_sequences.txt"
LOGGED = 2e-6
CASES: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.5},
    "not clipped": {"max_grad_norm": 0, "load_best_model_at_end": True, "save_steps": 2},
    "recomputed": {"activation_checkpointing": True, "max_steps": 2, "warmup_steps": 0},
    "whole matrices": {"optim": "adafactor", "max_steps": 2, "warmup_steps": 0},
}
LORA = {
    "max_steps": 2, "optim": "sgd", "learning_rate": 1.0, "warmup_steps": 0, "save_steps": 1,
    "eval_steps": 1,
}  # fmt: skip


class Run(NamedTuple):
    log: list[dict[str, float]]
    predictions: Any
    test_loss: float
    uneven: Any
    weights: dict[str, Tensor]
    saved: dict[str, Tensor]


def one(
    folder: Path, weight: int, sequence: int, lora: bool = False, resume: str | None = None,
    **changes: Any,
) -> Run:
    """Train 4 steps with the example, evaluate, predict, save."""
    from safetensors.torch import load_file

    from examples import transformers_trainer as example

    settings = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "adam_epsilon": 1e-4} | changes
    settings["include_num_input_tokens_seen"] = "all"
    data = int(os.environ.get("WORLD_SIZE", "1")) // sequence
    accumulate = 2
    if lora:  # bf16 rounding depends on a micro-batch's size; an evaluation is a mean over batches
        accumulate = 8 // data
        settings["per_device_eval_batch_size"] = 4 // data
    args = example.arguments(str(folder), accumulate, sequence, **settings)
    model = example.make_model(lora, torch.float64)
    trainer = example.make_trainer(model, args, weight, TEXT, sequence)
    if sequence > 1:  # required with dropout; the order of the data must not depend on it
        torch.manual_seed(int(os.environ["RANK"]))
    trainer.train(resume_from_checkpoint=resume)
    predicted = trainer.predict(example.sequences(TEXT, example.BATCH, seed=3))
    # No number of ranks divides it, so that rows are repeated to fill the last batch.
    uneven = trainer.predict(example.sequences(TEXT, 13, seed=4)).predictions
    trainer.save_model()
    torch.distributed.barrier()  # the first rank has written
    weights = {
        name: (p.full_tensor() if weight else p).detach().clone()  # type: ignore[operator]
        for name, p in model.named_parameters()
    }
    file = folder / ("adapter_model.safetensors" if lora else "model.safetensors")
    return Run(
        trainer.state.log_history, predicted.predictions, predicted.metrics["test_loss"],
        uneven, weights, load_file(file),
    )  # fmt: skip


def runs(
    rank: int, world: int, weight: int, sequence: int, folder: Path
) -> dict[str, Run] | None:
    if world > 1:  # as under torchrun; without it accelerate assumes a single process
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    cases = dict(CASES) if world < 4 else {"clipped": CASES["clipped"]}
    if sequence == world:  # one data rank: it has all tokens
        cases["recomputed"] = CASES["recomputed"] | {"average_tokens_across_devices": False}
    found = {
        name: one(folder / name, weight, sequence, **changes) for name, changes in cases.items()
    }
    if world < 4:
        found["lora"] = one(folder / "lora", weight, sequence, lora=True, **LORA)
    if weight:
        newest = str(folder / "clipped/checkpoint-2")
        found["resumed"] = one(folder / "resumed", weight, sequence, resume=newest)
    if world == 2:
        newest = str(folder / "lora/checkpoint-1")
        found["lora resumed"] = one(
            folder / "lora2", weight, sequence, lora=True, resume=newest, **LORA
        )
    if world == 2 and sequence == 1:
        refused(folder)
        hostile(rank, folder / "clipped/checkpoint-2")
        newest = str(folder / "clipped/checkpoint-2")
        found["other mesh"] = one(folder / "mesh", 1, 1, resume=newest)
    if world == 4 and sequence == 2:
        refused_where_sequences_are_cut(folder)
    return found if rank == 0 else None


def hostile(rank: int, checkpoint: Path) -> None:
    """No pickle is written or read; errors name the invalid file."""
    from internsp.app.checkpoint.state_folder import load_state

    names = sorted(path.name for path in checkpoint.rglob("*") if path.is_file())
    ends = {name.rpartition(".")[2] for name in names}
    assert ends <= {"safetensors", "json", "bin"}, names
    assert [name for name in names if name.endswith(".bin")] == ["training_args.bin"]
    place = checkpoint / "optimizer"
    for name, words in (
        ("rank-00001.safetensors", r"rank-00001\.safetensors is damaged: its sha256"),
        ("manifest.json", r"manifest\.json is damaged: it is no manifest"),
    ):
        torch.distributed.barrier()
        content = (place / name).read_bytes()
        torch.distributed.barrier()
        if rank == 0:
            (place / name).write_bytes(pickle.dumps(Bomb(checkpoint)).ljust(len(content)))
        torch.distributed.barrier()
        with pytest.raises(ConfigError, match=words):
            load_state(place, {})
        torch.distributed.barrier()
        if rank == 0:
            (place / name).write_bytes(content)
    torch.distributed.barrier()
    assert not (checkpoint / "executed").exists()


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.touch, (self.folder / "executed",)


def refused(folder: Path) -> None:
    """All unsupported arguments are named in one error."""
    from examples import transformers_trainer as example
    from internsp.clients.trainer import Trainer

    model = example.make_model()
    mesh = internsp.ParallelMesh.create(weight=2, device_type="cpu")
    communicator = internsp.parallelize(model, mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    args = example.arguments(str(folder / "refused"), torch_compile=True, save_on_each_node=True)
    with pytest.raises(ConfigError, match=r"torch_compile.*save_on_each_node.*optimizers"):
        Trainer(model, args, communicator=communicator, optimizers=(sgd, None))
    args = example.arguments(str(folder / "refused"))
    mean = internsp.WeightParallelConfig(reduction="mean")
    communicator = internsp.parallelize(example.make_model(), mesh, mean)
    with pytest.raises(ConfigError, match=r"rank [01]: reduction = 'mean'"):
        Trainer(model, args, communicator=communicator)


def refused_where_sequences_are_cut(folder: Path) -> None:
    from torch.utils.data import IterableDataset

    from examples import transformers_trainer as example
    from internsp.clients.trainer import Trainer

    mesh = internsp.ParallelMesh.create(weight=2, sequence=2, device_type="cpu")
    args = example.arguments(
        str(folder / "refused"), label_smoothing_factor=0.1, eval_use_gather_object=True,
        train_sampling_strategy="batch_rebalance",
        accelerator_config={"dispatch_batches": True, "use_seedable_sampler": False},
    )  # fmt: skip
    own = internsp.SequenceConfig(own_attention=True)
    torch.manual_seed(0)
    net = Tiny()
    communicator = internsp.parallelize(net, mesh, sequence=own)
    with pytest.raises(ConfigError) as error:
        Trainer(net, args, communicator=communicator, compute_loss_func=lambda *_, **__: None)
    for name in (
        "models of transformers only", "label_smoothing_factor", "compute_loss_func",
        "batch_rebalance", "eval_use_gather_object", "dispatch_batches", "use_seedable_sampler",
    ):  # fmt: skip
        assert name in str(error.value)

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    model = example.make_model()
    trainer = example.make_trainer(model, example.arguments(str(folder / "refused")), 2, TEXT, 2)
    with pytest.raises(ConfigError, match="Endless has no length"):
        trainer.evaluate(Endless())


@cache
def plain(folder: Path) -> dict[str, Run]:
    (found,) = run_ranks(runs, 1, 0, 1, folder)
    assert found is not None
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


def compare(
    found: Run, wanted: Run, what: str, logged: float, tolerance: float, after: int = 0
) -> None:
    """All that is logged after step ``after``, predictions, weights in memory and in the file."""
    rows, expected = ([r for r in run.log if r["step"] > after] for run in (found, wanted))
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys(), what
        for key in row:
            timed = "runtime" in key or "per_second" in key
            of_this_call = key == "train_loss" and after  # the mean of the steps since it began
            if not (timed or of_this_call):
                bound = tolerance if key == "grad_norm" else logged
                assert abs(row[key] - other[key]) <= bound, (what, key, row, other)
    assert abs(found.test_loss - wanted.test_loss) <= logged, what
    assert abs(found.predictions - wanted.predictions).max() <= tolerance, what
    assert abs(found.uneven - wanted.uneven).max() <= tolerance, what
    check(found.weights, wanted.weights, what, tolerance)
    check(found.saved, wanted.saved, f"{what}, the file", tolerance)


@pytest.mark.parametrize(
    ("world", "sequence"),
    [
        (2, 1), pytest.param(2, 2, marks=pytest.mark.thorough(8)),
        pytest.param(4, 1, marks=pytest.mark.thorough(6)),
        pytest.param(4, 2, marks=pytest.mark.thorough(12)),
    ],
    ids=["two, whole", "two, cut sequences", "four, whole", "four, cut sequences"],
)
def test_a_run_logs_and_becomes_what_one_process_does(
    world: int, sequence: int, folder: Path, tmp_path: Path
) -> None:
    expected = plain(folder)
    found = run_ranks(runs, world, 2, sequence, tmp_path)[0]
    for name in CASES if world == 2 else ["clipped"]:
        losses = [row["loss"] for row in expected[name].log if "loss" in row]
        assert len(set(losses)) == len(losses) >= 2, "the reference logged something"
        compare(found[name], expected[name], name, LOGGED, 1e-10)
    compare(found["resumed"], found["clipped"], "resumed", 0.0, 0.0, after=2)
    if world == 2:
        if sequence == 1:
            compare(found["other mesh"], found["clipped"], "other mesh", LOGGED, 1e-10, after=2)
        compare(found["lora"], expected["lora"], "lora", LOGGED, 1e-6)
        compare(found["lora resumed"], found["lora"], "lora resumed", 0.0, 0.0, after=1)
        dtypes = {(("lora_" in n), str(p.dtype)) for n, p in found["lora"].weights.items()}
        assert dtypes == {(True, "torch.float32"), (False, "torch.bfloat16")}


def fuse(model: Any) -> None:
    """Put a forward in place that reads the head's weight and calls no head, as trl's trainers."""
    before = model.forward

    def forward(
        self: Any, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **others: Any
    ) -> Any:
        if not self.training:
            others["num_items_in_batch"] = num_items_in_batch
            return before(input_ids=input_ids, labels=labels, **others)
        hidden = self.model(input_ids, use_cache=False).last_hidden_state[:, :-1]
        weight = self.lm_head.weight
        if isinstance(weight, DTensor):  # as under FSDP2
            weight = weight.full_tensor()
        targets = labels[:, 1:]
        logits = hidden.flatten(0, 1) @ weight.t()
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        return {"loss": loss / num_items_in_batch}

    model.forward = MethodType(forward, model)


def fused(
    rank: int, world: int, weight: int, folder: Path
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Three steps of a trainer that replaces the forward of the model that it is given."""
    import transformers

    from examples import transformers_trainer as example
    from internsp.clients.trainer import Trainer

    class Theirs(transformers.Trainer):
        def __init__(self, model: Any, *args: Any, **options: Any) -> None:
            super().__init__(model, *args, **options)
            fuse(model)

    class Parallel(Trainer, Theirs):
        pass

    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    args = example.arguments(str(folder), max_steps=3, eval_steps=3, save_strategy="no")
    model: Any = example.make_model(False, torch.float64)
    data = {
        "train_dataset": example.sequences(TEXT, 10 * example.BATCH, seed=1),
        "eval_dataset": example.sequences(TEXT, 2 * example.BATCH, seed=2),
    }
    if weight:
        mesh = internsp.ParallelMesh.create(weight)
        config = internsp.WeightParallelConfig(min_shard_elements=512)
        communicator = internsp.parallelize(model, mesh, config)
        trainer: Any = Parallel(model, args, communicator=communicator, **data)
    else:
        trainer = Theirs(model, args, **data)
    trainer.train()
    weights = {n: p.full_tensor() if weight else p for n, p in model.named_parameters()}
    return trainer.state.log_history, {n: w.detach().clone() for n, w in weights.items()}


def test_a_trainer_that_replaces_the_models_forward_trains_as_on_one_process(
    tmp_path: Path,
) -> None:
    ((wanted_log, wanted),) = run_ranks(fused, 1, 0, tmp_path)
    for weight in (2, 1):
        log, weights = run_ranks(fused, 2, weight, tmp_path)[0]
        for row, other in zip(log, wanted_log, strict=True):
            for key in row.keys() & {"loss", "grad_norm", "eval_loss"}:
                assert abs(row[key] - other[key]) <= LOGGED, (weight, key, row, other)
        assert sum("grad_norm" in row for row in wanted_log) == 3, "the reference logged"
        check(weights, wanted, f"weight {weight}", 1e-8)
