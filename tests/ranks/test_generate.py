"""``internsp generate``: continues a text from a run of any mesh, on one process."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from internsp.app import cli
from internsp.app.checkpoint import export
from internsp.app.checkpoint.continuation import continuation, load_run
from internsp.app.config import Config
from internsp.app.config.resume import saved_config
from internsp.app.models.factory import generate
from internsp.app.session.session import Session
from internsp.errors import ConfigError
from internsp.sp import SequenceLayout
from tests.ranks.test_train import config
from tests.support.ranks import run_ranks
from tests.support.saved import save

PROMPT = "The first"
TOKENS = 8
Runs = tuple[Path, list[list[int]]]
"""The folder of the runs, and the continuations of the untied and of the tied model."""


def settings() -> list[Config]:
    train = {"dtype": "float64", "micro_batches": 2}
    model = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "init_std": 0.4}
    meshes = [{"weight": 2, "sequence": 2}, {"pipeline": 2}] * 2
    return [
        config(train=train, model=model | {"tie_embeddings": number > 1}, parallel=mesh)
        for number, mesh in enumerate(meshes)
    ]


def saved(rank: int, world: int, folder: str) -> list[list[int]]:
    """The most likely continuation, by complete forwards of the parallel model."""
    found = []
    for number, one in enumerate(settings()):
        session = Session.create(one)
        save(session, Path(folder) / str(number) / "checkpoints", 1, "run")
        if session.pipeline is not None:
            continue
        ids = list(PROMPT.encode())
        with torch.no_grad():
            for _ in range(TOKENS):
                padded = torch.tensor([ids + [0] * (len(ids) % 2)])  # two ranks
                layout = SequenceLayout.create(padded, rank=rank, size=2)
                logits = session.modules[0](layout.input_ids, layout=layout)
                parts = [torch.zeros_like(logits) for _ in range(2)]
                torch.distributed.all_gather(parts, logits)
                ids.append(int(torch.cat(parts, dim=1)[0, len(ids) - 1].argmax()))
        found.append(ids)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    first, _ = run_ranks(saved, 2, str(folder))
    return folder, first


def test_one_process_continues_what_any_mesh_has_saved(runs: Runs) -> None:
    folder, (untied, tied) = runs
    for number, wanted in enumerate((untied, untied, tied, tied)):  # the same values on both meshes
        text = continuation(
            folder / str(number), PROMPT, TOKENS, temperature=0, top_k=None,
            top_p=None, seed=0,
        )  # fmt: skip
        assert text == bytes(i for i in wanted if i < 256).decode(errors="replace")


def test_the_command_writes_the_text_and_the_same_seed_the_same(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs[0] / "0")
    texts = []
    for seed in (1, 1, 2):
        words = ["--prompt", PROMPT, "--tokens", "20", "--seed", str(seed), "--top_k", "30"]
        assert cli.main(["generate", run, *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith(PROMPT) and text.endswith("\n") for text in texts)
    assert cli.main(["generate", run, "--tokens", "-1", "--top_p", "0", "--temperature=-1"]) == 2
    said = capsys.readouterr().err
    assert [name in said for name in ("--tokens", "--top_p", "--temperature")] == [True] * 3
    for device, why in (("lathe", "Expected one of cpu"), ("meta", "no data")):
        assert cli.main(["generate", run, "--device", device]) == 2
        assert re.search(f"--device: '{device}' cannot .*{why}.*cpu", capsys.readouterr().err)
    assert cli.main(["generate", str(runs[0]), "--prompt", "x"]) == 2
    assert "no checkpoint at" in capsys.readouterr().err


def test_a_prompt_of_characters_of_several_bytes_is_continued_behind_them(runs: Runs) -> None:
    options = {"temperature": 0, "top_k": None, "top_p": None, "seed": 0}
    model, _ = load_run(runs[0] / "0")
    ids = generate(model, torch.tensor(list("é€".encode())), TOKENS, stop_id=256, **options)
    wanted = bytes(i for i in ids.tolist() if i < 256).decode(errors="replace")
    assert continuation(runs[0] / "0", "é€", TOKENS, **options) == wanted


def test_a_damaged_checkpoint_is_passed_over_with_its_reason_beside_the_text(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_before = next((runs[0] / "0" / "checkpoints").glob("step-*"))
    for number in (1, 2):
        shutil.copytree(saved_before, tmp_path / f"step-{number:06d}")
    next((tmp_path / "step-000002").glob("rank-*")).unlink()
    assert cli.main(["generate", str(tmp_path), "--prompt", PROMPT, "--tokens", "2"]) == 0
    text, said = capsys.readouterr()
    assert text.startswith(PROMPT)
    assert re.search(r"^checkpoint step-000002 was passed over: .*rank-\d+.* is missing\n$", said)
    next((tmp_path / "step-000001").glob("rank-*")).unlink()
    assert cli.main(["generate", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"no complete checkpoint at {tmp_path}: give the path of another\n" in said
    assert "checkpoint.resume" not in said  # which is no option of this command


def test_a_checkpoint_of_a_programs_own_model_is_refused_by_name(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def smaller(saved: dict[str, Any]) -> Config:
        return saved_config({**saved, "model": {**saved["model"], "layers": 1}})

    monkeypatch.setattr(export, "saved_config", smaller)
    with pytest.raises(ConfigError, match=r"has another model .*layers\.1"):
        load_run(runs[0] / "0")
