"""On a GPU: what a run says of its memory over the chosen steps."""

from __future__ import annotations

import pickle
from pathlib import Path

import internsp
from tests.ranks.test_train import config


def test_a_snapshot_names_what_was_allocated_in_the_chosen_steps(tmp_path: Path) -> None:
    given = config(
        parallel={"device": "cuda"},
        train={"steps": 4, "profile": "memory", "profile_steps": [2, 3]},
    )
    with internsp.Trainer(given, output=tmp_path / "run") as trainer:
        trainer.train()
    traces = tmp_path / "run" / "traces"
    # Written by torch in this very test: pytorch.org/memory_viz reads the same.
    snapshot = pickle.loads((traces / "memory-rank0.pickle").read_bytes())
    events = [event for trace in snapshot["device_traces"] for event in trace]
    assert any(event["action"] == "alloc" and event["frames"] for event in events)
    assert snapshot["segments"]
