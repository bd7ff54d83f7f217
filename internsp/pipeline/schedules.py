"""torch's pipeline schedules, and what each asks of a model: nothing here decides an order.

The order of a step is data that the schedule objects themselves hold; :func:`actions` reads it
without a process group, so that it can be printed, counted and checked before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

from internsp.errors import ConfigError


@dataclass(frozen=True)
class ScheduleKind:
    """One of torch's schedules.

    Attributes:
        name: as in the configuration.
        chunks: chunks a rank holds; ``None``: any number from 1.
        v_shaped: rank 0 holds the first and the last stage (a V), else stages go round in a loop.
        split: input and weight gradients have times of their own.
    """

    name: str
    chunks: int | None
    v_shaped: bool
    split: bool

    @property
    def cls(self) -> type:
        """torch's class."""
        return torch_schedules.get_schedule_class(self.name)

    @property
    def single(self) -> bool:
        """Whether torch's class takes one stage, not a list."""
        return issubclass(self.cls, torch_schedules.PipelineScheduleSingle)

    def splits(self, stage: int) -> bool:
        """Whether ``stage`` may compute its backward in two parts: the first has no input."""
        return self.split and stage > 0

    def stages_of(self, rank: int, ranks: int, chunks: int) -> list[int]:
        """Global indices of the stages that ``rank`` of ``ranks`` holds, ascending."""
        style = "v" if self.v_shaped else "loop"
        return list(generate_rank_to_stage_mapping(ranks, ranks * chunks, style)[rank])

    def rank_of(self, stage: int, ranks: int, chunks: int) -> int:
        """The pipeline rank that holds ``stage``."""
        return next(r for r in range(ranks) if stage in self.stages_of(r, ranks, chunks))

    def mistake(self, ranks: int, chunks: int, micro_batches: int) -> str:
        """Why these numbers do not fit, in words; empty when they do."""
        counts = {"pipeline ranks": ranks, "chunks": chunks, "micro-batches": micro_batches}
        for name, count in counts.items():
            if count < 1:
                return f"{self.name} takes 1 or more {name}, not {count}"
        if self.chunks is not None and chunks != self.chunks:
            return f"{self.name} takes {self.chunks} chunks a rank, not {chunks}"
        try:
            actions(self, ranks, chunks, micro_batches)
        except (ValueError, AssertionError) as error:
            return f"{self.name}: {error}"
        return ""


SCHEDULES = {
    kind.name: kind
    for kind in (
        ScheduleKind("GPipe", 1, False, False),
        ScheduleKind("1F1B", 1, False, False),
        ScheduleKind("Interleaved1F1B", None, False, False),
        ScheduleKind("InterleavedZeroBubble", None, False, True),
        ScheduleKind("ZBVZeroBubble", 2, True, True),
        ScheduleKind("DualPipeV", 2, True, True),
    )
}


def kind_of(name: str) -> ScheduleKind:
    """Look a schedule up.

    Raises:
        ConfigError: an unknown name; lists the known ones.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline.schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


@dataclass(frozen=True)
class Step:
    """One computation of a rank, or one message, as torch's own action lists have it.

    Attributes:
        kind: ``F`` forward, ``B`` whole backward, ``I`` input gradients, ``W`` weight gradients,
            or ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``.
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


COMPUTE = ("F", "B", "I", "W")
Order = dict[int, list[Step]]


def actions(kind: ScheduleKind, ranks: int, chunks: int, micro_batches: int) -> Order:
    """Computations and messages of every pipeline rank in one step, in their order.

    Raises:
        ValueError, AssertionError: torch's, when the numbers do not fit the schedule.
    """
    stages = [_Outline(s, ranks, chunks) for s in kind.stages_of(0, ranks, chunks)]
    made: Any
    if kind.single:
        made = kind.cls(stages[0], micro_batches, loss_fn=_no_loss)
        lowered = torch_schedules._add_send_recv(
            {rank: _numbered(acts) for rank, acts in made.pipeline_order.items()},
            stage_to_rank=lambda s: s,
            num_stages=ranks,
        )
    else:
        made = kind.cls(stages, micro_batches, loss_fn=_no_loss)
        lowered = made.pipeline_order_with_comms
    return {rank: [s for a in acts for s in _steps(a)] for rank, acts in lowered.items()}


def computations(order: Order, rank: int) -> list[Step]:
    """Only what ``rank`` computes."""
    return [step for step in order[rank] if step.kind in COMPUTE]


def _numbered(listed: list[Any]) -> list[Any]:
    """The computations of a schedule with one stage a rank, micro-batches as they really come.

    torch 2.13 numbers the forwards of 1F1B's last rank from 1 in this list, which is for pictures;
    what runs takes micro-batches in order.
    """
    counts = {torch_schedules.FORWARD: 0, torch_schedules.FULL_BACKWARD: 0}
    result = []
    for action in listed:
        if action is not None and action.computation_type in counts:
            number = counts[action.computation_type]
            counts[action.computation_type] = number + 1
            result.append(action._replace(microbatch_index=number))
    return result


def _steps(action: Any) -> list[Step]:
    if action.sub_actions is not None:
        return [step for sub in action.sub_actions for step in _steps(sub)]
    name = action.computation_type.value
    if name not in (*COMPUTE, "SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        return []  # FSDP's own actions, and the reduction at the end
    return [Step(action.stage_index, name, action.microbatch_index)]


def _no_loss(*_: Any) -> torch.Tensor:
    raise AssertionError("an outline is never run")


class _Outline:
    """What torch's schedules ask of a stage while they lay out their order."""

    submod: Callable[..., Any] = nn.Identity()

    def __init__(self, stage: int, ranks: int, chunks: int) -> None:
        self.stage_index = stage
        self.num_stages = ranks * chunks
        self.group_size = ranks
        self.group_rank = 0
        self.is_first = stage == 0
        self.is_last = stage == ranks * chunks - 1
        self.stage_index_to_group_rank: dict[int, int] = {}


def prepared(schedule: Any) -> str:
    """Which of torch's preparations before a first step and evaluation a schedule has done."""
    done = {k: v for k, v in vars(schedule).items() if k.endswith("_initialized")}
    return " ".join(f"{name} {done[name]}" for name in sorted(done))


def forget_step(schedule: Any) -> None:
    """What a step that has failed leaves in a schedule of torch's, which expects none to fail."""
    schedule._internal_losses.clear()
    for name in ("fwd_recv_ops", "bwd_recv_ops", "unshard_ops"):
        getattr(schedule, name, {}).clear()
