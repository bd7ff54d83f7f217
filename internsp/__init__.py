"""internsp: Intern sequence parallelism for long-sequence transformers.

Public names only. Each is imported from its module when it is first used, so that
``import internsp`` (and ``internsp --help``) does not load torch.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from internsp.base.version import __version__ as __version__

# The table of public names, the only one: type checkers read it as imports (``X as X`` says that a
# name is public), `_homes` as a table.
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
    from internsp.config import WeightParallelConfig as WeightParallelConfig
    from internsp.layers import ParallelLinearWithCommExt as ParallelLinearWithCommExt
    from internsp.layers.dropout import row_keys as row_keys
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
        is_module = home == __name__
        value = importlib.import_module(f"{__name__}.{name}" if is_module else home)
        globals()[name] = value if is_module else getattr(value, name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *_homes()})
