"""Memory of a step of Arctic long-sequence training: live tensors in the backward of one block.

One of its blocks is written out below according to its sources, and run on tensors without storage;
each allocation is counted under its source's name. Nothing is fitted, and what the sources do not
specify is left out: a device's context, cached memory of the allocator, NCCL's buffers.

Sources: ``ulysses_sp.py`` and ``layer.py`` of DeepSpeed (``deepspeed/runtime/sequence_parallel``,
``deepspeed/sequence``), ``monkey_patches.py`` of ArcticTraining (checkpoints in host memory),
Liger-Kernel (``ops/rms_norm.py``, ``ops/rope.py``, in place), transformers' ``LlamaDecoderLayer``,
``mha_varlen_bwd`` of flash-attention 2 (``attn_implementation`` of their recipes), head size 128.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BUCKET, PREFETCH, LIVE = 5 * 10**8, 5 * 10**7, 10**9
"""Elements: the defaults of ``reduce_bucket_size``, ``stage3_prefetch_bucket_size`` and
``stage3_max_live_parameters`` in DeepSpeed's ``runtime/zero/config.py``; the recipes do not set
them."""


@dataclass(frozen=True)
class Block:
    """Sizes of one rank's block: local positions, and the model's sizes."""

    positions: int
    ranks: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int

    @property
    def d(self) -> int:
        """Size of a head."""
        return self.hidden // self.heads


class Counted(TorchDispatchMode):
    """Bytes of live storages by the name under which they were allocated, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.now, self.peak = "", Counter[str](), Counter[str]()
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self.count(tensor.untyped_storage())
        return output

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count its storage if it is new."""
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        self.now[self.name] += storage.nbytes()
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()
        weakref.finalize(storage, self._gone, id(storage), self.name, storage.nbytes())

    def _gone(self, key: int, name: str, nbytes: int) -> None:
        self._known.discard(key)
        self.now[name] -= nbytes

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """A context in which allocations are counted under this name."""
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before


def at_peak(block: Block) -> Counter[str]:
    """Bytes by name at the peak of the recompute and backward of one block."""
    live = Counted()
    with FakeTensorMode():
        weights = _Weights(block)
        for weight in vars(weights).values():
            live._known.add(id(weight.untyped_storage()))
        with live:
            _checkpoint_backward(block, weights, live)
    return live.peak


class _Weights:
    """A gathered weight: counted with ZeRO's buffers."""

    def __init__(self, block: Block) -> None:
        h, kv, i = block.hidden, block.kv_heads * block.d, block.intermediate

        def made(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=torch.bfloat16, requires_grad=True)

        self.q, self.k, self.v, self.o = made(h, h), made(kv, h), made(kv, h), made(h, h)
        self.gate, self.up, self.down = made(i, h), made(i, h), made(h, i)
        for weight in vars(self).values():
            weight.register_post_accumulate_grad_hook(_given_away)


def _given_away(weight: Tensor) -> None:
    """A gradient for ZeRO's bucket, which is counted separately."""
    weight.grad = None


def _checkpoint_backward(block: Block, weights: _Weights, live: Counted) -> None:
    """``CheckpointFunctionWithCPUOffload.backward``, which holds input, output and gradient."""
    shape = (1, block.positions, block.hidden)
    with live.named("gradient of the block's output (checkpoint's frame)"):
        gradient = torch.empty(shape, dtype=torch.bfloat16)
    with live.named("the block's input, back from the host"):
        given = torch.empty(shape, dtype=torch.bfloat16).requires_grad_()
    output = _layer(given, block, weights, live)
    live.name = "gradients on their way (autograd)"
    output.backward(gradient)


def _layer(given: Tensor, block: Block, weights: _Weights, live: Counted) -> Tensor:
    with live.named("output of the first norm"):
        normed = _Norm.apply(given)
    attended = _attention(normed, block, weights, live)
    del normed
    with live.named("hidden states between attention and feed-forward"):
        hidden = given + attended
    del attended
    with live.named("output of the second norm"):
        normed = _Norm.apply(hidden)
    made = _TiledMLP.apply(normed, live, weights.gate, weights.up, weights.down)
    del normed
    with live.named("the block's output (checkpoint's frame)"):
        output: Tensor = hidden + made
    return output


def _attention(normed: Tensor, block: Block, weights: _Weights, live: Counted) -> Tensor:
    with live.named("queries, keys, values"):
        # Liger rotates queries and keys in place.
        q, k, v = (
            F.linear(normed, weight).unflatten(-1, (-1, block.d))[0].unsqueeze(1)
            for weight in (weights.q, weights.k, weights.v)
        )
    if block.ranks > 1:
        with live.named("queries, keys, values after the all-to-alls"):
            repeats = max(block.ranks // block.kv_heads, 1)
            k, v = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k, v))
            q, k, v = (_combined(x, block) for x in (q, k, v))
            q, k, v = (x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in (q, k, v))
    with live.named("attention's output and log-sum-exp"):
        out = _Flash.apply(q[:, 0], k[:, 0], v[:, 0], live)
    del q, k, v
    if block.ranks > 1:
        with live.named("attention's output after the all-to-all"):
            out = _partitioned(out.flatten(1).unsqueeze(1), block)
    with live.named("output of the out-projection"):
        return F.linear(out.reshape(1, block.positions, block.hidden), weights.o)


def _combined(x: Tensor, block: Block) -> Tensor:
    """``UlyssesSPAttentionHF._combine_local_sequences``."""
    x = x.reshape(block.positions, 1, block.ranks, -1, block.d)
    x = _AllToAll.apply(x.permute(2, 0, 1, 3, 4).contiguous())
    return x.reshape(-1, *x.shape[2:]).contiguous()


def _partitioned(x: Tensor, block: Block) -> Tensor:
    """``UlyssesSPAttentionHF._partition_global_sequence``."""
    x = _AllToAll.apply(x.reshape(block.ranks, block.positions, 1, -1).contiguous())
    x = x.permute(1, 2, 0, 3)
    return x.reshape(*x.shape[:2], -1).contiguous()


class _AllToAll(torch.autograd.Function):
    """``_DimZeroAllToAll``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        output = torch.empty_like(x).contiguous()
        x.contiguous()
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _AllToAll.apply(gradient)


class _Norm(torch.autograd.Function):
    """``LigerRMSNormFunction``: its gradient overwrites its output's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient.contiguous()


class _TiledMLP(torch.autograd.Function):
    """``TiledMLP``, with as many tiles as a tile has features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, live: Counted, *weights: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.live, ctx.weights = live, weights
        tiles = x.chunk(math.ceil(x.shape[-2] / x.shape[-1]), -2)
        with live.named("output of the feed-forward, in tiles and as a whole"):
            return torch.cat([_feed_forward(tile, *weights) for tile in tiles], -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with ctx.live.named("gradient of the feed-forward's input"):
            total = torch.zeros_like(x)
        start = 0
        with ctx.live.named("a tile of the feed-forward at work"):
            for part in x.detach().chunk(math.ceil(x.shape[-2] / x.shape[-1]), -2):
                tile = part.requires_grad_()
                with torch.enable_grad():
                    made = _feed_forward(tile, *ctx.weights)
                wanted = [tile, *ctx.weights]
                found = torch.autograd.grad(
                    made, wanted, gradient.narrow(-2, start, part.shape[-2])
                )
                total.narrow(-2, start, part.shape[-2]).copy_(found[0])
                start += part.shape[-2]
                del made, found
        return total, None, None, None, None


def _feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class _Flash(torch.autograd.Function):
    """``flash_attn_varlen_func`` of one document."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, live: Counted) -> Tensor:  # type: ignore[override]
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        ctx.live = live
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        q, k, v, _, _ = ctx.saved_tensors
        with ctx.live.named("gradients of queries, keys, values"):
            found = [torch.empty_like(x) for x in (q, k, v)]
        with ctx.live.named("flash-attention's own sums in backward"):
            positions = q.shape[0] + 128
            wide = [q.new_empty(positions, q.shape[1], q.shape[2] + 1, dtype=torch.float32)]
            if k.shape[1] != q.shape[1]:
                shape = (k.shape[0], q.shape[1], k.shape[2])
                wide += [q.new_empty(shape) for _ in range(2)]
        del wide
        return *found, None


def weights_at(block: Block, layers: int, vocabulary: int, on_host: bool) -> Counter[str]:
    """Bytes of ZeRO-3 without activations."""
    h, i, kv = block.hidden, block.intermediate, block.kv_heads * block.d
    layer = 2 * h * h + 2 * h * kv + 3 * h * i
    whole = layers * layer + 2 * vocabulary * h
    return Counter({
        "weight shards": 0 if on_host else 2 * whole // block.ranks,
        "gathered weights (stage3_max_live_parameters, prefetch, at most)":
            2 * (min(LIVE, whole) + PREFETCH),
        "bucket of gradients (reduce_bucket_size, and what is reduced)": 2 * 2 * BUCKET,
    })  # fmt: skip
