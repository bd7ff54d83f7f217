"""Predicted beside measured seconds of a traced step, and the component that was wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from internsp.app.config import Config
from internsp.app.plan.compared import COMPUTATION, compared, device_of_run
from internsp.app.plan.devices import device_named, devices
from internsp.app.plan.replayed import replayed
from internsp.app.report.page import Report
from internsp.base.trace import Event
from internsp.mesh import MeshShape

CPU = device_named("cpu")
GIVEN = Config.model_validate({"parallel": {"weight": 2, "device": "cpu"}})
SHAPE = MeshShape(2, **GIVEN.degrees())


def event(kind: str, start: float, end: float, unit: str = "a") -> Event:
    return Event(kind, unit, f"{unit}.w", "forward", start, end, 8)


TRACE = [
    event("AG", 0, 4), event("WAIT", 0, 3), event("USE", 3, 3),
    event("RS", 6, 11, "b"), event("WAIT", 9, 11, "b"),
    event("STEP", 11, 15), event("PUBLISH", 14, 18, "c"), event("WAIT", 14, 18, "c"),
]  # fmt: skip


def test_each_second_of_a_trace_is_in_one_component_and_so_is_each_predicted_one() -> None:
    rows = {name: (ours, took) for name, ours, took in compared(GIVEN, SHAPE, CPU, {0: TRACE})}
    took = {name: row[1] for name, row in rows.items()}
    assert took == {
        COMPUTATION: 6.0, "gathers in the open": 3.0, "reductions in the open": 2.0,
        "replicas": 4.0, "optimizer": 3.0,
    }  # fmt: skip
    assert sum(took.values()) == 18.0
    total = replayed(GIVEN, 2, CPU).total
    assert sum(row[0] for row in rows.values()) == pytest.approx(total)
    halves = compared(GIVEN, SHAPE, CPU, {0: TRACE, 1: [event("STEP", 0, 9)]})
    assert {row[0]: row[2] for row in halves}["optimizer"] == 6.0  # a mean of ranks
    assert compared(GIVEN, SHAPE, CPU, {0: []}) == []
    assert compared(GIVEN, SHAPE, replace(CPU, peak={}), {0: TRACE}) == []


def test_a_model_that_begins_with_a_folders_weights_is_predicted_as_one_of_its_sizes(
    tmp_path: Path,
) -> None:
    content = {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    begun = Config.model_validate(
        {"model": {"path": str(tmp_path)}, "parallel": {"weight": 2, "device": "cpu"}}
    )
    plain = begun.model_copy(update={"model": begun.model.model_copy(update={"path": None})})
    assert begun.model.layers == 5
    assert replayed(begun, 2, CPU).total == replayed(plain, 2, CPU).total


def test_computation_that_messages_slow_down_is_computation() -> None:
    """As in a trace, where only waits are messages: a slower link's waits, and nothing else."""
    slow = replace(CPU, fitted=replace(CPU.fitted, slowdown=3.0))
    for device in (CPU, slow):
        found = replayed(GIVEN, 2, device)
        rows = {name: ours for name, ours, _ in compared(GIVEN, SHAPE, device, {0: TRACE})}
        assert rows["reductions in the open"] == pytest.approx(
            found.parts["exposed reductions"] - found.slowed["exposed reductions"]
        )
    assert replayed(GIVEN, 2, slow).slowed["exposed gathers"] > 0


def test_the_device_of_a_run_is_the_calibrated_one_beside_it_or_the_one_torch_names(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    assert device_of_run(run, "cpu", "") is devices()["cpu"]
    found = device_of_run(run, "cuda", "NVIDIA H100 80GB HBM3")
    assert found is not None
    assert found.name == "h100-sxm"
    assert device_of_run(run, "cuda", "NVIDIA T4") is None
    built_in = Path(__file__).parents[2] / "internsp/app/plan/devices.toml"
    entry = built_in.read_text().partition("[cpu]")[2]
    (tmp_path / "device.toml").write_text(f"[mine]\nkind = 'cpu'{entry}")
    own = device_of_run(run, "cpu", "")
    assert own is not None
    assert own.name == "mine"
    assert device_of_run(run, "cuda", "NVIDIA T4") is None
    shutil.copy(__file__, tmp_path / "device.toml")  # of something else: the page is written
    assert device_of_run(run, "cpu", "") is devices()["cpu"]


def page(rows: list[tuple[str, float, float]]) -> str:
    return Report(
        title="run", config_toml="", metrics=[], mesh={}, memory=[], timeline={},
        predicted=rows, device="mine",
    ).render()  # fmt: skip


def test_the_page_says_which_component_was_wrong() -> None:
    right, wrong = ("computation", 0.5, 0.51), ("replicas", 0.1, 0.3)
    text = page([right, wrong])
    assert "Most wrong is replicas: predicted too short by 25% of the step." in text
    assert "600.00" in text
    assert "810.00" in text
    assert "rates of mine" in text
    assert "No component is off by 2% of the step." in page([right])
    assert "Predicted and measured" not in page([])
