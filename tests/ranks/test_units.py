"""Units below blocks: gradients and steps are one process's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import ConfigError, OrderError
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from internsp.parallel.parallelize import parallelize
from internsp.schedule.simulate import simulate
from internsp.values.whole import full_params, iterate_full_params
from tests.support.compare import check, parameters
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")
HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
EACH = {"match": ["layers.*.attention", "layers.*.feed"], "unit": "each"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.wo = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(torch.tanh(self.q(x)))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(6, 13), nn.Linear(13, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Layer(nn.Module):
    """Attention, feed-forward, and other parameters used before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.feed, self.norm, self.attention = Feed(), nn.LayerNorm(6), Attention()
        self.gate, self.last = nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x) @ self.scale)
        x = x + torch.sigmoid(self.gate(x))
        x = x + self.feed(x)
        return x + self.last(x)[..., 1:] * torch.sigmoid(self.gate(x))


class Checkpointed(Tiny):
    """As in transformers: the user's checkpoint wraps each layer."""

    reentrant = False

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch_checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


LAYERS = partial(Tiny, Layer, layers=3)


def trained(twin: Twin, steps: int = 3, zero: bool = False) -> None:
    """Some steps of both models, with an evaluation after each backward."""
    optimizers: list[Any] = [torch.optim.SGD(twin.plain.parameters(), lr=0.05)]
    if zero:
        optimizers.append(ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.05))
    else:
        optimizers.append(torch.optim.SGD(twin.ours.parameters(), lr=0.05))
    for step in range(steps):
        twin.backward()
        with torch.no_grad():
            everybody, mine = twin.batch()
            rows = slice(twin.mesh.rank * 2, twin.mesh.rank * 2 + 2)
            wanted = twin.plain(everybody[0])[rows]
            torch.testing.assert_close(twin.ours(mine[0]), wanted, rtol=1e-9, atol=1e-11)
        if zero:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            twin.check_parameters(f"step {step}")
        else:
            twin.check_step(optimizers, f"step {step}")


APART: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({"prefetch_depth": 0}, FULL),
    ({"overlap": False, "keep_unsharded": 2}, HALF),
    ({"prefetch_depth": 2, "memory_pool": False}, REENTRANT),
    ({"granularity": "module"}, HALF),
    ({"gather_before": "rolling"}, None),
    ({"coalesce_bytes": 65536}, FULL),
]


@pytest.mark.thorough(4)
@pytest.mark.unmeasured
@few("cases", APART, 3)
@ranks(2)
def test_attention_and_feed_forward_apart_train_as_on_one_process(cases: list[Any]) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for options, checkpoint in cases:
        twin = Twin(LAYERS, mesh, checkpoint, rules=[EACH], **options)
        plan = twin.communicator.plan
        assert plan is not None
        assert [unit.name for unit in plan.blocks] == [
            f"layers.{i}.{part}" for i in range(3) for part in ("attention", "feed")
        ]
        own = {w.name for unit in plan.blocks[:2] for w in unit.weights}
        assert own == {f"layers.0.{n}.weight" for n in
                       ("attention.q", "attention.wo", "feed.w1", "feed.w2")}  # fmt: skip
        rest = {w.name for w in plan.enclosing[1].rest.weights}
        assert rest == {"layers.1.gate.weight", "layers.1.last.weight", "layers.1.scale"}
        trained(twin)
        assert twin.communicator.state.pool.slot_nbytes == sum(plan.slots())


@ranks(2)
def test_the_plan_of_units_is_what_runs() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for options, checkpoint in (({}, None), ({}, FULL), ({"prefetch_depth": 0}, FULL)):
        twin = Twin(LAYERS, mesh, checkpoint, rules=[EACH], **options)
        assert twin.communicator.plan is not None
        wanted = simulate(twin.communicator.plan, 1)
        for step in range(3):
            twin.trace.clear()
            twin.backward()
            if step:
                found = twin.lines("AG", "RS")
                assert found == wanted.lines(("AG", "RS")), f"{options} step {step}"
            twin.zero_grad()


@pytest.mark.thorough(4)
@ranks(2)
def test_a_users_checkpoint_around_several_units_is_right() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for kind in (Checkpointed, Reentrant):
        for depth in (0, 1):
            twin = Twin(partial(kind, Layer, layers=3), mesh, rules=[EACH], prefetch_depth=depth)
            trained(twin)


@pytest.mark.thorough(5)
@ranks(4)
def test_replicas_exchange_what_units_and_rests_have_summed() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for checkpoint, zero in ((FULL, True), (HALF, False)):
        trained(Twin(LAYERS, mesh, checkpoint, rules=[EACH]), zero=zero)


class Tied(Tiny):
    """Weights shared by two layers' units, by a unit and its rest, and by embedding and head."""

    def __init__(self) -> None:
        super().__init__(Layer, layers=3, tied=True)
        self.layers[0].feed.w1.weight = self.layers[2].feed.w1.weight
        self.layers[1].gate.weight = self.layers[1].attention.q.weight
        self.layers[0].last.weight = self.layers[2].last.weight


class Unused(Tiny):
    """On one rank one of the layers gets no gradient."""

    skips = 0

    def blocks(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.skips % 3 and self.skips:
                with torch.no_grad():
                    layer(x)
                continue
            x = layer(x)
        return x


@ranks(2)
def test_shared_frozen_and_unused_weights_of_units_are_right(rank: int) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    trained(Twin(Tied, mesh, rules=[EACH]))
    trained(Twin(Tied, mesh, FULL, rules=[EACH], prefetch_depth=0))
    for checkpoint in (None, FULL):
        twin = Twin(LAYERS, mesh, checkpoint, rules=[EACH])
        for model in (twin.plain, twin.ours):
            model.embed.requires_grad_(False)
            for frozen in (model.layers[0].feed, model.layers[1].attention, model.layers[1].gate):
                frozen.requires_grad_(False)
        trained(twin)
        for model in (twin.plain, twin.ours):
            model.layers[0].requires_grad_(False)
            model.layers[1].attention.requires_grad_(True)
        trained(twin, steps=2)


@pytest.mark.thorough(4)
@ranks(2)
def test_ranks_whose_data_skip_a_layer_take_its_place(rank: int) -> None:
    """Also in a recompute: what the recompute of other ranks gathers is gathered here."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    three = {"match": ["layers.*.attention", "layers.*.feed.w?"], "unit": "each"}
    for rule in (EACH, three):  # as many units as slots, and more
        for checkpoint in (None, FULL, REENTRANT):
            twin = Twin(partial(Unused, Layer, layers=3), mesh, checkpoint, rules=[rule])
            for layer in (1, 2, 3):  # of one rank: 3 is the first
                everybody, mine = twin.batch()
                twin.ours.skips = layer * rank  # type: ignore[assignment]
                twin.ours(*mine).backward()
                for other, rows in enumerate((slice(0, 2), slice(2, 4))):
                    twin.plain.skips = layer * other  # type: ignore[assignment]
                    twin.plain(everybody[0][rows], everybody[1][rows]).backward()
                twin.check_gradients(f"{rule} {checkpoint} without layer {layer % 3}")
                twin.zero_grad()


@pytest.mark.thorough(4)
@ranks(2)
def test_losses_of_two_forwards_micro_batches_and_failures_leave_units_right() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for checkpoint in (None, HALF):
        twin = Twin(LAYERS, mesh, checkpoint, rules=[EACH])
        for _ in range(2):
            (all1, my1), (all2, my2) = twin.batch(), twin.batch()
            (twin.plain(*all1) + twin.plain(*all2)).backward()
            (twin.ours(*my1) + twin.ours(*my2)).backward()
            twin.check_gradients("two forwards")
            twin.zero_grad()
        for _ in range(2):
            twin.backward()
        twin.check_gradients("two micro-batches")
        twin.zero_grad()
        with twin.communicator.no_sync():
            twin.backward()
        twin.backward()
        twin.check_gradients("no_sync")
        twin.zero_grad()

        def fail(*_: Any) -> None:
            raise ValueError("on purpose")

        handle = twin.ours.layers[1].feed.register_forward_hook(fail)  # type: ignore[union-attr]
        raises(ValueError, partial(twin.ours, *twin.batch()[1]), "on purpose")
        handle.remove()
        tensor = twin.ours(*twin.batch()[1])
        handle = twin.ours.layers[1].gate.weight.register_hook(fail)  # type: ignore[union-attr]
        handle.remove()
        tensor.backward()
        twin.zero_grad()
        twin.communicator.prefetch_all()
        twin.backward()
        twin.check_gradients("prefetched")
        twin.zero_grad()
        twin.communicator.unshard(twin.ours.layers[0].gate)  # type: ignore[index]
        twin.backward()
        twin.communicator.reshard(twin.ours.layers[1])  # type: ignore[index]
        twin.check_gradients("unsharded before")


class Twice(Tiny):
    """Its layers run twice."""

    def blocks(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


class Elsewhere(Tiny):
    """A layer's unit runs within another one; the last layer's other weights before all layers."""

    def blocks(self, x: Tensor) -> Tensor:
        x = x + self.layers[2].gate(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Borrowing(Layer):
    lender: tuple[Layer, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for layer in self.lender:
            x = x + layer.feed(x)
        return x


def _borrowing() -> Elsewhere:
    model = Elsewhere(Borrowing, layers=3)
    model.layers[2].lender = (model.layers[0],)
    return model


@ranks(2)
def test_gradients_that_come_to_a_block_after_its_rest_was_reduced_are_kept() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for make in (partial(Twice, Layer, layers=3), _borrowing):
        for checkpoint, zero in ((None, True), (FULL, False)):
            trained(
                Twin(make, mesh, checkpoint, rules=[EACH], unexpected_order="gather"), zero=zero
            )


class Towers(nn.Module):
    """Blocks of a vision tower and of a decoder, and a batch without a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Tiny(Layer, layers=2)
        self.vision = nn.Module()
        self.vision.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.vision.into = nn.Linear(6, 6)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.decoder.embed(ids)
        y = self.vision.into(x)
        for block in self.vision.blocks:
            y = block(y)
        logits = self.decoder.head(self.decoder.norm(self.decoder.blocks(x + y)))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@ranks(2)
def test_an_order_cannot_be_learned_of_blocks_that_hold_units_and_the_model_stays_as_it_was() -> (
    None
):
    mesh = mesh_of(2)
    model = LAYERS().double()
    before = dict(model.named_parameters())
    config = WeightParallelConfig(
        min_shard_elements=8, rules=[EACH], unexpected_order="learn"
    )
    with pytest.raises(ConfigError, match=r"but a rule of the plan .* layers\.0: leave"):
        parallelize(model, mesh, config)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    parallelize(model, mesh, config.model_copy(update={"unexpected_order": "error"}))


@ranks(2)
def test_two_lists_of_blocks_have_one_order() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    blocks = ("vision.blocks.*", "decoder.layers.*")
    inner = {"match": ["vision.blocks.*.attention", "vision.blocks.*.feed"], "unit": "each"}
    for plan, checkpoint in (([], None), ([inner], HALF), ([inner], None)):
        twin = Twin(Towers, mesh, checkpoint, rules=plan, blocks=blocks)
        names = [unit.name for unit in twin.communicator.blocks]
        assert names[-2:] == ["decoder.layers.0", "decoder.layers.1"]
        assert len(names) == (6 if plan else 4)
        trained(twin)
    twin = Twin(Towers, mesh)  # as registered: the decoder's first
    raises(OrderError, partial(twin.ours, *twin.batch()[1]), "vision.blocks.0", "decoder.layers.0")


@ranks(2)
def test_whole_parameters_and_state_of_units_are_those_of_one_process() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Twin(LAYERS, mesh, rules=[EACH])
    twin.backward()
    with full_params(twin.ours):
        check(parameters(twin.ours), parameters(twin.plain), "whole")
    streamed: dict[str, Tensor] = {}
    units = [name for name, whole in iterate_full_params(twin.ours) if not streamed.update(whole)]
    assert {"layers.0.attention", "layers.0.feed", "layers.0"} <= set(units)
    check(streamed, parameters(twin.plain), "streamed")
    state = {n: v.full_tensor() for n, v in twin.ours.state_dict().items()}
    check(state, twin.plain.state_dict(), "state")
