"""Checkpointed attention: same values, and selective checkpointing repeats no all-to-all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from internsp.base.trace import Trace
from internsp.errors import OrderError
from internsp.sp import DistributedAttention, SequenceLayout, checkpoint_context_fn
from tests.support.ranks import ranks
from tests.support.ring import groups


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.ModuleList(nn.Linear(12, n * 4, dtype=torch.float64) for n in (3, 1, 1))
        self.wo = nn.Linear(12, 12, dtype=torch.float64)
        self.attend = DistributedAttention(3, 1, 4)

    def forward(self, x: Tensor, layout: SequenceLayout) -> Tensor:
        q, k, v = (w(x).unflatten(2, (-1, 4)) for w in self.wqkv)
        return x + self.wo(self.attend(q, k, v, layout).flatten(2)).tanh()


def count_collectives(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts calls of torch.distributed, independently of the trace."""
    real, calls = dist.all_to_all_single, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    return calls


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("world_size", "size"), [(2, 2), (4, 2)])
@ranks()
def test_a_ring_keeps_the_numbers_and_selective_repeats_no_message(
    rank: int, world_size: int, size: int
) -> None:
    torch.manual_seed(0)
    block = Block()
    whole = torch.randn(2, 9, 12, dtype=torch.float64)
    ids, starts = torch.zeros(2, 9, dtype=torch.long), [[0, 2], [0]]

    def run(layout: SequenceLayout, wrap: Any) -> tuple[Tensor, list[Tensor]]:
        block.zero_grad()
        x = layout.own(whole).clone().requires_grad_()
        y = wrap(block, x, layout)
        y.square().sum().backward()
        return y.detach(), [x.grad, *(p.grad.clone() for p in block.parameters())]

    plain = run(SequenceLayout.create(ids, boundaries=starts), lambda f, *a: f(*a))
    heads, around = groups(world_size, size)
    layout = SequenceLayout.create(
        ids, rank=rank, size=world_size, boundaries=starts, ring=size, balance="zigzag"
    )
    trace = Trace(enabled=True)
    block.attend.attach(heads, trace, ring=around)
    ways = {
        "none": lambda f, *a: f(*a),
        "reentrant": partial(checkpoint, use_reentrant=True),
        "full": partial(checkpoint, use_reentrant=False),
        "selective": partial(
            checkpoint, use_reentrant=False, context_fn=checkpoint_context_fn
        ),
    }
    messages: dict[str, int] = {}
    for name, wrap in ways.items():
        trace.clear()
        y, grads = run(layout, wrap)
        messages[name] = sum(e.kind == "RING" for e in trace.events)
        again = sum(e.kind == "RING" and e.phase == "recompute" for e in trace.events)
        assert (again > 0) == (name in ("reentrant", "full")), name
        torch.testing.assert_close(y, layout.own(plain[0]), atol=1e-12, rtol=0)
        torch.testing.assert_close(grads[0], layout.own(plain[1][0]), atol=1e-12, rtol=0)
        for mine, theirs in zip(grads[1:], plain[1][1:], strict=True):
            dist.all_reduce(mine)
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    assert messages["selective"] == messages["none"] > 0
    assert messages["full"] == messages["reentrant"] > messages["none"]
    retained(block, layout.own(whole), layout)


def retained(block: Block, x: Tensor, layout: SequenceLayout) -> None:
    """A graph that is kept gives the same gradients twice."""
    x = x.clone().requires_grad_()
    y = checkpoint(block, x, layout, use_reentrant=False, context_fn=checkpoint_context_fn)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), x)[0])


@pytest.mark.parametrize("world_size", [2, 4])
@ranks()
def test_checkpointing_keeps_the_numbers_and_selective_repeats_no_exchange(
    rank: int, world_size: int
) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(), Block()])
    whole = torch.randn(2, 7, 12, dtype=torch.float64)
    ids, starts = torch.zeros(2, 7, dtype=torch.long), [[0, 2], [0]]

    def run(layout: SequenceLayout, wrap: Any) -> tuple[Tensor, list[Tensor]]:
        blocks.zero_grad()
        x = layout.own(whole).clone().requires_grad_()
        y = x
        for block in blocks:
            y = wrap(block, y, layout)
        y.square().sum().backward()
        return y.detach(), [x.grad, *(p.grad.clone() for p in blocks.parameters())]

    plain = run(SequenceLayout.create(ids, boundaries=starts), lambda f, *a: f(*a))
    layout = SequenceLayout.create(ids, rank=rank, size=world_size, boundaries=starts)
    trace = Trace(enabled=True)
    for block in blocks:
        block.attend.attach(dist.group.WORLD, trace)
    ways = {
        "none": (lambda f, *a: f(*a), 16),
        "reentrant": (partial(checkpoint, use_reentrant=True), 24),
        "full": (partial(checkpoint, use_reentrant=False), 24),
        "selective": (
            partial(checkpoint, use_reentrant=False, context_fn=checkpoint_context_fn),
            16,
        ),
    }
    for name, (wrap, wanted) in ways.items():
        trace.clear()
        with pytest.MonkeyPatch.context() as patch:
            calls = count_collectives(patch)
            y, grads = run(layout, wrap)
        recorded = [e for e in trace.events if e.kind == "A2A"]
        assert (name, calls[0], len(recorded)) == (name, wanted, wanted)
        again = sum(e.phase == "recompute" for e in recorded)
        assert again == wanted - 16
        torch.testing.assert_close(y, layout.own(plain[0]), atol=1e-12, rtol=0)
        torch.testing.assert_close(grads[0], layout.own(plain[1][0]), atol=1e-12, rtol=0)
        for mine, theirs in zip(grads[1:], plain[1][1:], strict=True):
            dist.all_reduce(mine)
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    retained(blocks[0], layout.own(whole), layout)
    assert not blocks[0].attend.group.in_flight


def test_selective_checkpointing_repeats_no_attention_on_one_rank() -> None:
    seen: list[str] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    attend = DistributedAttention(2, 1, 4)
    q, kv = torch.randn(1, 5, 2, 4, requires_grad=True), torch.randn(1, 5, 1, 4)
    for context, forwards in ((None, 2), (checkpoint_context_fn, 1)):
        seen.clear()
        extra = {} if context is None else {"context_fn": context}
        with Spy():
            y = checkpoint(lambda q: attend(q * 2, kv, kv), q, use_reentrant=False, **extra)
            y.square().sum().backward()
        name = "aten::_scaled_dot_product_flash_attention_for_cpu"
        assert seen.count(name) == forwards


def test_a_kept_result_that_was_written_to_is_never_replayed() -> None:
    attend = DistributedAttention(1, 1, 4)

    def spoil(q: Tensor) -> Tensor:
        out = attend(q, q, q)
        out.detach().mul_(2)
        return out.exp()

    q = torch.randn(1, 3, 1, 4, requires_grad=True)
    y = checkpoint(spoil, q, use_reentrant=False, context_fn=checkpoint_context_fn)
    with pytest.raises(OrderError, match=r"written to in place .* Write to a clone\.$"):
        y.sum().backward()

    def of_a_clone(q: Tensor) -> Tensor:
        return attend(q, q, q).clone().mul_(2).exp()

    of_a_clone(q).sum().backward()
    wanted, q.grad = q.grad, None
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": checkpoint_context_fn}
    checkpoint(of_a_clone, q, **options).sum().backward()
    torch.testing.assert_close(q.grad, wanted)


def test_a_block_that_recomputes_something_else_is_told() -> None:
    attend = DistributedAttention(1, 1, 4)
    times = []

    def fickle(q: Tensor) -> Tensor:
        times.append(1)
        y = attend(q, q, q) if len(times) > 1 else q * q
        return (y * y).exp()

    q = torch.randn(1, 3, 1, 4, requires_grad=True)
    y = checkpoint(fickle, q, use_reentrant=False, context_fn=checkpoint_context_fn)
    with pytest.raises(OrderError, match="where its forward did not"):
        y.sum().backward()


@pytest.mark.thorough(2)
@ranks(2)
def test_a_compiled_block_leaves_its_graph_for_attention_and_compiles_once(
    rank: int, world_size: int
) -> None:
    torch.manual_seed(0)
    block, trace = Block(), Trace(enabled=True)
    block.attend.attach(dist.group.WORLD, trace)
    graphs = []

    def backend(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return graph

    faster = torch.compile(block, backend=backend)
    for first in (1, 2, 3):
        ids, starts = torch.zeros(2, 7, dtype=torch.long), [[0, first], [0]]
        layout = SequenceLayout.create(ids, rank=rank, size=world_size, boundaries=starts)
        x = torch.randn(2, layout.sizes[layout.rank], 12, dtype=torch.float64, requires_grad=True)
        wanted = block(x, layout)
        selective = {"use_reentrant": False, "context_fn": checkpoint_context_fn}
        trace.clear()
        got = checkpoint(faster, x, layout, **selective)
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)
        mine, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, wanted))
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
        # Four exchanges forward, four in each of the two backwards, none in recompute.
        assert len([e for e in trace.events if e.kind == "A2A"]) == 12
    # One graph before attention and one after it, for any documents.
    assert len(graphs) == 2
