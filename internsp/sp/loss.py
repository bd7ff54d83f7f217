"""The token loss: a sum and a count, computed chunk by chunk, so that the logits of a long sequence
never exist at once. The caller divides by the valid tokens of *all* ranks (design.md 6).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from internsp.base.trace import Trace
from internsp.errors import ConfigError, LayoutError
from internsp.sp.exchange import ExchangeGroup
from internsp.sp.layout import IGNORE_INDEX, SequenceLayout
from internsp.sp.vocabulary import gather_logits, vocabulary_parallel_cross_entropy

OUTPUTS = ("local", "gather", "vocabulary")


def token_loss(
    hidden: Tensor,
    head: Any,
    labels: Tensor,
    *,
    chunk_tokens: int = 1024,
    output: str = "local",
    group: dist.ProcessGroup | None = None,
    layout: SequenceLayout | None = None,
    ignore_index: int = IGNORE_INDEX,
    trace: Trace | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of this rank's valid tokens, and their number.

    The logits of about ``chunk_tokens`` tokens exist at a time, forward and backward: each chunk is
    recomputed in backward (``torch.utils.checkpoint``). All ranks of a group run the same number
    of chunks, with empty ones where a rank has fewer positions, since a chunk may communicate.

    Args:
        hidden: ``[B, s, H]``, this rank's positions.
        head: a callable ``[B, c, H] -> [B, c, V]``, or a module with ``unshard_once()``, which
            returns such a callable and a guard; the guard is applied to the result and unshards
            the head's weight again in backward.
        labels: ``[B, s]`` int64, aligned with ``hidden``; ``ignore_index`` does not count.
        chunk_tokens: tokens of a chunk over all rows; at least one position is taken.
        output: what is done with the head's output before the loss. ``local``: nothing; ``gather``:
            it is gathered on every rank (each rank still counts its own tokens only);
            ``vocabulary``: it is exchanged into vocabulary shards, for a vocabulary-parallel loss.
        group: the sequence group; needed by ``gather`` and ``vocabulary`` (None: one rank).
        layout: gives the lengths of the ranks; None: all have ``s``.
        trace: records an ``A2A`` for each exchange of logits.

    Returns:
        The sum in nats, in ``promote_types(hidden.dtype, float32)``, and the count, int64, both
        0-dimensional. Without a valid token the sum is 0 with a graph, and its gradients are 0.

    Raises:
        ConfigError: an unknown ``output``.
        LayoutError: shapes that do not fit each other or the layout.
    """
    if output not in OUTPUTS:
        raise ConfigError(f"No head output {output!r}; choose one of {', '.join(OUTPUTS)}.")
    if labels.shape != hidden.shape[:2]:
        raise LayoutError(
            f"Labels must be [B, s] = {list(hidden.shape[:2])}, got {list(labels.shape)}."
        )
    exchange = None if output == "local" or group is None else ExchangeGroup.of(group, trace)
    if exchange is not None and exchange.size == 1:
        exchange = None
    chunks = _chunk_lengths(hidden.shape, layout, exchange, chunk_tokens)
    rank = exchange.rank if exchange is not None else 0 if layout is None else layout.rank
    project, guard = head, lambda total: total
    if hasattr(head, "unshard_once"):
        project, guard = head.unshard_once()
    mine = [lengths[rank] for lengths in chunks]
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    # split, not slices: its backward writes each gradient once.
    pieces = zip(hidden.split(mine, 1), labels.split(mine, 1), chunks, strict=True)
    for states, targets, lengths in pieces:
        run = partial(_chunk_loss, project, output, exchange, lengths, ignore_index)
        total = total + checkpoint(
            run, states, targets, use_reentrant=False, preserve_rng_state=False
        )
    return guard(total), (labels != ignore_index).sum()


def _chunk_lengths(
    shape: torch.Size,
    layout: SequenceLayout | None,
    exchange_group: ExchangeGroup | None,
    chunk_tokens: int,
) -> list[tuple[int, ...]]:
    """For each chunk, the positions of each rank; known to all ranks without communication."""
    if chunk_tokens < 1:
        raise ConfigError(f"A chunk of {chunk_tokens} tokens is empty; give 1 or more.")
    batch, length = shape[:2]
    size = exchange_group.size if exchange_group is not None else 1
    if layout is None:
        sizes: tuple[int, ...] = (length,) * size
    elif layout.sizes[layout.rank] != length or (
        exchange_group is not None and layout.size != size
    ):
        raise LayoutError(
            f"Rank {layout.rank}: hidden states of {length} positions over {size} ranks do not fit "
            f"the layout's {layout.sizes}."
        )
    else:
        sizes = layout.sizes
    step = max(1, chunk_tokens // max(batch, 1))
    count = max(1, -(-max(sizes) // step))
    return [tuple(min(max(n - i * step, 0), step) for n in sizes) for i in range(count)]


def _chunk_loss(
    project: Callable[[Tensor], Tensor],
    output: str,
    exchange_group: ExchangeGroup | None,
    lengths: tuple[int, ...],
    ignore_index: int,
    states: Tensor,
    targets: Tensor,
) -> Tensor:
    """Sum of one chunk's losses over this rank's tokens."""
    logits = project(states)
    if exchange_group is not None and output == "vocabulary":
        losses = vocabulary_parallel_cross_entropy(
            logits, targets, exchange_group, lengths, ignore_index
        )
        return losses.sum()
    if exchange_group is not None and output == "gather":
        whole = gather_logits(logits, exchange_group, lengths)
        logits = whole.split(lengths, dim=1)[exchange_group.rank]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=ignore_index
    )
