"""The bytes as which a shard is all-gathered, where they are not its values. Pure.

A quantized shard is split into blocks of 128 elements. Each block is sent as 8-bit codes and one
scale, so that the block's largest element gets the largest code (block-wise scaling as in ZeRO++,
arXiv 2306.10209, and in the FP8 formats of arXiv 2209.05433)::

    codes of all blocks, one byte an element | scales | padding to 16 bytes

Every rank decodes the same bytes, also those of its own shard, so that all ranks compute with the
same values. The shard that the optimizer steps and that a checkpoint holds is never rounded.
Gradients are not encoded: the gradient of the decoded weight is used as the shard's gradient
(straight-through). :mod:`internsp.schedule.packed` has a user's functions in place of the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from internsp.errors import ConfigError

BLOCK = 128
SCALES = {
    torch.bfloat16: torch.bfloat16, torch.float32: torch.float32, torch.float64: torch.float32,
}  # fmt: skip
"""Dtype of the scales by compute dtype. Without float16: small scales would underflow in it."""
CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""By kind: dtype of the codes, and the largest code."""


class Encoding(Protocol):
    """How one weight's shard becomes bytes, and the bytes of all ranks the unsharded weight."""

    @property
    def nbytes(self) -> int:
        """Bytes that are sent for the shard."""

    @property
    def scratch(self) -> Sequence[int]:
        """Elements of the scratch buffers that :meth:`encode` takes."""

    @property
    def work_dtype(self) -> torch.dtype:
        """Dtype of the scratch buffers."""

    @property
    def slot_nbytes(self) -> int | None:
        """Bytes of the unsharded weight in its slot, which :meth:`decode` gets flat; ``None``: its
        elements, in the dtype that it is used in."""

    def used_in(self, dtype: torch.dtype) -> Encoding:
        """The encoding of the same weight where autocast has it computed in ``dtype``."""

    def encode(self, shard: Tensor, sent: Tensor, scratch: Sequence[Tensor]) -> None:
        """Write ``shard`` ``[rows, ...]``, padded, as bytes into ``sent`` ``[nbytes]``."""

    def decode(self, received: Tensor, out: Tensor) -> None:
        """Fill ``out`` ``[ranks, rows, ...]`` from ``received`` ``[ranks, nbytes]``."""


@dataclass(frozen=True)
class QuantizedShard:
    """A shard as codes and scales.

    Attributes:
        name: of the weight, for errors.
        kind: a key of :data:`CODES`.
        numel: elements of the padded shard.
        work_dtype: dtype of the computation: the shard's own, or fp32 if that is wider.
        compute_dtype: dtype in which the weight is used.

    Raises:
        ConfigError: a weight with this ``compute_dtype`` cannot be quantized.
    """

    name: str
    kind: str
    numel: int
    work_dtype: torch.dtype
    compute_dtype: torch.dtype
    slot_nbytes = None

    def __post_init__(self) -> None:
        if self.compute_dtype not in SCALES:
            known = ", ".join(str(d).removeprefix("torch.") for d in SCALES)
            raise ConfigError(
                f"weight_parallel.quantize cannot take {self.name}, which computes in "
                f"{self.compute_dtype}: compute in {known}, or set "
                "weight_parallel.quantize = 'none'"
            )

    @property
    def blocks(self) -> int:
        """Number of blocks of 128 elements; the last may be padded."""
        return -(-self.numel // BLOCK)

    @property
    def nbytes(self) -> int:
        """See :class:`Encoding`."""
        return -(-self.blocks * (BLOCK + SCALES[self.compute_dtype].itemsize) // 16) * 16

    @property
    def scratch(self) -> tuple[int, int, int]:
        """The shard, and two for scales."""
        return self.blocks * BLOCK, self.blocks, self.blocks

    def used_in(self, dtype: torch.dtype) -> QuantizedShard:
        """See :class:`Encoding`. The scales depend on the dtype."""
        return self if dtype == self.compute_dtype else replace(self, compute_dtype=dtype)

    def encode(self, shard: Tensor, sent: Tensor, scratch: Sequence[Tensor]) -> None:
        """See :class:`Encoding`."""
        work, peaks, lowest = scratch
        work[: self.numel].copy_(shard.view(-1))
        work[self.numel :].zero_()
        rows = work.view(-1, BLOCK)
        torch.amax(rows, 1, out=peaks)  # several times as fast as aminmax or a norm
        torch.amin(rows, 1, out=lowest)
        torch.maximum(peaks, lowest.neg_(), out=peaks)
        codes, scales = self._views(sent)
        largest = CODES[self.kind][1]
        scales.copy_(peaks.div_(largest))
        # Divide by the scale as it is sent, with which decoding multiplies. A block that is not
        # finite has a scale that is not finite, and stays so.
        least = torch.finfo(torch.float32).tiny
        rows.mul_(peaks.copy_(scales).clamp_(least).reciprocal_().unsqueeze(1))
        rows.clamp_(-largest, largest)  # a rounded scale may be too small
        if not codes.is_floating_point():
            work.round_()
        codes.copy_(work)

    def decode(self, received: Tensor, out: Tensor) -> None:
        """See :class:`Encoding`."""
        out = out.view(len(received), self.numel)
        codes, scales = self._views(received)
        full = self.numel // BLOCK
        cut = full * BLOCK
        if full:
            blocks = out[:, :cut].unflatten(1, (full, BLOCK))
            blocks.copy_(codes[:, :cut].unflatten(1, (full, BLOCK)))
            blocks.mul_(scales[:, :full, None])
        if cut < self.numel:
            out[:, cut:].copy_(codes[:, cut : self.numel]).mul_(scales[:, full:])

    def _views(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Codes ``[..., blocks * 128]`` and scales ``[..., blocks]`` in ``sent``."""
        start, scale = self.blocks * BLOCK, SCALES[self.compute_dtype]
        stop = start + self.blocks * scale.itemsize
        return sent[..., :start].view(CODES[self.kind][0]), sent[..., start:stop].view(scale)
