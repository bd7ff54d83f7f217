"""The ``internsp`` program: its command, or the line that installs what the command needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from internsp.base.extras import explained
from internsp.errors import MissingDependencyError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run :func:`internsp.app.cli.command.main`, and return its exit status.

    Args:
        argv: arguments without the program's name; ``None``: those of this process.
    """
    _open_closed_streams()
    try:
        from internsp.app.cli.command import main as command

        return command(argv)
    except ModuleNotFoundError as error:
        found = explained(error, "the command")
        if not isinstance(found, MissingDependencyError):
            raise
        print(f"internsp: {found}", file=sys.stderr)
        return found.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED


def _open_closed_streams() -> None:
    """Open what the caller has closed (``>&-``, a daemon): the next file would have its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode)
            os.set_inheritable(stream.fileno(), True)  # by ranks
            setattr(sys, name, stream)
