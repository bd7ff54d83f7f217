"""One run at a time in a folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from internsp.app.train.run_folder import RunFolder, RunLock
from internsp.errors import ConfigError


def test_a_second_run_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "run", "one")
    with pytest.raises(ConfigError) as refused:
        RunLock(tmp_path / "run", "two")
    text = str(refused.value)
    assert f"in use by process {os.getpid()} on {socket.gethostname()} (run one," in text
    assert "choose another train.name" in text
    first.release(tmp_path / "run")
    first.release(tmp_path / "run")
    second = RunLock(tmp_path / "run", "two")
    second.release(tmp_path / "run")


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from internsp.app.train.run_folder import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]), 'dead'); print('held', flush=True)\n"
        "time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=root
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match=f"process {process.pid} "):
        RunLock(tmp_path, "next")
    process.kill()
    process.wait()
    process.stdout.close()
    lock = RunLock(tmp_path, "next")
    assert "(run next, since" in (tmp_path / "run.owner").read_text()
    lock.release(tmp_path)


def test_a_folder_that_was_moved_leaves_its_name_to_the_next_run(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "run", "one")
    (tmp_path / "run").rename(tmp_path / "run.1")
    second = RunLock(tmp_path / "run", "two")
    first.release(tmp_path / "run.1")
    assert not (tmp_path / "run.1" / "run.owner").exists()
    with pytest.raises(ConfigError, match=r"\(run two, since"):
        RunLock(tmp_path / "run", "three")
    second.release(tmp_path / "run")


@pytest.mark.parametrize("owner", [b"", b"\xff" * 9, b"\x1b[2J"])
def test_a_note_of_anything_hinders_nothing(tmp_path: Path, owner: bytes) -> None:
    first = RunLock(tmp_path, "one")
    (tmp_path / "run.owner").write_bytes(owner)
    with pytest.raises(ConfigError, match="is in use by") as refused:
        RunLock(tmp_path, "two")
    assert str(refused.value).isprintable()
    first.release(tmp_path)


@pytest.mark.thorough(1)
def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from internsp.app.train.run_folder import RunLock\n"
        "from internsp.errors import ConfigError\n"
        "while time.time() < float(sys.argv[2]): pass\n"
        "won = 0\n"
        "while won < 20:\n"
        "    try: lock = RunLock(Path(sys.argv[1]) / 'run', str(won))\n"
        "    except ConfigError: continue\n"
        "    inside = Path(sys.argv[1]) / 'inside'\n"
        "    inside.mkdir(); won += 1; inside.rmdir()\n"
        "    lock.release(Path(sys.argv[1]) / 'run'); time.sleep(0.001)\n"
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


def test_a_run_that_sets_an_older_one_aside_holds_its_own_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    folder = RunFolder(path, "two", RunLock(path, "two"))
    (path / "metrics.jsonl").touch()
    run, (note,) = folder._begin(None)
    assert (run, note) == ("two", f"the run that was in {path} is now in {tmp_path / 'run.1'}")
    with pytest.raises(ConfigError, match="in use by"):
        RunLock(path, "three")
    RunLock(tmp_path / "run.1", "three").release(tmp_path / "run.1")
    folder.release()
