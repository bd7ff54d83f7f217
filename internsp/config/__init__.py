"""What a user sets for a model: sections that are typed, frozen and checked when made."""

from internsp.config.sections import ActivationCheckpointConfig as ActivationCheckpointConfig
from internsp.config.sections import PlanRule as PlanRule
from internsp.config.sections import Section as Section
from internsp.config.sections import SequenceConfig as SequenceConfig
from internsp.config.sections import WeightParallelConfig as WeightParallelConfig
