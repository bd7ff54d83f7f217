"""Pipelines over ``torch.distributed.pipelining``: chunks, stages, scheduler hooks, plans."""

from internsp.pipeline.chunks import Chunk, MicroBatch, SplittableModel, split
from internsp.pipeline.hooks import ComputeAction, ISPCommunicatorSchedulerHook, SchedulerHook
from internsp.pipeline.pipeline import Pipeline
from internsp.pipeline.schedules import SCHEDULES, ScheduleKind, kind_of
from internsp.pipeline.stage import ISPPipelineStage

__all__ = [
    "SCHEDULES",
    "Chunk",
    "ISPCommunicatorSchedulerHook",
    "ISPPipelineStage",
    "MicroBatch",
    "Pipeline",
    "ComputeAction",
    "ScheduleKind",
    "SchedulerHook",
    "SplittableModel",
    "kind_of",
    "split",
]
