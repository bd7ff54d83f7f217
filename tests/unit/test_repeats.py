"""Repetitions are printed once: folded lists unfold to the original ones."""

from __future__ import annotations

import io
import random
import re

import pytest
from rich.console import Console

from internsp.app.config import Config
from internsp.app.plan.pipeline import make_pipeline_plan
from internsp.app.plan.repeats import Item, Repeat, fold, ranges
from internsp.app.plan.screen import listing, print_plan
from internsp.app.plan.step import make_plan


def unfolded(repeats: list[Repeat]) -> list[Item]:
    return [
        Item(item.key, None if item.number is None else item.number + n * repeat.step)
        for repeat in repeats
        for n in range(repeat.times)
        for item in repeat.items
    ]


def test_a_folded_list_unfolds_to_what_it_was() -> None:
    rng = random.Random(0)
    for _ in range(300):
        items: list[Item] = []
        for _ in range(rng.randrange(6)):
            part = [
                Item(rng.choice("abc"), rng.choice((None, rng.randrange(3))))
                for _ in range(rng.randrange(1, 4))
            ]
            step = rng.choice((-1, 0, 1, 2))
            for n in range(rng.randrange(1, 6)):
                items += [Item(i.key, i.number if i.number is None else i.number + n * step)
                          for i in part]  # fmt: skip
        assert unfolded(fold(items)) == items


def test_blocks_that_count_up_are_one_part() -> None:
    items = [Item("in")] + [Item(k, n) for n in range(30) for k in ("AG", "USE")] + [Item("out")]
    assert fold(items) == [
        Repeat((Item("in"),)),
        Repeat((Item("AG", 0), Item("USE", 0)), 30, 1),
        Repeat((Item("out"),)),
    ]  # fmt: skip


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
    make = make_plan if config.parallel.pipeline == 1 else make_pipeline_plan
    text = out.getvalue() + listing(config, make(config, world))
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]


def large(**parallel: int) -> Config:
    train = {"micro_batches": 8, "global_batch": 4096}
    model = {"layers": 16, "hidden_size": 64, "heads": 4}
    weights = {"min_shard_elements": 64}
    return Config.model_validate(
        {"parallel": parallel, "train": train, "model": model, "weight_parallel": weights}
    )


def test_the_plan_of_512_ranks_is_printed_by_classes_and_says_all() -> None:
    lines = printed(large(weight=8, sequence=4), 512)
    plan = make_plan(large(weight=8, sequence=4), 512)
    assert len(plan.schedule.actions) > 2000
    assert len(lines) < 500
    assert "0-511 0 0-127 0-3 0-63 0-63 0-7" in lines
    assert "weight 8 64 0-7; 8-15; 16-23; ...; 504-511" in lines
    assert "replica 64 8 0-504 by 8; 1-505 by 8; 2-506 by 8; ...; 7-511 by 8" in lines
    # Every action of the step, counted through "n times:" and the indentation below it.
    counted, factors = 0, [(-1, 1)]
    text = listing(large(weight=8, sequence=4), plan)
    for line in text.split("actions a rank)")[1].splitlines()[1:]:
        depth = len(line) - len(line.lstrip())
        while factors[-1][0] >= depth:
            factors.pop()
        first, _, second = line.strip().partition(" ")
        if second == "times:":
            factors.append((depth, factors[-1][1] * int(first)))
        else:
            counted += factors[-1][1]
    assert counted == len(plan.schedule.actions)


@pytest.mark.thorough(14)
def test_pipeline_ranks_alike_share_lines() -> None:
    lines = printed(large(pipeline=8, weight=2), 16)
    assert len(lines) < 300
    assert any(line.startswith("1-6 1-6 2-13, 2 each ") for line in lines), "what they hold"
    ahead = [line for line in lines if re.search(r"stage 0 micro-batch 1-\d forward", line)]
    assert len(ahead) == 1, "the forwards before the first backward, on one line"
