"""Chunks of a model run by torch's pipeline schedules: stages, split backward, scheduler hooks."""

from internsp.pipeline.chunks import Chunk as Chunk
from internsp.pipeline.chunks import MicroBatch as MicroBatch
from internsp.pipeline.chunks import SplittableModel as SplittableModel
from internsp.pipeline.chunks import split_model as split_model
from internsp.pipeline.hooks import ComputeAction as ComputeAction
from internsp.pipeline.hooks import ISPCommunicatorSchedulerHook as ISPCommunicatorSchedulerHook
from internsp.pipeline.hooks import SchedulerHook as SchedulerHook
from internsp.pipeline.pipeline import Pipeline as Pipeline
from internsp.pipeline.schedules import schedule_kind as schedule_kind
from internsp.pipeline.stage import ISPPipelineStage as ISPPipelineStage
