"""What cannot be right is refused with an error, for any size of the weights, without damage.

After each refusal the next step is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from internsp.config import ActivationCheckpointConfig
from internsp.errors import GradientError, StaleWeightError, StructureError
from internsp.mesh import ParallelMesh
from tests.support import reads
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.models import ALL, Block, Tiny, Twin, raises
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
SMALL = {"min_shard_elements": 10**6}


def sizes() -> list[tuple[ParallelMesh, dict[str, Any]]]:
    """Large weights, coalesced weights, replicated parameters, and a group of one rank."""
    two, one = mesh_of(2), mesh_of(1)
    return [(two, {}), (two, ALL), (two, SMALL), (one, {})]


def still_right(twin: Twin, what: str) -> None:
    twin.zero_grad()
    twin.backward()
    twin.check_gradients(f"after {what}")
    twin.zero_grad()


class Features(Tiny):
    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.norm(self.blocks(features))).square().sum()


@ranks(2)
def test_a_gradient_penalty_is_refused_before_any_node_of_it_runs(world_size: int) -> None:
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    for mesh, config in sizes():
        for checkpoint in (None, FULL):
            twin = Twin(partial(Features, layers=2), mesh, checkpoint, **config)
            what = f"{config}, {checkpoint}, weight {mesh.shape.weight}"

            def penalty(twin: Twin = twin) -> None:
                (slope,) = torch.autograd.grad(twin.ours(x), x, create_graph=True)
                slope.pow(2).sum().backward()

            raises(GradientError, penalty, "create_graph", "without create_graph is right")
            (wanted,) = torch.autograd.grad(twin.plain(x), x)
            (found,) = torch.autograd.grad(twin.ours(x), x)
            close(found, wanted, f"{what}: gradient of the input")
            for model, features in (
                (twin.plain, torch.cat([x.detach()] * world_size)), (twin.ours, x.detach())
            ):  # fmt: skip
                model(features).backward()
            twin.check_gradients(f"{what}, after a refused penalty")


class Clamping(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.q.weight.clamp_(-1, 1)
        return super().forward(x)


class Bounded(nn.Module):
    """A user-defined embedding lookup, which clamps its indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 6))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table, max_norm=0.5)


class BoundedModel(Tiny):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bounded = Bounded()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(ids, labels) + self.bounded(ids).sum()


class Mapped(Tiny):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.vmap(layer)(x)
        return x


class Smuggling(Block):
    """Passes a tensor outside its output: nothing keeps what it read of its child's weight."""

    stash: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        type(self).stash = [F.linear(x, self.w1.weight).square().tanh()]
        return super().forward(x).detach().requires_grad_()


class Smuggled(Tiny):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        super().forward(ids, labels)
        return Smuggling.stash[0].sum()


def replaced(make: Callable[..., Twin], checkpoint: Any) -> None:
    """Parameters that replace ours are recognized by identity; unsharded plain tensors are used."""
    twin = make(partial(Tiny, layers=2))
    _, mine = twin.batch()
    call, named = torch.func.functional_call, dict(twin.ours.named_parameters())
    name = "layers.1.q.weight"
    for wrong in (named[name].detach(), nn.Parameter(torch.randn(6, 6, dtype=torch.float64))):
        raises(StructureError, partial(call, twin.ours, {name: wrong}, mine), name, "replaced")
        still_right(twin, "a replaced weight")
    whole = {n: (p.full_tensor().detach() * 2).requires_grad_() for n, p in named.items()}
    if checkpoint is None:
        plain = {n: p.detach().clone().requires_grad_() for n, p in whole.items()}
        loss, wanted = call(twin.ours, whole, mine), call(twin.plain, plain, mine)
        loss.backward()
        wanted.backward()
        close(loss, wanted, "loss of other weights")
        for n, p in whole.items():
            assert p.grad is not None, n
            close(p.grad, plain[n].grad, f"gradient of another {n}")  # type: ignore[arg-type]
        assert all(p.grad is None for p in twin.ours.parameters())
    else:
        other = partial(call, twin.ours, whole, mine)
        raises(StructureError, other, "recomputes its activations")
    still_right(twin, "functional_call")
    layer: Any = twin.ours.get_submodule("layers.1.q")
    layer.weight = nn.Parameter(layer.weight.detach())
    raises(StructureError, twin.backward, name, "load_state_dict")


@ranks(2)
def test_writes_transforms_and_replaced_weights_are_refused_by_name() -> None:
    for mesh, config in sizes():
        for checkpoint in (None, FULL, REENTRANT) if not config else (None,):
            make = partial(Twin, mesh=mesh, checkpoint=checkpoint, **config)
            written = ("was written into during a forward", "between optimizer steps")
            twin = make(partial(Tiny, Clamping, layers=2))
            raises(StructureError, twin.backward, "layers.0.q.weight", *written)
            twin = make(partial(BoundedModel, layers=2))
            raises(StructureError, twin.backward, "bounded.table", *written)
            twin = make(partial(Mapped, layers=2))
            raises(StructureError, twin.backward, "block layers.0", "torch.vmap")
            if checkpoint is not None:
                twin = make(partial(reads.Entering, reads.InPlace, layers=2))
                raises(StructureError, twin.backward, "InPlace writes into one of its inputs")
            replaced(make, checkpoint)
    twin = Twin(partial(Smuggled, Smuggling, layers=2), mesh_of(2))
    _, mine = twin.batch()
    raises(StaleWeightError, twin.ours(*mine).backward, "layers.1.w1.weight", "return that tensor")


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


class Parametrized(Block):
    """Registers a parametrization in its forward: one that writes, or one that it leaves there."""

    kind: type[nn.Module] = Doubled

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.q, "weight", self.kind())
        x = super().forward(x)
        if self.kind is Doubled:
            parametrize.remove_parametrizations(self.q, "weight", leave_parametrized=False)
        return x


class Left(Parametrized):
    kind = nn.Identity


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Parametrized, "right_inverse"), (Left, "not removed it")],
    ids=["one that writes", "one that is left"],
)
@ranks(2)
def test_parametrizations_of_a_forward_that_write_or_stay_are_refused_by_name(
    kind: type[Block], words: str
) -> None:
    for mesh, config in sizes():
        twin = Twin(partial(Tiny, kind, layers=2), mesh, **config)
        _, mine = twin.batch()
        raises(StructureError, partial(twin.ours, *mine), "layers.0.q.weight", words)


def compile_later(twin: Twin, mine: Any) -> None:
    ours: Any = twin.ours
    words = ("is compiled by torch.compile", "weight_parallel.compile = true")
    whole = torch.compile(ours, backend="eager")
    raises(StructureError, partial(whole, *mine), "the model", *words)
    still_right(twin, "a compiled model")
    ours.layers[1].compile(backend="eager")
    raises(StructureError, partial(ours, *mine), "block layers.1", *words)
    fresh = Twin(partial(Tiny, layers=2), twin.mesh)
    layer: Any = fresh.ours.get_submodule("layers.1.q")
    layer.compile(backend="eager")
    raises(StructureError, fresh.backward, "layers.1.q", *words)


@ranks(2)
def test_what_is_hooked_or_compiled_later_is_refused_by_name() -> None:
    for mesh, config in sizes():
        twin = Twin(partial(Tiny, layers=2), mesh, **config)
        ours: Any = twin.ours
        everybody, mine = twin.batch()

        def penalty(model: nn.Module) -> Any:
            return sum(p.pow(2).sum() for p in model.parameters())

        both = lambda twin=twin, mine=mine: twin.ours(*mine) + penalty(twin.ours)  # noqa: E731
        raises(GradientError, lambda both=both: both().backward(), "a backward of its own")
        twin.zero_grad()
        (twin.plain(*everybody) + penalty(twin.plain)).backward()
        ours(*mine).backward()
        penalty(ours).backward()
        twin.check_gradients("a penalty's own backward")
        weight = ours.layers[0].q.weight
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            handle = getattr(weight, register)(lambda given: None)
            raises(GradientError, partial(ours, *mine), "layers.0.q.weight", "gradient hook")
            handle.remove()
            still_right(twin, register)
        lbfgs = torch.optim.LBFGS(ours.parameters())
        raises(StructureError, partial(lbfgs.step, partial(ours, *mine)), "LBFGS", "AdamW")
        ours.layers[0].q.scale = nn.Parameter(torch.ones(1).double())
        raises(StructureError, partial(ours, *mine), "layers.0.q.scale", "was added after")
        del ours.layers[0].q.scale
        still_right(twin, "a parameter that was added and removed")
        ours.layers[0].adapter = nn.Linear(2, 2)
        raises(StructureError, partial(ours, *mine), "layers.0.adapter.weight", "was added after")
        del ours.layers[0].adapter
        ours.layers[0].activation = nn.GELU()  # has no parameters to reduce
        values = {k: v.detach().clone() for k, v in twin.plain.state_dict().items()}
        ours.load_state_dict(values, assign=True)
        still_right(twin, "a load that assigns")
        raises(StructureError, partial(torch.vmap(ours.head), torch.ones(2, 6).double()), "vmap")
        if mesh.shape.weight == 2:  # three sizes
            compile_later(twin, mine)
