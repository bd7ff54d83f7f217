"""Ends a rank when the process that started it ends, in any way (SIGKILL runs no handler)."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_SECONDS = 1.0
LAUNCHER_VARIABLE = "INTERNSP_LAUNCHER"
"""Environment of local ranks and their server: process id of the launcher."""


def end_with_launcher() -> None:
    """End this rank (SIGKILL) as soon as its launcher has ended; returns at once.

    The launcher is the process that started a local rank through multiprocessing, or the agent of
    ``torchrun``. If neither started this process (SLURM, MPI, by hand), this does nothing: those
    launchers end their ranks themselves, and a rank's parent process may end before the rank.

    Two mechanisms, since each has a gap. The kernel ends this process with its parent, even if it
    is stopped or in a call that holds the interpreter lock (Linux only; the parent of a local rank
    is the fork server, which ends with the launcher: :mod:`internsp.app.launch.fork_server`). A
    thread notices on every system that the launcher itself has ended.
    """
    launcher, before = multiprocessing.parent_process(), os.getppid()
    if launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return

    def watch() -> None:
        if launcher is not None:
            launcher.join()  # waits for a pipe that only the launcher holds
        while launcher is None and os.getppid() == before:
            time.sleep(_LOOK_SECONDS)
        _end()

    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != before:  # the parent ended meanwhile: no signal will come
        _end()
    threading.Thread(target=watch, name="launcher", daemon=True).start()


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; Linux only.

    To the kernel the parent is the thread that created this process, so call it only if that thread
    lives as long as the parent process. The parent may have ended before the call: compare
    ``os.getppid()`` afterwards. Children do not inherit it.
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
            with contextlib.suppress(OSError, ValueError):  # ended, another user's, or not a rank
                variables = (place / "environ").read_bytes().decode(errors="replace").split("\0")
                found += [int(v.removeprefix("RANK=")) for v in variables if v.startswith("RANK=")]
    return sorted(found)


def ended(pid: int) -> bool:
    """Whether a process of this machine has ended (or is a zombie that its parent must reap)."""
    return _state(pid)[0] in ("", "Z")


def _state(pid: int) -> tuple[str, str]:
    """State and parent of a process, as in /proc; empty texts if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    # After the command's name, which is in brackets and may contain brackets itself.
    state, parent, *_ = text.rpartition(")")[2].split()
    return state, parent


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
