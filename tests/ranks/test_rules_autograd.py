"""WP-9: supported and unsupported uses of autograd; checkpointing by the user."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from internsp.errors import GradientError
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, Block, Tiny, Twin, raises
from tests.support.ranks import ranks


class FromFeatures(Tiny):
    """Takes features instead of ids: the first block's input may need no gradient."""

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.norm(self.blocks(features))).square().sum()


@ranks(2)
def test_weight_and_bias_of_a_plain_layer_are_views_of_one_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear, nodes = nn.functional.linear, []

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None and x.requires_grad:
            nodes.append((weight.grad_fn, bias.grad_fn))
        return linear(x, weight, bias)

    twin = Twin(partial(Tiny, layers=2), mesh_of(2), min_shard_elements=1)
    monkeypatch.setattr(nn.functional, "linear", noted)
    twin.ours(*twin.batch()[1])
    assert len(nodes) == 6
    assert all(one is other is not None for one, other in nodes)


@ranks(2)
def test_what_autograd_cannot_do_is_an_error_everywhere_and_the_next_step_is_right(
    rank: int, world_size: int
) -> None:
    two = mesh_of(2)
    for mesh, together in ((two, {}), (two, ALL), (two, ROLLING), (mesh_of(1), {})):
        twin = Twin(Tiny, mesh, **together)  # type: ignore[arg-type]
        ours = twin.ours

        def forward(twin: Twin = twin) -> Tensor:
            return twin.ours(*twin.batch()[1])

        def next_step(what: str, twin: Twin = twin) -> None:
            twin.zero_grad()
            twin.backward()
            twin.check_gradients(what)
            twin.zero_grad()

        for name in ("layers.1.q.weight", "layers.3.norm.weight", "embed.weight"):
            parameter = ours.get_parameter(name)
            loss = forward()
            raises(GradientError, partial(torch.autograd.grad, loss, [parameter]), "autograd.grad")
            next_step(f"after autograd.grad of {name}")
        loss = forward()
        raises(GradientError, partial(loss.backward, create_graph=True), "create_graph")
        next_step("after create_graph")
        everybody, mine = twin.batch()
        names = ("layers.1.w1.weight", "layers.1.norm.bias", "head.weight")
        for model, batch in ((twin.plain, everybody), (ours, mine)):
            model(*batch).backward(inputs=[model.get_parameter(n) for n in names])
        twin.check_gradients("backward(inputs=...)")
        next_step("after backward(inputs=...)")
        # autograd.grad of an input is right, and leaves no weight's gradient behind.
        features = Twin(FromFeatures, mesh)
        x = torch.randn(2 * world_size, 3, 6, dtype=torch.float64, requires_grad=True)
        mine_x = x.detach()[2 * rank : 2 * rank + 2].requires_grad_(True)
        (wanted,) = torch.autograd.grad(features.plain(x), [x])
        (found,) = torch.autograd.grad(features.ours(mine_x), [mine_x])
        close(found, wanted[2 * rank : 2 * rank + 2], "gradient of the input")
        features.check_gradients("none after autograd.grad of an input")
        for wants in (False, True):
            features.plain(x.detach().requires_grad_(wants)).backward()
            features.ours(mine_x.detach().requires_grad_(wants)).backward()
            features.check_gradients(f"inputs that need a gradient: {wants}")
            features.zero_grad()


class Wrapped(Tiny):
    """Checkpoints segments of ``span`` blocks with torch's function, around the blocks' calls."""

    span, reentrant, early = 1, False, True

    def blocks(self, x: Tensor) -> Tensor:
        def segment(first: int, x: Tensor) -> Tensor:
            for layer in self.layers[first : first + self.span]:
                x = layer(x)
            return x

        for first in range(0, len(self.layers), self.span):
            run = partial(segment, first)
            with set_checkpoint_early_stop(self.early):
                x = checkpoint(run, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return x


class Inside(Block):
    """Checkpoints half of the block, and one linear layer separately."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda t: self.wo(torch.tanh(self.q(self.norm(t)))), x, use_reentrant=self.reentrant)  # fmt: skip  # noqa: E501
        x = x + h  # type: ignore[operator]
        h = torch.nn.functional.gelu(checkpoint(self.w1, x, use_reentrant=self.reentrant))  # type: ignore[arg-type]
        return x + self.w2(h)


class InsideReentrant(Inside):
    reentrant = True


@pytest.mark.thorough(9)
@pytest.mark.unmeasured
@ranks(2)
def test_checkpointing_written_by_the_user_around_and_inside_blocks_is_right() -> None:
    mesh = mesh_of(2)
    many = ALL | {"prefetch_depth": 2, "memory_pool": False}
    ways = ((False, True), (False, False), (True, True))
    for number, config in enumerate(({}, {"granularity": "module"}, many, ROLLING)):
        for span in (1, 2, 3) if not config else (1 + number % 3,):
            # All ways for the first; for the others one each, so that all pairs occur.
            for reentrant, early in ways if not config else (ways[(number + span) % 3],):
                twin = Twin(partial(Wrapped, layers=6), mesh, **config)  # type: ignore[arg-type]
                for model in (twin.plain, twin.ours):
                    model.span, model.reentrant, model.early = span, reentrant, early
                for _ in range(2):
                    twin.backward()
                    twin.check_gradients(f"{config}, segments of {span}, {reentrant=} {early=}")
                assert twin.communicator.recovery.failures == 0
        for block in (Inside, InsideReentrant):
            twin = Twin(partial(Tiny, block), mesh, **config)  # type: ignore[arg-type]
            twin.backward()
            twin.check_gradients(f"{config}, checkpoint in {block.__name__}")
            # A recompute that stops early leaves forward by an exception, which is not a failure.
            assert twin.communicator.recovery.failures == 0


class Kept(torch.autograd.Function):
    """Runs a block in a graph of its own, and that graph's backward in its backward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Any:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = block(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.y.backward(gradient)
        return None, ctx.x.grad


class OfKept(Tiny):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = Kept.apply(layer, x)
        return self.layers[3](x)


class Equilibrium(Tiny):
    """Its first block's gradient is that of a fixed point, found in a hook."""

    def blocks(self, x: Tensor) -> Tensor:
        z = self.layers[0](x)
        start = z.detach().requires_grad_()
        end = 0.1 * self.layers[0](start)

        def solved(gradient: Tensor) -> Tensor:
            total = gradient
            for _ in range(2):
                (found,) = torch.autograd.grad(end, start, total, retain_graph=True)
                total = gradient + found
            return total

        z.register_hook(solved)
        for layer in self.layers[1:]:
            z = layer(z)
        return z


@ranks(2)
def test_a_backward_within_a_backward_keeps_every_gradient() -> None:
    """That of a function or a hook, through a graph of the forward."""
    mesh = mesh_of(2)
    for twin in (
        Twin(OfKept, mesh), Twin(OfKept, mesh, **ALL),
        Twin(Equilibrium, mesh, unexpected_order="gather", **ALL),
    ):  # fmt: skip
        for step in range(2):
            twin.backward()
            twin.backward()
            twin.check_gradients(f"step {step}")
            twin.zero_grad()


class Custom:
    """An output type that hooks cannot search for tensors."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Opaque(Tiny):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        return Custom(super().forward(ids, labels))


class Severed(Tiny):
    """No gradient reaches the blocks."""

    def blocks(self, x: Tensor) -> Tensor:
        return super().blocks(x).detach()


@pytest.mark.thorough(1)
@ranks(2)
def test_a_head_is_trained_where_no_gradient_comes_to_the_blocks() -> None:
    mesh = mesh_of(2)

    def frozen() -> nn.Module:
        model = Tiny()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("head", "norm")))
        return model

    for unexpected in ("error", "gather"):
        for make in (frozen, Severed):
            twin = Twin(make, mesh, unexpected_order=unexpected)
            for _ in range(2):
                twin.backward()
                twin.check_gradients(f"{make.__name__}, {unexpected}")
                twin.zero_grad()


@pytest.mark.thorough(1)
@ranks(2)
def test_backward_ends_with_complete_gradients_where_no_output_could_be_hooked() -> None:
    mesh = mesh_of(2)
    for trained in ("", "head", "norm", "embed"):

        def make(trained: str = trained) -> nn.Module:
            model = Opaque()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith(trained))
            return model

        twin = Twin(make, mesh)
        for _ in range(2):
            everybody, mine = twin.batch()
            twin.plain(*everybody).loss.backward()
            twin.ours(*mine).loss.backward()
            twin.check_gradients(f"trained: {trained or 'all'}")
