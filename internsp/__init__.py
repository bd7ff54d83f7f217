"""internsp: Intern sequence parallelism for long-sequence transformers.

Public names only; each is imported from its module when it is first used, so that
``import internsp`` (and ``internsp --help``) does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from internsp.config import ActivationCheckpointConfig, Config, WeightParallelConfig
    from internsp.config import load_config as load_config
    from internsp.layers import ParallelLinearWithCommExt
    from internsp.mesh import ParallelMesh
    from internsp.optim import LossScaler, ZeroOptimizer, clip_grad_norm_
    from internsp.parallel import initialize, parallelize
    from internsp.pipeline import ISPCommunicatorSchedulerHook, Pipeline, SchedulerHook
    from internsp.sp import DistributedAttention, SequenceLayout, token_loss
    from internsp.trace import Trace
    from internsp.wp.communicator import (
        EmbeddingWeightParallelCommunicator,
        HeadWeightParallelCommunicator,
        ISPCommunicator,
        WPCommunicator,
    )
    from internsp.wp.slots import MemoryPool

_HOMES = {
    "ActivationCheckpointConfig": "config",
    "Config": "config",
    "DistributedAttention": "sp",
    "EmbeddingWeightParallelCommunicator": "wp.communicator",
    "HeadWeightParallelCommunicator": "wp.communicator",
    "ISPCommunicator": "wp.communicator",
    "ISPCommunicatorSchedulerHook": "pipeline",
    "LossScaler": "optim",
    "MemoryPool": "wp.slots",
    "ParallelLinearWithCommExt": "layers",
    "ParallelMesh": "mesh",
    "Pipeline": "pipeline",
    "SchedulerHook": "pipeline",
    "SequenceLayout": "sp",
    "Trace": "trace",
    "WPCommunicator": "wp.communicator",
    "WeightParallelConfig": "config",
    "ZeroOptimizer": "optim",
    "clip_grad_norm_": "optim",
    "initialize": "parallel",
    "load_config": "config",
    "parallelize": "parallel",
    "token_loss": "sp",
}

__all__ = [
    "ActivationCheckpointConfig",
    "Config",
    "DistributedAttention",
    "EmbeddingWeightParallelCommunicator",
    "HeadWeightParallelCommunicator",
    "ISPCommunicator",
    "ISPCommunicatorSchedulerHook",
    "LossScaler",
    "MemoryPool",
    "ParallelLinearWithCommExt",
    "ParallelMesh",
    "Pipeline",
    "SchedulerHook",
    "SequenceLayout",
    "Trace",
    "WPCommunicator",
    "WeightParallelConfig",
    "ZeroOptimizer",
    "clip_grad_norm_",
    "initialize",
    "load_config",
    "parallelize",
    "token_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'internsp' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"internsp.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
