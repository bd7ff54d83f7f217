"""Modules that cannot run with sequence parallelism are listed with name and reason."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from internsp.config import SequenceConfig
from internsp.errors import ConfigError, StructureError
from internsp.parallel.sequences import require_sequence_attention, supports
from internsp.sp import DistributedAttention
from internsp.values.meta import materialize_buffers
from tests.support import hf
from tests.support.models import Tiny, raises

MESH: Any = SimpleNamespace(sequence=2, rank=0, expert=1)
WHOLE: Any = SimpleNamespace(sequence=1, rank=0, expert=1)


def made(family: str, head: str = "CausalLM", **changes: Any) -> Any:
    """A tiny model on the meta device."""
    import transformers

    options = {**hf.FAMILIES["llama"], "vocab_size": 41, **changes}
    chosen = {k: options.pop(k) for k in list(options) if k.endswith("_implementation")}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(family, **options)
        kind = getattr(transformers, f"AutoModelFor{head}")
        return kind.from_config(config, **chosen)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mixtral", "gpt_oss", "deepseek_v3"])
def test_families_that_look_their_kernel_up_are_supported(family: str) -> None:
    model = made(family)
    before = copy.deepcopy(vars(model.config))
    modules = [(name, vars(m).keys()) for name, m in model.named_modules()]
    assert supports(model, MESH) == []
    assert vars(model.config) == before
    assert [(name, vars(m).keys()) for name, m in model.named_modules()] == modules


HYBRID = {"layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("make", "module", "words"),
    [
        (lambda: made("bloom"), "transformer.h.0.self_attention", "BloomAttention takes alibi"),
        (lambda: made("xglm"), "model.layers.1.self_attn", "AttentionInterface"),
        (lambda: made("mamba"), "backbone.layers.0.mixer.conv1d", "Conv1d"),
        (lambda: made("rwkv"), "rwkv.blocks.0.attention.time_shift", "ZeroPad2d"),
        (lambda: made("qwen3_next", **HYBRID), "model.layers.0.linear_attn.conv1d", "Conv1d"),
        (lambda: made("minimax", **HYBRID), "model.layers.0.self_attn", "MiniMaxLightningAttent"),
        (lambda: made("deepseek_v32"), "model.layers.0.self_attn.indexer", "attention_mask"),
        (lambda: made("doge"), "model.layers.1.self_attn", "gives its kernel a mask of its own"),
        (
            lambda: made("bart", is_encoder_decoder=False, decoder_attention_heads=4),
             "model.decoder", "takes no position_ids"),
        (lambda: made("llama", "SequenceClassification"), "", "no causal language model"),
        (
            lambda: made("llama", attn_implementation="flex_attention"),
            "model.layers.0.self_attn", "uses flex_attention",
        ),
        (
            lambda: made("gpt2", attn_implementation="eager", reorder_and_upcast_attn=True),
            "transformer.h.0.attn", "reorder_and_upcast_attn",
        ),
        (lambda: nn.Sequential(made("llama")), "", "Sequential wraps a LlamaForCausalLM"),
        (lambda: with_attention(nn.MultiheadAttention(6, 2)), "other", "MultiheadAttention"),
        (lambda: with_attention(nn.LSTM(6, 6)), "other", "state would begin anew"),
        (lambda: with_attention(OwnAttention()), "other", "calls scaled_dot_product_attention"),
        (lambda: without_attention(), "self_attention", "is no internsp.DistributedAttention"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_mixes_tokens_itself_is_named(make: Any, module: str, words: str) -> None:
    model = make()
    found = supports(model, MESH)
    assert any(r.module == module and words in r.reason for r in found), found
    assert supports(model, WHOLE) == []
    sees_to_it = SequenceConfig(own_attention=True)
    assert supports(model, MESH, sequence=sees_to_it) == []
    words = f"{module or 'the model'}: "
    raises(
        StructureError,
        lambda: require_sequence_attention(model, MESH, SequenceConfig()),
        words,
    )


class OwnAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def with_attention(other: nn.Module) -> nn.Module:
    model = Tiny()
    model.attend, model.other = DistributedAttention(2, 2, 3), other
    return model


def without_attention() -> nn.Module:
    model = Tiny()
    model.self_attention = nn.Sequential(nn.Linear(6, 6))
    return model


def test_every_layer_is_listed_and_the_error_counts_what_it_leaves_out() -> None:
    model = made("xglm", num_hidden_layers=11)
    assert len(supports(model, MESH)) == 11
    words = "and 3 more (internsp.supports lists them all)"
    raises(
        StructureError,
        lambda: require_sequence_attention(model, MESH, SequenceConfig()),
        words,
    )


def test_weights_that_cannot_be_cut_are_listed_too() -> None:
    model = Tiny()
    model.part = nn.Embedding(4, 2, sparse=True)
    [found] = supports(model, WHOLE)
    assert "embedding part" in found.reason


@pytest.mark.parametrize("family", ["llama", "gptj", "gemma3_text"])
def test_buffers_of_a_model_from_meta_are_those_of_one_built_with_values(family: str) -> None:
    """No checkpoint has rotary frequencies: the family's own ``_init_weights`` computes them."""
    import transformers

    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model = made(family, **({"rope_parameters": scaled} if family == "llama" else {}))
    real = getattr(transformers, type(model).__name__)(model.config)
    materialize_buffers(model, torch.device("cpu"))
    found, wanted = dict(model.named_buffers()), dict(real.named_buffers())
    assert wanted.keys() == found.keys()
    assert wanted
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert all(p.is_meta for p in model.parameters())


def test_a_permission_that_no_module_needs_is_refused() -> None:
    needless = SequenceConfig(own_attention=True)
    for model in (made("llama"), with_attention(DistributedAttention(2, 2, 4))):
        assert supports(model, MESH) == []
        call = partial(require_sequence_attention, model, MESH, needless)
        raises(ConfigError, call, "own_attention = True has no effect", "leave it out")
        require_sequence_attention(model, WHOLE, needless)  # one rank of a sequence
        require_sequence_attention(model, MESH, SequenceConfig())
    require_sequence_attention(with_attention(OwnAttention()), MESH, needless)
