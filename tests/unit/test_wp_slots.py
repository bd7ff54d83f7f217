"""WP-1, WP-4: slots of known size; who holds which bytes, and when contents are invalidated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from internsp.errors import PoolError
from internsp.schedule.chunk import ALIGNMENT, aligned
from internsp.schedule.layout import ShardLayout
from internsp.schedule.queue import GatherQueue
from internsp.schedule.terms import Group, Policy
from internsp.wp.parameter import ShardedParameter, SlotViews
from internsp.wp.reduce import Buffers
from internsp.wp.slots import MemoryPool, Unit


@dataclass(eq=False)
class Weight:
    """The part of a weight that slots and queue use."""

    name: str
    shape: tuple[int, ...]
    compute_dtype: torch.dtype = torch.float32
    needs_gather: bool = True
    needs_wait: bool = True
    trained: bool = True
    slices: int = 0
    gradient_bytes: int = 1
    rank: int = 0

    @property
    def layout(self) -> ShardLayout:
        return ShardLayout.create(self.shape, 0, 2)

    @property
    def slot_nbytes(self) -> int:
        return self.layout.padded_numel * 4

    def current_version(self) -> tuple[int, torch.dtype]:
        return 1, self.compute_dtype

    def views_in(self, place: torch.Tensor) -> SlotViews:
        return ShardedParameter.views_in(cast(Any, self), place)


def unit(name: str, *shapes: tuple[int, ...], slot: int = 0, block: int = -1) -> Unit:
    weights = [Weight(f"{name}.{i}", shape) for i, shape in enumerate(shapes)]
    made = Unit(name, cast(Any, weights), slot=slot, block=block)
    groups, start = [], 0
    for weight in made.weights:
        groups.append(Group([weight], start, start + aligned(weight.slot_nbytes)))
        start = groups[-1].end
    made.assign_bytes(groups)
    return made


def size(one: Unit) -> int:
    return one.groups[-1].end


def filled(pool: MemoryPool, one: Unit, evicted: Unit | None = None) -> None:
    pool.slots[one.slot].acquire(one, one.weights, evicted.weights if evicted else (), pool.poison)


CPU = torch.device("cpu")


def test_weights_lie_aligned_in_a_slot_and_do_not_overlap() -> None:
    one = unit("one", (3, 5), (70, 2), (1, 1))
    assert size(one) == ALIGNMENT * (1 + 3 + 1)  # 80, 560 and 8 bytes, padded to an even 4 rows
    pool = MemoryPool([size(one)], CPU)
    filled(pool, one)
    for value, weight in enumerate(one.weights):
        weight.in_slot.flat.fill_(value)
    for value, weight in enumerate(one.weights):
        whole = weight.in_slot.unsharded.data
        assert whole.shape == weight.layout.shape
        assert bool((whole == value).all())
        assert whole.data_ptr() % ALIGNMENT == one.weights[0].in_slot.flat.data_ptr() % ALIGNMENT
    version = whole._version
    one.weights[2].in_slot.flat.fill_(7)
    assert bool((whole == 7).all())
    assert whole._version == version, "filling a slot is hidden from saved views"


def queue(strict: bool = True) -> GatherQueue[ShardedParameter]:
    """Of three blocks, the first and the last of which share a slot."""
    policy = Policy(3)
    blocks = [
        unit(f"layers.{i}", (4, 4), (4, 4), slot=policy.slot(i), block=i) for i in range(3)
    ]
    return GatherQueue(policy, blocks, strict=strict)


def names(actions: list[Any], kind: str = "AG") -> list[str]:
    return [w.name for action in actions if action.kind == kind for w in action.weights]


def test_bytes_in_use_are_not_taken_and_the_error_names_both_holders() -> None:
    one = queue()
    first, _, third = one.passes.order.blocks
    assert names(one.root_pre_forward(keep=False)) == ["layers.0.0", "layers.0.1"]
    one.pre_forward(first)
    with pytest.raises(PoolError, match=r"slot 0.*layers\.2\.0.*by layers\.2 \(forward\).*by "
                                        r"layers\.0 for layers\.0\.0 \(forward\)"):  # fmt: skip
        one.use(third, third.weights[0], "forward")
    one.use(first, first.weights[0], "forward")  # its own holder may use it again
    assert names(one.post_forward(first)) == ["layers.1.0", "layers.1.1"], "its trigger was silent"
    assert names(one.pre_forward(third)) == ["layers.2.0", "layers.2.1"]


def test_where_another_order_is_allowed_a_prefetch_gives_way() -> None:
    one = queue(strict=False)
    first, second, third = one.passes.order.blocks
    one.root_pre_forward(keep=False)
    assert names(one.pre_forward(third)) == ["layers.2.0", "layers.2.1"]
    one.post_forward(third)
    assert names(one.pre_forward(second)) == ["layers.1.0", "layers.1.1"]
    one.post_forward(second)
    assert names(one.pre_forward(first)) == ["layers.0.0", "layers.0.1"]


def test_contents_outlive_holds_and_are_lost_to_whoever_takes_their_bytes() -> None:
    one = queue()
    one.root_pre_forward(keep=False)
    first, second, _ = one.passes.order.blocks
    one.pre_forward(first)
    one.post_forward(first)
    assert [group.name for group in one.slots.held] == ["layers.1.0", "layers.1.1"]
    assert names(one.root_pre_forward(keep=True)) == [], "what is there is not gathered again"
    for block in (first, second):
        one.pre_forward(block)
        actions = one.post_forward(block)
    taken, _ = (action for action in actions if action.kind == "AG")
    assert [weight.name for weight in taken.weights] == ["layers.2.0"]
    assert [weight.name for weight in taken.others] == ["layers.0.0"]
    assert names(one.root_pre_forward(keep=False)) == ["layers.0.0", "layers.0.1"]


def test_a_gather_in_flight_is_waited_for_before_its_bytes_are_taken() -> None:
    one = queue()
    one.root_pre_forward(keep=False)
    first, second, _ = one.passes.order.blocks
    for block in (first, second):
        one.pre_forward(block)
        actions = one.post_forward(block)  # without a use: its gathers are still in flight
    kinds = [(a.kind, a.phase, a.weights[0].name) for a in actions]
    assert kinds[:2] == [("WAIT", "settle", "layers.0.0"), ("AG", "forward", "layers.2.0")]


def test_uses_are_counted_anew_where_blocks_run_by_themselves() -> None:
    one = queue()
    first = one.passes.order.blocks[0]
    for _ in range(3):
        one.begin_blocks(keep=False)
        one.pre_forward(first)
        for weight in first.weights:
            one.use(first, weight, "forward")
            one.release(first, weight)
        one.post_forward(first)
    one.backward.root_pre_backward()
    one.backward.pre_backward(first, all_ranks=False)
    *_, last = first.weights
    found = names(one.backward.grad_ready(first, last), "RS")
    assert found == [cast(Any, last).name], "one use, one gradient"


def test_a_slot_is_poisoned_when_other_weights_take_it() -> None:
    one, two = unit("one", (4, 4)), unit("two", (4, 4))
    pool = MemoryPool([size(one)], CPU, poison=True)
    filled(pool, one)
    one.weights[0].in_slot.flat.fill_(1)
    filled(pool, one)
    assert bool((one.weights[0].in_slot.unsharded.data == 1).all()), "not by the same ones"
    filled(pool, two, evicted=one)
    assert bool(two.weights[0].in_slot.unsharded.data.isnan().all())


@pytest.mark.parametrize("reuse", [True, False])
def test_stated_bytes_are_the_bytes_that_exist(reuse: bool) -> None:
    units = [unit(str(i), (8, 8), slot=i % 2) for i in range(6)]
    pool = MemoryPool([size(units[0])] * 2, CPU, reuse)
    saved: list[Any] = []
    before: dict[int, Unit] = {}
    for one in units * 2:
        filled(pool, one, evicted=before.get(one.slot))
        before[one.slot] = one
        saved.append(one.weights[0].in_slot.unsharded.data)
        assert pool.live_nbytes() <= pool.slot_nbytes == 2 * size(units[0])
    assert pool.live_nbytes() == pool.slot_nbytes
    assert saved[0].untyped_storage()._cdata == saved[6].untyped_storage()._cdata, "views stay true"


def test_buffers_are_used_again_by_size_and_dtype() -> None:
    pool = Buffers(CPU)
    first = pool.acquire(10, torch.float32)
    other = pool.acquire(10, torch.float32)
    assert first.data_ptr() != other.data_ptr()
    pool.release(first)
    assert pool.acquire(10, torch.float64).data_ptr() != first.data_ptr()
    assert pool.acquire(10, torch.float32).data_ptr() == first.data_ptr()
    assert (pool.allocations, pool.nbytes) == (3, 40 + 40 + 80)
    without = Buffers(CPU, reuse=False)
    without.release(without.acquire(10, torch.float32))
    assert without.nbytes == 0
