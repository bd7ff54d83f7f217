"""Judges faults: runs the tests that reach one until a test fails because of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.mutants.operators import Mutant
from tools.mutants.worker import Worker

TIME = re.compile(r"time[d ]*out|still alive|too late|deadline|refused", re.IGNORECASE)


class Campaign:
    """Judges faults in a plain copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bad: set[str] = set()
        """Tests that fail without a fault."""
        self._good: set[str] = set()
        self._original = folder.with_name(f"{folder.name}-original.json")
        if self._original.exists():  # the last command was killed
            self._write(*json.loads(self._original.read_text()))

    @cached_property
    def _worker(self) -> Worker:
        return Worker(self.folder)

    def _run(self, mutant: Mutant | None, tests: Sequence[str], limit: float) -> dict[str, Any]:
        if not mutant:
            return self._worker.run(tests, "not thorough", limit, stop=True)
        source = (self.folder / mutant.file).read_text()
        self._original.write_text(json.dumps([mutant.file, source]))
        try:
            self._write(mutant.file, mutant.applied(source))
            return self._worker.run(tests, "not thorough", limit, stop=True)
        finally:
            self._write(mutant.file, source)
            self._original.unlink()

    def _write(self, file: str, source: str) -> None:
        path = self.folder / file
        # A compiled file is matched by the second of its source and its size: too coarse here.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(source)

    def judge(self, mutant: Mutant, tests: dict[str, float], most: float) -> dict[str, Any]:
        """How it ends: caught, time (caught by it), survived or unreached; by which test.

        Args:
            tests: seconds by test, in the order to run them.
            most: seconds of tests after which it has survived.
        """
        ran = 0
        for chunk in chunks({t: s for t, s in tests.items() if t not in self.bad}, most):
            left = list(chunk)
            while left:
                limit = 60 + 3 * sum(chunk[test] for test in left)
                got = self._run(mutant, left, limit)
                failed = [line for line in got["tests"] if line["failed"]]
                by = failed[0]["test"] if failed else left[min(len(got["tests"]), len(left) - 1)]
                if got["code"] == 0 or (got["code"] is None and not failed):
                    if got["code"] is None and self._hangs(mutant, left, limit):
                        return {"end": "time", "by": by}
                    break
                if self._passes(by) and (not failed or self._counts(mutant, failed[0])):
                    return {"end": "caught", "by": by}
                self.bad.add(by)
                left = left[left.index(by) + 1 :]
            ran += len(chunk)
        return {"end": "survived" if ran else "unreached", "ran": ran, "reach": len(tests)}

    def _hangs(self, mutant: Mutant, tests: Sequence[str], limit: float) -> bool:
        """Whether a run that met its limit took three times what it takes now without the fault."""
        normal = self._run(None, tests, 1800)
        if normal["code"] == 0 and 3 * normal["seconds"] > limit:
            return self._run(mutant, tests, 3 * normal["seconds"])["code"] is None
        return bool(normal["code"] == 0)

    def _counts(self, mutant: Mutant, failed: dict[str, Any]) -> bool:
        """Whether a failure is the fault's: one by time has to happen twice on a busy machine."""
        if not TIME.search(failed["failed"]):
            return True
        return bool(self._run(mutant, [failed["test"]], 600)["code"] != 0)

    def _passes(self, test: str) -> bool:
        """Whether a test passes without a fault, here."""
        if test not in self._good and self._run(None, [test], 600)["code"] == 0:
            self._good.add(test)
        return test in self._good


def chunks(tests: dict[str, float], most: float) -> Iterator[dict[str, float]]:
    """Tests for runs of growing length, together at most ``most`` seconds, but at least one."""
    size, chunk, total = 15.0, dict[str, float](), 0.0
    for test, seconds in tests.items():
        if total and total + seconds > most:
            break
        chunk[test] = seconds
        total += seconds
        if sum(chunk.values()) > size:
            yield chunk
            size, chunk = size * 3, {}
    if chunk:
        yield chunk
