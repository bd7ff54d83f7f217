"""Attention sharded by positions: outputs and gradients equal one process, for any ring.

All in fp64. Ranks hold the positions of the layout; keys and values are sent in every form.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from internsp.base.trace import Trace
from internsp.errors import LayoutError
from internsp.mesh import SequenceAxes
from internsp.sp import DistributedAttention, SequenceLayout
from internsp.sp import ring as ring_room
from internsp.sp.layout import Documents
from internsp.sp.partial import BlockAttention
from internsp.sp.routes import FORMS
from tests.support.few import some
from tests.support.meshes import mesh_of
from tests.support.ranks import ranks
from tests.support.ring import groups

DEPTH = 4
HEADS = [(4, 4), (4, 2), (2, 1), (3, 1), (1, 1)]
# Length, starts of documents per row (two rows), causal, window.
SHAPES: list[tuple[int, list[list[int]] | None, bool, int | None]] = [
    (16, None, True, None),
    (21, [[0, 1, 5], [0, 17]], True, None),
    (19, [[0, 3], [0, 3]], True, 4),
    (17, [[0, 12], [0, 3]], True, None),  # as many documents in each row, cut elsewhere
    (13, [[0, 2, 9], [0]], False, 3),
    (12, None, False, None),
    (3, None, True, None),
]
CLOSE = {"atol": 1e-12, "rtol": 0.0}


def inputs(heads: int, kv_heads: int, length: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(heads * 100 + kv_heads * 10 + length)
    shapes = [heads, kv_heads, kv_heads, heads]
    return [torch.randn(2, length, n, DEPTH, dtype=torch.float64) for n in shapes]


def one_process(case: tuple[int, int], shape: tuple) -> list[Tensor]:
    """Output and gradients of q, k, v."""
    length, starts, causal, window = shape
    *given, upstream = inputs(*case, length)
    leaves = [x.requires_grad_() for x in given]
    ids = torch.zeros(2, length, dtype=torch.long)
    attend = DistributedAttention(*case, DEPTH, causal=causal, window=window)
    out = attend(*leaves, SequenceLayout.create(ids, boundaries=starts))
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize(
    ("world_size", "ring", "near"),
    some([(2, 2, "heads"), (3, 3, "heads"), (4, 2, "heads"), (4, 4, "heads"), (4, 2, "ring"),
          (8, 4, "ring"), (8, 2, "ring")], 4),
)  # fmt: skip
@ranks()
def test_every_form_equals_one_process(rank: int, world_size: int, ring: int, near: str) -> None:
    heads, around = groups(world_size, ring, near)
    axes = SequenceAxes.create(world_size, ring, near)
    cases = list(itertools.product(HEADS, SHAPES))
    if world_size == 8:  # a few: so many processes are slow
        cases = cases[1::4]
    ways = itertools.cycle(itertools.product(FORMS, ("contiguous", "zigzag", "level")))
    for (case, shape), (form, balance) in zip(cases, ways, strict=False):
        wanted = one_process(case, shape)
        length, starts, causal, window = shape
        layout = SequenceLayout.create(
            torch.zeros(2, length, dtype=torch.long), rank=rank, size=world_size,
            boundaries=starts, ring=ring, near=near, balance=balance, causal=causal,
            window=window,
        )  # fmt: skip
        attend = DistributedAttention(*case, DEPTH, causal=causal, window=window)
        inner = 2 if form == "double" and ring == 4 else 1
        attend.attach(heads, ring=around, axes=axes, form=form, inner=inner)
        *given, upstream = (layout.own(x) for x in inputs(*case, length))
        leaves = [x.clone().requires_grad_() for x in given]
        out = attend(*leaves, layout)
        got = [out, *torch.autograd.grad(out, leaves, upstream)]
        for what, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
            told = f"{case} {shape} {form} {balance}: {what}"
            torch.testing.assert_close(a, layout.own(b), **CLOSE, msg=lambda m, t=told: f"{t} {m}")


@ranks(2)
def test_without_a_layout_positions_follow_one_another(rank: int) -> None:
    heads, around = groups(2, 2)
    wanted = one_process((2, 1), (10, None, True, None))
    trace = Trace(enabled=True)
    attend = DistributedAttention(2, 1, DEPTH)
    attend.attach(heads, trace, "block", ring=around)
    here = slice(rank * 5, rank * 5 + 5)
    leaves = [x[:, here].clone().requires_grad_() for x in inputs(2, 1, 10)[:3]]
    out = attend(*leaves)
    got = [out, *torch.autograd.grad(out, leaves, inputs(2, 1, 10)[3][:, here])]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b[:, here], **CLOSE)
    # The second half needs the first, not the other way round; gradients are sent back.
    lines = [(e.kind, e.phase, e.weight, e.nbytes) for e in trace.events if e.kind == "RING"]
    block = 2 * 2 * 5 * DEPTH * 8
    assert lines == (
        [("RING", "forward", "kv", block), ("RING", "backward", "kv", block)] if rank
        else [("RING", "backward", "gradients", block)]
    )  # fmt: skip


@pytest.mark.parametrize("near", ["heads", "ring"])
@ranks(4)
def test_ranks_hold_what_their_numbers_say_where_there_is_no_layout(rank: int, near: str) -> None:
    heads, around = groups(4, 2, near)
    wanted = one_process((2, 1), (12, None, True, None))
    attend = DistributedAttention(2, 1, DEPTH)
    attend.attach(heads, ring=around, axes=SequenceAxes.create(4, 2, near))
    here = slice(rank * 3, rank * 3 + 3)
    leaves = [x[:, here].clone().requires_grad_() for x in inputs(2, 1, 12)[:3]]
    out = attend(*leaves)
    got = [out, *torch.autograd.grad(out, leaves, inputs(2, 1, 12)[3][:, here])]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b[:, here], **CLOSE)


@pytest.mark.parametrize("near", ["heads", "ring"])
@ranks(4)
def test_another_order_of_the_layout_or_the_groups_is_refused_and_one_dealt_to_no_ring_is_right(
    rank: int, near: str
) -> None:
    """A deliberate mistake. No rank sends anything, so none waits for one that has raised."""
    axes = SequenceAxes.create(4, 2, near)
    other = "ring" if near == "heads" else "heads"
    ids = torch.zeros(2, 12, dtype=torch.long)
    layouts = {n: SequenceLayout.create(ids, rank=rank, size=4, ring=2, near=n)
               for n in ("heads", "ring")}  # fmt: skip
    q, k, v = (layouts[near].own(x) for x in inputs(2, 1, 12)[:3])
    attend = DistributedAttention(2, 1, DEPTH)
    of = {n: groups(4, 2, n) for n in ("heads", "ring")}
    attend.attach(of[near][0], ring=of[near][1], axes=axes)
    with pytest.raises(LayoutError, match=r"ring = mesh\.ring and near = mesh\.near"):
        attend(q, k, v, layouts[other])
    with pytest.raises(LayoutError, match=r"those of a sequence of|is for rank"):  # noqa: PT012
        attend.attach(of[other][0], ring=of[other][1], axes=axes)
        attend(q, k, v, layouts[near])
    attend.attach(of[near][0], ring=of[near][1], axes=axes)
    wanted = one_process((2, 1), (12, None, True, None))[0]
    plain = SequenceLayout.create(ids, rank=rank, size=4)
    q, k, v = (plain.own(x) for x in inputs(2, 1, 12)[:3])
    torch.testing.assert_close(attend(q, k, v, plain).detach(), plain.own(wanted), **CLOSE)


@ranks(2)
def test_faults_that_others_had_are_seen(rank: int) -> None:
    """A deliberate mistake: backward reads the last block's keys, or documents are dropped."""
    heads, around = groups(2, 2)
    shape = (16, [[0, 5], [0, 5]], True, None)
    wanted = one_process((2, 2), shape)

    def gaps() -> list[float]:
        layout = SequenceLayout.create(
            torch.zeros(2, 16, dtype=torch.long), rank=rank, size=2, boundaries=shape[1], ring=2,
            balance="zigzag",
        )  # fmt: skip
        attend = DistributedAttention(2, 2, DEPTH)
        attend.attach(heads, ring=around)
        *given, upstream = (layout.own(x) for x in inputs(2, 2, 16))
        leaves = [x.clone().requires_grad_() for x in given]
        out = attend(*leaves, layout)
        got = [out, *torch.autograd.grad(out, leaves, upstream)]
        apart = [(a - layout.own(b)).abs().max() for a, b in zip(got, wanted, strict=True)]
        worst = torch.stack(apart).detach()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.tolist()

    assert max(gaps()) < 1e-12
    with pytest.MonkeyPatch.context() as patch:
        held = BlockAttention.backward
        last: list[Tensor] = []

        def of_the_last(self, grad, out, lse, k, v, parts, *totals) -> None:
            if parts and parts[0].kind != "causal" and last:
                k, v = (x[:, : k.shape[1]] if x.shape[1] >= k.shape[1] else y
                        for x, y in zip(last, (k, v), strict=True))  # fmt: skip
            last[:] = k, v
            held(self, grad, out, lse, k, v, parts, *totals)

        patch.setattr(BlockAttention, "backward", of_the_last)
        found = gaps()
        assert found[0] < 1e-12
        assert max(found[1:]) > 1e-3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Documents, "rows", property(lambda self: ((self.length,),)))
        assert min(gaps()) > 1e-3


@pytest.mark.parametrize("again", [False, True])
@ranks(2)
def test_after_an_error_that_all_ranks_met_in_a_ring_the_next_attention_is_right(
    again: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages are in flight while the exception goes, in forward or in backward."""
    mesh = mesh_of(1, 2, ring=2)
    whole = torch.randn(2, 1024, 2, 8, dtype=torch.float64)
    layout = SequenceLayout.create(torch.zeros(2, 1024, dtype=torch.long))
    own = SequenceLayout.create(layout.all_ids, rank=rank, size=2, ring=2)
    wanted, attend = DistributedAttention(2, 2, 8), DistributedAttention(2, 2, 8)
    attend.attach(None, ring=mesh.ring_group, axes=mesh.sequence_axes)

    def fails(*_: Any) -> Any:
        raise MemoryError("no memory for attention")

    for _ in range(4):
        with monkeypatch.context() as patched:
            x = own.own(whole).clone().requires_grad_()
            run = attend(x, x, x, own).sum().backward if again else partial(attend, x, x, x, own)
            patched.setattr(ring_room._Block, "localized", fails)
            with pytest.raises(MemoryError):
                run()
        x, y = own.own(whole).clone().requires_grad_(), whole.clone().requires_grad_()
        attend(x, x, x, own).square().sum().backward()
        wanted(y, y, y, layout).square().sum().backward()
        assert y.grad is not None
        torch.testing.assert_close(x.grad, own.own(y.grad), atol=1e-12, rtol=1e-10)
