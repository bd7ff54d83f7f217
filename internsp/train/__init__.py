"""The training application: data, training loop, metrics, report and checkpoints.

The package can be called: ``internsp.train(config)`` is :func:`internsp.train.trainer.train`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that can also be called like a function."""

    def __call__(self, *args: Any, **options: Any) -> Path:
        """See :func:`internsp.train.trainer.train`."""
        from internsp.train.trainer import train

        return train(*args, **options)


sys.modules[__name__].__class__ = _Callable
