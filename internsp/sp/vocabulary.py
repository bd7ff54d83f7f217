"""Logits of all ranks' positions: gathered, or exchanged into shards of the vocabulary.

The vocabulary-parallel cross entropy is Megatron-LM's (arXiv 1909.08053, section 3), here over the
ranks of a *sequence* group: logits ``[B, c, V]`` of a rank's own positions become
``[B, C, V / sp]`` of all positions by the all-to-all of attention, with the vocabulary as the heads
(InternEvo's head communicator does this, arXiv 2401.09149).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.sp.exchange import ExchangeGroup, gather_positions, start_exchange
from internsp.sp.heads import even_sizes, spans


def gather_logits(logits: Tensor, group: ExchangeGroup, lengths: Sequence[int]) -> Tensor:
    """Gather ``[B, c, V]`` of each rank into ``[B, C, V]`` on every rank, in rank order.

    Differentiable: the gradients of one position from several ranks are summed. Blocks.
    """
    return gather_positions(logits.unsqueeze(3), group, lengths, label="logits").squeeze(3)


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: ExchangeGroup,
    lengths: Sequence[int],
    ignore_index: int = -100,
) -> Tensor:
    """Cross entropy of this rank's positions, computed by all ranks on shards of the vocabulary.

    Every rank of the group must call it and run its backward, also a rank without positions.

    Args:
        logits: ``[B, c, V]`` of this rank's positions, ``c = lengths[rank]``; any float dtype.
        labels: ``[B, c]`` int64.
        lengths: positions of each rank; uneven and zero allowed.

    Returns:
        ``[B, c]`` nats in fp32 or wider, 0 where the label is ``ignore_index``. Gradients are
        correct for any upstream gradient, also one that differs between tokens and between ranks.
        Blocks: one all-to-all and three all-reduces in forward, one of each in backward.
    """
    return _VocabularyCrossEntropy.apply(logits, labels, group, tuple(lengths), ignore_index)


def _gather_rows(own: Tensor, group: ExchangeGroup, lengths: Sequence[int]) -> Tensor:
    """Gather ``[B, c]`` of each rank into ``[B, C]`` on every rank.

    By an all-reduce in which other ranks' positions are zero: exact in any dtype, and unlike an
    all-gather it allows uneven and empty parts.
    """
    whole = own.new_zeros((own.shape[0], sum(lengths)))
    start = sum(lengths[: group.rank])
    whole[:, start : start + lengths[group.rank]] = own
    group.all_reduce(whole, "rows of the loss")
    return whole


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: ExchangeGroup,
        lengths: tuple[int, ...],
        ignore_index: int,
    ) -> Tensor:
        # Shards of the vocabulary, whose sizes differ by at most one, in place of heads.
        head_ranges = tuple((span,) for span in spans(even_sizes(logits.shape[2], group.size)))
        shard = start_exchange(
            logits.unsqueeze(3), group, lengths, head_ranges, to="heads", label="logits"
        ).wait()
        shard = shard.squeeze(3).to(torch.promote_types(logits.dtype, torch.float32))
        all_labels = _gather_rows(labels, group, lengths)
        ((first, stop),) = head_ranges[group.rank]
        valid = all_labels != ignore_index
        in_shard = valid & (all_labels >= first) & (all_labels < stop)
        index = torch.where(in_shard, all_labels - first, 0)

        maximum = shard.new_full(all_labels.shape, -torch.inf)
        if stop > first:
            maximum = shard.amax(dim=2)
        group.all_reduce(maximum, "maxima of the logits", dist.ReduceOp.MAX)
        probabilities = (shard - maximum.unsqueeze(2)).exp()
        sums = torch.stack([probabilities.sum(dim=2), torch.zeros_like(maximum)])
        if stop > first:
            target = shard.gather(2, index.unsqueeze(2)).squeeze(2) - maximum
            sums[1] = torch.where(in_shard, target, 0.0)
        group.all_reduce(sums, "sums of the loss")
        losses = torch.where(valid, sums[0].log() - sums[1], 0.0)

        ctx.save_for_backward(probabilities.div_(sums[0].unsqueeze(2)), index, in_shard, valid)
        ctx.group, ctx.lengths = group, lengths
        ctx.head_ranges, ctx.dtype = head_ranges, logits.dtype
        start = sum(lengths[: group.rank])
        return losses[:, start : start + lengths[group.rank]].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        probabilities, index, in_shard, valid = ctx.saved_tensors
        # Each rank has the upstream gradients of its own tokens; a shard needs those of all tokens.
        upstream = torch.where(valid, _gather_rows(grad, ctx.group, ctx.lengths), 0.0)
        shard = probabilities * upstream.unsqueeze(2)
        if shard.shape[2]:
            target_grad = torch.where(in_shard, upstream, 0.0)
            shard.scatter_add_(2, index.unsqueeze(2), -target_grad.unsqueeze(2))
        logits = start_exchange(
            shard.to(ctx.dtype).unsqueeze(3), ctx.group, ctx.lengths, ctx.head_ranges,
            to="sequence", label="logits", adjoint=True,
        ).wait()  # fmt: skip
        return logits.squeeze(3), None, None, None, None
