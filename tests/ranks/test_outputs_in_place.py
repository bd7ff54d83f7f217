"""In-place writes to outputs of a layer, a block or the model: backward still gathers the weights.

For rows of sequences a linear layer with a bias returns a *view* of its product. Writing into a
view replaces its autograd node, and removes every hook on that node.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.config import ActivationCheckpointConfig
from internsp.mesh import ParallelMesh
from tests.support.models import ROLLING, Tiny, Twin
from tests.support.ranks import ranks

RECOMPUTED = ActivationCheckpointConfig(mode="full")


class Layers(nn.Module):
    """Writes into the outputs of its layers, or (``inside=False``) does not."""

    def __init__(self, width: int = 6, inside: bool = True) -> None:
        super().__init__()
        self.inside = inside
        self.wide, self.back = nn.Linear(width, 8), nn.Linear(8, 8)
        self.out_proj = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.wide(x), inplace=self.inside)
        h = self.back(h)
        halves = [torch.tanh(half) for half in h.chunk(2, -1)]
        if self.inside:
            h[..., :4] = halves[1]
            h[..., 4:] *= 0.5
        else:
            h = torch.cat([halves[1], h[..., 4:] * 0.5], -1)
        h = self.out_proj(h)
        return h.add_(x) if self.inside else h + x


class Returned(nn.Module):
    """Returns a layer's output unchanged or as a view; the model writes into it."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.wide, self.out_proj = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.wide(x)
        return self.out_proj(torch.tanh(h)), h.view(-1, 8)


class Writer(Tiny):
    """Writes into the outputs of its blocks and its head, or (``inside=False``) does not."""

    def __init__(self, inside: bool = True) -> None:
        super().__init__(block=Returned)
        self.inside = inside
        self.head = nn.Linear(6, self.head.out_features)

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h, wide = layer(x)
            if self.inside:
                h *= 0.5
                h += x
                wide.clamp_(-0.5, 0.5)
            else:
                h, wide = h * 0.5 + x, wide.clamp(-0.5, 0.5)
            x = h + wide.view(*h.shape[:-1], 8).mean(-1, keepdim=True)
        return x


class Outside(nn.Module):
    """The loss writes into the model's output."""

    def __init__(self, inside: bool = True) -> None:
        super().__init__()
        self.model, self.inside = Writer(inside), inside

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(ids)
        logits = logits.mul_(0.7) if self.inside else logits * 0.7
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.thorough(5)
@ranks(2)
def test_outputs_of_layers_blocks_and_models_may_be_written_into() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for what, config, checkpoint in (
        ("block", {}, None),
        ("rolling", ROLLING, None),
        ("module", {"granularity": "module"}, None),
        ("recomputed", {}, RECOMPUTED),
    ):
        for make in (lambda inside: Tiny(block=partial(Layers, inside=inside)), Outside):
            twins = [
                Twin(partial(make, inside), mesh, checkpoint, **config)  # type: ignore[arg-type]
                for inside in (True, False)
            ]
            used = []
            for twin in twins:
                optimizers = [
                    torch.optim.SGD(model.parameters(), lr=0.1) for model in (twin.plain, twin.ours)
                ]
                for _ in range(2):
                    twin.backward()
                    twin.check_step(optimizers, what)
                twin.check_parameters(what)
                used.append(twin.lines("USE"))
            assert used[0] == used[1], f"{what}: weights are used as where nothing is written into"
