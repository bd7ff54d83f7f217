"""A program may write weights in any way, and no forward sees old ones (WP-11)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import LayoutError, StaleWeightError, StructureError
from internsp.optim import ZeroOptimizer
from internsp.parallel.parallelize import parallelize
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, Tiny, Twin, raises
from tests.support.ranks import ranks
from tests.support.zero import batch, little, share

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
Way = Callable[[nn.Module], None]


def local(p: Any) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


def through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(1.25)
        p.data.add_(0.01)
        p.data.clamp_(-0.7, 0.7)


def given_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.8


def whole_data(model: nn.Module) -> None:
    for number, p in enumerate(model.parameters()):
        p.data = torch.linspace(-0.5, 0.5 + number / 50, p.numel(), dtype=p.dtype).view(p.shape)


def by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.data -= 0.05 * p.grad


def foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.2)


def foreach_data(model: nn.Module) -> None:
    torch._foreach_mul_([p.data for p in model.parameters()], 0.9)


def local_rows(model: nn.Module) -> None:
    for p in model.parameters():
        local(p).data.mul_(1.1)


def numpy_rows(model: nn.Module) -> None:
    for p in model.parameters():
        local(p).detach().numpy().__imul__(0.95)


def as_vector(model: nn.Module) -> None:
    count = sum(p.numel() for p in model.parameters())
    values = torch.linspace(-0.6, 0.6, count, dtype=torch.float64)[torch.arange(count) * 7 % count]
    vector_to_parameters(values, model.parameters())


def of_state(model: nn.Module) -> None:
    for values in model.state_dict().values():
        values.mul_(0.9)


WAYS: tuple[Way, ...] = (
    through_data, given_data, whole_data, by_hand, foreach, foreach_data, local_rows, numpy_rows,
    as_vector, of_state,
)  # fmt: skip
CASES: tuple[tuple[dict[str, Any], ActivationCheckpointConfig | None], ...] = (
    ({}, None), (ALL, HALF), (ROLLING, None), ({"granularity": "module"}, None),
    ({"keep_unsharded": 2, "memory_pool": False}, None),
)  # fmt: skip


def evaluate(twin: Twin, what: str) -> None:
    everybody, _ = twin.batch()
    with torch.no_grad():
        close(twin.ours(*everybody), twin.plain(*everybody), what, 1e-9)


def one_rank(twin: Twin, rank: int, weight: int) -> None:
    """Only rank 0 writes its rows of every sharded weight."""
    twin.backward()
    twin.zero_grad()
    for (_, a), (_, b) in zip(
        twin.plain.named_parameters(), twin.ours.named_parameters(), strict=True
    ):
        placed = b.placements[1]  # type: ignore[attr-defined]
        if placed.is_shard() and weight > 1:
            a.data.chunk(weight, placed.dim)[0].mul_(1.3)
            if rank == 0:
                b.data.mul_(1.3)
    evaluate(twin, "written on one rank only")
    twin.backward()
    twin.check_gradients("written on one rank only", 1e-9)
    twin.zero_grad()


# Only the first case is measured by coverage; the others share one start of ranks, in which
# torch caches its sharding propagation for DTensor operations.
@pytest.mark.parametrize(
    ("weight", "cases"),
    [
        pytest.param(2, CASES[:1], id="as it is"),
        pytest.param(2, CASES[1:], id="every option", marks=pytest.mark.thorough(12)),
        pytest.param(1, CASES[1:2], id="no weight group", marks=pytest.mark.unmeasured),
    ],
)
@ranks(2)
def test_weights_written_by_any_way_between_two_passes_are_seen_by_the_next(
    rank: int, weight: int, cases: tuple[tuple[dict[str, Any], Any], ...]
) -> None:
    for config, checkpoint in cases:
        twin = Twin(Tiny, mesh_of(weight), checkpoint, **config)
        pair = (twin.plain, twin.ours)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in pair]
        for way in WAYS:
            what = f"{way.__name__} {weight} {config}"
            twin.backward()  # the first blocks, embedding and head are unsharded now
            for model in pair:
                way(model)
            evaluate(twin, f"after {what}")
            for model in pair:
                way(model)
            twin.check_parameters(what, 1e-9)
            evaluate(twin, f"between evaluations: {what}")
            twin.zero_grad()
            twin.backward()
            twin.check_gradients(what, 1e-9)
            for optimizer in optimizers:
                optimizer.step()
            twin.zero_grad()
        saved = [[p.data.clone() for p in m.parameters()] for m in pair]
        for copied in (True, False):  # averaged weights swapped in for an evaluation, and out again
            for model, values in zip(pair, saved, strict=True):
                for p, value in zip(model.parameters(), values, strict=True):
                    p.data.copy_(0.5 * value) if copied else p.data.copy_(value)
            evaluate(twin, f"swapped {config}")
        twin.check_parameters("swapped back")
        one_rank(twin, rank, weight)


@pytest.mark.unmeasured
@ranks(2)
def test_weights_written_between_a_forward_and_its_backward_are_an_error() -> None:
    for config, checkpoint in CASES:
        twin = Twin(Tiny, mesh_of(2), checkpoint, **config)
        for way in WAYS:
            if way is by_hand:  # there is no gradient yet
                continue
            _, mine = twin.batch()
            loss = twin.ours(*mine)
            way(twin.ours)
            raises(StaleWeightError, loss.backward, "rank", "forward")
            way(twin.plain)
            twin.backward()
            twin.check_gradients(f"after a refused backward: {way.__name__} {config}", 1e-9)
            twin.zero_grad()
    weight = twin.ours.get_parameter("head.weight")
    raises(StructureError, lambda: setattr(weight, "data", weight.data.float()), "head.weight")
    raises(LayoutError, lambda: setattr(weight, "data", weight.data[:2]), "head.weight", "shape")


@pytest.mark.thorough(1)
@pytest.mark.parametrize("mode", ["none", "full"])
@ranks(2)
def test_one_weight_alone_written_between_them_is_named(mode: Any) -> None:
    """It is gathered again, and nothing else has changed: only its version differs (WP-14)."""
    twin = Twin(Tiny, mesh_of(2), ActivationCheckpointConfig(mode=mode))
    loss = twin.ours(*twin.batch()[1])
    with torch.no_grad():
        twin.ours.get_parameter("layers.0.wo.weight").add_(1)
    raises(StaleWeightError, loss.backward, "layers.0.wo.weight changed on rank")


@ranks(2)
def test_contents_are_used_again_over_passes_only_where_nothing_writes_as_promised() -> None:
    for config in ({}, ROLLING, {"keep_unsharded": 2}):
        twin = Twin(Tiny, mesh_of(2), **config)  # type: ignore[arg-type]
        _, mine = twin.batch()

        def counted(twin: Twin = twin, mine: Any = mine) -> int:
            before = twin.communicator.state.collectives.counters.gathers
            twin.ours(*mine).backward()
            return twin.communicator.state.collectives.counters.gathers - before

        alone = counted(), counted()
        assert alone[0] == alone[1], "outside, every pass gathers alike"
        with twin.communicator.unchanged():
            assert counted() == alone[0], "nothing is taken over from before"
            with twin.communicator.unchanged():
                less = counted()
            assert less == counted() < alone[0], "inside, contents are used again"
            if config.get("keep_unsharded"):
                assert less <= alone[0] - 2 * 4, "two blocks of four weights stay"
        twin.zero_grad()
        for way in (through_data, whole_data, foreach, numpy_rows):
            with twin.communicator.unchanged():
                twin.ours(*mine).backward()
                way(twin.ours)
                gone = partial(twin.ours, *mine)
                raises(StaleWeightError, gone, "unchanged()", "rank")
            way(twin.plain)
            twin.ours.zero_grad()
            twin.backward()
            twin.check_gradients(f"after a broken promise: {way.__name__}", 1e-9)
            twin.zero_grad()


@pytest.mark.thorough(2)
@ranks(2)
def test_writes_after_a_zero_step_are_seen_too() -> None:
    """A ``ZeroOptimizer`` moves shards to other memory and gathers parameters late."""
    for weight in (1, 2):
        twin = Twin(Tiny, mesh_of(weight))
        plain = torch.optim.AdamW(twin.plain.parameters(), lr=0.01)
        ours = ZeroOptimizer(twin.communicator, torch.optim.AdamW, lr=0.01)
        for way in (through_data, given_data, whole_data, foreach_data, numpy_rows, as_vector):
            twin.backward()
            plain.step()
            ours.step()
            plain.zero_grad()
            for model in (twin.plain, twin.ours):
                if way is numpy_rows:
                    twin.communicator.wait_until_ready()
                way(model)
            evaluate(twin, f"{way.__name__} after a step")
            twin.check_parameters(way.__name__, 1e-8)


RANDOM: tuple[Callable[[Any], Any], ...] = (
    lambda p: p.add_(torch.randn_like(p)),
    lambda p: nn.init.normal_(p),
    lambda p: nn.init.trunc_normal_(p, std=0.1),
    lambda p: p.uniform_(-1, 1),
    lambda p: torch.bernoulli(p.detach().abs().clamp(max=1)),
)


@ranks(2)
def test_random_numbers_that_every_rank_would_draw_for_itself_are_refused() -> None:
    twin = Twin(Tiny, mesh_of(2))
    before = {name: p.full_tensor().clone() for name, p in twin.ours.named_parameters()}  # type: ignore[operator]
    for name, parameter in twin.ours.named_parameters():
        with torch.no_grad():
            for draw in RANDOM:
                told = (name, "full_params", "rank")
                raises(StructureError, lambda d=draw, p=parameter: d(p), *told)  # type: ignore[misc]
            assert torch.equal(parameter.full_tensor(), before[name])  # type: ignore[operator]
            nn.init.constant_(parameter, 0.5)  # the same on every rank


PARTS: tuple[Callable[[Any], Any], ...] = (
    lambda p: p[1].zero_(),
    lambda p: p.data[1].mul_(2),
    lambda p: nn.init.zeros_(p.narrow(0, 0, 2)),
)


@ranks(2)
def test_a_write_into_rows_which_torch_gathers_into_a_copy_is_refused() -> None:
    twin = Twin(Tiny, mesh_of(2))
    parameters: list[Any] = [model.layers[0].w1.weight for model in (twin.ours, twin.plain)]
    ours = parameters[0]
    with torch.no_grad():
        for write in PARTS:
            told = ("layers.0.w1.weight", "full_params", "rank")
            raises(StructureError, partial(write, ours), *told)
        for parameter in parameters:
            parameter[:, 1].zero_()  # of all ranks' rows
            parameter.detach().clone()[1].zero_()  # a copy of the program's own
    twin.check_parameters("columns are written", 1e-9)


NAME = "layers.0.w1.weight"
MASTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "by itself": ({}, False), "fused": ({}, True),
    "offloaded": ({"offload": ("optimizer",)}, False),
}  # fmt: skip


@pytest.mark.parametrize("form", MASTERS)
@ranks(2)
def test_masters_go_on_from_what_was_written_into_16_bit_weights(form: str, rank: int) -> None:
    settings, fused = MASTERS[form]
    model = little(torch.bfloat16)
    config = WeightParallelConfig(min_shard_elements=20, **settings)
    communicator = parallelize(model, mesh_of(2), config)
    zero = ZeroOptimizer(communicator, torch.optim.SGD, lr=1e-6, fused=fused)
    part = local(model.get_parameter(NAME)).data

    def step() -> Tensor:
        """This rank's masters of the weight, after a step that is below a 16-bit weight's ulp."""
        ids, labels = batch(0, 2)
        model(share(ids, rank), share(labels, rank)).backward()
        zero.step()
        zero.zero_grad()
        entry = zero.local_state_dict()["state"][NAME]
        return torch.cat([each.flatten() for each in entry["master"].parts.values()])

    before = step()
    assert (before != before.bfloat16()).any(), "masters have more bits"
    old = part.clone()
    part[0].fill_(0.5)
    zero.param_groups[0]["lr"] = 0.0
    after, written = step(), part.numel() // len(part)
    assert torch.equal(part, torch.cat([torch.full_like(part[:1], 0.5), old[1:]]))
    assert torch.equal(after[:written], torch.full_like(after[:written], 0.5))
    assert torch.equal(after[written:], before[written:]), "the other masters have kept their bits"


def kept_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What a program may keep of a model's weights, which torch's optimizers leave in place."""
    named = dict(model.named_parameters())
    with torch.no_grad():
        without_graph = {n: local(p) for n, p in named.items()}
    return {
        "state_dict()": dict(model.state_dict()), "data": {n: p.data for n, p in named.items()},
        "to_local()": {n: local(p) for n, p in named.items()}, "no_grad": without_graph,
    }  # fmt: skip


@pytest.mark.parametrize("weight", [1, 2])
@ranks(2)
def test_what_a_program_keeps_of_weights_has_the_new_values_when_a_step_returns(
    weight: int, rank: int, world_size: int
) -> None:
    mesh = mesh_of(weight=weight)
    twin = Twin(Tiny, mesh)
    before = kept_of(twin.ours)
    before["detach()"] = {n: local(p).detach() for n, p in twin.ours.named_parameters()}
    optimizer = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1)
    after = kept_of(twin.ours)
    for gathers in {b.publication for b in twin.communicator.state.between.values()}:
        if rank:  # late with its new values
            publish = gathers.all_gather_parameters
            gathers.all_gather_parameters = lambda *a, f=publish: time.sleep(0.02) or f(*a)
    for _ in range(2):
        twin.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = {
            (when, how): {name: local(value).detach().clone() for name, value in kept.items()}
            for when, everything in (("before", before), ("after", after))
            for how, kept in everything.items()
        }  # before the model's own are read, which waits for them
        for name, p in twin.ours.named_parameters():
            for what, values in found.items():
                assert torch.equal(values[name], local(p)), f"{name}, {what}, weight {weight}"
    del before, after
    twin.backward()
    optimizer.step()
    members = twin.communicator.replicated.all_parameters()
    assert weight == 2 or any(m.ready for m in members), "nothing is kept: no step waits"
