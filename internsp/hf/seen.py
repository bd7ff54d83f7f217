"""What a mask rule of ``transformers`` says, as :class:`internsp.sp.ranges.Seen`, if it is known.

``transformers`` states a mask as a function of positions (``masking_utils``), built of few pieces.
Those that a kernel over ranges of positions has, too, are recognized here by what they are; any
other rule is None, and is then computed as the mask that it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor

from internsp.sp.ranges import Seen

Rows = tuple[tuple[int, ...], ...]
"""Per row, the lengths of its documents; of one row where all are alike."""


def seen_by(rule: Callable[..., Any], documents: Rows | None) -> Seen | None:
    """What a query sees by a mask rule, within its document; None: a rule of another kind."""
    from transformers import masking_utils

    if documents is None:
        return None
    if rule is masking_utils.causal_mask_function:
        return Seen(True, None, documents)
    if rule is masking_utils.bidirectional_mask_function:
        return Seen(False, None, documents)
    pieces = _held(rule, "and_masks").get("mask_functions", ())
    if len(pieces) == 2 and pieces[1] is masking_utils.causal_mask_function:
        window = _held(pieces[0], "sliding_window_overlay").get("sliding_window")
        if isinstance(window, int) and window > 0:
            return Seen(True, window, documents)
    return None


def _held(function: Any, maker: str) -> dict[str, Any]:
    """What a function that ``maker`` of ``transformers`` has made holds; empty for any other."""
    home = getattr(function, "__module__", "") == "transformers.masking_utils"
    if not home or not function.__qualname__.startswith(f"{maker}.<locals>."):
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)


def documents_of(
    packed: Tensor | None, mask: Any, length: int, counted: Tensor | None = None
) -> Rows | None:
    """The documents between which attention never crosses.

    Args:
        packed: ``[B, S]``, the number of each position's document, or None.
        mask: what the user gave as ``attention_mask``, or None. Padding before or behind a row's
            tokens is then a document of its own, if nothing that is computed there counts.
        counted: ``[B, S]``, positions whose outputs count; None: all do.

    Returns:
        None where a mask is not of that form.
    """
    if packed is not None:
        return _alike(_runs(row) for row in packed.tolist())
    if mask is None:
        return ((length,),)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    padding = mask == 0
    if bool((padding if counted is None else padding & counted).any()):
        return None
    rows = (mask != 0).tolist()
    if any(sum(a < b for a, b in pairwise([False, *row])) > 1 for row in rows):
        return None  # tokens on both sides of a hole see each other
    return _alike(_runs(row) for row in rows)


def _runs(row: list[Any]) -> tuple[int, ...]:
    """Lengths of the runs of equal values."""
    edges = [0, *(i for i in range(1, len(row)) if row[i] != row[i - 1]), len(row)]
    return tuple(b - a for a, b in pairwise(edges))


def _alike(rows: Any) -> Rows:
    found = tuple(rows)
    return found[:1] if len(set(found)) == 1 else found
