"""``internsp.MixtureOfExperts``: the numbers of one process, wherever experts and tokens are."""

from __future__ import annotations

import copy
import math
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.app.train.experts import ExpertLoads
from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import StructureError
from internsp.layers import MixtureOfExperts, balance_experts, router_loss
from internsp.modules import supported
from internsp.parallel.parallelize import parallelize
from tests.support.compare import TOLERANCE, check, close, gradients, parameters
from tests.support.owners import mesh_of
from tests.support.parity import Case, run_case
from tests.support.ranks import ranks
from tests.support.versions import since

WIDTH, WORDS = 8, 13
SWITCH: dict[str, Any] = {"top_k": 2, "auxiliary": 0.3, "z_loss": 0.01}
DEEPSEEK: dict[str, Any] = {
    "top_k": 3, "score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "shared": 6,
    "balance_rate": 0.02,
}  # fmt: skip
DROPPING = DEEPSEEK | {"capacity_factor": 0.8}


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.wo = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe, self.behind = MixtureOfExperts(WIDTH, 5, 8, **options), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.wo(self.norm(x)))
        return x + self.behind(self.moe(x))


class Model(nn.Module):
    """``model(ids [T])`` -> the sum of a loss of each token."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), (ids * 5 + 1) % WORDS, reduction="sum")


def tokens(rank: int, step: int) -> Tensor:
    """Other tokens on each rank, of another number; the last of four ranks has none."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, WORDS, (0 if rank == 3 else 6 + 3 * rank,), generator=generator)


class Pair:
    def __init__(
        self, options: dict[str, Any], again: str | None, config: dict[str, Any] | None = None,
        **degrees: int,
    ) -> None:  # fmt: skip
        torch.manual_seed(4)
        self.plain = Model(**options).double()
        self.ours = copy.deepcopy(self.plain)
        self.mesh, self.trace = mesh_of(**degrees), Trace(enabled=True)
        weights = WeightParallelConfig(min_shard_elements=16, coalesce_bytes=0, **(config or {}))
        checkpoint = ActivationCheckpointConfig(mode=again) if again else None  # type: ignore[arg-type]
        self.communicator = parallelize(
            self.ours, self.mesh, weights, activation_checkpoint=checkpoint, trace=self.trace
        )
        self.communicator.state.pool.poison = True
        # A router's loss is one of all tokens; its capacity, of a rank's tokens.
        self.whole = "capacity_factor" not in options

    def step(self, number: int, what: str) -> None:
        """Two micro-batches, all gradients, a step of SGD, the balance; then all parameters."""
        world = self.mesh.world_size
        for part in (2 * number, 2 * number + 1):
            every = [tokens(rank, part) for rank in range(world)]
            if self.whole:
                every = [torch.cat(every)]
            wanted = sum(self.plain(each) for each in every) + router_loss(self.plain)
            found = self.ours(tokens(self.mesh.rank, part)) + router_loss(self.ours)
            total = found.detach().clone()
            torch.distributed.all_reduce(total)
            close(total, wanted.detach(), f"{what}: loss")
            wanted.backward()
            found.backward()
        check(gradients(self.ours), gradients(self.plain), f"{what}: gradients")
        for model in (self.ours, self.plain):
            torch.optim.SGD(model.parameters(), lr=0.05, foreach=False).step()
            model.zero_grad()
            balance_experts(model)
        check(parameters(self.ours), parameters(self.plain), f"{what}: parameters")
        check(dict(self.ours.named_buffers()), dict(self.plain.named_buffers()), f"{what}: bias")


CASES: list[tuple[dict[str, Any], str | None, dict[str, int]]] = [
    (SWITCH, None, {"expert": 4}),
    (DEEPSEEK, "full", {"expert": 2, "weight": 4, "expert_weight": 2}),
    (SWITCH, "full", {"expert": 2, "weight": 2, "expert_weight": 1}),
    (DEEPSEEK, "selective", {"expert": 4, "weight": 1}),
    (SWITCH, "selective", {"weight": 4}),
    (DEEPSEEK, None, {"weight": 2, "expert_weight": 4}),
    (DROPPING, "full", {"expert": 4}),
    (DROPPING, "selective", {"expert": 2, "weight": 2, "expert_weight": 1}),
    (DROPPING, None, {"weight": 4}),
]


@ranks(4)
def test_gradients_losses_and_balance_are_those_of_one_process() -> None:
    for number, (options, again, degrees) in enumerate(CASES):
        pair = Pair(options, again, **degrees)
        for step in range(1 if options is SWITCH else 2):
            pair.step(step, f"case {number}, step {step}")
        if options is DROPPING:
            pair.ours(tokens(pair.mesh.rank, 0))
            dropped = pair.ours.layers[0].moe.router.dropped
            torch.distributed.all_reduce(dropped)
            assert 0 < dropped < 30, "of three choices of 42 tokens"
        if options is DEEPSEEK:
            bias = pair.ours.layers[0].moe.router.bias
            assert 0 < float(bias.abs().max()) < 0.05, "two steps of 0.02 each"


@ranks(2)
def test_the_next_blocks_gather_starts_before_tokens_leave_or_when_they_are_back() -> None:
    for config, first in (({}, "AG"), ({"gather_before_modules": ["behind"]}, "A2A")):
        pair = Pair(DEEPSEEK, None, config, weight=2, expert=2, expert_weight=1)
        pair.step(0, str(config))
        own = [
            e.kind for e in pair.trace.events if e.phase == "forward"
            and (e.kind, e.weight.split(".")[1]) in (("AG", "1"), ("A2A", "0"))
        ]  # fmt: skip
        other = {"AG": "A2A", "A2A": "AG"}[first]
        before = own[: own.index(other)]
        assert set(before) == {first}, "not beside each other"


@ranks(2)
def test_compiled_blocks_with_experts_are_refused_where_torch_is_wrong() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supported, "TORCH_ASKS", False)  # torch 2.11
        words = r"layers\.0\.moe\.experts: .* compiled blocks with experts"
        with pytest.raises(StructureError, match=words):
            Pair(SWITCH, None, {"compile": True, "gather_before": "qkv"}, weight=2)


@pytest.mark.skipif(not since("2.12"), reason="wrong in torch 2.11, and refused there")
@ranks(2)
def test_compiled_blocks_give_the_same_with_owners_and_gathered() -> None:
    compiler, graphs = torch.compile, []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compile = partial(compiler, backend=counted)  # type: ignore[assignment]
    try:
        for options, degrees in ((SWITCH, {"expert": 2}), (DEEPSEEK, {"weight": 2})):
            graphs.clear()
            whole = {"compile": True, "gather_before": "qkv"}
            Pair(options, None, whole, **degrees).step(0, str(degrees))
            assert graphs, "the control: something was compiled"
    finally:
        torch.compile = compiler  # type: ignore[assignment]


ZOO: dict[str, dict[str, Any]] = {
    "mixtral": {"experts": 4, "expert_size": 8},
    "deepseek": {"experts": 4, "expert_size": 8, "shared_size": 6, "latent_size": 7, "layers": 3},
}
ZOO_CASES: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("mixtral", {"weight": 2, "packed": True}, {"expert": 2, "expert_weight": 1}),
    ("deepseek", {"sequence": 2, "checkpoint": {"mode": "full"}}, {"expert": 2}),
    ("deepseek", {"weight": 2, "micro_batches": 2}, {"expert_weight": 2}),
    ("mixtral", {"sequence": 2, "checkpoint": {"mode": "selective"}}, {"expert": 2}),
]


@ranks(2)
def test_families_of_the_zoo_equal_one_process() -> None:
    for family, options, experts in ZOO_CASES:
        case = Case(model={"family": family, **ZOO[family]}, **options)
        mesh = mesh_of(case.weight, case.sequence, **experts)
        worst = max(run_case(case, mesh=mesh))
        assert worst < TOLERANCE, f"{family}, {options}, {experts}: {worst}"


@ranks(2)
def test_metrics_tell_the_loads_of_all_ranks_once_where_blocks_recompute() -> None:
    pair = Pair(SWITCH | {"capacity_factor": 0.5}, "full", expert=2)
    loads = ExpertLoads(SimpleNamespace(mesh=pair.mesh, modules=[pair.ours]))  # type: ignore[arg-type]
    for part in (0, 1):
        for rank in (0, 1):
            pair.plain(tokens(rank, part))
            router_loss(pair.plain)
        (pair.ours(tokens(pair.mesh.rank, part)) + router_loss(pair.ours)).backward()
    taken = loads.taken()
    balance_experts(pair.ours)
    told = loads.told(taken)()
    every: list[Any] = [layer.moe.router for layer in pair.plain.layers]
    assert told["expert_load"] == max(float(r.load.max() / r.load.mean()) for r in every)
    count = sum(float(r.load.sum()) for r in every) / 2  # two experts a token
    entropy = sum(float(r.entropy) for r in every) / count
    assert abs(told["router_entropy"] - entropy) < 1e-10
    assert told["dropped_tokens"] == sum(float(r.dropped) for r in every) > 0
    assert 1 < told["expert_load"] < 8
    assert 0 < entropy < math.log(8)
    cleared = loads.taken()
    assert cleared is not None
    assert not cleared.any(), "each step counts its own tokens"


@ranks(2)
def test_nothing_in_forward_waits_for_the_counts_of_other_ranks(rank: int) -> None:
    """Which a router's loss needs: rank 0 has computed all blocks before rank 1 begins."""
    pair = Pair(SWITCH, None)
    pair.step(0, "before")
    torch.distributed.barrier()
    start = time.monotonic()
    time.sleep(rank)
    loss = pair.ours(tokens(rank, 0))
    forward = time.monotonic() - start
    (loss + router_loss(pair.ours)).backward()
    assert forward < 0.5 or rank == 1
    assert time.monotonic() - start > 0.9, "the control: the loss waits"


@ranks(2)
def test_a_model_of_one_process_beside_a_parallel_one_is_balanced_by_its_own_tokens(
    rank: int,
) -> None:
    parallel = Pair(DEEPSEEK, None, expert=2)
    alone = copy.deepcopy(parallel.plain)
    parallel.plain(torch.cat([tokens(0, 0), tokens(1, 0)]))
    parallel.ours(tokens(rank, 0))
    alone(tokens(rank, 1))
    wanted = copy.deepcopy(alone)
    balance_experts(alone, parallel.ours)
    balance_experts(parallel.plain)
    balance_experts(wanted)
    for found, right in ((parallel.ours, parallel.plain), (alone, wanted)):
        check(dict(found.named_buffers()), dict(right.named_buffers()), "bias")
