"""Ray Train with internsp: ``TorchTrainer`` starts, places and restarts the ranks.

    python examples/ray_train.py --workers 2

Ray makes torch's process group; the mesh takes its ranks. Each rank saves its own shards into a
folder that Ray joins in its storage; a run that Ray restarts loads them, on any number of workers.
Needs ``ray[train]``; downloads nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn
from torch.nn import functional as F

import internsp


class Model(nn.Module):
    """Predicts the next number."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, size), nn.Linear(size, 100)
        layers = (nn.TransformerEncoderLayer(size, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        """``[B, s]`` numbers to ``[B, s, 100]`` logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x, src_mask=mask.to(x), is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def rows(step: int) -> Tensor:
    """The step's 8 rows of 17 numbers, counting in steps: the same for any number of workers."""
    start, by = torch.randint(1, 10, (2, 8, 1), generator=torch.Generator().manual_seed(step))
    return (start + by * torch.arange(17)) % 100


def train(settings: dict[str, Any]) -> None:
    """What each of Ray's workers runs."""
    context = ray.train.get_context()
    mesh = internsp.ParallelMesh.create(
        weight=context.get_world_size(), device_type=settings["device"]
    )
    torch.manual_seed(0)  # the same first weights on every rank
    model = Model().to(settings["dtype"])
    config = internsp.WeightParallelConfig(min_shard_elements=512)
    communicator = internsp.parallelize(model, mesh, config)
    optimizer = internsp.ZeroOptimizer(communicator, torch.optim.AdamW, lr=5e-3, max_grad_norm=1.0)
    done = 0
    if (saved := ray.train.get_checkpoint()) is not None:  # Ray has restarted the workers
        with saved.as_directory() as folder:
            state = state_of(model, optimizer, done)
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state["model"])
            optimizer.load_local_state_dict(state["optimizer"])
            done = int(state["step"])
    for step in range(done, settings["steps"]):
        ids = rows(step).chunk(mesh.data)[mesh.data_rank].to(mesh.device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / mesh.data
        loss.backward()  # gradients are summed over ranks
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total := loss.detach().clone())
        with tempfile.TemporaryDirectory() as folder:
            dcp.save(state_of(model, optimizer, step + 1), checkpoint_id=folder)
            metrics = {"step": step + 1, "loss": total.item()}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def state_of(model: nn.Module, optimizer: internsp.ZeroOptimizer, step: int) -> dict[str, Any]:
    """What a checkpoint has; any number of ranks loads it."""
    return {
        "model": model.state_dict(), "optimizer": optimizer.local_state_dict(),
        "step": torch.tensor(step),
    }  # fmt: skip


def fit(
    workers: int, steps: int, storage: Path, *, gpus: bool = False,
    dtype: torch.dtype = torch.float32, failures: int = 3, loop: Any = train,
) -> dict[str, Any]:  # fmt: skip
    """Train on Ray's workers, and return the last metrics."""
    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps": steps, "device": "cuda" if gpus else "cpu", "dtype": dtype},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
        run_config=RunConfig(
            name="internsp", storage_path=str(storage),
            failure_config=FailureConfig(max_failures=failures),
        ),
    )  # fmt: skip
    return dict(trainer.fit().metrics)


def main() -> None:
    """Train forty steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="ranks, wherever Ray places them")
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"), help="shared folder")
    options = parser.parse_args()
    print(fit(options.workers, 40, options.storage.absolute(), gpus=options.gpus))


if __name__ == "__main__":
    main()
