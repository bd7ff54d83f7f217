"""torchtitan with internsp: its Trainer, its Llama, and a ``ModelSpec`` that shards the weights.

    torchrun --nproc-per-node 4 examples/torchtitan_train.py

The only difference is ``parallelize``, where torchtitan calls ``fully_shard``: the degrees are
those of its configuration, and no rank holds the full model. Model, loss, clipping, optimizer and
loop are torchtitan's; as there, gradients are sums over ranks of a loss divided by all valid
tokens. Needs torchtitan 0.3, triton and an accelerator (on a CPU: tests/clients); downloads
nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

import internsp


def parallelize(
    model: Any, *, parallel_dims: ParallelDims, training: TrainingConfig, **_: Any
) -> nn.Module:
    """``ModelSpec.parallelize_fn``: gets the model on the meta device and returns it sharded."""
    if parallel_dims.world_size != parallel_dims.dp_replicate * parallel_dims.dp_shard:
        raise ValueError("this example has data parallel degrees only: leave tp, cp and pp at 1")
    mesh = internsp.ParallelMesh.create(parallel_dims.dp_shard, device_type=utils.device_type)
    for module in model.modules():  # the rotary tables, which are not in checkpoints
        if hasattr(module, "_init_self_buffers"):
            module._init_self_buffers(buffer_device=mesh.device)
    config = internsp.WeightParallelConfig(
        blocks=("layers.*",), compute_dtype=training.mixed_precision_param
    )
    communicator = internsp.parallelize(model, mesh, config)
    internsp.initialize(communicator, first_values(model), seed=0)
    # The Trainer would allocate and initialize the model again.
    model.to_empty = lambda **_: model
    model.init_weights = lambda **_: None
    return model  # type: ignore[no-any-return]


def first_values(model: nn.Module) -> Any:
    """torchtitan's own initialization, for one full parameter at a time."""

    def fill(name: str, whole: Tensor, generator: torch.Generator) -> None:
        path, _, last = name.rpartition(".")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            model.get_submodule(path)._param_init[last](whole)  # type: ignore[index, union-attr, operator]

    return fill


class NoTokenizer(BaseTokenizer):
    """Bytes need no tokenizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No options."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = NotImplemented


class Rows(BaseDataLoader):
    """Bytes of a text; the global batch is the same for any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """``dataset_path``: the text file."""

    def __init__(self, config: Config, **sizes: Any) -> None:
        self.ids = list(Path(str(config.dataset_path)).read_bytes())
        self.length, self.rows, self.taken = sizes["seq_len"], sizes["local_batch_size"], 0
        self.rank, self.ranks = sizes["dp_rank"], sizes["dp_world_size"]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = (self.taken * self.ranks + self.rank) * self.rows
            starts = [37 * i % (len(self.ids) - 100) for i in range(first, first + self.rows)]
            rows = torch.tensor([self.ids[i : i + self.length + 1] for i in starts])
            self.taken += 1
            yield {"input": rows[:, :-1]}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """The number of batches so far."""
        return {"taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after these batches."""
        self.taken = state_dict["taken"]


def configuration(text: str, output: str, batch: int = 8, **changes: Any) -> Trainer.Config:
    """torchtitan's debug model on bytes; ``batch`` rows per rank."""
    spec: ModelSpec = dataclasses.replace(model_registry("debugmodel"), parallelize_fn=parallelize)
    for layer in spec.model.layers:  # rows with one document need no mask
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(dataset_path=text),
        optimizer=default_adamw(lr=1e-3, eps=1e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=batch, seq_len=64, disable_cuda_graphs=True,
            **{"steps": 20, "max_norm": 0.5, **changes},
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False),
        dump_folder=output,
    )  # fmt: skip


def main() -> None:
    """Train twenty steps; torchtitan logs the losses."""
    trainer = Trainer(configuration(argparse.__file__, "runs/torchtitan"))
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
