"""What a user sets for a model: sections that are typed, frozen and checked when made."""

from internsp.config.sections import (
    ActivationCheckpointConfig,
    PlanRule,
    Section,
    SequenceConfig,
    WeightParallelConfig,
)

__all__ = [
    "ActivationCheckpointConfig",
    "PlanRule",
    "Section",
    "SequenceConfig",
    "WeightParallelConfig",
]
