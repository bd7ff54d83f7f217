"""DeepSpeed ZeRO-3: optional, skipped with a reason if it cannot be imported.

Two of its limits decide whether it gathers again in backward: with the defaults
(``stage3_max_live_parameters`` of 1e9) a small model stays unsharded. Here it may keep two blocks,
as internsp does. It trains bf16 weights with fp32 master weights, which the others do not have.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from torch import nn

from tools.bench.model import Blocks
from tools.overlap.options import Spec
from tools.overlap.variants import Mark, Setting, Variant, no_mark


def unavailable() -> str | None:
    """Why DeepSpeed cannot be used, or ``None``."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install internsp[deepspeed])"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed  # type: ignore[import-not-found, unused-ignore] # noqa: F401
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return f"deepspeed cannot be imported: {type(error).__name__}: {error}"
    return None


class Zero3(Variant):
    """``deepspeed.initialize`` with stage 3."""

    def __init__(self, setting: Setting, spec: Spec) -> None:
        self.engine: Any = None
        super().__init__(setting, spec)

    def prepare(self, model: Blocks) -> nn.Module:
        """Shard. DeepSpeed averages, so the loss is scaled up."""
        import deepspeed
        import torch

        self.scale *= self.setting.world
        block = sum(p.numel() for p in model.layers[0].parameters())
        config = {
            "train_micro_batch_size_per_gpu": self.setting.sizes.batch,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": block,
                "stage3_prefetch_bucket_size": block,
                "stage3_max_live_parameters": 2 * block,
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": 2048,
            },
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=self.setting.sizes.lr)
        self.engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        engine: nn.Module = self.engine
        return engine

    def optimizer_of(self, model: nn.Module) -> Any:
        """The engine contains the optimizer."""
        return None

    def step(self, mark: Mark = no_mark) -> float:
        """See :meth:`Variant.step`."""
        mark("forward")
        ((x, target),) = self.batches
        total = self.engine(x, target)
        mark("backward")
        self.engine.backward(total * self.scale)
        mark("optimizer")
        self.engine.step()
        x.grad = None
        mark("end")
        return float(total.detach()) / self.elements

    def unsharded_bytes(self) -> int:
        """Matrices that are unsharded or in flight, according to DeepSpeed."""
        parameters: list[Any] = list(self.blocks.parameters())
        return sum(
            p.ds_numel * p.element_size()
            for p in parameters
            if len(p.ds_shape) > 1 and p.ds_status.name != "NOT_AVAILABLE"
        )

    def close(self) -> None:
        """Remove DeepSpeed's hooks."""
        self.engine.destroy()
