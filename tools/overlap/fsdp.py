"""FSDP2 (``fully_shard``) in every form that was found to be faster over gloo.

All forms sum gradients instead of averaging them (gloo cannot average). Forms that can be combined
in a name, as in ``fsdp2:chunked+unshard``:

prefetch    ``set_modules_to_forward_prefetch`` and ``..._backward_prefetch`` of the neighbor block
            with the private flag that makes gathers asynchronous (without it a CPU prefetch blocks)
chunked     prefetch, and custom collectives: both in 8 chunks and asynchronous, the reduce-scatter
            as ``all_to_all_single`` and a local sum in fp32, at most two blocks in flight
unshard     the next block's ``unshard(async_op=True)`` right before the out-projection, and
            asynchronous gathers in backward
last        the last block is not resharded after forward (backward begins with it)
whole       no block is resharded after forward
full        with several micro-batches, unsharded gradients are summed and reduced in the last one
hybrid      weights are sharded in groups of two, and shards' gradients are summed over the groups
            once a step; chunked reductions are then finished at once, because FSDP2 uses them
import      the same program with one import changed: ``internsp.fsdp.fully_shard``; by itself
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import internsp.fsdp
from internsp.fsdp.attach import attached_to
from tools.bench.model import Blocks
from tools.overlap.variants import Variant

CHUNKS = 8
PENDING = 2  # blocks with reductions in flight, at most; the same as internsp


class Works(dist.Work):
    """Several work handles as one."""

    def __init__(self, works: Sequence[Any], keep: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._works, self._keep = list(works), keep

    def wait(self, *_: Any, **__: Any) -> bool:  # type: ignore[override]
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self._works, self._keep = [], ()
        return True


def ranges_of(numel: int, chunks: int = CHUNKS) -> list[tuple[int, int]]:
    """``numel`` in at most ``chunks`` nearly equal, non-empty ranges."""
    edges = [numel * i // chunks for i in range(chunks + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate as FSDP2 does."""
        return torch.empty(*size, dtype=dtype, device=device)


class ChunkedAllGather(_Allocates):
    """FSDP2's ``AllGather`` interface: 8 collectives in flight instead of one."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """All-gather ``[n]`` into ``[ranks * n]``."""
        rows = output_tensor.view(group.size(), -1)
        works = [
            dist.all_gather([r[a:b] for r in rows], input_tensor[a:b], group=group, async_op=True)
            for a, b in ranges_of(input_tensor.numel())
        ]
        work = Works(works, (output_tensor, input_tensor))
        if async_op:
            return work
        work.wait()
        return None


class ChunkedReduceScatter(_Allocates):
    """FSDP2's ``ReduceScatter`` interface, asynchronous although FSDP2 does not request it.

    FSDP2 only takes views of the output, so :meth:`finish_reductions` may fill it later, before a
    gradient is read.
    """

    def __init__(self, pending: int = PENDING) -> None:
        self._limit = pending
        self._pending: deque[tuple[Tensor, list[tuple[Any, Tensor, Tensor]]]] = deque()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter ``[ranks * n]``.

        ``[n]`` is complete after :meth:`finish_reductions`.
        """
        while self._pending and len(self._pending) >= self._limit:
            self._finish_oldest()
        rows = input_tensor.view(group.size(), -1)
        flying: list[tuple[Any, Tensor, Tensor]] = []
        for a, b in ranges_of(rows.shape[1]):
            piece = rows[:, a:b].contiguous()
            received = torch.empty_like(piece)
            work = dist.all_to_all_single(
                received.flatten(), piece.flatten(), group=group, async_op=True
            )
            flying.append((work, piece, received))
        self._pending.append((output_tensor, flying))
        if not self._limit:
            self.finish_reductions()
        return None

    def _finish_oldest(self) -> None:
        output, flying = self._pending.popleft()
        for (a, b), (work, _, received) in zip(ranges_of(output.numel()), flying, strict=True):
            work.wait()
            output[a:b] = received.sum(0, dtype=torch.float32)

    def finish_reductions(self) -> None:
        """Finish every output."""
        while self._pending:
            self._finish_oldest()


class Fsdp2(Variant):
    """``fully_shard`` of every block and of the root, in the forms that the name lists."""

    def prepare(self, model: Blocks) -> nn.Module:
        """Shard, then apply the forms."""
        forms = self.spec.forms
        mesh = self.setting.hybrid_mesh if "hybrid" in forms else self.setting.flat_mesh
        self._earlier: dict[nn.Parameter, Tensor] = {}
        layers: list[Any] = list(model.layers)
        shard = internsp.fsdp.fully_shard if "import" in forms else fully_shard
        for layer in layers:
            shard(layer, mesh=mesh, reshard_after_forward="whole" not in forms)
        shard(model, mesh=mesh)
        for layer in layers:  # sums in all variants, because gloo cannot average
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
        if forms & {"prefetch", "chunked", "unshard"}:
            self._asynchronous(layers, forward="unshard" not in forms)
        if "unshard" in forms:
            self._at_out_projection(layers)
        self._reductions: ChunkedReduceScatter | None = None
        if "chunked" in forms:
            self._reductions = ChunkedReduceScatter(0 if "hybrid" in forms else PENDING)
            for layer in layers:
                layer.set_custom_all_gather(ChunkedAllGather())
                layer.set_custom_reduce_scatter(self._reductions)
        if "last" in forms:
            layers[-1].set_reshard_after_forward(False)
        return model

    def _asynchronous(self, layers: list[Any], forward: bool) -> None:
        for layer, following in itertools.pairwise(layers):
            if forward:
                layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
        for layer in layers:
            layer._set_unshard_async_op(True)

    def _at_out_projection(self, layers: list[Any]) -> None:
        for layer, following in itertools.pairwise(layers):

            def start(*_: Any, following: Any = following) -> None:
                following.unshard(async_op=True)

            layer.attention.wo.register_forward_pre_hook(start)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Set in FSDP2 which collectives are skipped until the last micro-batch."""
        if len(self.batches) > 1:
            model: Any = self.blocks
            if "full" in self.spec.forms:
                model.set_requires_gradient_sync(last)
            if "hybrid" in self.spec.forms:
                model.set_requires_all_reduce(last)
        return nullcontext()

    def finish(self, last: bool) -> None:
        """Finish asynchronous reductions.

        FSDP2 adds a micro-batch's gradients to the earlier ones right after launching the
        reduction, when chunked ones are not complete: the earlier ones are set aside until then.
        """
        if self._reductions is None:
            return
        self._reductions.finish_reductions()
        if len(self.batches) == 1 or "hybrid" in self.spec.forms:
            return
        for parameter in self.blocks.parameters():
            earlier = self._earlier.pop(parameter, None)
            if parameter.grad is not None and earlier is not None:
                parameter.grad += earlier
            if parameter.grad is not None and not last:
                self._earlier[parameter], parameter.grad = parameter.grad, None

    def unsharded_bytes(self) -> int:
        """Unsharded weights, and all-gather outputs that are not copied out yet."""
        if "import" in self.spec.forms:
            found = attached_to(self.blocks)
            return sum(found.communicator.plan.slots()) if found is not None else 0
        total = 0
        for layer in self.blocks.layers:
            state: Any = layer._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                for parameter in group.fsdp_params:
                    for full in parameter.all_gather_outputs:
                        total += full.untyped_storage().nbytes()
                flying = group._all_gather_result
                if flying is not None:
                    total += flying.all_gather_output.untyped_storage().nbytes()
        return total
