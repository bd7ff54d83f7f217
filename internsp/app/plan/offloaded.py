"""Host memory of offloaded weights on one rank, and their staging memory on the device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from internsp.base.host import ACTIVATIONS, GRADIENTS, OPTIMIZER, PIECE_BYTES, WEIGHTS, pinned_bytes
from internsp.mesh.shape import MeshShape
from internsp.schedule.chunk import ChunkLayout, WeightLayout
from internsp.schedule.layout import laid_out

HOSTED = {
    WEIGHTS: "host: weight shards (exact)",
    GRADIENTS: "host: gradient sums (exact)",
    OPTIMIZER: "host: optimizer state (exact)",
    ACTIVATIONS: "host: activations (exact)",
}
STAGED = "offloaded shards, to be cast (exact)"
PASSING = "offloaded, passing the device (at most)"
IN_FLIGHT = 2  # exchanges of buckets between replicas: see ``internsp.optim.reduction``
STEPPING = "offloaded, passing in the optimizer's step (at most)"
AT_STEP = "at work in the optimizer's step (at most)"


@dataclass(frozen=True)
class OffloadedMemory:
    """Memory of one chunk's offloaded shards, gradient sums and optimizer state, on one rank.

    Attributes:
        shards: bytes of the shards (unpadded) of the weights that offload each kind of state.
        host: bytes in host memory, by kind of state.
        staged: bytes on the device of shards that are cast or quantized there.
        passing: upper bound of bytes on the device of copies to and from the host.
        stepping: the same in the optimizer's step, when there are no activations.
    """

    shards: dict[str, int]
    host: dict[str, int]
    staged: int
    passing: int
    stepping: int

    @classmethod
    def of(
        cls, chunk: ChunkLayout, shape: MeshShape, moments: int, micro_batches: int, device: str
    ) -> OffloadedMemory:
        """The memory with a ``ZeroOptimizer`` that keeps ``moments`` values for each element."""
        taken = pinned_bytes if device != "cpu" else int
        weights = [w for unit in chunk.units for w in unit.weights]
        kinds = [kind for kind in HOSTED if kind != ACTIVATIONS]
        shards = {kind: sum(w.shard_bytes for w in weights if kind in w.offload) for kind in kinds}
        host = dict.fromkeys(kinds, 0)
        host[WEIGHTS] = sum(taken(w.shard_bytes) for w in weights if w.hosted and not w.trainable)
        stepping = published = 0
        for bucket in buckets(chunk):
            first, zero = bucket[0], shape.axis(bucket[0].expert).zero
            numels = [w.shard_bytes // w.dtypes.shard.itemsize for w in bucket]
            length = laid_out(numels, first.dtypes.shard.itemsize, zero)[1]
            size, wide = first.dtypes.shard.itemsize, _wide(first.dtypes.shard)
            copied = wide > size  # 16-bit weights have master values
            state = wide * (moments + copied) if OPTIMIZER in first.offload else 0
            sums = wide if GRADIENTS in first.offload else 0
            host[WEIGHTS] += taken(length * zero * size) if first.hosted else 0
            host[OPTIMIZER] += taken(length * wide) * (state // wide)
            host[GRADIENTS] += taken(length * sums)
            # An element in the step: state, gradient, and the weight before and after the step.
            one = state + sums + (2 * size if first.hosted else 0)
            piece = min(length, max(PIECE_BYTES // wide, *numels))
            stepping = max(stepping, 3 * one * piece if first.offload else 0)
            if first.hosted and zero > 1:
                published = max(published, 2 * length * zero * size)
        summed = [w for w in weights if w.trainable and GRADIENTS in w.offload]
        sizes = [
            w.shard_bytes // w.dtypes.shard.itemsize * _wide(w.dtypes.reduce or w.dtypes.shard)
            for w in summed
        ]
        host[GRADIENTS] += sum(map(taken, sizes))
        # One sum is added to, one is being copied, one is copied and freed when the next starts.
        passing = published + 3 * max(sizes, default=0)
        if chunk.policy.accumulate_whole and micro_batches > 1:
            host[GRADIENTS] += sum(taken(w.sum_bytes) for w in summed)
            passing += 3 * sum({w.sum_bytes for w in summed})  # buffers are pooled by size
        staged = max((w.shard_bytes for w in weights if w.hosted and _staged(w)), default=0)
        return cls(shards, host, staged, passing, stepping)

    def rows(self) -> list[tuple[str, int]]:
        """(component, bytes): on the device, then on the host; no rows if nothing is offloaded."""
        if not any(self.shards.values()):
            return []
        host = [(HOSTED[what], nbytes) for what, nbytes in self.host.items()]
        away = [(PASSING, self.passing), (STEPPING, self.stepping)]
        return [(STAGED, self.staged), *away, *host]


def with_sums(memory: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """``memory`` with the device's sum after the device's components, and the host's sum last."""
    host = [row for row in memory if row[0] in HOSTED.values()]
    device = [row for row in memory if row not in host]
    rows = [*device, ("sum", sum(nbytes for _, nbytes in device)), *host]
    return [*rows, ("host: sum", sum(nbytes for _, nbytes in host))] if host else rows


def exchange_buffer_bytes(chunk: ChunkLayout, shape: MeshShape) -> int:
    """Upper bound of the buffers in which replicas send gradient sums to the ranks that own them.

    Buffers are kept: two exchanges are in flight, with two buffers each.
    """
    found: dict[tuple[int, int], int] = {}
    for bucket in buckets(chunk):
        first, zero = bucket[0], shape.axis(bucket[0].expert).zero
        numels = [w.shard_bytes // w.dtypes.shard.itemsize for w in bucket]
        length = laid_out(numels, first.dtypes.shard.itemsize, zero)[1] * zero
        key = length, _wide(first.dtypes.shard)
        if zero > 1:
            found[key] = 2 * min(found.get(key, 0) // 2 + 1, IN_FLIGHT)
    return sum(length * size * count for (length, size), count in found.items())


def stepping_bytes(chunk: ChunkLayout, shape: MeshShape) -> int:
    """Most bytes that a bucket on the device needs at once where its sums become one gradient, if
    it has one owner, and where its owner compares 16-bit weights with their masters: equal or not,
    and a wide copy."""
    most = 0
    for bucket in buckets(chunk):
        size, wide = bucket[0].dtypes.shard.itemsize, _wide(bucket[0].dtypes.shard)
        zero = shape.axis(bucket[0].expert).zero
        elements = sum(w.shard_bytes for w in bucket) // size
        if OPTIMIZER not in bucket[0].offload:
            packed = elements * wide if zero == 1 else 0
            compared = -(-elements // zero) * (wide + 1) if wide > size else 0
            most = max(most, packed, compared)
    return most


def backward_sums(weights: Iterable[WeightLayout]) -> int:
    """Bytes on the device of the gradients' sums after one backward: in fp32 or wider, but in a
    weight group of one autograd's own (:meth:`internsp.wp.reduced.ReducedGradient.borrow`)."""
    found = 0
    for weight in weights:
        dtypes = weight.dtypes
        computed = dtypes.gather or dtypes.shard
        own = weight.reduce_bytes == 0 and not weight.coalesced
        if weight.trainable and GRADIENTS not in weight.offload:
            own &= dtypes.reduce in (None, computed)
            size = computed.itemsize if own else _wide(dtypes.shard)
            found += weight.shard_bytes // dtypes.shard.itemsize * size
    return found


def buckets(chunk: ChunkLayout) -> Iterator[Sequence[WeightLayout]]:
    """Weights of each bucket of a ``ZeroOptimizer``; see ``internsp.optim.bucket``."""
    head = [chunk.head] if chunk.head is not None and chunk.head not in chunk.root_units else []
    first = [chunk.embedding] if chunk.embedding is not None else []
    others = [w for unit in (*chunk.others, *chunk.enclosing_rests) for w in unit.weights]
    for weights in (others, *(unit.weights for unit in (*first, *chunk.blocks, *head))):
        kinds: dict[object, list[WeightLayout]] = {}
        for w in weights:
            if w.trainable:
                kinds.setdefault((w.dtypes.shard, w.expert, w.offload), []).append(w)
        yield from kinds.values()


def _wide(dtype: torch.dtype) -> int:
    return torch.promote_types(dtype, torch.float32).itemsize


def _staged(weight: WeightLayout) -> bool:
    return weight.encoding is not None or weight.dtypes.gather != weight.dtypes.shard
