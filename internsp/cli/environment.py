"""What a launcher (torchrun, srun) put into the environment, read and checked before torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from internsp.config.errors import Problem

_MOST_RANKS = 1 << 20
_SLURM_SIZE = "SLURM_STEP_NUM_TASKS"  # of steps alone
_OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", _SLURM_SIZE)
"""What other launchers say of their number of processes."""
_REMEDY = "start with torchrun, which sets all of them, or unset them to start local processes"


@dataclass(frozen=True)
class Launched:
    """This process as a launcher sees it.

    Attributes:
        rank: ``None``: no launcher started this process.
        world_size: of the launcher; ``None``: it gives none.
        problems: variables that are missing or make no sense.
        variables: what torch must find in the environment besides, from what the launcher gives.
    """

    rank: int | None
    world_size: int | None
    problems: tuple[Problem, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def reports(self) -> bool:
        """Whether this process tells about mistakes: one of a run does."""
        return not self.rank


def launched(environment: Mapping[str, str], joins: bool) -> Launched:
    """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Where ``srun`` has started several tasks and ``RANK`` is not set, they come from its variables.

    Args:
        joins: the command would join the launcher's ranks; ``plan`` only takes their number.
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
    """torch's variables, of a step of several tasks that ``srun`` has started; else none.

    A batch script is no step: what it calls starts local processes. The first node of the step has
    rank 0, and the port follows from the job and the step, so that two on one node do not meet.
    """
    size = environment.get(_SLURM_SIZE, "1")
    if size in ("0", "1"):
        return {}
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = int(job if job.isdigit() else 0) * 31 + int(step if step.isdigit() else 0)
    node = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    found = {
        "RANK": environment.get("SLURM_PROCID", ""),
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", ""),
        "MASTER_ADDR": environment.get("MASTER_ADDR", node),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20000 + number % 10000)),
    }
    # What srun does not say stays unset, and is told with the rest: never a run of one.
    return {name: value for name, value in found.items() if value}


def _first_host(nodes: str) -> str:
    """The first of a SLURM list: ``node[007-010,012],other`` is ``node007``."""
    first = re.match(r"([^,\[]*)(?:\[([^],-]*)[^]]*\]([^,]*))?", nodes)
    return "" if first is None else "".join(part or "" for part in first.groups())


def _number(
    environment: Mapping[str, str], name: str, least: int, most: int, problems: list[Problem]
) -> int | None:
    """The variable's value; ``None``: not set, or (one more problem) no sense in it."""
    text = environment.get(name)
    if text is None:
        return None
    # As torch reads it, but for signs, blanks and other scripts' digits; no longer than a number.
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    wanted = f"expected a whole number from {least} to {most}"
    problems.append(Problem((name,), f'{wanted} in the environment, got "{shown}"; {_REMEDY}'))
    return None
