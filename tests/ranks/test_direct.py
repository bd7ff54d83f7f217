"""On gloo, messages between pairs of ranks replace a collective and give the same bits."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from internsp.base.trace import Trace
from internsp.errors import CollectiveError
from internsp.failure.comm_context import Counters
from internsp.wp.collectives import MOST_DIRECT, Collectives
from tests.support.ranks import ranks, run_ranks

SHARD = (15,)


def made(direct: bool, trace: Trace | None = None) -> Collectives:
    collectives = Collectives(dist.group.WORLD, True, trace or Trace(), Counters())
    assert collectives.transport.direct, "gloo, host tensors, few ranks"
    collectives.transport.direct = direct
    return collectives


@pytest.mark.parametrize("world_size", [2, 3, 4])
@ranks()
def test_messages_between_pairs_bring_the_bits_of_a_collective(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float64, torch.bfloat16, torch.uint8):
        shard = torch.randint(0, 200, SHARD, generator=generator).to(dtype)
        pieces = torch.randint(0, 200, (world_size * 7,), generator=generator).to(dtype)
        found: list[tuple[Tensor, Tensor]] = []
        for direct in (False, True):
            collectives = made(direct)
            slots = [torch.zeros(world_size * shard.numel(), dtype=dtype) for _ in range(3)]
            # This rank's own part need not be set: its contents must not count.
            received = [torch.full_like(pieces, 99) for _ in range(3)]
            sent = [pieces + i for i in range(3)]
            # Several in flight, waited for out of order.
            handles = []
            for i in range(3):
                gathered = collectives.all_gather([slots[i]], [shard + i], "u", ["w"], "forward")
                handles.append(gathered)
                handles.append(collectives.reduce_scatter(received[i], sent[i], "u", {"w": 7}, "b"))
            for handle in reversed(handles):
                collectives.wait(handle, "u", "w", "forward")
            summed = collectives.transport.sum_output
            totals = [summed(r, s) for r, s in zip(received, sent, strict=True)]
            found.append((torch.stack(slots), torch.stack(totals)))
        for whole, pair in zip(*found, strict=True):
            assert torch.equal(whole, pair), dtype
            assert whole.any(), "something has arrived"
        assert found[1][1].dtype == torch.promote_types(dtype, torch.float32), "summed wide"


def traced(rank: int, world_size: int) -> tuple[float, float, float]:
    trace = Trace(enabled=True)
    collectives = made(True, trace)
    slot, shard = torch.zeros(2 * 15), torch.ones(SHARD)
    dist.barrier()
    time.sleep(0.2 * rank)
    launched = time.perf_counter()
    handle = collectives.all_gather([slot], [shard], "u", ["w"], "forward")
    time.sleep(0.6)
    before = time.perf_counter()
    collectives.wait(handle, "u", "w", "forward")
    end = trace.events[0].end
    assert end is not None
    return launched, end, before


def test_a_trace_tells_when_a_gather_ended_not_when_it_was_waited_for() -> None:
    (first, end, waited), (second, _, _) = run_ranks(traced, 2)
    assert first < second < end < waited  # one machine, one clock


def out_of_step(rank: int, world_size: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1), backend="gloo")
    collectives = Collectives(group, True, Trace(), Counters())
    collectives.comm_context.counts[0] += rank  # rank 1 behaves as if it had sent one more
    slot = torch.zeros(2 * 15)
    handle = collectives.all_gather([slot], [torch.ones(SHARD)], "u", ["wq"], "forward")
    with pytest.raises(CollectiveError, match="wq") as caught:
        collectives.wait(handle, "u", "wq", "forward")
    return str(caught.value)


def test_ranks_out_of_step_get_an_error_and_never_the_wrong_weight() -> None:
    for rank, message in enumerate(run_ranks(out_of_step, 2)):
        assert f"rank {rank}" in message


@ranks(2)
def test_only_host_tensors_of_few_ranks_travel_so(world_size: int) -> None:
    collectives = Collectives(dist.group.WORLD, True, Trace(), Counters())
    assert collectives.transport.direct == (world_size <= MOST_DIRECT)
    cut = Collectives(dist.group.WORLD, True, Trace(), Counters(), device=torch.device("meta"))
    assert not cut.transport.direct, "gloo sends device tensors by collectives only"


@ranks(1)
def test_a_group_of_one_copies_every_shard_of_a_launch() -> None:
    alone = Collectives(dist.group.WORLD, True, Trace(), Counters())
    shards = [torch.arange(3.0), torch.arange(4.0) + 5]
    outputs = [torch.full_like(shard, torch.nan) for shard in shards]
    assert alone.all_gather(outputs, shards, "block", ["a", "b"], "forward").work is None
    for output, shard in zip(outputs, shards, strict=True):
        assert torch.equal(output, shard)
