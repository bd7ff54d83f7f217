"""The model of the benchmark: Llama blocks of the model zoo and nothing around them.

No embedding and no head, so that what travels is exactly what the byte laws are about. The input
is a leaf that wants a gradient, as the output of an embedding does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from internsp.config import ModelConfig
from internsp.layers.rotary import rotary_tables
from internsp.sp import SequenceLayout
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
        self.layout: SequenceLayout | None = None

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """``x`` bf16 ``[B, s, hidden]``, ``target`` fp32 like it -> fp32 scalar, a sum."""
        if self.layout is None:
            positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        else:
            positions = self.layout.positions
        rotary = rotary_tables(positions, self.head_dim, self.theta, x.dtype)
        for block in self.layers:
            x = block(x, rotary, self.layout)
        return (x.float() - target).square().sum()


def initial_weights(options: Options) -> dict[str, Tensor]:
    """The weights that every variant starts from, the same on every rank."""
    zoo = Llama(model_config(options), device="meta", dtype=DTYPE)
    generator = torch.Generator().manual_seed(options.seed)
    weights: dict[str, Tensor] = {}
    for name, parameter in zoo.named_parameters():
        if name.startswith("layers."):
            weights[name] = torch.empty(parameter.shape, dtype=parameter.dtype)
            zoo.initialize(name, weights[name], generator)
    return weights


def fresh(options: Options, weights: dict[str, Tensor], device: str = "cpu") -> Blocks:
    """A model with a copy of the initial weights."""
    model = Blocks(options, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def whole_batch(options: Options, data: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """Input and target of the ``data``-th sequences, not cut, the same in every step.

    Args:
        micro: which micro-batch of the step; each has data of its own.
    """
    seed = options.seed * 1000 + micro * options.size("ranks") + data + 1
    generator = torch.Generator().manual_seed(seed)
    shape = (options.batch, options.size("sequence"), options.size("hidden"))
    x = torch.randn(shape, generator=generator).to(DTYPE)
    return x.requires_grad_(True), torch.randn(shape, generator=generator)


def batch(options: Options, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """One rank's part of its sequences: neighboring ranks share them where they are cut."""
    data, part = divmod(rank, options.sequence_ranks)
    whole = whole_batch(options, data, micro)
    x, target = (w.detach().chunk(options.sequence_ranks, 1)[part].contiguous() for w in whole)
    return x.requires_grad_(True), target


def layout(options: Options, rank: int) -> SequenceLayout | None:
    """Where the rank's part lies; ``None`` where sequences are whole."""
    if options.sequence_ranks == 1:
        return None
    ids = torch.zeros(options.batch, options.size("sequence"), dtype=torch.int64)
    cut = options.sequence_ranks
    return SequenceLayout.create(ids, rank=rank % cut, size=cut)


def exchanged_bytes(options: Options) -> float:
    """Bytes a rank sends for attention in a step: q, k, v, the result, and their gradients."""
    cut = options.sequence_ranks
    tokens = options.micro_batches * options.batch * options.size("sequence") / cut
    share = (options.kv_heads or options.size("heads")) / options.size("heads")
    features = options.size("hidden") * (2 + 2 * share) * 2
    return options.size("layers") * tokens * features * DTYPE.itemsize * (cut - 1) / cut


def elements(options: Options) -> int:
    """By which the summed loss of all ranks and micro-batches is divided."""
    tokens = options.micro_batches * options.batch * options.size("sequence")
    groups = options.size("ranks") // options.sequence_ranks
    return groups * tokens * options.size("hidden")


def large(options: Options, weights: dict[str, Tensor]) -> dict[str, int]:
    """Elements of every weight that is cut: matrices, not norms."""
    return {name: w.numel() for name, w in weights.items() if w.ndim > 1}
