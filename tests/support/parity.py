"""Compares the loss and every gradient of a parallel model with one process, by value, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp import model_zoo
from internsp.config import ActivationCheckpointConfig
from internsp.config.model import ModelConfig
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from internsp.sp import SequenceLayout
from tests.support.compare import after_a_step, gap, gaps, gradients
from tests.support.meshes import mesh_of
from tests.support.sections import sections

VOCABULARY = 37  # odd: neither 2 nor 4 ranks divide the rows of embedding and head


@dataclass(frozen=True)
class Case:
    """One configuration in which gradients must equal those of one process."""

    weight: int = 1
    sequence: int = 1
    length: int = 12
    micro_batches: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    one_rank_without_tokens: bool = False
    seed: int = 0
    ring: int = 1
    near: str = "heads"

    def model_config(self) -> ModelConfig:
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": 12, "layers": 4, "heads": 2,
            "intermediate_size": 20,
        }  # fmt: skip
        return ModelConfig(**(sizes | self.model))


def batch(case: Case, rows: int, micro_batch: int) -> tuple[Tensor, Any, Tensor | None]:
    """Ids ``[rows, length]`` of one micro-batch of all data ranks, boundaries and labels."""
    generator = torch.Generator().manual_seed(1000 * case.seed + micro_batch)
    ids = torch.randint(0, VOCABULARY, (rows, case.length), generator=generator)
    boundaries = None
    if case.packed:  # documents that end within and across ranks' ranges, one with a single token
        boundaries = [[0, 1, case.length // 2 + row % 2, case.length - 2] for row in range(rows)]
    labels = None
    if case.one_rank_without_tokens:
        labels = torch.randint(0, VOCABULARY, ids.shape, generator=generator)
        labels[:, : -(-case.length // max(case.sequence, 1))] = -100
        if case.sequence == 1:
            labels = labels.clone()
            labels[0] = -100
            labels[1:] = ids[1:]
    return ids, boundaries, labels


def run_case(
    case: Case, device: str = "cpu", mesh: ParallelMesh | None = None
) -> tuple[float, float]:
    """Run ``case`` on the calling ranks, on ``device``, or on a given ``mesh`` of its degrees.

    Returns:
        The gap of the loss, the largest of all gradients, and of all parameters after a step.
    """
    axes = {"ring": case.ring, "near": case.near} if case.ring > 1 else {}
    mesh = mesh or mesh_of(case.weight, case.sequence, device=device, **axes)
    plain = model_zoo.build(
        case.model_config(), dtype=torch.float64, generator=torch.Generator().manual_seed(case.seed)
    )
    plain = plain.to(mesh.device)
    ours = copy.deepcopy(plain)
    weights, sequence = sections({"min_shard_elements": 24} | case.weights)
    checkpoint = ActivationCheckpointConfig(**case.checkpoint)
    communicator = parallelize(
        ours, mesh, weights, sequence=sequence, activation_checkpoint=checkpoint
    )
    communicator.state.pool.poison = True
    rows = 2 if case.packed else 1  # on a rank: two have equally many documents, cut elsewhere
    batches = [batch(case, rows * mesh.data, m) for m in range(case.micro_batches)]
    wanted = _plain_loss(plain, batches, mesh.device)
    wanted.backward()
    found = _parallel_loss(ours, mesh, batches, int(_count(batches)))
    apart = gaps(gradients(ours), gradients(plain))
    loss = gap(torch.tensor(found, dtype=torch.float64), wanted.cpu())
    return loss, max(*apart.values(), *after_a_step([ours], plain).values())


def _count(batches: Sequence[tuple[Tensor, Any, Tensor | None]]) -> float:
    return sum(
        SequenceLayout.create(ids, boundaries=b, labels=labels).valid_tokens
        for ids, b, labels in batches
    )


def _plain_loss(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Any, Tensor | None]],
    device: torch.device,
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for ids, boundaries, labels in batches:
        layout = SequenceLayout.create(ids, boundaries=boundaries, labels=labels).to(device)
        loss, _ = model(layout.input_ids, layout=layout, labels=layout.labels)
        total = total + loss
    return total / max(_count(batches), 1)


def _parallel_loss(
    model: nn.Module,
    mesh: ParallelMesh,
    batches: Sequence[tuple[Tensor, Any, Tensor | None]],
    tokens: int,
) -> float:
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for ids, boundaries, labels in batches:
        rows = len(ids) // mesh.data
        row = slice(mesh.data_rank * rows, (mesh.data_rank + 1) * rows)
        layout = SequenceLayout.create(
            ids[row],
            rank=mesh.sequence_rank,
            size=mesh.sequence,
            ring=mesh.ring,
            near=mesh.near,
            boundaries=None if boundaries is None else boundaries[row],
            labels=None if labels is None else labels[row],
        ).to(mesh.device)
        loss, _ = model(layout.input_ids, layout=layout, labels=layout.labels, loss_chunk=5)
        loss = loss / max(tokens, 1)
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total, group=mesh.stage_group)
    return float(total)
