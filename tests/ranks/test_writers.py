"""Metrics files of TensorBoard and W&B, read back: every row, a step once, nothing uploaded."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from internsp.app.report.metrics import StepMetrics, named, read_metrics
from tests.support.command import internsp
from tests.support.installed import need

ROOT = Path(__file__).parents[2]
need("tensorboard", "the extra [tensorboard] is not installed")
need("wandb", "the extra [wandb] is not installed")

KEY = {"WANDB_API_KEY": "a" * 40}
CONFIG = f"""
[model]
hidden_size = 32
layers = 2
heads = 4
[data]
source = "text"
paths = ["{ROOT / "tests" / "data"}"]
sequence_length = 32
held_out = 0.1
[weight_parallel]
min_shard_elements = 128
[parallel]
pipeline = 2
[train]
name = "drawn"
steps = 6
global_batch = 4
micro_batches = 2
eval_every = 2
eval_batches = 1
[checkpoint]
every = 2
[report]
writers = ["tensorboard", "wandb"]
[launch]
processes = 2
"""

# A user's program, whose TensorBoard fails at the third step.
PROGRAM = f"""
import torch.utils.tensorboard as tensorboard
import internsp

class Full(tensorboard.SummaryWriter):
    def add_scalar(self, name, value, step):
        if step == 3:
            raise OSError(28, "No space left on device")
        super().add_scalar(name, value, step)

tensorboard.SummaryWriter = Full
config = {{"train": {{"steps": 6, "global_batch": 2, "eval_batches": 0}},
          "model": {{"hidden_size": 32, "layers": 1}}, "checkpoint": {{"save": False}},
          "data": {{"source": "text", "paths": [{str(ROOT / "tests" / "data")!r}],
                   "sequence_length": 32}},
          "report": {{"writers": ["tensorboard", "wandb"]}}}}
with internsp.Trainer(config) as trainer:
    print(trainer.train())
"""


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """By tag, as TensorBoard shows them; a step that is there twice fails."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    series = {}
    for tag in found.Tags()["scalars"]:
        points = found.Scalars(tag)
        series[tag] = {point.step: point.value for point in points}
        assert len(series[tag]) == len(points), tag
    return series


def texts(folder: Path) -> str:
    """The other contents of the event files: the configuration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return str([found.Tensors(tag) for tag in found.Tags()["tensors"]])


def records(path: Path) -> Iterator[tuple[str, object]]:
    """Kind and content of the records of a ``.wandb`` file: blocks of 32 KiB, as LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            name = str(record.WhichOneof("record_type"))
            yield name, getattr(record, name)


@dataclass
class Drawn:
    folder: Path
    rows: list[StepMetrics]
    said: list[str]


@contextmanager
def proxy() -> Iterator[tuple[dict[str, str], list[bytes]]]:
    """Variables that redirect network access to a local server, and the requests it received."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                with caller:
                    heard.append(caller.recv(200))

        threading.Thread(target=listen, daemon=True).start()
        where = f"http://127.0.0.1:{server.getsockname()[1]}"
        names = ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy")
        yield dict.fromkeys(names, where), heard
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """Two stages train six steps; they resume from the fourth, to the eighth."""
    folder = tmp_path_factory.mktemp("drawn")
    (folder / "config.toml").write_text(CONFIG)
    (folder / "tmp").mkdir()
    words = ["train", "config.toml"]
    again = ["--resume", "runs/drawn/checkpoints/step-000004", "--train.steps", "8"]
    around = {**os.environ, **KEY, "TMPDIR": str(folder / "tmp")}
    said = [internsp(*words, *more, cwd=folder, environment=around).stdout for more in ([], again)]
    made = folder / "runs" / "drawn"
    return Drawn(made, read_metrics(made / "metrics.jsonl"), said)


@pytest.mark.unmeasured
def test_tensorboard_has_every_row_once_also_of_steps_that_were_done_again(drawn: Drawn) -> None:
    assert [row.step for row in drawn.rows] == list(range(1, 9))
    wanted: dict[str, dict[int, float]] = {}
    for row in drawn.rows:
        for name, value in named(row).items():
            wanted.setdefault(name, {})[row.step] = value
    found = scalars(drawn.folder / "tensorboard")
    assert found.keys() == wanted.keys()
    for name, points in wanted.items():
        assert found[name] == pytest.approx(points, rel=1e-6), name
    assert sorted(found["eval/held-out"]) == [2, 4, 6, 8]
    assert "pipeline = 2" in texts(drawn.folder / "tensorboard")


@pytest.mark.unmeasured
def test_one_folder_for_wandb_has_every_row_once_with_the_configuration(drawn: Drawn) -> None:
    (file,) = (drawn.folder / "wandb").glob("offline-run-*/*.wandb")
    everything = list(records(file))
    rows = [record for kind, record in everything if kind == "history"]
    assert [row.step.num for row in rows] == list(range(1, 9))  # type: ignore[attr-defined]
    for row, wanted in zip(rows, drawn.rows, strict=True):
        values = {  # type: ignore[attr-defined]
            "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item
        }
        assert {k: v for k, v in values.items() if k[0] != "_"} == named(wanted)
    (run,) = (record for kind, record in everything if kind == "run")
    config = {item.key: item.value_json for item in run.config.update}  # type: ignore[attr-defined]
    assert json.loads(config["train"])["steps"] == 8
    assert run.run_id == drawn.rows[0].run  # type: ignore[attr-defined]
    assert everything[-1][0] == "exit"


@pytest.mark.unmeasured
def test_nothing_is_left_behind_and_the_run_says_how_to_look(drawn: Drawn) -> None:

    def left() -> set[str]:
        names = {path.name for path in (drawn.folder.parents[1] / "tmp").iterdir()}
        # Two empty folders that wandb makes when it is imported, and removes in atexit.
        ours = ("torchinductor", "wandb-media", "wandb-artifacts")
        return {name for name in names if not any(part in name for part in ours)}

    deadline = time.monotonic() + 30
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)  # W&B's own process removes its folder after the run has ended
    assert left() == set()
    assert "tensorboard  tensorboard --logdir runs/drawn/tensorboard\n" in drawn.said[1]
    assert "wandb        wandb sync runs/drawn/wandb/offline-run-" in drawn.said[1]


@pytest.mark.unmeasured
def test_a_writer_that_fails_in_the_middle_costs_the_run_nothing_and_none_sends(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with proxy() as (around, heard):
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True,
            timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT), **KEY, **around},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tensorboard failed (OSError: [Errno 28] No space left") == 1
    made = tmp_path / "runs" / "run"
    assert [row.step for row in read_metrics(made / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert sorted(scalars(made / "tensorboard")["train/loss"]) == [1, 2]
    (file,) = (made / "wandb").glob("offline-run-*/*.wandb")
    rows = [record for kind, record in records(file) if kind == "history"]
    assert [row.step.num for row in rows] == [1, 2, 3, 4, 5, 6]  # type: ignore[attr-defined]
    assert heard == []
