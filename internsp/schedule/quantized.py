"""The layout in bytes of a quantized shard, and of the buffers that its all-gather takes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from internsp.errors import ConfigError
from internsp.schedule.packed import PackedShard

BLOCK = 128
SCALES = {
    torch.bfloat16: torch.bfloat16, torch.float32: torch.float32, torch.float64: torch.float32,
}  # fmt: skip
"""Dtype of the scales by compute dtype. Without float16: small scales would underflow in it."""


@dataclass(frozen=True)
class QuantizedShard:
    """The layout in bytes of one quantized shard. Pure; a plan uses it, too.

    Attributes:
        numel: elements of the padded shard.
        scale_dtype: dtype in which the scales are sent.
        work_dtype: dtype of the computation: the shard's own, or fp32 if that is wider.
    """

    numel: int
    scale_dtype: torch.dtype
    work_dtype: torch.dtype

    @classmethod
    def of(
        cls, name: str, numel: int, compute_dtype: torch.dtype, dtype: torch.dtype
    ) -> QuantizedShard:
        """The layout for a weight ``name`` stored in ``dtype`` and used in ``compute_dtype``.

        Raises:
            ConfigError: a weight with this ``compute_dtype`` cannot be quantized.
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
        """Number of blocks of 128 elements; the last may be padded."""
        return -(-self.numel // BLOCK)

    @property
    def nbytes(self) -> int:
        """Bytes that are sent for the shard."""
        return -(-self.blocks * (BLOCK + self.scale_dtype.itemsize) // 16) * 16

    @property
    def scratch(self) -> tuple[int, int, int]:
        """Elements of three scratch buffers in ``work_dtype``: the shard, and two for scales."""
        return self.blocks * BLOCK, self.blocks, self.blocks

    def codes(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """View ``[n, blocks * 128]`` of the codes in ``sent`` ``[n, nbytes]``."""
        return sent[:, : self.blocks * BLOCK].view(dtype)

    def scales(self, sent: Tensor) -> Tensor:
        """View ``[n, blocks]`` of the scales in ``sent`` ``[n, nbytes]``."""
        start = self.blocks * BLOCK
        stop = start + self.blocks * self.scale_dtype.itemsize
        return sent[:, start:stop].view(self.scale_dtype)


def buffer_bytes(
    shards: Mapping[str, tuple[QuantizedShard | PackedShard, int]],
    gathers: Iterable[tuple[bool, str]],
) -> int:
    """Bytes of all buffers of a :class:`Quantizer`, which reuses them by size and frees none.

    Args:
        shards: by weight name: the shard's layout, and the number of ranks that send one.
        gathers: ``(starts, weight)`` in order: an all-gather is launched, or has been waited for.
    """
    live: Counter[tuple[int, torch.dtype]] = Counter()
    peak: Counter[tuple[int, torch.dtype]] = Counter()
    in_flight = set()

    def acquire(numel: int, dtype: torch.dtype) -> None:
        live[numel, dtype] += 1
        peak[numel, dtype] = max(peak[numel, dtype], live[numel, dtype])

    for starts, weight in gathers:
        if weight not in shards or starts == (weight in in_flight):
            continue
        shard, ranks = shards[weight]
        if not starts:
            in_flight.discard(weight)
            live.subtract((n * shard.nbytes, torch.uint8) for n in (1, ranks))
            continue
        in_flight.add(weight)
        acquire(shard.nbytes, torch.uint8)
        for numel in shard.scratch:
            acquire(numel, shard.work_dtype)
        live.subtract((numel, shard.work_dtype) for numel in shard.scratch)
        acquire(ranks * shard.nbytes, torch.uint8)
    return sum(count * numel * dtype.itemsize for (numel, dtype), count in peak.items())
