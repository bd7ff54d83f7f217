"""Weights used by a function instead of their module, like the convolution's in ``mamba2``.

Also where some ranks' data do not use them, and in blocks that checkpoint themselves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from internsp.config import ActivationCheckpointConfig
from internsp.mesh import ParallelMesh
from tests.support.compare import close
from tests.support.few import few
from tests.support.models import ALL, ROLLING, Block, Tiny, Twin
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
SMALL = {"min_shard_elements": 10**6}
MODULE = {"granularity": "module"}


class Kernel(Block):
    """Never calls its convolutions; some rows need the second one, and the linear layer.

    Args:
        own: whether it recomputes its activations itself, as blocks of transformers do, and in
            which form of torch's checkpoint.
    """

    def __init__(self, width: int = 6, own: bool | None = None) -> None:
        super().__init__(width)
        self.conv = nn.Conv1d(width, width, 3, groups=width)
        self.mixing = nn.Conv1d(width, width, 3)
        self.never = nn.Linear(width, width)
        self.own = own

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        if self.own is None:
            return self.compute(x, wanted)
        return checkpoint(self.compute, x, wanted, use_reentrant=self.own)  # type: ignore[no-any-return]

    def compute(self, x: Tensor, wanted: Tensor) -> Tensor:
        rows = F.pad(x.transpose(1, 2), (2, 0))
        taps = self.conv.weight.squeeze(1)  # [channels, 3], as kernels take it
        h = sum(rows[..., i : i + x.shape[1]] * taps[:, i, None] for i in range(3))
        h = h + self.conv.bias[:, None]
        if wanted.any():
            more = F.conv1d(rows, self.mixing.weight, self.mixing.bias)
            more = more + F.linear(x, self.never.weight, self.never.bias).transpose(1, 2)
            h = h + torch.where(wanted[:, None, None], more, 0.0)
        return super().forward(x + torch.tanh(h.transpose(1, 2)))


class Model(Tiny):
    """The first id of a row selects the blocks that use all weights for it."""

    def __init__(self, own: bool | None = None, layers: int = 3) -> None:
        super().__init__(partial(Kernel, own=own), layers=layers)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, (ids[:, 0] >> number) % 2 == 1)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


CASES: list[tuple[bool | None, Any, dict[str, Any]]] = [
    *((None, form, config) for config in ({}, ALL) for form in (None, FULL, REENTRANT)),
    *((own, None, config) for own in (False, True) for config in ({}, ALL, MODULE)),
    (None, FULL, SMALL), (None, None, ROLLING), (False, None, ROLLING), (False, FULL, {}),
]  # fmt: skip


@few("cases", CASES, 6)
@ranks(2)
def test_weights_that_a_kernel_reads_are_right_where_ranks_leave_them_unused(
    cases: list[tuple[bool | None, Any, dict[str, Any]]],
) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for own, form, config in cases:
        what = f"own {own}, {form}, {config}"
        twin = Twin(partial(Model, own), mesh, form, **config)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (twin.plain, twin.ours)]
        apart = set()
        for step in range(3):
            everybody, mine = twin.batch(rows=1)
            apart.add(bool((everybody[0][0, 0] ^ everybody[0][1, 0]) & 7))
            twin.plain(*everybody).backward()
            twin.ours(*mine).backward()
            twin.check_step(optimizers, f"{what}, step {step}")
        assert True in apart, "the ranks' data must differ in what they need"
        everybody, mine = twin.batch(rows=1)
        with torch.no_grad():
            wanted = twin.plain.eval()(everybody[0])[mesh.rank : mesh.rank + 1]
            close(twin.ours.eval()(mine[0]), wanted, f"{what}: evaluation")


class Lowering(Model):
    """Enters autocast around its blocks if autocast is off."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids)


@ranks(2)
def test_autocast_reaches_weights_that_some_ranks_leave_unused() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (Model, None, {}), (Model, FULL, ALL), (partial(Model, True), None, ROLLING),
        (Lowering, REENTRANT, {}), (Lowering, None, MODULE),
    ]  # fmt: skip
    for make, form, config in cases:
        twin = Twin(make, mesh, form, dtype=torch.float32, **config)
        for step, half in enumerate((True, False, True)):
            everybody, mine = twin.batch(rows=1)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                wanted, logits = twin.plain(everybody[0]), twin.ours(mine[0])
            lowered = half or make is Lowering
            what = f"{make}, {form}, {config}, step {step}"
            rows = slice(mesh.rank, mesh.rank + 1)
            assert logits.dtype == (torch.bfloat16 if lowered else torch.float32)
            close(logits, wanted[rows], f"{what}: logits", 2e-2 if lowered else 1e-5)
            with torch.no_grad():  # in full precision, before the backward
                other = twin.batch(rows=1)[0][0]
                bound = 2e-2 if make is Lowering else 1e-5
                close(twin.ours(other[rows]), twin.plain(other)[rows], f"{what}: other", bound)
            for found in (wanted, logits):
                found.square().sum().backward()
            # Products of rows in bf16 are summed over ranks: its rounding.
            twin.check_gradients(what, 5e-2 if lowered else 1e-4)
            twin.zero_grad()
