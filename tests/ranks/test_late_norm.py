"""Fused optimizers: the norm's verdict stays on the device, and the host reads it a step late."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor

from internsp import WeightParallelConfig, parallelize
from internsp.errors import CollectiveError, ConfigError
from internsp.optim import LossScaler, ZeroOptimizer, step_together
from internsp.optim import zero as zero_room
from tests.support.compare import check, parameters
from tests.support.meshes import mesh_of
from tests.support.ranks import ranks
from tests.support.versions import since
from tests.support.zero import Little, batch, groups, little, share, whole

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adam, amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "momentum, dampening": (
        torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5},
    ),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}  # fmt: skip
BAD = (0, 3, 5)  # steps, of which one is the first of all


def uses_side(name: str, step: int) -> bool:
    """torch's fused SGD makes momentum of all parameters of a list in one step, or of none."""
    return step != 1 or name.startswith("momentum")


def made(
    name: str, weight: int, bound: float | None, dtype: torch.dtype = torch.float64, **more: Any
) -> tuple[Little, ZeroOptimizer]:
    """A model and a fused optimizer of it. Collective."""
    model, (cls, settings) = little(dtype), CASES[name]
    communicator = parallelize(model, mesh_of(weight), WeightParallelConfig(min_shard_elements=20))
    communicator.state.pool.poison = True
    return model, ZeroOptimizer(
        communicator, cls, param_groups=groups(model, 0.1), max_grad_norm=bound,
        **{"fused": True, **settings, **more},
    )  # fmt: skip


def train(
    model: Little, zero: ZeroOptimizer, rank: int, step: int, bad: bool, side: bool = True
) -> None:
    """A step, whose gradients are not finite on rank 1 alone if it is ``bad``."""
    ids, labels = batch(step, 2)
    loss = model(share(ids, rank), share(labels, rank), side=side)
    zero.scale(loss * (math.inf if rank == 1 and bad else 1.0)).backward()
    zero.step()


def alone(name: str, bound: float | None, steps: int) -> tuple[Little, list[float]]:
    """One process, torch's unfused optimizer, which makes no step in ``BAD``; and the norms."""
    model, (cls, settings) = little(), CASES[name]
    optimizer, norms = cls(groups(model, 0.1), **settings), []
    for step in range(steps):
        model(*batch(step, 2), side=uses_side(name, step)).backward()
        limit = math.inf if bound is None else bound
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        if step not in BAD:
            optimizer.step()
        optimizer.zero_grad()
    return model, norms


@pytest.mark.parametrize("bound", [0.5, 1e3, None])
@pytest.mark.parametrize("weight", [1, 2])
@pytest.mark.parametrize("name", CASES)
@ranks(2)
def test_steps_that_the_device_skips_leave_the_values_of_one_process(
    name: str, weight: int, bound: float | None, rank: int
) -> None:
    model, zero = made(name, weight, bound)
    wanted, norms = alone(name, bound, 7)
    found, skipped = [], []
    for step in range(7):
        before = whole(model)
        train(model, zero, rank, step, step in BAD, uses_side(name, step))
        # Only a step that makes state is read in itself: `side` is first used in the third.
        first = 0 if name == "adagrad" else 2 if uses_side(name, 1) else 3
        if name == "adagrad" and not since("2.12"):  # its step takes nothing from the device before
            first = 7
        assert (zero.unread is not None) == (step >= first), step
        after = whole(model)
        assert all(torch.equal(before[n], after[n]) for n in before) == (step in BAD), step
        found.append(zero.grad_norm)
        skipped.append(zero.skipped)
    check(parameters(model), parameters(wanted), "parameters", 1e-12)
    assert skipped == [step in BAD for step in range(7)]
    for step, (one, other) in enumerate(zip(found, norms, strict=True)):
        assert (not math.isfinite(one)) if step in BAD else abs(one / other - 1) < 1e-12
    assert zero.skipped_steps == 3


@ranks(2)
def test_a_step_asks_for_no_state_by_parameter(rank: int) -> None:
    """It is made for programs: for each parameter by a step of a stand-in."""
    model, zero = made("adamw", 2, None)
    asked = PropertyMock(side_effect=AssertionError("asked"))
    with patch.object(ZeroOptimizer, "state", asked):
        train(model, zero, rank, 0, False)
    assert not asked.called


def history(rank: int, dtype: torch.dtype, late: bool, bound: float | None) -> tuple[Any, ...]:
    """Steps with a loss scale in which rank 1 overflows now and then."""
    scaler = LossScaler(64.0, growth_interval=2, min_scale=32.0)
    with pytest.MonkeyPatch.context() as patch:
        if not late:
            patch.setattr(ZeroOptimizer, "decides_on_device", lambda _: False)
        model, zero = made("adamw", 1, bound, dtype, loss_scaler=scaler)
        told = []
        for step in range(8):
            train(model, zero, rank, step, step in (2, 3, 6))
            assert (zero.unread is not None) == (late and step > 0)
            if step % 3 == 0:
                told.append((zero.skipped, zero.grad_norm, zero.skipped_in_a_row))
            told.append((scaler.scale, scaler.good_steps, scaler.skipped_steps))
        state = zero.local_state_dict()
        masters = {
            name: [part.clone() for part in entry["master"].parts.values()]
            for name, entry in state["state"].items() if "master" in entry
        }  # fmt: skip
        return told, whole(model), masters, state["loss_scaler"]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, None), (torch.bfloat16, 0.5)])
@ranks(2)
def test_scale_and_masters_are_those_of_a_step_that_the_host_decides(
    dtype: torch.dtype, bound: float | None, rank: int
) -> None:
    told, values, masters, scale = history(rank, dtype, True, bound)
    wanted, others, wide, scaled = history(rank, dtype, False, bound)
    # Their factor is a divisor in fp32: a power of two is exact.
    limit = 0.0 if bound is None else 1e-6
    torch.testing.assert_close(told, wanted, rtol=1e-12, atol=0, equal_nan=True)
    assert scale == scaled
    assert masters.keys() == wide.keys()
    assert masters
    torch.testing.assert_close(masters, wide, rtol=limit, atol=limit)
    torch.testing.assert_close(values, others, rtol=0, atol=1e-2 if bound else 0.0)


def state_of(zero: ZeroOptimizer) -> dict[str, Tensor]:
    """Every tensor of ``state_dict``, unsharded, and of the local one's first elements."""
    found = {}
    for index, entry in zero.state_dict()["state"].items():
        for name, value in entry.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{index} {name}"] = whole.clone()
    for name, entry in zero.local_state_dict()["state"].items():
        found[f"{name} used"] = entry["used"].clone()
    return found


@pytest.mark.parametrize("name", ["adamw", "momentum, dampening"])
@ranks(2)
def test_state_that_is_saved_right_after_a_skipped_step_is_that_of_before(
    name: str, rank: int, tmp_path: Path
) -> None:
    model, zero = made(name, 2, None)
    for step in range(4):  # the first one and the last one are skipped
        before = state_of(zero)
        train(model, zero, rank, step, step in (0, 3))
        changed = [n for n, v in state_of(zero).items() if not torch.equal(v, before[n])]
        assert (not changed) == (step in (0, 3)), changed
    train(model, zero, rank, 4, bad=True)
    dcp.save({"model": model, "optimizer": zero}, checkpoint_id=tmp_path)  # nothing was asked for
    assert zero.skipped_steps == 3
    other, again = made(name, 2, None)
    dcp.load({"model": other, "optimizer": again}, checkpoint_id=tmp_path)
    for each, optimizer in ((model, zero), (other, again)):
        train(each, optimizer, rank, 5, bad=True)  # a first step of `again`, which has state
        assert optimizer.unread is not None
        train(each, optimizer, rank, 6, bad=False)
    torch.testing.assert_close(whole(other), whole(model), rtol=0, atol=0)


def counts_taken_over(rank: int) -> None:
    fused, unfused = made("adamw", 2, None), made("adamw", 2, None)
    for number, (one, other) in enumerate(((fused, unfused), (unfused, fused))):
        for each in (fused, unfused):
            for group in each[1].param_groups:
                group["fused"] = each is fused
        train(*one, rank, number, bad=False)
        saved = one[1].state_dict()
        for group, own in zip(saved["param_groups"], other[1].param_groups, strict=True):
            group["fused"] = own["fused"]
        other[1].load_state_dict(saved)
        other[0].load_state_dict(one[0].state_dict())
        for each in (one, other):
            train(*each, rank, 2 + number, bad=False)
        assert [each[1].unread is None for each in (fused, unfused)] == [False, True]
        for (_, zero), dtype in ((fused, torch.float32), (unfused, torch.float64)):
            counts = [zero.state[parameter]["step"] for parameter in zero.state]
            assert {count.dtype for count in counts if count is not None} == {dtype}
        torch.testing.assert_close(whole(one[0]), whole(other[0]), rtol=1e-12, atol=1e-12)


@ranks(2)
def test_a_count_of_steps_is_taken_over_from_unfused_steps_and_by_them(rank: int) -> None:
    # Unfused optimizers count in this dtype, fused ones in fp32, on a device.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        counts_taken_over(rank)
    finally:
        torch.set_default_dtype(before)


class Spoiled(torch.autograd.Function):
    """Its gradient alone is not finite."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.nan


@ranks(2)
def test_what_was_not_finite_is_told_a_step_late_and_to_a_rank_that_asks_alone(rank: int) -> None:
    model, zero = made("adamw", 2, 1.0)
    q: Any = model.layers[0].q  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr(logging.getLogger("internsp.optim"), "warning", lambda *a: told.append(a[0]))
        for step in range(5):
            if step == 4 and rank == 1:
                patch.setattr(q, "forward", lambda x: F.linear(x, q.weight, Spoiled.apply(q.bias)))
            train(model, zero, rank, step, bad=step == 2)
            assert not told or step > 2
            if step == 2 and rank == 0:  # no collective: rank 1 does not ask
                assert zero.skipped
                assert "not finite on rank 1: " in str(zero.not_finite)
                assert "layers.0.q.weight" in zero.not_finite.parameters  # type: ignore[union-attr]
                assert told[0].startswith("the last step was skipped: ")
            if step == 3:
                assert zero.not_finite is None
                assert (zero.skipped_steps, zero.skipped_in_a_row) == (1, 0)
        assert str(zero.not_finite) == "not finite on rank 1: layers.0.q.bias"
        assert (zero.skipped_steps, zero.skipped_in_a_row) == (2, 1)


@ranks(2)
def test_one_group_that_takes_no_verdict_leaves_all_to_the_host(rank: int) -> None:
    class Own(torch.optim.AdamW):
        """Its step does more than torch's, which the device would not skip."""

    model = little()
    communicator = parallelize(model, mesh_of(2), WeightParallelConfig(min_shard_elements=20))
    (first, second), others = groups(model, 0.0), []
    second["optimizer"], second["fused"] = Own, True
    zero = ZeroOptimizer(communicator, torch.optim.AdamW, param_groups=[first, second], fused=True)
    for step, bad in enumerate((False, True, False)):
        before = whole(model)
        train(model, zero, rank, step, bad)
        assert zero.unread is None
        others.append(all(torch.equal(v, before[n]) for n, v in whole(model).items()))
    assert others == [False, True, False]


@ranks(2)
def test_two_optimizers_that_share_a_norm_are_decided_alike(rank: int) -> None:
    scaler = LossScaler(64.0, min_scale=32.0)
    pairs = [made("sgd", 2, None, loss_scaler=scaler) for _ in range(2)]
    first, second = (zero for _, zero in pairs)
    for step, bad in enumerate((False, True)):
        before = [whole(model) for model, _ in pairs]
        for number, (model, _) in enumerate(pairs):
            ids, labels = batch(step, 2)
            loss = model(share(ids, rank), share(labels, rank), side=True)
            (first.scale(loss) * (math.inf if bad and number == rank == 1 else 1.0)).backward()
        step_together([first, second])
        assert (first.unread is None) == (step == 0)
        # The second is asked before the first one, whose norm it shares.
        assert (second.skipped, first.skipped) == (bad, bad)
        assert second.not_finite is first.not_finite is None, "it lowered the scale"
        assert scaler.scale == (32.0 if bad else 64.0)
        for (model, _), values in zip(pairs, before, strict=True):
            assert all(torch.equal(v, values[n]) for n, v in whole(model).items()) == bad


@pytest.mark.thorough(20)
@ranks(2, fresh=True)
def test_a_rank_that_fails_at_the_norm_lets_no_other_update(rank: int) -> None:
    model, zero = made("adamw", 1, None)
    train(model, zero, rank, 0, bad=False)
    before = {n: p.to_local().clone() for n, p in model.named_parameters()}  # type: ignore[operator]

    def fails(*_: Any) -> Any:
        raise ValueError("on this rank alone")

    if rank == 1:
        zero_room.norm_and_flags = fails
    with pytest.raises(ValueError if rank == 1 else CollectiveError, match="on this rank alone"):
        train(model, zero, rank, 1, bad=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), before[name]), name  # type: ignore[operator]


@pytest.mark.parametrize("fused", [False, True])
@ranks(2)
def test_settings_that_differ_between_ranks_are_told_with_the_norm(fused: bool, rank: int) -> None:
    """A fused step is read when the next one begins; a step with equal settings goes on."""
    model, zero = made("adamw", 2, None, fused=fused)
    train(model, zero, rank, 0, bad=False)
    group = zero.param_groups[-1]
    group["lr"], before = 0.02 + 0.01 * rank, whole(model)
    words = r"ranks \[1\] step with other settings than rank 0, .* on rank %d .*'lr': \[0.0%d\], "
    step = partial(train, model, zero, rank, 1, bad=False)
    if fused:
        step()
    with pytest.raises(ConfigError, match=words % (rank, 2 + rank)):
        getattr(zero, "grad_norm") if fused else step()  # noqa: B009 - read now
    assert fused or all(torch.equal(before[n], value) for n, value in whole(model).items())
    assert math.isfinite(zero.grad_norm), "told once"
    group["lr"] = 0.02
    zero.zero_grad()
    train(model, zero, rank, 2, bad=False)
    assert math.isfinite(zero.grad_norm)


@ranks(2)
def test_one_step_has_one_clip_on_all_ranks_and_of_all_its_optimizers(rank: int) -> None:
    """Ranks would step their parts by other factors; the first optimizer's would count for all."""
    model, zero = made("adamw", 2, 0.5 + rank, fused=False)
    with pytest.raises(ConfigError, match=r"ranks \[1\] step with other settings .*max_grad_norm"):
        train(model, zero, rank, 0, bad=False)
    first = made("adamw", 2, 1.0)[1]
    for name, other in (
        ("max_grad_norm", made("adamw", 2, 2.0)[1]),
        ("skip_not_finite", made("adamw", 2, 1.0, skip_not_finite=False)[1]),
        ("loss_scaler", made("adamw", 2, 1.0, loss_scaler=LossScaler())[1]),
    ):
        with pytest.raises(ConfigError, match=f"optimizers 0 and 1 of a step have the {name}"):
            step_together([first, other])
