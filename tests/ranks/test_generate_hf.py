"""``internsp generate`` for a model of transformers: the same text as from the exported model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from internsp.app import cli
from internsp.app.checkpoint.continuation import continuation, load_run
from tests.support.command import internsp

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

pytestmark = pytest.mark.unmeasured
ROOT = Path(__file__).parents[2]
PROMPT = "The weights "
TOKENS = 16
END = 256  # of a document, in bytes
TRAIN = f"""
[model]
family = "hf"
path = "tiny"
[data]
source = "text"
paths = ["{ROOT / "tests" / "data"}"]
sequence_length = 64
[parallel]
weight = 2
[weight_parallel]
min_shard_elements = 128
[optimizer]
lr = 1e-2
warmup_steps = 0
[train]
name = "hf"
steps = 20
global_batch = 4
eval_batches = 0
[launch]
processes = 2
"""


def command(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return internsp(*words, cwd=folder, environment=environment).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of transformers, trained on two ranks and exported."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
        )
    ).save_pretrained(made / "tiny")
    (made / "config.toml").write_text(TRAIN)
    command(made, "train", "config.toml")
    command(made, "export", "runs/hf", "--to", "exported")
    return made


def by_transformers(folder: Path, **options: Any) -> list[int]:
    """The text that transformers generates from the exported folder, without an end token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32)
    ids = torch.tensor([list(PROMPT.encode())])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, eos_token_id=END,
        pad_token_id=END, **options,
    )  # fmt: skip
    return [token for token in found[0].tolist() if token != END]


def text_of(ids: list[int]) -> str:
    return bytes(token for token in ids if token < END).decode(errors="replace")


def test_greedy_text_is_what_transformers_gives_of_the_export(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = ["generate", "runs/hf", "--prompt", PROMPT, "--tokens", str(TOKENS)]
    said = command(folder, *greedy, "--temperature", "0")
    assert said == text_of(by_transformers(folder, do_sample=False)) + "\n"
    assert said.startswith(PROMPT)
    assert len(said) > len(PROMPT) + 1
    # With one candidate token the temperature has no effect.
    monkeypatch.chdir(folder)
    for only in ({"top_k": 1, "top_p": None}, {"top_k": None, "top_p": 1e-6}):
        text = continuation(Path("runs/hf"), PROMPT, TOKENS, temperature=5.0, seed=3, **only)
        assert text + "\n" == said


def test_draws_are_transformers_own_and_the_seed_decides_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    options = {"temperature": 1.5, "top_k": 40, "top_p": 0.9}
    texts = [
        continuation(Path("runs/hf"), PROMPT, TOKENS, seed=seed, **options) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(1)
    assert texts[0] == text_of(by_transformers(folder, do_sample=True, **options))


def test_each_token_is_computed_from_a_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    model, _ = load_run(Path("runs/hf"))
    lengths: list[int] = []
    first = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
    first.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    found = model.generate(
        torch.tensor(list(PROMPT.encode())), TOKENS, seed=0, stop_id=END, temperature=0.0
    )
    assert lengths == [len(PROMPT), *[1] * (len(found) - len(PROMPT) - 1)]


def test_no_token_and_no_prompt_are_answered_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = ["generate", "runs/hf", "--temperature", "0", "--tokens"]
    assert cli.main([*words, "0", "--prompt", PROMPT]) == 0
    assert capsys.readouterr().out == PROMPT + "\n"
    assert cli.main([*words, "4"]) == 0
    assert capsys.readouterr().out.endswith("\n")
    (folder / "tiny").rename(folder / "elsewhere")
    try:
        assert cli.main([*words, "4"]) == 2
    finally:
        (folder / "elsewhere").rename(folder / "tiny")
    assert "was trained from tiny, which does not exist" in capsys.readouterr().err
