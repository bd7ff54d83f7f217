"""WP-1, WP-4, WP-6: unsharded weights live in slots, a slot has one holder at a time.

Reductions in flight are bounded; a pass that is over holds no activations.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils import checkpoint as checkpoints

from internsp.config import ActivationCheckpointConfig
from internsp.errors import PoolError
from internsp.layers import GroupedLinearWithCommExt
from internsp.mesh import ParallelMesh
from tests.support.compare import close
from tests.support.few import few
from tests.support.models import Block, Tiny, Twin, raises
from tests.support.ranks import ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)


def mesh_of_two() -> ParallelMesh:
    return ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)


def live_storages(nbytes: int) -> int:
    """Storages of exactly ``nbytes`` that any living tensor refers to, found by the collector."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            if storage.nbytes() == nbytes:
                found[storage._cdata] = True
    return len(found)


def count_blocks(
    mesh: ParallelMesh, depth: int, reuse: bool, checkpoint: Any, kept: int, trigger: str
) -> None:
    gc.collect()  # the model of the previous case
    gc.freeze()  # get_objects does not return what is alive now
    # No other storage has the size of a block, so that the count below is unambiguous.
    twin = Twin(
        partial(Tiny, layers=6), mesh, checkpoint, memory_pool=reuse, prefetch_depth=depth,
        keep_unsharded=kept, gather_before=trigger,
    )  # fmt: skip
    pool = twin.communicator.state.pool
    block = twin.communicator.blocks[0].nbytes
    most, most_bytes = 0, 0

    def look(*_: Any) -> None:
        nonlocal most, most_bytes
        most = max(most, live_storages(block))
        most_bytes = max(most_bytes, pool.live_nbytes())

    for layer in twin.ours.layers:  # type: ignore[attr-defined]
        for module in layer.modules():
            module.register_forward_pre_hook(look)
            module.register_forward_hook(lambda m, a, out: out.register_hook(look) and None)
    for _ in range(3):
        twin.backward()
    allowed = depth + 1 + kept
    if not reuse:
        allowed = 0  # each weight has separate memory, not a block's
    assert most == allowed, f"{most} whole blocks at depth {depth}, pool {reuse}"
    assert most_bytes == pool.slot_nbytes, "the stated bytes are exact"
    assert not twin.communicator.state.handles, "a gather is waited for once, and then forgotten"
    # Outside the slots no storage of an unsharded block is left.
    assert live_storages(block) <= allowed


@ranks(2)
def test_models_made_again_leave_no_hooks_of_optimizers() -> None:
    """Each would be called in every step, of any model, to the end of the process."""
    hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    before, mesh = [*map(len, hooks)], mesh_of_two()
    for _ in range(3):
        Twin(Tiny, mesh)
    assert [*map(len, hooks)] == before


SLOTS: tuple[tuple[int, bool, Any, int, str], ...] = (
    (1, True, None, 0, "out_proj"), (1, False, HALF, 0, "out_proj"),
    (2, False, None, 0, "out_proj"), (1, True, HALF, 2, "out_proj"),
    (1, False, None, 1, "out_proj"), (1, True, HALF, 0, "rolling"),
    (2, True, None, 1, "rolling"), (1, False, None, 0, "rolling"),
    (0, True, None, 0, "out_proj"), (0, True, HALF, 1, "rolling"),
)  # fmt: skip


@pytest.mark.unmeasured
@few("cases", SLOTS, 4)
@ranks(2)
def test_whole_block_weights_never_exceed_the_slots(cases: list[Any]) -> None:
    mesh = mesh_of_two()
    for depth, reuse, checkpoint, kept, trigger in cases:
        count_blocks(mesh, depth, reuse, checkpoint, kept, trigger)


class Experts(Block):
    """A block whose second half is a grouped matrix product, as experts use it."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.groups = GroupedLinearWithCommExt(3, width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        flat = y.flatten(0, -2)
        return y + self.groups(torch.stack([flat, flat * 2, flat.square()])).sum(0).view_as(y)


@pytest.mark.thorough(1)
@ranks(2)
def test_autocast_casts_shards_and_never_a_slot() -> None:
    mesh = mesh_of_two()
    for checkpoint, trigger in ((None, "out_proj"), (HALF, "out_proj"), (None, "rolling")):
        made = partial(Tiny, Experts)
        twin = Twin(made, mesh, checkpoint, dtype=torch.float32, gather_before=trigger)
        slots = {
            b.untyped_storage().data_ptr()
            for s in twin.communicator.state.pool.slots
            for b in s._memory()
        }
        shapes = {tuple(w.layout.shape) for w in twin.communicator.replicated.sharded}
        shapes |= {s[::-1] for s in shapes} | {s[1:] for s in shapes if len(s) == 3}
        shapes.remove((6, 6))  # an activation could have it
        copies: list[Any] = []

        def pack(
            tensor: Tensor, slots: Any = slots, shapes: Any = shapes, copies: Any = copies
        ) -> Tensor:
            inside = tensor.untyped_storage().data_ptr() in slots
            if tuple(tensor.shape) in shapes and not inside:
                copies.append(tuple(tensor.shape))
            return tensor

        for step in range(2):
            everybody, mine = twin.batch(rows=3)
            with torch.autocast("cpu", torch.bfloat16):
                plain = twin.plain(*everybody)
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    ours = twin.ours(*mine)
            if step == 1:  # an evaluation in full precision before the backward
                with torch.no_grad():
                    close(twin.ours(*everybody), twin.plain(*everybody), "evaluation", 1e-6)
            plain.backward()
            ours.backward()
            # Per-rank products in bf16 differ from one process's by its rounding only.
            twin.check_gradients(f"autocast, step {step}", 3e-2)
            twin.zero_grad()
        assert not copies, f"copies of unsharded weights are saved: {copies}"
        gathered = [
            e.nbytes for e in twin.trace.events if e.kind == "AG" and "layers.0.w1" in e.weight
        ]
        half = twin.communicator.blocks[0].weights[2].layout.shard_numel * 2
        # The evaluation takes full precision.
        assert gathered[0] == gathered[-1] == half, f"{gathered} bytes travel"
    for where in (mesh, ParallelMesh.create(weight=1, device_type="cpu", timeout_seconds=20)):
        exact = Twin(Tiny, where, dtype=torch.float32)
        everybody, _ = exact.batch()
        with torch.autocast("cpu", torch.bfloat16):
            close(exact.ours(*everybody), exact.plain(*everybody), "the same batch", 0.0)


@ranks(2)
def test_autocast_inside_the_model_is_noticed_where_a_weight_is_used() -> None:
    mesh = mesh_of_two()
    for width in (torch.bfloat16, torch.float32):
        twin = Twin(Tiny, mesh, dtype=torch.float32)
        ours = twin.ours
        inner = ours.blocks

        def blocks(x: Tensor, inner: Any = inner, width: torch.dtype = width) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=width == torch.bfloat16):
                return inner(x)

        ours.blocks = blocks  # type: ignore[assignment]
        with twin.communicator.unchanged():
            twin.backward()
            twin.zero_grad()
            twin.trace.clear()
            _, mine = twin.batch()
            ours(*mine).backward()
        moved = {e.weight: e.nbytes for e in twin.trace.events if e.kind == "AG"}
        numel = twin.communicator.blocks[0].weights[2].layout.shard_numel
        assert moved["layers.0.w1.weight"] == numel * width.itemsize
        assert "head.weight" not in moved, "still in its slot, in full precision"


class Mixed(Block):
    """Uses one weight in two dtypes, so that its slot holds only one of them at a time."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.q(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x + y.float())


@ranks(2)
def test_a_weight_used_in_two_precisions_is_whole_in_each_where_it_is_needed() -> None:
    mesh = mesh_of_two()
    full = ActivationCheckpointConfig(mode="full")
    reentrant = ActivationCheckpointConfig(mode="full", reentrant=True)
    for checkpoint in (None, full, reentrant):
        twin = Twin(partial(Tiny, Mixed), mesh, checkpoint, dtype=torch.float32)
        twin.backward()
        twin.check_gradients(f"{checkpoint}", 3e-2)


class Borrowing(Tiny):
    """The third block uses a weight of the first, which has the same slot."""

    def blocks(self, x: Tensor) -> Tensor:
        first, third = self.layers[0], self.layers[2]
        third.norm.register_forward_pre_hook(lambda m, args: (first.q(args[0]),))
        return super().blocks(x)


@pytest.mark.thorough(1)
@ranks(2)
def test_reductions_in_flight_are_bounded_and_slots_have_one_holder() -> None:
    mesh = mesh_of_two()
    for config in ({}, {"gather_before": "rolling"}):
        twin = Twin(Borrowing, mesh, **config)  # type: ignore[arg-type]
        message = raises(PoolError, twin.backward, "layers.0", "layers.2", "slot 0")
        assert "held by layers.2" in message
    for limit in (1, 2):
        twin = Twin(partial(Tiny, layers=5), mesh, reductions_in_flight=limit)
        pending, most = twin.communicator.state.reducer, 0
        launch = pending.reduce_scatter

        def spy(*args: Any, launch: Any = launch, pending: Any = pending) -> None:
            nonlocal most
            launch(*args)
            flying = [reduction for launched in pending._queue for reduction in launched]
            most = max(most, sum(reduction.output.nbytes for reduction in flying))

        pending.reduce_scatter = spy  # type: ignore[method-assign]
        pooled = twin.communicator.state.reducer.buffers
        for step in range(4):
            twin.backward()
            twin.check_gradients(f"limit {limit}")
            twin.zero_grad()
            if step == 1:
                buffers = pooled.allocations
        gradients = [w.layout.padded_numel * 8 for w in twin.communicator.blocks[0].weights]  # fp64
        assert limit * sum(gradients) - max(gradients) < most <= limit * sum(gradients)
        assert pooled.allocations == buffers, "later steps take buffers from the pool"
        assert len(pending) == 0


class Checkpointed(Tiny):
    """With checkpoints of the program's own, whose recomputes torch stops early."""

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoints.checkpoint(layer, x, use_reentrant=False)
        return x


@ranks(2)
def test_nothing_is_held_of_a_recompute_that_stopped_early_or_a_forward_that_failed() -> None:
    """What a block was given has the graph of all before it, and by that the whole model."""
    twin = Twin(Checkpointed, mesh_of_two())
    inputs: list[weakref.ref[Tensor]] = []
    for layer in twin.ours.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    twin.backward()
    failing = twin.ours.layers[2].w1.register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[union-attr]
    raises(ZeroDivisionError, partial(twin.ours, *twin.batch()[1]))
    failing.remove()
    gc.collect()
    assert len(inputs) == 2 * 4 + 3
    assert [number for number, each in enumerate(inputs) if each() is not None] == []
