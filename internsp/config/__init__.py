"""The configuration of a run: its sections, reading them from a file, what cannot go together."""

from internsp.config.load import Config, collect, documented, load_config, report, schemas, sections
from internsp.config.sections import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    DataConfig,
    DocumentsConfig,
    LaunchConfig,
    MixturePart,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    PlanRule,
    Section,
    TrainConfig,
    WeightParallelConfig,
)

__all__ = [
    "ActivationCheckpointConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DocumentsConfig",
    "LaunchConfig",
    "MixturePart",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PipelineConfig",
    "PlanRule",
    "Section",
    "TrainConfig",
    "WeightParallelConfig",
    "collect",
    "documented",
    "load_config",
    "report",
    "schemas",
    "sections",
]
