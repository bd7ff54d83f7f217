"""Unmodified mixtures of ``transformers`` whose experts have owners: the values of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.experts.rule import COUNTS_BYTES
from internsp.optim import ZeroOptimizer, clip_grad_norm_
from tests.support.compare import check, close, parameters
from tests.support.owners import MIXTURES, OwnersTwin, mesh_of
from tests.support.ranks import ranks


@pytest.mark.thorough(10)
@pytest.mark.parametrize("world_size", [2, 4])
@ranks()
def test_every_family_computes_what_one_process_does(world_size: int) -> None:
    mesh = mesh_of(expert=world_size)
    for family in MIXTURES if world_size == 2 else ("gpt_oss", "deepseek_v3"):
        twin = OwnersTwin(family, mesh)
        for _ in range(4 // world_size):
            twin.backward()
            twin.check(family)


CASES: list[tuple[str, str | None, dict[str, Any]]] = [
    ("mixtral", "full", {"expert": 2, "sequence": 2}),
    ("qwen3_moe", "selective", {"expert": 2, "expert_weight": 2, "weight": 4}),
    ("gpt_oss", "selective", {"expert": 4, "sequence": 2, "weight": 2, "expert_weight": 1}),
    ("deepseek_v3", "full", {"expert": 2, "weight": 2}),
    ("mixtral", "full", {"expert": 2, "expert_weight": 2, "near_experts": "expert"}),
]


@ranks(4)
def test_any_degrees_recompute_and_accumulation_give_the_same() -> None:
    for family, again, degrees in CASES:
        twin = OwnersTwin(family, mesh_of(**degrees), again)
        twin.backward(micro_batches=2)
        forward = len(twin.sent("tokens", "forward"))
        assert forward == (2 if family == "deepseek_v3" else 4)
        assert len(twin.sent("tokens", "backward")) == forward, "gradients in one message each"
        for what in ("counts", "tokens"):
            sent = len(twin.sent(what, "recompute"))
            assert sent == (0 if again == "selective" else forward), "nothing is routed anew"
        twin.check(f"{family} {again} {degrees}")


def to_one_owner(model: nn.Module) -> None:
    """The routers' values are such that every token chooses the last two experts."""
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith("router.bias"):
                bias[-2:] += 50.0


@ranks(4)
def test_an_owner_of_all_tokens_and_owners_of_none_agree_with_one_process() -> None:
    mesh = mesh_of(expert=4)
    for again in (None, "full", "selective"):
        twin = OwnersTwin("gpt_oss", mesh, again, prepare=to_one_owner)
        twin.backward()
        tokens = twin.sent("tokens", "forward")
        assert [bool(n) for n in tokens] == [mesh.expert_rank != 3] * 2, "the last keeps its own"
        weight = twin.ours.model.layers[0].mlp.experts.gate_up_proj
        assert weight.grad is not None, "not none, where any owner used its part"
        assert bool(weight.grad.to_local().any()) == (mesh.expert_rank == 3)
        twin.check(f"all tokens at one owner, {again}")


@pytest.mark.thorough(4)
@ranks(4)
def test_norms_and_clipping_count_each_expert_once() -> None:
    for degrees in ({"expert": 4}, {"expert": 2, "expert_weight": 2, "weight": 2}):
        twin = OwnersTwin("mixtral", mesh_of(**degrees))
        twin.backward()
        wanted = torch.nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.25)
        close(clip_grad_norm_(twin.ours.parameters(), 0.25), wanted, f"norm with {degrees}")
        twin.check(f"clipped with {degrees}")
        ours = ZeroOptimizer(twin.communicator, torch.optim.AdamW, lr=1e-2, max_grad_norm=0.25)
        plain = torch.optim.AdamW(twin.plain.parameters(), lr=1e-2)
        for _ in range(2):
            twin.backward()
            wanted = torch.nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.25)
            plain.step()
            ours.step()
            close(torch.tensor(ours.grad_norm).double(), wanted.double(), "norm", 1e-6)
            plain.zero_grad()
        check(parameters(twin.ours), parameters(twin.plain), f"AdamW with {degrees}", 1e-8)


@ranks(2)
def test_bytes_of_messages_are_those_of_the_rule_with_the_counts_that_came() -> None:
    mesh = mesh_of(expert=2)
    twin = OwnersTwin("mixtral", mesh)
    chosen: list[Tensor] = []
    for layer in twin.ours.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, args, out: chosen.append(out[2]))
    twin.backward()
    away = [int((index // 4 != mesh.expert_rank).any(1).sum()) for index in chosen]
    weights = 4  # bytes of a router's weight: fp32
    row, route = 24 * 8, 2 * weights
    assert twin.sent("tokens", "forward") == [n * (row + route + 2 * 4) for n in away]
    assert twin.sent("results", "backward") == [n * row for n in reversed(away)]
    assert twin.sent("counts", "forward") == [COUNTS_BYTES] * 2
    theirs: list[Any] = [None, None]
    dist.all_gather_object(theirs, away)
    got = theirs[1 - mesh.expert_rank]
    assert twin.sent("results", "forward") == [n * row for n in got]
    assert twin.sent("tokens", "backward") == [n * (row + route) for n in reversed(got)]
