"""How many blocks each block prefetches in one direction, as rules of the plan say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from internsp.errors import StructureError
from internsp.schedule.terms import BACKWARD, FORWARD

KEYS = {"forward_prefetch": FORWARD, "backward_prefetch": BACKWARD}


def prefetch_counts(
    blocks: Sequence[str], rule_options: Sequence[Mapping[str, Any]], head: bool
) -> dict[tuple[str, int], int]:
    """How many of the next blocks each block prefetches, by phase and block index.

    Args:
        blocks: names, in the order in which they run.
        rule_options: for each block, what rules set for it.
        head: there is a head; it comes after the last block in forward.

    Raises:
        StructureError: a rule also gives the block a ``prefetch_depth``.
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
            coming = block if phase == BACKWARD else len(blocks) - 1 - block + head
            found[phase, block] = min(rules[key], coming)
    return found
