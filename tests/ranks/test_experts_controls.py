"""Faults that one could make in experts, each put in here and seen by what the other tests compare.

Without the fault the same comparison holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from internsp.experts.dispatch import Exchanged
from internsp.layers import Router, router_loss
from internsp.optim import ZeroOptimizer, zero
from internsp.wp.plain_loop import PlainLoop
from tests.ranks.test_mixture_layer import SWITCH, Pair, tokens
from tests.support import hf
from tests.support.compare import check, close, gradients
from tests.support.owners import OwnersTwin, mesh_of
from tests.support.ranks import ranks

Fault = Callable[[pytest.MonkeyPatch, Any], None]


def values(fault: Fault, patched: pytest.MonkeyPatch) -> None:
    """Every gradient of two micro-batches."""
    twin = OwnersTwin("deepseek_v3", mesh_of(expert=2))  # its weights do not sum to 1
    fault(patched, twin)
    twin.backward(micro_batches=2)
    twin.check("two micro-batches")


def routers(fault: Fault, patched: pytest.MonkeyPatch) -> None:
    """The routers' gradients, which are so small here that they are not sharded."""
    twin = OwnersTwin(
        "mixtral", mesh_of(weight=2, expert=2, expert_weight=1), min_shard_elements=300
    )
    fault(patched, twin)
    twin.backward()
    found, wanted = gradients(twin.ours), gradients(twin.plain)
    names = [name for name in wanted if name.endswith("gate.weight")]
    assert len(names) == 2
    check({n: found[n] for n in names}, {n: wanted[n] for n in names})


def means(fault: Fault, patched: pytest.MonkeyPatch) -> None:
    """Gradients that are divided by the number of ranks."""
    twin = OwnersTwin("mixtral", mesh_of(expert=2), reduction="mean")
    fault(patched, twin)
    batches = [{"input_ids": hf.ids(rank), "use_cache": False} for rank in (0, 1)]
    (sum(hf.sums(twin.plain, batch) for batch in batches) / 2).backward()
    hf.sums(twin.ours, batches[twin.mesh.rank]).backward()
    check(gradients(twin.ours), gradients(twin.plain))


def balance(fault: Fault, patched: pytest.MonkeyPatch) -> None:
    """The loss and loads of a router in a block that recomputes."""
    pair = Pair(SWITCH, "full", expert=2)
    fault(patched, pair)
    wanted = pair.plain(torch.cat([tokens(rank, 0) for rank in (0, 1)])) + router_loss(pair.plain)
    loss = pair.ours(tokens(pair.mesh.rank, 0)) + router_loss(pair.ours)
    loss.backward()
    total, load = loss.detach(), pair.ours.layers[0].moe.router.load
    for value in (total, load):
        dist.all_reduce(value)
    close(total, wanted.detach(), "loss")
    close(load, pair.plain.layers[0].moe.router.load, "load")


def nbytes(fault: Fault, patched: pytest.MonkeyPatch) -> None:
    """Rows that travel: one for each token and owner of one of its experts."""
    twin = OwnersTwin("mixtral", mesh_of(expert=2))
    fault(patched, twin)
    chosen: list[Tensor] = []
    for layer in twin.ours.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, args, out: chosen.append(out[2]))
    twin.backward()
    away = [int((index // 4 != twin.mesh.expert_rank).any(1).sum()) for index in chosen]
    assert twin.sent("results", "backward") == [n * 24 * 8 for n in reversed(away)], "bytes"


def norm(fault: Fault, patched: pytest.MonkeyPatch) -> None:
    twin = OwnersTwin("mixtral", mesh_of(expert=2))
    fault(patched, twin)
    optimizer = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1, max_grad_norm=1.0)
    twin.backward()
    optimizer.step()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in twin.plain.parameters()])
    close(torch.tensor(optimizer.grad_norm).double(), wanted, "norm", 1e-6)


def no_router_gradient_is_summed(patched: pytest.MonkeyPatch, twin: OwnersTwin) -> None:
    patched.setattr("internsp.wp.replicated.all_reduce", lambda *_: None)


def weights_multiply_twice(patched: pytest.MonkeyPatch, twin: OwnersTwin) -> None:
    real = Exchanged.__call__

    def twice(self: Exchanged, compute: Any, hidden: Tensor, index: Tensor, weights: Tensor,
              *more: Any) -> Any:  # fmt: skip
        made, own = real(self, compute, hidden, index, weights, *more)
        return made * weights.sum(1, keepdim=True).to(made.dtype), own

    patched.setattr(Exchanged, "__call__", twice)


def each_expert_is_sent_its_own_copy(patched: pytest.MonkeyPatch, twin: OwnersTwin) -> None:
    real = Exchanged.__call__

    def apart(self: Exchanged, compute: Any, hidden: Tensor, index: Tensor, weights: Tensor,
              *more: Any) -> Any:  # fmt: skip
        columns = zip(index.split(1, 1), weights.split(1, 1), strict=True)
        parts = [real(self, compute, hidden, i, w, *more) for i, w in columns]
        return sum(part[0] for part in parts), None

    patched.setattr(Exchanged, "__call__", apart)


def padding_is_routed(patched: pytest.MonkeyPatch, pair: Pair) -> None:
    real = Router.forward

    def padded(self: Router, tokens: Tensor) -> Any:
        made = real(self, torch.cat([tokens, tokens.new_zeros(3, tokens.shape[1])]))
        cut = made.index[:-3], made.weights[:-3]
        return type(made)(*cut, made.logits, made.shares, made.counts)

    for layer in pair.ours.layers:
        router: Any = layer.moe.router
        patched.setattr(router, "forward", lambda tokens, router=router: padded(router, tokens))


def a_recompute_counts_again(patched: pytest.MonkeyPatch, pair: Pair) -> None:
    for room in ("layers.router", "modules.recompute"):  # each of the two alone prevents it
        patched.setattr(f"internsp.{room}.in_backward", lambda: False)


def experts_have_no_divisor(patched: pytest.MonkeyPatch, twin: OwnersTwin) -> None:
    experts = {w for w in twin.communicator.replicated.sharded if w.axis is twin.mesh.experts}
    real = PlainLoop.value_of

    def undivided(self: PlainLoop, member: Any, total: Tensor) -> Tensor:
        return total if member in experts else real(self, member, total)

    patched.setattr(PlainLoop, "value_of", undivided)


def the_norm_forgets_experts(patched: pytest.MonkeyPatch, twin: OwnersTwin) -> None:
    real = zero.norm_and_flags

    def dense(buckets: Any, mesh: Any, *args: Any) -> Tensor:
        return real([b for b in buckets if b.axis is mesh.dense], mesh, *args)

    patched.setattr(zero, "norm_and_flags", dense)


FAULTS: dict[Fault, tuple[Callable[[Fault, pytest.MonkeyPatch], None], str]] = {
    no_router_gradient_is_summed: (routers, "layers.0.mlp.gate.weight differs"),
    weights_multiply_twice: (values, "loss differs"),
    each_expert_is_sent_its_own_copy: (nbytes, "bytes"),
    padding_is_routed: (balance, "loss differs"),
    a_recompute_counts_again: (balance, "load differs"),
    experts_have_no_divisor: (means, "experts.gate_up_proj differs by 1 "),
    the_norm_forgets_experts: (norm, "norm differs"),
}


@pytest.mark.parametrize("fault", FAULTS)
@ranks(2)
def test_a_fault_in_experts_is_seen(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    compare, words = FAULTS[fault]
    compare(lambda *_: None, monkeypatch)
    with pytest.raises(AssertionError, match=words), monkeypatch.context() as patched:
        compare(fault, patched)
