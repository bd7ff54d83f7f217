"""The table of the design, section 4, matches the recorded life of a weight."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from internsp import model_zoo
from internsp.base.trace import Trace
from internsp.config import WeightParallelConfig
from internsp.config.model import ModelConfig
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.support.ranks import ranks, run_ranks

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


@ranks(2)
def test_a_gather_poisons_the_bytes_of_others_before_it_fills_them(rank: int) -> None:
    """Else every test that poisons slots would see no stale read."""
    model = model_zoo.build(ModelConfig(vocab_size=32, hidden_size=16, layers=4, heads=2))
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=30)
    made = parallelize(model, mesh, WeightParallelConfig(min_shard_elements=64, coalesce_bytes=0))
    ids = torch.randint(0, 32, (2, 8))
    model(ids, labels=ids)[0].backward()  # from here on, every gather finds its views
    made.state.pool.poison = True
    of_units: dict[str, set[bool]] = {}
    for collectives in made.state.gathers.values():

        def all_gather(
            outputs: Any, shards: Any, unit: str, *given: Any, send: Any = collectives.all_gather
        ) -> Any:
            empty = all(bool(output.isnan().all()) for output in outputs)
            of_units.setdefault(unit, set()).add(empty)
            return send(outputs, shards, unit, *given)

        collectives.all_gather = all_gather  # type: ignore[method-assign]
    with torch.no_grad():
        model(ids, labels=ids)
    assert of_units["layers.2"] == of_units["layers.3"] == {True}, "what layers 0 and 1 have left"
    gone = {w.unit.name for w in made.replicated.sharded if w.used_version is None}
    assert gone == {"layers.0", "layers.1"}, "what has been overwritten is no longer there"
