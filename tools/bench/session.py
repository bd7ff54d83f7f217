"""The parent: starts the ranks in their namespaces, asks all of them the same, ends them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from tools.bench.network import Deaf, Link
from tools.bench.options import Options

ROOT = Path(__file__).resolve().parents[2]
TRACE_LINES = 8


class RankError(RuntimeError):
    """A rank ended, hung, or failed where the others did not; carries what it said."""


class Refused(RuntimeError):
    """All ranks failed at the same request: that request only is lost.

    Attributes:
        reason: rank 0's error, one line.
        trace: the end of rank 0's traceback.
    """

    def __init__(self, call: str, reply: dict[str, Any]) -> None:
        self.reason: str = reply["error"].splitlines()[0]
        self.trace = "\n".join(reply["trace"].splitlines()[-TRACE_LINES:])
        super().__init__(f"every rank failed at {call}: {self.reason}\n{self.trace}")


class _Rank:
    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None, "made with a pipe"
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    @property
    def output(self) -> int:
        assert self.process.stdout is not None, "made with a pipe"
        return self.process.stdout.fileno()

    def read(self) -> dict[str, Any] | None:
        """The next reply, if it is complete. Call it when ``output`` is readable."""
        chunk = os.read(self.output, 1 << 20)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        reply: dict[str, Any] = json.loads(line)
        return reply

    def said(self, lines: int = 25) -> str:
        """The end of what it printed."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in text[-lines:])


class Session(AbstractContextManager["Session"]):
    """Processes of all ranks. ``ask`` sends one request to all and returns their answers.

    Args:
        link: decides where a rank runs and which interface it talks over.
    """

    def __init__(self, options: Options, link: Link) -> None:
        self.options = options
        self.link = link
        self._ranks: list[_Rank] = []
        self._home = tempfile.TemporaryDirectory(prefix="ispbench-")

    def __enter__(self) -> Session:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with Deaf():
            self._end()

    def _start(self) -> None:
        home = Path(self._home.name)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.link.interface,
        }
        for rank in range(self.options.size("ranks")):
            command = [*self.link.command(rank), sys.executable, "-m", "tools.bench.rank"]
            extra = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.options.ranks),
            }
            self._ranks.append(_Rank(command, {**environment, **extra}, home / f"rank{rank}.log"))
            self._ranks[-1].send(
                {
                    "options": self.options.to_json(),
                    "rank": rank,
                    "store": str(home / "store"),
                    "interface": self.link.interface,
                }
            )

    def ask(self, call: str, **arguments: Any) -> list[Any]:
        """Send a request to every rank and wait for every answer.

        Returns:
            The answers by rank.

        Raises:
            RankError: when a rank ended, did not answer in time, or failed alone.
            Refused: when all ranks failed.
        """
        for rank in self._ranks:
            try:
                rank.send({"call": call, **arguments})
            except BrokenPipeError:
                raise self._lost(rank) from None
        replies = self._collect(call)
        failed = {i: r for i, r in enumerate(replies) if "error" in r}
        if len(failed) == len(replies):
            raise Refused(f"{call} {arguments}", failed[0])
        if failed:
            index, reply = next(iter(failed.items()))
            raise RankError(f"rank {index} failed alone at {call} {arguments}\n{reply['trace']}")
        return [reply["value"] for reply in replies]

    def _collect(self, call: str) -> list[dict[str, Any]]:
        waiting = {rank.output: rank for rank in self._ranks}
        replies: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.options.timeout
        grace: float | None = None
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], 1.0)
            for output in ready:
                try:
                    reply = waiting[output].read()
                except EOFError:
                    raise self._lost(waiting[output]) from None
                if reply is None:
                    continue
                replies[output] = reply
                del waiting[output]
                if "error" in reply and grace is None:
                    grace = time.monotonic() + 20.0  # the others fail soon, or hang for it
            if time.monotonic() > min(deadline, grace or deadline) and waiting:
                late = [i for i, r in enumerate(self._ranks) if r.output in waiting]
                heard = [r["trace"] for r in replies.values() if "error" in r]
                raise RankError(
                    f"rank(s) {late} did not answer {call} in time"
                    + "".join(f"\nanother rank had failed:\n{trace}" for trace in heard[:1])
                )
        return [replies[rank.output] for rank in self._ranks]

    def _lost(self, rank: _Rank) -> RankError:
        index = self._ranks.index(rank)
        status = rank.process.wait(timeout=10)
        return RankError(f"rank {index} ended with status {status}; it said:\n{rank.said()}")

    def _end(self) -> None:
        for rank in self._ranks:
            try:
                rank.send({"call": "quit"})
            except OSError:
                continue
        until = time.monotonic() + 3.0
        for rank in self._ranks:
            try:
                rank.process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            for pipe in (rank.process.stdin, rank.process.stdout):
                try:
                    if pipe is not None:
                        pipe.close()
                except OSError:
                    continue
        self._ranks.clear()
        self._home.cleanup()
