"""Errors of files and of ``torch.distributed.checkpoint`` as one-line errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch.distributed.checkpoint.api import CheckpointException

from internsp.errors import MACHINE_ERRNOS, ConfigError, InternspError, MachineError


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
