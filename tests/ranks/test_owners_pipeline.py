"""Owners of experts in the stages of a pipeline, and with rings: the values of one process."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from internsp.base.trace import Trace
from internsp.config import SequenceConfig, WeightParallelConfig
from internsp.errors import StructureError
from internsp.layers import MixtureOfExperts, router_loss
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.support.compare import TOLERANCE, check, gradients
from tests.support.models import raises
from tests.support.pipeline import Case, batches, compare, gradient_gaps, make, plain_loss
from tests.support.ranks import ranks


def with_mixtures(model: nn.Module, **options: float) -> None:
    """The feed forward of each block becomes a mixture of four experts."""
    torch.manual_seed(2)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.feed_forward = MixtureOfExperts(12, 6, 4, 2, shared=4, dtype=torch.float64, **options)


def mesh_of(**degrees: int) -> ParallelMesh:
    return ParallelMesh.create(device_type="cpu", timeout_seconds=20, **degrees)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@ranks(4)
def test_stages_whose_experts_have_owners_compute_what_one_process_does(schedule: str) -> None:
    mesh, trace = mesh_of(pipeline=2, expert=2), Trace(enabled=True)
    case = Case(schedule, chunks=2 if schedule == "ZBVZeroBubble" else 1)
    if schedule == "1F1B":
        case = Case(schedule, checkpoint={"mode": "full", "fraction": 0.5})
    pipeline, plain = make(case, trace=trace, alter=with_mixtures, mesh=mesh)
    losses = pipeline.step(batches(case, mesh))
    found = compare(case, pipeline, plain, losses)
    assert found.loss < TOLERANCE
    assert found.gradient < TOLERANCE
    sent = [e for e in trace.events if e.kind == "A2A" and e.weight.endswith("tokens")]
    blocks = sum(len(chunk.layers) for chunk in pipeline.chunks)
    each = [sum(e.phase == phase for e in sent) for phase in ("forward", "backward")]
    assert each == [4 * blocks] * 2, "once a block and micro-batch, each way"
    refused = "no stage of a pipeline", "a router_scale", "balance_rate"
    alter = partial(with_mixtures, z_loss=0.1)
    raises(StructureError, lambda: make(case, alter=alter, mesh=mesh), *refused)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@ranks(4)
def test_losses_of_routers_train_on_every_stage(schedule: str) -> None:
    mesh = mesh_of(pipeline=2, expert=2)
    zbv = schedule == "ZBVZeroBubble"
    case = Case(schedule, chunks=1 + zbv, checkpoint={} if zbv else {"mode": "full"})
    tokens = case.tokens(mesh.data)
    pipeline, plain = make(
        case, alter=partial(with_mixtures, auxiliary=0.3, z_loss=0.05), mesh=mesh,
        router_scale=lambda: 1 / tokens,
    )  # fmt: skip
    pipeline.step(batches(case, mesh))
    for number in range(case.micro_batches):  # a load is that of a micro-batch
        at = case.layouts(range(number, number + 1), slice(0, mesh.data))
        loss = plain(at.input_ids, layout=at, labels=at.labels)[0] + router_loss(plain)
        (loss / tokens).backward()
    assert max(gradient_gaps(pipeline, plain).values()) < TOLERANCE
    dense = copy.deepcopy(plain)
    dense.zero_grad()
    plain_loss(case, dense, mesh.data).backward()
    assert max(gradient_gaps(pipeline, dense).values()) > 1e-3, "the control: without them"


@pytest.mark.thorough(2)
@ranks(4)
def test_rings_and_heads_beside_owners_give_the_same() -> None:
    for degrees in ({"sequence": 2, "ring": 2, "expert": 4}, {"sequence": 2, "expert": 2}):
        mesh = mesh_of(weight=2, expert_weight=1, **degrees)
        case = Case(length=12)
        plain = case.build()
        with_mixtures(plain)
        ours = copy.deepcopy(plain)
        parallelize(
            ours, mesh, WeightParallelConfig(min_shard_elements=24), sequence=SequenceConfig()
        )
        at = case.layout(0, slice(0, mesh.data))
        plain(at.input_ids, layout=at, labels=at.labels)[0].backward()
        row = slice(mesh.data_rank, mesh.data_rank + 1)
        own = case.layout(0, row, mesh.sequence_rank, 2)
        ours(own.input_ids, layout=own, labels=own.labels)[0].backward()
        check(gradients(ours), gradients(plain), f"{degrees}")
