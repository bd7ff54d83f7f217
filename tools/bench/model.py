"""The model of the benchmark: Llama blocks of the model zoo and nothing around them.

No embedding and no head, so that what travels is exactly what the byte laws are about. The input
is a leaf that wants a gradient, as the output of an embedding does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from internsp.config import ModelConfig
from internsp.layers.rotary import rotary_tables
from model_zoo.llama import Llama
from tools.bench.options import Options

DTYPE = torch.bfloat16


def model_config(options: Options) -> ModelConfig:
    """The zoo's configuration of the blocks."""
    return ModelConfig(
        family="llama",
        hidden_size=options.size("hidden"),
        layers=options.size("layers"),
        heads=options.size("heads"),
        kv_heads=options.kv_heads,
        intermediate_size=options.intermediate,
    )


class Blocks(nn.Module):
    """``layers`` Llama blocks; returns the summed squared distance of their output to a target."""

    def __init__(self, options: Options, device: str = "cpu") -> None:
        super().__init__()
        config = model_config(options)
        whole = Llama(config, device=device, dtype=DTYPE)
        self.layers = whole.layers
        self.head_dim, self.theta = whole.sizes.head_dim, config.rope_theta

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """``x`` bf16 ``[B, s, hidden]``, ``target`` fp32 like it -> fp32 scalar, a sum."""
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        rotary = rotary_tables(positions, self.head_dim, self.theta, x.dtype)
        for block in self.layers:
            x = block(x, rotary, None)
        return (x.float() - target).square().sum()


def initial_weights(options: Options) -> dict[str, Tensor]:
    """The weights that every variant starts from, the same on every rank."""
    zoo = Llama(model_config(options), device="meta", dtype=DTYPE)
    generator = torch.Generator().manual_seed(options.seed)
    weights: dict[str, Tensor] = {}
    for name, parameter in zoo.named_parameters():
        if name.startswith("layers."):
            weights[name] = torch.empty(parameter.shape, dtype=parameter.dtype)
            zoo.initialise(name, weights[name], generator)
    return weights


def fresh(options: Options, weights: dict[str, Tensor]) -> Blocks:
    """A model with a copy of the initial weights."""
    model = Blocks(options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def batch(options: Options, rank: int) -> tuple[Tensor, Tensor]:
    """One rank's input and target, the same in every step."""
    generator = torch.Generator().manual_seed(options.seed * 1000 + rank + 1)
    shape = (options.batch, options.size("sequence"), options.size("hidden"))
    x = torch.randn(shape, generator=generator).to(DTYPE)
    return x.requires_grad_(True), torch.randn(shape, generator=generator)


def elements(options: Options) -> int:
    """By which the summed loss of all ranks is divided."""
    tokens = options.batch * options.size("sequence")
    return options.size("ranks") * tokens * options.size("hidden")


def large(options: Options, weights: dict[str, Tensor]) -> dict[str, int]:
    """Elements of every weight that is cut: matrices, not norms."""
    return {name: w.numel() for name, w in weights.items() if w.ndim > 1}
