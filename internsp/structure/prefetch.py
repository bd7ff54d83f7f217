"""Prefetch targets of each block, as rules of the plan set them for one direction. Pure.

Weights are gathered in the order in which they are used, so a rule must name the blocks that come
next, in forward or in backward, without a gap: the block behind a gap would be gathered before the
block in the gap, which is needed first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from internsp.base.names import did_you_mean, matches
from internsp.errors import StructureError
from internsp.schedule.terms import BACKWARD, FORWARD

KEYS = {"forward_prefetch": FORWARD, "backward_prefetch": BACKWARD}


def prefetch_counts(
    blocks: Sequence[str], rule_options: Sequence[Mapping[str, Any]], head: str | None
) -> dict[tuple[str, int], int]:
    """How many of the next blocks each block prefetches, by phase and block index.

    Args:
        blocks: names, in the order in which they run.
        rule_options: for each block, what rules set for it.
        head: the head's name; it comes after the last block in forward.

    Raises:
        StructureError: a pattern matches no block and no head, or blocks that are not the next
            ones; or a rule also gives the block a ``prefetch_depth``.
    """
    found = {}
    for key, phase in KEYS.items():
        for block, rules in enumerate(rule_options):
            if key not in rules:
                continue
            if "prefetch_depth" in rules:
                raise StructureError(
                    f"weight_parallel.rules: {key} and prefetch_depth of {blocks[block]} are both "
                    "set, and prefetch_depth is for both directions: leave one of them out"
                )
            coming = [*blocks[block + 1 :], *([head] if head else [])]
            if phase == BACKWARD:
                coming = list(reversed(blocks[:block]))
            number = rules[key]
            if not isinstance(number, int):
                all_names = [*blocks, *([head] if head else [])]
                number = _count(f"{key} of {blocks[block]}", number, coming, all_names)
            found[phase, block] = min(number, len(coming))
    return found


def _count(
    what: str, patterns: Sequence[str], coming: Sequence[str], all_names: Sequence[str]
) -> int:
    named = set()
    for pattern in patterns:
        hits = [name for name in all_names if matches(name, pattern)]
        if not hits:
            meant = did_you_mean(pattern, all_names) or f"; they are {', '.join(all_names)}"
            raise StructureError(
                f"weight_parallel.rules: {what}: {pattern!r} matches no block and no head{meant}"
            )
        named.update(hits)
    wrong = [name for name in all_names if name in named and name not in coming]
    if wrong:
        raise StructureError(
            f"weight_parallel.rules: {what} names {wrong[0]}, which does not come after it there: "
            f"what comes is {', '.join(coming) or 'nothing'}"
        )
    first = next((i for i, name in enumerate(coming) if name not in named), len(coming))
    if first < len(named):
        raise StructureError(
            f"weight_parallel.rules: {what} leaves out {coming[first]}, which comes before "
            f"{next(name for name in coming[first:] if name in named)} and is needed first: name "
            "it too"
        )
    return first
