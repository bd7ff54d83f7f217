"""What is known of a failure where no hook of ours sees it: a backward, or a process that ends.

Autograd tells no hook that a backward has failed, and an exception in a loss or between two steps
passes none of our code. A rank that waits for this one is told all the same (WP-10).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any


class EndOfBackward:
    """For ``queue_callback``: calls ``ended`` at the end of a backward, ``failed`` if none comes or
    ``ended`` raises.

    The engine drops its callbacks where a backward raises, before the exception reaches its caller;
    which exception that is, nothing tells here.
    """

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended = ended
        self._failed: Callable[[], None] | None = failed

    def __call__(self) -> None:
        """The engine has come to the end of the backward."""
        failed, self._failed = self._failed, None
        try:
            self._ended()
        except Exception:
            if failed is not None:
                failed()
            raise

    def __del__(self) -> None:
        if self._failed is not None and not sys.is_finalizing():
            self._failed()


def when_process_ends(owner: Any, tell: Callable[[Any, BaseException | None], None]) -> None:
    """Call ``tell(owner, error)`` when this process ends by an uncaught exception, or by none.

    It runs while connections are still open, in a process of :mod:`multiprocessing` too. ``owner``
    is held weakly, and nothing is left once it has gone. A plain program's ``sys.exit`` leaves no
    trace, so that it looks like the program's last line.
    """
    reference = weakref.ref(owner)

    def ending() -> None:
        alive = reference()
        if alive is not None:
            tell(alive, uncaught())

    last = Finalize(None, ending, exitpriority=100)
    # It has no more to say once the owner has gone; at the process's end it shall speak first.
    weakref.finalize(owner, last.cancel).atexit = False


def uncaught() -> BaseException | None:
    """The exception by which this process ends, asked while it ends; ``None`` if by none.

    The interpreter keeps it for a program, and a process of :mod:`multiprocessing` is still in its
    handling. ``sys.exit`` in a handler stands for what is being handled.
    """
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # a prompt has shown it and gone on
        error = getattr(sys, "last_value", None)
    while isinstance(error, SystemExit):
        error = error.__context__
    return error
