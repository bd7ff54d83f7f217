"""QLoRA with sharded sequences: torchao's NF4 under adapters, in an unmodified model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import internsp
from tests.support.compare import check, close
from tests.support.ranks import ranks

pytestmark = pytest.mark.clients


class Adapted(nn.Module):
    """A frozen linear layer of NF4 codes, or of their values, with an adapter."""

    def __init__(self, layer: nn.Linear, coded: bool) -> None:
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

        codes: Any = nf4_tensor.to_nf4(layer.weight.detach(), 64, 4)
        self.linear = nf4_tensor.linear_nf4 if coded else nn.functional.linear
        self.weight = nn.Parameter(codes if coded else codes.get_original_weight(), False)
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight) + self.up(self.down(x))  # type: ignore[no-any-return]


def build(coded: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=41, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    for module in [*model.model.layers.modules()]:
        for name, layer in [*module.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(module, name, Adapted(layer, coded))
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@ranks(2, fresh=True)
def run(rank: int) -> None:
    mesh = internsp.ParallelMesh.create(weight=2, sequence=2, device_type="cpu")
    plain, mine = build(False), build(True)
    config = internsp.WeightParallelConfig(min_shard_elements=32)
    communicator = internsp.parallelize(mine, mesh, config)
    communicator.state.pool.poison = True
    zero = internsp.ZeroOptimizer(communicator, torch.optim.AdamW, lr=1e-2)
    adamw = torch.optim.AdamW(trained(plain).values(), lr=1e-2)
    for step in range(3):
        ids = torch.randint(3, 41, (2, 16), generator=torch.Generator().manual_seed(step))
        losses = [model(input_ids=ids, labels=ids).loss for model in (mine, plain)]
        close(losses[0].detach(), losses[1].detach(), f"loss {step}", 1e-5)
        for loss, optimizer in zip(losses, (zero, adamw), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    check(trained(mine), trained(plain), "parameters", 1e-4)


def test_nf4_under_adapters_trains_with_sharded_sequences_as_on_one_process() -> None:
    if missing := [name for name in ("torchao", "transformers") if not find_spec(name)]:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install 'internsp[clients]')")
    run()
