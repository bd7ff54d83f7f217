"""A parallel model that is moved or cast: calls without effect succeed, all others are refused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from internsp.errors import StructureError
from internsp.optim import ZeroOptimizer
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks


class Scaled(Tiny):
    """With a buffer that belongs to the root module."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.register_buffer("share", torch.full((1,), 0.5, dtype=torch.float64))
        self.filter = nn.Conv2d(1, 2, 3)  # of four dimensions, and unused
        self.rnn = nn.RNN(6, 6, batch_first=True)  # overrides _apply

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        return super().blocks(x) * self.share + self.rnn(x)[0]


NOTHING: tuple[Callable[[nn.Module], nn.Module], ...] = (
    lambda m: m.to("cpu"),
    lambda m: m.cpu(),
    lambda m: m.double(),
    lambda m: m.to(torch.device("cpu"), torch.float64),
    lambda m: m.to(m.get_parameter("layers.0.q.weight").device),
    lambda m: m.get_submodule("layers.0").to("cpu"),
)
CHANGES: tuple[Callable[[nn.Module], nn.Module], ...] = (
    lambda m: m.float(),
    lambda m: m.to(torch.bfloat16),
    lambda m: m.to("meta"),
    lambda m: m.to(memory_format=torch.channels_last),
    lambda m: m.to_empty(device="cpu"),
    lambda m: m.share_memory(),
    lambda m: m.get_submodule("layers.0").half(),
)


@ranks(2)
def test_what_changes_nothing_passes_and_what_does_is_refused_before_a_buffer_is_cast() -> None:
    for zero in (False, True):
        twin = Twin(Scaled, mesh_of(2))
        ours = twin.ours
        kept = {name: id(parameter) for name, parameter in ours.named_parameters()}
        make = torch.optim.SGD
        theirs = make(twin.plain.parameters(), lr=0.1)
        optimizer = (
            ZeroOptimizer(twin.communicator, make, lr=0.1) if zero
            else make(ours.parameters(), lr=0.1)
        )  # fmt: skip
        for change in (*NOTHING, *CHANGES):
            if change in NOTHING:
                change(ours)
            else:
                raises(
                    StructureError,
                    lambda change=change, ours=ours: change(ours),
                    "on rank",
                    "before",
                )
            assert ours.share.dtype == torch.float64
            assert ours.share.device.type == "cpu"
            assert kept == {name: id(p) for name, p in ours.named_parameters()}
        for step in range(2):
            twin.backward()
            if not zero:
                twin.check_gradients(f"step {step}")
            optimizer.step()
            theirs.step()
            optimizer.zero_grad()
            theirs.zero_grad()
            twin.check_parameters(f"step {step}")
