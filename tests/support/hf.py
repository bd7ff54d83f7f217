"""Tiny ``transformers`` models, sharded and on one process.

Importing this module makes the ranks' fork server load ``transformers`` once (several seconds).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.support import ranks as support
from tests.support.compare import check, close, gradients, parameters
from tests.support.sections import sections

for _module in ("transformers.modeling_utils", "transformers.models.auto.modeling_auto"):
    if _module not in support.PRELOAD:
        support.PRELOAD.insert(0, _module)

VOCABULARY = 41
# Bodies and losses that compute in float32 regardless of the model's dtype.
SINGLE = 1e-5
_SIZES = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 5},
    "gemma2": {**_LLAMA, "sliding_window": 5, "query_pre_attn_scalar": 8,
               "attn_logit_softcapping": 2.0, "attn_implementation": "eager"},
    "gpt_oss": {**_LLAMA, **_EXPERTS, "sliding_window": 5, "attn_implementation": "eager"},
    "mixtral": {**_LLAMA, **_EXPERTS, "sliding_window": None, "router_aux_loss_coef": 0.5},
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "eager"},
    "roberta": {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
                "num_attention_heads": 6, "max_position_embeddings": 32, "is_decoder": True,
                "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}  # fmt: skip


def tiny(family: str, **changes: Any) -> Any:
    """A causal model of two blocks in fp64, with weights large enough for each to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = _SIZES | FAMILIES[family] | changes
    chosen = {k: options.pop(k) for k in list(options) if k.endswith("_implementation")}
    config = AutoConfig.for_model(family, **options)
    model = AutoModelForCausalLM.from_config(config, **chosen)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0 if p.dim() > 1 else 0.5, 0.2, generator=generator)
    return model.double()


class HuggingTwin:
    """A model on one process (``plain``) and the same on a mesh (``ours``)."""

    def __init__(
        self, family: str, mesh: ParallelMesh, changes: dict[str, Any] | None = None, **config: Any
    ) -> None:
        self.plain = tiny(family, **(changes or {}))
        self.ours = copy.deepcopy(self.plain)
        self.mesh, self.family = mesh, family
        weights, sequence = sections({"min_shard_elements": 32, "coalesce_bytes": 0} | config)
        self.communicator = parallelize(self.ours, mesh, weights, sequence=sequence)
        self.communicator.state.pool.poison = True

    def batches(self, make: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
        """The batch of each data rank; the ranks of a sequence group get the same one."""
        return [make(data) for data in range(self.mesh.data)]

    def compare(
        self, make: Callable[[int], dict[str, Any]], what: str, tolerance: float = SINGLE
    ) -> None:
        """Losses and every gradient of a step, and every parameter after one step of SGD."""
        given = self.batches(make)
        losses = [self.plain(**batch).loss for batch in given]
        sum(losses).backward()  # type: ignore[union-attr]
        found = self.ours(**given[self.mesh.data_rank]).loss
        close(found.detach(), losses[self.mesh.data_rank].detach(), f"{what}: loss", tolerance)
        found.backward()
        check(gradients(self.ours), gradients(self.plain), f"{what}: gradients", tolerance)
        for model in (self.ours, self.plain):
            torch.optim.SGD(model.parameters(), lr=0.05, foreach=False).step()
            model.zero_grad()
        check(parameters(self.ours), parameters(self.plain), f"{what}: parameters", tolerance)


def ids(data: int, rows: int = 2, length: int = 11) -> Tensor:
    """Token ids ``[rows, length]`` without special tokens."""
    generator = torch.Generator().manual_seed(100 + data)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def plain_batch(data: int) -> dict[str, Any]:
    """Rows without padding; some labels are ignored, a different number on each rank."""
    tokens = ids(data)
    labels = tokens.clone()
    labels[0, 7:] = -100
    return {"input_ids": tokens, "labels": labels}


def padded_batch(data: int) -> dict[str, Any]:
    """Two rows padded on the right. In eager attention a query that sees no key is NaN in fp64,
    so no sliding window contains padding only."""
    batch = plain_batch(data)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 7:], mask[1, 9:] = 0, 0
    batch["labels"] = batch["input_ids"].masked_fill(mask == 0, -100)
    return batch | {"attention_mask": mask}


def padded_left(data: int) -> dict[str, Any]:
    """Two rows padded on the left."""
    batch = padded_batch(data)
    mask = batch["attention_mask"].flip(1)
    return batch | {
        "attention_mask": mask,
        "labels": batch["input_ids"].masked_fill(mask == 0, -100),
    }


def packed_batch(data: int) -> dict[str, Any]:
    """Three documents in a row, one of them across two ranks; ``position_ids`` mark them."""
    rows = [torch.cat([torch.arange(n) for n in sizes]) for sizes in ((4, 5, 2), (1, 7, 3))]
    # With a cache, which is the default, transformers does not detect packed documents.
    return plain_batch(data) | {"position_ids": torch.stack(rows), "use_cache": False}


def sums(model: nn.Module, batch: dict[str, Any], part: slice = slice(None)) -> Tensor:
    """A user-defined loss in fp64 throughout: squares of the logits, weighted by position."""
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    length = batch["input_ids"].shape[1]
    weights = torch.linspace(-1.0, 1.0, length, dtype=logits.dtype)[part]
    return (logits.square().sum(-1) * weights).sum()
