"""Plans of many ranks: equal ones are told once, and every action is listed."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from internsp.app.config import Config
from internsp.app.plan.classes import ranges
from internsp.app.plan.screen import listing, print_plan
from internsp.app.plan.step import make_plan


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""), ([3], "3"), ([3, 4], "3-4"), ([0, 8], "0, 8"), ([0, 8, 16], "0-16 by 8"),
        ([5, 4, 3], "5-3"), ([1, 1, 1], "1, 1, 1"), ([0, 1, 2, 9, 11, 13], "0-2, 9-13 by 2"),
    ],
)  # fmt: skip
def test_ranges_read_well(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def printed(config: Config, world: int) -> list[str]:
    out = io.StringIO()
    print_plan(config, world, Console(file=out, width=100, soft_wrap=True))
    text = out.getvalue() + listing(make_plan(config, world))
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]


def large(**parallel: int) -> Config:
    train = {"micro_batches": 8, "global_batch": 4096}
    model = {"layers": 16, "hidden_size": 64, "heads": 4}
    weights = {"min_shard_elements": 64}
    return Config.model_validate(
        {"parallel": parallel, "train": train, "model": model, "weight_parallel": weights}
    )


def test_the_plan_of_512_ranks_has_their_groups_and_every_action() -> None:
    settings = large(weight=8, sequence=4)
    lines, plan = printed(settings, 512), make_plan(settings, 512)
    actions = plan.ranks[0].schedule.actions
    assert len(actions) > 2000
    exchanged = sum(parcel.nbytes for parcel in plan.chunk.parcels)
    assert exchanged == sum(w.shard_bytes for unit in plan.chunk.units for w in unit.weights)
    assert "weight 8 64 0-7; 8-15; 16-23; ...; 504-511" in lines
    assert "replica 64 8 0-504 by 8; 1-505 by 8; 2-506 by 8; ...; 7-511 by 8" in lines
    first = lines.index(f"Schedule of one step ({len(actions)} actions a rank)") + 1
    assert [line.split()[:2] for line in lines[first:]] == [
        [one.kind, one.phase] for one in actions
    ]


@pytest.mark.thorough(14)
def test_pipeline_ranks_alike_share_a_line_of_the_screen() -> None:
    lines = printed(large(pipeline=8, weight=2), 16)
    assert any(line.startswith("1-6 1-6 2-13, 2 each ") for line in lines), "what they hold"
    ahead = [line for line in lines if re.search(r"stage 0 micro-batch \d forward", line)]
    assert len(ahead) == 8, "a pass on a line"
