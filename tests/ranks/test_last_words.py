"""Every rank that waits for a failed rank gets the cause, wherever it failed (WP-10)."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import model_zoo
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import CollectiveError
from internsp.mesh import ParallelMesh
from internsp.optim.zero import ZeroOptimizer
from internsp.parallel.parallelize import parallelize
from internsp.sp import SequenceLayout
from tests.ranks.test_rules_errors import Boom, Failing
from tests.support.models import Tiny, Twin
from tests.support.parity import Case, batch
from tests.support.ranks import ranks, run_ranks, start_server

TIMEOUT = 4.0


class Recomputed(Failing):
    """Raises in its recompute."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.where == "recompute" and self.passes > 1:
            raise Boom("in the recompute")
        return super().forward(x)


class Other(Tiny):
    """A model with blocks that fail."""

    def __init__(self) -> None:
        super().__init__(Recomputed)


def alone(rank: int, world_size: int, where: str) -> str:
    """Only rank 0's backward fails, and its loop continues; the other rank waits for it."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=TIMEOUT)
    twin = Twin(Other, mesh, ActivationCheckpointConfig(mode="full", fraction=0.5))
    twin.backward()
    layer: Any = twin.ours.layers[1]  # type: ignore[index]
    layer.where, layer.passes = where if rank == 0 else "", 0
    loss = twin.ours(*twin.batch()[1])
    with pytest.raises(Boom if rank == 0 else CollectiveError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.thorough(2)
@pytest.mark.unmeasured
@pytest.mark.parametrize("where", ["backward", "recompute"])
def test_a_rank_that_waits_is_told_that_anothers_backward_failed(where: str) -> None:
    _, told = run_ranks(alone, 2, where)
    assert "rank 0 failed first: its backward raised" in told, told


@pytest.mark.unmeasured
@pytest.mark.parametrize("ring", [1, 4])
@ranks(4, fresh=True)
def test_ranks_that_wait_in_an_attention_are_told_who_failed(ring: int, rank: int) -> None:
    """Rank 2 of a ring sends more messages than others; torch counts them all."""
    mesh = ParallelMesh.create(
        weight=4, sequence=4, ring=ring, device_type="cpu", timeout_seconds=30
    )
    case = Case(length=40, model={"hidden_size": 16, "heads": 4})
    model: Any = model_zoo.build(case.model_config(), dtype=torch.float64)
    communicator = parallelize(model, mesh, WeightParallelConfig(min_shard_elements=24))
    tokens, _, _ = batch(case, 1, 0)
    layout = SequenceLayout.create(tokens, rank=mesh.sequence_rank, size=mesh.sequence)
    kept = {"layout": layout, "labels": layout.labels}
    for _ in range(2):
        model(layout.input_ids, **kept)[0].backward()
    told = communicator.events.recovery.guard.sequence_numbers()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, told)
    assert everyone == [told] * 4
    assert not (ring > 1) or mesh.pairs, "a ring sends between pairs"

    def fail(gradient: Tensor) -> None:
        raise Boom("in the backward of attention")

    if rank == 2:
        attend = model.layers[1].attention.attend
        attend.register_forward_hook(lambda *given: given[-1].register_hook(fail) and None)
    loss = model(layout.input_ids, **kept)[0]
    with pytest.raises(Boom if rank == 2 else CollectiveError) as caught:
        loss.backward()
    if rank != 2:
        assert "layers.1.attention.attend (backward)" in str(caught.value)
        assert "rank 2 failed first: its backward raised" in str(caught.value)
        assert "Timed out waiting" not in str(caught.value), "as gloo says after the timeout"


@pytest.mark.unmeasured
@ranks(2, fresh=True)
def test_ranks_that_wait_in_a_step_are_told_that_anothers_closure_failed(rank: int) -> None:
    """The rank that failed catches the error, and comes to no other collective."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=30)
    twin = Twin(Tiny, mesh)
    optimizer = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1)

    def closure() -> None:
        twin.ours(*twin.batch()[1]).backward()
        if rank == 1:
            raise Boom("in the closure")

    began = time.monotonic()
    with pytest.raises(Boom if rank == 1 else CollectiveError, match="in the closure"):
        optimizer.step(closure)
    assert time.monotonic() - began < 15


def life(rank: int, world_size: int, port: int, holds: bool, where: str, told: Connection) -> None:
    """A separate process: rank 0's ends by an exception, the others report their errors."""
    master = holds and rank == 0
    store = dist.TCPStore("127.0.0.1", port, is_master=master, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        mesh = ParallelMesh.create(weight=world_size, device_type="cpu", timeout_seconds=60)
        twin = Twin(Other, mesh)
        twin.backward()
        layer: Any = twin.ours.layers[1]  # type: ignore[index]
        layer.where = where if rank == 0 else ""
        loss = twin.ours(*twin.batch()[1])
        if rank == 0 and where == "loss":
            raise Boom("in the loss")
        loss.backward()
        if rank == 0 and where == "leaves":
            sys.exit(3)
        if rank == 0:
            raise Boom("between two steps")
        twin.ours(*twin.batch()[1])
    except CollectiveError as error:
        told.send(str(error))
    except Boom:
        if where == "exit":
            sys.exit(1)  # as torch.multiprocessing does
        raise
    finally:
        if where != "leaves" and not master:
            dist.destroy_process_group()  # before the process reports why it ends


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("where", "cause", "world_size", "holds"),
    [
        ("middle", "rank 0 failed first: Boom in forward: in the middle", 2, False),
        ("backward", "rank 0 failed first: Boom: in backward", 3, False),
        ("loss", "rank 0 failed first: Boom: in the loss", 2, True),
        ("step", "rank 0 failed first: Boom: between two steps", 3, True),
        ("exit", "rank 0 failed first: Boom: between two steps", 2, False),
        ("leaves", "rank 0's program has ended (sys.exit", 2, False),
        ("leaves", "The process that held the ranks' store has ended", 2, True),
    ],
)
def test_a_process_that_ends_leaves_its_cause(
    where: str, cause: str, world_size: int, holds: bool
) -> None:
    """Also if the failing rank hosts the ranks' store (``holds``)."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if holds:
        del store  # rank 0 reuses its port
    mine, theirs = context.Pipe(duplex=False)
    given = world_size, port, holds, where, theirs
    ranks = [
        context.Process(target=life, args=(rank, *given), daemon=True) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        for _ in ranks[1:]:
            assert mine.poll(50), "the others must not wait for the groups' timeout"
            told = mine.recv()
            assert cause in told, told
    finally:
        for process in ranks:
            process.kill()
            process.join()


def last_read(rank: int, port: int, together: bool, ended: Any, told: Connection) -> None:
    """A process of two replicas; rank 0, which hosts the store, has ended once ``ended`` is set."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    weight = Twin(Other, ParallelMesh.create(weight=2, device_type="cpu")).ours.embed.weight
    if rank > 1 and not together:
        ended.wait()
    try:
        told.send(str(weight.full_tensor().shape))  # type: ignore[operator]
    except CollectiveError as error:
        told.send(str(error))
    if together:
        dist.barrier()


@pytest.mark.unmeasured
@pytest.mark.parametrize("together", [False, True])
def test_a_read_after_the_end_of_the_stores_process_says_so_unless_ranks_end_together(
    together: bool,
) -> None:
    start_server()
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store  # rank 0 reuses its port
    mine, theirs = context.Pipe(duplex=False)
    ended = context.Event()
    given = port, together, ended, theirs
    processes = [
        context.Process(target=last_read, args=(rank, *given), daemon=True) for rank in range(4)
    ]
    for process in processes:
        process.start()
    try:
        processes[0].join(50)
        ended.set()
        told = []
        for _ in processes:
            assert mine.poll(50), told
            told.append(mine.recv())
        read = [one for one in told if one == "torch.Size([11, 6])"]
        assert len(read) == (4 if together else 2), told
        assert all("store has ended" in one for one in told if one not in read), told
    finally:
        for process in processes:
            process.kill()
            process.join()


PROGRAM = """
from internsp.failure.detection import call_at_exit
class Owner: pass
owner, gone = Owner(), Owner()
call_at_exit(owner, lambda owner, error: print(f"told {error!r}"))
call_at_exit(gone, lambda owner, error: print("told of what has gone"))
del gone
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [("raise ValueError(7)", "told ValueError(7)"), ("raise SystemExit(3)", "told None")],
)
def test_a_program_says_why_it_ends(end: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + end], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert done.stdout.strip() == said
