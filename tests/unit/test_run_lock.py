"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from internsp.app.train.run_lock import NAME, RunLock
from internsp.errors import ConfigError


def test_a_second_run_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    first = RunLock.acquire(tmp_path / "run", "one")
    with pytest.raises(ConfigError) as refused:
        RunLock.acquire(tmp_path / "run", "two")
    text = str(refused.value)
    assert f"in use by process {os.getpid()} on {socket.gethostname()} (run one," in text
    assert "choose another train.name" in text
    first.release()
    first.release()
    assert not (tmp_path / "run" / NAME).exists()
    second = RunLock.acquire(tmp_path / "run", "two")
    assert second.predecessor is None
    second.release()


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from internsp.app.train.run_lock import RunLock\n"
        "lock = RunLock.acquire(Path(sys.argv[1]), 'dead'); print('held', flush=True)\n"
        "time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=root
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match=f"process {process.pid} "):
        RunLock.acquire(tmp_path, "next")
    process.kill()
    process.wait()
    process.stdout.close()
    lock = RunLock.acquire(tmp_path, "next")
    assert lock.predecessor is not None
    assert f"process {process.pid} " in lock.predecessor
    assert json.loads((tmp_path / NAME).read_text())["run"] == "next"
    lock.release()


def test_a_lock_whose_file_was_removed_or_moved_holds_nothing_for_the_next(tmp_path: Path) -> None:
    first = RunLock.acquire(tmp_path / "run", "one")
    (tmp_path / "run").rename(tmp_path / "run.1")
    second = RunLock.acquire(tmp_path / "run", "two")
    first.release()  # its path belongs to the second one now, which remains
    assert json.loads((tmp_path / "run" / NAME).read_text())["run"] == "two"
    second.release()


@pytest.mark.parametrize(
    ("change", "free"),
    [
        ({}, False),
        ({"started": "long ago"}, True),  # another process has the same id now
        ({"pid": 2**22 + 1}, True),
        ({"host": "elsewhere"}, False),  # nothing is known about its processes
    ],
    ids=["alive", "number reused", "ended", "another host"],
)
def test_without_locks_in_the_file_system_process_and_host_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], free: bool
) -> None:
    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    RunLock.acquire(tmp_path, "one")
    owner = json.loads((tmp_path / NAME).read_text()) | change
    (tmp_path / NAME).write_text(json.dumps(owner))
    if free:
        RunLock.acquire(tmp_path, "two").release()
    else:
        with pytest.raises(ConfigError, match=f"remove {tmp_path}"):
            RunLock.acquire(tmp_path, "two")


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff" * 9, b"[" * 4000])
def test_a_lock_file_of_anything_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    lock = RunLock.acquire(tmp_path, "one")
    assert lock.predecessor is None
    lock.release()


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from internsp.app.train.run_lock import RunLock\n"
        "from internsp.errors import ConfigError\n"
        "while time.time() < float(sys.argv[2]): pass\n"
        "won = 0\n"
        "while won < 20:\n"
        "    try: lock = RunLock.acquire(Path(sys.argv[1]) / 'run', str(won))\n"
        "    except ConfigError: continue\n"
        "    inside = Path(sys.argv[1]) / 'inside'\n"
        "    inside.mkdir(); won += 1; inside.rmdir(); lock.release(); time.sleep(0.001)\n"
        "print(won)"
    )
    start = str(time.time() + 1.5)
    root = Path(__file__).parents[2]
    several = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), start],
            stdout=subprocess.PIPE, text=True, cwd=root,
        )
        for _ in range(3)
    ]  # fmt: skip
    won = [process.communicate(timeout=60)[0] for process in several]
    # Two at once would meet in the folder, which mkdir does not make twice.
    assert won == ["20\n"] * 3
