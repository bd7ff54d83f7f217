"""One case on a rank: first one process's numbers, then the rank's own, compared with them."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as checkpointed

from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import InternspError
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.fuzz.draw import DEFAULTS, Case
from tests.fuzz.loop import Side
from tests.fuzz.shapes import Drawn
from tests.support.compare import differences, local_part

FLOOR = 1e-3  # numbers below it are compared by absolute difference
MOST = 1e12  # a loop that comes to larger numbers diverges: one rounding at its start decides

# The result of a case. A loop that torch refuses on one process says nothing about internsp.
RIGHT, WRONG, REFUSED, ERROR, MEANINGLESS = "right", "wrong", "refused", "error", "meaningless"


@dataclass
class Outcome:
    """The result of a case on one rank."""

    kind: str
    text: str = ""
    error: str = ""  # the class of the exception
    stage: str = "parallelize"
    details: list[str] = field(default_factory=list)


class Comparison:
    """Records one process's numbers, then finds each number of the rank that differs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wanted: list[tuple[str, dict[str, Any]]] = []
        self.differences: list[str] = []
        self.next = 0

    def keep(self, what: str, values: dict[str, Any]) -> None:
        self.wanted.append((what, {n: v.detach().clone() for n, v in values.items()}))

    def largest(self) -> float:
        """The largest finite number of one process."""
        found = [v.abs()[v.isfinite()] for _, values in self.wanted for v in values.values()]
        return max((v.max().item() for v in found if v.numel()), default=0.0)

    def check(self, what: str, found: dict[str, Any]) -> None:
        """Record a difference without raising, because the other ranks continue."""
        if self.next >= len(self.wanted):
            self.differences.append(f"{what}: one process has no such step")
            return
        wanted_what, wanted = self.wanted[self.next]
        self.next += 1
        if wanted_what != what:
            self.differences.append(f"{what}: one process is at {wanted_what}")
            return
        mine = wanted
        if f"rank {self.rank}" in wanted:
            mine = {n: v for n, v in wanted.items() if n == f"rank {self.rank}"}
        # Not finite on one process: then it must not be finite here.
        odd = {n for n, v in mine.items() if n in found and not v.isfinite().all()}
        self.differences += [
            f"{what}: {n} is finite, on one process it is not"
            for n in odd
            if _finite(found[n]) and not _finite(_part(mine[n], found[n]))
        ]
        apart = differences(
            {n: v for n, v in found.items() if n not in odd},
            {n: v for n, v in mine.items() if n not in odd},
            floor=FLOOR,
        )
        self.differences += [f"{what}: {line}" for line in apart]


def _part(whole: Tensor, found: Tensor) -> Tensor:
    return local_part(whole, found) if isinstance(found, DTensor) else whole


def _finite(found: Tensor) -> bool:
    own = found.to_local() if isinstance(found, DTensor) else found
    return bool(own.isfinite().all())


def run_case(case: Case, rank: int, mesh: ParallelMesh) -> Outcome:
    """Run the case. Collective. Raises nothing for errors of the case itself."""
    torch.manual_seed(case.seed)
    plain = Drawn(case.width, case.vocabulary, case.blocks, case.beside, case.output).double()
    ours = copy.deepcopy(plain)
    comparison = Comparison(rank)
    checkpoint = ActivationCheckpointConfig(**case.checkpoint)
    for index in checkpoint.selected(len(set(plain.layers))):
        _recompute(plain.layers[index], checkpoint.reentrant)
    try:
        Side(case, plain, list(range(case.world)), None, comparison.keep).run()
    except Exception as error:
        return Outcome(MEANINGLESS, f"{type(error).__name__}: {error}")
    if comparison.largest() > MOST:
        return Outcome(MEANINGLESS, f"the loop diverges: numbers up to {comparison.largest():.0e}")
    outcome = Outcome(RIGHT)
    try:
        communicator = parallelize(
            ours,
            mesh,
            WeightParallelConfig(**{**DEFAULTS, **case.options, **_names(case, plain)}),
            activation_checkpoint=checkpoint,
        )
        communicator.state.pool.poison = True
        outcome.stage = "optimizer"
        side = Side(case, ours, [rank], communicator, comparison.check)
        outcome.stage = "loop"
        side.run()
    except (InternspError, ValueError, TypeError) as error:
        return _raised(REFUSED, error, outcome.stage)
    except Exception as error:
        return _raised(ERROR, error, outcome.stage)
    if comparison.differences:
        text = comparison.differences[0]
        return Outcome(WRONG, text, stage="loop", details=comparison.differences[:12])
    return outcome


def _names(case: Case, model: Drawn) -> dict[str, Any]:
    """Options that name modules of the model: a pattern must match something."""
    found: dict[str, Any] = {}
    if any(not list(layer.parameters()) for layer in model.layers):
        found["blocks"] = ("layers.*",)  # blocks without weights are not found by the usual names
    if "expert_parameters" in case.options:
        there = {part for name, _ in model.named_parameters() for part in name.split(".")}
        patterns = [part for part in case.options["expert_parameters"] if part in there]
        found["expert_parameters"] = patterns or ["experts"]
    return found


def _recompute(block: Any, reentrant: bool) -> None:
    """torch's own checkpointing on one process, so that torch refuses the same cases there."""
    inner = block.forward

    def forward(x: Tensor, use: int) -> Any:
        again = reentrant and torch.is_grad_enabled() and x.requires_grad
        return checkpointed(inner, x, use, use_reentrant=again)

    block.forward = forward


def _raised(kind: str, error: Exception, stage: str) -> Outcome:
    lines = list(_last_frames(error))
    text = " ".join(str(error).split())[:600]
    return Outcome(kind, f"{type(error).__name__}: {text}", type(error).__name__, stage, lines)


def _last_frames(error: Exception) -> Iterator[str]:
    for frame in traceback.extract_tb(error.__traceback__)[-12:]:
        yield f"{frame.filename.rsplit('/', 3)[-1]}:{frame.lineno} {frame.name}"
