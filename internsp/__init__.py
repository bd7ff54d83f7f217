"""internsp: Intern sequence parallelism for long-sequence transformers.

Public names only. Each is imported from its module when it is first used, so that
``import internsp`` (and ``internsp --help``) does not load torch.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The table of public names, the only one: type checkers read it as imports (``X as X`` says that a
# name is public), `_homes` as a table.
if TYPE_CHECKING:
    from internsp import errors as errors
    from internsp import model_zoo as model_zoo
    from internsp.config import ActivationCheckpointConfig as ActivationCheckpointConfig
    from internsp.config import Config as Config
    from internsp.config import PlanRule as PlanRule
    from internsp.config import WeightParallelConfig as WeightParallelConfig
    from internsp.config import load_config as load_config
    from internsp.layers import ParallelLinearWithCommExt as ParallelLinearWithCommExt
    from internsp.layers.dropout import row_keys as row_keys
    from internsp.load import load_weights as load_weights
    from internsp.mesh import ParallelMesh as ParallelMesh
    from internsp.mesh import SequenceAxes as SequenceAxes
    from internsp.mesh import WeightAxis as WeightAxis
    from internsp.optim import LossScaler as LossScaler
    from internsp.optim import ZeroOptimizer as ZeroOptimizer
    from internsp.optim import clip_grad_norm_ as clip_grad_norm_
    from internsp.optim import step_together as step_together
    from internsp.parallel import initialize as initialize
    from internsp.parallel import parallelize as parallelize
    from internsp.pipeline import ComputeAction as ComputeAction
    from internsp.pipeline import ISPCommunicatorSchedulerHook as ISPCommunicatorSchedulerHook
    from internsp.pipeline import MicroBatch as MicroBatch
    from internsp.pipeline import Pipeline as Pipeline
    from internsp.pipeline import SchedulerHook as SchedulerHook
    from internsp.pipeline import SplittableModel as SplittableModel
    from internsp.plan.chunk import Schedule as Schedule
    from internsp.report.metrics import StepMetrics as StepMetrics
    from internsp.sequence_parts import supports as supports
    from internsp.sp import DistributedAttention as DistributedAttention
    from internsp.sp import PendingExchange as PendingExchange
    from internsp.sp import SequenceLayout as SequenceLayout
    from internsp.sp import token_loss as token_loss
    from internsp.sp.mixing import Refused as Refused
    from internsp.trace import Clock as Clock
    from internsp.trace import Trace as Trace
    from internsp.train.trainer import Callback as Callback
    from internsp.train.trainer import Trainer as Trainer
    from internsp.train.trainer import train as train
    from internsp.whole import full_params as full_params
    from internsp.whole import iterate_full_params as iterate_full_params
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

    @cache
    def _homes() -> dict[str, str]:
        """Public names, each with the module that it is imported from."""
        import ast  # takes longer than the rest of this file

        source = globals()["__loader__"].get_source(__name__)
        table = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
        imports = [node for node in table.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name == "__all__":  # for `from internsp import *`
            return sorted(_homes())
        if name.startswith("__") or name not in _homes():
            raise AttributeError(f"module 'internsp' has no attribute {name!r}")
        home = _homes()[name]
        # `train` is the package too, which can be called: an attribute of two kinds would depend
        # on what was imported before.
        is_module = home == __name__ or home.startswith(f"{__name__}.{name}.")
        value = importlib.import_module(f"{__name__}.{name}" if is_module else home)
        globals()[name] = value if is_module else getattr(value, name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *_homes()})
