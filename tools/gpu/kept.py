"""Results of ``tools/bench_gpu.py``, each written as it comes: a lent device may go at any time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import internsp


class Kept:
    """What is measured, by part and case: from ``path`` if it is there, else made and written.

    Args:
        path: a line for each result, after one with the conditions; ``None``: nothing is kept.
        conditions: device, versions and options, which must be those of the lines in ``path``, as
            the sources of ``internsp`` must.

    Raises:
        ValueError: they are others.
    """

    def __init__(
        self, path: Path | None = None, conditions: Mapping[str, Any] | None = None
    ) -> None:
        self._path, self._found = path, dict[tuple[str, str], Any]()
        if path is None:
            return
        wanted = json.loads(json.dumps({**(conditions or {}), "sources": _digest()}))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{json.dumps(wanted)}\n")
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        first, *lines = map(json.loads, whole)
        if first != wanted:
            raise ValueError(
                f"--rows {path} has results of {first}, and now {wanted} is measured: name another "
                "file, or remove it"
            )
        path.write_text("".join(whole))  # without a line that was cut off
        self._found = {(line["part"], line["case"]): line["result"] for line in lines}

    def result(self, part: str, case: str, make: Callable[[], Any]) -> Any:
        """The result of a case, which ``make`` measures if it is not there."""
        if (part, case) in self._found:
            return self._found[part, case]
        made = make()
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"part": part, "case": case, "result": made}) + "\n")
        return made


def _digest() -> str:
    found = hashlib.sha256()
    for file in sorted(Path(internsp.__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:12]


NOTHING = Kept()
