"""Each start of the ranks has a separate part of the store, independent of earlier ones."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from internsp.mesh.fresh_store import for_this_start


def start(store: dist.TCPStore, size: int) -> list[str]:
    """One start: every rank writes something and reads what rank 0 wrote."""
    heard = [""] * size

    def rank(number: int) -> None:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        part = for_this_start(own, number, size, 20)
        assert not part.check([f"said by {number}"]), "left by an earlier start"
        part.set(f"said by {number}", str(size))
        heard[number] = part.get("said by 0").decode()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_starts_do_not_see_what_earlier_ones_have_left_also_with_other_ranks() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for size in (2, 2, 3, 1, 2):
        assert start(store, size) == [str(size)] * size
    store.set("internsp/start/hello/1", "of a rank that was killed while it waited")
    assert start(store, 2) == ["2", "2"]


@pytest.mark.parametrize(
    ("rank", "said"), [(0, "ranks 1, 2 did not come"), (1, "rank 0 did not come")]
)
def test_a_rank_that_does_not_come_is_named(rank: int, said: str) -> None:
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    with pytest.raises(dist.DistNetworkError, match=said):
        for_this_start(store, rank, 3, 0.1)
