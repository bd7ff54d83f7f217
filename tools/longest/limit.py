"""Memory of one process on Linux: usage, a limit, and memory outside the limit.

The limit is ``RLIMIT_DATA``: private writable memory (the allocator's, stacks of threads), beyond
what libraries had allocated before. Shared mappings do not count.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import threading
import time
import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from internsp.base.host import HostLink
from internsp.parallel import build
from tools.bench.memory import status

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt
LARGE = 1 << 13  # bytes; below any matrix: freed matrices must not stay in the arena
LOOK = 0.002  # seconds between two readings of a process's memory


def return_memory() -> None:
    """Make the allocator return blocks of :data:`LARGE` bytes when they are freed, as a plan
    assumes, and use one arena for all threads. For the rest of this process."""
    libc = ctypes.CDLL(None)
    for key, value in ((M_MMAP_THRESHOLD, LARGE), (M_TRIM_THRESHOLD, LARGE), (M_ARENA_MAX, 1)):
        libc.mallopt(key, value)


def limit(more: int) -> None:
    """Allow this process so many bytes beyond its current usage."""
    most = status("VmData") + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


class Peak:
    """Samples the limited memory of this process, inside ``with``.

    Attributes:
        most: the largest sample in bytes, beyond the usage before.
    """

    def __init__(self) -> None:
        self.most = 0
        self._before = 0
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()  # its stack counts as private memory, so start it before any limit

    def __enter__(self) -> Peak:
        self._before = status("VmData")
        self._begun.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        self._begun.wait()
        while not self._over.is_set():
            self.most = max(self.most, status("VmData") - self._before)
            time.sleep(LOOK)


class SharedLink(HostLink):
    """A host link with memory in a shared mapping, which is outside the limit of private memory.

    If the model computes on the CPU, this separates a device's host memory from its own memory.
    """

    def empty(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See :meth:`HostLink.empty`."""
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return super().empty(what, shape, dtype)
        place = mmap.mmap(-1, nbytes)  # anonymous and shared; unmapped with the tensor
        made = torch.frombuffer(place, dtype=dtype, count=prod(shape)).view(tuple(shape))
        self.allocated.update({what: nbytes})
        weakref.finalize(made, self.allocated.subtract, {what: nbytes})
        return made


def install() -> None:
    """Models parallelized from now on in this process offload to memory outside the limit."""
    build.HostLink = SharedLink  # type: ignore[misc]
