"""Runs of ``internsp train`` on the device beside what ``internsp plan`` says of them.

One document fills all sequences, so that attention is what the plan counts. The first steps load
kernels and fill the allocator; the last ones count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch

from internsp.app.config import Config
from internsp.app.plan.compared import device_of_run
from internsp.app.plan.longest import MemoryBudget
from internsp.app.plan.replayed import replayed
from internsp.base.accelerator import device_name
from tools.bench.rounds import Spread
from tools.gpu.kept import NOTHING, Kept
from tools.gpu.options import Options

BATCH, STEPS, COUNTED = 4, 9, 5


@dataclass(frozen=True)
class Case:
    """A run: ``length`` is that of its sequences over those of others; of a batch's tokens all have
    equally many. ``changes`` are by section of the configuration."""

    name: str
    length: int = 1
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


CASES = (
    Case("activations kept"),
    Case("attention kept", 1, {"activation_checkpoint": {"mode": "selective"}}),
    Case("recomputed, longer", BATCH, {"activation_checkpoint": {"mode": "full"}}),
    Case(
        "weights, state, inputs on the host",
        1,
        {
            "activation_checkpoint": {"mode": "full", "offload": "all"},
            "weight_parallel": {"offload": ["weights", "optimizer"]},
        },
    ),
)


def run(options: Options, device: torch.device, kept: Kept = NOTHING) -> list[dict[str, Any]]:
    """A row for each of ``CASES``: spread of its seconds, peak bytes, and both predicted."""
    with tempfile.TemporaryDirectory(prefix="runs-") as folder:
        text = Path(folder) / "document.txt"
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text.write_text("".join(file.read_text(errors="replace") for file in files))
        return [
            kept.result("runs", case.name, partial(_row, case, options, device, text))
            for case in CASES
        ]


def _row(case: Case, options: Options, device: torch.device, text: Path) -> dict[str, Any]:
    values: dict[str, dict[str, Any]] = {
        "model": {
            "vocab_size": 257, "hidden_size": options.hidden, "heads": options.heads,
            "intermediate_size": options.intermediate, "layers": options.layers,
        },
        "data": {
            "source": "text", "paths": [str(text)],
            "sequence_length": (options.sequences or (1,))[0] * case.length,
        },
        "parallel": {"device": device.type},
        "train": {
            "steps": STEPS, "global_batch": BATCH // case.length, "dtype": "bfloat16",
            "eval_batches": 0,
        },
        "checkpoint": {"save": False},
    }  # fmt: skip
    for section, keys in case.changes.items():
        values.setdefault(section, {}).update(keys)
    output = text.with_name(case.name.replace(" ", "_"))
    file = output.with_suffix(".toml")
    file.write_text(tomli_w.dumps(values))
    command = [sys.executable, "-m", "internsp", "train", str(file), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{case.name}: {' '.join(command)}\n{done.stdout[-500:]}{done.stderr[-2000:]}"
        )
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    counted = [row for row in rows if "step_seconds" in row][-COUNTED:]
    config = Config(**values)
    known = device_of_run(output, device.type, device_name(device))
    here, _ = MemoryBudget(config, 1).at(config.data.sequence_length)
    return {
        "name": case.name,
        "tokens": config.train.global_batch * config.data.sequence_length,
        **asdict(Spread.of([row["step_seconds"] for row in counted])),
        "predicted": None if known is None else replayed(config, 1, known).total,
        "peak": counted[-1]["peak_memory_bytes"] if device.type != "cpu" else None,
        "planned": sum(nbytes for _, nbytes in here),
    }
