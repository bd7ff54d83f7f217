"""``internsp.Trainer`` with a model, a loss, data, an optimizer and a callback of one's own.

    python examples/trainer_parts.py
    torchrun --nproc-per-node 2 examples/trainer_parts.py

It trains four steps and writes ``runs/run``, as ``internsp train`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import internsp


class Log(internsp.Callback):
    """Ends the run; a callback is told on every rank."""

    def on_step(self, trainer: Any, metrics: Any) -> None:
        """Stop after the next step, with checkpoint and report."""
        if metrics.step == 3:
            trainer.stop()


def batches(mesh: internsp.ParallelMesh) -> Iterator[Tensor]:
    """Ids of each micro-batch of this rank's data rank; the same on its ranks."""
    generator = torch.Generator().manual_seed(mesh.data_rank)
    while True:
        yield torch.randint(0, 50, (8 // mesh.data, 33), generator=generator)


def loss(model: nn.Module, layout: internsp.SequenceLayout) -> Tensor:
    """A sum, never divided; labels are shifted and cut already."""
    logits = model(layout.input_ids)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), layout.labels.flatten(), ignore_index=-100, reduction="sum"
    )


def adam(communicator: internsp.WPCommunicator) -> internsp.ZeroOptimizer:
    """The optimizer of the shards."""
    return internsp.ZeroOptimizer(communicator, torch.optim.Adam, lr=1e-3, max_grad_norm=1.0)


torch.manual_seed(0)  # the same first values on every rank
model: Any = nn.Sequential(nn.Embedding(50, 32))
model.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)])
model.head = nn.Linear(32, 50)
config = {
    "train": {"steps": 100, "global_batch": 8},
    # Gathers begin at a block's entry.
    "weight_parallel": {"blocks": ["layers.*"], "gather_before": "qkv"},
}
with internsp.Trainer(
    config, model=model, loss=loss, data=batches, optimizer=adam, callbacks=[Log()]
) as trainer:
    trainer.train()
    print(trainer.step, trainer.optimizer.grad_norm, trainer.output)
