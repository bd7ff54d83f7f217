"""Full accumulation: whole gradients summed on this rank, reduced once for several micro-batches.

The other form, sharded accumulation, reduces every micro-batch's gradients and keeps sums of the
size of a shard. Full accumulation sends as many times less as there are micro-batches, for the
memory of every whole gradient in fp32 or wider (``no_sync`` of torch's DDP).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from internsp.wp.pool import MemoryPool, Unit
from internsp.wp.shard import ShardedWeight


class WholeGradients:
    """Sums of whole gradients that no reduction has taken yet, in the order of their first birth.

    That order is the declared one on every rank (WP-2), since a weight without a gradient takes
    its place too.

    Args:
        pool: where the sums lie; its buffers serve every step anew.
    """

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self._sums: dict[ShardedWeight, tuple[Unit, Tensor | None]] = {}

    def __contains__(self, weight: ShardedWeight) -> bool:
        return weight in self._sums

    def __len__(self) -> int:
        return len(self._sums)

    def __iter__(self) -> Iterator[tuple[Unit, ShardedWeight]]:
        return iter([(unit, weight) for weight, (unit, _) in self._sums.items()])

    @property
    def nbytes(self) -> int:
        """Bytes of the sums that exist now."""
        sums = [total for _, total in self._sums.values() if total is not None]
        return sum(total.numel() * total.element_size() for total in sums)

    def add(self, unit: Unit, weight: ShardedWeight, gradient: Tensor | None) -> None:
        """Add a whole gradient; ``None`` stands for zeros. No message."""
        _, total = self._sums.get(weight, (unit, None))
        if gradient is not None:
            if total is None:
                wide = torch.promote_types(weight.compute_dtype, torch.float32)
                total = self._pool.take(weight.layout.padded_numel, wide)
                weight.layout.pack(gradient, total)
            else:
                weight.layout.add(gradient, total)
        self._sums[weight] = (unit, total)

    def take(self, weight: ShardedWeight, gradient: Tensor | None) -> Tensor | None:
        """The sum with ``gradient`` added, as it travels: flat, padded, as it is sent.

        A buffer of the pool, which the caller gives back; ``None``: nobody had a gradient.
        """
        self.add(self._sums[weight][0], weight, gradient)
        total = self._sums.pop(weight)[1]
        if total is None or total.dtype == weight.reduce_dtype:
            return total
        packed = self._pool.take(total.numel(), weight.reduce_dtype)
        packed.copy_(total)  # rounded once, as a gradient of one micro-batch is
        self._pool.give(total)
        return packed

    def drop(self, weight: ShardedWeight) -> None:
        """Make ``weight``'s sum zeros: its place in the order stays (WP-2)."""
        if weight in self._sums:
            unit, total = self._sums[weight]
            if total is not None:
                self._pool.give(total)
            self._sums[weight] = (unit, None)

    def discard(self) -> None:
        """Forget every sum."""
        for _, total in self._sums.values():
            if total is not None:
                self._pool.give(total)
        self._sums.clear()
