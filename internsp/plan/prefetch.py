"""Pure: which blocks a rule of the plan has a block gather ahead, in one direction.

Weights arrive in the order in which they are used, so what is named must be what comes next, in
forward or in backward, without a gap: a block behind the gap would be gathered before the one in
it, which is needed first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from internsp.config.names import matches, nearest
from internsp.errors import StructureError
from internsp.wp.schedule import BACKWARD, FORWARD

KEYS = {"forward_prefetch": FORWARD, "backward_prefetch": BACKWARD}


def ahead(
    blocks: Sequence[str], said: Sequence[Mapping[str, Any]], head: str | None
) -> dict[tuple[str, int], int]:
    """How many of those that come next each block gathers ahead, by phase and index.

    Args:
        blocks: names, in the order in which they run.
        said: what rules say of each.
        head: the head's name; it comes after the last block in forward.

    Raises:
        StructureError: a name is none of theirs, or not what comes next; or another rule gives
            the block a ``prefetch_depth``.
    """
    found = {}
    for key, phase in KEYS.items():
        for block, rules in enumerate(said):
            if key not in rules:
                continue
            if "prefetch_depth" in rules:
                raise StructureError(
                    f"weight_parallel.plan: {key} and prefetch_depth of {blocks[block]} are both "
                    "said: the second says it for both directions"
                )
            coming = [*blocks[block + 1 :], *([head] if head else [])]
            if phase == BACKWARD:
                coming = list(reversed(blocks[:block]))
            number = rules[key]
            if not isinstance(number, int):
                everything = [*blocks, *([head] if head else [])]
                number = _count(f"{key} of {blocks[block]}", number, coming, everything)
            found[phase, block] = min(number, len(coming))
    return found


def _count(
    what: str, patterns: Sequence[str], coming: Sequence[str], everything: Sequence[str]
) -> int:
    named = set()
    for pattern in patterns:
        hits = [name for name in everything if matches(name, pattern)]
        if not hits:
            near = nearest(pattern, everything)
            meant = f" (did you mean {near!r}?)" if near else f"; they are {', '.join(everything)}"
            raise StructureError(
                f"weight_parallel.plan: {what}: {pattern!r} matches no block and no head{meant}"
            )
        named.update(hits)
    wrong = [name for name in everything if name in named and name not in coming]
    if wrong:
        raise StructureError(
            f"weight_parallel.plan: {what} names {wrong[0]}, which does not come after it there: "
            f"what comes is {', '.join(coming) or 'nothing'}"
        )
    first = next((i for i, name in enumerate(coming) if name not in named), len(coming))
    if first < len(named):
        raise StructureError(
            f"weight_parallel.plan: {what} leaves out {coming[first]}, which comes before "
            f"{next(name for name in coming[first:] if name in named)} and is needed first: name "
            "it too"
        )
    return first
