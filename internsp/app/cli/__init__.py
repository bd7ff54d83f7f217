"""The ``internsp`` command."""

from internsp.app.cli.entry import main

__all__ = ["main"]
