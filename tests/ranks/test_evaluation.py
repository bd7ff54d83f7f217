"""Several evaluation texts: each is reported under its name, on any mesh."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import internsp
from internsp.app.config import Config, load_config
from internsp.app.report.metrics import StepMetrics, read_metrics
from internsp.app.train.run import train
from internsp.errors import ConfigError
from tests.ranks.test_train import TEXT, config
from tests.support.command import internsp as run_command
from tests.support.ranks import run_ranks

LENGTH = 33
CODE = "".join(f"def f{n}(x): return x * {n}\n" for n in range(80))


def texts(folder: Path) -> list[dict[str, Any]]:
    """One document of code, and rows of jsonl."""
    (folder / "code.py").write_text(CODE)
    rows = [{"body": f"row {n} says: {'la ' * n}"} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        {"name": "code", "source": "text", "paths": [str(folder / "code.py")]},
        {"name": "rows", "source": "jsonl", "paths": [str(folder / "rows.jsonl")],
         "text_field": "body"},
    ]  # fmt: skip


def settings(folder: Path, mesh: dict[str, int], mixed: bool = False, **data: Any) -> Config:
    given: dict[str, Any] = {"evaluation": texts(folder), **data}
    if mixed:
        parts = [{"source": "text", "paths": [str(p)]} for p in sorted(TEXT.iterdir())[:2]]
        given |= {"mixture": parts, "source": "stdlib", "paths": []}
    return config(
        data=given, parallel=mesh,
        train={"steps": 4, "eval_every": 2, "dtype": "float64", "micro_batches": 2},
    )  # fmt: skip


def run(rank: int, world: int, runs: list[tuple[Config, str]]) -> None:
    for one, folder in runs:
        train(one, Path(folder))


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "kinds",
    [[{"mixed": True, "pack": False}], pytest.param([{}], marks=pytest.mark.thorough(7))],
    ids=["mixed", "packed"],
)
def test_losses_of_all_texts_are_those_of_one_process_on_every_mesh(
    tmp_path: Path, kinds: list[dict[str, Any]]
) -> None:
    meshes = {1: [{}], 4: [{"weight": 2, "sequence": 2}, {"weight": 2, "pipeline": 2}]}
    found: dict[tuple[int, int, int], list[StepMetrics]] = {}
    for world, each in meshes.items():
        runs = {
            (world, m, k): (settings(tmp_path, mesh, **kind), str(tmp_path / f"{world}-{m}-{k}"))
            for m, mesh in enumerate(each)
            for k, kind in enumerate(kinds)
        }
        run_ranks(run, world, list(runs.values()), timeout=240)
        for key, (_, folder) in runs.items():
            found[key] = read_metrics(Path(folder) / "metrics.jsonl")
    for (world, m, k), rows in found.items():
        wanted = found[1, 0, k]
        assert [bool(row.evaluated) for row in rows] == [False, True, False, True]
        for row, want in zip(rows, wanted, strict=True):
            assert list(row.evaluated) == list(want.evaluated), (world, m, k)
            assert row.evaluated == pytest.approx(want.evaluated, rel=1e-9), (world, m, k)
        assert list(rows[-1].evaluated) == ["held-out", "code", "rows"]
        assert list(rows[-1].eval_losses or ()) == ["code", "rows"], "held-out has its own key"
        assert len(set(rows[-1].evaluated.values())) == 3


class ByHand(internsp.Callback):
    """The loss of a text, split into sequences here, with the current model."""

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def on_evaluation(self, trainer: internsp.Trainer, metrics: StepMetrics) -> None:
        ids = torch.tensor([*CODE.encode(), 256])
        ids = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
        chosen = ids[[number * len(ids) // 8 for number in range(8)]]
        layout = internsp.SequenceLayout.create(chosen, rank=0, size=1)
        with torch.no_grad():
            total, count = trainer.model(
                layout.input_ids, layout=layout, labels=layout.labels, loss_chunk=1024
            )
        assert metrics.eval_losses is not None
        self.pairs.append((metrics.eval_losses["code"], float(total / count)))


def by_hand(rank: int, world: int, folder: str) -> list[tuple[float, float]]:
    callback = ByHand()
    given = settings(Path(folder), {}, held_out=0.0)
    with internsp.Trainer(given, output=Path(folder) / "run", callbacks=[callback]) as trainer:
        trainer.train()
    return callback.pairs


def test_a_texts_loss_is_that_of_its_own_sequences(tmp_path: Path) -> None:
    (pairs,) = run_ranks(by_hand, 1, str(tmp_path))
    assert len(pairs) == 2
    for found, wanted in pairs:
        assert found == pytest.approx(wanted, rel=1e-12)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert list(rows[-1].evaluated) == ["code", "rows"]


@pytest.mark.unmeasured
def test_every_place_where_a_run_is_looked_at_has_each_text(tmp_path: Path) -> None:
    tables = "".join(
        "[[data.evaluation]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in table.items())
        for table in texts(tmp_path)
    )
    (tmp_path / "config.toml").write_text(
        f"[model]\nhidden_size = 32\nlayers = 1\nheads = 4\n[data]\nsequence_length = 32\n"
        f'source = "text"\npaths = [{json.dumps(str(TEXT))}]\n{tables}'
        '[train]\nname = "a"\nsteps = 3\neval_every = 1\nglobal_batch = 2\n'
        "eval_batches = 2\n[checkpoint]\nevery = 2\n"
    )

    def command(*words: str) -> str:
        wide = {**os.environ, "COLUMNS": "200"}
        return run_command(*words, cwd=tmp_path, environment=wide).stdout

    said = command("train", "config.toml")
    (last,) = [row.evaluated for row in read_metrics(tmp_path / "runs/a/metrics.jsonl")][-1:]
    assert list(last) == ["held-out", "code", "rows"]
    note = ", ".join(f"{name} loss {loss:.4f}" for name, loss in last.items())
    assert f"step 3: {note}\n" in said
    assert f"  code loss {last['code']:.4f}  rows loss {last['rows']:.4f}  lr" in said
    assert f"\n  code loss   {last['code']:.4f}\n" in said
    # The tables do not affect training: a run can resume with others.
    fewer = (tmp_path / "config.toml").read_text().replace('"rows"', '"lines"')
    (tmp_path / "config.toml").write_text(fewer.replace("steps = 3", "steps = 4"))
    command("train", "config.toml", "--resume", "runs/a/checkpoints/step-000002", "--output", "b")
    page = (tmp_path / "runs/a/report.html").read_text()
    assert "Evaluation (nats per token)" in page
    for name, loss in last.items():
        assert f"{name} loss" in page
        assert f"{loss:.4f}" in page
    table = command("report", "runs/a", "b")
    heading, first, second = (line.split() for line in table.splitlines()[:3])
    assert heading[3:7] == ["held-out", "code", "rows", "lines"]
    assert first[3:7] == [*(f"{loss:.4f}" for loss in last.values()), "-"]
    assert second[5] == "-"


SETTING = {"source": "text", "paths": ["t.txt"], "name": "code"}


@pytest.mark.parametrize(
    ("data", "train_keys", "wanted"),
    [
        ({"evaluation": [SETTING, SETTING]}, {}, "table 2: name: another is called 'code', too"),
        ({"evaluation": [SETTING], "mixture": [SETTING]}, {},
         "data.mixture: no such file or folder: t.txt\n  data.evaluation: no such file or fol"),
        ({"evaluation": [{**SETTING, "name": "held-out"}]}, {}, "name of another figure"),
        ({"evaluation": [{**SETTING, "name": "a/b"}]}, {}, "name"),
        ({"evaluation": [{"source": "text", "paths": ["t.txt"]}]}, {}, "name"),
        ({"evaluation": [{**SETTING, "path": "x"}]}, {}, "did you mean paths?"),
        ({"evaluation": [{**SETTING, "paths": []}]}, {}, "needs at least one file or folder"),
        ({"evaluation": [SETTING]}, {"eval_batches": 0}, "nothing is evaluated"),
        ({}, {"eval_average": True}, "it is gone: metrics.jsonl and the report have the loss of"),
        ({}, {"early_stop": 2}, "it is gone: in a program, call trainer.stop"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_are_refused_by_name(
    data: dict[str, Any], train_keys: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted.replace("?", r"\?")):
        load_config({"data": data, "train": train_keys})


@pytest.mark.parametrize(("content", "pack"), [("", True), ("short", True), ("", False)])
def test_a_text_without_a_sequence_is_refused_before_a_run(
    content: str, pack: bool, tmp_path: Path
) -> None:
    from internsp.app.launch.preflight import check_before_start

    (tmp_path / "t.txt").write_text(content)
    table = {**SETTING, "paths": [str(tmp_path / "t.txt")]}
    given = load_config({"data": {"evaluation": [table], "sequence_length": 32, "pack": pack}})
    wanted = r"a sequence takes .* but the text 'code' of data\.evaluation has "
    with pytest.raises(ConfigError, match=wanted):
        check_before_start(given, tmp_path / "out")
