"""Asynchronous saving, how it ends, and which checkpoint a run resumes from automatically."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from internsp.app.checkpoint import checkpoint, manifest
from internsp.app.checkpoint.checkpoint import seed_random
from internsp.app.checkpoint.disk import (
    PARTIAL,
    discard_partial,
    require_seen,
    steps_in,
    write_part,
)
from internsp.app.checkpoint.files import FilePlan
from internsp.app.checkpoint.manifest import MANIFEST, write_manifest
from internsp.app.checkpoint.saver import THREAD, Saver
from internsp.app.checkpoint.state_folder import save_state
from internsp.app.process.stop import StopRequest
from internsp.app.report.metrics import read_metrics
from internsp.app.session.session import Session
from internsp.app.train.run import train
from internsp.app.train.step import StepRunner
from internsp.errors import ConfigError, InternspError
from internsp.failure.objects import Objects
from internsp.optim.slices import Slices
from tests.ranks.test_checkpoint import names
from tests.ranks.test_checkpoint_meshes import bits, config, whole
from tests.support.batches import train_batch
from tests.support.ranks import ranks, run_ranks
from tests.support.saved import save
from tests.support.versions import since


def steps(runner: StepRunner, saver: Saver, numbers: range) -> list[Path]:
    """Train, and advance a save as far as possible; the checkpoints that became valid."""
    found = []
    with StopRequest() as stop:
        for number in numbers:
            *_, saved = runner.step(number, stop, saved=saver.progress())
            if path := saver.advance(saved):
                found.append(path)
    return found


def test_the_end_of_a_save_is_polled_with_pauses_that_grow_to_a_tenth_of_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("internsp.app.checkpoint.saver.time.sleep", pauses.append)
    everyone = SimpleNamespace(gather=lambda mine: [mine])
    monkeypatch.setattr("internsp.app.checkpoint.saver.Objects", lambda: everyone)
    session: Any = None
    saver, answers = Saver(session, tmp_path, "run"), iter([*[None] * 9, tmp_path / "saved"])
    monkeypatch.setattr(saver, "_saving", "one that is being written")
    monkeypatch.setattr(saver, "progress", lambda: 0.0)
    monkeypatch.setattr(saver, "advance", lambda done: next(answers))
    assert saver.finish() == tmp_path / "saved"
    assert pauses == [*(0.001 * 2**i for i in range(7)), 0.1, 0.1]


class Held:
    """Holds up the writing of files while :attr:`go` is not set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def write(self, folder: Path, name: str, data: memoryview, given_up: threading.Event) -> Any:
        """``write_part``, held up; it ends when the save is given up."""
        while not self.go.wait(0.01) and not given_up.is_set():
            pass
        return write_part(folder, name, data, given_up)


@ranks(2)
def test_saving_goes_on_beside_training_and_leaves_no_trace(rank: int, tmp_path: Path) -> None:
    session, held = Session.create(config({"weight": 2})), Held()
    runner, saver = StepRunner(session), Saver(session, tmp_path / "beside", "run")
    assert steps(runner, saver, range(2)) == []
    # The state after the first step, saved separately.
    alone = save(session, tmp_path / "alone", 2, "run")
    with patch("internsp.app.checkpoint.saver.write_part", held.write):
        if rank == 1:
            held.go.clear()
        saver.start(2, 24)
        assert steps(runner, saver, range(2, 5)) == [], "rank 1 has not written"
        assert steps_in(tmp_path / "beside") == []
        with pytest.raises(AssertionError, match="never two at once"):
            saver.start(3, 36)
        held.go.set()
        path = saver.finish()
        assert path == tmp_path / "beside" / "step-000002"
        found, expected = whole(path), whole(alone)
        assert [n for n in expected if bits(found[n]) != bits(expected[n])] == [], "of step 2"
        # Without a wait: only further steps finish the next save.
        dist.barrier()
        saver.start(5, 60)
        number, done = 5, list[Path]()
        while not done:
            done = steps(runner, saver, range(number, number + 1))
            number += 1
        assert done == [tmp_path / "beside" / "step-000005"]
        assert names(tmp_path / "beside") == ["latest", "step-000002", "step-000005"]
        # A run that ends by an exception removes an unfinished save.
        dist.barrier()
        held.go.clear()
        saver.start(number, 0)
        saver.close()
        dist.barrier()
    assert names(tmp_path / "beside") == ["latest", "step-000002", "step-000005"]
    assert [thread.name for thread in threading.enumerate() if thread.name == THREAD] == []


@ranks(2)
def test_a_rank_that_cannot_write_ends_the_save_on_every_rank(rank: int, tmp_path: Path) -> None:
    session = Session.create(config({"weight": 2}))
    saver = Saver(session, tmp_path, "run")

    def failing(*args: Any) -> Any:
        if rank == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write_part(*args)

    with patch("internsp.app.checkpoint.saver.write_part", failing):
        saver.start(1, 0)
        with pytest.raises(InternspError, match=r"was not saved: rank 1: OSError: \[Errno 5\]"):
            saver.finish()
    dist.barrier()
    assert names(tmp_path) == []
    dist.barrier()  # no rank begins the next save before all have looked
    saver.start(1, 0)
    assert saver.finish() == tmp_path / "step-000001"
    saver.close()


@ranks(2)
def test_what_one_rank_cannot_plan_is_told_on_every_rank(rank: int) -> None:
    def failing(*_: Any) -> Any:
        raise TypeError("no tensor")

    odd = Slices(torch.Size((2, 3)), torch.zeros(1), {(1, rank): torch.zeros(1, 1)})
    why = "x invalid fill" if since("2.12") else "global plan"
    with pytest.raises(InternspError, match=f"does not fit together: .*{why}"):
        FilePlan.make({"x": odd})
    if rank == 1:
        odd.__create_write_items__ = failing  # type: ignore[attr-defined]
    with pytest.raises(InternspError, match="does not fit together: rank 1: TypeError: no tensor"):
        FilePlan.make({"x": odd})


@ranks(1)
def test_a_value_that_json_lacks_ends_the_save_with_its_name_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    saver = Saver(Session.create(config({})), tmp_path, "run")
    odd = {}, {"optimizer.w.x": float("inf")}
    saver.prepare()[1].zero_()
    with (
        patch("internsp.app.checkpoint.saver.state_of", lambda _: odd),
        patch("internsp.app.checkpoint.files.FilePlan.fill"),
    ):
        saver.start(1, 0)
    with pytest.raises(InternspError, match="rank 0: ValueError: Out of range float values"):
        saver.finish()
    assert names(tmp_path) == []


def killed(rank: int, world: int, folder: str) -> None:
    session = Session.create(config({"weight": 2}))
    save(session, Path(folder), 1, "run")
    saver, held = Saver(session, Path(folder), "run"), Held()
    with patch("internsp.app.checkpoint.saver.write_part", held.write):
        if rank == 0:
            held.go.clear()
        saver.start(2, 0)
        while sum(Objects().gather(saver.progress())) < 1:
            pass
        assert list(Path(folder).glob("*.partial/rank-00001.safetensors"))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_are_killed_while_they_write_leave_the_newest_whole_checkpoint(
    tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(killed, 2, str(tmp_path))
    assert [step for step, _ in steps_in(tmp_path)] == [1]
    content = manifest.read(tmp_path / "step-000001")
    manifest.check_files(tmp_path / "step-000001", content, content.files)
    (left,) = [name for name in names(tmp_path) if name.endswith(PARTIAL)]
    assert left.startswith("step-000002.")
    discard_partial(tmp_path)  # as the next run does
    assert names(tmp_path) == ["latest", "step-000001"]


def losses(folder: Path) -> dict[int, float]:
    return {row.step: row.loss for row in read_metrics(folder / "metrics.jsonl")}


def by_itself(rank: int, world: int, folder: str, runs: list[dict[str, Any]]) -> None:
    for changes in runs:
        mesh, elastic = changes.pop("mesh"), changes.pop("elastic", True)
        if elastic:
            os.environ["TORCHELASTIC_RUN_ID"] = "test"
        train(config(mesh, **changes), Path(folder))
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        dist.barrier()


def test_a_run_goes_on_by_itself_on_other_ranks_and_takes_every_row_once(tmp_path: Path) -> None:
    """Started on two ranks, resumed on three and on one, compared with a run that never stops."""
    # A schedule that does not depend on train.steps.
    saving = {"checkpoint": {"every": 2, "keep_last": 2}, "optimizer": {"min_lr_ratio": 1.0}}
    one, other = tmp_path / "one", tmp_path / "other"
    whole_run = {"mesh": {}, "train": {"steps": 6}, "elastic": False, **saving}
    run_ranks(by_itself, 1, str(one), [whole_run])
    run_ranks(by_itself, 2, str(other), [{"mesh": {"weight": 2}, "train": {"steps": 3}, **saving}])
    assert names(other / "checkpoints") == ["latest", "step-000002", "step-000003"]
    # The newest is damaged: the one before is used.
    with (other / "checkpoints" / "step-000003" / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    run_ranks(by_itself, 3, str(other), [{"mesh": {"weight": 3}, "train": {"steps": 4}, **saving}])
    run_ranks(by_itself, 1, str(other), [{"mesh": {}, "train": {"steps": 6}, **saving}])
    assert losses(other) == pytest.approx(losses(one), rel=1e-5)
    kept = [step for step, _ in steps_in(other / "checkpoints")]
    assert kept == [6, 4], "the newest two"
    last = [whole(folder / "checkpoints" / "step-000006") for folder in (one, other)]
    for name, value in last[0].items():
        torch.testing.assert_close(last[1][name], value, rtol=1e-3, atol=1e-5)
    assert manifest.read(other / "checkpoints" / "step-000006").data.sequences == 72


@ranks(1)
def test_another_batch_goes_on_at_the_next_row_and_random_states_follow_a_rule(
    tmp_path: Path,
) -> None:
    settings = config({}, train={"global_batch": 12})
    session = Session.create(settings)
    torch.manual_seed(5)
    path = save(session, tmp_path, 3, "run", sequences=36)
    wanted = torch.rand(3)
    larger = Session.create(config({}, train={"global_batch": 18}))
    found = checkpoint.load(larger, path)
    assert (found.content.step, found.content.data.sequences) == (3, 36)
    assert torch.equal(torch.rand(3), wanted)
    assert "train.global_batch: 12 in the checkpoint, 18 from now on" in found.notes
    batch = train_batch(larger.source, found.content.data.sequences).ids
    parts = [train_batch(session.source, 36).ids, train_batch(session.source, 48).ids[:6]]
    assert torch.equal(batch, torch.cat(parts))
    # As if two ranks had saved it.
    content = json.loads((path / MANIFEST).read_text())["content"]
    content["mesh"]["world"] = 2
    write_manifest(path, content)
    notes = checkpoint.load(larger, path).notes
    assert any("2 ranks saved, 1 go on: random states are derived anew" in note for note in notes)
    seeds = [torch.initial_seed()]
    for step, of_rank in ((3, 0), (3, 1), (4, 0)):
        seed_random(0, step, of_rank)
        seeds.append(torch.initial_seed())
    assert seeds[0] == seeds[1]
    assert len({*seeds}) == 3
    # An order of the data that differs from the saved one is detected.
    content["data"]["token"] += 1
    write_manifest(path, content)
    with pytest.raises(InternspError, match="use the version of numpy with which "):
        checkpoint.load(larger, path)


def apart(rank: int, world_size: int, folder: Path) -> list[str]:
    """What is said where each rank has a disk of its own, on which rank 0 has an older run's logs
    at last."""
    said, own, soon = [], folder / str(rank), partial(require_seen, seconds=0.1)
    given = config({"weight": 2}, train={"steps": 1}, parallel={"weight": 2, "timeout_seconds": 4})
    for logs in (False, True):
        if logs and not rank:
            (own / "logs").mkdir(parents=True, exist_ok=True)
            (own / "logs" / "rank-00001.log").touch()
        dist.barrier()
        told = pytest.raises(InternspError)
        with patch(f"{Saver.__module__}.require_seen", soon), told as caught:
            train(given, own)
        said.append(str(caught.value))
    assert steps_in(own / "checkpoints") == []
    refused = pytest.raises(ConfigError, match=r"see rank-00001\.safetensors in .*0/state")
    with patch(f"{save_state.__module__}.require_seen", soon), refused:
        save_state(own / "state", {f"of {rank}": torch.zeros(1)}, {})
    return said


def test_ranks_without_a_folder_that_they_share_are_told_before_and_at_a_save(
    tmp_path: Path,
) -> None:
    first, other = run_ranks(apart, 2, tmp_path)
    assert first == other
    seen = "rank 0 does not see rank-00001.{} in {}, which another rank has written: give all ranks"
    assert seen.format("log", tmp_path / "0" / "logs") in first[0]
    assert "step-000001 was not saved: rank 0: ConfigError: rank 0 does not see" in first[1]
