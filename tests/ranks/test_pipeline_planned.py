"""What ``internsp plan`` prints of a pipeline is what a training step does, rank by rank."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import pytest
from rich.console import Console
from torch.distributed.pipelining import PipelineStage

from internsp.app.config import Config
from internsp.app.plan.pipeline import tables
from internsp.app.plan.step import make_plan
from internsp.app.process.stop import StopRequest
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from internsp.base.sizes import human
from tests.ranks.test_pipeline_train import Changes, config, pipelined
from tests.support.few import few
from tests.support.ranks import run_ranks

WORLD = 4
FULL: Changes = {"activation_checkpoint": {"mode": "full"}}
KEPT: Changes = {"weight_parallel": {"keep_unsharded": "all"}}
ROLLING: Changes = {"weight_parallel": {"gather_before": "rolling"}}
ONCE: Changes = {"weight_parallel": {"accumulation": "full"}}
CASES: list[Changes] = [
    pipelined("GPipe", weight=2),
    {**pipelined("1F1B", weight=2), **FULL},
    {**pipelined("Interleaved1F1B", 2, weight=2), **ROLLING},
    {**pipelined("InterleavedZeroBubble", 2, weight=2), **ONCE},
    pipelined("ZBVZeroBubble", 2, weight=2, sequence=2),
    {**pipelined("DualPipeV", 2, weight=2), **KEPT},
]


def settings(changes: Changes) -> Config:
    larger: Changes = {"model": {"layers": 13}, "data": {"sequence_length": 32}}
    for name, values in changes.items():
        larger[name] = larger.get(name, {}) | values
    return config(**larger)


@dataclass(frozen=True)
class Row:
    """A line of the printed table, or the same figures of a step: number and bytes."""

    gathers: int
    gathered: str
    reductions: int
    reduced: str
    messages: int
    received: str


class _Messages:
    """Counts the messages between a rank's stages and other stages."""

    def __init__(self, stages: list[PipelineStage]) -> None:
        self.count = self.nbytes = 0
        for stage in stages:
            for name in ("get_fwd_recv_ops", "get_bwd_recv_ops"):
                self._count(stage, name)

    def _count(self, stage: PipelineStage, name: str) -> None:
        real = getattr(stage, name)

        def counting(number: int) -> object:
            ops = real(number)
            self.count += len(ops)
            self.nbytes += sum(op.tensor.nbytes for op in ops)
            return ops

        setattr(stage, name, counting)


def steps(rank: int, world_size: int, cases: list[Changes]) -> list[tuple[int, list[Row]]]:
    """This rank's pipeline rank and two of its steps, for each case."""
    found = []
    for changes in cases:
        session = Session.create(settings(changes))
        assert session.pipeline is not None
        session.trace.enabled = True
        runner, rows = StepRunner(session), []
        messages = _Messages(session.pipeline.stages)
        for number in range(2):
            session.trace.clear()
            messages.count = messages.nbytes = 0
            runner.step(number, StopRequest())
            events = {kind: [e for e in session.trace.events if e.kind == kind and
                             e.phase in ("forward", "recompute", "backward")]
                      for kind in ("AG", "RS")}  # fmt: skip
            sums = {kind: human(sum(e.nbytes for e in each)) for kind, each in events.items()}
            rows.append(
                Row(
                    len(events["AG"]), sums["AG"], len(events["RS"]), sums["RS"],
                    messages.count, human(messages.nbytes),
                )
            )  # fmt: skip
        found.append((session.mesh.pipeline_rank, rows))
    return found


def printed(settings: Config) -> dict[int, Row]:
    """The table of ``internsp plan``, read from its text."""
    out = io.StringIO()
    for made in tables(make_plan(settings, WORLD)):
        Console(file=out, width=160).print(made)
    table = out.getvalue().split("messages ┃")[1].split("└")[0]
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]
    rows: dict[int, list[list[str]]] = {}
    for cells in (line for line in lines if line):
        if cells[0]:
            rows[int(cells[0])] = []
        rows[max(rows)].append(cells[-3:])
    assert all(re.fullmatch(r"[\d.]+ ([KMGT]i)?B", each[1][0]) for each in rows.values())
    return {
        rank: Row(
            int(each[0][0]), each[1][0], int(each[0][1]), each[1][1], int(each[0][2]), each[1][2]
        )
        for rank, each in rows.items()
    }


@pytest.mark.slow(6)
@few("cases", CASES, 2)
def test_a_step_gathers_reduces_and_receives_what_the_plan_printed(cases: list[Changes]) -> None:
    wanted = [printed(settings(changes)) for changes in cases]
    for ranks in run_ranks(steps, WORLD, cases, timeout=120):
        for changes, (place, rows), plan in zip(cases, ranks, wanted, strict=True):
            for number, row in enumerate(rows):
                assert row == plan[place], (changes, f"step {number}")


def test_the_cases_take_more_than_one_slots_worth_of_gathers() -> None:
    """Otherwise re-gathering would not be tested."""
    for changes in (CASES[0], CASES[4]):
        plan = make_plan(settings(changes), WORLD)
        for rank in plan.ranks:
            names = [action.weight for action in rank.schedule.actions if action.kind == "AG"]
            assert len(names) > len(set(names))
