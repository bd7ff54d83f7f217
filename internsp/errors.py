"""Errors a user can act on. Each message names the thing, the rank and the remedy."""

from __future__ import annotations

import errno

LACKING = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE,
    errno.EAGAIN,
})  # fmt: skip
"""What the machine lacks, as numbers of an ``OSError``: a :class:`MachineError`."""


class InternspError(Exception):
    """Base of every error that internsp raises about its own rules.

    Attributes:
        exit_status: what the command ends with: 1 for a run that failed, 2 for what the user gave,
            3 for what the machine lacks.
    """

    exit_status = 1


class ConfigError(InternspError, ValueError):
    """A configuration is wrong; the message lists every mistake, one a line."""

    exit_status = 2


class MeshError(InternspError, ValueError):
    """Degrees that do not fit the number of ranks, or a mesh used by a foreign rank."""

    exit_status = 2


class LayoutError(InternspError, ValueError):
    """A sequence, head or weight layout that cannot be cut as asked."""

    exit_status = 2


class StructureError(InternspError, ValueError):
    """A model in which blocks or prefetch triggers could not be found (WP-7); lists candidates."""

    exit_status = 2


class PoolError(InternspError, RuntimeError):
    """A slot was leased while in use, or a lease used after its end (WP-4)."""


class OrderError(InternspError, RuntimeError):
    """Blocks ran, or collectives were launched, in another order than declared (WP-2)."""


class StaleWeightError(InternspError, RuntimeError):
    """A saved view of a slot was about to be used with other contents (WP-14)."""


class GradientError(InternspError, RuntimeError):
    """A gradient was read before it was finished, or asked for in an unsupported way (WP-9)."""


class NotFiniteError(InternspError, RuntimeError):
    """Gradients stayed not finite for too many steps, or weights that are not were to be kept."""


class ReplicaError(InternspError, RuntimeError):
    """Ranks that should hold the same weights hold different ones."""


class CollectiveError(InternspError, RuntimeError):
    """A collective failed, or an earlier failure left the groups unusable (WP-10)."""


class MachineError(InternspError, RuntimeError):
    """The machine lacks what the run needs: a device, memory, room on a disk, a permission."""

    exit_status = 3


class MissingDependencyError(InternspError, ImportError):
    """An optional package that was asked for by name is absent; gives the install line."""

    exit_status = 3
