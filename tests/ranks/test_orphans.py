"""However a run's launcher ends, nothing of the run remains."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = "tests.support.launched"
LOCAL = ("-c", f"import sys; from {MODULE} import main; sys.exit(main())")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", MODULE)
Run = subprocess.Popen[str]

pytestmark = [
    pytest.mark.unmeasured,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Run]]:
    """Processes that a test has started; killed at the end if they are alive."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        if run.poll() is None:
            run.kill()
            run.wait()
    for process in processes(tmp_path):
        os.kill(process, signal.SIGKILL)
    shutil.rmtree(temporary_of(tmp_path), ignore_errors=True)


def launch(
    folder: Path, runs: list[Run], launcher: tuple[str, ...] = LOCAL, nohup: bool = False
) -> list[int]:
    """Start two ranks in a new session with a separate temporary folder; their process ids."""
    temporary = temporary_of(folder)
    temporary.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    environment |= {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    words = [sys.executable, *launcher, str(folder)]
    words = ["nohup", *words] if nohup else words
    with (folder / "log").open("w") as log:
        runs.append(
            subprocess.Popen(
                words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, text=True,
            )
        )  # fmt: skip
    files = [folder / f"rank{rank}" for rank in (0, 1)]
    eventually(lambda: all(file.exists() for file in files), folder, 60)
    return [int(file.read_text()) for file in files]


def temporary_of(folder: Path) -> Path:
    """Not in ``folder``, whose name may be too long for the address of a socket."""
    return Path(tempfile.gettempdir()) / f"orphans-{hashlib.sha256(bytes(folder)).hexdigest()[:8]}"


def processes(folder: Path) -> list[int]:
    """Every process with the run's temporary folder in its environment."""
    mark = f"TMPDIR={temporary_of(folder)}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
        except OSError:
            continue  # ended meanwhile, or of another user
    return found


def eventually(true: object, folder: Path, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)


def left(folder: Path, held: set[Path]) -> list[str]:
    """Remaining files; torchrun never removes its folder of logs, torch keeps its cache."""
    own = (file.name for file in temporary_of(folder).iterdir())
    files = [name for name in own if not name.startswith(("torchelastic_", "torchinductor_"))]
    return files + [str(path) for path in held if path.exists()]


def shared(folder: Path) -> set[Path]:
    """Names of the run's shared memory in /dev/shm, which other programs use, too."""
    found: set[Path] = set()
    for process in processes(folder):
        try:
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {Path(line[line.index("/dev/shm") :]) for line in lines if "/dev/shm" in line}
    return found


@pytest.mark.parametrize("launcher", [LOCAL, TORCHRUN], ids=["local", "torchrun"])
def test_what_nohup_started_outlives_its_terminal_and_leaves_no_process_when_killed(
    launcher: tuple[str, ...], tmp_path: Path, started: list[Run]
) -> None:
    ranks = launch(tmp_path, started, launcher, nohup=launcher == LOCAL)
    held = shared(tmp_path)
    if launcher == LOCAL:  # torchrun has a handler for it
        os.killpg(started[0].pid, signal.SIGHUP)
        time.sleep(1)
        assert not list(tmp_path.glob("saved*"))
    assert {*ranks, started[0].pid} <= set(processes(tmp_path))
    os.kill(ranks[1], signal.SIGSTOP)
    started[0].kill()
    started[0].wait()
    eventually(lambda: not processes(tmp_path), tmp_path)
    if launcher == LOCAL:
        (socket,) = left(tmp_path, held)
        assert socket.startswith("pymp-"), "the folder of a launcher that was killed"
        assert (tmp_path / "log").read_text() == ""


def test_a_closed_terminal_lets_every_rank_save_and_gives_status_129(
    tmp_path: Path, started: list[Run]
) -> None:
    launch(tmp_path, started)
    held = shared(tmp_path)
    os.killpg(started[0].pid, signal.SIGHUP)  # also to the fork server and the resource tracker
    assert started[0].wait(timeout=30) == 128 + signal.SIGHUP
    assert sorted(file.name for file in tmp_path.glob("saved*")) == ["saved0", "saved1"]
    eventually(lambda: not processes(tmp_path), tmp_path)
    assert left(tmp_path, held) == []
    assert (tmp_path / "log").read_text() == ""
