"""Logits beyond one rank's positions: gathered, or exchanged into shards of the vocabulary.

The vocabulary-parallel cross entropy is Megatron-LM's (arXiv 1909.08053, section 3) over the ranks
of a *sequence* group: logits ``[B, c, V]`` of one's own positions become ``[B, C, V / sp]`` of all
positions by the same all-to-all that attention uses, with the vocabulary in the place of the heads
(InternEvo's head communicator does this, arXiv 2401.09149).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.sp.exchange import Channel, exchange
from internsp.sp.heads import balanced, spans


def gather_logits(logits: Tensor, channel: Channel | None, lengths: Sequence[int]) -> Tensor:
    """``[B, c, V]`` of each rank to ``[B, C, V]`` on every rank, in the order of the ranks.

    Differentiable: gradients that several ranks give to one position are summed. Blocks.
    """
    if channel is None:
        return logits
    everything = (0, logits.shape[2]) * channel.size
    return exchange(
        logits.unsqueeze(3), channel, lengths, everything, to="heads", label="logits"
    ).squeeze(3)


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    channel: Channel,
    lengths: Sequence[int],
    ignore_index: int = -100,
) -> Tensor:
    """Cross entropy of this rank's positions, computed by all ranks on shards of the vocabulary.

    Every rank of the group must call it, also one without positions, and must run its backward.

    Args:
        logits: ``[B, c, V]`` of this rank's positions, ``c = lengths[rank]``; any float dtype.
        labels: ``[B, c]`` int64.
        lengths: positions of each rank; uneven and zero allowed.

    Returns:
        ``[B, c]`` nats in fp32 or wider, 0 where the label is ``ignore_index``. Gradients are
        right for any upstream gradient, also one that differs from token to token and from rank
        to rank. Blocks: one all-to-all and three all-reduces forward, one of each backward.
    """
    return _VocabularyCrossEntropy.apply(logits, labels, channel, tuple(lengths), ignore_index)


def _vocabulary_cut(vocabulary: int, size: int) -> tuple[int, ...]:
    """Contiguous shards of the vocabulary whose sizes differ by at most one."""
    return tuple(bound for span in spans(balanced(vocabulary, size)) for bound in span)


def _spread(mine: Tensor, channel: Channel, lengths: Sequence[int]) -> Tensor:
    """``[B, c]`` of each rank to ``[B, C]`` on every rank: a sum with zeros elsewhere, exact in
    any dtype, and unlike an all-gather at ease with uneven and empty parts."""
    whole = mine.new_zeros((mine.shape[0], sum(lengths)))
    start = sum(lengths[: channel.rank])
    whole[:, start : start + lengths[channel.rank]] = mine
    dist.all_reduce(whole, group=channel.group)
    return whole


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        channel: Channel,
        lengths: tuple[int, ...],
        ignore_index: int,
    ) -> Tensor:
        vocabulary = logits.shape[2]
        cut = _vocabulary_cut(vocabulary, channel.size)
        shard = exchange(logits.unsqueeze(3), channel, lengths, cut, to="heads", label="logits")
        shard = shard.squeeze(3).to(torch.promote_types(logits.dtype, torch.float32))
        every = _spread(labels, channel, lengths)
        first, stop = cut[2 * channel.rank : 2 * channel.rank + 2]
        counts = every != ignore_index
        here = counts & (every >= first) & (every < stop)
        at = torch.where(here, every - first, 0)

        highest = shard.new_full(every.shape, -torch.inf)
        if stop > first:
            highest = shard.amax(dim=2)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=channel.group)
        share = (shard - highest.unsqueeze(2)).exp()
        sums = torch.stack([share.sum(dim=2), torch.zeros_like(highest)])
        if stop > first:
            target = shard.gather(2, at.unsqueeze(2)).squeeze(2) - highest
            sums[1] = torch.where(here, target, 0.0)
        dist.all_reduce(sums, group=channel.group)
        losses = torch.where(counts, sums[0].log() - sums[1], 0.0)

        ctx.save_for_backward(share.div_(sums[0].unsqueeze(2)), at, here, counts)
        ctx.channel, ctx.lengths, ctx.cut, ctx.dtype = channel, lengths, cut, logits.dtype
        start = sum(lengths[: channel.rank])
        return losses[:, start : start + lengths[channel.rank]].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        share, at, here, counts = ctx.saved_tensors
        # Each rank knows only its own tokens' upstream gradients; a shard needs all of them.
        upstream = torch.where(counts, _spread(grad, ctx.channel, ctx.lengths), 0.0)
        shard = share * upstream.unsqueeze(2)
        if shard.shape[2]:
            hit = torch.where(here, upstream, 0.0)
            shard.scatter_add_(2, at.unsqueeze(2), -hit.unsqueeze(2))
        logits = exchange(
            shard.to(ctx.dtype).unsqueeze(3),
            ctx.channel,
            ctx.lengths,
            ctx.cut,
            to="sequence",
            label="logits",
            adjoint=True,
        )
        return logits.squeeze(3), None, None, None, None
