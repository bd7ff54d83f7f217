"""Ten thousand random configurations, files and folders; some of them as real commands."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.fuzz.configurations import memory_folder, run_cases
from tests.support.command import internsp

SEED = int(os.environ.get("INTERNSP_FUZZ_SEED", "0"))
COUNT = int(os.environ.get("INTERNSP_FUZZ_COUNT", "10000"))
PARTS = 16  # so that several workers share them


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(part, marks=pytest.mark.thorough(30)) for part in range(1, PARTS))],
)
def test_what_is_drawn_is_refused_in_clear_words_or_planned_and_damages_nothing(part: int) -> None:
    each = COUNT // PARTS
    # A case of deep tables leaves no stack to the callbacks of other tests' libraries (hypothesis).
    others, gc.callbacks[:] = gc.callbacks[:], []
    try:
        with tempfile.TemporaryDirectory(prefix="internsp-fuzz-", dir=memory_folder()) as folder:
            counts, findings = run_cases(SEED, range(part * each, (part + 1) * each), Path(folder))
    finally:
        gc.callbacks[:] = others
    assert findings == [], "\n\n".join(findings[:5])
    assert sum(counts.values()) == each
    # Ensures that the cases are neither all invalid nor all valid.
    assert counts["refused"] > each // 4
    assert counts["checked"] + counts["planned"] > each // 10
    assert counts["planned"]


SMALL = """
[model]
hidden_size = 16
layers = 1
heads = 2
intermediate_size = 32
[data]
sequence_length = 16
source = "jsonl"
paths = ["rows.jsonl"]
[train]
steps = 1
global_batch = 2
[parallel]
device = "cpu"
"""


def command(home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    around = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return internsp(*words, cwd=home, environment=around | environment, check=False)


@pytest.mark.slow(12)
def test_real_commands_end_with_a_status_that_says_whose_mistake_it_was(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    rows = [json.dumps({"text": f"a line of text number {i}"}) for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    done = command(tmp_path, "train", "run.toml", "--output", "good")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "good").iterdir()) == [
        "checkpoints", "config.toml", "logs", "metrics.jsonl", "report.html", "report.json",
        "run.lock",
    ]  # fmt: skip
    # Detected by a rank: not among the checks before ranks start.
    large = rows * (6_000_000 // len("\n".join(rows)))
    (tmp_path / "large.jsonl").write_text("\n".join([*large, '{"text": "cut off he']))
    before = {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")}
    refused = [
        (2, "rows.jsonl cannot be written: Not a directory", ["--output", "rows.jsonl"], {}),
        (2, "WORLD_SIZE: expected a whole number", [], {"RANK": "0", "WORLD_SIZE": "abc"}),
        (3, "finds no CUDA device", ["--parallel.device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}),
        (2, f"large.jsonl, row {len(large) + 1} is not JSON",
         ["--data.paths", "large.jsonl", "--train.name", "large"], {}),
    ]  # fmt: skip
    for status, words, options, environment in refused:
        done = command(tmp_path, "train", "run.toml", *options, **environment)
        assert done.returncode == status, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 3
    assert {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")} == before
