"""The quantized all-gather: it sends shards as int8 or fp8 codes with one scale for each block.

A shard is split into blocks of 128 elements. Each block is sent as 8-bit codes and one scale, so
that the block's largest element gets the largest code (block-wise scaling as in ZeRO++, arXiv
2306.10209, and in the FP8 formats of arXiv 2209.05433)::

    a quantized shard:  codes of all blocks, one byte an element | scales | padding to 16 bytes

Every rank dequantizes the same bytes, also those of its own shard, so that all ranks compute with
the same values. The shard that the optimizer steps and that a checkpoint holds is never rounded.
Gradients are not quantized: the gradient of the rounded weight is used as the shard's gradient
(straight-through).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from internsp.schedule.packed import CustomAllGather, PackedShard
from internsp.schedule.quantized import BLOCK, QuantizedShard
from internsp.wp.parameter import ShardedParameter
from internsp.wp.reduce import Buffers
from internsp.wp.slots import SlotStreams

CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""By kind: dtype of the codes, and the largest code."""


class Quantizer:
    """Quantizes weights of one chunk for their all-gathers, or packs them by a user's functions.

    Args:
        kinds: by weight: ``"int8"``, ``"fp8"`` (float8_e4m3fn), or the user's functions.
        reuse: ``weight_parallel.memory_pool``.

    Attributes:
        buffers: the all-gathers' inputs and outputs, and scratch; allocated in the first step only.
    """

    def __init__(
        self,
        kinds: Mapping[ShardedParameter, str | CustomAllGather],
        device: torch.device,
        reuse: bool,
    ) -> None:
        self.weights = {
            weight: CODES[kind] if isinstance(kind, str) else kind for weight, kind in kinds.items()
        }
        self.buffers = Buffers(device, reuse)
        self._packed_shards = {
            weight: PackedShard.of(weight.name, kind, weight.layout, weight.dtype)
            for weight, kind in kinds.items()
            if isinstance(kind, CustomAllGather)
        }
        self._in_flight: dict[
            ShardedParameter,
            tuple[QuantizedShard | PackedShard, Tensor, Tensor, Tensor, SlotStreams],
        ]
        self._in_flight = {}

    def quantize(
        self, weight: ShardedParameter, shard: Tensor, slot_view: Tensor, streams: SlotStreams
    ) -> tuple[Tensor, Tensor]:
        """Quantize or pack this rank's shard; returns output and input of the all-gather.

        Both are flat and uint8.

        Args:
            shard: this rank's shard of the weight, padded, flat.
            slot_view: the weight's view of its slot, flat; :meth:`dequantize` writes it.
            streams: streams that use the slot.
        """
        kind = self.weights[weight]
        quantized: QuantizedShard | PackedShard
        if isinstance(kind, CustomAllGather):
            quantized = self._packed_shards[weight]
            sent = self._acquire(quantized.nbytes, torch.uint8)
            quantized.pack(kind, shard.view(weight.layout.shard_shape), sent)
        else:
            quantized = QuantizedShard.of(
                weight.name, weight.layout.shard_numel, weight.compute_dtype, weight.dtype
            )
            sent = self._acquire(quantized.nbytes, torch.uint8)
            self._quantize_shard(shard, quantized, sent[None], *kind)
        received = self._acquire(weight.layout.size * quantized.nbytes, torch.uint8)
        self._in_flight[weight] = (quantized, sent, received, slot_view, streams)
        return received, sent

    def dequantize(self, weight: ShardedParameter) -> None:
        """Fill the slot after the all-gather was waited for. Runs on the current stream."""
        quantized, sent, received, slot_view, streams = self._in_flight.pop(weight)
        streams.before_overwrite(weight)  # wait for readers of the slot's previous contents
        kind, pieces = self.weights[weight], received.view(-1, quantized.nbytes)
        if isinstance(quantized, PackedShard):
            assert isinstance(kind, CustomAllGather), "quantize() has packed it"
            quantized.unpack(kind, pieces, slot_view.view(len(pieces), *weight.layout.shard_shape))
        else:
            assert not isinstance(kind, CustomAllGather), "quantize() has rounded it"
            self._dequantize_shards(pieces, quantized, kind[0], slot_view)
        streams.written(weight)
        self.buffers.release(sent)
        self.buffers.release(received)

    def _quantize_shard(
        self,
        shard: Tensor,
        quantized: QuantizedShard,
        out: Tensor,
        dtype: torch.dtype,
        largest: float,
    ) -> None:
        """Round ``shard`` (flat) to codes of ``dtype`` in ``out`` ``[1, nbytes]``."""
        work, peaks, lowest = (self._acquire(n, quantized.work_dtype) for n in quantized.scratch)
        work[: quantized.numel].copy_(shard)
        work[quantized.numel :].zero_()
        rows = work.view(-1, BLOCK)
        torch.amax(rows, 1, out=peaks)  # several times as fast as aminmax or a norm
        torch.amin(rows, 1, out=lowest)
        torch.maximum(peaks, lowest.neg_(), out=peaks)
        scales = quantized.scales(out)[0]
        scales.copy_(peaks.div_(largest))
        # Divide by the scale as it is sent, with which dequantization multiplies. A block that is
        # not finite has a scale that is not finite, and stays so.
        least = torch.finfo(torch.float32).tiny
        rows.mul_(peaks.copy_(scales).clamp_(least).reciprocal_().unsqueeze(1))
        rows.clamp_(-largest, largest)  # a rounded scale may be too small
        if not dtype.is_floating_point:
            work.round_()
        quantized.codes(out, dtype)[0].copy_(work)
        for scratch in (work, peaks, lowest):
            self.buffers.release(scratch)

    @staticmethod
    def _dequantize_shards(
        received: Tensor, quantized: QuantizedShard, dtype: torch.dtype, slot_view: Tensor
    ) -> None:
        """Fill ``slot_view``, flat, from ``received`` ``[ranks, nbytes]``."""
        out = slot_view.view(len(received), quantized.numel)
        codes, scales = quantized.codes(received, dtype), quantized.scales(received)
        full = quantized.numel // BLOCK
        cut = full * BLOCK
        if full:
            blocks = out[:, :cut].unflatten(1, (full, BLOCK))
            blocks.copy_(codes[:, :cut].unflatten(1, (full, BLOCK)))
            blocks.mul_(scales[:, :full, None])
        if cut < quantized.numel:
            out[:, cut:].copy_(codes[:, cut : quantized.numel]).mul_(scales[:, full:])

    def _acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # training uses buffers that an evaluation allocates
            return self.buffers.acquire(numel, dtype)
