"""Convert a mask rule of ``transformers`` to :class:`internsp.sp.ranges.MaskSpec`, if it is known.

``transformers`` defines a mask as a function of positions (``masking_utils``), composed of a few
functions. Those that ring attention supports are recognized here by identity; for any other rule
the mask itself is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor

from internsp.sp.ranges import MaskSpec

Rows = tuple[tuple[int, ...], ...]
"""Per row, the lengths of its documents; only one row where all rows are equal."""


def mask_spec_of(rule: Callable[..., Any], documents: Rows | None) -> MaskSpec | None:
    """The mask spec of a mask rule, within documents; None: the rule is not known."""
    from transformers import masking_utils

    if documents is None:
        return None
    if rule is masking_utils.causal_mask_function:
        return MaskSpec(True, None, documents)
    if rule is masking_utils.bidirectional_mask_function:
        return MaskSpec(False, None, documents)
    pieces = _closure_of(rule, "and_masks").get("mask_functions", ())
    if len(pieces) == 2 and pieces[1] is masking_utils.causal_mask_function:
        window = _closure_of(pieces[0], "sliding_window_overlay").get("sliding_window")
        if isinstance(window, int) and window > 0:
            return MaskSpec(True, window, documents)
    return None


def _closure_of(function: Any, maker: str) -> dict[str, Any]:
    """The closure of a function made by the ``transformers`` function ``maker``; else empty."""
    from_transformers = getattr(function, "__module__", "") == "transformers.masking_utils"
    if not from_transformers or not function.__qualname__.startswith(f"{maker}.<locals>."):
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)


def documents_of(
    packed: Tensor | None, mask: Any, length: int, counted: Tensor | None = None
) -> Rows | None:
    """The documents between which attention never crosses.

    Args:
        packed: ``[B, S]``, the number of each position's document, or None.
        mask: the user's ``attention_mask``, or None. Padding before or after a row's tokens becomes
            a document of its own, if no output there counts.
        counted: ``[B, S]``, positions whose outputs count; None: all positions.

    Returns:
        The documents, or None if the mask has another form.
    """
    if packed is not None:
        return _deduplicate(_run_lengths(row) for row in packed.tolist())
    if mask is None:
        return ((length,),)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    padding = mask == 0
    if bool((padding if counted is None else padding & counted).any()):
        return None
    rows = (mask != 0).tolist()
    if any(sum(a < b for a, b in pairwise([False, *row])) > 1 for row in rows):
        return None  # tokens on both sides of padding see each other
    return _deduplicate(_run_lengths(row) for row in rows)


def _run_lengths(row: list[Any]) -> tuple[int, ...]:
    """Lengths of the runs of equal values in a row."""
    edges = [0, *(i for i in range(1, len(row)) if row[i] != row[i - 1]), len(row)]
    return tuple(b - a for a, b in pairwise(edges))


def _deduplicate(rows: Any) -> Rows:
    found = tuple(rows)
    return found[:1] if len(set(found)) == 1 else found
