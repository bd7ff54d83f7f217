"""Distributed attention compared with one process, in fp64, by value."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from internsp.base.trace import Trace
from internsp.errors import CollectiveError, LayoutError
from internsp.sp import (
    DistributedAttention,
    ExchangeGroup,
    SequenceLayout,
    start_exchange,
)
from tests.support.ranks import ranks, run_ranks

DEPTH = 4
HEADS = [(4, 4), (4, 2), (4, 1), (6, 2), (5, 5), (3, 1), (2, 1), (10, 2)]
# Length, starts of documents per row (two rows), window.
SHAPES: list[tuple[int, list[list[int]] | None, int | None]] = [
    (8, None, None),
    (9, [[0, 1, 5], [0, 7]], None),
    (7, [[0, 3], [0]], 2),
    (3, None, None),
]
CLOSE = {"atol": 1e-12, "rtol": 0.0}


def inputs(heads: int, kv_heads: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(heads * 100 + kv_heads * 10 + length)
    shapes = [heads, kv_heads, kv_heads, heads]
    made = [torch.randn(2, length, n, DEPTH, dtype=torch.float64) for n in shapes]
    return made[0], made[1], made[2], made[3]


def one_process(
    heads: int, kv_heads: int, length: int, starts: list[list[int]] | None, window: int | None
) -> list[Tensor]:
    """Output and gradients of q, k, v."""
    *given, upstream = inputs(heads, kv_heads, length)
    leaves = [x.requires_grad_() for x in given]
    ids = torch.zeros(2, length, dtype=torch.long)
    attend = DistributedAttention(heads, kv_heads, DEPTH, window=window)
    out = attend(*leaves, SequenceLayout.create(ids, boundaries=starts))
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def forms_of(
    attend: DistributedAttention, layout: SequenceLayout
) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Every way of calling it, as functions of separate q, k and v."""

    def early(*given: Tensor) -> Tensor:
        pending = [attend.start(x, role, layout) for x, role in zip(given, "qkv", strict=True)]
        return attend(*pending, layout)

    return {
        "separate": lambda q, k, v: attend(q, k, v, layout),
        "early": early,
        "packed qkv": lambda q, k, v: attend.packed_qkv(torch.cat([q, k, v], 2), layout),
        "packed kv": lambda q, k, v: attend.packed_kv(q, torch.stack([k, v], 2), layout),
    }


@pytest.mark.parametrize(
    "world_size", [1, 2, pytest.param(4, marks=pytest.mark.unmeasured)]
)
@ranks()
def test_every_form_of_attention_equals_one_process(rank: int, world_size: int) -> None:
    for (heads, kv_heads), (length, starts, window) in itertools.product(HEADS, SHAPES):
        wanted = one_process(heads, kv_heads, length, starts, window)
        ids = torch.zeros(2, length, dtype=torch.long)
        layout = SequenceLayout.create(ids, rank=rank, size=world_size, boundaries=starts)
        here = slice(*layout.ranges[rank][0]) if layout.ranges[rank] else slice(0)
        *given, upstream = (x[:, here] for x in inputs(heads, kv_heads, length))
        attend = DistributedAttention(heads, kv_heads, DEPTH, window=window)
        attend.attach(dist.group.WORLD)
        forms = forms_of(attend, layout)
        for name, form in forms.items():
            leaves = [x.clone().requires_grad_() for x in given]
            out = form(*leaves)
            got = [out, *torch.autograd.grad(out, leaves, upstream)]
            for what, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
                case = f"{name} {heads}/{kv_heads} length {length}: {what}"
                torch.testing.assert_close(a, b[:, here], **CLOSE, msg=lambda m, c=case: f"{c} {m}")


def exchanges_overlap(rank: int, size: int) -> list[str]:
    trace = Trace(enabled=True)
    attend = DistributedAttention(4, 2, DEPTH)
    attend.attach(dist.group.WORLD, trace, "block")
    *given, _ = inputs(4, 2, 3)
    with torch.autograd.detect_anomaly(check_nan=True):
        attend(*(x.requires_grad_() for x in given)).square().sum().backward()
    assert all(e.end is not None and e.end >= e.start for e in trace.events)
    assert not attend.group.in_flight
    # Elements that leave this rank: queries, keys, values and the output are doubles.
    sent = {e.weight: e.nbytes for e in trace.events if e.kind == "A2A" and e.phase == "forward"}
    elements = 2 * 3 * DEPTH
    assert sent == {
        "q": elements * 2 * 8,
        "k": elements * 8,
        "v": elements * 8,
        "out": 2 * 8 * elements,
    }
    return [f"{e.kind} {e.phase} {e.weight}" for e in trace.events]


def test_three_exchanges_are_in_flight_before_the_first_wait_also_in_backward() -> None:
    for lines in run_ranks(exchanges_overlap, 2):
        assert lines == [
            *(f"A2A forward {x}" for x in "qkv"),
            *(f"A2A_WAIT forward {x}" for x in "qkv"),
            "A2A forward out",
            "A2A_WAIT forward out",
            "A2A backward out",
            "A2A_WAIT backward out",
            *(f"A2A backward {x}" for x in "vkq"),
            *(f"A2A_WAIT backward {x}" for x in "vkq"),
        ]


@ranks(4)
def test_objects_with_different_groups_live_in_one_process(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = [dist.group.WORLD, halves[rank // 2], crossed[rank % 2]]
    outs = []
    for group in groups:
        attend = DistributedAttention(4, 2, DEPTH)
        attend.attach(group)
        part, parts = dist.get_rank(group), dist.get_world_size(group)
        layout = SequenceLayout.create(torch.zeros(2, 9, dtype=torch.long), rank=part, size=parts)
        q, k, v, up = (layout.own(x) for x in inputs(4, 2, 9))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        outs.append((attend(*leaves, layout), leaves, up, layout))
    wanted = one_process(4, 2, 9, None, None)
    # The objects are deleted; their graphs still run, in another order.
    for out, leaves, up, layout in reversed(outs):
        got = [out, *torch.autograd.grad(out, leaves, up)]
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, layout.own(b), **CLOSE)


@ranks(2)
def test_misuse_is_told_and_lost_exchanges_do_not_pile_up(rank: int) -> None:
    group = ExchangeGroup.of(dist.group.WORLD)
    assert ExchangeGroup.of(dist.group.WORLD) is group
    assert ExchangeGroup.of(dist.group.WORLD, Trace()) is not group
    head_ranges = ((0, 1),), ((1, 2),)
    with pytest.raises(LayoutError, match=rf"Rank {rank}: the exchange of 'q' to heads needs"):
        start_exchange(torch.zeros(1, 2, 3, 4), group, (2, 2), head_ranges, to="heads", label="q")
    pending = start_exchange(torch.zeros(1, 2, 2, 4), group, (2, 2), head_ranges, to="heads")
    assert torch.equal(pending.wait(), pending.wait())
    # Launched and never waited for: bounded, and the next exchange is right.
    x = torch.randn(1, 2, 2, 4)
    lost = [start_exchange(x, group, (2, 2), head_ranges, to="heads") for _ in range(70)]
    assert len(group.in_flight) <= 64
    with pytest.raises(CollectiveError, match="already waited for, or dropped"):
        lost[0].wait()
    whole = start_exchange(x, group, (2, 2), head_ranges, to="heads").wait()
    back = start_exchange(whole, group, (2, 2), head_ranges, to="sequence").wait()
    assert torch.equal(back, x)


@ranks(4)
def test_gradients_from_several_ranks_are_rounded_once(rank: int, world_size: int) -> None:
    """Gradients of a shared key/value head are summed in fp32 before they are rounded once."""
    for dtype in (torch.bfloat16, torch.float16):
        group = ExchangeGroup.of(dist.group.WORLD)
        x = torch.zeros(1, 1, 1, 1, dtype=dtype, requires_grad=True)
        lengths, head_ranges = (1,) * world_size, (((0, 1),),) * world_size
        whole = start_exchange(x, group, lengths, head_ranges, to="heads").wait()
        assert whole.shape == (1, world_size, 1, 1)
        step = torch.finfo(dtype).eps / 2
        whole.backward(torch.full_like(whole, 1.0 if rank == 0 else step))
        wanted = torch.tensor(1.0 + step * (world_size - 1), dtype=torch.float64).to(dtype)
        assert wanted > 1.0
        assert x.grad is not None
        assert torch.equal(x.grad.flatten(), wanted.view(1))
