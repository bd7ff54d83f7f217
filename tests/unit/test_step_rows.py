"""A step of a given number of tokens: which rows it uses, and how ranks share them."""

from __future__ import annotations

import json
import threading
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from internsp.app.config import Config, DataConfig
from internsp.app.data.batches import FILLER, Ahead, DataSource
from internsp.app.data.order import counted
from internsp.app.train.rows import StepRows
from internsp.errors import ConfigError
from internsp.sp import SequenceLayout
from tests.support.batches import train_batch
from tests.unit.test_chat import CHAT, source, tokenizer_folder

TEXT = Path(__file__).parents[1] / "data" / "text"


def text(**changes: Any) -> DataSource:
    settings = {"source": "text", "paths": [str(TEXT)], "sequence_length": 300, "held_out": 0.1}
    return DataSource(DataConfig.model_validate({**settings, **changes}), global_batch=4)


def chats(folder: Path, **changes: Any) -> DataSource:
    tokenizer_folder(folder)
    rows = [{"messages": CHAT[: 3 + 2 * (n % 2)]} for n in range(9)]
    return source(folder, rows, **changes)


@pytest.mark.parametrize("kind", ["packed", "padded", "chats", "packed chats"])
def test_a_row_is_counted_without_reading_what_its_layout_counts(kind: str, tmp_path: Path) -> None:
    if "chats" in kind:
        length = 40 if kind == "chats" else 23
        made = chats(tmp_path, pack=kind != "chats", sequence_length=length)
    else:
        made = text(pack=kind == "packed")
    train = made.parts[0].train
    seen = set()
    for number in range(2 * train.per_epoch + 3):
        row = made.row(number)
        ids = torch.from_numpy(row.ids)[None]
        starts = None if row.starts is None else [row.starts]
        layout = SequenceLayout.create(ids, boundaries=starts, ignored=[row.ignored])
        assert train.counted(number) == counted(row) == layout.total_valid_tokens
        seen.add(train.counted(number))
    assert len(seen) > 1


@pytest.mark.parametrize("pack", [True, False])
def test_a_step_ends_with_the_row_that_has_the_last_token(pack: bool) -> None:
    made = text(pack=pack)
    for taken in (0, 7, 1000):
        for wanted in (1, 299, 700, 2000):
            count = made.rows_with(wanted, taken)
            sums = [counted(made.row(taken + n)) for n in range(count)]
            assert sum(sums) >= wanted > sum(sums[:-1])


def test_more_tokens_than_a_million_rows_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("internsp.app.data.batches._MOST_ROWS", 5)
    with pytest.raises(ConfigError, match=r"5 sequences have 1,4\d\d tokens"):
        text().rows_with(10_000, 0)


def test_of_a_filler_nothing_is_learned() -> None:
    for made in (text(), text(pack=False)):
        batch = made.batch([3, FILLER])
        assert torch.equal(batch.ids[0], torch.from_numpy(made.row(3).ids))
        layout = SequenceLayout.create(
            batch.ids, boundaries=batch.boundaries, ignored=batch.ignored
        )
        assert layout.total_valid_tokens == counted(made.row(3))


class Place:
    """The part of a mesh that row assignment uses."""

    def __init__(self, data: int, data_rank: int, pipeline: int) -> None:
        self.data, self.data_rank, self.pipeline = data, data_rank, pipeline


def dealt(total: int, data: int, pipeline: int = 1, **sections: dict[str, Any]) -> list[StepRows]:
    config = Config.model_validate(
        {"train": {"global_batch": 12, "micro_batches": 2, "batch_tokens": 1}, **sections}
    )
    places: list[Any] = [Place(data, rank, pipeline) for rank in range(data)]
    return [StepRows.of_tokens(40, total, config, place) for place in places]


@pytest.mark.parametrize("total", [1, 2, 3, 5, 6, 7, 12, 13, 24, 25, 100])
@pytest.mark.parametrize("data", [1, 2, 3])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_every_row_is_dealt_once_and_all_ranks_run_as_many_micro_batches(
    total: int, data: int, pipeline: int
) -> None:
    ranks = dealt(total, data, pipeline)
    most = 6 // data
    own = [list(chain(*rows.micro_batches)) for rows in ranks]
    found = [number for numbers in own for number in numbers if number != FILLER]
    assert found == list(range(40, 40 + total))
    counts = {len(rows.micro_batches) for rows in ranks}
    assert len(counts) == 1
    sizes = {len(part) for rows in ranks for part in rows.micro_batches}
    if pipeline == 1:
        assert counts == {ceil(ceil(total / data) / most)}
        assert sizes <= set(range(1, most + 1))
        assert all(part.count(FILLER) == (part == [FILLER]) for r in ranks for part in r[1])
    else:  # whole runs of a schedule of two micro-batches, of one shape
        assert counts.pop() % 2 == 0
        assert sizes == {most}
    held = [sum(n != FILLER for n in numbers) for numbers in own]
    assert max(held) - min(held) <= 1


def test_compiled_blocks_see_one_shape() -> None:
    (rows,) = dealt(7, 1, weight_parallel={"compile": True, "gather_before": "qkv"})
    assert [len(part) for part in rows.micro_batches] == [6, 6]


def test_a_global_batch_is_dealt_as_before() -> None:
    place: Any = Place(3, 1, 1)
    train = Config.model_validate({"train": {"global_batch": 12, "micro_batches": 2}}).train
    assert StepRows.of_batch(40, train, place) == (12, [[42, 43], [48, 49]])
    more = text()
    more.global_batch = 12
    batch = more.batch([42, 43])
    assert torch.equal(batch.ids, train_batch(more, 40, slice(2, 4)).ids)


def test_rows_of_chats_are_read_where_tokens_say_what_counts(tmp_path: Path) -> None:
    made = chats(tmp_path)
    each = [counted(made.row(n)) for n in range(9)]
    assert made.rows_with(sum(each), 0) == 9
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["messages"] == CHAT[:3]


def test_the_next_batch_is_made_meanwhile_one_ahead_and_the_same() -> None:
    source, go, asked = text(), threading.Event(), []

    def make(taken: int) -> torch.Tensor:
        asked.append((taken, threading.current_thread() is threading.main_thread()))
        assert go.wait(20)
        return source.batch(range(taken, taken + 4)).ids

    ahead = Ahead(make)
    ahead.begin(4)  # returns at once: nothing is let go yet
    (thread,) = [t for t in threading.enumerate() if t.name == "next batch"]
    assert thread.daemon, "a process that ends does not wait for it"
    go.set()
    assert torch.equal(ahead.take(4), train_batch(source, 4).ids)
    thread.join(20)
    assert not thread.is_alive(), "it ends with its batch"
    assert asked == [(4, False)], "one batch, and none behind it"
    assert torch.equal(ahead.take(0), train_batch(source, 0).ids), "a first batch, or another one"
    ahead.begin(8)
    assert torch.equal(ahead.take(40), train_batch(source, 40).ids)
    assert asked[1:] in ([(0, True), (8, False), (40, True)], [(0, True), (40, True), (8, False)])


def test_a_mistake_in_the_next_batch_is_raised_in_the_step_that_takes_it() -> None:
    def make(taken: int) -> int:
        if taken == 8:
            raise ConfigError("data.paths: a.bin was cut")
        return taken

    ahead = Ahead(make)
    ahead.begin(8)
    assert ahead.take(0) == 0, "the step before it is not disturbed"
    ahead.begin(8)
    with pytest.raises(ConfigError, match=r"^data\.paths: a\.bin was cut$"):
        ahead.take(8)
