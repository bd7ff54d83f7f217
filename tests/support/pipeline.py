"""Compares the loss and every gradient of a pipeline with one process, by value, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp import model_zoo
from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig
from internsp.config.model import ModelConfig
from internsp.mesh import ParallelMesh
from internsp.pipeline import MicroBatch, Pipeline, SchedulerHook
from internsp.sp import SequenceLayout
from tests.support.compare import gap, gaps, gradients, on_all_stages
from tests.support.meshes import mesh_of
from tests.support.parity import VOCABULARY
from tests.support.sections import sections


@dataclass(frozen=True)
class Case:
    """One pipeline on small sizes."""

    schedule: str = "1F1B"
    pipeline: int = 2
    chunks: int = 1
    weight: int = 1
    expert_weight: int | None = None
    sequence: int = 1
    micro_batches: int = 4
    layers: int = 5
    length: int = 9
    packed: bool = False
    static: bool = True
    steps: int = 1
    timeout: int = 30
    weights: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": 12, "layers": self.layers, "heads": 2,
            "intermediate_size": 20,
        }  # fmt: skip
        generator = torch.Generator().manual_seed(3)
        config = ModelConfig(**(sizes | self.model))
        return model_zoo.build(config, dtype=torch.float64, generator=generator)

    def layout(self, number: int, rows: slice, rank: int = 0, size: int = 1) -> SequenceLayout:
        """Micro-batch ``number`` of all data ranks, only ``rows`` and one sequence rank."""
        return self.layouts([number], rows, rank, size)

    def layouts(
        self, numbers: Iterable[int], rows: slice, rank: int = 0, size: int = 1
    ) -> SequenceLayout:
        """The :meth:`layout` of several micro-batches, concatenated by rows."""
        batches = [self._batch(number, 4) for number in numbers]
        boundaries = [row for _, documents in batches for row in (documents or [])[rows]]
        return SequenceLayout.create(
            torch.cat([ids[rows] for ids, _ in batches]),
            rank=rank,
            size=size,
            boundaries=boundaries or None,
        )

    def _batch(self, number: int, rows: int) -> tuple[Tensor, list[list[int]] | None]:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCABULARY, (rows, self.length), generator=generator)
        documents = [[0, 1, self.length // 2 + row % 2] for row in range(rows)]
        return ids, documents if self.packed else None

    def mine(self, mesh: ParallelMesh, number: int) -> SequenceLayout:
        row = slice(mesh.data_rank, mesh.data_rank + 1)
        return self.layout(number, row, mesh.sequence_rank, mesh.sequence)

    def tokens(self, data: int) -> int:
        """Valid tokens of a step over all ranks."""
        return self.layouts(range(self.micro_batches), slice(0, data)).valid_tokens


def make(
    case: Case,
    hooks: list[SchedulerHook] | None = None,
    trace: Trace | None = None,
    alter: Callable[[nn.Module], None] = lambda model: None,
    mesh: ParallelMesh | None = None,
    **options: Any,
) -> tuple[Pipeline, nn.Module]:
    """The pipeline of the calling rank, and the full model on one process.

    Args:
        alter: changes the model before it is split.
        mesh: with the degrees of ``case``; ``None``: create one.
        options: of ``Pipeline.create``, besides.
    """
    mesh = mesh or mesh_of(
        case.weight,
        case.sequence,
        case.pipeline,
        timeout=case.timeout,
        expert_weight=case.expert_weight,
    )
    tokens = case.tokens(mesh.data)
    width = case.mine(mesh, 0).input_ids.shape[1]
    plain = case.build()
    alter(plain)
    weights, sequence = sections({"min_shard_elements": 24} | case.weights)
    pipeline = Pipeline.create(
        copy.deepcopy(plain),
        mesh,
        weights,
        sequence=sequence,
        schedule=case.schedule,
        chunks=case.chunks,
        micro_batches=case.micro_batches,
        activation_checkpoint=ActivationCheckpointConfig(**case.checkpoint),
        shape=(1, width, 12) if case.static else None,
        criterion=lambda loss, _: loss / tokens,
        hooks=hooks or [],
        trace=trace,
        **options,
    )
    for communicator in pipeline.communicators:
        communicator.state.pool.poison = True
    return pipeline, plain


def batches(case: Case, mesh: ParallelMesh) -> list[MicroBatch]:
    """This rank's arguments of a pipeline step."""
    layouts = [case.mine(mesh, m) for m in range(case.micro_batches)]
    return [
        MicroBatch((at.input_ids,), {"layout": at, "labels": at.labels, "loss_chunk": 5})
        for at in layouts
    ]


def plain_loss(case: Case, model: nn.Module, data: int) -> Tensor:
    """The loss of one step on one process, with all micro-batches as a single batch."""
    at = case.layouts(range(case.micro_batches), slice(0, data))
    loss: Tensor = model(at.input_ids, layout=at, labels=at.labels)[0]
    return loss / at.valid_tokens


@dataclass(frozen=True)
class Found:
    """Gaps of the loss, and the largest of this rank's gradients and of parameters after a step."""

    loss: float
    gradient: float
    parameter: float = 0.0


def compare(case: Case, pipeline: Pipeline, plain: nn.Module, losses: list[Tensor]) -> Found:
    """Gaps of a finished step to one process. Collective."""
    wanted = plain_loss(case, plain, pipeline.mesh.data)
    wanted.backward()
    total = torch.stack(losses).sum().double() if losses else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(total)
    return Found(gap(total, wanted), max(gradient_gaps(pipeline, plain, case.steps).values()))


def gradient_gaps(pipeline: Pipeline, plain: nn.Module, steps: int = 1) -> dict[str, float]:
    """Gap of every parameter of this rank; also checks that each is on some rank. Collective.

    Args:
        steps: factor of one process's gradient.
    """
    found = gradients(*pipeline.chunks)
    wanted = on_all_stages(found, gradients(plain))
    return gaps(found, {n: g if g is None else steps * g for n, g in wanted.items()})
