"""Errors that a user can act on. Each message names the object, the rank and the remedy."""

from __future__ import annotations

import errno

MACHINE_ERRNOS = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE,
    errno.EAGAIN,
})  # fmt: skip
"""Values of ``OSError.errno`` for resources that the machine lacks (:class:`MachineError`)."""


class InternspError(Exception):
    """Base of every error that internsp raises about its own rules.

    Attributes:
        exit_status: exit status of the command: 1 for a failed run, 2 for a mistake of the user, 3
            for a resource that the machine lacks.
    """

    exit_status = 1


class ConfigError(InternspError, ValueError):
    """A configuration is wrong; the message lists the mistakes (the first 30), one a line."""

    exit_status = 2


class MeshError(InternspError, ValueError):
    """A mesh cannot be made: degrees do not fit the number of ranks, or ranks differ in them."""

    exit_status = 2


class LayoutError(InternspError, ValueError):
    """A sequence, heads or a weight cannot be split as requested, or ranks differ in it."""

    exit_status = 2


class StructureError(InternspError, ValueError):
    """A model is not supported. If blocks or triggers were not found (WP-7): lists candidates."""

    exit_status = 2


class PoolError(InternspError, RuntimeError):
    """A byte range of a slot was acquired while in use, or used after its release (WP-4)."""


class OrderError(InternspError, RuntimeError):
    """Blocks ran, or collectives were launched, in another order than the declared one (WP-2)."""


class StaleWeightError(InternspError, RuntimeError):
    """A saved view of a slot would have been used after the slot's contents changed (WP-14)."""


class GradientError(InternspError, RuntimeError):
    """A gradient was read before its reduction finished, or requested in a wrong way (WP-9)."""


class NotFiniteError(InternspError, RuntimeError):
    """Gradients were not finite for too many steps, or weights to be saved are not finite."""


class ReplicaError(InternspError, RuntimeError):
    """Ranks that should hold the same weights hold different ones."""


class CollectiveError(InternspError, RuntimeError):
    """A collective failed, or an earlier failure made the process groups unusable (WP-10)."""


class MachineError(InternspError, RuntimeError):
    """The machine lacks what the run needs: a device, memory, disk space, a permission."""

    exit_status = 3


class MissingDependencyError(InternspError, ImportError):
    """An optional package that was requested by name is missing; gives the install command."""

    exit_status = 3
