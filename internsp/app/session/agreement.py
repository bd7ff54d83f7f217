"""Run a function on some ranks and give every rank the same result, or the same error.

If one rank raised alone, the others would wait forever in their next collective. These functions
are collective over all ranks, and raise on all of them or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from internsp.errors import MACHINE_ERRNOS, ConfigError, InternspError, MachineError

T = TypeVar("T")


def on_first_rank(work: Callable[[], T]) -> T:
    """Run ``work()`` on rank 0 and return its result on every rank. Collective; blocks.

    Raises:
        Exception: on every rank, with the message of rank 0, if ``work()`` raised there.
    """
    outcome: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [(work(), None)]
        except Exception as error:  # noqa: BLE001 - the other ranks would wait in the broadcast
            failure, outcome = error, [(None, _portable(error))]
    dist.broadcast_object_list(outcome, src=0)
    value, shared = outcome[0]
    if shared is not None:
        raise failure or shared
    result: T = value
    return result


def on_every_rank(work: Callable[[], T]) -> list[T]:
    """Run ``work()`` on every rank and return all results, by rank. Collective; blocks.

    Raises:
        Exception: on every rank, the error of the lowest rank whose ``work()`` raised.
    """
    value, failure = None, None
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 - the other ranks would wait in the all-gather
        failure = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (value, None if failure is None else _portable(failure)))
    for rank, (_, raised) in enumerate(outcomes):
        if raised is not None:
            raise (failure if rank == dist.get_rank() and failure else raised)
    return [found for found, _ in outcomes]


def _portable(error: Exception) -> Exception:
    """An error that can be pickled and sent to other ranks; it keeps the message of ``error``."""
    if isinstance(error, InternspError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        message = f"{error.strerror} (on rank {dist.get_rank()})"
        return OSError(error.errno, message, error.filename)
    return InternspError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Turn errors of files and of ``torch.distributed.checkpoint`` into one-line errors.

    For code in which all ranks raise together. torch's ``CheckpointException`` is no subclass of
    ``Exception`` and holds the stack trace of every rank.

    Raises:
        ConfigError: some rank raised a ``ConfigError``.
        MachineError: some rank had no disk space left, or lacked another resource.
        InternspError: some rank raised another error; the message names the rank and the cause.
    """
    try:
        yield
    except CheckpointException as error:
        _raise(what, error)
    except OSError as error:
        kind = MachineError if error.errno in MACHINE_ERRNOS else InternspError
        raise kind(f"{what}: {error}") from error


def _raise(what: str, error: CheckpointException) -> NoReturn:
    failures = sorted(error.failures.items())
    rank, (cause, _) = next(
        ((rank, pair) for rank, pair in failures if isinstance(pair[0], ConfigError)), failures[0]
    )
    if isinstance(cause, ConfigError):
        raise ConfigError(str(cause)) from None
    for number, (met, _) in failures:  # a full disk breaks torch's writers, too: find its OSError
        below: BaseException | None = met
        while below is not None:
            if isinstance(below, OSError) and below.errno in MACHINE_ERRNOS:
                raise MachineError(f"{what}: rank {number}: OSError: {below}") from below
            below = below.__cause__ or below.__context__
    raise InternspError(f"{what}: rank {rank}: {type(cause).__name__}: {cause}") from cause
