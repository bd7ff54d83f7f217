"""Steps of optimizer state in host memory: how much of it is copied to the device at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from internsp.optim import streamed


@pytest.mark.parametrize(
    ("numels", "pieces"),
    [
        ([4, 4, 4, 4], [[4, 4], [4, 4]]),
        ([3, 4, 4], [[3, 4], [4]]),
        ([9, 1, 7], [[9], [1, 7]]),
        ([20], [[20]]),
        ([], []),
    ],
    ids=["full", "rest", "large-first", "one", "none"],
)
def test_a_piece_has_as_many_segments_as_fit_and_at_least_one(
    numels: list[int], pieces: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "PIECE_BYTES", 8 * 4)  # eight elements of fp32
    segments = [SimpleNamespace(member=i, tensor=torch.zeros(n)) for i, n in enumerate(numels)]
    idle = SimpleNamespace(member="idle", tensor=torch.zeros(8))
    bucket: Any = SimpleNamespace(master=torch.zeros(1), segments=[idle, *segments])
    found = streamed._pieces(bucket, {*range(len(numels))})  # type: ignore[arg-type]
    assert [[s.tensor.numel() for s in piece] for piece in found] == pieces
