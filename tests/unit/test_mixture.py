"""Mixtures: each text's share and order; the same on every mesh and after every stop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from internsp.app.config import HELD_OUT, Config, DataConfig, TrainConfig
from internsp.app.data import tokens
from internsp.app.data.batches import DataSource
from internsp.app.data.order import BLOCK, Mixture
from internsp.app.train.rows import micro_batch
from internsp.errors import ConfigError
from tests.support.batches import train_batch

WEIGHTS = [(3.0, 1.0), (1.0,), (0.2, 1e-3, 5.0, 1e-6), (1.0, 1.0, 1.0)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_sequence_of_each_text_comes_once_in_its_order_and_shares_hold(
    weights: tuple[float, ...],
) -> None:
    mixture = Mixture(weights, seed=4)
    count = 5 * BLOCK + 77
    seen: list[list[int]] = [[] for _ in weights]
    for number in range(count):
        if number % 500 == 0:  # the state is computed without replaying the rows
            assert mixture.taken(number) == [len(own) for own in seen]
        text, own = mixture.locate(number)
        seen[text].append(own)
    assert [own == list(range(len(own))) for own in seen] == [True] * len(weights)
    far = Mixture(weights, seed=4)
    for number, (text, own) in [(n, mixture.locate(n)) for n in (count - 1, BLOCK, 3)]:
        assert far.locate(number) == (text, own), "a function of the number alone"
    many = 1000 * BLOCK
    for share, taken in zip(mixture.shares, mixture.taken(many), strict=True):
        assert abs(taken - share * many) < 8
    assert sum(mixture.taken(many)) == many


def test_the_seed_decides_the_order() -> None:
    places = [[Mixture((1.0, 2.0), seed).locate(n)[0] for n in range(40)] for seed in (1, 1, 2)]
    assert places[0] == places[1] != places[2]


def test_evaluation_sequences_follow_the_shares() -> None:
    found = [Mixture((3.0, 1.0), 0).even(number, 16) for number in range(16)]
    assert found == [*((0, n, 12) for n in range(12)), *((1, n, 4) for n in range(4))]


def mixed(
    folder: Path, batch: int = 4, seed: int = 0, weight: float = 3.0, **changes: object
) -> DataSource:
    for name in ("a", "b"):
        (folder / name).mkdir(exist_ok=True)
        for number in range(30):
            (folder / name / f"{number}.txt").write_text(f"{name}{number:02}" * 20)
    (folder / "c.jsonl").write_text("".join(f'{{"body": "c{n:02}{"c" * 60}"}}\n' for n in range(9)))
    tables = [
        {"source": "text", "paths": [str(folder / "a"), str(folder / "b")], "weight": weight,
         "name": "words"},
        {"source": "jsonl", "paths": [str(folder / "c.jsonl")], "text_field": "body"},
    ]  # fmt: skip
    values = {"mixture": tables, "sequence_length": 32, "held_out": 0.2, **changes}
    config = DataConfig.model_validate(values)
    return DataSource(config, global_batch=batch, seed=seed)


def on_disk(folder: Path, **changes: object) -> DataSource:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokens, "CACHED_BYTES", 0)
        return mixed(folder, 12, **changes)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_batches_of_any_size_take_the_same_sequences_in_the_same_order(
    pack: bool, tmp_path: Path
) -> None:
    one, other = mixed(tmp_path, 4, pack=pack), on_disk(tmp_path, pack=pack)
    wanted = torch.cat([train_batch(one, taken).ids for taken in range(0, 600, 4)])
    # As on three data ranks of two micro-batches each.
    found = []
    for taken in range(0, 600, 12):
        for part in range(6):
            mesh = SimpleNamespace(data=3, data_rank=part % 3)
            at = micro_batch(part // 3, TrainConfig(global_batch=12, micro_batches=2), mesh)
            found.append(train_batch(other, taken, at).ids)
    assert torch.equal(wanted, torch.cat(found))
    of_c = ((wanted == ord("c")).sum(1) > 16).sum()
    assert 140 <= of_c <= 160, "a quarter"
    passes = one.epochs(600)
    assert list(passes) == ["words", str(tmp_path / "c.jsonl")]
    rows = [part.train.per_epoch for part in one.parts]
    assert sum(p * n for p, n in zip(passes.values(), rows, strict=True)) == pytest.approx(600)
    assert min(passes.values()) > 1, "each text is gone through again"
    assert one.fingerprint == other.fingerprint
    held_out = next(one.evaluation(HELD_OUT, 1)).ids
    assert ((held_out == ord("c")).sum(1) > 8).tolist() == [False] * 3 + [True]


def test_another_weight_is_another_order_of_the_data(tmp_path: Path) -> None:
    assert mixed(tmp_path).fingerprint == mixed(tmp_path, weight=3.0).fingerprint
    assert mixed(tmp_path).fingerprint != mixed(tmp_path, weight=4.0).fingerprint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mixture": [{}], "paths": ["a"]}, r"data.paths: unused with data.mixture"),
        ({"mixture": [{}], "format": "chat"}, r"data.format: unused with data.mixture"),
        ({"mixture": [{"source": "text"}]}, r"table 1: paths: source = \"text\" needs at least"),
        ({"mixture": [{}, {}]}, r"table 2: name: another is called 'stdlib', too: give it"),
        ({"mixture": [{"source": "text", "paths": ["a"], "format": "chat"}]},
         r"table 1: format: \"chat\" needs rows: set source to \"jsonl\""),
        ({"format": "chat", "source": "jsonl", "paths": ["a"]},
         r"data.format: \"chat\" needs the chat template of a tokenizer: set data.tokenizer"),
    ],
)  # fmt: skip
def test_mistakes_name_the_table_and_the_key(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.model_validate({"data": data})


def test_a_text_that_is_too_short_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes 4096 tokens but the training text of 'words' h"):
        mixed(tmp_path, sequence_length=4096)
