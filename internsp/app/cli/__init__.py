"""The ``internsp`` command, and the processes that it starts."""

from internsp.app.cli.command import main

__all__ = ["main"]
