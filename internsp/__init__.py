"""internsp: Intern sequence parallelism for long-sequence transformers.

Public names only. Each is imported from its module when it is first used, so that
``import internsp`` (and ``internsp --help``) does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from internsp.base.version import __version__ as __version__

# The public names by the module that has each: the table that `import internsp` reads.
_TABLE = {
    "internsp.app.config": ("Config", "load_config"),
    "internsp.app.report.metrics": ("StepMetrics",),
    "internsp.app.train.trainer": ("Callback", "Trainer", "train"),
    "internsp.base.trace": ("Clock", "Trace"),
    "internsp.config": (
        "ActivationCheckpointConfig",
        "PlanRule",
        "SequenceConfig",
        "WeightParallelConfig",
    ),
    "internsp.layers": ("ParallelLinearWithCommExt", "MixtureOfExperts", "Router"),
    "internsp.layers.dropout": ("row_keys",),
    "internsp.layers.router": ("Routes", "balance_experts", "router_loss"),
    "internsp.mesh": ("ParallelMesh", "SequenceAxes", "WeightAxis"),
    "internsp.optim": ("LossScaler", "ZeroOptimizer", "clip_grad_norm_", "step_together"),
    "internsp.parallel.parallelize": ("initialize", "parallelize"),
    "internsp.parallel.sequences": ("supports",),
    "internsp.pipeline": (
        "ComputeAction",
        "ISPCommunicatorSchedulerHook",
        "MicroBatch",
        "Pipeline",
        "SchedulerHook",
        "SplittableModel",
    ),
    "internsp.schedule.chunk": ("Schedule",),
    "internsp.sp": ("DistributedAttention", "PendingExchange", "SequenceLayout", "token_loss"),
    "internsp.sp.mixing": ("Refused",),
    "internsp.values.load": ("load_weights",),
    "internsp.values.whole": ("full_params", "iterate_full_params"),
    "internsp.wp.communicator": (
        "EmbeddingWeightParallelCommunicator",
        "HeadWeightParallelCommunicator",
        "ISPCommunicator",
        "WPCommunicator",
    ),
    "internsp.wp.parameter": ("ShardedParameter",),
    "internsp.wp.slots": ("MemoryPool",),
}
_MODULES = ("errors", "model_zoo")  # public as modules
_HOMES = {name: home for home, names in _TABLE.items() for name in names}

# The same names for type checkers, which read no table; test_public_names.py compares the two.
if TYPE_CHECKING:
    from internsp import errors as errors
    from internsp import model_zoo as model_zoo
    from internsp.app.config import Config as Config
    from internsp.app.config import load_config as load_config
    from internsp.app.report.metrics import StepMetrics as StepMetrics
    from internsp.app.train.trainer import Callback as Callback
    from internsp.app.train.trainer import Trainer as Trainer
    from internsp.app.train.trainer import train as train
    from internsp.base.trace import Clock as Clock
    from internsp.base.trace import Trace as Trace
    from internsp.config import ActivationCheckpointConfig as ActivationCheckpointConfig
    from internsp.config import PlanRule as PlanRule
    from internsp.config import SequenceConfig as SequenceConfig
    from internsp.config import WeightParallelConfig as WeightParallelConfig
    from internsp.layers import MixtureOfExperts as MixtureOfExperts
    from internsp.layers import ParallelLinearWithCommExt as ParallelLinearWithCommExt
    from internsp.layers import Router as Router
    from internsp.layers.dropout import row_keys as row_keys
    from internsp.layers.router import Routes as Routes
    from internsp.layers.router import balance_experts as balance_experts
    from internsp.layers.router import router_loss as router_loss
    from internsp.mesh import ParallelMesh as ParallelMesh
    from internsp.mesh import SequenceAxes as SequenceAxes
    from internsp.mesh import WeightAxis as WeightAxis
    from internsp.optim import LossScaler as LossScaler
    from internsp.optim import ZeroOptimizer as ZeroOptimizer
    from internsp.optim import clip_grad_norm_ as clip_grad_norm_
    from internsp.optim import step_together as step_together
    from internsp.parallel.parallelize import initialize as initialize
    from internsp.parallel.parallelize import parallelize as parallelize
    from internsp.parallel.sequences import supports as supports
    from internsp.pipeline import ComputeAction as ComputeAction
    from internsp.pipeline import ISPCommunicatorSchedulerHook as ISPCommunicatorSchedulerHook
    from internsp.pipeline import MicroBatch as MicroBatch
    from internsp.pipeline import Pipeline as Pipeline
    from internsp.pipeline import SchedulerHook as SchedulerHook
    from internsp.pipeline import SplittableModel as SplittableModel
    from internsp.schedule.chunk import Schedule as Schedule
    from internsp.sp import DistributedAttention as DistributedAttention
    from internsp.sp import PendingExchange as PendingExchange
    from internsp.sp import SequenceLayout as SequenceLayout
    from internsp.sp import token_loss as token_loss
    from internsp.sp.mixing import Refused as Refused
    from internsp.values.load import load_weights as load_weights
    from internsp.values.whole import full_params as full_params
    from internsp.values.whole import iterate_full_params as iterate_full_params
    from internsp.wp.communicator import (
        EmbeddingWeightParallelCommunicator as EmbeddingWeightParallelCommunicator,
    )
    from internsp.wp.communicator import (
        HeadWeightParallelCommunicator as HeadWeightParallelCommunicator,
    )
    from internsp.wp.communicator import ISPCommunicator as ISPCommunicator
    from internsp.wp.communicator import WPCommunicator as WPCommunicator
    from internsp.wp.parameter import ShardedParameter as ShardedParameter
    from internsp.wp.slots import MemoryPool as MemoryPool
else:  # hidden from type checkers, to which any name would exist otherwise

    def __getattr__(name: str) -> Any:
        if name == "__all__":  # for `from internsp import *`
            return sorted([*_MODULES, *_HOMES])
        if name in _MODULES:
            value = importlib.import_module(f"{__name__}.{name}")
        elif name in _HOMES:
            try:
                value = getattr(importlib.import_module(_HOMES[name]), name)
            except ModuleNotFoundError as error:
                from internsp.base.extras import explained

                raise explained(error, f"internsp.{name}") from error
        else:
            raise AttributeError(f"module 'internsp' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
