"""Random configurations, files and folders: each gives one clear error, or a plan that works.

A case is a function of a seed and its number, so that any case can be repeated::

    python -m tests.fuzz.configurations --seed 3 --case 4711      # prints the case and its result
    python -m tests.fuzz.configurations --seed 3 --count 100000   # any number

Every case has its own folder with a configuration, text and a folder for the run's files. It goes
through what ``internsp plan`` and ``internsp train`` do before ranks start: reading, validating,
checking the machine and the text, planning. The allowed results are one clear error with exit
status 2 or 3, and a configuration that passes every step. Everything else is a finding: another
exception, a message of several screens, a case that takes too long, a changed user file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from internsp.app.config import Config, load_config, read_config
from internsp.app.launch.preflight import check_before_start
from internsp.app.plan.screen import print_plan
from internsp.app.process.environment import launched
from internsp.config.words import listed
from internsp.errors import InternspError
from tests.fuzz.drawing import Drawn, draw

LONGEST_SECONDS = 60.0  # per case: 2,048 layers take 4 s, a busy machine is ten times as slow
LONGEST_MESSAGE = 7_000  # characters of a message
REFUSED = (2, 3)


class Finding(Exception):
    """A case that neither works nor is refused clearly."""


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        kind: ``refused``, ``checked`` (not planned, because it is too large for a quick plan) or
            ``planned``.
        message: of the refusal.
    """

    kind: str
    message: str = ""


def run_case(seed: int, case: int, home: Path) -> Outcome:
    """Draw and check one case in the empty folder ``home``.

    Raises:
        Finding: with the case, what was drawn, and how to repeat it.
    """
    before = Path.cwd()
    os.chdir(home)
    drawn = None
    try:
        drawn = draw(random.Random(f"{seed}/{case}"), home)
        files = _state(home)
        with _limit(LONGEST_SECONDS):
            outcome = judge(drawn)
        changed = {str(path) for path, _ in files.items() ^ _state(home).items()}
        if changed:
            raise Finding(f"changed: {sorted(changed)}")
        return outcome
    except Exception as error:
        told = str(error) if isinstance(error, Finding) else traceback.format_exc()
        raise Finding(
            f"case {case} of seed {seed}: {told}\n{drawn}\nonce more: python -m "
            f"tests.fuzz.configurations --seed {seed} --case {case}"
        ) from None
    finally:
        os.chdir(before)


def judge(drawn: Drawn) -> Outcome:
    """Run the steps of the case as far as they succeed."""
    try:
        return _pass(drawn)
    except InternspError as error:
        if error.exit_status not in REFUSED:
            raise
        return Outcome("refused", _clear(str(error)))


def _pass(drawn: Drawn) -> Outcome:
    around = launched(drawn.environment, joins=drawn.joins)
    config, problems = read_config(drawn.config, drawn.overrides, world_size=around.world_size)
    found = [*around.problems, *problems]
    if config is None or found:
        if not found:
            raise Finding("no configuration and no reason")
        for problem in found:
            if "\n" in str(problem) or not str(problem).isprintable():
                raise Finding(f"a mistake of several lines: {problem!r}")
        return Outcome("refused", _clear(listed("the configuration", found)))
    _reads_back(config, drawn)
    check_before_start(config, drawn.output)
    size = around.world_size or config.launch.processes
    if not drawn.plans or config.model.layers * config.train.micro_batches > 12:
        return Outcome("checked")
    listing = Path(tempfile.gettempdir()) / f"internsp-fuzz-{os.getpid()}.txt"
    try:
        print_plan(config, size, Console(file=io.StringIO(), width=100), schedule=listing)
        if "Schedule of one step" not in listing.read_text(encoding="utf-8"):
            raise Finding("a plan without a schedule")
    finally:
        listing.unlink(missing_ok=True)
    return Outcome("planned")


def _reads_back(config: Config, drawn: Drawn) -> None:
    """The configuration that a run writes must be read back as the same configuration."""
    if not drawn.plans:
        return
    file = Path(tempfile.gettempdir()) / f"internsp-fuzz-{os.getpid()}.toml"
    try:
        file.write_text(config.to_toml(), encoding="utf-8")
        size = launched(drawn.environment, joins=drawn.joins).world_size
        if load_config(file, world_size=size) != config:
            raise Finding("written and read back, it is another configuration")
    finally:
        file.unlink(missing_ok=True)


def _clear(message: str) -> str:
    if not message.strip() or "Traceback" in message or len(message) > LONGEST_MESSAGE:
        raise Finding(f"not a clear message ({len(message)} characters): {message[:400]!r}")
    return message


def _state(home: Path) -> dict[Path, tuple[Any, ...]]:
    """The files in the folder: names, kinds, contents."""
    found: dict[Path, tuple[Any, ...]] = {}
    for folder, folders, files in os.walk(home):
        for name in (*folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            digest = ""
            if not path.is_symlink() and path.is_file():
                digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
            found[path] = (status.st_mode, status.st_size, digest)
    return found


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise an exception inside a case that takes too long."""

    def late(number: int, frame: Any) -> None:
        where = "".join(traceback.format_stack(frame)[-6:])
        raise Finding(f"not over after {seconds:g} s; it is at\n{where}")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_cases(seed: int, cases: range, root: Path) -> tuple[Counter[str], list[str]]:
    """Run cases; returns the counts of each result, and the findings."""
    counts: Counter[str] = Counter()
    findings: list[str] = []
    for case in cases:
        home = root / f"case{case}"
        home.mkdir()
        try:
            counts[run_case(seed, case, home).kind] += 1
        except Finding as error:
            counts["found"] += 1
            findings.append(str(error))
        finally:
            shutil.rmtree(home, ignore_errors=True)
    return counts, findings


def memory_folder() -> str | None:
    """A folder on a fast file system (tmpfs), if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main() -> int:
    """The command described above; returns 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, default=None, help="only this one, shown")
    parser.add_argument("--count", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="internsp-fuzz-", dir=memory_folder()) as folder:
        if options.case is not None:
            print(draw(random.Random(f"{options.seed}/{options.case}"), _made(folder, "shown")))
            try:
                print(run_case(options.seed, options.case, _made(folder, "case")))
            except Finding as error:
                print(error)
                return 1
            return 0
        begin = time.monotonic()
        counts, findings = run_cases(options.seed, range(options.count), Path(folder))
    print(*findings, sep="\n\n")
    print(f"{dict(counts)} in {time.monotonic() - begin:.1f} s")
    return bool(findings)


def _made(folder: str, name: str) -> Path:
    path = Path(folder, name)
    path.mkdir()
    return path


if __name__ == "__main__":
    sys.exit(main())
