"""A block that recomputes its activations, without ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.errors import StructureError
from internsp.modules.recompute import checkpoint_block
from tests.support.models import raises


class Cache:
    """Like a cache of transformers: each forward appends to it."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        return torch.cat(self.kept)

    def get_seq_length(self) -> int:
        return sum(len(x) for x in self.kept)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, past_key_values: Cache | None = None) -> Tensor:
        h = self.layer(x)
        return (h if past_key_values is None else past_key_values.update(h)).tanh()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_recomputes_refuses_a_cache_in_training_and_takes_it_otherwise(
    reentrant: bool,
) -> None:
    block: Any = Caching()
    x = torch.randn(2, 3, requires_grad=True)
    block(x).sum().backward()
    wanted, x.grad = x.grad, None
    checkpoint_block(block, reentrant)
    for call in (partial(block, x, Cache()), partial(block, x, past_key_values=Cache())):
        raises(StructureError, call, "a Caching that", "given a Cache", "use_cache = False")
    block(x).sum().backward()
    torch.testing.assert_close(x.grad, wanted)
    cache = Cache()
    with torch.no_grad():
        block(x, cache)
        assert len(block(x, cache)) == 4


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * mask.mul_(2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_writes_into_an_input_is_refused(reentrant: bool) -> None:
    block: Any = Writing()
    checkpoint_block(block, reentrant)
    x, mask = torch.randn(2, 3, requires_grad=True), torch.ones(3)
    raises(StructureError, partial(block, x, mask), "a Writing writes into one of its inputs")
    with torch.no_grad():
        block(x, mask)  # nothing is recomputed
    torch.testing.assert_close(mask, torch.full((3,), 4.0))


class Nesting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, more: Any = None, *, scale: Tensor | None = None) -> Any:
        h = self.layer(x).tanh()
        if more is not None:
            return h, (h * more[0],)
        return h if scale is None else h * scale.exp()


def test_the_reentrant_form_loses_no_gradient_in_silence() -> None:
    block: Any = Nesting()
    x, base = (torch.randn(2, 3, requires_grad=True) for _ in range(2))

    def backward() -> tuple[Tensor | None, Tensor | None]:
        x.grad = base.grad = None
        scale = base.tanh()  # one graph, through which both calls' gradients go
        block(block(x, scale=scale), scale=scale).sum().backward()
        return x.grad, base.grad

    wanted = backward()
    checkpoint_block(block, reentrant=True)
    torch.testing.assert_close(backward(), wanted)
    inside = [torch.ones(3)]
    raises(StructureError, partial(block, x, inside), "a Nesting returns tensors inside of a tuple")


def test_a_dictionary_is_no_cache_though_it_too_has_update() -> None:
    block: Any = Nesting()
    checkpoint_block(block, reentrant=False)
    x = torch.randn(2, 3, requires_grad=True)
    more = {0: torch.ones(3, requires_grad=True)}
    block(x, more)[1][0].sum().backward()
    torch.testing.assert_close(more[0].grad, block(x)[:].detach().sum(0))


class Counting(nn.Module):
    """A router that counts the tokens of its experts, in place and by a new tensor; statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.router = nn.Linear(4, 3)
        self.out = nn.Linear(3, 4)
        self.register_buffer("tokens", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(self.norm(x)) + self.table
        self.tokens += torch.bincount(logits.argmax(1), minlength=3)
        self.seen = self.seen + len(x)
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.zeros(()))
        self.made += 1
        return x + self.out(logits.tanh())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_forward_counts_in_buffers_is_counted_once(reentrant: bool) -> None:
    found, ends = {}, list[Tensor]()
    for checkpointed in (False, True):
        torch.manual_seed(0)
        block: Any = Counting()
        if checkpointed:
            checkpoint_block(block, reentrant, None, lambda block=block: ends.append(block.tokens))
        for _ in range(3):
            block(torch.randn(5, 4, requires_grad=True)).square().sum().backward()
        found[checkpointed] = dict(block.named_buffers())
    assert found[False]["tokens"].sum() == 15
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=0)
    assert [tokens is block.tokens for tokens in ends] == [True] * 3  # told of once, as they were
