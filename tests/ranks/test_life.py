"""The table of the design, section 4, matches the recorded life of a weight."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from internsp import model_zoo
from internsp.base.trace import Trace
from internsp.config import WeightParallelConfig
from internsp.config.model import ModelConfig
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.support.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "dev" / "design.md"


def recorded(rank: int, world_size: int) -> dict[str, list[str]]:
    config = ModelConfig(vocab_size=32, hidden_size=16, layers=4, heads=2)
    model = model_zoo.build(config, dtype=torch.float64)
    mesh = ParallelMesh.create(weight=world_size, device_type="cpu", timeout_seconds=30)
    trace = Trace(enabled=True)
    config_wp = WeightParallelConfig(min_shard_elements=64, coalesce_bytes=0)
    parallelize(model, mesh, config_wp, trace=trace)
    ids = torch.randint(0, 32, (2, 8))
    loss, _ = model(ids, labels=ids)
    loss.backward()
    lives: dict[str, list[str]] = {}
    for event in trace.events:
        if event.weight:
            lives.setdefault(event.weight, []).append(event.kind)
    return lives


def table_events() -> list[str]:
    """The events column of the table, in order."""
    rows = re.findall(r"^\| ([a-z ]+) \|.*\| ([A-Z -]+) \|$", PAGE.read_text(), re.MULTILINE)
    stages = [stage for stage, _ in rows]
    assert stages == [
        "sharded", "prefetch", "use", "release", "prefetch again", "gradient ready", "finish",
        "step",
    ]  # fmt: skip
    return [e for _, events in rows for e in events.split() if e != "-"]


@pytest.mark.thorough(1)
def test_the_life_of_a_weight_table_is_what_a_step_records() -> None:
    table = table_events()
    for lives in run_ranks(recorded, 2):
        for name in ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2"):
            assert lives[f"layers.1.{name}.weight"] == table
        # The last block is not gathered again: its weights are still in their slot.
        again = ["AG", "WAIT", "USE", "FREE", "USE", "RS", "FREE", "WAIT", "FINISH"]
        assert lives["layers.3.attention.wq.weight"] == again
