"""Faults of ``python -m tests.chaos``, and deliberate mistakes that it must detect.

The full campaign of a thousand is run by the command, which writes ``docs/dev/reliability.md``.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from internsp.app.checkpoint import disk, manifest
from internsp.app.checkpoint.disk import steps_in
from internsp.app.config import Config
from internsp.app.launch.launch import ChildError, start
from internsp.app.train.run import train
from tests.chaos.report import lines
from tests.chaos.runs import NAMED, TIMEOUT, Runs, settings
from tests.chaos.storage import Storage
from tests.chaos.tally import Found
from tests.chaos.tasks import Tasks
from tests.support import chaos

TASKS = ("saves", "two", "one", "one", "mesh", "one", "two", "one")
NOTHING = ("hangs", "unusable", "lost", "repeated", "different", "left", "unnamed")


@pytest.mark.slow(25)
@pytest.mark.parametrize("faults", [20, pytest.param(100, marks=pytest.mark.thorough(25))])
def test_after_many_faults_nothing_is_lost_repeated_different_or_left_over(faults: int) -> None:
    tasks, total = Tasks(13, private=False, network=False), Found(runs=0)
    number = 0
    while len(total.faults) < faults:
        total.add(tasks.do(number, TASKS[number % len(TASKS)], saves=70 * faults // 100))
        number += 1
    tasks.close()
    print(*lines(total), sep="\n")
    assert total.wrong == []
    assert {name: getattr(total, name) for name in NOTHING} == dict.fromkeys(NOTHING, 0)
    assert total.named < NAMED
    assert total.worst < TIMEOUT + 15
    assert len(total.by_kind()) > (15 if faults >= 100 else 8)
    assert total.restarts > 0.7 * faults


def fault(kind: str, point: str, n: int, rank: int = 0, when: str = "before") -> dict[str, Any]:
    return {"kind": kind, "point": point, "n": n, "rank": rank, "when": when, "seconds": 0.0}


def begin(output: Path, config: Config, *faults: dict[str, Any]) -> int:
    """Start the run with ``faults``."""
    plan = [{**one, "id": number} for number, one in enumerate(faults)]
    chaos.plan_of(output).write_text(json.dumps({"faults": plan}))
    return start(chaos.run, config, output)


@pytest.mark.parametrize("mistake", ["repeats a batch", "forgets moments"])
def test_a_run_that_does_not_go_on_as_it_was_is_found(mistake: str, tmp_path: Path) -> None:
    plans = [[fault("kill", "step", 6)]]
    assert Runs(tmp_path).chain(random.Random(0), (1, 1), plans).wrong == []
    found = Runs(tmp_path, [mistake]).chain(random.Random(0), (1, 1), plans)
    assert found.different > 0
    assert (found.repeated > 0) == (mistake == "repeats a batch"), found.wrong


def put_in(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in saving."""
    write_part, commit = disk.write_part, disk.commit
    if mistake == "folders are not flushed":
        monkeypatch.setattr(disk, "sync", lambda _: None)
    elif mistake == "files are not flushed":

        def unflushed(*args: Any) -> Any:
            kept, os.fsync = os.fsync, lambda _: None
            try:
                return write_part(*args)
            finally:
                os.fsync = kept

        monkeypatch.setattr(disk, "write_part", unflushed)
    elif mistake == "renamed before the manifest is there":

        def early(partial: Path, final: Path, content: str, *keep: int) -> None:
            commit(partial, final)
            manifest.write_manifest(final, content)
            disk.thin_out(final.parent, *keep)

        monkeypatch.setattr(disk, "publish", early)
    elif mistake:
        monkeypatch.setattr(manifest, "check_files", lambda *_: None)


@pytest.mark.parametrize(
    "mistake",
    [
        "", "folders are not flushed", "files are not flushed",
        "renamed before the manifest is there", "digests are not compared",
    ],
)  # fmt: skip
def test_a_save_that_is_not_durable_in_order_or_not_verified_is_found(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in(mistake, monkeypatch)
    total = Found(runs=0)
    for found in Storage(tmp_path).draw(random.Random(1), 75):
        total.add(found)
    assert bool(total.unusable or total.lost or total.different) == bool(mistake), total.wrong


@pytest.mark.thorough(1)
def test_a_run_killed_as_its_last_checkpoint_becomes_valid_has_its_last_row(
    tmp_path: Path,
) -> None:
    runs = Runs(tmp_path)
    runs.reference(1, 1)
    (last,) = (
        line["count"] for line in chaos.lines_of(tmp_path / "reference1-1")
        if line.get("point") == "writer"
    )  # fmt: skip
    found = runs.chain(random.Random(0), (1, 1), [[fault("kill", "writer", last)]])
    assert [one.kind for one in found.faults] == ["kill"]
    assert found.wrong == []


@pytest.mark.thorough(2)
def test_a_rank_that_is_killed_is_named_at_once_with_its_place_its_log_and_how_to_go_on(
    tmp_path: Path,
) -> None:
    output = tmp_path / "run"
    with pytest.raises(ChildError) as caught:
        begin(output, settings(2), fault("kill", "AG", 18, 1, "after"))
    assert str(caught.value) == "rank 1 was ended by SIGKILL (out of memory?)"
    (happened,) = [line for line in chaos.lines_of(output) if "fault" in line]
    assert time.monotonic() - happened["at"] < NAMED
    seen, onward = "\n".join(caught.value.__notes__).splitlines()
    log = output / "logs" / "rank-00001.log"
    assert re.fullmatch(
        rf"  rank 1 was at step \d+, last collective: all-gather of \S+ \((for|back)ward\); "
        rf"its log: {log}",
        seen,
    )
    step = steps_in(output / "checkpoints")[0][0]
    config = output / "config.toml"
    assert onward == (
        f"  to go on after step {step}: internsp train {config} --output {output} --resume auto"
    )
    assert start(train, Config.model_validate(tomllib.loads(config.read_text())), output) == 0
    again = (output / "logs" / "rank-00001.log").read_text()
    assert again.count("rank 1, process ") == 2, "one of each start"
    assert "ended well" in again
