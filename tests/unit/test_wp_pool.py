"""WP-1, WP-4: slots of stated size with one holder; what is in them, and when it is forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from internsp.errors import PoolError
from internsp.wp.pool import ALIGNMENT, MemoryPool, Unit
from internsp.wp.shard import ShardLayout


@dataclass(eq=False)
class Weight:
    """What a pool asks of a weight."""

    shape: tuple[int, ...]
    compute_dtype: torch.dtype = torch.float32
    resident: bool = False

    @property
    def layout(self) -> ShardLayout:
        return ShardLayout.create(self.shape, 0, 2)

    @property
    def slot_nbytes(self) -> int:
        return self.layout.padded_numel * 4


def unit(name: str, *shapes: tuple[int, ...], slot: int = 0) -> Unit:
    made = Unit(name, cast(Any, [Weight(shape) for shape in shapes]), slot=slot)
    made.place()
    return made


CPU = torch.device("cpu")


def test_weights_lie_aligned_in_a_slot_and_do_not_overlap() -> None:
    one = unit("one", (3, 5), (70, 2), (1, 1))
    assert one.nbytes == ALIGNMENT * (1 + 3 + 1)  # 80, 560 and 8 bytes, padded to an even 4 rows
    pool = MemoryPool([one.nbytes], CPU)
    slot = pool.lease(one, "test")
    for value, weight in enumerate(one.weights):
        slot.flat(one, weight).fill_(value)
    for value, weight in enumerate(one.weights):
        whole = slot.whole(one, weight)
        assert whole.shape == weight.layout.shape
        assert bool((whole == value).all())
        assert whole.data_ptr() % ALIGNMENT == slot.flat(one, one.weights[0]).data_ptr() % ALIGNMENT
    version = whole._version
    slot.flat(one, one.weights[2]).fill_(7)
    assert bool((whole == 7).all())
    assert whole._version == version, "filling a slot is hidden from saved views"


def test_a_slot_in_use_is_not_leased_again_and_the_error_names_both_holders() -> None:
    one, two = unit("layers.0", (4, 4)), unit("layers.2", (4, 4))
    pool = MemoryPool([one.nbytes], CPU)
    pool.lease(one, "forward")
    pool.lease(one, "backward")  # its own holder may ask again
    with pytest.raises(PoolError, match=r"slot 0 .*layers\.2 \(forward\).*layers\.0 \(backward\)"):
        pool.lease(two, "forward")
    pool.slots[0].release(two)  # not the holder: no effect
    with pytest.raises(PoolError):
        pool.lease(two, "forward")
    pool.slots[0].release(one)
    assert pool.lease(two, "forward").holder is two


def test_contents_are_forgotten_when_the_owner_changes_and_kept_when_it_does_not() -> None:
    one, two = unit("one", (4, 4)), unit("two", (4, 4))
    pool = MemoryPool([one.nbytes], CPU, poison=True)
    slot = pool.lease(one, "")
    slot.flat(one, one.weights[0]).fill_(1)
    slot.tags[one.weights[0]] = (1, torch.float32)
    slot.release(one)
    assert pool.lease(one, "").tags == {one.weights[0]: (1, torch.float32)}
    assert bool((slot.whole(one, one.weights[0]) == 1).all())
    pool.release_all()
    assert pool.lease(two, "").tags == {}
    assert bool(slot.whole(two, two.weights[0]).isnan().all()), "poisoned"
    slot.tags[two.weights[0]] = (1, torch.float32)
    pool.forget()
    assert (slot.tags, slot.holder) == ({}, None)


@pytest.mark.parametrize("reuse", [True, False])
def test_stated_bytes_are_the_bytes_that_exist(reuse: bool) -> None:
    units = [unit(str(i), (8, 8), slot=i % 2) for i in range(6)]
    pool = MemoryPool([units[0].nbytes] * 2, CPU, reuse)
    saved = []
    for one in units * 2:
        slot = pool.lease(one, "")
        saved.append(slot.whole(one, one.weights[0]))
        slot.release(one)
        assert pool.live_nbytes() <= pool.slot_nbytes == 2 * units[0].nbytes
    assert pool.live_nbytes() == pool.slot_nbytes
    assert saved[0].untyped_storage()._cdata == saved[6].untyped_storage()._cdata, "views stay true"


def test_buffers_are_used_again_by_size_and_dtype() -> None:
    pool = MemoryPool([], CPU)
    first = pool.take(10, torch.float32)
    other = pool.take(10, torch.float32)
    assert first.data_ptr() != other.data_ptr()
    pool.give(first)
    assert pool.take(10, torch.float64).data_ptr() != first.data_ptr()
    assert pool.take(10, torch.float32).data_ptr() == first.data_ptr()
    assert (pool.buffer_allocations, pool.buffer_nbytes) == (3, 40 + 40 + 80)
    without = MemoryPool([], CPU, reuse=False)
    without.give(without.take(10, torch.float32))
    assert without.buffer_nbytes == 0
