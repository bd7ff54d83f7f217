"""Checkpoints of runs: damage is detected, nothing is executed, settings and runs do not mix."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from internsp.app.checkpoint import checkpoint, manifest
from internsp.app.checkpoint.manifest import MANIFEST, write_manifest
from internsp.app.checkpoint.saver import Saver
from internsp.app.config import Config
from internsp.app.report.metrics import read_metrics
from internsp.app.session.optimizers import rate_factor
from internsp.app.session.session import Session
from internsp.app.train.run import train
from internsp.app.train.run_folder import RunLock
from internsp.errors import ConfigError, InternspError, MachineError
from internsp.failure.objects import Objects
from tests.support.ranks import run_ranks
from tests.support.saved import save

TEXT = Path(__file__).parents[1] / "data" / "text"
Changes = dict[str, dict[str, Any]]


def config(**changes: dict[str, Any]) -> Config:
    """A tiny run of two ranks that saves every second step; ``changes`` by section."""
    sections: Changes = {
        "model": {"hidden_size": 32, "layers": 2, "heads": 4, "norm_eps": 1e-2, "init_std": 0.05},
        "data": {"source": "text", "paths": [str(TEXT)], "sequence_length": 17, "held_out": 0},
        "parallel": {"weight": 2, "sequence": 2},
        "weight_parallel": {"min_shard_elements": 128},
        "optimizer": {"lr": 3e-3, "warmup_steps": 3},
        "train": {"steps": 6, "global_batch": 2, "log_every": 50},
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
    """Rank 0 may change ``files`` inside; they are restored. All ranks enter and leave together."""
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
    assert names(newest) == [MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors"]
    for file in files:
        right = file.read_bytes()
        for place in range(7, len(right), len(right) // 4):
            with changed(rank, file):
                flipped = bytearray(right)
                flipped[place] ^= 1 << place % 8
                on_first(rank, lambda file=file, new=flipped: file.write_bytes(new))
                assert str(file) in refusal(lambda: checkpoint._newest_complete(newest))
                chosen, content, notes = checkpoint._newest_complete(run)
                assert (chosen.name, content.step) == ("step-000004", 4)
                assert notes[0].startswith("checkpoint step-000006 was passed over: " + str(file))
    with changed(rank, files[0]):
        on_first(rank, files[0].unlink)
        assert "saving did not end" in refusal(lambda: checkpoint._newest_complete(newest))
        assert checkpoint._newest_complete(run)[0].name == "step-000004"
    assert checkpoint._newest_complete(run)[0] == newest


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def forge(folder: Path, file: Path, data: bytes) -> None:
    """Put ``data`` into a checkpoint's file, with a manifest that matches it."""
    file.write_bytes(data)
    content = json.loads((folder / MANIFEST).read_text())["content"]
    content["files"][file.name] = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_manifest(folder, content)


def hostile_files_are_refused_and_not_executed(rank: int, run: Path) -> None:
    mark, folder = run / "executed", run / "checkpoints" / "step-000006"
    data, table = folder / "rank-00001.safetensors", folder / ".metadata"
    evil = pickle.dumps(Evil(mark))
    with changed(rank, data, folder / MANIFEST):
        on_first(rank, lambda: forge(folder, data, evil))
        text = refusal(lambda: train(resumed(folder), run / "other"))
        assert f" was passed over: {folder / MANIFEST} is not a manifest: " in text
        assert text.splitlines()[1].endswith(f" lies outside {data.name}")
    with changed(rank, data):
        on_first(rank, lambda: data.write_bytes(evil))
        text = refusal(lambda: train(resumed(folder), run / "other"))
        assert f" was passed over: {data} has {len(evil)} bytes" in text
    # Files that no manifest lists are ignored.
    on_first(rank, lambda: table.write_bytes(evil))
    assert checkpoint.load(Session.create(config()), folder).content.step == 6
    dist.barrier()
    on_first(rank, table.unlink)
    assert not mark.exists()
    assert not (run / "other").exists(), "a run that was refused leaves no folder"


def a_folder_of_another_writer_is_refused(rank: int, run: Path) -> None:
    """A file that torch itself saves, byte entries included, has no manifest."""
    mark, folder = run / "executed", run / "foreign" / "step-000001"
    dcp.save({"run.step": Evil(mark)}, checkpoint_id=folder)
    text = refusal(lambda: train(resumed(folder), run / "other"))
    assert f"{folder / MANIFEST} is missing" in text
    assert not mark.exists()


# saving and its failures


def a_save_that_fails_leaves_the_old_one_whole(rank: int, run: Path) -> None:
    session = Session.create(config())
    folder = run / "saves"
    path = save(session, folder, 3, "first")
    before = (path / MANIFEST).read_text()
    saver = Saver(session, folder, "second")
    saver.prepare()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    saver.start(3, 0)
    with pytest.raises(MachineError) as failed:
        saver.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(failed.value) == (
        f"checkpoint {path} was not saved: rank 1: OSError: [Errno 27] File too large"
    )
    dist.barrier()
    assert names(folder) == ["latest", "step-000003"]
    assert (path / MANIFEST).read_text() == before
    dist.barrier()
    save(session, folder, 3, "third")
    assert manifest.read(path).run == "third"
    blocked = run / "blocked"
    on_first(rank, lambda: blocked.write_text("a file"))
    with pytest.raises(InternspError, match="was not saved: rank 0: NotADirectoryError"):
        save(session, blocked, 3, "fourth")
    # The last step fails: nothing is valid until rank 0 writes the manifest.
    saver = Saver(session, folder, "fifth")
    saver.start(4, 0)
    while sum(Objects().on_every(saver.progress)) < 2:
        pass
    if rank == 0:
        (next(folder.glob("*.partial")) / MANIFEST).mkdir()
    with pytest.raises(InternspError, match=r"was not saved: rank 0: IsADirectoryError.*manifest"):
        saver.finish()
    dist.barrier()
    assert names(folder) == ["latest", "step-000003"]


def loss_scale_and_random_states_come_back(rank: int, run: Path) -> None:
    half = config(train={"dtype": "float16"})
    session = Session.create(half)
    scaler = session.optimizer.loss_scaler
    assert scaler is not None
    scaler.scale, scaler.good_steps, scaler.skipped_steps = 512.0, 7, 3
    torch.manual_seed(5 + rank)
    path = save(session, run / "half", 1, "half")
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
    assert (found.content.step, found.path) == (2, path)
    assert sorted(note.partition(":")[0] for note in found.notes) == [
        *(f"optimizer.{key}" for key in sorted(now)), "train.steps",
    ]  # fmt: skip
    assert "optimizer.lr: 0.003 in the checkpoint, 0.001 from now on" in found.notes
    factor = rate_factor(settings, settings.train.steps)
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
    assert names(folder) == ["abandoned-1", "latest", "step-000002", "step-000003"]
    assert names(folder / "abandoned-1") == ["metrics.jsonl", "step-000004", "step-000006"]
    assert [row.step for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]
    assert ids(run) == before, "the run goes on"
    assert checkpoint._newest_complete(run)[0].name == "step-000003"
    dist.barrier()
    # There is nothing left to do: the checkpoint is not written again, the folder is unchanged.
    stamp = (folder / "step-000003" / MANIFEST).stat().st_mtime_ns
    train(resumed(run, train={"steps": 3}), run)
    assert (folder / "step-000003" / MANIFEST).stat().st_mtime_ns == stamp
    assert names(folder) == ["abandoned-1", "latest", "step-000002", "step-000003"]


def another_folder_is_not_mixed_with(rank: int, run: Path) -> None:
    other = run / "b"
    train(config(train={"steps": 5}), other)
    theirs = ids(other)
    dist.barrier()
    train(resumed(run, train={"steps": 4}), other)
    dist.barrier()
    assert names(other / "checkpoints") == ["latest", "step-000004"]
    assert [row.step for row in read_metrics(other / "metrics.jsonl")] == [4]
    assert names(run / "b.1" / "checkpoints") == [
        "latest",
        "step-000002",
        "step-000004",
        "step-000005",
    ]
    assert ids(run / "b.1") == theirs
    assert not ids(other) & (theirs | ids(run))
    assert not list(run.rglob("run.owner"))


def a_folder_in_use_is_refused_on_every_rank(rank: int, run: Path) -> None:
    lock = RunLock(run / "b", "holder") if rank == 0 else None
    text = refusal(lambda: train(config(), run / "b"))
    assert f"{run / 'b'} is in use by process " in text
    assert "(run holder, since" in text
    dist.barrier()
    if lock is not None:
        lock.release(run / "b")
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
        dist.barrier()  # both read the same files, which the next part changes


def test_checkpoints_are_whole_or_refused_and_runs_do_not_mix(tmp_path: Path) -> None:
    run_ranks(everything, 2, str(tmp_path), timeout=240)
    shutil.rmtree(tmp_path)
