"""The head of a transformers model on chunks of tokens: the same values, less memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from internsp.app.models.chunked_head import LOSS, ChunkedHead
from internsp.sp import token_loss

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

VOCABULARY, LENGTH, CHUNK = 97, 12, 5
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
# Plain; a soft cap; a scale; a mixture with router logits in its output; a bias.
CHUNKED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 0.5},
    "cohere": {"logit_scale": 0.25},
    "mixtral": {
        "num_local_experts": 2, "output_router_logits": True, "experts_implementation": "eager",
    },
    "phi": {"num_key_value_heads": 2},
}  # fmt: skip
# A scale before the head, an input that the class needs.
WHOLE: dict[str, dict[str, Any]] = {
    "minicpm3": {
        "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "dim_model_base": 4,
    },
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
}  # fmt: skip


def tiny(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    options = SIZES | changes
    chosen = {k: options.pop(k) for k in list(options) if k.endswith("_implementation")}
    config = AutoConfig.for_model(family, **options)
    return AutoModelForCausalLM.from_config(config, **chosen).double()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor with the vocabulary as a dimension, weights excluded."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            shape = getattr(tensor, "shape", ())
            if VOCABULARY in shape and SIZES["hidden_size"] not in shape:
                self.tokens = max(self.tokens, math.prod(shape) // VOCABULARY)
        return output


def loss_of(model: Any, head: ChunkedHead | None) -> tuple[Tensor | None, int]:
    """The summed loss with its gradients, and the most tokens that had logits at a time."""
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(ids % 3 == 0, -100)
    model.zero_grad()
    given = {"input_ids": ids, "use_cache": False}
    with Largest() as largest:
        if head is None:
            loss: Any = token_loss(model(**given).logits, _same, labels, chunk_tokens=CHUNK)[0]
        else:
            with head.ending_in(lambda h, by: token_loss(h, by, labels, chunk_tokens=CHUNK)[0]):
                output = model(**given)
            loss = output.get(LOSS)
        if loss is not None:
            loss.backward()
    return loss, largest.tokens


def _same(logits: Tensor) -> Tensor:
    return logits


@pytest.mark.thorough(1)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", CHUNKED)
def test_loss_and_gradients_are_those_of_whole_logits(family: str, tied: bool) -> None:
    model = tiny(family, tie_word_embeddings=tied, **CHUNKED[family])
    wanted, tokens = loss_of(model, None)
    assert tokens == 2 * LENGTH
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    head = ChunkedHead.of(model)
    assert head is not None
    for _ in range(2):
        found, tokens = loss_of(model, head)
        assert tokens <= CHUNK
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-10, atol=1e-10)
    loss_of(model, None)  # no state of it remains
    assert vars(model).keys().isdisjoint({"forward", model.base_model_prefix})


@pytest.mark.parametrize("family", WHOLE)
def test_a_class_that_computes_before_its_head_makes_its_logits_whole(family: str) -> None:
    model = tiny(family, **WHOLE[family])
    head = ChunkedHead.of(model)
    assert head is not None
    loss, tokens = loss_of(model, head)
    assert loss is None
    assert tokens == 2 * LENGTH


def test_a_forward_that_fails_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")
    head = ChunkedHead.of(model)
    assert head is not None

    def fails(hidden: Tensor, by: Any) -> Tensor:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"), head.ending_in(fails):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    wanted, _ = loss_of(model, None)
    found, _ = loss_of(model, head)
    torch.testing.assert_close(found, wanted)
