"""Blocks that send their tokens to other ranks and back, as a mixture of experts does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.models import ALL, Tiny, Twin
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")
SENT = "TOKENS"


class Swapped(torch.autograd.Function):
    """Halves of the tokens are swapped between ranks; in backward their gradients are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: Exchange) -> Tensor:
        ctx.of = of
        return of.swapped(x, "forward")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.of.swapped(gradients[0], "backward"), None


class Exchange(nn.Module):
    """Applied twice it is the identity; on one process (no ``trace``) it always is."""

    trace: Trace | None = None

    def swapped(self, x: Tensor, phase: str) -> Tensor:
        if self.trace is None:
            return x
        self.trace.record(SENT, "tokens", "", phase)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    def forward(self, x: Tensor) -> Tensor:
        return Swapped.apply(x, self)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Counts the tokens of its experts; a module after both exchanges can be the trigger."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 4)
        self.dispatch, self.combine = Exchange(), Exchange()
        self.w1, self.w2 = nn.Linear(width, 9), nn.Linear(9, width)
        self.behind = nn.Identity()
        self.register_buffer("counts", torch.zeros(4))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights = self.router(h).softmax(-1)
        self.counts += torch.bincount(weights.argmax(-1).flatten(), minlength=4)
        self.forwards = self.forwards + 1
        h = self.combine(self.w2(F.gelu(self.w1(self.dispatch(h)))))
        return x + self.behind(h) * weights.amax(-1, keepdim=True)


def twin(checkpoint: ActivationCheckpointConfig | None = None, **config: Any) -> Twin:
    config = {"gather_before_modules": ("behind",)} | config
    made = Twin(partial(Tiny, Mixture), mesh_of(2), checkpoint, **config)
    for module in made.ours.modules():
        if isinstance(module, Exchange):
            module.trace = made.trace
    return made


@ranks(2)
def test_weights_wait_until_a_blocks_tokens_have_travelled() -> None:
    """With the prefetch trigger after them, in forward and where activations are recomputed."""
    for checkpoint in (None, FULL):
        gated = twin(checkpoint)
        for _ in range(2):
            gated.backward()
            gated.check_gradients("gated")
            gated.zero_grad()
            forward, backward = _passes(gated.lines("AG", SENT))
            assert _gathered(forward)[:8] == [1, 1, 2, 2, 3, 3, 4, 4], "a gather ran beside tokens"
            if (
                checkpoint is not None
            ):  # of blocks below the last, by the recompute of the one above
                assert _gathered(backward, "forward") == [0, 0, 1, 1, 2, 2]
    early = twin(gather_before_modules=("norm",))
    early.backward()
    forward, _ = _passes(early.lines("AG", SENT))
    assert _gathered(forward) == [2, 2, 3, 3, 4, 4, 4, 4], "the control has them at once"


def _passes(lines: list[str]) -> tuple[list[str], list[str]]:
    first = lines.index(f"{SENT} backward tokens")
    return lines[:first], lines[first:]


def _gathered(lines: list[str], phase: str = "") -> list[int]:
    """At each exchange (of a phase): how many blocks' gathers have been launched so far."""
    seen: set[str] = set()
    found = []
    for line in lines:
        kind, at, name = line.split(" ")
        if kind == SENT and phase in at:
            found.append(len(seen))
        elif kind == "AG" and name.startswith("layers."):
            seen.add(name.split(".")[1])
    return found


@pytest.mark.thorough(1)
@ranks(2)
def test_experts_tokens_are_counted_once_where_activations_are_recomputed() -> None:
    for config in ({}, ALL):
        counted = twin(FULL, **config)
        for _ in range(3):
            counted.backward()
            counted.check_gradients("counted")
            counted.zero_grad()
        for ours, plain in zip(counted.ours.layers, counted.plain.layers, strict=True):  # type: ignore[arg-type]
            dist.all_reduce(ours.counts)
            assert plain.counts.sum() == 3 * 20
            close(ours.counts, plain.counts, "tokens of experts")
            close(ours.forwards, plain.forwards, "forwards")
