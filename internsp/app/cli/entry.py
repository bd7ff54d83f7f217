"""The ``internsp`` program: its command, or the line that installs what the command needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from internsp.base.extras import explained
from internsp.errors import MissingDependencyError


def main(argv: Sequence[str] | None = None) -> int:
    """Run :func:`internsp.app.cli.command.main`, and return its exit status.

    Args:
        argv: arguments without the program's name; ``None``: those of this process.
    """
    try:
        from internsp.app.cli.command import main as command
    except ModuleNotFoundError as error:
        found = explained(error, "the command")
        if not isinstance(found, MissingDependencyError):
            raise
        print(f"internsp: {found}", file=sys.stderr)
        return found.exit_status
    return command(argv)
