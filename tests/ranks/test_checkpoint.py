"""Checkpoints of runs: damage is noticed, nothing is executed, settings and runs do not mix."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from internsp.config import Config
from internsp.errors import ConfigError, InternspError
from internsp.report.metrics import read_metrics
from internsp.train import checkpoint, checkpoint_files, manifest
from internsp.train.run import train
from internsp.train.run_lock import RunLock
from internsp.train.session import Session, lr_factor
from tests.support.ranks import run_ranks

TEXT = Path(__file__).parents[1] / "data"
Changes = dict[str, dict[str, Any]]


def config(**changes: dict[str, Any]) -> Config:
    """A tiny run of two ranks that saves every second step; ``changes`` by section."""
    sections: Changes = {
        "model": {"hidden_size": 32, "layers": 2, "heads": 4, "norm_eps": 1e-2, "init_std": 0.05},
        "data": {"source": "text", "paths": [str(TEXT)], "sequence_length": 17, "held_out": 0},
        "parallel": {"weight": 2, "sequence": 2},
        "weight_parallel": {"min_shard_elements": 128},
        "optimizer": {"lr": 3e-3, "warmup_steps": 3},
        "train": {"steps": 6, "global_batch": 2, "sample_bytes": 0, "log_every": 50},
        "checkpoint": {"save": True, "every": 2},
    }  # fmt: skip
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


def resumed(path: Path, **changes: dict[str, Any]) -> Config:
    return config(**changes, checkpoint={"resume": str(path)})


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    return str(refused.value)


@contextmanager
def changed(rank: int, *files: Path) -> Iterator[None]:
    """Rank 0 may change ``files`` inside; they are put back. All ranks come and go together."""
    before = [file.read_bytes() for file in files]
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()
        if rank == 0:
            for file, data in zip(files, before, strict=True):
                file.write_bytes(data)
        dist.barrier()


def on_first(rank: int, work: Callable[[], Any]) -> None:
    if rank == 0:
        work()
    dist.barrier()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# damage and hostility


def damage_is_noticed(rank: int, run: Path) -> None:
    newest = run / "checkpoints" / "step-000006"
    files = sorted(newest.iterdir())
    assert names(newest) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    for file in files:
        right = file.read_bytes()
        for place in range(7, len(right), len(right) // 4):
            with changed(rank, file):
                flipped = bytearray(right)
                flipped[place] ^= 1 << place % 8
                on_first(rank, lambda file=file, new=flipped: file.write_bytes(new))
                assert str(file) in refusal(lambda: checkpoint._newest_whole(newest))
                chosen, content, notes = checkpoint._newest_whole(run)
                assert (chosen.name, content.step) == ("step-000004", 4)
                assert notes[0].startswith("checkpoint step-000006 was passed over: " + str(file))
    with changed(rank, files[-1]):
        on_first(rank, files[-1].unlink)
        assert "saving did not end" in refusal(lambda: checkpoint._newest_whole(newest))
        assert checkpoint._newest_whole(run)[0].name == "step-000004"
    assert checkpoint._newest_whole(run)[0] == newest


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def forge(folder: Path, file: Path, data: bytes) -> None:
    """Put ``data`` into a checkpoint's file, and a manifest that finds it right."""
    file.write_bytes(data)
    content = json.loads((folder / manifest.NAME).read_text())["content"]
    digest = hashlib.sha256(data).hexdigest()
    content["files"][file.name] = {"nbytes": len(data), "sha256": digest}
    (folder / manifest.NAME).write_text(
        json.dumps({"sha256": manifest._digest(content), "content": content})
    )


def hostile_files_are_refused_and_not_executed(rank: int, run: Path) -> None:
    mark, folder = run / "executed", run / "checkpoints" / "step-000006"
    table, data = folder / ".metadata", folder / "__1_0.distcp"
    with changed(rank, table, folder / manifest.NAME):
        on_first(rank, lambda: forge(folder, table, pickle.dumps(Evil(mark))))
        text = refusal(lambda: train(resumed(folder), run / "other"))
        assert f"{table} names 'posix system'" in text
    # In place of the first tensor, followed by the others where they were.
    first = min(
        (c for t in manifest.read(folder).tensors.values() for c in t.chunks
         if c.file == data.name), key=lambda c: c.begin,
    )  # fmt: skip
    assert first.begin == 0
    with changed(rank, data, folder / manifest.NAME):
        evil = pickle.dumps(Evil(mark))
        rest = data.read_bytes()[len(evil) :]
        dist.barrier()
        on_first(rank, lambda: forge(folder, data, evil + rest))
        text = refusal(lambda: train(resumed(folder), run / "other"))
        assert text.startswith(f"{data} holds what is no tensor at byte 0")
    assert not mark.exists()
    assert not (run / "other").exists(), "a run that was refused leaves no folder"


def a_folder_of_another_writer_is_refused(rank: int, run: Path) -> None:
    """What torch itself saves, byte entries and all, has no manifest."""
    mark, folder = run / "executed", run / "foreign" / "step-000001"
    dcp.save({"run.step": Evil(mark)}, checkpoint_id=folder)
    text = refusal(lambda: train(resumed(folder), run / "other"))
    assert f"{folder / manifest.NAME} is missing" in text
    assert not mark.exists()


# saving and its failures


def a_save_that_fails_leaves_the_old_one_whole(rank: int, run: Path) -> None:
    session = Session.create(config())
    folder = run / "saves"
    path = checkpoint.save(session, folder, 3, "first")
    before = (path / manifest.NAME).read_text()

    class Full:
        """A file on a disk that has room for 4000 bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 4000

        def write(self, data: Any) -> None:
            self.room -= len(data)
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.file.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    right = checkpoint_files._Digested.__init__
    if rank == 1:
        checkpoint_files._Digested.__init__ = lambda self, file: right(self, Full(file))  # type: ignore[method-assign, assignment]
    with pytest.raises(InternspError) as failed:
        checkpoint.save(session, folder, 3, "second")
    checkpoint_files._Digested.__init__ = right  # type: ignore[method-assign]
    text = str(failed.value)
    assert text == (
        f"checkpoint {path} was not saved: rank 1: OSError: [Errno 28] No space left on device"
    )
    dist.barrier()
    assert names(folder) == ["step-000003"]
    assert (path / manifest.NAME).read_text() == before
    dist.barrier()
    checkpoint.save(session, folder, 3, "third")
    assert manifest.read(path).run == "third"
    blocked = run / "blocked"
    on_first(rank, lambda: blocked.write_text("a file"))
    with pytest.raises(InternspError, match="was not saved"):
        checkpoint.save(session, blocked, 3, "fourth")


def loss_scale_and_random_states_come_back(rank: int, run: Path) -> None:
    half = config(train={"dtype": "float16"})
    session = Session.create(half)
    scaler = session.optimizer.loss_scaler
    assert scaler is not None
    scaler.scale, scaler.good_steps, scaler.skipped_steps = 512.0, 7, 3
    torch.manual_seed(5 + rank)
    path = checkpoint.save(session, run / "half", 1, "half")
    wanted = torch.rand(4)
    again = Session.create(half)
    torch.manual_seed(99)
    checkpoint.load(again, path)
    assert torch.equal(torch.rand(4), wanted), "each rank has its own again"
    found = again.optimizer.loss_scaler
    assert found is not None
    assert (found.scale, found.good_steps, found.skipped_steps) == (512.0, 7, 3)


# settings


def changed_settings_are_used_and_told_or_refused(rank: int, run: Path) -> None:
    path = run / "checkpoints" / "step-000002"
    now = {"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.0, "warmup_steps": 1}
    settings = resumed(path, optimizer=now, train={"steps": 9})
    session = Session.create(settings)
    found = checkpoint.load(session, path)
    assert (found.step, found.path) == (2, path)
    assert sorted(note.partition(":")[0] for note in found.notes) == [
        *(f"optimizer.{key}" for key in sorted(now)), "train.steps",
    ]  # fmt: skip
    assert "optimizer.lr: 0.003 in the checkpoint, 0.001 from now on" in found.notes
    factor = lr_factor(settings)
    for step in range(2, 5):
        for group in session.optimizer.param_groups:
            assert group["lr"] == 1e-3 * factor(step)
            assert group["betas"] == (0.8, 0.9)
            assert group["weight_decay"] == 0.0
        for schedule in session.schedules:
            schedule.step()
    assert factor(5) > 2 * settings.optimizer.min_lr_ratio, "the added steps are no floor"

    other = resumed(path, train={"seed": 1}, model={"rope_theta": 5e4})
    text = refusal(lambda: train(other, run / "other"))
    assert "train.seed: 0 in the checkpoint, 1 now" in text
    assert "model.rope_theta: 10000.0 in the checkpoint, 50000.0 now" in text
    assert "other text" not in text
    less = resumed(path, data={"paths": [str(Path(__file__))]})
    assert "other text" in refusal(lambda: train(less, run / "other"))


# runs and their folders


def ids(folder: Path) -> set[str]:
    """Run ids in the rows and the checkpoints of a folder."""
    rows = [json.loads(line)["run"] for line in (folder / "metrics.jsonl").open()]
    steps = (folder / "checkpoints").glob("step-*")
    return {*rows, *(manifest.read(path).run for path in steps)}


def what_came_later_is_set_aside(rank: int, run: Path) -> None:
    before = ids(run)
    assert len(before) == 1
    dist.barrier()
    train(resumed(run / "checkpoints" / "step-000002", train={"steps": 3}), run)
    dist.barrier()  # rank 0 writes the last row after the last collective
    folder = run / "checkpoints"
    assert names(folder) == ["abandoned-1", "step-000002", "step-000003"]
    assert names(folder / "abandoned-1") == ["metrics.jsonl", "step-000004", "step-000006"]
    assert [row.step for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]
    assert ids(run) == before, "the run goes on"
    assert checkpoint._newest_whole(run)[0].name == "step-000003"
    dist.barrier()
    # Nothing is left to do: the checkpoint is not written again, the folder stays as it is.
    stamp = (folder / "step-000003" / manifest.NAME).stat().st_mtime_ns
    train(resumed(run, train={"steps": 3}), run)
    assert (folder / "step-000003" / manifest.NAME).stat().st_mtime_ns == stamp
    assert names(folder) == ["abandoned-1", "step-000002", "step-000003"]


def another_folder_is_not_mixed_with(rank: int, run: Path) -> None:
    other = run / "b"
    train(config(train={"steps": 5}), other)
    theirs = ids(other)
    dist.barrier()
    train(resumed(run, train={"steps": 4}), other)
    dist.barrier()
    assert names(other / "checkpoints") == ["step-000004"]
    assert [row.step for row in read_metrics(other / "metrics.jsonl")] == [4]
    assert names(run / "b.1" / "checkpoints") == ["step-000002", "step-000004", "step-000005"]
    assert ids(run / "b.1") == theirs
    assert not ids(other) & (theirs | ids(run))
    left = list(run.rglob("run.lock"))
    assert not left, left


def a_folder_in_use_is_refused_on_every_rank(rank: int, run: Path) -> None:
    lock = RunLock.acquire(run / "b", "holder") if rank == 0 else None
    text = refusal(lambda: train(config(), run / "b"))
    assert f"{run / 'b'} is in use by process " in text
    assert "(run holder, since" in text
    dist.barrier()
    if lock is not None:
        lock.release()
    assert [row.step for row in read_metrics(run / "b" / "metrics.jsonl")] == [4]


def everything(rank: int, world_size: int, folder: str) -> None:
    run = Path(folder) / "run"
    train(config(), run)
    for part in (
        damage_is_noticed, hostile_files_are_refused_and_not_executed,
        a_folder_of_another_writer_is_refused, a_save_that_fails_leaves_the_old_one_whole,
        loss_scale_and_random_states_come_back, changed_settings_are_used_and_told_or_refused,
        what_came_later_is_set_aside, another_folder_is_not_mixed_with,
        a_folder_in_use_is_refused_on_every_rank,
    ):  # fmt: skip
        part(rank, run)
        dist.barrier()  # both look at the same files, which the next part changes


def test_checkpoints_are_whole_or_refused_and_runs_do_not_mix(tmp_path: Path) -> None:
    run_ranks(everything, 2, str(tmp_path), timeout=240)
    shutil.rmtree(tmp_path)
