"""The model of the benchmarks: only the Llama blocks of the model zoo.

Without embedding and head, so that the traffic is exactly that of the byte formulas. The input is
a leaf that requires a gradient, like the output of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.config.model import ModelConfig
from internsp.layers.rotary import rotary_tables
from internsp.model_zoo.llama import Llama
from internsp.sp import SequenceLayout
from tools.bench.options import Sizes

DTYPE = torch.bfloat16


def model_config(sizes: Sizes) -> ModelConfig:
    """The model zoo's configuration of the blocks."""
    return ModelConfig(
        family="llama",
        hidden_size=sizes.hidden,
        layers=sizes.layers,
        heads=sizes.heads,
        intermediate_size=sizes.intermediate,
    )


class Blocks(nn.Module):
    """``layers`` Llama blocks; returns the summed squared distance of their output to a target."""

    def __init__(self, sizes: Sizes, device: str | torch.device = "cpu") -> None:
        super().__init__()
        config = model_config(sizes)
        zoo = Llama(config, device=device, dtype=DTYPE)
        self.layers = zoo.layers
        self.head_dim, self.theta = zoo.sizes.head_dim, config.rope_theta
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


def initial_weights(sizes: Sizes) -> dict[str, Tensor]:
    """The weights that every variant starts from, the same on every rank."""
    zoo = Llama(model_config(sizes), device="meta", dtype=DTYPE)
    generator = torch.Generator().manual_seed(sizes.seed)
    weights: dict[str, Tensor] = {}
    for name, parameter in zoo.named_parameters():
        if name.startswith("layers."):
            weights[name] = torch.empty(parameter.shape, dtype=parameter.dtype)
            zoo.initialize(name, weights[name], generator)
    return weights


def fresh(
    sizes: Sizes, weights: Mapping[str, Tensor], device: str | torch.device = "cpu"
) -> Blocks:
    """A model with a copy of the initial weights."""
    model = Blocks(sizes, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def full_batch(sizes: Sizes, data: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """Input and target of the ``data``-th group of sequences, not sharded, the same in every step.

    Args:
        micro: index of the micro-batch in the step; each has different data.
    """
    seed = sizes.seed * 1000 + micro * sizes.ranks + data + 1
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.batch, sizes.sequence, sizes.hidden)
    x = torch.randn(shape, generator=generator).to(DTYPE)
    return x.requires_grad_(True), torch.randn(shape, generator=generator)


def batch(sizes: Sizes, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """One rank's part of its sequences: neighboring ranks share sequences if these are sharded."""
    data, part = divmod(rank, sizes.sequence_ranks)
    full = full_batch(sizes, data, micro)
    x, target = (w.detach().chunk(sizes.sequence_ranks, 1)[part].contiguous() for w in full)
    return x.requires_grad_(True), target


def layout(sizes: Sizes, rank: int) -> SequenceLayout | None:
    """The rank's range of positions; ``None`` if sequences are not sharded."""
    if sizes.sequence_ranks == 1:
        return None
    ids = torch.zeros(sizes.batch, sizes.sequence, dtype=torch.int64)
    shards = sizes.sequence_ranks
    return SequenceLayout.create(ids, rank=rank % shards, size=shards)


def exchanged_bytes(sizes: Sizes) -> float:
    """Bytes a rank sends for attention in a step: q, k, v, the output, and their gradients."""
    shards = sizes.sequence_ranks
    tokens = sizes.micro_batches * sizes.batch * sizes.sequence / shards
    features = sizes.hidden * 4 * 2
    return sizes.layers * tokens * features * DTYPE.itemsize * (shards - 1) / shards


def elements(sizes: Sizes) -> int:
    """The divisor of the summed loss of all ranks and micro-batches."""
    tokens = sizes.micro_batches * sizes.batch * sizes.sequence
    groups = sizes.ranks // sizes.sequence_ranks
    return groups * tokens * sizes.hidden


def repeated(weight: Tensor, ranks: int) -> Tensor:
    """Like ``weight``, but ``ranks`` copies of its first rows: all shards are equal."""
    return weight[: len(weight) // ranks].repeat(ranks, *[1] * (weight.ndim - 1))


@contextmanager
def process_group(backend: str, ranks: int = 1) -> Iterator[None]:
    """A process group with this process only. ``"fake"`` pretends to have ``ranks`` and sends
    nothing: its all-gathers return copies of this rank's own shard, at once."""
    store: Any = dist.HashStore()
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore()
    dist.init_process_group(
        backend, store=store, rank=0, world_size=ranks, timeout=timedelta(seconds=300)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
