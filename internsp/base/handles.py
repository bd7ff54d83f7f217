"""Integer handles by which custom operators name Python objects.

An operator of ``torch.library`` takes tensors and plain numbers only. The table holds the object of
a handle weakly: the object lives as long as its module or the autograd graph that needs it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Generic, TypeVar

from internsp.errors import CollectiveError

T = TypeVar("T")


class HandleTable(Generic[T]):
    """The objects of one kind, by handle. Holds no settings (WP-8).

    Args:
        what: what the objects are, for the error if one was deleted before the backward.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._handles = itertools.count(1)
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, value: T) -> int:
        """Return a new handle for ``value``."""
        handle = next(self._handles)
        self._objects[handle] = value
        return handle

    def find(self, handle: int) -> T:
        """Return the object of a handle.

        Raises:
            CollectiveError: the object was deleted, with the module that owned it.
        """
        found = self._objects.get(handle)
        if found is None:
            raise CollectiveError(
                f"The {self._what} is gone: the module that owned it was deleted before the "
                "backward. Keep the model alive until backward has returned."
            )
        return found
