"""``internsp plan`` of a pipeline: it prints what runs, and the picture shows all of it."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from internsp.app import cli
from internsp.app.config import Config
from internsp.app.plan.pipeline import tables
from internsp.app.plan.screen import listing, print_plan
from internsp.app.plan.step import make_plan
from internsp.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def config(**changes: dict[str, object]) -> Config:
    sections: dict[str, dict[str, object]] = {
        "model": {"vocab_size": 257, "hidden_size": 16, "layers": 9, "heads": 2},
        "data": {"sequence_length": 32},
        "parallel": {"pipeline": 2, "weight": 2},
        "pipeline": {"schedule": "ZBVZeroBubble", "chunks": 2},
        "weight_parallel": {"min_shard_elements": 64},
        "train": {"micro_batches": 4, "global_batch": 8},
    }
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


def printed(settings: Config, picture: Path | None = None) -> str:
    out = io.StringIO()
    print_plan(settings, 4, Console(file=out, width=160), picture)
    return out.getvalue() + listing(make_plan(settings, 4))


@pytest.mark.thorough(3)
def test_the_plan_shows_every_rank_and_what_other_schedules_would_gather() -> None:
    text = printed(config())
    plan = make_plan(config(), 4)
    for rank in plan.ranks:
        assert f" {rank.schedule.count('AG')} " in text
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"):
        assert name in text
    assert "stage 3 micro-batch 0 backward (input)" in text


def columns(table: Table) -> list[list[str]]:
    return [list(column.cells) for column in table.columns]


@pytest.mark.thorough(1)
def test_the_table_of_ranks_says_what_each_holds_and_launches() -> None:
    plan = make_plan(config(), 4)
    ranks, stages, blocks, slots, *launched = columns(tables(plan)[0])
    assert ranks == ["0", "1"]
    assert stages == ["0\n3", "1\n2"]  # a V
    assert blocks == ["0-2\n8-8", "3-5\n6-7"]
    assert slots == ["2\n1", "2\n2"]
    gathers, reductions, messages = ([cell.split("\n")[0] for cell in c] for c in launched)
    assert gathers == [str(rank.schedule.count("AG")) for rank in plan.ranks]
    assert reductions == [str(rank.schedule.count("RS")) for rank in plan.ranks]
    assert messages == ["8", "8"], "four of hidden states and four of their gradients"


@pytest.mark.thorough(1)
def test_other_schedules_are_told_as_each_of_them_would_be_planned() -> None:
    """Gathers of the busiest rank, re-gathered and kept; time as the parts of one forward."""
    names, chunks, again, kept, time = columns(
        tables(make_plan(config(), 4))[1]
    )
    assert dict(zip(names, chunks, strict=True)) == {
        "GPipe": "1", "1F1B": "1", "Interleaved1F1B": "2", "InterleavedZeroBubble": "2",
        "ZBVZeroBubble": "2", "DualPipeV": "2",
    }  # fmt: skip
    for name, found in (("1F1B", again), ("ZBVZeroBubble", kept)):
        settings = config(
            pipeline={"schedule": name, "chunks": 1 if name == "1F1B" else 2},
            weight_parallel={"keep_unsharded": "all" if found is kept else "none"},
        )
        wanted = [rank.schedule.count("AG") for rank in make_plan(settings, 4).ranks]
        assert wanted[0] != wanted[1]
        assert found[names.index(name)] == str(max(wanted)), name
    # Four micro-batches, a forward of all chunks of a rank 1 and a backward 2: 12 without a bubble.
    times = dict(zip(names, map(float, time), strict=True))
    assert times["GPipe"] == times["1F1B"] == 15
    assert 12 < times["ZBVZeroBubble"] < times["Interleaved1F1B"] < 15


def test_compiled_chunks_are_planned_with_both_gradients_at_once() -> None:
    def parts(compiled: bool) -> set[str]:
        settings = config(weight_parallel={"compile": compiled, "gather_before": "qkv"})
        return {at.part for rank in make_plan(settings, 4).ranks for at in rank.actions}

    assert parts(False) == {"", "full", "input", "weight"}
    assert parts(True) == {"", "full"}


@pytest.mark.thorough(3)
def test_every_pass_is_printed_with_what_it_launches() -> None:
    text = printed(config())
    for number, rank in enumerate(make_plan(config(), 4).ranks):
        part = text.split(f"pipeline rank {number} (")[-1].split("Schedule of one step")[0]
        found = re.findall(r"stage (\d) micro-batch (\d) .* (\d+) gathers, (\d+) reductions", part)
        assert [tuple(map(int, words)) for words in found] == [
            (at.stage, at.micro_batch, *counts)
            for at, counts in zip(rank.actions, rank.launched, strict=True)
        ]
        assert len({at.stage for at in rank.actions}) == 2


def test_exchanges_of_matrices_are_told_for_each_pipeline_rank() -> None:
    settings = config(optimizer={"name": "muon"})
    text = printed(settings)
    for number, rank in enumerate(make_plan(settings, 4).ranks):
        matrices = [7 * len(chunk.plan.blocks) for chunk in rank.chunks]
        exchanges = sum(2 * -(-count // 2) for count in matrices)
        assert f"rank {number}: a step has {exchanges} exchanges of matrices" in text
    assert "exchanges of matrices" not in printed(config())


def test_kept_blocks_cost_the_memory_that_the_plan_says() -> None:
    def slots(keep: str) -> list[int]:
        settings = config(weight_parallel={"keep_unsharded": keep})
        chunks = make_plan(settings, 4).ranks[0].chunks
        return [len(chunk.plan.slots()) for chunk in chunks]

    # The first chunk has three blocks and the embedding; the head leaves the last chunk one block.
    assert slots("none") == [2 + 1, 1 + 1]
    assert slots("all") == [3 + 1, 1 + 1]


def test_kept_blocks_are_told_for_each_pipeline_rank() -> None:
    text = printed(config(weight_parallel={"min_shard_elements": 64, "keep_unsharded": 1}))
    assert "Pipeline rank 0: 2 blocks stay unsharded (layers.1, layers.8)" in text
    assert "Pipeline rank 1: 2 blocks stay unsharded (layers.4, layers.6)" in text


@pytest.mark.thorough(6)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_picture_has_a_box_for_every_computation_with_its_collectives(
    tmp_path: Path, mode: str
) -> None:
    settings = config(activation_checkpoint={"mode": mode})
    path = tmp_path / "schedule.svg"
    printed(settings, path)
    root = ET.fromstring(path.read_text())
    titles = [title.text or "" for g in root.iter(f"{SVG}g") for title in g.iter(f"{SVG}title")]
    plan = make_plan(settings, 4)
    assert len(titles) == len(plan.timed)
    counts = [[int(word) for word in title.replace(",", "").split() if word.isdigit()][-2:]
              for title in titles]  # fmt: skip
    assert sum(gathers for gathers, _ in counts) == sum(
        rank.schedule.count("AG") for rank in plan.ranks
    )
    assert sum(reductions for _, reductions in counts) == sum(
        rank.schedule.count("RS") for rank in plan.ranks
    )
    marks = [[t.text for t in g.iter(f"{SVG}text")][1:] for g in root.iter(f"{SVG}g")]
    wanted = [[f"{sign}{n}" for sign, n in zip("▲▼", both, strict=True) if n] for both in counts]
    assert marks == wanted


@pytest.mark.thorough(4)
def test_the_command_draws_the_demos_schedule(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "configs" / "pipeline_demo.toml"
    path = tmp_path / "schedule.svg"
    assert cli.main(["plan", str(demo), "--picture", str(path)]) == 0
    title = ET.fromstring(path.read_text()).find(f"{SVG}title")
    assert title is not None
    assert title.text == "ZBVZeroBubble, 4 micro-batches"


def test_a_picture_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    settings = Config.model_validate({"train": {"micro_batches": 4}})
    with pytest.raises(ConfigError, match="no pipeline to draw"):
        print_plan(settings, 1, Console(file=io.StringIO()), tmp_path / "no.svg")


@pytest.mark.parametrize(
    ("name", "why"), [(".", "Is a directory"), ("no/x.svg", "No such file")]
)
def test_a_picture_that_cannot_be_written_is_one_line_and_nothing_else(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo, path = Path(__file__).parents[2] / "configs" / "pipeline_demo.toml", tmp_path / name
    assert cli.main(["plan", str(demo), "--picture", str(path)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"internsp: --picture {path}: {why}")
