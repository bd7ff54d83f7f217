"""An exchange of tokens whose message is lost, or one of whose owners is killed (WP-10)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from internsp.errors import CollectiveError
from internsp.experts.exchange import OwnerGroup
from internsp.mesh import ParallelMesh
from tests.support import hf
from tests.support.owners import OwnersTwin
from tests.support.ranks import ranks, start_server

TIMEOUT = 3.0
# Of two blocks, forward has three messages each (counts, tokens, results), backward two.
PLACES = {
    4: "counts of model.layers.1.mlp.experts (forward)",
    5: "tokens of model.layers.1.mlp.experts (forward)",
    7: "results of model.layers.1.mlp.experts (backward)",
    10: "tokens of model.layers.0.mlp.experts (backward)",
}


def at_message(number: int, do: Callable[..., Any]) -> Any:
    """Call ``do`` in the place of the ``number``-th all-to-all."""
    real, count = OwnerGroup.all_to_all, iter(range(1, 99))

    def send(group: OwnerGroup, *args: Any) -> Any:
        return do(*args) if next(count) == number else real(group, *args)

    return mock.patch.object(OwnerGroup, "all_to_all", send)


def step(mesh: ParallelMesh) -> str:
    """A forward and backward; what the error says."""
    twin = OwnersTwin("mixtral", mesh)
    with pytest.raises(CollectiveError) as caught:
        hf.sums(twin.ours, {"input_ids": hf.ids(mesh.rank), "use_cache": False}).backward()
    return str(caught.value)


@pytest.mark.parametrize("number", [4, 7])
@ranks(2, fresh=True)
def test_a_lost_message_is_one_error_on_all_ranks_with_block_and_phase(
    number: int, rank: int
) -> None:
    mesh = ParallelMesh.create(device_type="cpu", timeout_seconds=TIMEOUT, expert=2)
    nowhere = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT))

    def lose(received: Any, send: Any, into: list[int], out: list[int]) -> Any:
        return dist.all_to_all_single(received, send, into, out, group=nowhere, async_op=True)

    start = time.monotonic()
    with at_message(number if rank == 1 else 0, lose):
        text = step(mesh)
    assert time.monotonic() - start < 4 * TIMEOUT
    assert PLACES[number] in text, text


def killed(rank: int, owners: int, port: int, number: int, told: Connection) -> None:
    """A process of its own: rank 1's is killed in the place of a message."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=owners, timeout=timedelta(seconds=60)
    )
    mesh = ParallelMesh.create(device_type="cpu", timeout_seconds=60, expert=owners)
    with at_message(number if rank == 1 else 0, lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        told.send(step(mesh))


@pytest.mark.unmeasured
@pytest.mark.parametrize(("owners", "number"), [(2, 5), (4, 10)])
def test_a_killed_owner_is_an_error_on_all_others_with_block_and_phase(
    owners: int, number: int
) -> None:
    start_server()
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine, theirs = context.Pipe(duplex=False)
    given = owners, store.port, number, theirs
    every = [context.Process(target=killed, args=(r, *given), daemon=True) for r in range(owners)]
    for process in every:
        process.start()
    try:
        for _ in every[1:]:
            assert mine.poll(40), "the others must not wait for the groups' timeout"
            told = mine.recv()
            assert PLACES[number] in told, told
    finally:
        for process in every:
            process.kill()
            process.join()
