"""Ranks that agree by a process group: while a run is set up, and in the application (WP-10).

If one rank raised alone, the others would wait forever in their next collective: a function that
may fail on one rank runs in :meth:`Objects.on_first` or :meth:`Objects.on_every`, which raise on
all ranks or on none. Where a rank may have failed already, see :mod:`internsp.failure.consensus`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from internsp.errors import InternspError

T = TypeVar("T")


class Objects:
    """The ranks of a process group, which exchange objects. All methods are collective; they block.

    Args:
        group: ``None``: all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._rank = group, dist.get_rank(group)

    def gather(self, mine: T) -> list[T]:
        """The object of every rank, by rank in the group."""
        everyone: list[Any] = [mine] * dist.get_world_size(self._group)
        if len(everyone) > 1:
            dist.all_gather_object(everyone, mine, group=self._group)
        return everyone

    def on_first(self, work: Callable[[], T]) -> T:
        """Run ``work()`` on the group's first rank and return its result on every rank.

        Raises:
            Exception: on every rank, with the message of the first, if ``work()`` raised there.
        """
        value, error, told = _outcome(work) if self._rank == 0 else (None, None, None)
        shared: list[Any] = [(value, told)]
        dist.broadcast_object_list(shared, group=self._group, group_src=0)
        found, told = shared[0]
        if told is not None:
            raise error or told
        result: T = found
        return result

    def on_every(self, work: Callable[[], T]) -> list[T]:
        """Run ``work()`` on every rank and return all results, by rank in the group.

        Raises:
            Exception: on every rank, the error of the lowest rank whose ``work()`` raised.
        """
        value, error, mine = _outcome(work)
        outcomes: list[Any] = self.gather((value, mine))
        for rank, (_, told) in enumerate(outcomes):
            if told is not None:
                raise error if rank == self._rank and error is not None else told
        return [found for found, _ in outcomes]

    def here(self, work: Callable[[], T]) -> T:
        """As :meth:`on_every`, but returns this rank's result, which is sent to no other rank."""
        made: list[T] = []
        self.on_every(lambda: made.append(work()))
        return made[0]

    def name(self) -> str:
        """A name that no other call returns, the same on all ranks."""
        return self.on_first(lambda: uuid.uuid4().hex)


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None, Exception | None]:
    """What ``work()`` returned; the error that it raised; what is sent of that to other ranks."""
    try:
        return work(), None, None
    except InternspError as error:
        return None, error, error
    except Exception as error:  # noqa: BLE001 - the other ranks would wait in the collective
        rank = dist.get_rank()
        told: Exception = InternspError(f"rank {rank}: {type(error).__name__}: {error}")
        if isinstance(error, OSError) and error.errno is not None:
            message = f"{error.strerror} (on rank {rank})"
            told = OSError(error.errno, message, error.filename)
        return None, error, told
