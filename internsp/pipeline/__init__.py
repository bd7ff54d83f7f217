"""Chunks of a model run by torch's pipeline schedules: stages, split backward, scheduler hooks."""

from internsp.pipeline.chunks import Chunk, MicroBatch, SplittableModel, split_model
from internsp.pipeline.hooks import ComputeAction, ISPCommunicatorSchedulerHook, SchedulerHook
from internsp.pipeline.pipeline import Pipeline
from internsp.pipeline.schedules import schedule_kind
from internsp.pipeline.stage import ISPPipelineStage

__all__ = [
    "Chunk",
    "ISPCommunicatorSchedulerHook",
    "ISPPipelineStage",
    "MicroBatch",
    "Pipeline",
    "ComputeAction",
    "SchedulerHook",
    "SplittableModel",
    "schedule_kind",
    "split_model",
]
