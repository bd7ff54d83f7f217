"""Weights that travel as int8 or fp8 blocks with scales, and arrive in their slot decoded.

A shard is cut into blocks of 128 elements; each travels as 8-bit codes and one scale, so that the
largest element of the block is the largest code (block-wise scaling as in ZeRO++, arXiv 2306.10209,
and in the FP8 formats of arXiv 2209.05433)::

    a rank's message:   codes of all blocks, a byte an element | scales | up to a 16th byte

Every rank decodes the same bytes, its own part's too, so all ranks compute with the same values.
The shard itself, what the optimizer steps and what a checkpoint holds, is never rounded, and
gradients are not coded: that of the decoded weight is taken for the shard's own (straight through).
"""

from __future__ import annotations

import torch
from torch import Tensor

from internsp.wp.message import BLOCK, Message
from internsp.wp.shard import ShardedParameter
from internsp.wp.slots import MemoryPool
from internsp.wp.streams import SlotStreams

CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Dtype of the codes and the largest of them."""


class Codec:
    """Codes the weights of one chunk's blocks.

    Args:
        kind: ``"int8"`` or ``"fp8"`` (float8_e4m3fn).
        coded: the weights that travel so.
        reuse: ``weight_parallel.memory_pool``.

    Attributes:
        buffers: messages sent and received, and scratch: allocated in the first step only.
    """

    def __init__(
        self, kind: str, coded: frozenset[ShardedParameter], device: torch.device, reuse: bool
    ) -> None:
        self.dtype, self.largest = CODES[kind]
        self.coded = coded
        self.buffers = MemoryPool((), device, reuse)
        self._flying: dict[ShardedParameter, tuple[Message, Tensor, Tensor, Tensor, SlotStreams]]
        self._flying = {}

    def encode(
        self, weight: ShardedParameter, place: Tensor, streams: SlotStreams
    ) -> tuple[Tensor, Tensor]:
        """Where a gather of ``weight`` receives, and what it sends; both uint8, flat.

        Args:
            place: of the weight in its slot, flat: :meth:`arrived` writes it.
            streams: of that slot.
        """
        shard = weight.fresh()
        message = Message.of(
            weight.name, weight.layout.shard_numel, weight.compute_dtype, weight.dtype
        )
        sent = self._take(message.nbytes, torch.uint8)
        self._write(shard, message, sent[None])
        received = self._take(weight.layout.size * message.nbytes, torch.uint8)
        self._flying[weight] = (message, sent, received, place, streams)
        return received, sent

    def arrived(self, weight: ShardedParameter) -> None:
        """The gather has been waited for: decode into the slot. Runs on the current stream."""
        message, sent, received, place, streams = self._flying.pop(weight)
        streams.before_overwrite(weight)  # readers of what the slot held when the gather began
        self._read(received.view(-1, message.nbytes), message, self.dtype, place)
        self.buffers.give(sent)
        self.buffers.give(received)

    def _write(self, shard: Tensor, message: Message, out: Tensor) -> None:
        """Code ``shard`` (flat) into ``out`` ``[1, nbytes]``."""
        work, peaks, lowest = (self._take(n, message.work_dtype) for n in message.scratch)
        work[: message.numel].copy_(shard)
        work[message.numel :].zero_()
        rows = work.view(-1, BLOCK)
        torch.amax(rows, 1, out=peaks)  # several times as fast as aminmax or a norm
        torch.amin(rows, 1, out=lowest)
        torch.maximum(peaks, lowest.neg_(), out=peaks)
        scales = message.scales(out)[0]
        scales.copy_(peaks.div_(self.largest))
        # By what will be multiplied with: the scale as it travels. A block that is not finite has
        # a scale that is not, and stays so.
        least = torch.finfo(torch.float32).tiny
        rows.mul_(peaks.copy_(scales).clamp_(least).reciprocal_().unsqueeze(1))
        rows.clamp_(-self.largest, self.largest)  # a rounded scale may be too small
        if not self.dtype.is_floating_point:
            work.round_()
        message.codes(out, self.dtype)[0].copy_(work)
        for scratch in (work, peaks, lowest):
            self.buffers.give(scratch)

    @staticmethod
    def _read(messages: Tensor, message: Message, dtype: torch.dtype, place: Tensor) -> None:
        """Decode ``messages`` ``[ranks, nbytes]`` into ``place``, flat."""
        out = place.view(len(messages), message.numel)
        codes, scales = message.codes(messages, dtype), message.scales(messages)
        full = message.numel // BLOCK
        cut = full * BLOCK
        if full:
            blocks = out[:, :cut].unflatten(1, (full, BLOCK))
            blocks.copy_(codes[:, :cut].unflatten(1, (full, BLOCK)))
            blocks.mul_(scales[:, :full, None])
        if cut < message.numel:
            out[:, cut:].copy_(codes[:, cut : message.numel]).mul_(scales[:, full:])

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # what an evaluation makes, training uses
            return self.buffers.take(numel, dtype)
