"""If ranks of a sequence group get different batches, all of them raise at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from internsp import model_zoo, parallelize
from internsp.config import WeightParallelConfig
from internsp.errors import LayoutError
from internsp.optim import ZeroOptimizer
from internsp.sp import DistributedAttention, SequenceLayout
from tests.support.compare import check, parameters
from tests.support.meshes import mesh_of
from tests.support.models import raises
from tests.support.parity import Case
from tests.support.ranks import ranks

LENGTH = 12


def ids(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 20, (2, length), generator=torch.Generator().manual_seed(seed))


def given(kind: str, rank: int, ring: int) -> SequenceLayout:
    """A batch's layout, which differs between the ranks by ``kind``."""
    place: dict[str, Any] = {"rank": rank, "size": 2, "ring": ring}
    if kind == "values":
        return SequenceLayout.create(ids(rank), **place)
    if kind == "lengths":
        return SequenceLayout.create(ids(0, LENGTH + 4 * rank), **place)
    if kind == "documents":
        return SequenceLayout.create(ids(0), boundaries=[(0, 3 + rank), (0,)], **place)
    if kind == "labels":  # as many that count, drawn on each rank
        return SequenceLayout.create(ids(0), labels=ids(rank), **place)
    if kind == "ignored":
        return SequenceLayout.create(ids(0), ignored=[[(1 + rank, 3 + rank)], []], **place)
    if kind == "row keys":
        return SequenceLayout.create(ids(0), row_keys=torch.arange(2) + rank, **place)
    assert kind == "dealt"
    balance = "zigzag" if rank else "contiguous"
    return SequenceLayout.create(ids(0), balance=balance, **place)


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "in_features")]


def fail(*_: Any) -> None:
    raise RuntimeError("on both ranks")


def loss(model: Any, layout: SequenceLayout) -> Tensor:
    found: Tensor = model(layout.input_ids, layout=layout, labels=layout.labels)[0]
    return found


@pytest.mark.parametrize("ring", [1, 2])
@ranks(2)
def test_another_batch_on_one_rank_is_refused_on_all_and_the_next_one_is_right(
    rank: int, ring: int
) -> None:
    mesh = mesh_of(2, 2, ring=ring)
    plain = model_zoo.build(Case().model_config(), dtype=torch.float64)
    model = copy.deepcopy(plain)
    parallelize(model, mesh, WeightParallelConfig(min_shard_elements=24))

    kinds = ["values", "lengths", "documents"] + (["dealt"] if ring > 1 else [])
    for kind in kinds[-3:]:  # in the first forwards
        raises(
            LayoutError, lambda kind=kind: loss(model, given(kind, rank, ring)),
            "rank 1 of the sequence group", f"this is rank {rank}", "mesh.data_rank",
        )  # fmt: skip
    mine = SequenceLayout.create(ids(5), rank=rank, size=2, ring=ring)
    total = loss(model, mine).detach().clone()
    dist.all_reduce(total)
    wanted = loss(plain, SequenceLayout.create(ids(5))).detach()
    torch.testing.assert_close(total, wanted, rtol=1e-10, atol=0.0)


@pytest.mark.thorough(3)
@pytest.mark.parametrize("ring", [1, 2])
@ranks(2)
def test_a_later_batch_that_differs_fails_its_own_backward_and_is_in_no_step(
    rank: int, ring: int
) -> None:
    mesh = mesh_of(2, 2, ring=ring)
    plain = model_zoo.build(Case().model_config(), dtype=torch.float64)
    model = copy.deepcopy(plain)
    communicator = parallelize(model, mesh, WeightParallelConfig(min_shard_elements=24))
    optimizer = ZeroOptimizer(communicator, torch.optim.SGD, lr=0.01)
    alone = torch.optim.SGD(plain.parameters(), lr=0.01)

    for number in range(6):
        if number > 3:
            bad = loss(model, given("values", rank, ring))
            raises(LayoutError, bad.backward, "rank 1 of the sequence group", f"rank {rank}")
        loss(model, SequenceLayout.create(ids(number), rank=rank, size=2, ring=ring)).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss(plain, SequenceLayout.create(ids(number))).backward()
        alone.step()
        alone.zero_grad()
    # The reply to a forward that has raised on all ranks is dropped with it.
    broken = next(iter(linear_layers(model))).register_forward_pre_hook(fail)
    raises(RuntimeError, lambda: loss(model, given("values", rank, ring)), "on both ranks")
    broken.remove()
    loss(model, SequenceLayout.create(ids(6), rank=rank, size=2, ring=ring)).backward()
    optimizer.zero_grad()
    with torch.no_grad():  # without a backward the next forward reads the reply
        loss(model, given("values", rank, ring))
        mine = SequenceLayout.create(ids(5), rank=rank, size=2, ring=ring)
        raises(LayoutError, lambda: loss(model, mine), "rank 1 of the sequence group")
    after = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    check(after, parameters(plain))


@pytest.mark.parametrize("kind", ["labels", "ignored", "row keys"])
@ranks(2)
def test_what_is_given_beside_the_tokens_is_compared_too(rank: int, kind: str) -> None:
    """Each rank would take its positions from another batch."""
    model = model_zoo.build(Case().model_config(), dtype=torch.float64)
    parallelize(model, mesh_of(2, 2), WeightParallelConfig(min_shard_elements=24))
    raises(
        LayoutError, lambda: loss(model, given(kind, rank, 1)),
        "rank 1 of the sequence group", f"this is rank {rank}", kind,
    )  # fmt: skip
    loss(model, given(kind, 0, 1).to("cpu") if rank == 0 else given_to_rank_1(kind))


def given_to_rank_1(kind: str) -> SequenceLayout:
    """What rank 0 was given, for rank 1."""
    whole = given(kind, 0, 1)
    return SequenceLayout.create(
        whole.all_ids, rank=1, size=2, labels=whole.all_labels, row_keys=whole.row_keys,
        ignored=whole.ignored if whole.all_labels is None else None,
    )  # fmt: skip


class Attending(torch.nn.Module):
    """A layer whose attention is given the model's layout, or was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out_proj = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 24)])
        self.attend, self.forgets = DistributedAttention(2, 2, 4), False

    def forward(self, layout: SequenceLayout) -> Tensor:
        q, k, v = self.layers[0](self.embed(layout.input_ids)).unflatten(-1, (6, 4)).chunk(3, 2)
        out = self.attend(q, k, v, None if self.forgets else layout)
        return self.out_proj(out.flatten(-2)).square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("ring", "length"), [(1, 11), (2, 12)])
@ranks(2)
def test_an_attention_without_the_models_layout_is_refused_by_name(
    rank: int, ring: int, length: int
) -> None:
    """gloo would end the processes, or a ring take positions for others; else nothing differs."""
    mesh = mesh_of(2, 2, ring=ring)
    plain = Attending().double()
    model = copy.deepcopy(plain)
    parallelize(
        model, mesh, WeightParallelConfig(min_shard_elements=24, gather_before="qkv")
    )
    given: Any = {"rank": rank, "size": 2, "ring": ring}
    for at, forgets in ((length, False), (length, True), (12, ring == 1)):
        layout = SequenceLayout.create(ids(0, at), **given)
        model.forgets = forgets
        if at == length and forgets:
            raises(LayoutError, lambda layout=layout: model(layout), f"Rank {rank}: attend was")
            continue
        total = model(layout).detach().clone()
        dist.all_reduce(total)
        wanted = plain(SequenceLayout.create(ids(0, at))).detach()
        torch.testing.assert_close(total, wanted, rtol=1e-10, atol=0.0)
