"""Tiny plain models, and a parallel model together with the same model on one process."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.support.compare import TOLERANCE, check, gradients, parameters
from tests.support.sections import sections
from tests.support.versions import since

VOCABULARY = 11  # odd, so that no number of ranks divides the rows
CUT = 20  # these models' parameters of at least this many elements are sharded
SOME, ALL = {"coalesce_bytes": 400}, {"coalesce_bytes": 65536}  # small weights are coalesced
ROLLING = {"gather_before": "rolling"}  # per-parameter prefetch


class Block(nn.Module):
    """A residual block with the parts of a transformer's, attention left out."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.wo = nn.Linear(width, width, bias=False)
        self.w1 = nn.Linear(width, 2 * width + 1)
        self.w2 = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wo(torch.tanh(self.q(self.norm(x))))
        return x + self.w2(F.gelu(self.w1(x)))


class Tiny(nn.Module):
    """Embedding, blocks, norm, head; returns the sum of the token losses, or the logits."""

    def __init__(
        self,
        block: Callable[[], nn.Module] = Block,
        layers: int = 4,
        width: int = 6,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(ids))))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Reordered(Tiny):
    """Runs its blocks in the order ``order``."""

    order: tuple[int, ...] = (0, 2, 1, 3)

    def blocks(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


class Twin:
    """A model on one process (``plain``) and the same sharded over a mesh (``ours``), in fp64."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        mesh: ParallelMesh,
        checkpoint: ActivationCheckpointConfig | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        **config: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.plain = make().to(dtype)
        self.ours = copy.deepcopy(self.plain)
        self.mesh = mesh
        self.trace = Trace(enabled=True)
        weights, sequence = sections({"min_shard_elements": CUT, "coalesce_bytes": 0} | config)
        self.communicator = parallelize(
            self.ours,
            mesh,
            weights,
            sequence=sequence,
            activation_checkpoint=checkpoint,
            trace=self.trace,
        )
        self.communicator.state.pool.poison = True  # a slot is filled with NaN when it is reused
        self._generator = torch.Generator().manual_seed(seed + 1)

    def batch(self, rows: int = 2, length: int = 5) -> tuple[Any, Any]:
        """(all ranks' batch, this rank's batch): ids and labels for one forward of each model."""
        shape = (2, rows * self.mesh.world_size, length)
        both = torch.randint(0, VOCABULARY, shape, generator=self._generator)
        mine = both[:, self.mesh.rank * rows : (self.mesh.rank + 1) * rows]
        return (both[0], both[1]), (mine[0], mine[1])

    def backward(self, **options: Any) -> None:
        """One forward and backward of both models on a new batch."""
        everybody, mine = self.batch(**options)
        self.plain(*everybody).backward()
        self.ours(*mine).backward()

    def check_gradients(self, what: str = "", tolerance: float = TOLERANCE) -> None:
        """Every ``.grad`` equals that of one process; ``None`` is ``None`` in both."""
        what = f"{what}: gradients"
        check(gradients(self.ours), gradients(self.plain), what, tolerance)

    def check_parameters(self, what: str = "", tolerance: float = TOLERANCE) -> None:
        """Every parameter equals that of one process."""
        check(parameters(self.ours), parameters(self.plain), what, tolerance)

    def check_step(self, optimizers: Iterable[Any], what: str = "") -> None:
        """Check every gradient, then every parameter after a step of both ``optimizers``."""
        self.check_gradients(what)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.check_parameters(f"{what}, after the step")

    def zero_grad(self) -> None:
        """Drop both models' gradients."""
        self.plain.zero_grad()
        self.ours.zero_grad()

    def lines(self, *kinds: str) -> list[str]:
        """Recorded events of these kinds since the last call; clears the trace."""
        found = self.trace.lines(kinds)
        self.trace.clear()
        return found


def raises(kind: type[BaseException], call: Callable[[], Any], *words: str) -> str:
    """Assert that ``call()`` raises ``kind`` with ``words`` in its message; returns the message."""
    with pytest.raises(kind) as caught:
        call()
    found = str(caught.value)
    if not since("2.13"):  # a checkpoint that was entered is left when the error is freed
        del caught
        gc.collect()
    for word in words:
        assert word in found, f"{word!r} is not in: {found}"
    return found
