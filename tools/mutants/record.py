"""What the unmutated tests reach, from a copy of the project whose blocks note that they ran."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.bench.report import say
from tools.mutants.operators import Mutant, marked
from tools.mutants.worker import Worker

ROOT = Path(__file__).resolve().parents[2]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON lines; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a file of JSON lines."""
    with path.open("a") as file:
        print(json.dumps(line, ensure_ascii=False), file=file)


def copied(folder: Path) -> Path:
    """A copy of this checkout's files without ignored ones; an older copy is brought up to now."""
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


class Record:
    """What the unmutated tests reach, from a copy with notes in its blocks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "record.jsonl"
        self.folder = folder / "marked"
        self.table = folder / "blocks.json"

    def prepare(self) -> None:
        """Make the marked copy, once."""
        if self.table.exists():
            return
        copied(self.folder)
        blocks: list[tuple[str, int]] = []
        for path in sorted((self.folder / "internsp").rglob("*.py")):
            source, lines = marked(path.read_text(), len(blocks))
            path.write_text(source)
            blocks += [(str(path.relative_to(self.folder)), line) for line in lines]
        self.table.write_text(json.dumps(blocks))

    def take(self, files: Sequence[str], marks: str) -> None:
        """Run files that were not yet run with these marks."""
        self.prepare()
        done = {(line.get("file"), line.get("marks")) for line in read(self.path)}
        worker = Worker(self.folder)
        for file in (f for f in files if (f, marks) not in done):
            got = worker.run([file], marks, 1200, stop=False)
            for test in got["tests"]:
                add(self.path, test)
            add(self.path, {"file": file, "marks": marks})
            failed = sum(bool(test["failed"]) for test in got["tests"])
            say(f"{file}: {len(got['tests'])} tests, {failed} failed, {got['seconds']:.0f} s")

    def _passed(self) -> list[dict[str, Any]]:
        return [line for line in read(self.path) if "test" in line and not line["failed"]]

    def _numbers(self, mutant: Mutant) -> set[int]:
        blocks = json.loads(self.table.read_text())
        return {
            i for i, (file, line) in enumerate(blocks)
            if file == mutant.file and mutant.block in (0, line)
        }  # fmt: skip

    def covered(self, by: int) -> list[tuple[float, str]]:
        """Seconds and names of tests, with all their cases, of which each block is reached by at
        least ``by`` tests that are not listed. The dearest are asked first."""
        cases: dict[str, list[dict[str, Any]]] = {}
        for line in self._passed():
            cases.setdefault(line["test"].split("[")[0], []).append(line)
        reached = Counter(hit for line in self._passed() for hit in line["hits"])
        seconds = {test: sum(line["seconds"] for line in own) for test, own in cases.items()}
        found = []
        for test in sorted(cases, key=lambda one: -seconds[one]):
            own = Counter(hit for line in cases[test] for hit in line["hits"])
            if own and all(reached[hit] - count >= by for hit, count in own.items()):
                reached -= own
                found.append((seconds[test], test))
        return found

    def notes(self, mutant: Mutant) -> bool:
        """Whether a test that passed reaches the fault's block."""
        wanted = self._numbers(mutant)
        return any(not wanted.isdisjoint(line["hits"]) for line in self._passed())

    def reaching(self, mutant: Mutant, since: int = 0) -> dict[str, float]:
        """Seconds of the tests that passed and reach the fault's block, in the order to run.

        If none does, of those that reach its file.

        Args:
            since: leave out the first lines of the record.
        """
        passed, wanted = self._passed(), self._numbers(mutant)
        # A block that notes nothing may run in a process without this table: all of the file, then.
        if not self.notes(mutant):
            wanted = self._numbers(replace(mutant, block=0))
        names = [name for name in mutant.scope.split(".") if not name.startswith("__")]
        new = {line["test"] for line in read(self.path)[since:] if "test" in line}
        found = {
            line["test"]: line["seconds"]
            for line in passed
            if line["test"] in new and wanted & set(line["hits"])
        }
        seen: Counter[str] = Counter()
        order = []
        for test, seconds in sorted(found.items(), key=lambda item: item[1]):
            body, file = test.split("[")[0], test.split("::")[0]
            text = (self.folder / file).read_text()
            named = any(re.search(rf"\b{name}\b", text) for name in names)
            order.append((seen[body], not named, seen[file], seconds, test))
            seen.update((body, file))
        return {test: seconds for *_, seconds, test in sorted(order)}
