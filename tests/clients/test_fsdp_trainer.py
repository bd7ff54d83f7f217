"""transformers' Trainer with accelerate's FSDP2 plugin, unchanged, under internsp.fsdp.install().

accelerate shards on accelerators only. Here its state says so on processors, for torch's
``fully_shard`` and for ours alike; the logged values and the weights have the same bits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import internsp.fsdp
from tests.support.accelerated import PLUGIN, on_processors
from tests.support.fsdp import require_same
from tests.support.installed import need
from tests.support.ranks import run_ranks

need("accelerate", "transformers.Trainer needs accelerate")
need("transformers", "the extra [hf] is not installed")

pytestmark = [pytest.mark.ranks, pytest.mark.clients, pytest.mark.unmeasured]
Log = list[dict[str, float]]


def train(
    rank: int, world: int, folder: Path, kind: str, ours: bool, replicas: int = 1,
    compiled: bool = False,
) -> list[tuple[Log, dict[str, Tensor]]]:  # fmt: skip
    """Four steps with a checkpoint after two, and the last two again from that checkpoint.

    Args:
        replicas: with several, the state of our optimizer is over them, too.
        compiled: ``torch_compile``, which compiles the whole model.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {**PLUGIN, "FSDP_STATE_DICT_TYPE": kind, "MASTER_ADDR": "127.0.0.1"}
    if ours:
        internsp.fsdp.install()
    on_processors()
    from accelerate import ParallelismConfig
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    kind_of, more = Trainer, dict[str, Any]()
    if replicas > 1:
        shards = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=world // replicas)
        more["parallelism_config"] = shards
        if ours:
            from examples.fsdp_trainer import StateOverAllRanks as kind_of  # noqa: N813

    if compiled:
        more |= {"torch_compile": True, "torch_compile_backend": "eager"}
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 64, (64, 12), generator=draw)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    found = []
    for resume in (None, str(folder / "checkpoint-2")):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
            )
        ).double()  # fmt: skip
        trainer = kind_of(
            model,
            TrainingArguments(
                output_dir=str(folder), per_device_train_batch_size=2, max_steps=4, save_steps=2,
                gradient_accumulation_steps=2, logging_steps=1, learning_rate=1e-2, report_to=[],
                use_cpu=True, seed=1, max_grad_norm=0.5, disable_tqdm=True, **more,
            ),
            train_dataset=data,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        named: Any = trainer.model.named_parameters()
        weights = {name: p.full_tensor().detach().clone() for name, p in named}
        keys = {"loss", "grad_norm", "learning_rate"}
        log = [{k: v for k, v in e.items() if k in keys} for e in trainer.state.log_history]
        found.append((log, weights))
        assert (type(next(trainer.model.parameters())) is DTensor) != ours
        if ours and replicas > 1:
            told = f"optimizer state is over {world} ranks"
            assert told in internsp.fsdp.report(trainer.model)
        if ours and compiled:
            assert "compile() of the model" in internsp.fsdp.report(trainer.model_wrapped)
    return found


@pytest.mark.thorough(60)
def test_the_state_of_the_trainers_optimizer_is_over_the_replicas_too(tmp_path: Path) -> None:
    both = [
        run_ranks(
            train, 4, tmp_path / str(ours), "FULL_STATE_DICT", ours, 2, timeout=240, fresh=True
        )[0]
        for ours in (False, True)
    ]
    for (wanted, other), (log, weights) in zip(*both, strict=True):
        losses = [[entry.get("loss") for entry in one] for one in (log, wanted)]
        assert losses[0] == losses[1]
        require_same(weights, other)


@pytest.mark.thorough(30)
def test_a_model_that_the_trainer_compiles_has_the_steps_of_fsdp2(tmp_path: Path) -> None:
    both = [
        run_ranks(
            train, 2, tmp_path / str(ours), "SHARDED_STATE_DICT", ours, 1, True, timeout=240,
            fresh=True,
        )[0]
        for ours in (False, True)
    ]  # fmt: skip
    for (wanted, other), (log, weights) in zip(*both, strict=True):
        # How the sums of a norm are cut follows from where gradients lie: the last digit differs.
        assert log == [pytest.approx(row, rel=1e-12) for row in wanted]
        require_same(weights, other)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_the_trainers_steps_and_checkpoints_are_those_under_fsdp2(
    kind: str, tmp_path: Path
) -> None:
    theirs = run_ranks(train, 2, tmp_path / "theirs", kind, False, timeout=240, fresh=True)[0]
    mine = run_ranks(train, 2, tmp_path / "ours", kind, True, timeout=240, fresh=True)[0]
    assert len(mine[0][0]) > 3
    for (log, weights), (wanted, other) in zip(mine, theirs, strict=True):
        assert log == wanted
        assert all(torch.equal(weights[name], value) for name, value in other.items())
    files = {
        path.relative_to(tmp_path / "theirs")
        for path in (tmp_path / "theirs").rglob("*")
        if path.suffix in (".safetensors", ".distcp")
    }
    assert files
    for path in files:
        one, other = tmp_path / "theirs" / path, tmp_path / "ours" / path
        assert one.read_bytes() == other.read_bytes(), path
