"""torch's pipeline schedules: their requirements, and the order of actions that torch gives them.

torch's schedule objects hold the order of a step as data; :func:`schedule_order` reads it without a
process group, so that it can be printed, counted and checked before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
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
        name: name in the configuration.
        chunks: number of chunks on each rank; ``None``: any number from 1.
        v_shaped: rank 0 holds the first and the last stage (a V); otherwise stages are assigned to
            ranks round robin.
        splits_backward: it runs input backward and weight backward at different times.
    """

    name: str
    chunks: int | None
    v_shaped: bool
    splits_backward: bool

    @property
    def cls(self) -> type:
        """torch's schedule class."""
        return torch_schedules.get_schedule_class(self.name)

    @property
    def single(self) -> bool:
        """Whether torch's class takes one stage instead of a list of stages."""
        return issubclass(self.cls, torch_schedules.PipelineScheduleSingle)

    def splits_backward_of(self, stage: int) -> bool:
        """Whether ``stage`` may split its backward; the first stage has no input gradients."""
        return self.splits_backward and stage > 0

    def stages_of(self, rank: int, ranks: int, chunks: int) -> list[int]:
        """Global indices of the stages that ``rank`` of ``ranks`` holds, ascending."""
        return list(_stages(self.v_shaped, ranks, chunks)[rank])

    def rank_of(self, stage: int, ranks: int, chunks: int) -> int:
        """The pipeline rank that holds ``stage``."""
        mapping = _stages(self.v_shaped, ranks, chunks)
        return next(rank for rank, stages in mapping.items() if stage in stages)

    def why_invalid(self, ranks: int, chunks: int, micro_batches: int) -> str:
        """Why these numbers do not fit the schedule, as text; empty if they do."""
        counts = {"pipeline ranks": ranks, "chunks": chunks, "micro-batches": micro_batches}
        for name, count in counts.items():
            if count < 1:
                return f"{self.name} takes 1 or more {name}, not {count}"
        if self.chunks is not None and chunks != self.chunks:
            return f"{self.name} takes {self.chunks} chunks a rank, not {chunks}"
        try:
            schedule_order(self, ranks, chunks, micro_batches)
        except (ValueError, AssertionError) as error:
            return f"{self.name}: {error}"
        return ""


@cache
def _stages(v_shaped: bool, ranks: int, chunks: int) -> dict[int, list[int]]:
    """By rank, the stages that it holds: an order asks for them at every action."""
    return generate_rank_to_stage_mapping(ranks, ranks * chunks, "v" if v_shaped else "loop")


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


def schedule_kind(name: str) -> ScheduleKind:
    """The schedule called ``name``.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline.schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


@dataclass(frozen=True)
class ScheduleAction:
    """One computation or message of a rank, as in torch's action lists.

    Attributes:
        kind: ``F`` forward, ``B`` full backward, ``I`` input backward, ``W`` weight backward, or
            ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``.
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


COMPUTE = ("F", "B", "I", "W")
Order = dict[int, list[ScheduleAction]]


def schedule_order(kind: ScheduleKind, ranks: int, chunks: int, micro_batches: int) -> Order:
    """Computations and messages of every pipeline rank in one step, in order.

    Raises:
        ValueError, AssertionError: raised by torch if the numbers do not fit the schedule.
    """
    # The attributes of a stage that torch's schedules read when they make their order.
    outline: dict[str, Any] = {
        "submod": nn.Identity(), "num_stages": ranks * chunks, "group_size": ranks,
        "group_rank": 0, "stage_index_to_group_rank": {},
    }  # fmt: skip
    own = kind.stages_of(0, ranks, chunks)
    stages = [SimpleNamespace(stage_index=stage, **outline) for stage in own]
    made: Any
    if kind.single:
        made = kind.cls(stages[0], micro_batches, loss_fn=_no_loss)
        lowered = torch_schedules._add_send_recv(
            {rank: _renumbered(acts) for rank, acts in made.pipeline_order.items()},
            stage_to_rank=lambda s: s,
            num_stages=ranks,
        )
    else:
        made = kind.cls(stages, micro_batches, loss_fn=_no_loss)
        lowered = made.pipeline_order_with_comms
    return {rank: [s for a in acts for s in _flatten(a)] for rank, acts in lowered.items()}


def computations(order: Order, rank: int) -> list[ScheduleAction]:
    """The computations of ``rank``, without its messages."""
    return [action for action in order[rank] if action.kind in COMPUTE]


def _renumbered(listed: list[Any]) -> list[Any]:
    """The computations of a schedule with one stage per rank, micro-batches numbered as they run.

    torch 2.13 numbers the forwards of 1F1B's last rank from 1 in this list, which it uses for
    pictures only; a step runs micro-batches in order.
    """
    counts = {torch_schedules.FORWARD: 0, torch_schedules.FULL_BACKWARD: 0}
    result = []
    for action in listed:
        if action is not None and action.computation_type in counts:
            number = counts[action.computation_type]
            counts[action.computation_type] = number + 1
            result.append(action._replace(microbatch_index=number))
    return result


def _flatten(action: Any) -> list[ScheduleAction]:
    if action.sub_actions is not None:
        return [one for sub in action.sub_actions for one in _flatten(sub)]
    name = action.computation_type.value
    if name not in (*COMPUTE, "SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        return []  # actions of FSDP, and the final gradient reduction
    return [ScheduleAction(action.stage_index, name, action.microbatch_index)]


def _no_loss(*_: Any) -> torch.Tensor:
    raise AssertionError("an outline is never run")


def initialized(schedule: Any) -> str:
    """Which initializations before a first step and a first evaluation ``schedule`` has done."""
    done = {k: v for k, v in vars(schedule).items() if k.endswith("_initialized")}
    return " ".join(f"{name} {done[name]}" for name in sorted(done))


def reset_schedule(schedule: Any) -> None:
    """Drop what a failed step has left in a schedule; torch's schedules expect no failures."""
    schedule._internal_losses.clear()
    for name in ("fwd_recv_ops", "bwd_recv_ops", "unshard_ops"):
        getattr(schedule, name, {}).clear()
