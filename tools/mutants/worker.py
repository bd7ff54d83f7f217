"""A process in a copy of the project that runs chosen tests there, at nice 19."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.mutants.hits import SIZE, VARIABLE


class Worker:
    """``tests/support/forked.py`` of a copy; what it starts imports that copy alone."""

    def __init__(self, folder: Path) -> None:
        own = folder.with_name(f"{folder.name}-files")
        (own / "tmp").mkdir(parents=True, exist_ok=True)
        (own / "hits").write_bytes(bytes(SIZE))
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1"
        )
        self._process = subprocess.Popen(
            ["nice", "-n", "19", sys.executable, "-m", "tests.support.forked", str(own)],
            cwd=folder,
            env={**os.environ, **threads, VARIABLE: str(own / "hits"), "PYTHONPATH": str(folder),
                 "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(own / "tmp")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self._close)

    def run(self, tests: Sequence[str], marks: str, limit: float, stop: bool) -> dict[str, Any]:
        """Run files or tests in this order: ``code`` (None: at the limit), ``seconds``, ``tests``.

        Args:
            marks: an expression for pytest's ``-m``.
            limit: seconds until all processes of the run are killed.
            stop: stop at the first failure.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"tests": list(tests), "marks": marks, "limit": limit, "stop": stop}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def _close(self) -> None:
        # At SIGTERM the process kills the run in progress.
        self._process.terminate()
        self._process.wait()
