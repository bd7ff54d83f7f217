"""What torch's checkpoints raise, as one message with its first cause."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from internsp.errors import CheckpointError, InternspError, MachineError

# What no program can mend: a disk, a quota or a permission.
_MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE,
)  # fmt: skip


@contextmanager
def checkpoint_causes(doing: str, path: Path) -> Iterator[None]:
    """Around saving or loading: what one rank met is one error on every rank.

    torch raises a ``BaseException`` that no ``except Exception`` sees, whose text is the traceback
    of every rank.

    Args:
        doing: "saving a checkpoint" or so, for the message.

    Raises:
        MachineError: no room, no permission, or the like.
        CheckpointError: anything else that torch's checkpoints raised.
    """
    try:
        yield
    except CheckpointException as error:
        raise _clear(error, doing, path) from None


def _clear(error: CheckpointException, doing: str, path: Path) -> InternspError:
    causes = [(_root(wrapped[0]), rank) for rank, wrapped in sorted(error.failures.items())]
    # A full disk breaks torch's own writer, too; the system's error says why.
    cause, rank = next((pair for pair in causes if _is_machine(pair[0])), causes[0])
    if isinstance(cause, InternspError):
        return cause
    text = f"{doing} in {path} failed: rank {rank}: {type(cause).__name__}: {cause}"
    if _is_machine(cause):
        return MachineError(f"{text}; make room there or give the permission, and resume")
    return CheckpointError(text)


def _is_machine(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _MACHINE


def _root(error: BaseException) -> BaseException:
    """The system's error below what was raised, or the first one of all."""
    first = error
    while first.__cause__ is not None or first.__context__ is not None:
        first = first.__cause__ or first.__context__  # type: ignore[assignment]
        if _is_machine(first):
            return first
    return error if isinstance(error, InternspError) else first
