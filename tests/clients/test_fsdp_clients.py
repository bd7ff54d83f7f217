"""Programs of others under internsp.fsdp.install(), unchanged: the values of FSDP2.

They are written for accelerators. On processors a stand-in says that there is one, for torch's
``fully_shard`` and for ours alike.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import internsp.fsdp
from tests.support.fsdp import whole
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.ranks, pytest.mark.clients, pytest.mark.unmeasured, pytest.mark.thorough(60)
]  # fmt: skip
TEXT = Path(__file__).parents[1] / "data/text/01_why_cut_sequences.txt"
Found = tuple[dict[str, Tensor], Any]
"""Values by name, and a parameter of the model that was trained."""


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return whole(dict(model.named_parameters()))


def lightning(rank: int, world: int, folder: Path) -> Found:
    """Four steps under ModelParallelStrategy, and the last two again from its checkpoint."""
    from examples.lightning_fit import Language, fit

    class Sharded(Language):
        def configure_model(self) -> None:
            if not isinstance(self.model, torchs.FSDPModule):
                mesh = self.device_mesh["data_parallel"]
                for part in (*self.model.blocks, self.model):
                    torchs.fully_shard(part, mesh=mesh)

    found: dict[str, Tensor] = {}
    for resume in (None, str(folder / "step=2.ckpt")):
        module = Sharded(world)
        fit(module, world, 4, TEXT, str(folder / ("again" if resume else "")), resume)
        when = "again" if resume else "first"
        found[f"losses {when}"] = torch.tensor(module.losses)
        found |= {f"{when} {name}": value for name, value in parameters(module.model).items()}
    return found, module.model.head.weight


def trl(rank: int, world: int, folder: Path) -> Found:
    """SFTTrainer under accelerate's FSDP2 plugin, in bf16 on fp32 weights."""
    from tests.support.accelerated import PLUGIN, on_processors

    os.environ |= {**PLUGIN, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    on_processors()
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = [*dict.fromkeys(TEXT.read_text().split())]
    names = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    made = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(names), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        )
    )  # fmt: skip
    rows = [{"text": " ".join(words[4 * i : 4 * i + 12])} for i in range(64)]
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(folder), per_device_train_batch_size=2, max_steps=3, save_steps=3,
            gradient_accumulation_steps=2, logging_steps=1, learning_rate=1e-2, report_to=[],
            use_cpu=True, seed=1, max_grad_norm=0.5, disable_tqdm=True, bf16=True, max_length=16,
        ),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(log) == 3
    found = {"log": torch.tensor([[entry["loss"], entry["grad_norm"]] for entry in log])}
    trained: Any = trainer.model
    return found | parameters(trained), trained.lm_head.weight


def torchtitan(
    rank: int, world: int, folder: Path, family: str = "llama3", **degrees: Any
) -> Found:
    """Three steps of a debug model, sharded by torchtitan's own function."""
    from torchtitan.tools import utils

    from tests.clients.test_torchtitan import Host

    if not torch.accelerator.is_available():
        utils.device_type, utils.device_module = "cpu", Host  # before the others take them
    from examples import torchtitan_train as example

    config = example.configuration(str(TEXT), str(folder), 4, mixed_precision_param="float32")
    models: Any = import_module(f"torchtitan.models.{family}")
    config.model_spec = models.model_registry("debugmodel")
    for layer in config.model_spec.model.layers:  # as the example's: rows with one document
        layer.attention.inner_attention = example.ScaledDotProductAttention.Config()
    config.parallelism = replace(config.parallelism, **degrees)
    trainer = example.Trainer(config)
    model: Any = trainer.model_parts[0]
    for part in model.modules():  # gloo has no reduction that divides, which FSDP2 takes there
        if isinstance(part, torchs.FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    log: list[list[float]] = []
    trainer.metrics_processor.log = lambda step, mean, most, norm, **_: log.append([mean, norm])
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, 4):
        trainer.train_step(batches)
    trainer.close()
    assert len(log) == 3
    return {"log": torch.tensor(log)} | parameters(model), next(model.parameters())


def loop(rank: int, world: int, folder: Path) -> Found:
    """A preference loop of open-instruct's shape: a reference model without gradients, two
    forwards a loss, accumulation by set_requires_gradient_sync, clipping, a schedule, a full state
    dict at the end."""
    from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        )
    ).double()  # fmt: skip
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    mesh = init_device_mesh("cpu", (world,))
    for each in (model, reference):
        for part in (*each.model.layers, each):
            torchs.fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = get_scheduler("linear", optimizer, 1, 3)
    draw, found = torch.Generator().manual_seed(rank), {}

    def likelihood(of: Any, ids: Tensor) -> Tensor:
        logits = of(input_ids=ids).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))

    for step in range(3):
        for micro in range(2):
            chosen, other = torch.randint(0, 64, (2, 2, 9), generator=draw)
            with torch.no_grad():
                base = likelihood(reference, chosen) - likelihood(reference, other)
            sharded: Any = model
            sharded.set_requires_gradient_sync(micro == 1)
            gain = likelihood(model, chosen) - likelihood(model, other) - base
            loss = -F.logsigmoid(0.1 * gain).mean() / 2
            loss.backward()
            found[f"loss {step} {micro}"] = loss.detach()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found[f"norm {step}"] = norm.full_tensor()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved: Any = get_model_state_dict(model, options=options)
    return found | saved, model.lm_head.weight


def torchao(rank: int, world: int, folder: Path, kind: str) -> Found:
    """Three steps of layers whose weights gather themselves: float8, or NF4 under LoRA."""
    from torchao import float8

    from tests.support.fsdp import Model

    torch.manual_seed(0)
    model: Any = Model(64, blocks=2)
    if kind == "float8":
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        for block in model.blocks:
            float8.convert_to_float8_training(block, config=config)
    else:
        for block in model.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)
    for part in (*model.blocks, model):
        torchs.fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    found: dict[str, Tensor] = {}
    for step in range(3):
        draw = torch.Generator().manual_seed(world * step + rank)
        loss = model(torch.randint(0, 19, (2, 16), generator=draw)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        found[f"loss {step}"] = loss.detach()
        gradients = [*enumerate(parameter.grad for parameter in trained)]
        found |= whole({f"gradient {step} {n}": gradient for n, gradient in gradients})
        optimizer.step()
        optimizer.zero_grad()
        if kind == "float8":
            float8.precompute_float8_dynamic_scale_for_fsdp(model)
    return found, model.blocks[0].up.weight


class Adapted(nn.Module):
    """A frozen linear layer of 4-bit codes with an adapter."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

        self.linear, codes = nf4_tensor.linear_nf4, nf4_tensor.to_nf4(layer.weight.detach(), 64, 4)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight) + self.up(self.down(x))  # type: ignore[no-any-return]


class Client(NamedTuple):
    run: Callable[[int, int, Path], Found]
    needs: tuple[str, ...]
    gap: float = 0.0  # by which values may differ, of the largest
    world: int = 2


TITAN = ("torchtitan", "triton", "spmd_types", "tensorboard")
EXPERTS = partial(torchtitan, family="deepseek_v3", expert_parallel_degree=2)
MIXED = partial(EXPERTS, expert_parallel_degree=4, tensor_parallel_degree=2)
FULL = partial(torchtitan, spmd_backend="full_dtensor", tensor_parallel_degree=2)
CLIENTS = {
    "Lightning": Client(lightning, ("lightning",)),
    "TRL": Client(trl, ("accelerate", "datasets", "transformers", "trl")),
    "torchtitan": Client(torchtitan, TITAN),
    "torchtitan experts": Client(EXPERTS, TITAN, 1e-3, 4),  # its experts compute in bf16
    "torchtitan tensor ranks": Client(MIXED, TITAN, world=4),
    "torchtitan, all DTensor": Client(FULL, TITAN, world=4),
    "torchao float8": Client(partial(torchao, kind="float8"), ("torchao",), 1e-6),
    "torchao NF4": Client(partial(torchao, kind="nf4"), ("torchao",), 1e-6),
    "loop": Client(loop, ("transformers",), 1e-12),
}


def train(rank: int, world: int, folder: Path, name: str, ours: bool) -> dict[str, Tensor]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1"}
    if ours:
        internsp.fsdp.install()
    found, parameter = CLIENTS[name].run(rank, world, folder)
    assert type(parameter).__name__ == ("ShardParameter" if ours else "DTensor")
    return found


@pytest.mark.parametrize("name", CLIENTS)
def test_a_program_computes_what_it_does_with_fsdp2(name: str, tmp_path: Path) -> None:
    if missing := [package for package in CLIENTS[name].needs if not find_spec(package)]:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install 'internsp[clients]')")
    world = CLIENTS[name].world
    theirs = run_ranks(train, world, tmp_path / "theirs", name, False, timeout=240, fresh=True)[0]
    mine = run_ranks(train, world, tmp_path / "ours", name, True, timeout=240, fresh=True)[0]
    assert list(mine) == list(theirs)
    for key, value in theirs.items():
        gap = ((mine[key].double() - value.double()).abs().max() / value.abs().max()).item()
        assert gap <= CLIENTS[name].gap, f"{key} differs by {gap:g} of its largest element"
