"""ZeroOptimizer: fp16 loss scaling, saving and resuming, values written by the program."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from internsp.errors import CollectiveError, LayoutError
from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh
from internsp.optim import LossScaler, ZeroOptimizer
from internsp.optim.slices import Slices
from tests.support.compare import check, parameters
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks, run_ranks
from tests.support.zero import Case, Setup, batch, setup, share, train, whole


def overflow(rank: int, world: int, weight: int) -> list[dict[str, Any]]:
    """Only rank 1 overflows in step 1 of 3; with and without clipping."""
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


@pytest.mark.thorough(4)
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


@pytest.mark.thorough(1)
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
    """All steps at once compared with ``first``, a checkpoint, and the rest by new objects."""
    same, last = [], max(4, first + 2)
    for index, case in enumerate(cases):
        s, schedule = make(case)
        expected = advance(s, schedule, case, rank, world, range(last))
        end = whole(s.model)
        s, schedule = make(case)
        advance(s, schedule, case, rank, world, range(first))
        path = f"{folder}/{index}"
        dcp.save({"model": s.model, "optimizer": s.optimizer}, checkpoint_id=path)
        rest = schedule.state_dict()
        s, schedule = make(case)
        with torch.no_grad():  # other values, to detect what is not loaded
            for parameter in s.model.parameters():
                parameter.mul_(0.5)
        dcp.load({"model": s.model, "optimizer": s.optimizer}, checkpoint_id=path)
        schedule.load_state_dict(rest)
        got = advance(s, schedule, case, rank, world, range(first, last))
        same.append(expected[2 * first :] == got)
        now = whole(s.model)
        same.append(all(torch.equal(end[n], now[n]) for n in end))
    return same


RESUMED = [
    (
        2,
        0,
        [
            Case(weight=2, dtype=torch.bfloat16),
            Case(weight=1, optimizer="sgd"),
            Case(weight=2, optimizer="muon"),
        ],
    ),
    (
        4,
        4,
        [
            Case(weight=2, dtype=torch.bfloat16),
            Case(zero=2, micro_batches=2, tied=True),
        ],
    ),
    (
        4,
        4,
        [
            Case(weight=2, optimizer="muon", dtype=torch.bfloat16),
            Case(weight=2, optimizer="adafactor", dtype=torch.bfloat16, tied=True),
        ],
    ),
]


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("world", "first", "cases"),
    [*RESUMED[:2], pytest.param(*RESUMED[2], marks=pytest.mark.thorough(9))],
    ids=["at the start", "later", "later, other optimizers"],
)
def test_a_resumed_run_goes_on_with_the_same_bits(
    world: int, first: int, cases: list[Case], tmp_path: Path
) -> None:
    for same in run_ranks(resume, world, cases, first, str(tmp_path)):
        assert all(same), same


class Counting(torch.optim.Optimizer):
    """Adam in the layout of apex's FusedAdam: its group counts the steps, from the first one on."""

    def __init__(self, params: Any, lr: float = 1e-2, tensor: bool = False) -> None:
        super().__init__(params, {"lr": lr, "tensor": tensor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = torch.ones(1) if group["tensor"] else 1
            count = float(group["step"])
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.01)
                wide = (state["v"] / (1 - 0.99**count)).sqrt() + 1e-8
                p.addcdiv_(state["m"], wide, value=-group["lr"] / (1 - 0.9**count))


class Averaging(torch.optim.SGD):
    """Steps by the mean of all elements that it has: right only if it has all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            total = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
            group["d"] = max(group.get("d", 0.0), total)
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(p.grad, alpha=-group["lr"] / group["d"])


def schedule_free(name: str) -> Any:
    return getattr(importlib.import_module("schedulefree"), name)


IN_GROUPS: dict[str, tuple[Callable[[], Any], dict[str, Any], set[str]]] = {
    "apex": (lambda: Counting, {}, {"step"}),
    "a tensor": (lambda: Counting, {"tensor": True}, {"step"}),
    **{
        name: (
            partial(schedule_free, name), {"lr": 1e-2, "warmup_steps": 4},
            {"k", "weight_sum", "lr_max", "train_mode", "scheduled_lr"},
        )
        for name in ("AdamWScheduleFree", "SGDScheduleFree")
    },
}  # fmt: skip


def one_of(chosen: str, mesh: ParallelMesh, **config: Any) -> Any:
    """A twin with both optimizers, ready to train, and a function for some steps of both."""
    made, settings, _ = IN_GROUPS[chosen]
    twin = Twin(partial(Tiny, layers=2), mesh, **config)
    ours = ZeroOptimizer(twin.communicator, made(), **settings)
    theirs = made()(twin.plain.parameters(), **settings)
    for optimizer in (ours, theirs):
        getattr(optimizer, "train", lambda: None)()

    def steps(count: int) -> None:
        for _ in range(count):
            twin.backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()

    return twin, ours, theirs, steps


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("chosen", IN_GROUPS)
@ranks(2)
def test_what_an_optimizer_keeps_in_its_groups_is_that_of_one_process(
    chosen: str, offload: str
) -> None:
    """Also where a rank steps a bucket in pieces, and where a schedule changes a setting."""
    config: dict[str, Any] = {} if offload == "none" else {"offload": (offload,)}
    twin, ours, theirs, steps = one_of(chosen, mesh_of(2), **config)
    with mock.patch("internsp.optim.streamed.PIECE_BYTES", 8):
        for _ in range(3):
            steps(2)
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["lr"] *= 0.5
        for name in IN_GROUPS[chosen][2]:
            assert ours.param_groups[0][name] == theirs.param_groups[0][name], name
        twin.check_parameters(chosen)
        if hasattr(theirs, "eval"):
            for mode in ("eval", "eval", "train"):
                getattr(ours, mode)()
                getattr(theirs, mode)()
                twin.check_parameters(mode)
            steps(1)
            twin.check_parameters("after eval")


@pytest.mark.slow(10)
@pytest.mark.parametrize("how", ["state_dict", "local", "torch", "flat"])
@pytest.mark.parametrize("chosen", IN_GROUPS)
@ranks(2)
def test_what_it_keeps_in_its_groups_goes_on_after_a_save_on_another_mesh(
    chosen: str, how: str, tmp_path: Path
) -> None:
    twin, ours, theirs, steps = one_of(chosen, mesh_of(2))
    steps(3)
    other, fresh, _, _ = one_of(chosen, mesh_of(1))
    flat = StateDictOptions(flatten_optimizer_state_dict=how == "flat")

    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        if how in ("torch", "flat"):
            return get_optimizer_state_dict(model, optimizer, options=flat)
        return optimizer.state_dict() if how == "state_dict" else optimizer.local_state_dict()

    dcp.save({"m": twin.ours.state_dict(), "o": state(twin.ours, ours)}, checkpoint_id=tmp_path)
    loaded = {"m": other.ours.state_dict(), "o": state(other.ours, fresh)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    other.ours.load_state_dict(loaded["m"])
    if how in ("torch", "flat"):
        set_optimizer_state_dict(other.ours, fresh, loaded["o"], options=flat)
    else:
        load = fresh.load_state_dict if how == "state_dict" else fresh.load_local_state_dict
        load(loaded["o"])
    for name in IN_GROUPS[chosen][2]:
        assert fresh.param_groups[0][name] == theirs.param_groups[0][name], name
    everybody, mine = twin.batch()
    for model, optimizer, given in (
        (twin.plain, theirs, everybody), (twin.ours, ours, mine), (other.ours, fresh, mine),
    ):  # fmt: skip
        model(*given).backward()
        optimizer.step()
    twin.check_parameters(chosen)
    check(parameters(other.ours), parameters(twin.plain), f"{chosen} loaded by {how}")


@ranks(1)
def test_a_loss_scaler_goes_on_from_both_state_dicts() -> None:
    def made(scale: float) -> ZeroOptimizer:
        communicator = Twin(Tiny, mesh_of(1)).communicator
        return ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1, loss_scaler=LossScaler(scale))

    given, fresh, local = made(64.0), made(1.0), made(1.0)
    fresh.load_state_dict(given.state_dict())
    local.load_local_state_dict(given.local_state_dict())
    for found in (fresh, local):
        assert found.loss_scaler is not None
        assert found.loss_scaler.scale == 64.0


@ranks(1)
def test_an_optimizer_whose_group_combines_parameters_is_refused() -> None:
    """Also where it is declared to need whole matrices; the remedy that is named works."""
    twin = Twin(Tiny, mesh_of(1))
    for options in ({}, {"whole_matrix": True}):
        text = raises(
            TypeError, partial(ZeroOptimizer, twin.communicator, Averaging, lr=0.1, **options),
            "Averaging steps one parameter otherwise", "through d in its param_groups",
        )  # fmt: skip
        assert "Averaging(model.parameters(), ...) in a plain loop" in text
    twin.backward()
    twin.check_step([Averaging(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)])


THOROUGH = pytest.mark.thorough(7)
LOCAL = [
    Case(weight=2, zero=2, dtype=torch.bfloat16, tied=True),
    Case(weight=1, zero=4, optimizer="sgd", config={"accumulation": "sharded"}),
    Case(weight=2, zero=2, optimizer="muon", dtype=torch.bfloat16),
    Case(weight=2, zero=2, optimizer="adafactor"),
]


def moved(rank: int, world: int, case: Case, folder: str) -> None:
    """Save slices on one mesh, load them on others and save again: the same unsharded state."""
    meshes = [(2, 2), (1, 4), (4, 1), (2, 1), (1, 2), (2, 2)]
    wanted: Any = None
    for number, (weight, zero) in enumerate(meshes):
        s = setup(Case(**{**case.__dict__, "weight": weight, "zero": zero}))
        path = f"{folder}/{number}"
        state = {"model": s.model.state_dict(), "optimizer": s.optimizer.local_state_dict()}
        if number == 0:
            train(s, Case(**{**case.__dict__, "steps": 3}), rank, world)
        else:
            dcp.load(state, checkpoint_id=f"{folder}/{number - 1}")
            s.model.load_state_dict(state["model"])
            s.optimizer.load_local_state_dict(state["optimizer"])
        found = [whole(s.model), everything(s)]
        wanted = wanted or found
        assert [list(each) for each in found] == [list(each) for each in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert [name for name in one if not torch.equal(one[name], other[name])] == []
        state = {"model": s.model.state_dict(), "optimizer": s.optimizer.local_state_dict()}
        dcp.save(state, checkpoint_id=path)


def everything(s: Setup) -> dict[str, torch.Tensor]:
    """All optimizer state, unsharded; state that no step has used does not exist."""
    state, found = s.optimizer.state_dict(), {}
    for index, entry in state["state"].items():
        for kind, value in entry.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
            found[f"{index} {kind}"] = whole
    return found


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.optimizer in ("adamw", "muon") else THOROUGH)
        for case in LOCAL
    ],
    ids=lambda case: case.optimizer,
)
def test_slices_saved_on_one_mesh_are_loaded_on_any_other(case: Case, tmp_path: Path) -> None:
    run_ranks(moved, 4, case, str(tmp_path))


@ranks(2)
def test_slices_of_another_rank_or_model_are_refused_and_nothing_is_taken(rank: int) -> None:
    case = Case(weight=2, steps=1)
    s, stranger = setup(case), setup(Case(weight=2, tied=True))
    train(s, case, rank, 2)
    before = everything(s)
    state = s.optimizer.local_state_dict()
    parts = {
        name: {kind: value.parts for kind, value in entry.items() if isinstance(value, Slices)}
        for name, entry in state["state"].items()
    }
    theirs: list[Any] = [None] * 2
    dist.all_gather_object(theirs, parts)
    for name, entry in state["state"].items():
        for kind, value in entry.items():
            if isinstance(value, Slices) and name in theirs[1 - rank]:
                value.parts = theirs[1 - rank][name][kind]
    with pytest.raises(LayoutError, match="this rank has"):
        s.optimizer.load_local_state_dict(state)
    with pytest.raises(LayoutError, match="the optimizer state has no"):
        s.optimizer.load_local_state_dict(stranger.optimizer.local_state_dict())
    now = everything(s)
    assert all(torch.equal(before[name], now[name]) for name in before)


def written(rank: int, world: int, dtype: torch.dtype) -> float:
    """The next step starts from values loaded, edited or given new storage between steps.

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


@ranks(2)
def test_a_state_dict_has_what_was_written_to_16_bit_parameters_since_the_step(rank: int) -> None:
    case = Case(weight=2, dtype=torch.bfloat16, steps=1)
    s = setup(case)
    train(s, case, rank, 2)
    with torch.no_grad():
        for parameter in s.model.parameters():
            parameter.mul_(1.5)
    wanted, state = whole(s.model), s.optimizer.state_dict()["state"]
    name_of = {id(p): name for name, p in s.model.named_parameters()}
    stepped = [p for group in s.optimizer.param_groups for p in group["params"]]
    for index, own in state.items():
        name, master = name_of[id(stepped[index])], own["master"].full_tensor()
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), wanted[name]), name
    assert len(state) == len(wanted)


@ranks(2)
def test_a_state_dict_of_one_rank_alone_is_refused_on_both_before_it_gathers(rank: int) -> None:
    s = setup(Case(weight=2))
    other = partial(s.optimizer.add_param_group, {"params": []})
    words = "rank {} reached ZeroOptimizer.", "all ranks must make the same calls"
    alone = s.optimizer.state_dict if rank == 0 else other
    raises(CollectiveError, alone, words[0].format(rank), words[1])
    assert s.optimizer.state_dict()["state"].keys() == set(range(len(list(s.model.parameters()))))


@pytest.mark.thorough(1)
@ranks(2)
def test_state_that_a_later_setting_adds_is_in_what_is_saved() -> None:
    s = setup(Case(weight=2))
    s.optimizer.local_state_dict()  # the names that are known then are not kept
    for group in s.optimizer.param_groups:
        group["amsgrad"] = True
    ids, labels = batch(0, 2)
    rank = dist.get_rank()
    s.model(share(ids, rank), share(labels, rank)).backward()
    s.optimizer.step()
    here = s.optimizer.local_state_dict()["state"]["head.weight"]
    all_of_it = next(iter(s.optimizer.state_dict()["state"].values()))
    assert here["max_exp_avg_sq"].parts.keys() == here["exp_avg"].parts.keys()
    assert "max_exp_avg_sq" in all_of_it


@ranks(2)
def test_a_state_dict_is_copied_and_written_by_torch_alone() -> None:
    """Its values are in no buffer of ours: torch would not copy a ``DTensor`` into such a view."""
    s = setup(Case(weight=2))
    s.model(*batch(0, 1)).backward()
    s.optimizer.step()
    made = s.optimizer.state_dict()
    file = io.BytesIO()
    torch.save(made, file)
    copied = copy.deepcopy(made)
    assert made["state"].keys() == copied["state"].keys() == set(range(len(made["state"])))
    for index, own in made["state"].items():
        for name, value in own.items():
            assert torch.equal(local(copied["state"][index][name]), local(value)), (index, name)


@ranks(2)
def test_step_counts_are_exchanged_as_numbers() -> None:
    """A state dict takes them from all ranks: pickled as a tensor, each would be a file of its
    own, and take a hundred times as long."""
    s = setup(Case(weight=2))
    s.model(*batch(0, 1)).backward()
    s.optimizer.step()
    with mock.patch.object(Objects, "gather", autospec=True, side_effect=Objects.gather) as gather:
        made = s.optimizer.state_dict()
    (_, sent), _ = gather.call_args
    assert gather.call_count == 1
    assert len(pickle.dumps(sent)) < 100 * len(made["state"])


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@ranks(2)
def test_parameters_are_in_the_models_order_whichever_are_sharded() -> None:
    """Without groups; state is matched by that order, also by torch's own optimizer."""
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))
    ours = ZeroOptimizer(twin.communicator, torch.optim.AdamW, lr=0.01)
    of = {p: name for name, p in twin.ours.named_parameters()}
    assert [of[p] for p in ours.param_groups[0]["params"]] == list(of.values())
    theirs = torch.optim.AdamW(twin.plain.parameters(), lr=0.01)
    twin.backward()
    ours.step()
    theirs.step()
    other = Twin(partial(Tiny, layers=2), mesh_of(1))
    fresh = ZeroOptimizer(other.communicator, torch.optim.AdamW, lr=0.01)
    fresh.load_state_dict(ours.state_dict())
    found = fresh.state_dict()["state"]
    wanted = theirs.state_dict()["state"]
    for index, state in wanted.items():
        check({"m": found[index]["exp_avg"]}, {"m": state["exp_avg"]}, str(index))


@ranks(2)
def test_hooks_of_state_dicts_run_as_torchs_and_one_that_raises_is_told() -> None:
    s = setup(Case(weight=2))
    calls: list[str] = []

    def add(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("saved")
        return {**state, "note": 7}

    def read(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        calls.append(f"note {state.pop('note')}")
        state["param_groups"] = [{**group, "lr": 0.5} for group in state["param_groups"]]

    s.optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    s.optimizer.register_state_dict_post_hook(add)
    s.optimizer.register_load_state_dict_pre_hook(read)
    s.optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    made = s.optimizer.state_dict()
    s.optimizer.load_state_dict(made)
    assert calls == ["saving", "saved", "note 7", "loaded"]
    assert made["note"] == 7, "the hook was given a copy"
    assert s.optimizer.param_groups[0]["lr"] == 0.5

    def refuse(_: torch.optim.Optimizer) -> None:
        raise KeyError("mine")

    if dist.get_rank() == 1:
        s.optimizer.register_state_dict_pre_hook(refuse)
    wanted = (KeyError, "mine") if dist.get_rank() == 1 else (CollectiveError, "rank 1", "mine")
    raises(wanted[0], s.optimizer.state_dict, *wanted[1:])
