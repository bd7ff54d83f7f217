"""What one rank finds out, every rank learns: verdicts that all ranks share.

A rank that raised alone would leave the others waiting in their next collective. These functions
are collective over all ranks, and raise on all of them or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from internsp.errors import LACKING, ConfigError, InternspError, MachineError

T = TypeVar("T")


def from_first(work: Callable[[], T]) -> T:
    """What ``work()`` returns on rank 0, which alone runs it; or raise what it raised there.

    Raises:
        Exception: on every rank, with rank 0's words.
    """
    outcome: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [(work(), None)]
        except Exception as error:  # noqa: BLE001 - or the others would wait
            failure, outcome = error, [(None, _shared(error))]
    dist.broadcast_object_list(outcome, src=0)
    value, shared = outcome[0]
    if shared is not None:
        raise failure or shared
    result: T = value
    return result


def on_every_rank(work: Callable[[], T]) -> list[T]:
    """What ``work()`` returns on each rank, by rank; or raise what the first rank raised.

    Raises:
        Exception: on every rank, with the words of the lowest rank that raised.
    """
    value, failure = None, None
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 - or the others would wait
        failure = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (value, None if failure is None else _shared(failure)))
    for rank, (_, raised) in enumerate(outcomes):
        if raised is not None:
            raise (failure if rank == dist.get_rank() and failure else raised)
    return [found for found, _ in outcomes]


def _shared(error: Exception) -> Exception:
    """``error`` as other ranks can have it: what need not pickle comes as its words."""
    if isinstance(error, InternspError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        said = f"{error.strerror} (on rank {dist.get_rank()})"
        return OSError(error.errno, said, error.filename)
    return InternspError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Errors of files and of torch's checkpointing, which all ranks raise together, in one line.

    torch's ``CheckpointException`` is no ``Exception`` and holds every rank's stack.

    Raises:
        ConfigError: some rank raised one.
        MachineError: some rank has no room, or the like.
        InternspError: some rank raised anything else; the message names rank and cause.
    """
    try:
        yield
    except CheckpointException as error:
        _raise(what, error)
    except OSError as error:
        kind = MachineError if error.errno in LACKING else InternspError
        raise kind(f"{what}: {error}") from error


def _raise(what: str, error: CheckpointException) -> NoReturn:
    failures = sorted(error.failures.items())
    rank, (cause, _) = next(
        ((rank, pair) for rank, pair in failures if isinstance(pair[0], ConfigError)), failures[0]
    )
    if isinstance(cause, ConfigError):
        raise ConfigError(str(cause)) from None
    for number, (met, _) in failures:  # a full disk breaks torch's writers, too: what is below?
        below: BaseException | None = met
        while below is not None:
            if isinstance(below, OSError) and below.errno in LACKING:
                raise MachineError(f"{what}: rank {number}: OSError: {below}") from below
            below = below.__cause__ or below.__context__
    raise InternspError(f"{what}: rank {rank}: {type(cause).__name__}: {cause}") from cause
