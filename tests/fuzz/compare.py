"""One case on a rank: one process's numbers first, then the rank's own beside them."""

from __future__ import annotations

import copy
import math
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
from internsp.parallel import parallelize
from tests.fuzz.draw import DEFAULTS, Case
from tests.fuzz.loop import Side
from tests.fuzz.shapes import Drawn
from tests.support.models import local_part

TOLERANCE = 1e-10
FLOOR = 1e-3  # below it numbers are compared by their difference

# How a case ended. A torch that refuses the loop on one process says nothing about us.
RIGHT, WRONG, REFUSED, ERROR, MEANINGLESS = "right", "wrong", "refused", "error", "meaningless"


@dataclass
class Outcome:
    """How a case ended on one rank."""

    kind: str
    text: str = ""
    error: str = ""  # the class of what was raised
    stage: str = "parallelize"
    details: list[str] = field(default_factory=list)


class Comparison:
    """Keeps one process's numbers, then finds each of the rank's that differs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wanted: list[tuple[str, dict[str, Any]]] = []
        self.differences: list[str] = []
        self.next = 0

    def keep(self, what: str, values: dict[str, Any]) -> None:
        self.wanted.append((what, {n: v.detach().clone() for n, v in values.items()}))

    def check(self, what: str, found: dict[str, Any]) -> None:
        """Differences are noted, not raised: the other ranks go on, too."""
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
        for name in sorted(set(found) ^ set(mine)):
            there = "only one process has it" if name in mine else "one process has none"
            self.differences.append(f"{what}: {name}: {there}")
        for name in sorted(set(found) & set(mine)):
            text = _difference(found[name], mine[name])
            if text:
                self.differences.append(f"{what}: {name} {text}")


def _difference(found: Tensor, wanted: Tensor) -> str:
    whole = wanted
    if isinstance(found, DTensor):
        wanted = local_part(wanted, found)
        found = found.to_local()
    if found.shape != wanted.shape:
        return f"has shape {list(found.shape)} in place of {list(wanted.shape)}"
    if not wanted.numel():
        return ""
    scale = float(whole.detach().abs().max())
    gap = float((found.detach() - wanted.detach()).abs().max())
    bound = TOLERANCE * max(scale, FLOOR)
    # Not finite on one process: then not finite here.
    if not math.isfinite(scale):
        return "" if not math.isfinite(gap) else "is finite, on one process it is not"
    return "" if gap <= bound else f"differs by {gap:.3g} of {scale:.3g}"


def run_case(case: Case, rank: int, mesh: ParallelMesh) -> Outcome:
    """Collective. Never raises for what the case is about."""
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
    """Options that are names in the model: a pattern must match something."""
    found: dict[str, Any] = {}
    if any(not list(layer.parameters()) for layer in model.layers):
        found["blocks"] = ("layers.*",)  # blocks without weights are not found by the usual names
    if "experts" in case.options:
        there = {part for name, _ in model.named_parameters() for part in name.split(".")}
        patterns = [part for part in case.options["experts"] if part in there]
        found["experts"] = patterns or ["experts"]
    return found


def _recompute(block: Any, reentrant: bool) -> None:
    """torch's own checkpointing on one process, too: what it refuses, it refuses there."""
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
