"""``internsp.fsdp.zero_optimizer``: a program's optimizer with its state over the replicas, too.

The same program runs with FSDP2 and its torch optimizer; all values are compared in fp64.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import internsp.fsdp as ours
from internsp.errors import ConfigError, GradientError, StructureError
from tests.support.fsdp import Model, batch, loss_of, mesh_of, require_same, shard, whole
from tests.support.ranks import ranks

CLIP = 0.1


def build(
    names: Any, seed: int = 3, sizes: tuple[int, ...] = (2, 2), fused: bool | None = None
) -> tuple[Any, Any]:
    """A model and a torch optimizer of two groups."""
    torch.manual_seed(seed)
    model = Model(blocks=2).double()
    model.spare.requires_grad_(False)  # an optimizer has no state of it
    shard(names.fully_shard, model, "blocks", mesh_of(sizes))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups: Any = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "betas": (0.8, 0.9)},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, fused=fused)


def train(
    model: Any, optimizer: Any, rank: int, steps: range, schedule: Any = None
) -> dict[str, Tensor]:
    """Losses and norms of clipped steps of two micro-batches."""
    found: dict[str, Tensor] = {}
    for step in steps:
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = loss_of(model, batch(step, micro, rank)) / 2
            loss.backward()
            found[f"loss {step} {micro}"] = loss.detach()
        if isinstance(optimizer, torch.optim.AdamW):
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            found[f"norm {step}"] = norm.full_tensor()
        else:
            optimizer.step()
            found[f"norm {step}"] = torch.tensor(optimizer.grad_norm, dtype=torch.float64)
        optimizer.zero_grad()
        if schedule is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # that no step came before, which a scheduler says
                schedule.step()
    return found


def kept(optimizer: Any) -> int:
    """Elements of the optimizer's state on this rank."""
    values = [value for p in optimizer.state for value in optimizer.state[p].values()]
    local = [getattr(value, "_local_tensor", value) for value in values if value is not None]
    return sum(value.numel() for value in local if value.ndim)


@pytest.mark.parametrize(
    ("begun", "fused"), [(0, None), (1, True)], ids=["before a step", "fused, one step skipped"]
)
@ranks(4)
def test_steps_are_those_of_fsdp2_with_half_of_the_state(
    begun: int, fused: bool | None, rank: int
) -> None:
    both, state = [], []
    for names in (torchs, ours):
        model, optimizer = build(names, fused=fused)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        found = train(model, optimizer, rank, range(begun), schedule)
        if names is ours:
            assert not begun or "each of 2 replicas has all" in ours.report(model)
            optimizer = ours.zero_optimizer(model, optimizer, max_grad_norm=CLIP)
            assert optimizer.decides_on_device() == bool(fused)
            if fused:  # no other value may show this step, nor may the count of steps
                (loss_of(model, batch(9, 0, rank)) * float("inf")).backward()
                optimizer.step()
                optimizer.zero_grad()
        found |= train(model, optimizer, rank, range(begun, 3), schedule)
        both.append(found | whole(dict(model.named_parameters())))
        state.append(kept(optimizer))
    require_same(both[1], both[0])
    assert state[1] < 0.6 * state[0]
    assert "optimizer state is over 4 ranks" in ours.report(model)


@pytest.mark.parametrize("ours_writes", [False, True], ids=["from FSDP2", "to FSDP2"])
@ranks(4)
def test_a_checkpoint_of_one_continues_under_the_other(
    ours_writes: bool, tmp_path: Path, rank: int
) -> None:
    found = []
    for writes in (True, False):
        model, optimizer = build(ours if writes == ours_writes else torchs, 3 if writes else 7)
        if writes == ours_writes:
            optimizer = ours.zero_optimizer(model, optimizer, max_grad_norm=CLIP)
        if writes:
            train(model, optimizer, rank, range(2))
        weights, moments = get_state_dict(model, optimizer)
        if writes:
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path)
        else:
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        found.append(train(model, optimizer, rank, range(2, 4)))
    require_same(found[1], found[0])


def muon_and_adamw(model: Any) -> tuple[Any, Any]:
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for name, p in model.named_parameters() if p.ndim == 1 or "blocks" not in name]
    return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)


@pytest.mark.parametrize("first", [0, 1], ids=["Muon first", "AdamW first"])
@ranks(2)
def test_muon_beside_another_optimizer_steps_as_one_process_on_any_mesh(
    first: int, rank: int
) -> None:
    """FSDP2 sums its products in bf16 over ranks: 1e-3 off."""
    torch.manual_seed(2)
    plain = Model(blocks=2).double()
    model = copy.deepcopy(plain)
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
    each = muon_and_adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(each[0], lambda step: 1 / (1 + step))
    optimizer = ours.zero_optimizer(model, each[first], each[1 - first])
    wanted = muon_and_adamw(plain)
    wanted_schedule = torch.optim.lr_scheduler.LambdaLR(wanted[0], lambda step: 1 / (1 + step))
    for step in range(3):
        loss_of(model, batch(step, 0, rank)).backward()
        sum(loss_of(plain, batch(step, 0, each)) / 2 for each in range(2)).backward()  # type: ignore[union-attr]
        for one in (optimizer, *wanted):
            one.step()
            one.zero_grad()
        schedule.step()
        wanted_schedule.step()
    require_same(whole(dict(model.named_parameters())), dict(plain.named_parameters()), 1e-9)
    with pytest.raises(ValueError, match="before their first steps"):
        ours.zero_optimizer(build(ours, sizes=(2,))[0], wanted[0], wanted[1])


@ranks(4)
def test_what_needs_a_gradient_is_refused(rank: int) -> None:
    model, optimizer = build(ours)
    with pytest.raises(ValueError, match="zero_optimizer: this Linear has no plan"):
        ours.zero_optimizer(nn.Linear(2, 2), optimizer)
    model.set_gradient_divide_factor(3.0)
    with pytest.raises(StructureError, match=r"by 3, .* by 4"):
        ours.zero_optimizer(model, optimizer)
    model.set_gradient_divide_factor(None)
    optimizer = ours.zero_optimizer(model, optimizer)
    with pytest.raises(ValueError, match="have a ZeroOptimizer already"):
        ours.zero_optimizer(model, optimizer)
    for call in (
        lambda: model.blocks[0].set_requires_gradient_sync(False),
        lambda: model.set_all_reduce_hook(print),
    ):
        with pytest.raises(StructureError, match="leave the others out"):
            call()
    model, optimizer = build(ours)
    optimizer = ours.zero_optimizer(model, optimizer)
    loss_of(model, batch(0, 0, rank)).backward()
    with pytest.raises(GradientError, match="max_grad_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    model.head.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(GradientError, match="gradient hook"):
        model(batch(0, 0, rank))
    model, optimizer = build(ours)
    model.head.weight.register_post_accumulate_grad_hook(lambda _: None)
    loss_of(model, batch(0, 0, rank)).backward()
    with pytest.raises(StructureError, match="leave the others out"):
        ours.zero_optimizer(model, optimizer)
    model, optimizer = build(ours, sizes=(4,))
    with pytest.raises(ConfigError, match="leave it out"):
        ours.zero_optimizer(model, optimizer)
