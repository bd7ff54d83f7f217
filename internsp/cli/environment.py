"""What a launcher such as torchrun put into the environment, read and checked before torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from internsp.config.errors import Problem

_MOST_RANKS = 1 << 20
_REMEDY = "start with torchrun, which sets all of them, or unset them to start local processes"


@dataclass(frozen=True)
class Launched:
    """This process as a launcher sees it.

    Attributes:
        rank: ``None``: no launcher started this process.
        world_size: of the launcher; ``None``: it gives none.
        problems: variables that are missing or make no sense.
    """

    rank: int | None
    world_size: int | None
    problems: tuple[Problem, ...]

    @property
    def reports(self) -> bool:
        """Whether this process tells about mistakes: one of a run does."""
        return not self.rank


def launched(environment: Mapping[str, str], joins: bool) -> Launched:
    """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        joins: the command would join the launcher's ranks; ``plan`` only takes their number.
    """
    problems: list[Problem] = []
    size = _number(environment, "WORLD_SIZE", 1, _MOST_RANKS, problems)
    if not joins:
        return Launched(None, size, tuple(problems))
    if "RANK" not in environment:
        if "WORLD_SIZE" in environment:
            text = f"is set and RANK is not: {_REMEDY}"
            problems.append(Problem(("WORLD_SIZE",), text))
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
    return Launched(rank, size, tuple(problems))


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
