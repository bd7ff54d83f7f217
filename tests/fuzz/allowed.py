"""Drawn features that are refused according to the documentation, and the expected errors."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.fuzz.compare import ERROR, MEANINGLESS, REFUSED, RIGHT, WRONG, Outcome
from tests.fuzz.draw import CUT_EMBEDDING, DEFAULTS, Case
from tests.fuzz.shapes import Drawn

# Feature -> classes of errors that may refuse it. A case with one of them may also succeed.
MAY_BE_REFUSED: dict[str, tuple[str, ...]] = {
    # shared between units
    "shared_weight_of_blocks": ("StructureError",),
    "same_block_twice": ("StructureError", "OrderError"),
    # tensors in which reentrant checkpointing loses gradients
    "aux_dict": ("StructureError",),
    "aux_data": ("StructureError",),
    # second derivatives
    "accumulate:penalty": ("GradientError",),
    "thrown:penalty": ("GradientError",),
    # names of experts that match nothing, or a weight that is an expert's and another's
    "expert_weight": ("StructureError",),
    # options without an effect on a model whose parameters, or blocks', are all too small
    "min_shard_elements=100": ("ConfigError",),
    "min_shard_elements=2048": ("ConfigError",),
    f"rules={CUT_EMBEDDING}": ("StructureError",),
    **dict.fromkeys((f"keep_unsharded={n}" for n in (1, 2, "2000 B", "all")), ("ConfigError",)),
}


def verdict(case: Case, outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """(kind, text): ``"right"``, ``"refused"``, ``"meaningless"``, or the kind of failure."""
    kinds = {outcome.kind for outcome in outcomes}
    if kinds <= {RIGHT}:
        return RIGHT, ""
    if kinds == {MEANINGLESS}:
        return MEANINGLESS, outcomes[0].text
    for kind in (ERROR, WRONG):
        if kind in kinds and REFUSED not in kinds:
            return kind, _by_rank(outcomes)
    if kinds != {REFUSED}:
        return ERROR, f"not all ranks refuse: {_by_rank(outcomes)}"
    allowed = {name for f in case.features() for name in MAY_BE_REFUSED.get(f, ())}
    least = (DEFAULTS | case.options)["min_shard_elements"]
    model = Drawn(case.width, case.vocabulary, case.blocks, case.beside, case.output)
    if all(parameter.numel() < least for parameter in model.parameters()):
        allowed.add("ConfigError")  # no weight is sharded: no option has an effect
    if all(outcome.error in allowed for outcome in outcomes):
        return REFUSED, outcomes[0].text
    return ERROR, f"refused, though it is supported: {_by_rank(outcomes)}"


def _by_rank(outcomes: Sequence[Outcome]) -> str:
    lines: dict[str, list[int]] = {}
    details: list[str] = []
    for rank, outcome in enumerate(outcomes):
        text = f"[{outcome.stage}] {outcome.kind} {outcome.text}"
        lines.setdefault(re.sub(rf"rank {rank}\b", "rank R", text), []).append(rank)
        if not details and outcome.kind in (ERROR, REFUSED):
            details = [f"at {' > '.join(outcome.details[-6:])}"]
        details = details or outcome.details[1:]
    text = "\n    ".join(f"ranks {ranks}: {text}" for text, ranks in lines.items())
    return "\n      ".join([text, *details])
