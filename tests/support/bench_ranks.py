"""Ranks of the overlap benchmark from the tests' fork server, where torch is loaded already.

A process of its own takes five seconds of a core to import what it needs.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tools.bench import rank


class Started:
    """What the session asks of a ``Popen``."""

    def __init__(
        self,
        command: list[str],
        stdin: int,
        stdout: int,
        stderr: IO[bytes],
        env: dict[str, str],
        cwd: Path,
        start_new_session: bool,
    ) -> None:
        assert command == [sys.executable, "-m", "tools.bench.rank"]
        context = multiprocessing.get_context("forkserver")
        requests, send = context.Pipe(duplex=False)
        receive, replies = context.Pipe(duplex=False)
        self.stdin = os.fdopen(os.dup(send.fileno()), "wb")
        self.stdout = os.fdopen(os.dup(receive.fileno()), "rb")
        self._process = context.Process(
            target=serving, args=(requests, replies, stderr.name, env), daemon=True
        )
        self._process.start()
        for end in (requests, replies, send, receive):
            end.close()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def serving(requests: Any, replies: Any, log: bytes | str, environment: dict[str, str]) -> None:
    """``python -m tools.bench.rank`` in a process that has loaded torch."""
    os.environ.update(environment)
    os.dup2(requests.fileno(), 0)
    os.dup2(replies.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    for end in (requests, replies):
        end.close()
    sys.stdin = os.fdopen(0)
    rank.main()


# In place of the session's module ``subprocess``.
STARTED = SimpleNamespace(
    Popen=Started, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
)
