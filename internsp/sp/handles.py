"""Numbers that stand for living objects, in calls of custom operators.

An operator of ``torch.library`` takes tensors and plain numbers only. The object behind a number
is held weakly: it lives as long as its module or the graph that needs it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Generic, TypeVar

from internsp.errors import CollectiveError

T = TypeVar("T")


class Handles(Generic[T]):
    """The objects of one kind; no settings stand here (WP-8).

    Args:
        what: what is gone if an object's owner was deleted before the backward, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._numbers = itertools.count(1)
        self._living: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def give(self, one: T) -> int:
        """A number for ``one``."""
        number = next(self._numbers)
        self._living[number] = one
        return number

    def living(self) -> list[T]:
        """The objects that still live."""
        return list(self._living.values())

    def find(self, number: int) -> T:
        """The object behind a number.

        Raises:
            CollectiveError: its owner was deleted.
        """
        found = self._living.get(number)
        if found is None:
            raise CollectiveError(
                f"The {self._what} is gone: its DistributedAttention object was deleted before "
                "the backward. Keep the model alive until backward has returned."
            )
        return found
