"""transformers' Trainer under accelerate's FSDP2 plugin: optimizer state over the replicas, too.

For your script, whose first lines call ``internsp.fsdp.install()``: ``StateOverAllRanks(...)``
instead of ``Trainer(...)``, with ``parallelism_config=ParallelismConfig(dp_replicate_size=2,
dp_shard_size=4)`` in its arguments. Steps, clipping and checkpoints are the Trainer's.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

import internsp.fsdp


class _Replace(TrainerCallback):
    """Before the first step, or a resumed one: accelerate has prepared the optimizer by then."""

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        optimizer.optimizer = internsp.fsdp.zero_optimizer(
            model, optimizer.optimizer, max_grad_norm=args.max_grad_norm or None
        )


class StateOverAllRanks(Trainer):
    """The Trainer, whose optimizer's step clips: before it no rank has a whole gradient."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_callback(_Replace())

    def _clip_grad_norm(self, model: Any) -> None:
        return None

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        return None
