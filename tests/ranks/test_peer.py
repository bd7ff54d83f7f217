"""``checkpoint.peer``: the files of a lost rank are restored from another machine's memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from internsp.app.checkpoint import peer
from internsp.app.checkpoint.checkpoint import load, state_of
from internsp.app.checkpoint.disk import KeeperConnection
from internsp.app.checkpoint.files import FilePlan
from internsp.app.checkpoint.peer import PeerCopies
from internsp.app.checkpoint.saver import Saver
from internsp.app.plan.offloaded import COPIED, WRITTEN
from internsp.app.plan.step import make_plan
from internsp.app.process.stop import StopRequest
from internsp.app.session.session import Session
from internsp.app.train.run import train
from internsp.app.train.step import StepRunner
from internsp.errors import ConfigError
from tests.ranks.test_checkpoint_meshes import bits, config, whole
from tests.ranks.test_orphans import eventually, processes, temporary_of
from tests.support.ranks import ranks, run_ranks
from tests.support.restarted import LOST, STEPS, settings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


def written(session: Session) -> bytes:
    """The file that this rank would save."""
    tensors, _ = state_of(session)
    plan = FilePlan.make(tensors)
    memory = torch.zeros(plan.nbytes, dtype=torch.uint8)
    plan.fill(memory, tensors)
    return bits(memory)


def gone(keeper: dict[str, Any]) -> bool:
    try:
        KeeperConnection(keeper).close()
    except ConnectionRefusedError:
        return True
    return False


@ranks(2)
def test_a_lost_machines_rank_is_restored_from_the_memory_of_the_next_one(
    rank: int, tmp_path: Path
) -> None:
    """Each rank stands for one machine here, with a separate launcher."""
    launchers = [subprocess.Popen(["sleep", "600"])]
    environment = {
        "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2",
        "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
    }  # fmt: skip
    with (
        patch.dict(os.environ, environment),
        patch.object(peer, "_launcher", lambda: launchers[-1].pid),
    ):
        session = Session.create(config({"weight": 2}))
        with StopRequest() as stop:
            StepRunner(session).step(0, stop)
        copies = PeerCopies()
        copies.retain(None)
        saver = Saver(session, tmp_path, "run", copies)
        for step in (1, 2, 3):
            saver.start(step, 12)
            path = saver.finish()
            assert saver.notes == []
        saver.close()
        assert path is not None
        held = KeeperConnection(copies._here).request("held")["digests"]
        assert len(held) == 1 == len(set(held) & set(copies.keep)), "equal saves are one copy"
        # The second machine is lost, with its keeper process and with its rank's files.
        mine = written(session)
        planned = dict(make_plan(config({"weight": 2}, checkpoint={"peer": True}), 2).memory)
        assert len(mine) <= planned[WRITTEN] == planned[COPIED] // 2
        if rank == 1:
            launchers[0].kill()
            launchers[0].wait()
            launchers.append(subprocess.Popen(["sleep", "600"]))
            (path / "rank-00001.safetensors").unlink()
        dist.barrier()
        again = Session.create(config({"weight": 2}))
        copies = PeerCopies()
        found = load(again, path, copies)
        assert written(again) == mine
        assert found.notes == [
            f"1 of 2 files of {path} are read from copies in memory; not there any more: "
            "rank-00001.safetensors"
        ]
        # Without a copy the checkpoint is incomplete. A keeper that ends does not fail a save.
        with pytest.raises(ConfigError, match=r"rank-00001\.safetensors is missing"):
            load(again, path)
        launchers[-1].kill()
        launchers[-1].wait()
        deadline = time.monotonic() + 20
        while not gone(copies._here):
            assert time.monotonic() < deadline, "a keeper ends with its launcher"
            time.sleep(0.01)
        dist.barrier()
        saver = Saver(again, tmp_path, "run", copies)
        saver.start(4, 12)
        assert saver.finish() == tmp_path / "step-000004"
        saver.close()
        assert len(saver.notes) == 2
        assert "has no copy of rank 0's part in memory: Connection refused" in saver.notes[0]


def undisturbed(rank: int, world: int, folder: str) -> None:
    train(settings(), Path(folder))


def without_copies(rank: int, world: int, folder: str) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        train(settings(resume="auto"), Path(folder))


@pytest.mark.slow(15)
def test_torchrun_goes_on_from_memory_with_the_same_bytes_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    temporary = temporary_of(tmp_path)
    temporary.mkdir(exist_ok=True)
    run = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--standalone", "--max-restarts", "1", "-m", "tests.support.restarted",
            str(tmp_path / "run"),
        ],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        timeout=200, capture_output=True, text=True, check=False,
    )  # fmt: skip
    log = run.stdout + run.stderr
    (tmp_path / "log").write_text(log)
    eventually(lambda: not processes(tmp_path), tmp_path)
    assert run.returncode == 0, log
    assert "2 of 2 files" in log
    run_ranks(undisturbed, 2, str(tmp_path / "whole"))
    expected, found = (
        whole(tmp_path / name / "checkpoints" / f"step-{STEPS:06d}") for name in ("whole", "run")
    )
    assert found.keys() == expected.keys()
    assert [name for name in expected if bits(expected[name]) != bits(found[name])] == []
    # Without copies there was nothing to resume from.
    run_ranks(without_copies, 2, str(tmp_path / LOST))


def test_without_an_elastic_launcher_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(AssertionError, match=r"start with torchrun --max-restarts, or set it"):
        run_ranks(refused, 1, str(tmp_path))


def refused(rank: int, world: int, folder: str) -> None:
    train(config({}, checkpoint={"peer": True}), Path(folder))
