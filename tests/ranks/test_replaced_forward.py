"""A ``forward`` that a program replaces after ``parallelize``: it runs in the same scope."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.config import ActivationCheckpointConfig
from internsp.errors import StructureError
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, Block, Tiny, Twin, raises
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)


class OwnBlock(Block):
    """A class of this file's own, whose forward may be replaced."""


class OwnLinear(nn.Linear):
    """A class of this file's own, whose forward may be replaced."""


class OwnHead(nn.Linear):
    """A class of this file's own, whose forward may be replaced."""


class Model(Tiny):
    """A class of this file's own, whose forward may be replaced."""

    def __init__(self) -> None:
        super().__init__(OwnBlock, layers=2)
        self.layers[0].q = OwnLinear(6, 6)
        self.head = OwnHead(6, 11, bias=False)


def fused(self: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """A head fused with its loss, which reads the weight and calls no head, as trl's does."""
    hidden = self.norm(self.blocks(self.embed(ids)))
    logits = hidden.flatten(0, 1) @ self.head.weight.t() * 0.7
    return F.cross_entropy(logits, labels.flatten(), reduction="sum")


def mixing(self: Any, x: Tensor) -> Tensor:
    """A kernel of a block, which reads the weights of its children."""
    x = x + F.linear(torch.sin(self.norm(x)), self.q.weight, self.q.bias) @ self.wo.weight.t()
    return x + self.w2(torch.relu(self.w1(x)))


def scaled(self: Any, x: Tensor) -> Tensor:
    """A kernel of one linear layer."""
    return F.linear(x, self.weight * 1.3)


def returning(self: Any, x: Tensor) -> Tensor:
    """A linear layer that returns rows of its weight, which lie in a slot here."""
    return self.weight[: x.shape[-2]]  # type: ignore[no-any-return]


NEW: dict[str, Callable[..., Tensor]] = {
    "": fused,
    "layers.1": mixing,
    "layers.0.q": returning,
    "head": scaled,
}


def around(module: nn.Module) -> None:
    """Replace a forward by a function that calls it, as libraries that wrap it do."""
    before = module.forward

    @wraps(before)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **kwargs) * 1.1

    module.forward = forward


def own(module: nn.Module, name: str) -> None:
    module.forward = types.MethodType(NEW[name], module)


def twice(module: nn.Module, name: str) -> None:
    around(module)
    own(module, name)


def own_around(module: nn.Module, name: str) -> None:
    own(module, name)
    around(module)


@contextmanager
def for_a_while(module: nn.Module, name: str) -> Iterator[None]:
    before = module.forward
    own(module, name)
    yield
    module.forward = before


@contextmanager
def for_a_while_by_deletion(module: nn.Module, name: str) -> Iterator[None]:
    own(module, name)
    yield
    del module.forward


@contextmanager
def on_the_class(module: nn.Module, name: str) -> Iterator[None]:
    kind: Any = type(module)
    before = vars(kind).get("forward")
    kind.forward = NEW[name]
    yield
    if before is None:
        del kind.forward
    else:
        kind.forward = before


WAYS: dict[str, Callable[[nn.Module, str], Any]] = {
    "on the instance": own,
    "by one that calls it": lambda module, _: around(module),
    "twice": twice,
    "by one that calls a new one": own_around,
    "for one step": for_a_while,
    "for one step, then deleted": for_a_while_by_deletion,
    "on the class": on_the_class,
}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "kept": (None, {}),
    "recomputed": (FULL, {}),
    "recomputed, reentrant": (REENTRANT, {}),
    "at entry": (FULL, ALL),
    "rolling": (None, ROLLING),
}


def replaced(twin: Twin, name: str, way: str) -> None:
    """A step before, two with the new forward of both models, one after."""
    twin.backward()
    twin.check_gradients("before")
    modules = [model.get_submodule(name) for model in (twin.plain, twin.ours)]
    contexts = [made for module in modules if (made := WAYS[way](module, name)) is not None]
    if way == "on the class":
        contexts = contexts[:1]  # both have the class
    for context in contexts:
        context.__enter__()
    for step in range(2):
        twin.zero_grad()
        twin.backward()
        twin.check_gradients(f"step {step} of a forward replaced {way}")
    for context in contexts:
        context.__exit__(None, None, None)
    twin.zero_grad()
    twin.backward()
    twin.check_gradients(f"after a forward was replaced {way}")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", NEW)
@ranks(2)
def test_a_forward_replaced_after_parallelize_is_right_from_its_next_call(
    name: str, setting: str
) -> None:
    mesh = mesh_of(2)
    checkpoint, config = SETTINGS[setting]
    for way in WAYS:
        twin = Twin(Model, mesh, checkpoint, **config)
        try:
            replaced(twin, name, way)
        except Exception as error:
            raise AssertionError(f"{way}, {name or 'the model'}, {setting}") from error


class Direct(Tiny):
    """Calls the forward of its blocks past their hooks, or the blocks, after :attr:`remedy`."""

    remedy = False

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.remedy else layer.forward(x)
        return x


@pytest.mark.parametrize("setting", ["kept", "recomputed", "at entry"])
@ranks(2)
def test_a_forward_of_a_block_called_past_its_hooks_is_refused_by_name(setting: str) -> None:
    checkpoint, config = SETTINGS[setting]
    for weight in (2, 1):
        twin = Twin(partial(Direct, layers=2), mesh_of(weight), checkpoint, **config)
        _, mine = twin.batch()
        words = ("block layers.0", "called directly", "block(x)")
        raises(StructureError, partial(twin.ours, *mine), *words)
        for model in (twin.plain, twin.ours):
            model.remedy = True  # type: ignore[assignment]
        twin.backward()
        twin.check_gradients("after a direct call was refused")
