"""A rank lives no longer than what started it, however that ends (a SIGKILL runs no handler)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_SECONDS = 1.0
LAUNCHER_VARIABLE = "INTERNSP_LAUNCHER"
FOLDER_VARIABLE = "INTERNSP_SOCKET_FOLDER"
"""Environment of local ranks and their server: the launcher's process, where the socket is."""


def end_with_launcher() -> None:
    """End this rank (SIGKILL) as soon as its launcher is gone; returns at once.

    The launcher is the process that started a local rank through multiprocessing, or the agent of
    ``torchrun``. Where neither started this process (SLURM, MPI, by hand), this does nothing: they
    end their ranks themselves, and the process that started one may end before it.

    Two ways, since each lacks something. The kernel ends this process with its parent, even
    stopped or within a call that holds the interpreter (Linux only; the parent of a local rank is
    the fork server, which itself ends with the launcher: :mod:`internsp.cli.fork_server`). A thread
    notices everywhere that the launcher itself is gone.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        gone: Callable[[], object] = parent.join  # the end of a pipe that only the launcher holds
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        gone = functools.partial(_wait_for_new_parent, os.getppid())
    else:
        return
    before = os.getppid()
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != before:  # it ended meanwhile: no signal will come
        _end()
    threading.Thread(target=_end_after, args=(gone,), name="launcher", daemon=True).start()


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; Linux only.

    The kernel means the parent's thread that made this process: call it only where that thread
    lives as long as the parent does. The parent may have ended before the call: compare
    ``os.getppid()`` afterwards. Not inherited by children.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped (SIGSTOP, SIGTSTP, a debugger); Linux only."""
    return _state(pid)[0] in ("T", "t")


def stopped_ranks(parent: int) -> list[int]:
    """Ranks of torchrun that are stopped, among the children of its agent; Linux only."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        if is_stopped(int(place.name)) and _state(int(place.name))[1] == str(parent):
            with contextlib.suppress(OSError, ValueError):  # ended, another user's, or no rank
                variables = (place / "environ").read_bytes().decode(errors="replace").split("\0")
                found += [int(v.removeprefix("RANK=")) for v in variables if v.startswith("RANK=")]
    return sorted(found)


def ended(pid: int) -> bool:
    """Whether there is no such process on this machine, or only what its parent has to read."""
    return _state(pid)[0] in ("", "Z")


def _state(pid: int) -> tuple[str, str]:
    """A process's state and parent, as /proc writes them; empty texts where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    # After the name, which stands in brackets and may hold brackets itself.
    state, parent, *_ = text.rpartition(")")[2].split()
    return state, parent


def remove_socket_folder() -> None:
    """Remove what a killed launcher of local ranks can no longer remove."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
    if folder.name.startswith("pymp-"):  # multiprocessing's, and nothing that a user may have named
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_new_parent(old: int) -> None:
    while os.getppid() == old:
        time.sleep(_LOOK_SECONDS)


def _end_after(gone: Callable[[], object]) -> None:
    gone()
    if multiprocessing.parent_process() is not None:
        remove_socket_folder()
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
