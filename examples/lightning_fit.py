"""Lightning with internsp: its ``ModelParallelStrategy`` with a model whose weights are sharded.

    python examples/lightning_fit.py                                        # one process
    torchrun --nproc-per-node 2 examples/lightning_fit.py --weight 2        # sharded
    torchrun --nproc-per-node 2 examples/lightning_fit.py --weight 2 --resume runs/lightning/...

Both print the same losses, because a step has the same sequences with any number of processes. The
only differences are in ``configure_model`` and in ``training_step``'s divisor: gradients are summed
over ranks (design.md 6). Clipping, checkpoints and resuming are Lightning's; a torch optimizer's
state consists of DTensors, as the parameters do. Needs lightning; downloads nothing.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import internsp

LENGTH, BATCH, WIDTH = 32, 8, 32  # tokens; sequences per step over all processes; features


class Sharded(ModelParallelStrategy):
    """Each rank has different sequences, for any size of the weight group."""

    def __init__(self, world: int) -> None:
        super().__init__(data_parallel_size=world, tensor_parallel_size=1)

    def model_to_device(self) -> None:
        """Do nothing: ``parallelize`` has already moved every weight to its device."""


class Block(nn.Module):
    """Causal attention and a feed forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, s, WIDTH]`` to the same shape."""
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out_proj(mixed)
        grown: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + grown


class Language(lightning.LightningModule):
    """A byte-level model; if ``weight`` is above 0, weights are sharded over that many ranks."""

    def __init__(self, weight: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same first weights on every rank
        self.weight, self.losses = weight, list[float]()
        self.communicator: Any = None
        self.model = nn.Sequential(nn.Embedding(256, WIDTH))
        self.model.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.model.head = nn.Linear(WIDTH, 256)
        self.model.to(dtype)

    def configure_model(self) -> None:
        """Called by Lightning after the processes have started, before the optimizer is made."""
        if self.weight and self.communicator is None:  # also called before a validation
            mesh = internsp.ParallelMesh.create(weight=self.weight, device_type=self.device.type)
            config = internsp.WeightParallelConfig(min_shard_elements=512)
            self.communicator = internsp.parallelize(self.model, mesh, config)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        """The mean over the tokens of all ranks, written as a sum over ranks."""
        logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss / self.trainer.world_size

    def on_train_batch_end(self, *_: Any) -> None:
        """Record the logged losses, averaged over ranks."""
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any torch optimizer: ``.grad`` is complete after backward."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4)


def sequences(path: Path, number: int) -> list[Tensor]:
    """Bytes of a text."""
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    return [text[7 * i : 7 * i + LENGTH + 1] for i in range(number)]


def fit(
    module: Language, world: int, steps: int, text: Path, output: str, resume: str | None = None
) -> str:
    """Train, and return the newest checkpoint."""
    saving = ModelCheckpoint(output, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = lightning.Trainer(
        strategy=Sharded(world) if module.weight else "auto", accelerator="auto",
        devices=world if module.weight else 1, max_steps=steps, gradient_clip_val=0.5,
        callbacks=[saving], logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,  # Lightning's sampler would shuffle
    )  # fmt: skip
    found, rank = sequences(text, 16 * BATCH), int(os.environ.get("RANK", "0"))
    sampler = DistributedSampler(found, num_replicas=world, rank=rank, shuffle=False)
    trainer.fit(module, DataLoader(found, BATCH // world, sampler=sampler), ckpt_path=resume)
    return saving.best_model_path


def main() -> None:
    """Train twenty steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weight", type=int, default=0, help="ranks that share each weight")
    parser.add_argument("--resume", help="a checkpoint")
    options = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    module = Language(options.weight)
    fit(module, world, 20, Path(argparse.__file__), "runs/lightning", options.resume)
    if module.global_rank == 0:
        print("losses", " ".join(f"{loss:.4f}" for loss in module.losses))


if __name__ == "__main__":
    main()
