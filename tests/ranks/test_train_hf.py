"""``internsp train`` of models of transformers: as one process, and as separate documents."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from internsp.app.config import HELD_OUT, Config
from internsp.app.data.batches import DataSource
from internsp.app.models.causal_lm import HFCausalLM, _not_streamed
from internsp.app.process.stop import StopRequest
from internsp.app.report.metrics import read_metrics
from internsp.app.session.session import Session
from internsp.app.train.run import train
from internsp.app.train.step import StepRunner
from internsp.errors import ConfigError, StructureError
from internsp.values import load
from tests.ranks.test_train import TEXT
from tests.support.batches import train_batch
from tests.support.compare import check
from tests.support.ranks import run_ranks
from tests.support.sections import mesh_sections
from tests.support.zero import whole

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

pytestmark = [pytest.mark.ranks, pytest.mark.unmeasured]
STEPS = 3
SMALL = {"vocab_size": 260, "tie_word_embeddings": True}


def write(folder: Path) -> None:
    """Folders of models: with weights, or config.json alone."""
    from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, MambaConfig

    torch.manual_seed(0)
    llama = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, **SMALL,
    )  # fmt: skip
    LlamaForCausalLM(llama).to(torch.float64).save_pretrained(folder / "llama")
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2Config(n_embd=32, n_layer=2, n_head=4, **none, **SMALL).save_pretrained(folder / "gpt2")
    mamba = MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, **SMALL)
    mamba.num_attention_heads = 4  # its own config.json has none
    mamba.save_pretrained(folder / "mamba")
    words = (TEXT / "01_why_cut_sequences.txt").read_text().split()
    lines = [json.dumps({"text": " ".join(words[i : i + 4])}) for i in range(0, len(words), 4)]
    (folder / "text.jsonl").write_text("\n".join(lines))


def config(
    folder: Path, name: str, world: int, cut: int = 1, **changes: dict[str, Any]
) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"family": "hf", "path": str(folder / name)},
        "data": {
            "source": "jsonl", "paths": [str(folder / "text.jsonl")], "sequence_length": 64,
            "held_out": 0.1,
            "pack": name != "gpt2",
        },
        "parallel": {"weight": world, "sequence": cut},
        "weight_parallel": {"min_shard_elements": 128},
        "activation_checkpoint": {"mode": "full", "fraction": 0.5},
        "optimizer": {"lr": 1e-2, "eps": 1e-3, "warmup_steps": 0},
        "train": {
            "steps": STEPS, "global_batch": 4, "micro_batches": 2, "dtype": "float64",
            "eval_batches": 1, "loss_chunk": 20,
        },
    }  # fmt: skip
    for section, values in changes.items():
        sections[section] = sections.get(section, {}) | values
    return Config.model_validate(sections)


Trained = tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[float, float]], float]


def trained(settings: Config) -> Trained:
    """Parameters before and after some steps; loss and norm of each; the held-out loss."""
    session = Session.create(settings)
    session.communicators[0].state.pool.poison = True
    before, runner = whole(session.modules[0]), StepRunner(session)
    rows = [runner.step(step, StopRequest())[0] for step in range(STEPS)]
    held_out = runner.evaluate()[HELD_OUT]
    session.communicators[0].wait_until_ready()
    after = whole(session.modules[0])
    return before, after, [(row.loss, row.grad_norm) for row in rows], held_out


def one_by_one(settings: Config) -> tuple[float, float]:
    """Loss and gradient norm of the first step: plain transformers, a document at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings.model.path, dtype=torch.float64)
    source = DataSource(settings.data, global_batch=4, seed=settings.train.seed)
    batch = train_batch(source, 0, slice(0, 4))
    total, count, documents = torch.zeros((), dtype=torch.float64), 0, 0
    for ids, starts in zip(batch.ids, batch.boundaries, strict=True):
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            document = ids[start:end][None].long()
            logits = model(input_ids=document, use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, document[0, 1:], reduction="sum")
            count, documents = count + end - start - 1, documents + 1
    assert documents > len(batch.ids), "the batch is packed"
    (total / count).backward()
    norms = [p.grad.norm() for p in model.parameters()]
    return float(total / count), float(torch.stack(norms).norm())


def runs(rank: int, world: int, folder: Path, output: Path) -> dict[str, Any]:
    if world == 1:
        write(folder)
    found: dict[str, Any] = {
        name: trained(config(folder, name, world)) for name in ("llama", "gpt2")
    }
    if world == 2:
        found["read"] = read_of(config(folder, "llama", world))
        found["cut"] = trained(config(folder, "llama", world, cut=2))
        ring = {"ring": 2, "balance": "zigzag"}
        settings = config(folder, "llama", world, 2, **mesh_sections(**ring))
        found["ring"] = trained(settings)
    if world == 1:
        found["one by one"] = one_by_one(config(folder, "llama", 1))
        read_whole(folder)
        return found
    with pytest.raises(StructureError, match=r"MambaFor.* does not keep .*data\.pack = false"):
        Session.create(config(folder, "mamba", world))
    found["command"] = command(rank, folder, output)
    return found


def read_of(settings: Config) -> tuple[dict[str, int], int]:
    """How many elements of each weight this rank has read, and the model's elements."""
    from transformers import AutoModelForCausalLM

    sizes: dict[str, int] = {}
    own = load._Files.read

    def read(files: Any, name: str, rows: Any) -> Tensor:
        value = own(files, name, rows)
        sizes[name] = sizes.get(name, 0) + value.numel()
        return value

    with (
        patch.object(load._Files, "read", read),
        patch.object(AutoModelForCausalLM, "from_pretrained", None),
    ):
        session = Session.create(settings)
    return sizes, session.parameters


def read_whole(folder: Path) -> None:
    """Folders whose tensors are not one to one the model's: transformers reads them."""
    from safetensors.torch import load_file, save_file
    from transformers import MixtralConfig, MixtralForCausalLM

    small = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    mixtral = MixtralConfig(
        hidden_size=8, intermediate_size=8, num_local_experts=2, **small, **SMALL
    )
    torch.manual_seed(1)
    MixtralForCausalLM(mixtral).double().save_pretrained(folder / "mixtral")
    values = load_file(folder / "llama/model.safetensors")
    norm, embedding = values["model.norm.weight"], values["model.embed_tokens.weight"]
    cases = {
        "in addition to the model's own": {**values, "rotary": norm.clone()},
        "has several values of": {**values, "lm_head.weight": embedding.clone()},
        "": values,
    }
    for number, (why, content) in enumerate(cases.items()):
        other = folder / f"other{number}"
        other.mkdir()
        (other / "config.json").write_bytes((folder / "llama/config.json").read_bytes())
        save_file(content, other / "model.safetensors", {"format": "pt"})
        model = HFCausalLM(str(other), torch.float64, 0)
        assert why in _not_streamed(model.model, other, torch.float64)
        assert (model.unread == other) == (not why), why
        assert all(p.is_meta == (not why) for p in model.parameters())
        if why:
            assert torch.equal(model.model.model.embed_tokens.weight, embedding)
    model = HFCausalLM(str(folder / "mixtral"), torch.float64, 0)
    assert "converts the weights of a MixtralForCausalLM" in _not_streamed(
        model.model, folder / "mixtral", torch.float64
    )
    assert model.unread is None
    experts = model.model.model.layers[0].mlp.experts.down_proj
    saved = load_file(folder / "mixtral/model.safetensors")
    one = next(v for n, v in saved.items() if "experts.0." in n and ("w2" in n or "down" in n))
    assert torch.equal(experts[0], one)


def command(rank: int, folder: Path, output: Path) -> dict[str, Any] | None:
    """A complete run, and another that resumes from the second step's checkpoint."""
    train(config(folder, "llama", 2, checkpoint={"every": 2}), output / "run")
    whole_run = read_metrics(output / "run/metrics.jsonl")
    resume = {"resume": str(output / "run/checkpoints/step-000002"), "save": False}
    train(config(folder, "llama", 2, checkpoint=resume), output / "again")
    dist.barrier()
    again = read_metrics(output / "again/metrics.jsonl")
    if rank:
        return None
    rows = [[(r.step, r.loss, r.grad_norm) for r in found] for found in (whole_run, again)]
    report = (output / "run/report.html").read_text()
    return {"rows": rows, "path": f"path = &#34;{folder / 'llama'}" in report}


@cache
def alone(folder: Path) -> dict[str, Any]:
    (found,) = run_ranks(runs, 1, folder, folder, timeout=240)
    return found  # type: ignore[no-any-return]


def test_a_folder_trains_as_on_one_process_and_as_its_documents_one_by_one(tmp_path: Path) -> None:
    wanted = alone(tmp_path)
    loss, norm = wanted["one by one"]
    assert wanted["llama"][2][0] == pytest.approx((loss, norm), rel=1e-9)
    first, other = run_ranks(runs, 2, tmp_path, tmp_path, timeout=240)
    for found in (first, other):
        of = {"llama": "llama", "gpt2": "gpt2", "cut": "llama", "ring": "llama"}
        for name, same in of.items():
            before, after, rows, held_out = found[name]
            start, end, expected, expected_held_out = wanted[same]
            check(before, start, f"{name} before", 0.0)
            check(after, end, f"{name} after", 1e-10)
            assert max(float((end[n] - start[n]).abs().max()) for n in end) > 1e-3, "it moved"
            for row, of_one in zip(rows, expected, strict=True):
                assert row == pytest.approx(of_one, rel=1e-9), name
            assert held_out == pytest.approx(expected_held_out, rel=1e-9), name
    for sizes, elements in (first["read"], other["read"]):
        assert sizes["model.layers.1.mlp.up_proj.weight"] == 32 * 64 // 2
        assert sum(sizes.values()) < 0.52 * elements, "this rank's rows, and the norms"
    done = first["command"]
    run, again = done["rows"]
    assert [step for step, *_ in run] == [1, 2, 3]
    assert again == run[2:], "the resumed run goes on with the same bits"
    assert [(loss, norm) for _, loss, norm in run] == first["llama"][2]
    assert done["path"], "the report shows the configuration"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("a tensor is missing", "1 of its weights are missing"),
        ("a layer is missing", "9 of its weights are missing"),
        ("other sizes", "model.embed_tokens.weight has another shape"),
        ("no number", "rms_norm_eps"),
    ],
)
def test_a_folder_that_transformers_would_fill_or_refuse_is_refused_by_name(
    spoil: str, said: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    write(tmp_path)
    folder = tmp_path / "llama"
    changed: dict[str, Any] = {
        "a layer is missing": {"num_hidden_layers": 4}, "other sizes": {"vocab_size": 300},
        "no number": {"rms_norm_eps": "x"},
    }.get(spoil, {})  # fmt: skip
    if spoil == "a tensor is missing":
        tensors = load_file(folder / "model.safetensors")
        save_file({n: v for n, v in tensors.items() if n != "model.norm.weight"},
                  folder / "model.safetensors")  # fmt: skip
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changed))
    with pytest.raises(ConfigError) as caught:
        HFCausalLM(str(folder), torch.float64, 0)
    assert said in str(caught.value)
    if "missing" in spoil:
        assert f"{folder} has no model." in str(caught.value)
    assert f"model.path: transformers cannot load {folder}" in str(caught.value)


def dropping(rank: int, world: int, folder: Path) -> tuple[list[list[float]], Tensor]:
    """Losses of two runs of one seed and of one of another, whose model drops at random."""
    if not rank:
        write(folder)
        path = folder / "gpt2/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"resid_pdrop": 0.2}))
    dist.barrier()
    found = []
    for number, (name, seed) in enumerate((("one", 1), ("two", 1), ("three", 2))):
        torch.manual_seed(number)  # as whatever was drawn before
        fresh = config(folder, "gpt2", world, train={"seed": seed}, checkpoint={"save": False})
        train(fresh, folder / name)
        drawn = torch.rand(4)
        dist.barrier()
        found.append([row.loss for row in read_metrics(folder / name / "metrics.jsonl")])
    return found, drawn


def test_runs_of_one_seed_drop_the_same_and_ranks_do_not(tmp_path: Path) -> None:
    (found, one), (_, other) = run_ranks(dropping, 2, tmp_path, timeout=240)
    assert found[0] == found[1] != found[2]
    assert not torch.equal(one, other)
