"""Variables that a launcher (torchrun, srun) set, read and checked before torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from internsp.app.config.errors import Problem

_MOST_RANKS = 1 << 20
_SLURM_SIZE = "SLURM_STEP_NUM_TASKS"  # set in job steps only
_OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", _SLURM_SIZE)
"""Variables in which other launchers give their number of processes."""
_REMEDY = "start with torchrun, which sets all of them, or unset them to start local processes"


@dataclass(frozen=True)
class Launched:
    """What the launcher's variables say about this process.

    Attributes:
        rank: ``None``: no launcher started this process.
        world_size: number of the launcher's ranks; ``None``: it gives none.
        problems: variables that are missing or have no valid value.
        variables: variables to add to the environment for torch.
    """

    rank: int | None
    world_size: int | None
    problems: tuple[Problem, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


def launched(environment: Mapping[str, str], joins: bool) -> Launched:
    """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    If ``srun`` started several tasks and ``RANK`` is not set, they are derived from Slurm's
    variables.

    Args:
        joins: whether the command joins the launcher's ranks; ``plan`` only uses their number.
    """
    problems: list[Problem] = []
    added = _of_slurm(environment) if "RANK" not in environment else {}
    environment = {**environment, **added}
    size = _number(environment, "WORLD_SIZE", 1, _MOST_RANKS, problems)
    if not joins:
        return Launched(None, size, tuple(problems))
    if "RANK" not in environment:
        if "WORLD_SIZE" in environment:
            text = f"is set and RANK is not: {_REMEDY}"
            problems.append(Problem(("WORLD_SIZE",), text))
        for name in _OTHERS:
            if environment.get(name, "1") not in ("0", "1"):
                text = (
                    f"is {environment[name]} and RANK is not set: each of these processes would "
                    f"be a run of its own; {_REMEDY}"
                )
                problems.append(Problem((name,), text))
        return Launched(None, None, tuple(problems))
    rank = _number(environment, "RANK", 0, _MOST_RANKS, problems)
    _number(environment, "LOCAL_RANK", 0, _MOST_RANKS, problems)
    _number(environment, "LOCAL_WORLD_SIZE", 1, _MOST_RANKS, problems)
    _number(environment, "MASTER_PORT", 1, 65535, problems)
    missing = [n for n in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in environment]
    if missing:
        text = f"is set and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not"
        problems.append(Problem(("RANK",), f"{text}: {_REMEDY}"))
    if rank is not None and size is not None and rank >= size:
        text = f"{rank} is not one of the WORLD_SIZE = {size} ranks, counted from 0"
        problems.append(Problem(("RANK",), text))
    return Launched(rank, size, tuple(problems), added)


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables for a job step of several tasks that ``srun`` started; else empty.

    A batch script is no job step: commands in it start local processes. The first node of the step
    has rank 0. The port depends on job and step, so that two steps on one node do not collide.
    """
    size = environment.get(_SLURM_SIZE, "1")
    if size in ("0", "1"):
        return {}
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = int(job if job.isdigit() else 0) * 31 + int(step if step.isdigit() else 0)
    # The first host of the list: of node[007-010,012],other it is node007.
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^,\[]*)(?:\[([^],-]*)[^]]*\]([^,]*))?", nodes)
    node = "".join(part or "" for part in first.groups()) if first else ""
    found = {
        "RANK": environment.get("SLURM_PROCID", ""),
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", ""),
        "MASTER_ADDR": environment.get("MASTER_ADDR", node),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20000 + number % 10000)),
    }
    # A value that Slurm does not give stays unset and is reported: never start a run of one rank.
    return {name: value for name, value in found.items() if value}


def _number(
    environment: Mapping[str, str], name: str, least: int, most: int, problems: list[Problem]
) -> int | None:
    """The variable's value; ``None`` if it is not set, or not valid (which adds a problem)."""
    text = environment.get(name)
    if text is None:
        return None
    # As torch reads it, but without signs, blanks and digits of other scripts; of limited length.
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    wanted = f"expected a whole number from {least} to {most}"
    problems.append(Problem((name,), f'{wanted} in the environment, got "{shown}"; {_REMEDY}'))
    return None


def computing_threads() -> int:
    """Computing threads of a process: OMP_NUM_THREADS; 1 without it, as under torchrun."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return max(1, int(first)) if first.isdecimal() else 1
