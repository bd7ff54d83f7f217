"""Pure: one coded shard as it travels (:mod:`internsp.wp.codec`), as a plan counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from internsp.errors import ConfigError

BLOCK = 128
SCALES = {
    torch.bfloat16: torch.bfloat16, torch.float32: torch.float32, torch.float64: torch.float32,
}  # fmt: skip
"""Dtype of the scales by compute dtype; float16 is missing: a scale of its range would vanish."""


@dataclass(frozen=True)
class Message:
    """Pure: one coded shard, as a plan counts it.

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
    ) -> Message:
        """Of a weight that is stored in ``dtype`` and computes in ``compute_dtype``.

        Raises:
            ConfigError: that dtype cannot be coded.
        """
        if compute_dtype not in SCALES:
            known = ", ".join(str(d).removeprefix("torch.") for d in SCALES)
            raise ConfigError(
                f"weight_parallel.codec cannot code {name}, which computes in {compute_dtype}: "
                f"compute in {known}, or set weight_parallel.codec = 'none'"
            )
        return cls(numel, SCALES[compute_dtype], torch.promote_types(dtype, torch.float32))

    @property
    def blocks(self) -> int:
        """Of 128 elements; the last may be padded."""
        return -(-self.numel // BLOCK)

    @property
    def nbytes(self) -> int:
        """Of the message."""
        return -(-self.blocks * (BLOCK + self.scale_dtype.itemsize) // 16) * 16

    @property
    def scratch(self) -> tuple[int, int, int]:
        """Elements of three buffers in the working dtype: the shard, and two for its scales."""
        return self.blocks * BLOCK, self.blocks, self.blocks

    def codes(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """``[n, blocks * 128]`` of ``messages`` ``[n, nbytes]``, a view."""
        return messages[:, : self.blocks * BLOCK].view(dtype)

    def scales(self, messages: Tensor) -> Tensor:
        """``[n, blocks]`` of ``messages`` ``[n, nbytes]``, a view."""
        start = self.blocks * BLOCK
        stop = start + self.blocks * self.scale_dtype.itemsize
        return messages[:, start:stop].view(self.scale_dtype)


def buffer_bytes(
    messages: Mapping[str, tuple[Message, int]], gathers: Iterable[tuple[bool, str]]
) -> int:
    """Bytes of all buffers that a codec ever has at once: it keeps them, by size.

    Args:
        messages: by weight, with the ranks that send them.
        gathers: ``(starts, weight)`` in order; what does not start has been waited for.
    """
    live: Counter[tuple[int, torch.dtype]] = Counter()
    most: Counter[tuple[int, torch.dtype]] = Counter()
    flying = set()

    def take(numel: int, dtype: torch.dtype) -> None:
        live[numel, dtype] += 1
        most[numel, dtype] = max(most[numel, dtype], live[numel, dtype])

    for starts, weight in gathers:
        if weight not in messages or starts == (weight in flying):
            continue
        message, ranks = messages[weight]
        if not starts:
            flying.discard(weight)
            live.subtract((n * message.nbytes, torch.uint8) for n in (1, ranks))
            continue
        flying.add(weight)
        take(message.nbytes, torch.uint8)
        for numel in message.scratch:
            take(numel, message.work_dtype)
        live.subtract((numel, message.work_dtype) for numel in message.scratch)
        take(ranks * message.nbytes, torch.uint8)
    return sum(count * numel * dtype.itemsize for (numel, dtype), count in most.items())
