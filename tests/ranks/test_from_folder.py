"""A folder of transformers as the model zoo's initial weights: ``model.path`` of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from internsp import model_zoo
from internsp.app.checkpoint.export import export
from internsp.app.config import Config, read_config
from internsp.app.models.factory import build_for_training
from internsp.app.process.stop import StopRequest
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from internsp.errors import ConfigError, LayoutError
from internsp.model_zoo.llama_form import exported_config, exported_tensors
from internsp.values import load
from tests.ranks.test_checkpoint_meshes import config
from tests.ranks.test_export import CASES, IDS, MIXTURES
from tests.support.ranks import run_ranks
from tests.support.saved import save
from tests.support.zero import whole

files = pytest.importorskip("safetensors.torch")
DOUBLE = {"dtype": "float64"}
UP = "model.layers.1.mlp.up_proj.weight"
Values = dict[str, torch.Tensor]
Step = tuple[torch.Tensor | None, float, float, Values]
"""Logits, where a rank has them; loss and gradient norm of the first step, parameters after it."""


def first_step(session: Session) -> Step:
    logits = None
    if session.pipeline is None:
        with torch.no_grad():
            logits = session.modules[0](IDS)
    with StopRequest() as stop:
        row, *_ = StepRunner(session).step(0, stop)
    after: Values = {}
    for module, communicator in zip(session.modules, session.communicators, strict=True):
        communicator.wait_until_ready()
        after |= whole(module)
    return logits, row.loss, row.grad_norm, after


def saved(rank: int, world: int, folder: Path, settings: list[Config]) -> list[Step]:
    """Initialize biases and norms too, so that each has different values."""
    found = []
    for number, one in enumerate(settings):
        session = Session.create(one)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in session.modules[0].parameters():
                values = 0.3 * torch.randn(parameter.shape, generator=generator).double()
                placed = distribute_tensor(values, parameter.device_mesh, parameter.placements)
                parameter.copy_(placed)
            for name, buffer in session.modules[0].named_buffers():
                if name.endswith("router.bias"):
                    buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        session.communicators[0].invalidate()
        save(session, folder / str(number) / "checkpoints", 1, "run")
        found.append(first_step(session))
    return found


def read_back(
    rank: int, world: int, settings: list[Config]
) -> list[tuple[dict[str, int], Step]]:
    """How many elements of each tensor the rank has read; then a step."""
    found, own = [], load._Files.read
    for one in settings:
        sizes: dict[str, int] = {}

        def read(of: Any, name: str, rows: Any, sizes: dict[str, int] = sizes) -> torch.Tensor:
            value = own(of, name, rows)
            sizes[name] = sizes.get(name, 0) + value.numel()
            return value

        with patch.object(load._Files, "read", read):
            session = Session.create(one)
        found.append((sizes, first_step(session)))
    return found


def from_folder(mesh: dict[str, Any], folder: Path, family: str) -> Config:
    """Only the model settings that a folder does not contain."""
    given = config(mesh, train=DOUBLE).model_dump()
    given["model"] = {"family": family, "path": str(folder)}
    return Config.model_validate(given)


def as_its_authors(source: Path, to: Path) -> Path:
    """An exported InternLM2 in its authors' format: fused projections, other names."""
    content = json.loads((source / "config.json").read_text())
    keys = "num_attention_heads", "num_key_value_heads", "head_dim"
    heads, groups, size = (content[key] for key in keys)
    values, made = files.load_file(source / "model.safetensors"), {}
    renamed = {
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output",
    }  # fmt: skip
    for name, value in values.items():
        if "q_proj" in name:
            q, k, v = (values[name.replace("q_proj", f"{s}_proj")] for s in "qkv")
            parts = [
                t.unflatten(0, (groups, n, size))
                for t, n in ((q, heads // groups), (k, 1), (v, 1))
            ]
            fused = name.replace("self_attn.q_proj", "attention.wqkv")
            made[fused] = torch.cat(parts, 1).flatten(0, 2)
        elif "k_proj" not in name and "v_proj" not in name:
            for theirs, its in renamed.items():
                name = name.replace(theirs, its)  # noqa: PLW2901
            made[name] = value.clone()
    to.mkdir()
    files.save_file(made, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps({**content, "model_type": "internlm2"}))
    return to


def test_a_folder_becomes_the_zoos_model_with_the_same_logits_and_first_step(
    tmp_path: Path,
) -> None:
    models = [case | {"bias": False} for case in CASES.values()]
    models.append({"family": "internlm2", "heads": 10, "kv_heads": 5})
    settings = [config({"weight": 2}, model=model, train=DOUBLE) for model in models]
    expected, _ = run_ranks(saved, 2, tmp_path, settings)
    folders, families = [], []
    for case, model in enumerate(models):
        folders.append(tmp_path / f"export{case}")
        families.append(model.get("family", "llama"))
        export(tmp_path / str(case), folders[-1], max_file_bytes=40_000 if case == 0 else 1 << 30)
    assert len(list(folders[0].glob("*.safetensors"))) > 2, "with an index"
    folders[3] = as_its_authors(folders[3], tmp_path / "authors")

    def back(mesh: dict[str, Any], *cases: int) -> list[Config]:
        return [from_folder(mesh, folders[case], families[case]) for case in cases]

    halves, other = run_ranks(
        read_back, 2, [*back({"weight": 2}, 0, 1, 2, 3), *back({"pipeline": 2}, 0, 1)]
    )
    (alone,) = run_ranks(read_back, 1, back({}, 1))
    for (_, found), case in zip([*halves, *alone], [0, 1, 2, 3, 0, 1, 1], strict=True):
        logits, loss, norm, after = expected[case]
        if found[0] is not None:
            torch.testing.assert_close(found[0], logits, rtol=1e-12, atol=1e-14)
        assert found[1] == pytest.approx(loss, rel=1e-12)
        assert found[2] == pytest.approx(norm, rel=1e-10)
        for name, value in found[3].items():
            torch.testing.assert_close(value, after[name], rtol=1e-9, atol=1e-12)
    # No rank has read more than its rows.
    for case, name in enumerate(["wq", "wqkv"]):
        name = f"layers.0.attention.{name}.weight"
        rows, stored = expected[case][3][name].shape, UP.replace("1.mlp.up", "0.self_attn.q")
        read = [one[case][0][name if case else stored] for one in (halves, other)]
        assert read == [-(-rows[0] // 2) * rows[1], rows[0] // 2 * rows[1]], name
    assert set(halves[4][0]) & set(other[4][0]) == set(), "each stage has its own layers"


def test_a_folder_with_experts_becomes_the_zoos_model_also_with_owners(tmp_path: Path) -> None:
    settings = [config({"weight": 2}, model=model, train=DOUBLE) for model in MIXTURES.values()]
    expected, _ = run_ranks(saved, 2, tmp_path, settings)
    folders = [tmp_path / f"export{number}" for number in range(len(settings))]
    for number, folder in enumerate(folders):
        export(tmp_path / str(number), folder)

    def back(mesh: dict[str, Any], case: int, **model: Any) -> Config:
        given = config(mesh, train=DOUBLE).model_dump()
        family = settings[case].model.family
        given["model"] = {"family": family, "path": str(folders[case]), **model}
        return Config.model_validate(given)

    owners, cases = {"weight": 2, "expert": 2, "expert_weight": 1}, [0, 1, 2, 3, 1, 2]
    theirs, logits_of_theirs = a_mixtral_of_transformers(tmp_path / "theirs")
    read, _ = run_ranks(read_back, 2, [
        *(back(owners, case) for case in (0, 1, 2)), back(owners, 3, balance_rate=0.0),
        *(back({"weight": 2}, case) for case in (1, 2)), from_folder(owners, theirs, "mixtral"),
    ])  # fmt: skip
    torch.testing.assert_close(read.pop()[1][0], logits_of_theirs, rtol=1e-5, atol=1e-6)
    for (sizes, found), case in zip(read, cases, strict=True):
        logits, loss, norm, after = expected[case]
        torch.testing.assert_close(found[0], logits, rtol=1e-12, atol=1e-14)
        assert found[1] == pytest.approx(loss, rel=1e-12)
        assert found[2] == pytest.approx(norm, rel=1e-10)
        for name, value in found[3].items():
            torch.testing.assert_close(value, after[name], rtol=1e-9, atol=1e-12)
        for name in (name for name in after if "experts.down" in name):
            assert sizes[name] == after[name].numel() // 2, "each rank reads its own"
    with pytest.raises(ConfigError, match=r"correction_bias in .* is not zero, and model\.balance"):
        build_for_training(back({}, 1, balance_rate=0.0))
    one, two = (f"model.layers.0.mlp.experts.0.{name}_proj.weight" for name in ("gate", "up"))
    with pytest.raises(LayoutError, match="experts is a stack of matrices of 27 and 54 rows"):
        load._Files(folders[1], {"experts": [[(one, 0, 27), (two, 0, 27)], [(one, 0, 27)]]})
    file = folders[1] / "model.safetensors"
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    files.save_file(without(lost)(files.load_file(file)), file)
    with pytest.raises(ConfigError, match=f"has no {lost}"):
        build_for_training(back({}, 1))


def a_mixtral_of_transformers(folder: Path) -> tuple[Path, torch.Tensor]:
    """A folder that transformers has saved, and its logits."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=260, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
    )).double()  # fmt: skip
    model.save_pretrained(folder)
    model.set_experts_implementation("eager")  # torch's grouped product takes no fp64
    with torch.no_grad():
        return folder, model(IDS).logits


def without(name: str) -> Callable[[Values], Values]:
    return lambda values: {n: v for n, v in values.items() if n != name}


def other(name: str, value: torch.Tensor) -> Callable[[Values], Values]:
    return lambda values: {**values, name: value}


BIAS = "model.layers.0.self_attn.o_proj.bias"
WRONG = {
    f"has no {UP}": without(UP),
    f"{UP} in .* has the shape \\[26, 20\\], the model's has": other(UP, torch.ones(26, 20)),
    "has model.extra, which a model of this family": other("model.extra", torch.ones(3)),
    f"{BIAS} in .* is not zero": other(BIAS, torch.ones(20)),
    "has no model.layers.0.self_attn.k_proj.bias": without(BIAS.replace("o_proj", "k_proj")),
}


def test_a_folder_that_is_not_the_model_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    settings = config({}, model={"qkv_bias": True, "family": "internlm2", "kv_heads": 1}).model
    zoo = dict(model_zoo.build(settings).named_parameters())
    right = {
        p.name: p.convert(zoo[p.source].detach()) if p.source else torch.zeros(p.shape)
        for p in exported_tensors(settings, {n: tuple(v.shape) for n, v in zoo.items()})
    }
    content = exported_config(settings, "float32", 9)
    place = tmp_path / "model.safetensors"

    def put(values: Values) -> None:
        files.save_file({n: v.contiguous() for n, v in values.items()}, place)
        (tmp_path / "config.json").write_text(json.dumps(content))

    put(right | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})  # of old folders
    build_for_training(from_folder({}, tmp_path, "internlm2"))
    for words, change in WRONG.items():
        put(change(right))
        with pytest.raises(ConfigError, match=words):
            build_for_training(from_folder({}, tmp_path, "internlm2"))
    # The index lists missing files, or files in another folder.
    index = tmp_path / "model.safetensors.index.json"
    for name, file, words in (
        (UP, "../model.safetensors", "outside of its folder"),
        (UP, "other.safetensors", "which the index names, is not there"),
        ("model.away", place.name, "has no model.away, which the index says"),
    ):
        index.write_text(json.dumps({"weight_map": {name: file}}))
        with pytest.raises(ConfigError, match=words):
            build_for_training(from_folder({}, tmp_path, "internlm2"))
    index.unlink()
    place.write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        build_for_training(from_folder({}, tmp_path, "internlm2"))
    place.rename(tmp_path / "pytorch_model.bin")

    def mistakes(**changes: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(content | changes))
        (tmp_path / "run.toml").write_text(f'[model]\npath = "{tmp_path}"')
        _, problems = read_config(tmp_path / "run.toml", world_size=1)
        return "\n".join(problem.text for problem in problems)

    assert "pytorch_model.bin is not read, and there is no *.safetensors" in mistakes()
    assert 'model_type is "gpt2", model.family = "llama" reads llama' in mistakes(model_type="gpt2")
    assert "scaled (yarn)" in mistakes(rope_scaling={"rope_type": "yarn", "factor": 2.0})
    assert "hidden_act is gelu" in mistakes(hidden_act="gelu")
    assert "rms_norm_eps is no sensible number" in mistakes(rms_norm_eps="small")
