"""WP-3, WP-11, WP-14: a slot's contents are reused if they are right, and only then."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.config import ActivationCheckpointConfig
from internsp.errors import StaleWeightError, StructureError
from tests.support.compare import close
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, SOME, Block, Tiny, Twin, raises
from tests.support.ranks import ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
FULL = ActivationCheckpointConfig(mode="full")


class Middle(Tiny):
    """Returns the loss and an auxiliary loss from the middle, and keeps a tensor of a block."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                auxiliary = self.kept = x
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")  # type: ignore[union-attr]
        return {"loss": loss, "more": [auxiliary.square().sum(), {"last": x}]}


class Leaking(Block):
    """Keeps a tensor from inside the block, as routers keep their logits."""

    def forward(self, x: Tensor) -> Tensor:
        self.inside = self.q(x)
        return super().forward(x)


MIDDLE: tuple[tuple[dict[str, Any], Any], ...] = (
    ({}, None), ({}, FULL), ({"granularity": "module"}, HALF), ({"prefetch_depth": 2}, None),
    (ALL, None), ({"prefetch_depth": 0, "granularity": "module"}, HALF),
    ({"prefetch_depth": 0, "gather_before": "rolling"}, None), ({"prefetch_depth": 0}, None),
    (ROLLING | {"memory_pool": False}, HALF), (SOME, FULL), (ROLLING, None),
    ({"memory_pool": False}, ActivationCheckpointConfig(mode="full", reentrant=True)),
)  # fmt: skip


@pytest.mark.unmeasured
@few("cases", MIDDLE, 3)
@ranks(2)
def test_a_loss_from_the_middle_of_the_model_is_right_in_every_way_of_taking_it(
    cases: list[Any],
) -> None:
    mesh = mesh_of(2)
    for config, checkpoint in cases:
        twin = Twin(partial(Middle, layers=5), mesh, checkpoint, **config)
        pairs = ((twin.plain, 0), (twin.ours, 1))
        for way in ("sum", "only", "apart", "kept", "twice", "after"):
            batch = twin.batch()
            for model, which in pairs:
                out = model(*batch[which])
                loss, extra = out["loss"], out["more"][0]
                if way == "sum":
                    (loss + extra).backward()
                elif way == "only":
                    extra.backward()
                elif way == "apart":
                    extra.backward(retain_graph=True)
                    loss.backward()
                elif way == "kept":
                    (loss + model.kept.exp().sum()).backward()
                elif way == "twice":
                    loss.backward(retain_graph=True)
                    (2 * loss).backward()
                else:
                    (out["more"][1]["last"].sum() + extra).backward()
            twin.check_gradients(f"{config} {way}")
            twin.zero_grad()
    for together in ({}, ALL, ROLLING):
        leaking = Twin(partial(Tiny, Leaking), mesh, **together)  # type: ignore[arg-type]
        everybody, mine = leaking.batch()
        for model, ids in ((leaking.plain, everybody), (leaking.ours, mine)):
            loss = model(*ids)
            kept = [layer.inside.square().sum() for layer in model.layers]  # type: ignore[union-attr]
            (loss + sum(kept)).backward()
        leaking.check_gradients("tensors kept inside blocks")
        leaking.zero_grad()
        leaking.plain(*everybody)
        leaking.ours(*mine)
        inside = leaking.ours.layers[1].inside.square().sum()  # type: ignore[union-attr]
        if together is ALL:  # the block's weights are guarded at its output alone
            raises(StaleWeightError, inside.backward, "layers.1", "another way")
            continue
        leaking.plain.layers[1].inside.square().sum().backward()  # type: ignore[union-attr]
        inside.backward()
        leaking.check_gradients("a tensor kept inside a block alone")


CASES: tuple[tuple[dict[str, Any], Any], ...] = (
    ({"granularity": "module"}, HALF), ({}, None), (ALL | {"overlap": False}, FULL),
    ({"keep_unsharded": 2}, None), (ROLLING, HALF), (ALL | {"keep_unsharded": 4}, HALF),
    (ROLLING | {"keep_unsharded": 1}, None),
)  # fmt: skip


@pytest.mark.slow(8)
@few("cases", CASES, 2)
@ranks(2)
def test_nothing_that_happens_between_two_steps_leaves_a_stale_weight(  # noqa: PLR0915
    cases: list[Any],
) -> None:
    """Everything that may happen between two steps, or between forward and backward."""
    mesh = mesh_of(2)
    for config, checkpoint in cases:
        twin = Twin(Tiny, mesh, checkpoint, **config)
        pair = (twin.plain, twin.ours)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in pair]

        def step(what: str, twin: Twin = twin, optimizers: Any = optimizers) -> None:
            twin.backward()
            twin.check_step(optimizers, what)

        def warm(twin: Twin = twin) -> None:
            """After a backward the first blocks, embedding and head are unsharded and current."""
            twin.backward()
            twin.zero_grad()

        step("first")
        everybody, mine = twin.batch()
        losses = [m(*b) for m, b in zip(pair, (everybody, mine), strict=True)]
        with torch.no_grad():  # between forward and backward
            close(twin.ours(*everybody), twin.plain(*everybody), "evaluation", 1e-9)
        for loss in losses:
            loss.backward()
        twin.check_gradients("a forward under no_grad in between")
        twin.zero_grad()
        two = [twin.batch(), twin.batch(rows=1)]
        losses = [(twin.plain(*e), twin.ours(*m)) for e, m in two]
        for plain, ours in losses:  # first in, first out
            plain.backward()
            ours.backward()
        twin.check_gradients("two forwards before two backwards")
        step("two forwards and a step")
        saved = {k: v.clone() for k, v in twin.ours.state_dict().items()}
        plain_saved = {k: v.clone() for k, v in twin.plain.state_dict().items()}
        step("to be undone")
        warm()
        twin.ours.load_state_dict(saved)
        twin.plain.load_state_dict(plain_saved)
        twin.check_parameters("loaded")
        step("after load_state_dict")
        warm()
        for model, state in ((twin.ours, saved), (twin.plain, plain_saved)):
            copied = {k: v.clone() for k, v in state.items()}
            model.load_state_dict(copied, assign=True)
        # One process has new parameters now; ours are the same objects with new values.
        optimizers[:] = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in pair]
        twin.check_parameters("assigned")
        step("after load_state_dict(assign=True)")
        warm()
        for model, state in ((twin.ours, saved), (twin.plain, plain_saved)):
            block = {k[9:]: v.clone() for k, v in state.items() if k.startswith("layers.1.")}
            model.layers[1].load_state_dict(block, assign=model is twin.ours)
        step("after a block's load_state_dict")
        warm()
        twin.ours.load_state_dict(plain_saved, assign=True)  # whole tensors of one process
        twin.plain.load_state_dict(plain_saved)
        step("after whole tensors were assigned")
        warm()
        for model in pair:
            for parameter in model.parameters():
                parameter.data.mul_(1.5)
        step("after .data was written")
        warm()
        with torch.no_grad():
            for parameter in (*twin.plain.parameters(), *twin.ours.parameters()):
                parameter.mul_(0.5)
        step("after an edit under no_grad")


@ranks(2)
def test_a_weight_changed_between_forward_and_backward_is_an_error() -> None:
    mesh, alone = mesh_of(2), mesh_of(1)
    for where, checkpoint in ((mesh, None), (mesh, FULL), (alone, None)):
        twin = Twin(Tiny, where, checkpoint)

        def write(name: str, twin: Twin = twin) -> None:
            with torch.no_grad():
                twin.ours.get_parameter(name).mul_(1.5)

        def optimize(name: str, twin: Twin = twin) -> None:
            parameter = twin.ours.get_parameter(name)
            parameter.grad = torch.ones_like(parameter)
            torch.optim.AdamW([parameter], foreach=True).step()
            parameter.grad = None

        for change in (write, optimize):
            for name in ("layers.1.w1.weight", "head.weight", "layers.2.norm.weight"):
                loss = twin.ours(*twin.batch()[1])
                change(name)
                raises(StaleWeightError, loss.backward, name, "rank")
                twin.ours.zero_grad()
                # Back to the values of one process; the next step is right.
                twin.ours.load_state_dict(twin.plain.state_dict(), assign=True)
                twin.backward()
                twin.check_gradients(f"after a stale {name}")
                twin.zero_grad()


@pytest.mark.thorough(1)
@ranks(2)
def test_weights_that_are_still_in_a_slot_are_not_gathered_again() -> None:
    """A first step gathers 3L - 2 blocks, less those that are still in their slots."""
    mesh = mesh_of(2)
    for layers in (2, 3, 5):
        twin = Twin(partial(Tiny, layers=layers), mesh)
        optimizer = torch.optim.SGD(twin.ours.parameters(), lr=0.1)

        def gathers(twin: Twin = twin) -> int:
            lines = [line for line in twin.lines("AG") if ".w1." in line]
            return len(lines)

        def forward(twin: Twin = twin) -> Tensor:
            return twin.ours(*twin.batch()[1])

        for step in range(2):
            with twin.communicator.unchanged():
                forward().backward()
                # L in forward; the last two are still in their slots when backward begins.
                assert gathers() == layers + (layers - 2), f"{layers} blocks, step {step}"
                forward().backward()  # nothing writes in between: the first two are, too
                assert gathers() == 2 * (layers - 2), f"{layers} blocks, second micro-batch"
            forward().backward()  # a program may have written in between
            assert gathers() == layers + (layers - 2), f"{layers} blocks, third micro-batch"
            optimizer.step()
        with twin.communicator.unchanged():
            forward()
            assert gathers() == layers
            with torch.no_grad():
                forward()  # of three blocks the second is still there when its turn comes
            assert gathers() == {2: 0, 3: 2, 5: 5}[layers], "an evaluation"


@pytest.mark.thorough(2)
@ranks(2)
def test_blocks_called_without_their_model_are_fresh(world_size: int) -> None:
    """Blocks called one by one, as an early exit or a probe does."""
    mesh = mesh_of(2)
    for config in ({}, ALL, {"granularity": "module"}, ROLLING):
        twin = Twin(Tiny, mesh, unexpected_order="gather", **config)  # type: ignore[arg-type]
        x = torch.randn(2, 3, 6, dtype=torch.float64)
        for _ in range(2):
            for index in (0, 1, 2, 3, 0, 2):
                with torch.no_grad():
                    for model in (twin.plain, twin.ours):
                        for parameter in model.parameters():
                            parameter.mul_(0.9)
                    found, wanted = (m.layers[index](x) for m in (twin.ours, twin.plain))  # type: ignore[index, operator]
                close(found, wanted, f"{config} block {index}")
        for model, scale in ((twin.plain, world_size), (twin.ours, 1)):
            (model.layers[1](model.layers[0](x)).sum() * scale).backward()  # type: ignore[index, operator]
        twin.check_gradients("blocks without their model")
    strict = Twin(Tiny, mesh)
    for _ in range(2):
        y, z = x, x
        for a, b in zip(strict.plain.layers, strict.ours.layers, strict=True):  # type: ignore[call-overload]
            y, z = a(y), b(z)
        close(z, y, "all blocks without their model")


class Second(nn.Module):
    """Two outputs, of which the loss may use the second only."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(width, width) / 3)
        self.b = nn.Parameter(torch.randn(width, width) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x @ self.a), torch.tanh(x @ self.b.T @ self.a)


class UsesSecond(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.two = Second(width)
        self.wo = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wo(self.two(x)[1])


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(Second):
    def forward(self, x: Tensor) -> Any:
        return Opaque(x @ self.a)


class HidingBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(getattr(x, "value", x)))


class Unwrapping(Tiny):
    def blocks(self, x: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.value


class HidesParts(UsesSecond):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.wo(self.two(x).value)


@ranks(2)
def test_every_output_guards_its_weights_and_unseen_ones_are_refused() -> None:
    mesh = mesh_of(2)
    for _ in range(2):
        twin = Twin(partial(Tiny, UsesSecond), mesh)
        twin.backward()
        twin.check_gradients("only the second output is used")

    class Hides(HidesParts):
        def __init__(self) -> None:
            super().__init__()
            self.two = Hiding()

    for block, model in ((Hides, Tiny), (HidingBlock, Unwrapping)):
        hiding = Twin(partial(model, block), mesh)
        batch = hiding.batch()[1]
        raises(StructureError, partial(hiding.ours, *batch), "Opaque", "layers.0")
    ids = torch.zeros(1, 2, dtype=torch.int64)
    for name, together in (("head", {}), ("layers.1.wo", {}), ("layers.1.wo", ALL)):
        replaced = Twin(Tiny, mesh, **together).ours  # type: ignore[arg-type]
        module = replaced.get_submodule(name)
        module.weight = nn.Parameter(torch.zeros(module.weight.shape, dtype=torch.float64))  # type: ignore[union-attr, arg-type]
        raises(StructureError, partial(replaced, ids, ids), "weight", "load_state_dict")
    cast = Twin(Tiny, mesh).ours
    raises(StructureError, lambda: copy.deepcopy(cast), "state_dict")
    raises(StructureError, cast.float, "moved or cast", "before")
    for parameter in cast.parameters():  # the same by hand
        local = parameter._local_tensor  # type: ignore[attr-defined]
        parameter._local_tensor = local.float()  # type: ignore[attr-defined]
    raises(StructureError, lambda: cast(ids, ids), "float64 to torch.float32", "before")
