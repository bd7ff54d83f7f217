"""On a GPU: streams at odds, several ranks on one device, memory as stated, times by events.

One device is enough. Collectives are emulated (``tools/gpu/link.py``) or carried by gloo, so that
what is tested is this project's use of streams and memory, not a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from internsp import ParallelMesh, WeightParallelConfig, parallelize
from internsp.base.accelerator import DeviceClock, current_stream
from internsp.base.trace import Trace
from internsp.wp.slots import SlotStreams
from tests.support.parity import Case, run_case
from tests.support.ranks import run_ranks
from tools.bench.model import process_group
from tools.gpu import emulation, overhead, rounds
from tools.gpu.link import EmulatedCollectives, Pace, make_link
from tools.gpu.options import Options

CUDA = torch.device("cuda", 0)
SMALL = replace(
    Options().resolve("cpu"), hidden=512, heads=8, intermediate=1024, layers=4, sequences=(256,),
    emulated_ranks=4, rounds=1, steps=3, delay_ms=3.0,
)  # fmt: skip


def test_delayed_streams_train_what_one_plain_process_does() -> None:
    rows = emulation.run_streams(SMALL, CUDA)
    assert {row["name"]: row["reason"] for row in rows} == dict.fromkeys(emulation.STREAMS)


def test_a_wait_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.gpu.link._Arrival.wait", lambda arrival: None)
    monkeypatch.setattr(emulation, "STREAMS", {"defaults": ({}, {})})
    (row,) = emulation.run_streams(replace(SMALL, delay_ms=50.0), CUDA)
    assert row["reason"] is not None


def train_with(place: Callable[[int], Any], **settings: Any) -> None:
    """Train with each step's forward on the stream that ``place`` gives, its backward called from
    the default one; the losses must be one process's."""
    count = SMALL.size("emulated_ranks")
    model, weights = emulation._model(SMALL)
    with process_group("fake", count):
        mesh = ParallelMesh.create(weight=count, device_type="cuda")
        alike = emulation.tied(model, weights, CUDA, count)
        link = make_link(CUDA, Pace(most_delay=0.003, poison=True))
        made, communicator = emulation._ours("streams", model, weights, CUDA, mesh, link, settings)
        inner, default = made.model, torch.cuda.default_stream(CUDA)
        for step in range(4):
            stream = place(step)

            def forward(*given: Any, stream: Any = stream) -> torch.Tensor:
                stream.wait_stream(default)
                with torch.cuda.stream(stream):
                    total: torch.Tensor = inner(*given)
                default.wait_stream(stream)
                return total

            made.model = forward  # type: ignore[assignment]
            made.seconds(CUDA)
            alike.seconds(CUDA)
        link.close()
        rounds.compare({"streams": made, alike.name: alike}, alike.name)
        assert communicator.state.collectives.counters.gathers > 0


@pytest.mark.parametrize("settings", [{}, {"prefetch_depth": 2}, {"memory_pool": False}])
def test_a_step_on_other_streams_than_the_last_is_right(settings: dict[str, Any]) -> None:
    streams = [torch.cuda.Stream(CUDA) for _ in range(2)]
    train_with(lambda step: streams[step % 2], **settings)


def test_a_gather_does_not_overwrite_what_another_stream_still_reads() -> None:
    other, slot = torch.cuda.Stream(CUDA), torch.ones(1 << 20, device=CUDA)
    streams = SlotStreams(current_stream(CUDA))
    streams.read("w")
    other.wait_stream(torch.cuda.current_stream(CUDA))
    with torch.cuda.stream(other):
        streams.read("w")
        torch.cuda._sleep(200_000_000)
        seen = slot.sum()
    streams.before_overwrite("v")
    slot.fill_(float("nan"))
    torch.cuda.synchronize(CUDA)
    assert float(seen) == 1 << 20


def parity(rank: int, world_size: int, cases: list[Case]) -> list[tuple[float, float]]:
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "LOCAL_RANK": "0"}
    return [run_case(case, device="cuda") for case in cases]


def test_gradients_of_ranks_that_share_the_device_equal_one_process() -> None:
    cases = [
        Case(weight=2),
        Case(weight=2, weights={"coalesce_bytes": 0}),
        Case(weight=1, sequence=2, micro_batches=2),
        Case(weight=2, sequence=2, weights={"prefetch_depth": 2}),
        Case(weight=2, checkpoint={"mode": "full"}),
        Case(weight=2, weights={"memory_pool": False, "overlap": False}),
    ]
    for found in run_ranks(parity, 2, cases, timeout=240.0):
        assert [gap < 1e-9 for pair in found for gap in pair] == [True] * 2 * len(cases), found


def test_one_rank_over_nccl_trains_what_the_plain_model_and_fsdp2_do() -> None:
    (row,) = overhead.run(SMALL, CUDA)
    assert set(row["variants"]) == {overhead.PLAIN, overhead.OURS, overhead.IMPORT, overhead.FSDP2}
    assert all(found["step_bytes"] > 0 for found in row["variants"].values())


def test_memory_is_what_the_pool_says() -> None:
    memory = emulation.run_memory(SMALL, CUDA)
    assert memory["late_allocations"] == 0
    assert memory["held"] == pytest.approx(memory["predicted"], rel=0.02)
    assert memory["peak"] <= 1.02 * memory["predicted_peak"]


def test_a_wait_of_the_device_is_timed_by_the_device() -> None:
    count = SMALL.size("emulated_ranks")
    model, weights = emulation._model(SMALL)
    with process_group("fake", count):
        mesh = ParallelMesh.create(weight=count, device_type="cuda")
        blocks = emulation.fresh(model, weights, CUDA)
        trace = Trace(enabled=True, clock=DeviceClock(CUDA))
        link = make_link(CUDA, Pace(most_delay=0.0, bytes_per_second=50e6))
        parallelize(
            blocks,
            mesh,
            WeightParallelConfig(min_shard_elements=513, coalesce_bytes=0),
            trace=trace,
            collectives=partial(EmulatedCollectives, link=link),
        )
        made = emulation.trainee("timed", blocks, model, CUDA)
        made.seconds(CUDA)
        trace.clear()
        trace.begin_step()
        link.busy_seconds()
        took = made.seconds(CUDA)
        busy, exposed = link.busy_seconds(), trace.exposed_seconds
        trace.resolve()
        link.close()
    waited = sum(e.end - e.start for e in trace.events if e.kind == "WAIT" and e.end is not None)
    flights = [e for e in trace.events if e.kind in ("AG", "RS")]
    assert exposed == pytest.approx(waited, rel=1e-3)
    assert 0.5 * busy < exposed < took, "the link is far too slow, so nearly all of it is exposed"
    assert all(e.end is not None and e.end > e.start for e in flights)
