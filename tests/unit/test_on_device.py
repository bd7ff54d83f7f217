"""``INTERNSP_TEST_DEVICE``: what a test makes lies on the device, what the library makes, not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from internsp.layers import Router
from internsp.mesh.shape import MeshShape
from tests.support.on_device import NAME, OnDevice, use_device


def test_tensors_and_modules_of_a_test_lie_on_the_device() -> None:
    drawn = torch.randn(3, generator=torch.Generator().manual_seed(1))
    with OnDevice("meta"):
        made = [torch.zeros(2), torch.tensor(1.0), nn.Linear(2, 2).weight, torch.arange(3)]
        again = torch.randn(3, generator=torch.Generator().manual_seed(1), requires_grad=True)
        named = torch.zeros(2, device="cpu")
        layer = Router(4, 2, 1).weight
        library = MeshShape(1, weight=1).grid
    assert all(each.is_meta for each in [*made, again, layer])
    assert again.requires_grad
    assert again.shape == drawn.shape
    assert not named.is_meta
    assert not library.is_meta


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    use_device()
    assert not torch.zeros(1).is_meta
