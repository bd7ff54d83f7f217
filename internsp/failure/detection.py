"""Detects failures that no module hook sees: a backward that raises, a process that ends.

Autograd calls no hook when a backward fails, and an exception in a loss or between two steps does
not pass through internsp. The ranks that wait for this rank must learn of it all the same (WP-10).
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

# Errors that a rank gets because another rank ended or did not arrive: never the first cause.
_CONSEQUENCES = (
    # gloo and the store
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "timeout caused pair closure",
    "wait timeout",
    "barrier timeout",
    # NCCL, and torch's watchdog for it
    "caught collective operation timeout",
    "nccl communicator was aborted",
    "connection closed by remote peer",
    "ncclremoteerror",
    "remote process exited or there was a network error",
    "some nccl operations have failed or timed out",
)


class PostBackwardCallback:
    """A callback for the autograd engine's ``queue_callback`` that also detects a failed backward.

    Calls ``on_end`` at the end of the backward, and ``on_failure`` if the backward or ``on_end``
    raises. If a backward raises, the engine deletes its callbacks without a call, before the
    exception reaches the caller of ``backward()``; the exception is not known here.
    """

    def __init__(self, on_end: Callable[[], None], on_failure: Callable[[], None]) -> None:
        self._on_end = on_end
        self._on_failure: Callable[[], None] | None = on_failure

    def __call__(self) -> None:
        """Called by the engine at the end of the backward."""
        on_failure, self._on_failure = self._on_failure, None
        try:
            self._on_end()
        except Exception:
            if on_failure is not None:
                on_failure()
            raise

    def __del__(self) -> None:
        if self._on_failure is not None and not sys.is_finalizing():
            self._on_failure()


def call_at_exit(owner: Any, callback: Callable[[Any, BaseException | None], None]) -> None:
    """Call ``callback(owner, error)`` when this process ends.

    ``error`` is the uncaught exception, or ``None``. A program's ``sys.exit`` cannot be detected:
    it looks as if the program had ended after its last line. The callback runs while connections
    are still open, also in a process of :mod:`multiprocessing`. ``owner`` is held weakly; once it
    is deleted, the callback is dropped.
    """
    reference = weakref.ref(owner)

    def at_exit() -> None:
        alive = reference()
        if alive is not None:
            callback(alive, uncaught_exception())

    finalizer = Finalize(None, at_exit, exitpriority=100)
    # Drop the callback when the owner is deleted. Not at exit, where it must run before that.
    weakref.finalize(owner, finalizer.cancel).atexit = False


def uncaught_exception() -> BaseException | None:
    """The exception that ends this process, or ``None``. Call it while the process ends.

    The interpreter keeps the exception of a program in ``sys.last_value``; a process of
    :mod:`multiprocessing` is still handling it. If ``sys.exit`` was called in an ``except`` block,
    the exception that the block handled is returned.
    """
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # an interactive prompt goes on after an error
        error = getattr(sys, "last_value", None)
    while isinstance(error, SystemExit):
        error = error.__context__
    return error


def is_consequence(error: BaseException) -> bool:
    """Whether ``error`` only shows that another rank had ended or did not arrive."""
    # Searches the whole traceback: a pipeline stage wraps the error in one of its own.
    stack = "".join(traceback.format_exception(error)).lower()
    return any(sign in stack for sign in _CONSEQUENCES)
