"""Tiny mixtures of ``transformers`` whose experts have owners, on a mesh and on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.support import hf
from tests.support import ranks as support
from tests.support.compare import check, close, gradients, parameters

_SMALL: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
    "moe_intermediate_size": 12, "num_experts_per_tok": 2, "experts_implementation": "eager",
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "sliding_window": None},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_local_experts": 8, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
        "head_dim": 4,
    },
    "gpt_oss": {"num_local_experts": 8, "attn_implementation": "eager"},
    "glm4_moe": {
        "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
support.PRELOAD[0:0] = [f"transformers.models.{f}.modeling_{f}" for f in MIXTURES]


def mesh_of(weight: int = 1, sequence: int = 1, **degrees: Any) -> ParallelMesh:
    return ParallelMesh.create(weight, sequence, device_type="cpu", timeout_seconds=20, **degrees)


def mixture(family: str, **changes: Any) -> Any:
    """A model of two blocks in fp64 on one process."""
    known, hf.FAMILIES = hf.FAMILIES, {family: _SMALL | MIXTURES[family]}
    try:
        return hf.tiny(family, **changes)
    finally:
        hf.FAMILIES = known


class OwnersTwin:
    """``family`` on one process (``plain``) and on a mesh (``ours``), with a trace.

    Args:
        again: the mode in which blocks recompute.
        prepare: changes the model before it is copied.
    """

    def __init__(
        self, family: str, mesh: ParallelMesh, again: str | None = None,
        prepare: Callable[[nn.Module], None] = lambda model: None, **config: Any,
    ) -> None:  # fmt: skip
        self.plain = mixture(family)
        prepare(self.plain)
        self.ours = copy.deepcopy(self.plain)
        self.mesh, self.trace = mesh, Trace(enabled=True)
        small = {"min_shard_elements": 32, "coalesce_bytes": 0}
        weights = WeightParallelConfig(**small | config)
        checkpoint = ActivationCheckpointConfig(mode=again) if again else None
        self.communicator = parallelize(
            self.ours, mesh, weights, activation_checkpoint=checkpoint, trace=self.trace
        )
        self.communicator.state.pool.poison = True

    def backward(self, micro_batches: int = 1) -> None:
        """The backward of losses in fp64, of other tokens on each data rank."""
        for step in range(micro_batches):
            given = [
                {"input_ids": hf.ids(10 * step + data, 2, 9 + data % 2 * 2), "use_cache": False}
                for data in range(self.mesh.data)
            ]
            losses = [hf.sums(self.plain, batch) for batch in given]
            sum(losses).backward()  # type: ignore[union-attr]
            mine = given[self.mesh.data_rank]
            length, part = mine["input_ids"].shape[1], slice(None)
            if self.mesh.sequence > 1:
                half = -(-length // 2)
                part = (slice(0, half), slice(half, length))[self.mesh.sequence_rank]
            loss = hf.sums(self.ours, mine, part)
            if self.mesh.sequence == 1:
                close(loss.detach(), losses[self.mesh.data_rank].detach(), "loss")
            loss.backward()

    def check(self, what: str) -> None:
        """Every gradient, and every parameter after a step of SGD."""
        check(gradients(self.ours), gradients(self.plain), f"{what}: gradients")
        for model in (self.ours, self.plain):
            torch.optim.SGD(model.parameters(), lr=0.05, foreach=False).step()
            model.zero_grad()
        check(parameters(self.ours), parameters(self.plain), f"{what}: parameters")

    def sent(self, what: str, phase: str) -> list[int]:
        """Bytes of each message of a kind (counts, tokens, results) and phase."""
        return [
            e.nbytes for e in self.trace.events
            if e.kind == "A2A" and e.weight.endswith(what) and e.phase == phase
        ]  # fmt: skip
