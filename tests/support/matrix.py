"""One row of the parity matrix: a small model parallelized in one way, compared with one process.

See ``tests/ranks/test_parity_matrix.py``. Ranks import this file, which does not draw rows.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp import model_zoo
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.config.model import ModelConfig
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from internsp.pipeline import MicroBatch, Pipeline
from internsp.sp import DistributedAttention, Documents, SequenceLayout
from internsp.sp.dispatch import FIXED_BALANCE
from internsp.sp.partial import BlockAttention
from internsp.wp.collectives import Transport
from tests.support.compare import TOLERANCE, gap, gaps, gradients, on_all_stages
from tests.support.covering import Row
from tests.support.meshes import mesh_of
from tests.support.parity import VOCABULARY

HEADS = 4
MOST_RANKS = 8
AXES: dict[str, tuple[Any, ...]] = {
    "heads": (1, 2, 4),
    "ring": (1, 2, 4),
    "near": ("heads", "ring"),
    "kv_heads": (1, 2, HEADS),
    "documents": ("one", "many", "longer than a rank", "a rank without positions"),
    "window": (None, 3),
    "odd": (False, True),
    "checkpoint": ("none", "full", "selective"),
    "offload": (None, "all"),
    "tiles": (1, 2),
    "pipeline": (1, 2),
}


def world_of(row: Row) -> int:
    """The number of ranks of a row; at least two per stage, over which weights are sharded."""
    return int(row["pipeline"] * max(2, row["heads"] * row["ring"]))


def legal(row: Row) -> bool:
    sequence = row["heads"] * row["ring"]
    return (
        world_of(row) <= MOST_RANKS
        and (row["near"] == "heads" or (row["heads"] > 1 and row["ring"] > 1))
        and (row["offload"] is None or row["checkpoint"] != "none")
        # Stages receive hidden states of a fixed shape with at least one position.
        and (row["documents"] != "a rank without positions" or sequence > 1)
    )


def words(row: Row) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in row.items())


def length_of(row: Row) -> int:
    sequence = row["heads"] * row["ring"]
    if row["documents"] == "a rank without positions":
        return int(sequence - 1)
    return 17 if row["odd"] else 16


def documents_of(row: Row, number: int) -> list[int] | None:
    """The positions at which the documents of a row of data begin."""
    if row["documents"] == "many":
        return [0, 1, 4 + number % 2, 9, 11]
    if row["documents"] == "longer than a rank":
        return [0, 2, 14 - number % 2]
    return None


def layout_of(row: Row, micro_batch: int, data: slice, rank: int, mesh: Any) -> SequenceLayout:
    """The step's loss of these rows of data; on one process if there is no mesh."""
    generator = torch.Generator().manual_seed(micro_batch)
    shape = (4, length_of(row))
    ids = torch.randint(0, VOCABULARY, shape, generator=generator)
    starts = [documents_of(row, n) for n in range(4)]
    labels = None  # given where sequences are so short that no label would be left
    if row["documents"] == "a rank without positions":
        labels = torch.randint(0, VOCABULARY, shape, generator=generator)[data]
    cut = {}
    if mesh is not None:
        balance = FIXED_BALANCE if mesh.pipeline > 1 else "auto"
        cut = {"size": mesh.sequence, "ring": mesh.ring, "near": mesh.near, "balance": balance}
    return SequenceLayout.create(
        ids[data], rank=rank, labels=labels, window=row["window"],
        boundaries=None if starts[0] is None else starts[data], **cut,
    )  # fmt: skip


def model_of(row: Row) -> Any:
    config = ModelConfig(
        vocab_size=VOCABULARY, hidden_size=16, layers=4, heads=HEADS, kv_heads=row["kv_heads"],
        intermediate_size=20,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    model = model_zoo.build(config, dtype=torch.float64, generator=generator)
    for module in model.modules():
        if isinstance(module, DistributedAttention):
            module.window = row["window"]
    return model


def run_row(row: Row, averaged: bool = False) -> dict[str, float]:
    """The gaps of the loss and of every gradient of this rank. Collective.

    Args:
        averaged: a deliberate mistake: each rank divides by its own tokens, and the results are
            averaged over ranks.
    """
    sequence = row["heads"] * row["ring"]
    mesh = mesh_of(2, sequence, row["pipeline"], ring=row["ring"], near=row["near"])
    micro_batches = row["pipeline"]
    plain = model_of(row)
    ours = copy.deepcopy(plain)
    checkpoint = ActivationCheckpointConfig(
        mode=row["checkpoint"], offload=row["offload"], tiles=row["tiles"]
    )
    every = [layout_of(row, m, slice(0, mesh.data), 0, None) for m in range(micro_batches)]
    tokens = sum(layout.valid_tokens for layout in every)
    wanted = torch.zeros((), dtype=torch.float64)
    for at in every:
        wanted = wanted + plain(at.input_ids, layout=at, labels=at.labels)[0] / tokens
    wanted.backward()
    own = slice(mesh.data_rank, mesh.data_rank + 1)
    layouts = [layout_of(row, m, own, mesh.sequence_rank, mesh) for m in range(micro_batches)]
    config = WeightParallelConfig(min_shard_elements=24)
    if averaged:
        tokens = layouts[0].valid_tokens * dist.get_world_size()
    if row["pipeline"] == 1:
        total, modules = _plainly(ours, mesh, config, checkpoint, layouts, tokens)
    else:
        total, modules = _staged(ours, mesh, config, checkpoint, layouts, tokens)
    dist.all_reduce(total)
    found = gradients(*modules)
    right = gradients(plain)
    if row["pipeline"] > 1:
        right = on_all_stages(found, right)
    return {"loss": gap(total, wanted.detach()), **gaps(found, right)}


def _plainly(
    model: nn.Module, mesh: ParallelMesh, config: WeightParallelConfig,
    checkpoint: ActivationCheckpointConfig, layouts: list[SequenceLayout], tokens: int,
) -> tuple[Tensor, list[nn.Module]]:  # fmt: skip
    communicator = parallelize(model, mesh, config, activation_checkpoint=checkpoint)
    communicator.state.pool.poison = True
    total = torch.zeros((), dtype=torch.float64)
    for at in layouts:
        loss = model(at.input_ids, layout=at, labels=at.labels, loss_chunk=5)[0] / tokens
        loss.backward()
        total += loss.detach()
    return total, [model]


def _staged(
    model: Any, mesh: ParallelMesh, config: WeightParallelConfig,
    checkpoint: ActivationCheckpointConfig, layouts: list[SequenceLayout], tokens: int,
) -> tuple[Tensor, list[nn.Module]]:  # fmt: skip
    pipeline = Pipeline.create(
        model, mesh, config, micro_batches=len(layouts), activation_checkpoint=checkpoint,
        shape=(1, layouts[0].input_ids.shape[1], 16), criterion=lambda loss, _: loss / tokens,
    )  # fmt: skip
    for communicator in pipeline.communicators:
        communicator.state.pool.poison = True
    losses = pipeline.step([
        MicroBatch((at.input_ids,), {"layout": at, "labels": at.labels, "loss_chunk": 5})
        for at in layouts
    ])  # fmt: skip
    total = torch.stack(losses).sum().double() if losses else torch.zeros((), dtype=torch.float64)
    return total, list(pipeline.chunks)


def compare(rank: int, world: int, rows: list[Row]) -> list[str]:
    """The differences of each row; none are expected."""
    found = []
    for row in rows:
        apart = {name: value for name, value in run_row(row).items() if not value <= TOLERANCE}
        if apart:
            found.append(f"{words(row)}: {apart}")
    return found


# Faults known from other libraries, each with the row that must detect it

_PLAIN: Row = {axis: values[0] for axis, values in AXES.items()}
FAULTS: dict[str, Row] = {
    "a ring's backward that reads the last hop's keys": _PLAIN | {"ring": 2},
    "a ring without the documents' boundaries": _PLAIN | {"ring": 2, "documents": "many"},
    "heads without the documents' boundaries": _PLAIN | {"heads": 2, "documents": "many"},
    "a loss that is averaged over ranks": _PLAIN | {"ring": 2, "documents": "many"},
    "gradients that are averaged over ranks": _PLAIN | {"heads": 2},
}


def faulty(rank: int, world: int, fault: str) -> tuple[list[str], list[str]]:
    """The differences without and with a fault."""
    row = FAULTS[fault]
    right = compare(rank, world, [row])
    with pytest.MonkeyPatch.context() as patch:
        if "keys" in fault:
            patch.setattr(BlockAttention, "backward", _of_the_last_keys())
        elif "boundaries" in fault:
            patch.setattr(SequenceLayout, "create", _without_documents())
        elif fault.startswith("gradients"):
            held = Transport.sum_output
            patch.setattr(Transport, "sum_output", lambda *given: held(*given) / world)
        apart = run_row(row, averaged=fault.startswith("a loss"))
    return right, [name for name, value in apart.items() if not value <= 1e-6]


def _of_the_last_keys() -> Any:
    held, last = BlockAttention.backward, []

    def backward(
        self: BlockAttention, grad: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor,
        parts: Any, *totals: Tensor,
    ) -> None:  # fmt: skip
        now = k, v
        if last and last[0].shape == k.shape:
            k, v = last
        last[:] = now
        held(self, grad, out, lse, k, v, parts, *totals)

    return backward


def _without_documents() -> Any:
    create = SequenceLayout.create

    def made(ids: Tensor, **given: Any) -> SequenceLayout:
        layout = create(ids, **given)
        if layout.size == 1:  # the single process has them
            return layout
        return replace(layout, documents=Documents.create([(0,)] * len(ids), layout.length))

    return made
