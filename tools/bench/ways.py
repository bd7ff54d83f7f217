"""One model trained in several ways: the rank that has one of each, and rounds that time them."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from tools.bench.ranks import Session


class Ways:
    """A rank's models, one for each way. ``model(x)`` is the loss.

    Args:
        width: features of a token.
    """

    def __init__(self, models: dict[str, nn.Module], width: int) -> None:
        self.models, self.width = models, width

    def step(self, way: str, tokens: int) -> tuple[float, float]:
        """Seconds and loss of a forward and backward."""
        model = self.models[way]
        x = torch.randn(
            tokens, self.width, generator=torch.Generator().manual_seed(dist.get_rank())
        )
        dist.barrier()
        begin = time.perf_counter()
        loss = model(x)
        loss.backward()
        dist.barrier()
        seconds = time.perf_counter() - begin
        model.zero_grad()
        return seconds, float(loss)


def timed(
    session: Session, ways: Iterable[str], rounds: int, tokens: int
) -> dict[str, list[float]]:
    """Seconds of each way's steps, all ways in turn within each round. Their losses agree."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):  # the first round warms up
        replies = {way: session.ask("step", way=way, tokens=tokens) for way in seconds}
        losses = {way: sum(loss for _, loss in each) for way, each in replies.items()}
        first = next(iter(losses.values()))
        spread = max(losses.values()) - min(losses.values())
        assert spread < 1e-3 * abs(first), f"the ways compute other losses: {losses}"
        for way, each in replies.items() if number else ():
            seconds[way].append(max(s for s, _ in each))
    return seconds
