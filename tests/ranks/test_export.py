"""An exported run gives the same logits in transformers as the run's own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from internsp.app.checkpoint.checkpoint import load
from internsp.app.checkpoint.export import export
from internsp.app.checkpoint.manifest import MANIFEST, write_manifest
from internsp.app.cli.command import main
from internsp.app.config import Config
from internsp.app.data.tokenizer import ByteTokenizer, byte_tokenizer_files, tokenizer_files
from internsp.app.process.stop import StopRequest
from internsp.app.session.own import CustomData
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from tests.ranks.test_checkpoint_meshes import config
from tests.support.ranks import run_ranks
from tests.support.saved import save

IDS = torch.arange(24).view(2, 12) % 250
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}  # transformers rotates in fp32
CASES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 1, "rope_theta": 5e4},
    "internlm2": {"family": "internlm2", "heads": 10, "kv_heads": 5, "qkv_bias": True},
    "tied": {"tie_embeddings": True, "bias": True},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral", "kv_heads": 1, "experts": 4, "balance_rate": 0.0},
    "ernie": {"family": "mixtral", "kv_heads": 1, "head_dim": 8, "experts": 4},
    "deepseek": {
        "family": "deepseek", "experts": 4, "expert_size": 12, "shared_size": 24, "latent_size": 10,
        "rotary_size": 2,
    },
    "deepseek without a bias": {"family": "deepseek", "balance_rate": 0.0, "dense_layers": 0},
}


def saved(rank: int, world: int, folder: str, settings: list[Config]) -> None:
    """Initialize biases and norms too, so that each has different values."""
    for number, one in enumerate(settings):
        session = Session.create(one)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in session.modules[0].parameters():
                whole = 0.3 * torch.randn(parameter.shape, generator=generator).double()
                placed = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                parameter.copy_(placed)
            for name, buffer in session.modules[0].named_buffers():
                if name.endswith("router.bias"):
                    buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        session.communicators[0].invalidate()
        save(session, Path(folder) / str(number) / "checkpoints", 1, "run")


def logits(rank: int, world: int, folder: str, settings: list[Config]) -> list[torch.Tensor]:
    found = []
    for number, one in enumerate(settings):
        session = Session.create(one)
        load(session, Path(folder) / str(number))
        with torch.no_grad():
            found.append(session.modules[0](IDS))
    return found


def test_transformers_gives_the_same_logits_of_what_two_ranks_have_saved(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cases = CASES | MIXTURES

    def settings(mesh: dict[str, Any]) -> list[Config]:
        train = {"dtype": "float64"}
        return [config(mesh, model=model, train=train) for model in cases.values()]

    run_ranks(saved, 2, str(tmp_path), settings({"weight": 2}))
    (wanted,) = run_ranks(logits, 1, str(tmp_path), settings({}))
    ours, text = ByteTokenizer(), "naïve <|endoftext|> \n\t  日本 \x00"
    for number, (name, expected) in enumerate(zip(cases, wanted, strict=True)):
        to = tmp_path / f"export {name}"
        assert main(["export", str(tmp_path / str(number)), "--to", str(to)]) == 0
        model, told = AutoModelForCausalLM.from_pretrained(
            to, dtype=torch.float64, output_loading_info=True
        )
        assert not told["missing_keys"], name
        assert not told["unexpected_keys"], name
        if name in MIXTURES:
            model.set_experts_implementation("eager")  # torch's grouped product takes no fp64
        with torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, expected, **CLOSE)
        theirs = AutoTokenizer.from_pretrained(to)
        assert theirs(text)["input_ids"] == ours.encode(text), "the bytes that it was trained on"
        assert theirs.eos_token_id == model.config.eos_token_id == ours.end_of_document
        for ids in ([*ours.encode(text), 256, 97], [0xE6, 0x97, 256, 0xFF, 98], []):
            assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    # In several files, with an index.
    split = tmp_path / "split"
    export(tmp_path / "0", split, max_file_bytes=40_000)
    index = json.loads((split / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(split.glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(split, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, wanted[0], **CLOSE)


def folders_of_transformers(to: Path) -> None:
    """A tied Llama, whose folder has a tokenizer, and one whose names transformers converts."""
    from tokenizers import Tokenizer, models
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        PreTrainedTokenizerFast,
    )

    sizes: dict[str, Any] = {
        "vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    llama.double().save_pretrained(to / "tied")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(to / "tied")
    (to / "tied" / "special_tokens_map.json").write_text('{"eos_token": "a"}')  # older ones have it
    mixtral = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=2))
    mixtral.save_pretrained(to / "converted", max_shard_size="10KB")


# transformers computes experts by grouped products, which have no fp64 kernel on the CPU.
DTYPES = {"tied": "float64", "converted": "float32"}


def trained(rank: int, world: int, folder: Path, names: list[str]) -> list[torch.Tensor]:
    """Logits after a step of ``internsp train``, whose checkpoint is exported."""
    found = []
    for name in names:
        given = config({"weight": 2}, train={"dtype": DTYPES[name]}).model_dump()
        given["model"] = {"family": "hf", "path": str(folder / name)}
        given["data"]["pack"] = name == "tied"
        session = Session.create(Config.model_validate(given))
        with StopRequest() as stop:
            StepRunner(session).step(0, stop)
        save(session, folder / "runs" / name / "checkpoints", 1, "run")
        with torch.no_grad():
            found.append(session.modules[0].model(IDS).logits)
    return found


def test_a_model_of_transformers_comes_back_with_the_logits_that_it_was_trained_to(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders_of_transformers(tmp_path)
    names = list(DTYPES)
    for name, logits in zip(names, run_ranks(trained, 2, tmp_path, names)[1], strict=True):
        to = tmp_path / f"export {name}"
        export(tmp_path / "runs" / name, to)
        model, told = AutoModelForCausalLM.from_pretrained(
            to, dtype=logits.dtype, output_loading_info=True
        )
        assert not told["missing_keys"], name
        assert not told["unexpected_keys"], name
        with torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, logits, **CLOSE)
            before = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=logits.dtype)
            assert float((before(IDS).logits - logits).abs().max()) > 1e-3, "it was trained"
    assert AutoTokenizer.from_pretrained(tmp_path / "tied").decode([1, 0]) == "b a"
    exported = AutoTokenizer.from_pretrained(tmp_path / "export tied")
    assert exported.decode([72, 105]) == "Hi", "the tokenizer of the run, not that of its model"
    assert {path.name for path in tokenizer_files(tmp_path / "export tied")} == {
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


TOKENIZERS = ["a file", "a folder", "gone", "a program's"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_runs_tokenizer_goes_with_it_or_its_absence_is_told(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, text in byte_tokenizer_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    given = folder / "tokenizer.json" if kind == "a file" else folder
    one = config({}).model_dump()
    one["data"]["tokenizer"] = str(given)
    run_ranks(saved, 1, str(tmp_path), [Config.model_validate(one)])
    run, to = tmp_path / "0", tmp_path / "export"
    if kind == "gone":
        folder.rename(tmp_path / "elsewhere")
    elif kind == "a program's":
        path = run / "checkpoints" / "step-000001" / MANIFEST
        content = json.loads(path.read_text())["content"]
        content["data"]["fingerprint"] = CustomData.fingerprint
        write_manifest(path.parent, content)
    notes = export(run, to)
    if kind in ("a file", "a folder"):
        assert len(notes) == 1
        assert (to / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
        return
    assert not list(to.glob("tokenizer*"))
    told = "a program's own batches" if kind == "a program's" else f"own, {folder}, does not exist"
    assert notes[0].startswith("no tokenizer was written: ")
    assert told in notes[0]


def test_what_cannot_be_exported_is_told_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), "--to", str(tmp_path)]) == 2
    assert "there is something at" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none"), "--to", str(tmp_path / "to")]) == 2
    assert "no checkpoint at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
