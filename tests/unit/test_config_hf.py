"""``model.family = "hf"``: sizes come from the folder's config.json; contradictions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from internsp.app.config import Config, load_config
from internsp.errors import ConfigError

LLAMA = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "tie_word_embeddings": True,
}  # fmt: skip


def write(folder: Path, content: Any, more: str = "") -> Path:
    """A model's folder and a configuration that names it."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(content))
    path = folder / "run.toml"
    path.write_text(f'[model]\nfamily = "hf"\npath = "{model}"\n{more}')
    return path


@pytest.mark.parametrize(
    "content",
    [
        LLAMA,
        {"text_config": LLAMA, "vision_config": {"hidden_size": 5}},
        {**LLAMA, "num_key_value_heads": [2, 1], "head_dim": None},
        {**LLAMA, "num_key_value_heads": 0, "head_dim": None},
    ],
    ids=["flat", "nested", "a list for each layer", "no sensible number"],
)
def test_sizes_are_those_of_config_json_and_survive_the_resolved_file(
    content: dict[str, Any], tmp_path: Path
) -> None:
    config = load_config(write(tmp_path, content))
    model = config.model
    assert (model.vocab_size, model.hidden_size, model.layers, model.heads) == (300, 32, 3, 4)
    assert model.tie_embeddings
    assert model.kv_heads == (None if "head_dim" in content else 2)
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml())
    assert load_config(again) == config


def test_other_names_of_sizes_are_read(tmp_path: Path) -> None:
    gpt2 = {"vocab_size": 300, "n_embd": 24, "n_layer": 5, "n_head": 3, "n_inner": None}
    model = load_config(write(tmp_path, gpt2)).model
    assert (model.hidden_size, model.layers, model.heads) == (24, 5, 3)
    assert model.intermediate_size is None


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        (LLAMA, "hidden_size = 64", r"model\.hidden_size: 64, but config\.json .* says 32"),
        (LLAMA, 'kv_heads = "none"', r'model\.kv_heads: "none", but config\.json .* says \d'),
        (LLAMA, "qkv_bias = true", r"model\.qkv_bias: only for the model zoo"),
        (LLAMA, "[parallel]\npipeline = 2", r"parallel\.pipeline: 2 is not supported"),
        (LLAMA, '[sequence]\nhead_output = "gather"', 'only "local"'),
        ({"vocab_size": 300}, "", r"has no num_hidden_layers or .*: set model\.layers"),
        ([], "", "no JSON object"),
        ({**LLAMA, "vocab_size": 40}, "", "bytes need 257 ids"),
    ],
    ids=["size", "none", "zoo", "pipeline", "head", "lacking", "list", "vocabulary"],
)
def test_what_does_not_fit_is_named(content: Any, more: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(write(tmp_path, content, more), world_size=2)


def test_a_size_that_config_json_lacks_may_be_given(tmp_path: Path) -> None:
    content = {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}
    assert load_config(write(tmp_path, content, "layers = 7")).model.layers == 7


def test_folders_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    (tmp_path / "model/pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is not read, and there is no \*\.s"):
        load_config(path)
    (tmp_path / "model/pytorch_model.bin").rename(tmp_path / "model/model.safetensors.index.json")
    with pytest.raises(ConfigError, match=r"index\.json is not read, and there is no \*\.s"):
        load_config(path)
    (tmp_path / "model/config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is no JSON"):
        load_config(path)
    (tmp_path / "model/config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json cannot be read: No such"):
        load_config(path)


def test_the_zoos_families_take_their_sizes_from_a_llamas_folder(tmp_path: Path) -> None:
    content = LLAMA | {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "attention_bias": True}
    path = write(tmp_path, content, "rope_theta = 1e4")
    path.write_text(path.read_text().replace('"hf"', '"internlm2"'))
    with pytest.raises(ConfigError, match=r"rope_theta: 10000.0, but config.json .* says 500000.0"):
        load_config(path)
    path.write_text(path.read_text().replace("rope_theta = 1e4", ""))
    config = load_config(path)
    model = config.model
    assert (model.rope_theta, model.norm_eps) == (5e5, 1e-6)
    assert (model.qkv_bias, model.bias) == (True, False)
    assert (model.layers, model.kv_heads, model.intermediate_size) == (3, 2, 64)
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "again.toml") == config


MIXTRAL = LLAMA | {
    "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 3,
    "sliding_window": None,
}  # fmt: skip
ERNIE = LLAMA | {
    "model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 48,
    "moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_end_index": 2,
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3", "n_routed_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 2,
    "kv_lora_rank": 10, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 10, "head_dim": 4, "rope_interleave": False, "n_group": 1,
    "routed_scaling_factor": 1.0, "num_key_value_heads": 4,
}  # fmt: skip
OF_MIXTURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": (MIXTRAL, {"experts": 6, "top_k": 3, "expert_width": 64, "rope_theta": 1e6}),
    "ernie": (ERNIE, {"experts": 6, "top_k": 3, "expert_width": 48, "rope_theta": 5e5}),
    "deepseek": (DEEPSEEK, {
        "experts": 6, "top_k": 3, "expert_size": 20, "shared_size": 40, "dense_layers": 2,
        "latent_size": 10, "rotary_size": 4, "head_dim": 10,
    }),
}  # fmt: skip


def zoos(folder: Path, content: dict[str, Any]) -> Path:
    """A file that reads a folder with experts into the zoo."""
    path = write(folder, content)
    family = "deepseek" if content["model_type"] == "deepseek_v3" else "mixtral"
    path.write_text(path.read_text().replace('"hf"', f'"{family}"'))
    return path


@pytest.mark.parametrize("name", OF_MIXTURES)
def test_the_zoos_families_with_experts_take_their_sizes_from_a_folder(
    name: str, tmp_path: Path
) -> None:
    content, expected = OF_MIXTURES[name]
    config = load_config(zoos(tmp_path, content))
    assert {key: getattr(config.model, key) for key in expected} == expected
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "again.toml") == config


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (MIXTRAL | {"sliding_window": 4096}, "a sliding window"),
        (MIXTRAL | {"num_local_experts": "8"}, "does not say num_local_experts"),
        (ERNIE | {"moe_num_shared_experts": 2}, "has shared experts"),
        (ERNIE | {"moe_layer_start_index": 1}, "not each of its blocks has experts"),
        (ERNIE | {"use_bias": True}, "use_bias"),
        (DEEPSEEK | {"q_lora_rank": 8}, "its queries have a latent vector"),
        (DEEPSEEK | {"v_head_dim": 6}, "not as wide as its keys"),
        (DEEPSEEK | {"rope_interleave": True}, "interleaved"),
        (DEEPSEEK | {"n_group": 2}, "in groups"),
        (DEEPSEEK | {"n_shared_experts": None}, "its shared experts are none"),
        (DEEPSEEK | {"routed_scaling_factor": 2.5}, "scales or does not normalize"),
        (DEEPSEEK | {"attention_bias": True}, "its linear layers have biases"),
    ],
)
def test_folders_with_experts_that_the_zoo_does_not_compute_are_named(
    content: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = zoos(tmp_path, content)
    with pytest.raises(ConfigError, match=says + r'.*; set model\.family = "hf"'):
        load_config(path)
    path.write_text(path.read_text().replace("deepseek", "hf").replace("mixtral", "hf"))
    load_config(path)  # the remedy


def test_a_key_of_programs_stays_refused_in_a_file_beside_a_folder(tmp_path: Path) -> None:
    path = zoos(tmp_path, DEEPSEEK)
    path.write_text(path.read_text() + "expert_size = 20")
    with pytest.raises(ConfigError, match=r"expert_size: is for programs alone"):
        load_config(path)


def test_hf_belongs_to_a_path() -> None:
    with pytest.raises(ValueError, match=r"needs a folder with config\.json"):
        Config.model_validate({"model": {"family": "hf"}})
