"""``python -m tests.chaos``: injects many faults and checks how the library handles them.

Prints the results, and writes them to the file given by ``--document``. The exit status is 1 if
any requirement was violated.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from tests.chaos.report import document, lines
from tests.chaos.tally import Fault, Found

ROOT = Path(__file__).parents[2]
SOAK = "\n## Soak\n"  # of the page: what another command has written stays


@dataclass(frozen=True)
class Options:
    """Inject faults at random points of training runs and saves, resume, compare the results."""

    faults: int = 1000
    """Least number of faults."""
    seed: int = 13
    """Seed; each task's faults follow from it and the task's number."""
    workers: int = 2
    """Processes that run tasks in parallel."""
    document: Path | None = None
    """Where the report is written."""
    mistakes: tuple[str, ...] = ()
    """Deliberate mistakes in the library: names of tests.support.chaos.MISTAKES."""


class _Worker:
    """One process, with a separate folder for temporary files, network and shared memory."""

    def __init__(self, options: Options, folder: Path, network: bool) -> None:
        folder.mkdir()
        words = [sys.executable, "-m", "tests.chaos.worker", str(options.seed), str(int(network))]
        words += options.mistakes
        if network:
            script = 'mount -t tmpfs none /dev/shm && exec "$@"'
            words = ["unshare", "--net", "--mount", "sh", "-c", script, "sh", *words]
        environment = {**os.environ, "TMPDIR": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def give(self, task: tuple[int, str]) -> None:
        """Send it a task."""
        assert self.process.stdin is not None, "made with a pipe"
        self.process.stdin.write(json.dumps(task).encode() + b"\n")
        self.process.stdin.flush()

    def take(self) -> tuple[str, dict[str, Any]]:
        """Its result; blocks."""
        assert self.process.stdout is not None, "made with a pipe"
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self.process.wait()}")
        kind, found = json.loads(line)
        return kind, found


def own_network() -> bool:
    """Whether this machine allows network and mount namespaces."""
    if shutil.which("unshare") is None:
        return False
    words = ["unshare", "--net", "--mount", "sh", "-c", "mount -t tmpfs none /dev/shm"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def campaign(options: Options) -> tuple[Found, float, bool]:
    """Run it; returns the results, the seconds, and whether links could be cut."""
    from tests.chaos.tasks import kinds

    network, began, total = own_network(), time.monotonic(), Found(runs=0)
    tasks = kinds(network)
    with tempfile.TemporaryDirectory(prefix="campaign-") as home, contextlib.ExitStack() as stack:
        workers = []
        for number in range(options.workers):
            worker = _Worker(options, Path(home) / str(number), network)
            stack.callback(worker.process.kill)
            workers.append(worker)
            worker.give(next(tasks))
        busy = {worker.process.stdout: worker for worker in workers}
        while busy:
            for pipe in select.select(list(busy), [], [])[0]:
                worker = busy.pop(pipe)
                kind, found = worker.take()
                found["faults"] = [Fault(**fault) for fault in found["faults"]]
                total.add(Found(**found))
                passed = f"{time.monotonic() - began:6.0f} s  {len(total.faults):5} faults  {kind}"
                print(passed, *found["wrong"], sep="\n  ", flush=True)
                if len(total.faults) < options.faults:
                    worker.give(next(tasks))
                    busy[pipe] = worker
        for worker in workers:
            assert worker.process.stdin is not None, "made with a pipe"
            worker.process.stdin.close()
            worker.process.wait(timeout=60)
    return total, time.monotonic() - began, network


def main(options: Options) -> int:
    """Run, print, write."""
    total, seconds, network = campaign(options)
    print(*lines(total), sep="\n")
    if options.document is not None:
        page = options.document
        _, mark, soak = (page.read_text() if page.exists() else "").partition(SOAK)
        page.write_text(document(total, options, seconds, network) + mark + soak)
    return 1 if total.wrong else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m tests.chaos", description=__doc__)))
