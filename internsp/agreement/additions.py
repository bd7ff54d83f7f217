"""Parameters and modules that a user adds after ``parallelize``, of which nothing here knows."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn

from internsp.errors import StructureError


class Additions:
    """The modules of a parallel model, compared at each forward (0.3 us a module).

    Args:
        known: ``(module, name)`` of every parameter that communication is attached to.
    """

    def __init__(self, model: nn.Module, known: Container[tuple[nn.Module, str]]) -> None:
        self._model = model
        self._known = known
        self._seen: list[tuple[Any, tuple[Any, ...], Any, int]] = []
        self._remember()

    def look(self) -> None:
        """At a forward.

        Raises:
            StructureError: a parameter was added.
        """
        for children, seen, parameters, count in self._seen:
            if len(parameters) != count or tuple(children.values()) != seen:
                self._search()
                self._remember()
                return

    def _remember(self) -> None:
        self._seen = [
            (m._modules, tuple(m._modules.values()), m._parameters, len(m._parameters))
            for m in self._model.modules()
        ]

    def _search(self) -> None:
        for path, module in self._model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and (module, name) not in self._known:
                    raise StructureError(
                        f"{path}.{name} was added after parallelize(), so that no rank would "
                        "share its gradient: build the whole model first, adapters included"
                    )
