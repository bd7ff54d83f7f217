"""The quantized all-gather: shards travel as int8 or fp8 codes with scales, one for each block.

A shard is cut into blocks of 128 elements; each travels as 8-bit codes and one scale, so that the
largest element of the block is the largest code (block-wise scaling as in ZeRO++, arXiv 2306.10209,
and in the FP8 formats of arXiv 2209.05433)::

    a quantized shard:  codes of all blocks, a byte an element | scales | up to a 16th byte

Every rank dequantizes the same bytes, its own shard's too, so all ranks compute with the same
values. The shard itself, what the optimizer steps and what a checkpoint holds, is never rounded,
and gradients are not quantized: that of the rounded weight is taken for the shard's own (straight
through).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from internsp.errors import ConfigError
from internsp.packed import OwnGather, PackedShard
from internsp.wp.parameter import ShardedParameter
from internsp.wp.reduce import Buffers
from internsp.wp.slots import SlotStreams

BLOCK = 128
SCALES = {
    torch.bfloat16: torch.bfloat16, torch.float32: torch.float32, torch.float64: torch.float32,
}  # fmt: skip
"""Dtype of the scales by compute dtype; float16 is missing: a scale of its range would vanish."""


@dataclass(frozen=True)
class QuantizedShard:
    """Pure: what one shard travels as, as a plan counts it.

    Attributes:
        numel: elements of the padded shard.
        scale_dtype: what scales travel in.
        work_dtype: what is computed in: the shard's own, or fp32.
    """

    numel: int
    scale_dtype: torch.dtype
    work_dtype: torch.dtype

    @classmethod
    def of(
        cls, name: str, numel: int, compute_dtype: torch.dtype, dtype: torch.dtype
    ) -> QuantizedShard:
        """Of a weight that is stored in ``dtype`` and computes in ``compute_dtype``.

        Raises:
            ConfigError: that dtype cannot be quantized.
        """
        if compute_dtype not in SCALES:
            known = ", ".join(str(d).removeprefix("torch.") for d in SCALES)
            raise ConfigError(
                f"weight_parallel.quantize cannot take {name}, which computes in {compute_dtype}: "
                f"compute in {known}, or set weight_parallel.quantize = 'none'"
            )
        return cls(numel, SCALES[compute_dtype], torch.promote_types(dtype, torch.float32))

    @property
    def blocks(self) -> int:
        """Of 128 elements; the last may be padded."""
        return -(-self.numel // BLOCK)

    @property
    def nbytes(self) -> int:
        """That travel."""
        return -(-self.blocks * (BLOCK + self.scale_dtype.itemsize) // 16) * 16

    @property
    def scratch(self) -> tuple[int, int, int]:
        """Elements of three buffers in the working dtype: the shard, and two for its scales."""
        return self.blocks * BLOCK, self.blocks, self.blocks

    def codes(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """``[n, blocks * 128]`` of ``sent`` ``[n, nbytes]``, a view."""
        return sent[:, : self.blocks * BLOCK].view(dtype)

    def scales(self, sent: Tensor) -> Tensor:
        """``[n, blocks]`` of ``sent`` ``[n, nbytes]``, a view."""
        start = self.blocks * BLOCK
        stop = start + self.blocks * self.scale_dtype.itemsize
        return sent[:, start:stop].view(self.scale_dtype)


def buffer_bytes(
    shards: Mapping[str, tuple[QuantizedShard | PackedShard, int]],
    gathers: Iterable[tuple[bool, str]],
) -> int:
    """Bytes of all buffers that a :class:`Quantizer` ever has at once: it keeps them, by size.

    Args:
        shards: by weight, with the ranks that send them.
        gathers: ``(starts, weight)`` in order; what does not start has been waited for.
    """
    live: Counter[tuple[int, torch.dtype]] = Counter()
    most: Counter[tuple[int, torch.dtype]] = Counter()
    flying = set()

    def take(numel: int, dtype: torch.dtype) -> None:
        live[numel, dtype] += 1
        most[numel, dtype] = max(most[numel, dtype], live[numel, dtype])

    for starts, weight in gathers:
        if weight not in shards or starts == (weight in flying):
            continue
        shard, ranks = shards[weight]
        if not starts:
            flying.discard(weight)
            live.subtract((n * shard.nbytes, torch.uint8) for n in (1, ranks))
            continue
        flying.add(weight)
        take(shard.nbytes, torch.uint8)
        for numel in shard.scratch:
            take(numel, shard.work_dtype)
        live.subtract((numel, shard.work_dtype) for numel in shard.scratch)
        take(ranks * shard.nbytes, torch.uint8)
    return sum(count * numel * dtype.itemsize for (numel, dtype), count in most.items())


CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Dtype of the codes and the largest of them."""


class Quantizer:
    """Rounds weights of one chunk for their all-gathers, or packs them as a user's functions do.

    Args:
        kinds: for each weight that travels so ``"int8"`` or ``"fp8"`` (float8_e4m3fn), or the
            user's functions.
        reuse: ``weight_parallel.memory_pool``.

    Attributes:
        buffers: quantized shards sent and received, and scratch: allocated in the first step only.
    """

    def __init__(
        self,
        kinds: Mapping[ShardedParameter, str | OwnGather],
        device: torch.device,
        reuse: bool,
    ) -> None:
        self.weights = {
            weight: CODES[kind] if isinstance(kind, str) else kind for weight, kind in kinds.items()
        }
        self.buffers = Buffers(device, reuse)
        self._packed = {
            weight: PackedShard.of(weight.name, kind, weight.layout, weight.dtype)
            for weight, kind in kinds.items()
            if isinstance(kind, OwnGather)
        }
        self._flying: dict[
            ShardedParameter,
            tuple[QuantizedShard | PackedShard, Tensor, Tensor, Tensor, SlotStreams],
        ]
        self._flying = {}

    def quantize(
        self, weight: ShardedParameter, shard: Tensor, place: Tensor, streams: SlotStreams
    ) -> tuple[Tensor, Tensor]:
        """Where a gather of ``weight`` receives, and what it sends; both uint8, flat.

        Args:
            shard: the weight's own, padded, flat.
            place: of the weight in its slot, flat: :meth:`dequantize` writes it.
            streams: of that slot.
        """
        kind = self.weights[weight]
        quantized: QuantizedShard | PackedShard
        if isinstance(kind, OwnGather):
            quantized = self._packed[weight]
            sent = self._take(quantized.nbytes, torch.uint8)
            quantized.pack(kind, shard.view(weight.layout.shard_shape), sent)
        else:
            quantized = QuantizedShard.of(
                weight.name, weight.layout.shard_numel, weight.compute_dtype, weight.dtype
            )
            sent = self._take(quantized.nbytes, torch.uint8)
            self._write(shard, quantized, sent[None], *kind)
        received = self._take(weight.layout.size * quantized.nbytes, torch.uint8)
        self._flying[weight] = (quantized, sent, received, place, streams)
        return received, sent

    def dequantize(self, weight: ShardedParameter) -> None:
        """The all-gather has been waited for: fill the slot. Runs on the current stream."""
        quantized, sent, received, place, streams = self._flying.pop(weight)
        streams.before_overwrite(weight)  # readers of what the slot held when the gather began
        kind, pieces = self.weights[weight], received.view(-1, quantized.nbytes)
        if isinstance(quantized, PackedShard):
            assert isinstance(kind, OwnGather), "quantize() has packed it"
            quantized.unpack(kind, pieces, place.view(len(pieces), *weight.layout.shard_shape))
        else:
            assert not isinstance(kind, OwnGather), "quantize() has rounded it"
            self._read(pieces, quantized, kind[0], place)
        self.buffers.give(sent)
        self.buffers.give(received)

    def _write(
        self,
        shard: Tensor,
        quantized: QuantizedShard,
        out: Tensor,
        dtype: torch.dtype,
        largest: float,
    ) -> None:
        """Round ``shard`` (flat) to codes of ``dtype`` in ``out`` ``[1, nbytes]``."""
        work, peaks, lowest = (self._take(n, quantized.work_dtype) for n in quantized.scratch)
        work[: quantized.numel].copy_(shard)
        work[quantized.numel :].zero_()
        rows = work.view(-1, BLOCK)
        torch.amax(rows, 1, out=peaks)  # several times as fast as aminmax or a norm
        torch.amin(rows, 1, out=lowest)
        torch.maximum(peaks, lowest.neg_(), out=peaks)
        scales = quantized.scales(out)[0]
        scales.copy_(peaks.div_(largest))
        # By what will be multiplied with: the scale as it travels. A block that is not finite has
        # a scale that is not, and stays so.
        least = torch.finfo(torch.float32).tiny
        rows.mul_(peaks.copy_(scales).clamp_(least).reciprocal_().unsqueeze(1))
        rows.clamp_(-largest, largest)  # a rounded scale may be too small
        if not dtype.is_floating_point:
            work.round_()
        quantized.codes(out, dtype)[0].copy_(work)
        for scratch in (work, peaks, lowest):
            self.buffers.give(scratch)

    @staticmethod
    def _read(
        received: Tensor, quantized: QuantizedShard, dtype: torch.dtype, place: Tensor
    ) -> None:
        """Fill ``place``, flat, from ``received`` ``[ranks, nbytes]``."""
        out = place.view(len(received), quantized.numel)
        codes, scales = quantized.codes(received, dtype), quantized.scales(received)
        full = quantized.numel // BLOCK
        cut = full * BLOCK
        if full:
            blocks = out[:, :cut].unflatten(1, (full, BLOCK))
            blocks.copy_(codes[:, :cut].unflatten(1, (full, BLOCK)))
            blocks.mul_(scales[:, :full, None])
        if cut < quantized.numel:
            out[:, cut:].copy_(codes[:, cut : quantized.numel]).mul_(scales[:, full:])

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # what an evaluation makes, training uses
            return self.buffers.take(numel, dtype)
