"""WP-2, WP-8, WP-12: one order on all ranks, for any data; overlap changes nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp import ZeroOptimizer
from internsp.config import ActivationCheckpointConfig
from internsp.errors import OrderError
from internsp.schedule.simulate import simulate
from tests.support.compare import close
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import (
    ALL,
    ROLLING,
    SOME,
    VOCABULARY,
    Block,
    Reordered,
    Tiny,
    Twin,
    raises,
)
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")
HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
# Without the timeline's marks.
COMMUNICATION = ("AG", "WAIT", "USE", "FREE", "RS", "FINISH")


@pytest.mark.unmeasured
@ranks(2)
def test_blocks_in_another_order_are_an_error_everywhere_or_gathered_on_demand() -> None:
    mesh = mesh_of(2)
    twin = Twin(Reordered, mesh)
    for order, word in (
        ((0, 2, 1, 3), "layers.2"), ((0, 1), "layers.2"), ((3, 2, 1, 0), "layers.3"),
        ((0, 1, 2), "layers.3"), ((0, 0, 1, 2), "layers.0"),
    ):  # fmt: skip
        twin.ours.order = order
        raises(OrderError, lambda: twin.ours(*twin.batch()[1]), word, "unexpected_order")
        twin.ours.order = twin.plain.order = (0, 1, 2, 3)
        twin.backward()
        twin.check_gradients(f"after {order}")
        twin.zero_grad()
    # All ways for the first order; for the others one each, so that each way occurs twice.
    ways = ((None, {}), (HALF, SOME), (None, ALL), (HALF, ROLLING))
    orders = ((0, 2, 1, 3), (3, 2, 1, 0), (1, 3), (0, 0, 1, 1, 2, 3), (2, 3, 2, 3))
    for number, order in enumerate(orders):
        for checkpoint, together in ways if not number else ways[number - 1 : number]:
            gather = Twin(Reordered, mesh, checkpoint, unexpected_order="gather", **together)  # type: ignore[arg-type]
            gather.ours.order = gather.plain.order = order
            for _ in range(2):
                gather.backward()
                gather.check_gradients(f"gather {order}")
            everybody, _ = gather.batch()
            with torch.no_grad():  # no backward follows to end what a forward has prefetched
                for _ in range(2):
                    close(gather.ours(*everybody), gather.plain(*everybody), f"gather {order}")


class Routed(Block):
    """Four experts; tokens choose by their values, so that a rank may leave some unused."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.never = nn.Linear(width, width)

    def forward(self, x: Tensor, route: Tensor | None = None) -> Tensor:
        x = super().forward(x)
        y = torch.zeros_like(x)
        assert self.route is not None, "set by the test"
        for index, expert in enumerate(self.experts):
            chosen = (self.route == index)[..., None]
            if chosen.any():
                y = y + torch.where(chosen, expert(x), 0.0)
        return x + y

    route: Tensor | None = None


class Pair(nn.Module):
    """Two weights; on a rank whose tokens do not choose the first, one has no gradient."""

    route: Tensor | None = None

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.spare = nn.Linear(width, width)
        self.wo = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        assert self.route is not None, "set by the test"
        chosen = (self.route == 0)[..., None]
        if chosen.any():
            y = y + torch.where(chosen, self.spare(x), 0.0)
        return x + self.wo(y)


class Extra(Tiny):
    """Weights outside blocks, embedding and head, which a rank may not use."""

    def __init__(self, block: Any = Routed) -> None:
        super().__init__(block, layers=3)
        self.image = nn.Linear(6, 6)
        self.positions = nn.Embedding(7, 6)
        self.unused = nn.Linear(6, 6)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if (ids[:, 0] < 6).any():  # "has an image"
            x = x + torch.where((ids[:, :1] < 6)[..., None], self.image(x), 0.0)
        x = x + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            layer.route = ids % 5  # 4: no expert
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")  # type: ignore[union-attr]


class Repeated(Extra):
    """Some blocks run several times in a row, and a weight may be used in one run only."""

    def __init__(self) -> None:
        super().__init__(Pair)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for run, index in enumerate((0, 0, 1, 2, 2, 2)):
            layer: Any = self.layers[index]
            layer.route = (ids * (run + 1)) % 5
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")  # type: ignore[union-attr]


def batch(first: int) -> tuple[Tensor, Tensor]:
    """Ids and labels: the first id selects the experts and the image that a rank uses."""
    ids = torch.full((2, 3), first)
    ids[1, 1:] = 5 * (first % 2) + first % 5
    return ids, (ids + 1) % VOCABULARY


def joined(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([ids for ids, _ in batches]), torch.cat([labels for _, labels in batches])


Idle = tuple[dict[str, Any], ActivationCheckpointConfig | None]
IDLE_WITH_REPLICAS: tuple[Idle, ...] = (
    ({}, None), ({"granularity": "module", "reductions_in_flight": 1}, REENTRANT), (ALL, HALF),
    (ROLLING, None),
)  # fmt: skip
IDLE: tuple[Idle, ...] = (
    *IDLE_WITH_REPLICAS, ({"granularity": "module"}, None), ({"overlap": False}, FULL),
    (SOME, None), ({"memory_pool": False, "unexpected_order": "gather"}, HALF),
    (ROLLING | {"overlap": False}, HALF),
)  # fmt: skip


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("world_size", "cases", "block"),
    [
        (2, IDLE[:4], Routed), (2, (({}, None), (ROLLING, None)), Pair),
        (4, IDLE_WITH_REPLICAS[:1], Routed),
        pytest.param(2, IDLE[4:], Routed, marks=pytest.mark.thorough(9)),
        pytest.param(4, IDLE_WITH_REPLICAS[1:], Routed, marks=pytest.mark.thorough(10)),
    ],
    ids=["experts", "a weight before the last", "with replicas", "others", "others, replicas"],
)
@ranks()
def test_a_weight_idle_on_one_rank_takes_its_place_with_zeros(
    rank: int, world_size: int, cases: tuple[Idle, ...], block: Any
) -> None:
    mesh = mesh_of(2)
    for config, checkpoint in cases:
        twin = Twin(partial(Extra, block), mesh, checkpoint, **config)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (twin.plain, twin.ours)]
        # Ids of each rank select experts and the image: some unused on one rank, some on all.
        for firsts in ((0, 10), (10, 1), (7, 2), (8, 3), (4, 9), (9, 9)):
            everybody = [batch(firsts[r] if r < 2 else 4) for r in range(world_size)]
            twin.plain(*joined(everybody)).backward()
            twin.ours(*everybody[rank]).backward()
            twin.check_step(optimizers, f"{config} {firsts}")


@pytest.mark.parametrize("config", [{}, SOME, ALL], ids=["each alone", "some", "all together"])
@ranks(2)
def test_a_weight_idle_on_one_rank_in_no_sync_keeps_its_place_among_the_sums(
    rank: int, config: dict[str, Any]
) -> None:
    """No backward reduces these sums: the optimizer's step does, in the order of their places."""
    twin = Twin(partial(Extra, Routed), mesh_of(2), **config)
    plain = torch.optim.SGD(twin.plain.parameters(), lr=1e-2)
    ours = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=1e-2)
    for step, micro_batches in enumerate((((0, 10), (10, 1)), ((7, 2), (8, 3)), ((4, 9), (0, 4)))):
        for firsts in micro_batches:
            everybody = [batch(first) for first in firsts]
            twin.plain(*joined(everybody)).backward()
            with twin.communicator.no_sync():
                twin.ours(*everybody[rank]).backward()
        for optimizer in (plain, ours):
            optimizer.step()
            optimizer.zero_grad()
        twin.check_parameters(f"step {step}")


TRACED: tuple[tuple[dict[str, Any], ActivationCheckpointConfig | None, bool, int], ...] = (
    ({}, None, False, 1),
    ({"prefetch_depth": 2, "rules": [{"match": "embed", "shard_dim": 1}]}, None, True, 2),
    ({"granularity": "module"}, HALF, False, 1),
    ({"granularity": "module", "gather_before": "qkv", "reductions_in_flight": 1}, None, True, 2),
    ({"gather_before": "mlp"}, ActivationCheckpointConfig(mode="full", blocks=(1, 2)), False, 2),
    ({"memory_pool": False, "gather_before": "qkv"}, REENTRANT, False, 2),
    (SOME, HALF, False, 1),
    (ALL | {"gather_before": "mlp"}, None, True, 2),
    (ALL, FULL, False, 1),
    ({"keep_unsharded": 2}, None, False, 2),
    ({"keep_unsharded": 1, "granularity": "module"}, HALF, True, 2),
    (SOME | {"keep_unsharded": 3, "prefetch_depth": 2}, HALF, False, 1),
    (ALL | {"keep_unsharded": 1, "memory_pool": False}, FULL, False, 2),
    (ROLLING, None, False, 2),
    (ROLLING | {"memory_pool": False, "keep_unsharded": 1}, HALF, True, 2),
    (ROLLING | SOME | {"prefetch_depth": 2}, REENTRANT, False, 1),
    (ROLLING | ALL, None, False, 2),
    (SOME | {"reduce_dtype": "bfloat16"}, None, False, 1),
)


def assert_same(found: list[str], wanted: list[str], what: str) -> None:
    pairs = enumerate(zip(found, wanted, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(found), len(wanted)))
    near = slice(max(first - 2, 0), first + 4)
    assert found == wanted, f"{what}, from line {first}: {found[near]} for {wanted[near]}"


class Tailed(Block):
    """Ends in a small weight, which comes before large ones in backward."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.tail = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + F.pad(self.tail(x), (0, x.shape[-1] - 4))


@pytest.mark.slow(10)
@few("cases", TRACED, 6)
@ranks(2)
def test_overlapped_and_synchronous_steps_are_the_printed_schedule_with_the_same_bits(
    cases: list[Any],
) -> None:
    mesh, alone = mesh_of(2), mesh_of(1)
    for config, checkpoint, tied, micro_batches in cases:
        results = []
        for overlap in (True, False):
            make = partial(Tiny, Tailed, tied=tied)
            twin = Twin(make, mesh, checkpoint, overlap=overlap, **config)
            optimizer = torch.optim.SGD(twin.ours.parameters(), lr=0.1)
            for _ in range(2):
                twin.trace.clear()
                twin.communicator.state.collectives.counters.reset()
                with twin.communicator.unchanged():
                    for _ in range(micro_batches):
                        twin.ours(*twin.batch()[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
            plan = twin.communicator.plan
            assert plan is not None
            wanted = simulate(plan, micro_batches, overlap)
            found = twin.trace.lines(COMMUNICATION)
            assert_same(found, wanted.lines(), f"{config} overlap {overlap}")
            counters = twin.communicator.state.collectives.counters
            assert wanted.nbytes("AG") == counters.gathered_bytes
            assert wanted.count("RS") == sum(e.kind == "RS" for e in twin.trace.events)
            messages = [
                (e.kind, e.weight, e.phase, e.nbytes)
                for e in twin.trace.events if e.kind in ("AG", "RS")
            ]  # fmt: skip
            results.append((messages, [p.full_tensor() for p in twin.ours.parameters()]))
        assert results[0][0] == results[1][0], f"{config}: other messages without overlap"
        for a, b in zip(results[0][1], results[1][1], strict=True):
            assert torch.equal(a, b), f"{config}: other bits without overlap"
    one = Twin(Tiny, alone)
    one.backward()
    assert one.communicator.plan is not None
    planned = simulate(one.communicator.plan).lines()
    kinds = ("USE", "FREE", "RS", "FINISH")
    assert one.trace.lines(kinds) == [line for line in planned if line.split()[0] in kinds]
    # Replicas: the plan has a line per unit, a plain loop an exchange per weight, in equal order.
    units = [line.split()[-1] for line in planned if line.startswith("EX ")]
    weights = [event.weight for event in one.trace.events if event.kind == "EX"]
    own = [next(unit for unit in units if name.startswith(f"{unit}.")) for name in weights]
    assert list(dict.fromkeys(own)) == units
    assert len(units) == 6, "head, four blocks, embedding"


@ranks(2)
def test_a_step_of_two_summed_losses_is_the_printed_schedule() -> None:
    twin = Twin(Tiny, mesh_of(2))
    twin.ours(*twin.batch()[1]).backward()  # counts the uses of each weight
    twin.zero_grad()
    twin.trace.clear()
    with twin.communicator.unchanged():
        losses = []
        for _ in range(2):
            everybody, mine = twin.batch()
            twin.plain(*everybody).backward()
            losses.append(twin.ours(*mine))
        (losses[0] + losses[1]).backward()
    plan = twin.communicator.plan
    assert plan is not None
    assert_same(twin.lines(*COMMUNICATION), simulate(plan, 2, summed_losses=True).lines(), "two")
    twin.check_gradients()


class Partly(Block):
    """Autocast only for its last layer: one of two coalesced weights has another dtype."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.large = nn.Linear(width, 64 * width)  # so that the block does not unshard at entry

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wo(torch.tanh(self.q(self.norm(x))))
        inner = torch.tanh(self.w1(x))
        with torch.autocast("cpu", torch.bfloat16):
            inner = self.w2(inner)
        return x + inner.float() + self.large(x).mean(-1, keepdim=True)


@ranks(2)
def test_autocast_for_a_part_of_what_travels_together_rounds_no_other_gradient() -> None:
    mesh = mesh_of(2)
    for config in ({"coalesce_bytes": 4096}, {"coalesce_bytes": 4096} | ROLLING):
        twin = Twin(partial(Tiny, Partly, width=16), mesh, dtype=torch.float32, **config)
        together = [weight.name for weight in twin.communicator.blocks[0].groups[0].weights]
        assert together[-2:] == ["layers.0.w1.weight", "layers.0.w2.weight"]
        for step in range(2):
            twin.backward()
            for name, plain in twin.plain.named_parameters():
                found = twin.ours.get_parameter(name).grad.full_tensor()  # type: ignore[union-attr, operator]
                # Products of rows in bf16 are summed over ranks: its rounding, and only there.
                bound = 3e-2 if ".w2." in name else 1e-5
                gap = (found - plain.grad).abs().max() / plain.grad.abs().max()  # type: ignore[union-attr, operator]
                assert float(gap) < bound, f"{config}, step {step}: {name} is {float(gap):.2g} off"
            twin.zero_grad()


class Precise(Block):
    """Has a small weight in a wider dtype, as a router of experts may have."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.router = nn.Linear(width, width)

    def _apply(self, fn: Any, recurse: bool = True) -> Precise:
        super()._apply(fn, recurse)
        self.router.double()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.router(x.double()).tanh().to(x.dtype)


@ranks(2)
def test_small_weights_of_two_dtypes_are_right_and_travel_as_planned() -> None:
    mesh = mesh_of(2)
    for config in (SOME, ALL, ALL | ROLLING, ALL | {"reduce_dtype": "float32"}):
        twin = Twin(partial(Tiny, Precise), mesh, dtype=torch.float32, **config)
        plan = twin.communicator.plan
        assert plan is not None
        for step in range(2):
            twin.trace.clear()
            twin.backward()
            twin.check_gradients(f"{config}, step {step}", 1e-5)
            if step == 0:
                assert_same(twin.trace.lines(COMMUNICATION), simulate(plan).lines(), f"{config}")


@ranks(2)
def test_several_models_on_several_meshes_live_in_one_process() -> None:
    cut, alone = mesh_of(2), mesh_of(1)
    first = Twin(Tiny, cut, HALF)
    second = Twin(partial(Tiny, partial(Block, 8), layers=3, width=8), alone, seed=5)
    third = Twin(partial(Tiny, layers=3, tied=True), mesh_of(2), seed=7, granularity="module")
    twins = (first, second, third)
    optimizers = [
        [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (t.plain, t.ours)] for t in twins
    ]
    for step in range(3):
        batches = [t.batch() for t in twins]
        losses = [(t.plain(*e), t.ours(*m)) for t, (e, m) in zip(twins, batches, strict=True)]
        for plain, ours in (losses[1], losses[0]) if step else (losses[0], losses[1]):
            plain.backward()
            ours.backward()
        if step == 1:  # one graph through all of them
            again = [(t.plain(*e), t.ours(*m)) for t, (e, m) in zip(twins, batches, strict=True)]
            sum(a for a, _ in again).backward()  # type: ignore[union-attr]
            sum(b for _, b in again).backward()  # type: ignore[union-attr]
        losses[2][0].backward()
        losses[2][1].backward()
        for twin, (a, b) in zip(twins, optimizers, strict=True):
            twin.check_gradients(f"step {step}")
            a.step()
            b.step()
            twin.zero_grad()


@ranks(2)
def test_a_block_that_runs_again_reduces_its_unused_weights_in_one_order(rank: int) -> None:
    """A rank that uses a weight in one run only has as many reductions as the others."""
    for order in ("gather", "learn"):
        for together in (ALL, SOME, {"reductions_in_flight": 1}):
            twin = Twin(Repeated, mesh_of(2), unexpected_order=order, **together)  # type: ignore[arg-type]
            both = (twin.plain, twin.ours)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in both]
            for step in range(3):
                batches = [batch(3 * step), batch(3 * step + 1 + step)]
                twin.plain(*joined(batches)).backward()
                twin.ours(*batches[rank]).backward()
                twin.check_step(optimizers, f"{order} {together}, step {step}")
