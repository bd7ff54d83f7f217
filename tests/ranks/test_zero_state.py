"""ZeroOptimizer: fp16 loss scaling, saving and resuming, values written by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from internsp.errors import MeshError
from internsp.optim import LossScaler
from tests.support.ranks import run_ranks
from tests.support.zero import Case, Setup, batch, setup, share, train, whole


def overflow(rank: int, world: int, weight: int) -> list[dict[str, Any]]:
    """Rank 1 alone overflows in step 1 of 3; with and without clipping."""
    found = []
    for bound in (1.0, None):
        case = Case(weight=weight, optimizer="sgd", dtype=torch.float16, max_grad_norm=bound)
        s = setup(case, LossScaler(1024.0, growth_interval=2))
        history = []
        for step in range(4):
            before = whole(s.model)
            ids, labels = batch(step, world)
            loss = s.model(share(ids, rank), share(labels, rank))
            factor = 1e6 if (step, rank) == (1, 1) else 1.0
            s.optimizer.scale(loss * factor).backward()
            s.optimizer.step()
            norm = s.optimizer.grad_norm
            after = whole(s.model)
            history.append(
                {
                    "skipped": s.optimizer.skipped,
                    "moved": any(not torch.equal(before[n], after[n]) for n in before),
                    "finite": torch.isfinite(torch.tensor(norm)).item(),
                    "sound": all(v.isfinite().all().item() for v in after.values()),
                    "scale": s.optimizer.loss_scaler.scale,  # type: ignore[union-attr]
                }
            )
        found.append({key: [h[key] for h in history] for key in history[0]})
    return found


@pytest.mark.parametrize("weight", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all_clipping_or_not(weight: int) -> None:
    for found in run_ranks(overflow, 2, weight):
        for history in found:
            assert history["skipped"] == [False, True, False, False]
            assert history["moved"] == [True, False, True, True]
            assert history["finite"] == [True, False, True, True]
            assert all(history["sound"])
            assert history["scale"] == [1024, 512, 512, 1024]


def scaled(rank: int, world: int) -> tuple[bool, bool, bool]:
    results = []
    for bound in (1.0, None):
        for scaler in (None, LossScaler(4096.0)):
            case = Case(weight=2, steps=4, dtype=torch.float32, max_grad_norm=bound)
            s = setup(case, scaler)
            results.append((train(s, case, rank, world), whole(s.model)))
    same = [
        one[0] == other[0] and all(torch.equal(one[1][n], other[1][n]) for n in one[1])
        for one, other in (results[:2], results[2:])
    ]
    clipped_differs = any(
        not torch.equal(results[0][1][n], results[2][1][n]) for n in results[0][1]
    )
    return same[0], same[1], clipped_differs


def test_a_scaled_loss_gives_the_same_bits_as_an_unscaled_one_clipping_or_not() -> None:
    assert all(all(found) for found in run_ranks(scaled, 2))


def make(case: Case) -> tuple[Setup, torch.optim.lr_scheduler.LRScheduler]:
    scaler = LossScaler(64.0, growth_interval=3) if case.dtype != torch.float64 else None
    s = setup(case, scaler)
    schedule = torch.optim.lr_scheduler.LambdaLR(s.optimizer, lambda step: 1.0 / (1 + step))
    return s, schedule


def advance(s: Setup, schedule: Any, case: Case, rank: int, world: int, steps: range) -> list[Any]:
    one = Case(**{**case.__dict__, "steps": 1})
    found = []
    for step in steps:
        found += train(s, one, rank, world, start=step)
        schedule.step()
        found.append((s.optimizer.param_groups[0]["lr"], s.optimizer.param_groups[1]["lr"]))
    return found


def resume(rank: int, world: int, cases: list[Case], first: int, folder: str) -> list[bool]:
    """7 steps at once against ``first`` steps, a checkpoint, and the rest by new objects."""
    same = []
    for index, case in enumerate(cases):
        s, schedule = make(case)
        expected = advance(s, schedule, case, rank, world, range(7))
        end = whole(s.model)
        s, schedule = make(case)
        advance(s, schedule, case, rank, world, range(first))
        path = f"{folder}/{index}"
        dcp.save({"model": s.model, "optimizer": s.optimizer}, checkpoint_id=path)
        rest = schedule.state_dict()
        s, schedule = make(case)
        with torch.no_grad():  # other values, so that what is not loaded shows
            for parameter in s.model.parameters():
                parameter.mul_(0.5)
        dcp.load({"model": s.model, "optimizer": s.optimizer}, checkpoint_id=path)
        schedule.load_state_dict(rest)
        got = advance(s, schedule, case, rank, world, range(first, 7))
        same.append(expected[2 * first :] == got)
        now = whole(s.model)
        same.append(all(torch.equal(end[n], now[n]) for n in end))
    return same


RESUMED = [
    (2, 0, [Case(weight=2, dtype=torch.bfloat16), Case(weight=1, optimizer="sgd")]),
    (4, 4, [Case(weight=2, dtype=torch.bfloat16), Case(zero=2, micro_batches=2, tied=True)]),
]


@pytest.mark.parametrize(("world", "first", "cases"), RESUMED, ids=["at the start", "later"])
def test_a_resumed_run_goes_on_with_the_same_bits(
    world: int, first: int, cases: list[Case], tmp_path: Path
) -> None:
    for same in run_ranks(resume, world, cases, first, str(tmp_path)):
        assert all(same), same


def keys(rank: int, world: int) -> tuple[dict[str, tuple[int, float]], list[str]]:
    """Each entry's key with its place; and what loading elsewhere says."""
    case = Case(weight=2, zero=2, steps=1)
    s = setup(case)
    train(s, case, rank, world)
    state = s.optimizer.local_state_dict()
    mine = {k: (rank, float(e["exp_avg"].sum())) for k, e in state["state"].items()}
    complaints = []
    for other in (Case(weight=1), Case(weight=2, zero=1)):
        stranger = setup(other)
        with pytest.raises(MeshError) as caught:
            stranger.optimizer.load_local_state_dict(state)
        complaints.append(str(caught.value))
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, state)
    with pytest.raises(MeshError) as caught:
        s.optimizer.load_local_state_dict(everyone[(rank + 1) % world])
    return mine, [*complaints, str(caught.value)]


def test_each_slice_has_a_key_of_its_own_and_another_mesh_is_named() -> None:
    seen: dict[str, float] = {}
    for mine, complaints in run_ranks(keys, 4):
        for key, (_, value) in mine.items():
            # Only replicas of the same values may share a key.
            assert seen.setdefault(key, value) == value
        assert "saved on a mesh {'weight': 2, 'zero': 2" in complaints[0]
        assert "this one is {'weight': 1, 'zero': 4" in complaints[0]
        assert "this one is {'weight': 2, 'zero': 1" in complaints[1]
        assert "no entry for [" in complaints[2]


def written(rank: int, world: int, dtype: torch.dtype) -> float:
    """Values loaded, edited and given new storage between steps are what the next step starts from.

    The learning rate is zero: whatever was written must still be there after a step.
    """
    case = Case(weight=2, dtype=dtype, optimizer="sgd", options={"lr": 0.0}, max_grad_norm=None)
    s = setup(case)
    wrong = 0.0
    for write in (
        lambda p: p.mul_(1.5),
        lambda p: p.to_local().mul_(0.75),
        lambda p: setattr(p._local_tensor, "data", p._local_tensor.detach() * 1.25),
        None,
    ):
        train(s, Case(**{**case.__dict__, "steps": 1}), rank, world)
        with torch.no_grad():
            if write is None:
                s.model.load_state_dict({n: v * 0.5 for n, v in s.model.state_dict().items()})
            else:
                for parameter in s.model.parameters():
                    write(parameter)
        s.communicator.invalidate()
        expected = whole(s.model)
        train(s, Case(**{**case.__dict__, "steps": 1}), rank, world)
        got = whole(s.model)
        wrong = max(wrong, max((got[n] - expected[n]).abs().max().item() for n in got))
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_written_between_steps_are_kept(dtype: torch.dtype) -> None:
    assert max(run_ranks(written, 4, dtype)) == 0.0
