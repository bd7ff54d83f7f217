"""Token loss in every mode compared with one cross entropy over the full sequence, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from internsp.base.trace import Trace
from internsp.errors import CollectiveError, ConfigError, LayoutError
from internsp.failure.guard import close_connections
from internsp.sp import SequenceLayout, gather_logits, token_loss, vocabulary_parallel_cross_entropy
from internsp.sp.exchange import ExchangeGroup
from tests.support.ranks import ranks, run_ranks

VOCABULARY, HIDDEN, LENGTH = 11, 6, 9
CLOSE = {"atol": 1e-12, "rtol": 0.0}


def batch(valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head weight and labels of which only the first ``valid`` columns count."""
    torch.manual_seed(3)
    hidden = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (2, LENGTH))
    labels[:, valid:] = -100
    labels[0, 0] = -100
    return hidden, weight, labels


def whole_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = F.linear(*leaves).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.thorough(4)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@ranks()
def test_every_output_mode_equals_one_process(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    for valid in (LENGTH, 1, 0):
        hidden, weight, labels = batch(valid)
        wanted = whole_loss(hidden, weight, labels)
        layout = SequenceLayout.create(
            torch.zeros(2, LENGTH, dtype=torch.long), rank=rank, size=world_size, labels=labels
        )
        here = slice(*layout.ranges[rank][0]) if layout.ranges[rank] else slice(0)
        for output in ("local", "gather", "vocabulary"):
            for chunk in (2, 5, 1000):
                x = hidden[:, here].clone().requires_grad_()
                w = weight.clone().requires_grad_()
                loss, count = token_loss(
                    x,
                    lambda t, w=w: F.linear(t, w),
                    layout.labels,
                    chunk_tokens=chunk,
                    output=output,
                    group=group,
                    layout=layout,
                )
                assert int(count) == layout.valid_tokens
                loss.backward()
                total, dw = loss.detach().clone(), w.grad
                dist.all_reduce(total)
                dist.all_reduce(dw)
                torch.testing.assert_close(total, wanted[0], **CLOSE)
                torch.testing.assert_close(x.grad, wanted[1][:, here], **CLOSE)
                torch.testing.assert_close(dw, wanted[2], **CLOSE)


@pytest.mark.parametrize("output", ["gather", "vocabulary"])
@ranks(2)
def test_a_rank_whose_peer_has_gone_is_told_that_it_waits_for_the_loss(output: str) -> None:
    group = dist.new_group([0, 1])
    head, hidden = nn.Linear(4, 6), torch.randn(1, 3, 4)
    if dist.get_rank() == 1:
        close_connections(group)
        return
    for _ in range(2):
        with pytest.raises(CollectiveError, match=r"logits|rows of the loss"):
            token_loss(hidden, head, torch.zeros(1, 3).long(), output=output, group=group)


@ranks(4)
def test_arbitrary_upstream_gradients_reach_the_right_tokens(rank: int) -> None:
    lengths = (3, 0, 4, 2)
    group = ExchangeGroup.of(dist.group.WORLD)
    torch.manual_seed(5)
    # Very different logits: without the maximum over all shards the sums would overflow.
    logits = torch.randn(2, 9, 5, dtype=torch.float64) * 300
    labels = torch.randint(0, 5, (2, 9))
    labels[1, 4] = -100
    upstream = torch.randn(2, 9, dtype=torch.float64)
    whole = logits.clone().requires_grad_()
    losses = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(2, 9)
    (wanted,) = torch.autograd.grad(losses, whole, upstream)
    start = sum(lengths[:rank])
    here = slice(start, start + lengths[rank])
    mine = logits[:, here].clone().requires_grad_()
    got = vocabulary_parallel_cross_entropy(mine, labels[:, here], group, lengths)
    torch.testing.assert_close(got, losses[:, here], **CLOSE)
    (grad,) = torch.autograd.grad(got, mine, upstream[:, here])
    torch.testing.assert_close(grad, wanted[:, here], **CLOSE)
    # A smaller vocabulary than ranks: some shards are empty.
    few = logits[:, here, :2].clone().requires_grad_()
    targets = labels.clamp(max=1)
    got = vocabulary_parallel_cross_entropy(few, targets[:, here], group, lengths)
    wanted = F.cross_entropy(logits[..., :2].flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(got, wanted.view(2, 9)[:, here], **CLOSE)
    got.sum().backward()
    # Gathered logits: every rank's gradient of every position is sent to its owner.
    own = logits[:, here].clone().requires_grad_()
    gathered = gather_logits(own, group, lengths)
    torch.testing.assert_close(gathered, logits, atol=0, rtol=0)
    gathered.backward(torch.full_like(logits, rank + 1.0))
    torch.testing.assert_close(own.grad, torch.full_like(own, 10.0), **CLOSE)


class OpenedHead(nn.Module):
    """A head that returns its weight once, and whose hooks see the result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN))
        self.opened, self.guarded, self.rows = 0, 0, []

    def unshard_once(self) -> Any:
        self.opened += 1

        def project(x: Tensor) -> Tensor:
            self.rows.append(x.shape[0] * x.shape[1])
            return F.linear(x, self.weight)

        def guard(value: Tensor) -> Tensor:
            self.guarded += 1
            return value.clone()

        return project, guard


def test_a_head_is_opened_once_and_projects_one_chunk_at_a_time() -> None:
    hidden, _, labels = batch(LENGTH)
    head = OpenedHead()
    x = hidden.float().requires_grad_()
    loss, count = token_loss(x, head, labels, chunk_tokens=4)
    assert (head.opened, head.guarded, head.rows) == (1, 1, [4, 4, 4, 4, 2])
    loss.backward()
    assert head.rows[5:] == [2, 4, 4, 4, 4]
    wanted = whole_loss(hidden.float(), head.weight.detach(), labels)
    assert int(count) == 17
    torch.testing.assert_close(loss.detach(), wanted[0])
    torch.testing.assert_close(x.grad, wanted[1])
    torch.testing.assert_close(head.weight.grad, wanted[2])


def test_half_precision_logits_are_summed_in_fp32() -> None:
    hidden, weight, labels = batch(LENGTH)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.copy_(weight)
    loss, _ = token_loss(hidden.bfloat16(), head, labels, chunk_tokens=3)
    assert loss.dtype == torch.float32
    logits = head(hidden.bfloat16()).float().flatten(0, 1)
    wanted = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, wanted, atol=0, rtol=1e-5)


def test_mistakes_are_told() -> None:
    hidden, _, labels = batch(LENGTH)
    with pytest.raises(ConfigError, match="choose one of local, gather, vocabulary"):
        token_loss(hidden, nn.Identity(), labels, output="vocab")
    with pytest.raises(LayoutError, match="Labels must be"):
        token_loss(hidden, nn.Identity(), labels[:, 1:])
    with pytest.raises(ConfigError, match="chunk of 0"):
        token_loss(hidden, nn.Identity(), labels, chunk_tokens=0)
    layout = SequenceLayout.create(torch.zeros(2, 12, dtype=torch.long))
    with pytest.raises(LayoutError, match="do not fit the layout"):
        token_loss(hidden, nn.Identity(), labels, layout=layout)


def traced(rank: int, size: int) -> list[str]:
    trace = Trace(enabled=True)
    x = torch.randn(1, 2 - rank, 4, requires_grad=True)
    layout = SequenceLayout.create(torch.zeros(1, 3, dtype=torch.long), rank=rank, size=size)
    labels = torch.zeros(1, 2 - rank, dtype=torch.long)
    options: dict[str, Any] = {"chunk_tokens": 1, "layout": layout, "group": dist.group.WORLD}
    loss, _ = token_loss(x, nn.Identity(), labels, output="vocabulary", trace=trace, **options)
    loss.backward()
    return [e.phase for e in trace.events if e.kind == "A2A"]


def test_ranks_of_uneven_length_run_the_same_exchanges() -> None:
    first, second = run_ranks(traced, 2)
    assert first == second == ["forward"] * 2 + ["recompute", "backward"] * 2
