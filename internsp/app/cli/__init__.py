"""The ``internsp`` command."""

from internsp.app.cli.command import main

__all__ = ["main"]
