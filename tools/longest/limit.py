"""The memory of one process on Linux: how much it has, a limit to it, and memory beside the limit.

What is limited is ``RLIMIT_DATA``: private memory that can be written (the allocator's, stacks of
threads), as far as it goes beyond what libraries had taken before. Shared mappings do not count.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import resource
import threading
import time
import weakref
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from internsp import parallel
from internsp.host import HostLink

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt
LARGE = 1 << 13  # bytes; smaller than any matrix, or what is freed of them stays in the arena
LOOK = 0.002  # seconds between two looks at a process's memory


def status(key: str) -> int:
    """Bytes of a line of ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


def return_memory() -> None:
    """Have the allocator give pieces of :data:`LARGE` bytes back when they are freed, as a plan
    takes it, and all threads share one arena. For the rest of this process."""
    libc = ctypes.CDLL(None)
    for key, value in ((M_MMAP_THRESHOLD, LARGE), (M_TRIM_THRESHOLD, LARGE), (M_ARENA_MAX, 1)):
        libc.mallopt(key, value)


def free() -> None:
    """Give all back that nothing needs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def limit(more: int) -> None:
    """This process may take so many bytes beyond what it has now."""
    most = status("VmData") + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


class Peak:
    """Looks at what of this process is limited, within ``with``.

    Attributes:
        most: bytes at most, beyond what was there before.
    """

    def __init__(self) -> None:
        self.most = 0
        self._before = 0
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()  # its stack counts as private memory: before any limit

    def __enter__(self) -> Peak:
        self._before = status("VmData")
        self._begun.set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        self._begun.wait()
        while not self._over.is_set():
            self.most = max(self.most, status("VmData") - self._before)
            time.sleep(LOOK)


class SharedLink(HostLink):
    """Its host memory is a shared mapping, which no limit of private memory counts.

    Where the host computes, that is what tells the host memory of a device from the device's own.
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
    """What models offload from now on, in this process, lies beside the limit."""
    parallel.HostLink = SharedLink  # type: ignore[misc]
