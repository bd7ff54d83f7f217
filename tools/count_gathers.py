"""All-gathers of a pipeline step, measured: FSDP2 with resharding, ours re-gathered, ours kept.

    python tools/count_gathers.py

Four local processes, two pipeline ranks of two weight ranks each. One all-gather is one block's
unsharded weights; bytes are all that a rank receives, including embedding and head. Also reports
whether every gradient is right; with a split backward FSDP2's are not. Prints two Markdown tables,
those of docs/dev/results/pipeline_gathers.md: twelve small blocks under every schedule, and two
blocks per chunk.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.pipelining import PipelineStage

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from internsp import model_zoo
from internsp.base.trace import Trace
from internsp.config import WeightParallelConfig
from internsp.config.model import ModelConfig
from internsp.mesh import ParallelMesh
from internsp.pipeline import SCHEDULES, Chunk, MicroBatch, Pipeline, split_model
from internsp.pipeline.pipeline import meta_stage_args
from tools.bench.ranks import Session, Setup
from tools.bench.report import markdown_rows

RANKS, WEIGHT, LENGTH, WIDTH = 2, 2, 16, 32
WORLD = RANKS * WEIGHT
TIMEOUT = 600.0


@dataclass(frozen=True)
class Case:
    """One schedule over one model."""

    schedule: str
    blocks: int
    micro_batches: int

    @property
    def chunks(self) -> int:
        """Chunks per rank."""
        return SCHEDULES[self.schedule].chunks or 2


TWELVE = tuple(Case(name, 12, 4) for name in SCHEDULES)
TWO_A_CHUNK = (Case("1F1B", 4, 4), Case("Interleaved1F1B", 8, 4), Case("DualPipeV", 8, 8))


@dataclass
class Row:
    """What a rank gathered in one step, and how many of its gradients were right, of how many."""

    gathers: float
    received: int
    right: int
    gradients: int


def build(case: Case) -> Any:
    """The model, in fp64, the same in every process."""
    config = ModelConfig(vocab_size=64, hidden_size=WIDTH, layers=case.blocks, heads=2)
    generator = torch.Generator().manual_seed(0)
    return model_zoo.build(config, dtype=torch.float64, generator=generator)


def ids(number: int, rank: int) -> Tensor:
    """One micro-batch of one data rank."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randint(0, 64, (1, LENGTH), generator=generator)


def wanted(case: Case) -> dict[str, Tensor]:
    """The gradients of one process."""
    model = build(case)
    for number in range(case.micro_batches):
        for rank in range(WEIGHT):
            model(ids(number, rank), labels=ids(number, rank))[0].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def right_gradients(case: Case, chunks: list[nn.Module], averaged: int) -> tuple[int, int]:
    """The number of right gradients of this rank, and of all."""
    right = count = 0
    reference = wanted(case)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            count += 1
            if parameter.grad is None:
                continue
            mine = parameter.grad.full_tensor() * averaged  # type: ignore[attr-defined]
            right += bool((mine - reference[name]).abs().max() < 1e-8 * reference[name].abs().max())
    return right, count


def ours(mesh: ParallelMesh, case: Case, keep: bool) -> Row:
    """A step of internsp."""
    trace = Trace()
    pipeline = Pipeline.create(
        build(case),
        mesh,
        WeightParallelConfig(min_shard_elements=WIDTH + 1, keep_unsharded="all" if keep else None),
        schedule=case.schedule,
        chunks=case.chunks,
        micro_batches=case.micro_batches,
        shape=(1, LENGTH, WIDTH),
        trace=trace,
    )
    mine = [ids(number, mesh.data_rank) for number in range(case.micro_batches)]
    trace.enabled = True
    pipeline.step([MicroBatch((i,), {"labels": i}) for i in mine])
    trace.enabled = False
    sizes = {
        unit.name: len(unit.weights)
        for communicator in pipeline.communicators
        for unit in communicator.blocks
    }
    gathered = [event for event in trace.events if event.kind == "AG"]
    blocks = sum(1 / sizes[event.unit] for event in gathered if event.unit in sizes)
    received = sum(event.nbytes for event in gathered)
    return Row(round(blocks, 6), received, *right_gradients(case, pipeline.chunks, 1))


class _Counting(DefaultAllGather):
    def __init__(self, row: Row, block: bool) -> None:
        self.row, self.block = row, block

    def __call__(self, output_tensor: Tensor, *args: Any, **options: Any) -> Any:
        self.row.gathers += self.block
        nbytes = output_tensor.numel() * output_tensor.element_size()
        self.row.received += nbytes * (WEIGHT - 1) // WEIGHT
        return super().__call__(output_tensor, *args, **options)


def fsdp2(mesh: ParallelMesh, case: Case) -> Row:
    """A step of FSDP2 with resharding in torch's pipeline stages."""
    kind, model, row = SCHEDULES[case.schedule], build(case), Row(0, 0, 0, 0)
    count, stages = RANKS * case.chunks, []
    blocks = split_model(model, count)
    group = DeviceMesh.from_group(mesh.weight_group, "cpu")
    for stage in kind.stages_of(mesh.pipeline_rank, RANKS, case.chunks):
        chunk = Chunk(model, blocks[stage], stage == 0, stage == count - 1)
        for module in (*chunk.layers.values(), chunk):
            fully_shard(module, mesh=group, reshard_after_forward=True)
            counting = _Counting(row, module is not chunk)
            module.set_custom_all_gather(counting)  # type: ignore[operator]
        given = meta_stage_args(chunk, (1, LENGTH, WIDTH), torch.float64)
        stages.append(
            PipelineStage(chunk, stage, count, mesh.device, group=mesh.pipeline_group, **given)
        )
        stages[-1].has_backward = True
    runner = kind.cls(
        stages[0] if kind.single else stages,
        case.micro_batches,
        loss_fn=lambda loss, _: loss * 1,
        scale_grads=False,
    )
    mine = [ids(number, mesh.data_rank) for number in range(case.micro_batches)]
    runner._step_microbatches(
        [(i,) for i in mine], [{"labels": i} for i in mine], mine, return_outputs=False
    )
    row.right, row.gradients = right_gradients(case, [stage.submod for stage in stages], WEIGHT)
    return row


HEAD = ("schedule", "blocks", "micro-batches", "FSDP2, resharding", "right", "ours, re-gathered",
        "ours, kept", "right")  # fmt: skip


def line(mesh: ParallelMesh, case: Case) -> tuple[str, ...]:
    """A row of the table: the figures of the busiest rank, for three ways. Collective."""
    ways: list[Callable[[], Row]] = [
        lambda: fsdp2(mesh, case),
        lambda: ours(mesh, case, False),
        lambda: ours(mesh, case, True),
    ]
    theirs, again, kept = (_busiest(way()) for way in ways)
    cells = [f"{row.gathers:g} ({row.received / 1024:.0f} KiB)" for row in (theirs, again, kept)]
    right = [f"{row.right} of {row.gradients}" for row in (theirs, again)]
    assert (again.right, again.gradients) == (kept.right, kept.gradients)
    sizes = (case.schedule, str(case.blocks), str(case.micro_batches))
    return (*sizes, cells[0], right[0], *cells[1:], right[1])


class Counter:
    """Run one of the four processes."""

    def __init__(self) -> None:
        # torch warns about every gradient that FSDP2 loses.
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        self.mesh = ParallelMesh.create(WEIGHT, 1, RANKS, device_type="cpu", timeout_seconds=60)

    def count(self, cases: tuple[Case, ...]) -> list[tuple[str, ...]]:
        """A row for each case. Collective."""
        return [line(self.mesh, case) for case in cases]


def _busiest(row: Row) -> Row:
    """The maximum over ranks; counts of gradients from one rank of each stage."""
    rows: list[Any] = [None] * WORLD
    dist.all_gather_object(rows, row)
    firsts = rows[::WEIGHT]
    return Row(
        max(each.gathers for each in rows),
        max(each.received for each in rows),
        sum(each.right for each in firsts),
        sum(each.gradients for each in firsts),
    )


def main() -> None:
    """Start the processes; blocks until both tables are printed."""
    with Session(Setup("tools.count_gathers:Counter", (), WORLD, TIMEOUT)) as session:
        for cases in (TWELVE, TWO_A_CHUNK):
            rows = session.ask("count", cases=cases)[0]
            print("\n".join([*markdown_rows([HEAD, *rows]), ""]), flush=True)


if __name__ == "__main__":
    main()
