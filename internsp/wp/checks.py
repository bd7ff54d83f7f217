"""What is checked at each forward of a model, and confirmed at the end of its backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class RootCheck(Protocol):
    """Compares ranks while a pass runs, as :class:`internsp.sp.same_batch.SameBatch` does."""

    def check(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Start the check of a forward, from the model's arguments."""

    def confirm(self) -> None:
        """As backward returns, before any gradient is complete: raise if they differ."""

    def reset(self) -> None:
        """After a failed pass: drop what is not confirmed."""
