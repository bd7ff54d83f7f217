"""Data of a run: padding without effect, what every rank reads, and where a run resumes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model_zoo
from internsp.app.checkpoint import manifest
from internsp.app.checkpoint.disk import steps_in
from internsp.app.config import Config
from internsp.app.data import tokens
from internsp.app.data.batches import DataSource
from internsp.app.process.stop import StopRequest
from internsp.app.report.metrics import read_metrics
from internsp.app.session import session as inputs
from internsp.app.session.session import Session, open_source
from internsp.app.train.run import train
from internsp.app.train.step import StepRunner
from internsp.errors import ConfigError, InternspError
from internsp.failure.objects import Objects
from tests.support.batches import train_batch
from tests.support.ranks import ranks, run_ranks
from tests.support.sections import mesh_sections
from tests.support.zero import whole

WORDS = "all of these words are of some length and they differ"


def write(folder: Path) -> list[str]:
    """Documents of many lengths, in two files."""
    texts = [f"{n} {WORDS}"[: 3 + 11 * n % 53] for n in range(40)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(lines[:25]))
    (folder / "b.jsonl").write_text("".join(lines[25:]))
    return texts


def config(folder: Path, parallel: dict[str, Any], **changes: dict[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 16, "layers": 2, "heads": 2, "init_std": 0.05},
        "data": {
            "source": "jsonl", "paths": [str(folder / "a.jsonl"), str(folder / "b.jsonl")],
            "sequence_length": 20, "held_out": 0.0, "pack": False,
        },
        **mesh_sections(**parallel),
        "weight_parallel": {"min_shard_elements": 64},
        "optimizer": {
            "name": "sgd", "lr": 0.5, "weight_decay": 0.0, "max_grad_norm": None, "warmup_steps": 0,
            "min_lr_ratio": 1.0,
        },
        "train": {
            "steps": 6, "global_batch": 12, "dtype": "float64", "eval_batches": 0,
            "log_every": 100,
        },
    }  # fmt: skip
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


def by_documents(config: Config, before: dict[str, Tensor], source: DataSource) -> Any:
    """Loss and gradients of the first batch: each piece of a document separately, not padded."""
    model = model_zoo.build(config.model, device="cpu", dtype=torch.float64)
    model.load_state_dict(before)
    total, count = torch.zeros((), dtype=torch.float64), 0
    batch = train_batch(source, 0)
    assert batch.boundaries is None
    lengths = [out[-1][0] if out else batch.ids.shape[1] for out in batch.ignored]
    assert len(set(lengths)) > 3, "of several lengths"
    assert max(lengths) == batch.ids.shape[1], "and pieces of longer documents"
    for ids, length in zip(batch.ids, lengths, strict=True):
        piece = ids[None, :length]
        logits = model(piece)[0, :-1]
        total = total + F.cross_entropy(logits, piece[0, 1:], reduction="sum")
        count += length - 1
    (total / count).backward()
    return float(total / count), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "parallel",
    [{"weight": 2, "sequence": 2}, {"weight": 2}, {"sequence": 2, "ring": 2}, {"pipeline": 2}],
    ids=str,
)
@ranks(2)
def test_padded_documents_give_the_loss_and_gradients_of_each_alone(
    parallel: dict[str, Any], tmp_path: Path, rank: int
) -> None:
    folder = tmp_path / str(rank)
    folder.mkdir()
    write(folder)
    settings = config(folder, parallel, train={"micro_batches": 2, "steps": 1, "global_batch": 12,
                                               "dtype": "float64"})  # fmt: skip
    session = Session.create(settings)
    before = {n: p for module in session.modules for n, p in whole(module).items()}
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, before)  # stages have their own
    everything = {n: p for own in of_ranks for n, p in own.items()}
    metrics, *_ = StepRunner(session).step(0, StopRequest())
    for communicator in session.communicators:
        communicator.wait_until_ready()
    after = {n: p for module in session.modules for n, p in whole(module).items()}
    loss, gradients = by_documents(settings, everything, session.source)
    assert metrics.loss == pytest.approx(loss, rel=1e-12)
    for name, value in before.items():
        found = (value - after[name]) / 0.5
        torch.testing.assert_close(found, gradients[name], rtol=1e-9, atol=1e-13)


def mixed(folder: Path, parallel: dict[str, Any], pack: bool, **train: Any) -> Config:
    tables = [
        {"source": "jsonl", "paths": [str(folder / "a.jsonl")], "weight": 2.0, "name": "a"},
        {"source": "jsonl", "paths": [str(folder / "b.jsonl")], "name": "b"},
    ]
    return config(
        folder,
        parallel,
        data={
            "source": "stdlib", "paths": [], "mixture": tables, "pack": pack,
            "cache_dir": str(folder / "tokens"),
        },
        checkpoint={"every": 2},
        train={**config(folder, {}).train.model_dump(), **train},
    )


def run(rank: int, world: int, settings: Config, output: str) -> None:
    train(settings, Path(output))


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_a_mixture_of_documents_goes_on_exactly_on_another_mesh_and_batch(
    pack: bool, tmp_path: Path
) -> None:
    """Started on two ranks and resumed on one with other micro-batches, up to a number of tokens;
    compared with a run that is never stopped."""
    write(tmp_path)
    whole_run, other = tmp_path / "whole", tmp_path / "other"
    run_ranks(run, 1, mixed(tmp_path, {}, pack, stop_after_tokens=1500), str(whole_run))
    wanted = read_metrics(whole_run / "metrics.jsonl")
    totals = [row.total_tokens for row in wanted]
    assert totals[-2] < 1500 <= totals[-1], "it ends with the first step that reaches them"
    assert len(wanted) > 6, "not after train.steps"

    first = mixed(tmp_path, {"weight": 2}, pack, steps=4)
    run_ranks(run, 2, first, str(other))
    settings = mixed(tmp_path, {}, pack, micro_batches=3, stop_after_tokens=1500).model_dump()
    settings["checkpoint"]["resume"] = "auto"
    run_ranks(run, 1, Config.model_validate(settings), str(other))
    found = read_metrics(other / "metrics.jsonl")
    assert [row.loss for row in found] == pytest.approx([row.loss for row in wanted], rel=1e-10)
    for key in ("step", "tokens", "total_tokens", "epochs"):
        assert [getattr(row, key) for row in found] == [getattr(row, key) for row in wanted], key
    assert sum(row.tokens for row in found) == totals[-1]
    last = found[-1]
    assert last.epochs is not None
    assert list(last.epochs) == ["a", "b"]
    _, path = max(steps_in(other / "checkpoints"))
    position = manifest.read(path).data
    assert (position.sequences, position.tokens) == (12 * len(found), totals[-1])
    # Other weights of the mixture change the order of the data.
    settings["data"]["mixture"] = [
        {**table, "weight": 3.0} if table["name"] == "a" else table
        for table in settings["data"]["mixture"]
    ]
    with pytest.raises(AssertionError, match="was trained on other text"):
        run_ranks(run, 1, Config.model_validate(settings), str(other))


@ranks(2)
def test_one_rank_makes_tokens_the_others_are_told_meanwhile_and_all_read_them(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank == 0:
        write(tmp_path)
    settings = config(tmp_path, {"weight": 2})
    asked, encoded = [0], tokens.encoded

    class Counted(Objects):
        def on_first(self, work: Any) -> Any:
            asked[0] += 1
            return super().on_first(work)

    def slow(*given: Any) -> Iterator[Any]:
        assert rank == 0, "one rank reads the data"
        for found in encoded(*given):
            time.sleep(0.01)
            yield found

    monkeypatch.setattr(inputs, "Objects", Counted)
    monkeypatch.setattr(inputs, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(tokens, "CACHED_BYTES", 0)
    monkeypatch.setattr(tokens, "encoded", slow)
    session = Session.create(settings)
    assert asked[0] > 4
    assert ["made in" in note for note in session.source.notes] == [True, True]
    notes = tokens.prepare(settings.data, session.source.tokenizer)[1]
    assert ["reused" in note for note in notes] == [True, True]
    # A rank that cannot read them does not leave the others waiting.
    if rank == 1:
        monkeypatch.setattr(tokens.TokenStore, "mapped", missing)
    with pytest.raises(InternspError, match=r"the tokens in .* cannot be read here.*all ranks see"):
        open_source(settings, session.mesh)
    if rank == 0:
        (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=r"a\.jsonl, row 1 is not JSON"):
        open_source(settings, session.mesh)


def missing(path: Path, digests: Path) -> Any:
    raise FileNotFoundError(2, "No such file or directory", str(path))


class _Sizes(TorchDispatchMode):
    """Records every tensor that is created inside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self.made.append((str(func), made.detach() if made.is_floating_point() else made))
        return result


@pytest.mark.thorough(4)
@pytest.mark.parametrize(
    ("parallel", "pack"),
    [({"sequence": 4}, True), ({"sequence": 4, "ring": 2, "balance": "level"}, False)],
    ids=["heads", "heads and ring, padded"],
)
@ranks(4)
def test_of_a_sequence_longer_than_a_ranks_share_only_token_ids_are_whole_on_a_rank(
    parallel: dict[str, Any], pack: bool, tmp_path: Path, rank: int
) -> None:
    """Labels, positions, embeddings and everything after them are of this rank's part only."""
    length, hidden = 4096, 16
    folder = tmp_path / str(rank)
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"text": WORDS * 120}) + "\n")
    (folder / "b.jsonl").write_text(json.dumps({"text": WORDS * 20}) + "\n")
    settings = config(
        folder,
        parallel,
        model={"hidden_size": hidden, "heads": 4, "intermediate_size": 32},
        data={"sequence_length": length, "pack": pack},
        train={"global_batch": 1, "loss_chunk": 64, "dtype": "float32"},
        activation_checkpoint={"mode": "full"},
    )
    session = Session.create(settings)
    runner = StepRunner(session)
    batch = train_batch(session.source, 0)
    with _Sizes() as sizes, patch("internsp.sp.layout._COUNTED", length // 16):
        layout = runner._layout(batch)
        runner._passes.train([layout], torch.tensor(layout.total_valid_tokens))
    assert len(sizes.made) > 500, "forward and backward were seen"
    for name, made in sizes.made:
        if made.is_floating_point():
            assert made.numel() < length * hidden, (name, made.shape)
        elif made.numel() >= length / 2:
            same = made.numel() == batch.ids.numel() and torch.equal(made.view(-1), batch.ids[0])
            assert same, (name, made.shape, made.dtype)
    assert layout.positions.shape == layout.labels.shape == (1, layout.sizes[rank])
    assert sum(layout.sizes) == length


def differing(rank: int, world: int, folder: Path) -> list[str]:
    """What is said where this rank is given another configuration, or reads another text."""
    other = folder / str(rank)
    other.mkdir()
    texts = write(other)
    if rank:
        (other / "b.jsonl").write_text(json.dumps({"text": texts[-1]}) + "\n")
    evaluation = {"name": "e", "source": "jsonl", "paths": [str(other / "b.jsonl")]}
    here = {"source": "jsonl", "paths": [str(other / "a.jsonl")]}
    changes: list[dict[str, Any]] = [
        {"train": {"seed": rank}}, {"data": {"pack": bool(rank)}}, {"model": {"heads": 1 + rank}},
        {"checkpoint": {"every": rank}, "train": {"steps": 1 + rank}},
        {"data": {"paths": [str(other / "a.jsonl"), str(other / "b.jsonl")]}},
        {"data": {**here, "evaluation": [evaluation]}, "train": {"eval_batches": 1}},
    ]  # fmt: skip
    said = []
    for change in changes:
        with pytest.raises(ConfigError) as caught:
            Session.create(config(folder, {"weight": world}, **change))
        said.append(str(caught.value))
    # The same text at other places is none other.
    Session.create(config(folder, {"weight": world}, data=here))
    return said


def test_ranks_that_are_given_another_configuration_or_text_are_told(tmp_path: Path) -> None:
    write(tmp_path)
    first, other = run_ranks(differing, 2, tmp_path)
    assert first == other
    wanted = [
        "train.seed: 0 on rank 0, 1 on rank 1: start every rank", "data.pack: false on rank 0",
        "model.heads: 1 on rank 0, 2 on rank 1", "train.steps, checkpoint.every: 1 on rank 0, 2",
        "data: rank 1 has read other text than rank 0", "data: rank 1 has read other text than",
    ]  # fmt: skip
    for text, part in zip(first, wanted, strict=True):
        assert part in text
