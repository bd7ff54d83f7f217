"""torch's own state dict helpers with a parallel model and its ZeroOptimizer, by value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from internsp.errors import CollectiveError, LayoutError
from internsp.optim import ZeroOptimizer
from tests.support.compare import check, gradients
from tests.support.experts import Case as Experts
from tests.support.experts import Pair
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks
from tests.support.zero import SETTINGS, Case, Setup, batch, groups, little, setup, train, whole


def fresh(case: Case) -> Setup:
    """A new model and optimizer, with other values."""
    s = setup(case)
    with torch.no_grad():
        for parameter in s.model.parameters():
            parameter.mul_(0.5)
    return s


def clone(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: clone(value) for key, value in state.items()}
    if isinstance(state, list):
        return [clone(value) for value in state]
    return state.clone() if isinstance(state, Tensor) else state


CASES = (
    Case(weight=2), Case(weight=1, dtype=torch.bfloat16),
    Case(weight=2, dtype=torch.bfloat16, optimizer="sgd", tied=True),
    Case(weight=2, dtype=torch.bfloat16, optimizer="muon"), Case(weight=2, optimizer="adafactor"),
)  # fmt: skip


@pytest.mark.slow(5)
@few("cases", CASES, 2)
@ranks(2)
def test_every_combination_of_options_brings_a_run_back_to_the_bit(
    rank: int, cases: list[Case]
) -> None:
    """H17: full x cpu_offload, and from rank 0 only; 16-bit weights with their masters."""
    for case in cases:
        two = Case(**{**case.__dict__, "steps": 2})
        s = setup(two)
        train(s, two, rank, 2)
        kept = []
        for full in (False, True):
            for offload in (False, True):
                options = StateDictOptions(full_state_dict=full, cpu_offload=offload)
                model, optimizer = get_state_dict(s.model, s.optimizer, options=options)
                alone = full and offload  # then torch returns it on rank 0 only
                assert bool(optimizer.get("state")) == (rank == 0 or not alone)
                used = optimizer["state"]["norm.weight"] if rank == 0 or not alone else {}
                for value in used.values():
                    cut = isinstance(value, DTensor)
                    assert not isinstance(value, Tensor) or value.ndim == 0 or cut != full
                given = StateDictOptions(full_state_dict=full, broadcast_from_rank0=alone)
                kept.append((clone(model), clone(optimizer), given))
        expected = train(s, two, rank, 2, start=2)
        end = whole(s.model)
        for model, optimizer, given in kept:
            other = fresh(two)
            # Not by set_state_dict, which excludes a rank without a model state from that part.
            set_optimizer_state_dict(other.model, other.optimizer, optimizer, options=given)
            set_model_state_dict(other.model, model, options=given)
            assert train(other, two, rank, 2, start=2) == expected, f"{case}, {given}"
            now = whole(other.model)
            assert all(torch.equal(end[name], now[name]) for name in end), f"{case}, {given}"


@pytest.mark.parametrize("own", [False, True], ids=["whole parts", "slices"])
@ranks(2)
def test_an_asynchronous_checkpoint_has_the_bytes_of_a_plain_one(
    own: bool, tmp_path: Path, rank: int
) -> None:
    """dcp.async_save copies the state with what its tensors refer to; a step goes on meanwhile."""
    case = Case(weight=2)
    s = setup(case)
    train(s, case, rank, 1)
    state = {
        "model": s.model.state_dict(),
        "optimizer": s.optimizer.local_state_dict()
        if own
        else get_optimizer_state_dict(s.model, s.optimizer),
    }
    dcp.save(state, checkpoint_id=tmp_path / "plain")
    group = dist.new_group(backend="gloo")
    saving: Any = dcp.async_save(state, checkpoint_id=tmp_path / "later", process_group=group)
    train(s, case, rank, 1, start=1)
    saving.result()
    dist.destroy_process_group(group)
    for one in (tmp_path / "plain").glob("*.distcp"):
        assert one.read_bytes() == (tmp_path / "later" / one.name).read_bytes()


def with_buffer() -> Tiny:
    model = Tiny()
    model.register_buffer("seen", torch.arange(3.0))
    return model


@pytest.mark.thorough(2)
@pytest.mark.parametrize("weight", [1, 2])
@ranks(2)
def test_a_full_state_dict_that_is_kept_is_a_copy(weight: int) -> None:
    """As under FSDP2: only buffers are the live ones, unless they are copied to another device."""
    twin = Twin(with_buffer, mesh_of(weight))
    kept = []
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        kept.append(get_model_state_dict(twin.ours, options=options))
    with torch.no_grad():
        kept.append({n: p.full_tensor() for n, p in twin.ours.named_parameters()})  # type: ignore[operator]
    kept.append({n: p.full_tensor().detach() for n, p in twin.ours.named_parameters()})  # type: ignore[operator]
    before = [clone(state) for state in kept]
    with torch.no_grad():
        for parameter in twin.ours.parameters():
            parameter.mul_(0.5)
    for state, wanted in zip(kept, before, strict=True):
        live = [name for name in state if not torch.equal(state[name], wanted[name])]
        assert not live, live
    with torch.no_grad():
        part = twin.ours.norm.weight.to_local()  # type: ignore[operator, union-attr]
        placed: Any = twin.ours.norm.weight.redistribute(  # type: ignore[operator, union-attr]
            placements=twin.ours.norm.weight.placements  # type: ignore[union-attr]
        )
        part.mul_(3.0)
    assert not torch.equal(placed.to_local(), part), "a replica has memory of its own, too"
    assert kept[0]["seen"].data_ptr() == twin.ours.get_buffer("seen").data_ptr()


@pytest.mark.thorough(4)
@pytest.mark.parametrize("optimizer", ["torch", "zero"])
@ranks(2)
def test_assigned_parameters_have_no_gradient_as_in_torch(optimizer: str) -> None:
    """``load_state_dict(assign=True)`` between two micro-batches, finished or within no_sync()."""
    for assign in (True, False):
        for within in (nullcontext, "no_sync", "no_replica_sync"):
            twin = Twin(Tiny, mesh_of(2))
            ours = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1) if (
                optimizer == "zero"
            ) else torch.optim.SGD(twin.ours.parameters(), lr=0.1)  # fmt: skip
            open_ = getattr(twin.communicator, within) if isinstance(within, str) else within
            with open_():
                twin.backward()
            part = {n: v * 0.5 for n, v in twin.plain.state_dict().items() if "w1" not in n}
            for model in (twin.plain, twin.ours):
                model.load_state_dict(dict(part), strict=False, assign=assign)
            twin.backward()
            theirs = torch.optim.SGD(twin.plain.parameters(), lr=0.1)  # after it: torch's are new
            if optimizer == "zero":
                found = ours.gather_gradients()  # type: ignore[union-attr]
                check(found, gradients(twin.plain), f"assign {assign} {within}")
                theirs.step()
                ours.step()
                twin.check_parameters(f"assign {assign} {within}")
            else:
                twin.check_step((theirs, ours), f"assign {assign} {within}")


@ranks(2)
def test_a_parameter_that_is_assigned_itself_keeps_its_gradient() -> None:
    twin = Twin(Tiny, mesh_of(2))
    twin.backward()
    for model in (twin.plain, twin.ours):
        model.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    twin.check_gradients("assigned itself")


@pytest.mark.thorough(2)
@ranks(2)
def test_state_is_that_of_one_process_and_goes_there_and_back(rank: int) -> None:
    case = Case(weight=2, steps=3, max_grad_norm=None)
    s = setup(case)
    empty = get_optimizer_state_dict(s.model, s.optimizer)["state"]
    assert all(float(entry["step"]) == 0 for entry in empty.values())  # type: ignore[union-attr, index, arg-type]
    train(s, case, rank, 2)
    plain = little()
    settings = dict(SETTINGS["adamw"])
    adamw = torch.optim.AdamW(groups(plain, settings.pop("weight_decay")), **settings)

    def steps(first: int) -> None:
        for step in range(first, first + 3):
            plain(*batch(step, 2)).backward()
            adamw.step()
            adamw.zero_grad()

    steps(0)
    full = StateDictOptions(full_state_dict=True)
    entries: Any = {}
    for flat in (False, True):
        options = StateDictOptions(full_state_dict=not flat, flatten_optimizer_state_dict=flat)
        ours: Any = get_optimizer_state_dict(s.model, s.optimizer, options=options)
        if flat:
            average = ours["state.head.weight.exp_avg"].full_tensor()
            assert torch.equal(average, entries["head.weight"]["exp_avg"])
            other = fresh(case)
            set_model_state_dict(other.model, get_model_state_dict(s.model))
            set_optimizer_state_dict(other.model, other.optimizer, ours, options=options)
            continue
        entries = ours["state"]
        theirs: Any = get_optimizer_state_dict(plain, adamw, options=full)
        for name, entry in theirs["state"].items():
            assert set(entries[name]) == set(entry)
            check(entries[name], entry, f"state of {name}", 1e-9)
        unused = set(entries) - set(theirs["state"])
        assert unused == {"side.weight", "side.bias"}
        assert not entries["side.weight"]["exp_avg"].any()
        kept = [{k: v for k, v in g.items() if k != "params"} for g in ours["param_groups"]]
        for group, wanted in zip(kept, theirs["param_groups"], strict=True):
            assert all(wanted[key] == value for key, value in group.items())
    expected = train(s, case, rank, 2, start=3)
    assert train(other, case, rank, 2, start=3) == expected, "flattened"

    _there_and_back(case, rank, plain, adamw, steps)


def _there_and_back(
    case: Case, rank: int, plain: nn.Module, adamw: Any, steps: Callable[[int], None]
) -> None:
    full = StateDictOptions(full_state_dict=True)
    theirs: Any = get_optimizer_state_dict(plain, adamw, options=full)
    back = fresh(case)  # from one process, which has no state of unused parameters
    loose = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(back.model, plain.state_dict(), options=full)
    set_optimizer_state_dict(back.model, back.optimizer, theirs, options=loose)
    steps(3)
    train(back, case, rank, 2, start=3)
    check(whole(back.model), dict(plain.named_parameters()), "from one process", 1e-9)
    there = little()  # and to one process
    copied = torch.optim.AdamW(groups(there, 0.1), lr=1e-2)
    model = get_model_state_dict(back.model, options=full)
    there.load_state_dict(model)
    ours: Any = get_optimizer_state_dict(back.model, back.optimizer, options=full)
    set_optimizer_state_dict(there, copied, ours)
    for module, optimizer in ((there, copied), (plain, adamw)):
        module(*batch(6, 2)).backward()
        optimizer.step()
    check(dict(there.named_parameters()), dict(plain.named_parameters()), "to one process", 1e-9)


class Scaled(Tiny):
    """With parameters without dimensions: a gate, a temperature."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def blocks(self, x: Tensor) -> Tensor:
        return super().blocks(x * self.gate) + self.temperature


OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
}
HOW = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "broadcast": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}


def steps_of(twin: Twin, pairs: tuple[Any, Any], count: int) -> None:
    for _ in range(count):
        twin.backward()
        for optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow(10)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(2)
def test_state_of_parameters_without_dimensions_goes_on(name: str, how: str) -> None:
    """From torch's format, with a ZeroOptimizer and in a plain loop, to another mesh."""
    options = HOW[how]
    for zero in (True, False) if name != "adafactor" else (True,):

        def make(weight: int, zero: bool = zero) -> tuple[Twin, Any, Any]:
            twin, kind = Twin(Scaled, mesh_of(weight)), OPTIMIZERS[name]
            theirs = kind(twin.plain.parameters())
            if not zero:
                return twin, kind(twin.ours.parameters()), theirs
            return twin, ZeroOptimizer(twin.communicator, kind.func, **kind.keywords), theirs

        twin, ours, theirs = make(2)
        steps_of(twin, (ours, theirs), 3)
        state: Any = get_optimizer_state_dict(
            twin.ours, ours, options=StateDictOptions(full_state_dict=True) if how == "broadcast"
            else options,
        )  # fmt: skip
        if how == "broadcast" and dist.get_rank():
            state = {}
        other, fresh, _ = make(1 if how in ("full", "broadcast") else 2)
        other.ours.load_state_dict(get_model_state_dict(
            twin.ours, options=StateDictOptions(full_state_dict=True)
        ))  # fmt: skip
        set_optimizer_state_dict(other.ours, fresh, state, options=options)
        other.plain.load_state_dict(twin.plain.state_dict())
        other.plain, other._generator = twin.plain, twin._generator
        steps_of(other, (fresh, theirs), 2)
        other.check_parameters(f"{name} {how} zero {zero}", 1e-9)


@pytest.mark.thorough(1)
@ranks(2)
def test_the_master_of_a_16_bit_parameter_without_dimensions_is_loaded() -> None:
    twin = Twin(Scaled, mesh_of(2), dtype=torch.bfloat16)
    ours = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=1e-4)
    for _ in range(3):  # steps below the resolution of bf16
        twin.ours(*twin.batch()[1]).backward()
        ours.step()
    full = StateDictOptions(full_state_dict=True)
    state: Any = get_optimizer_state_dict(twin.ours, ours, options=full)
    other = Twin(Scaled, mesh_of(1), dtype=torch.bfloat16)
    fresh = ZeroOptimizer(other.communicator, torch.optim.SGD, lr=1e-4)
    other.ours.load_state_dict(get_model_state_dict(twin.ours, options=full))
    set_optimizer_state_dict(other.ours, fresh, state, options=full)
    again: Any = get_optimizer_state_dict(other.ours, fresh, options=full)
    for name, entry in state["state"].items():
        assert entry["master"].dtype == torch.float32
        assert torch.equal(again["state"][name]["master"], entry["master"]), name
    assert state["state"]["gate"]["master"] != state["state"]["gate"]["master"].bfloat16()


@ranks(2)
def test_a_checkpoint_of_one_mesh_is_continued_on_another(rank: int, tmp_path: Path) -> None:
    for number, (first, second) in enumerate(((2, 1), (1, 2))):
        for dtype in (torch.float64, torch.bfloat16):
            case = Case(weight=first, steps=3, dtype=dtype, max_grad_norm=None)
            s = setup(case)
            train(s, case, rank, 2)
            path = tmp_path / f"{number} {dtype}"
            model, optimizer = get_state_dict(s.model, s.optimizer)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
            expected = train(s, case, rank, 2, start=3)
            other = fresh(Case(**{**case.__dict__, "weight": second}))
            model, optimizer = get_state_dict(other.model, other.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
            set_state_dict(
                other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer
            )
            found = train(other, case, rank, 2, start=3)
            wide = dtype == torch.float64
            for one, two in zip(found, expected, strict=True):
                assert abs(one[0] - two[0]) < (1e-9 if wide else 0.05) * abs(two[0])
            tolerance = 1e-9 if wide else 0.02
            check(whole(other.model), whole(s.model), f"{first} to {second}, {dtype}", tolerance)


@ranks(2)
def test_a_state_that_one_rank_asks_for_alone_is_an_error_there(rank: int) -> None:
    case = Case(weight=1, steps=1, options={})
    s = setup(case)
    s.optimizer._communicator.consensus._seconds = 1.0
    if rank == 0:
        raises(CollectiveError, s.optimizer.state_dict, "state_dict()", "ranks [1]")
    dist.barrier()
    train(s, case, rank, 2)
    state = s.optimizer.state_dict()
    group = state["param_groups"][0]
    shorter = [{**group, "params": group["params"][1:]}, *state["param_groups"][1:]]
    short = {"state": state["state"], "param_groups": shorter}
    raises(ValueError, partial(s.optimizer.load_state_dict, short), "groups of")
    state["state"][0]["exp_avg"] = torch.zeros(2, 2)
    raises(LayoutError, partial(s.optimizer.load_state_dict, state), "exp_avg of", f"rank {rank}")


@ranks(4)
def test_models_load_whole_local_and_placed_values_and_refuse_others(rank: int) -> None:
    """H17: ``load_state_dict`` takes DTensor, local or global tensors, without ``assign=True``."""
    torch.manual_seed(8)
    other = Tiny(tied=True).double().state_dict()
    for weight in (1, 2, 4):
        twin = Twin(partial(Tiny, tied=True), mesh_of(weight))
        twin.plain.load_state_dict(other)

        def values(kind: str, name: str, twin: Twin = twin) -> Tensor:
            parameter: Any = twin.ours.get_parameter(name)
            mesh, placements = parameter.device_mesh, parameter.placements
            if kind == "whole":
                return other[name]
            if kind == "replicated":
                return DTensor.from_local(other[name], mesh, [Replicate()] * mesh.ndim)
            placed = distribute_tensor(other[name], mesh, placements)
            return placed.to_local() if kind == "local" else placed

        for kind in ("whole", "local", "placed", "replicated"):
            for assign in (False, True):
                for p in twin.ours.parameters():
                    p.data.mul_(0.5)
                state = {name: values(kind, name) for name in other}
                twin.ours.load_state_dict(state, assign=assign)
                what = f"weight {weight}, {kind}, assign {assign}"
                check({n: p.detach() for n, p in twin.ours.named_parameters()},
                      dict(twin.plain.named_parameters()), what, 0.0)  # fmt: skip
        twin.backward()
        twin.check_step([torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)])
        wrong = {name: value.clone() for name, value in other.items()}
        wrong["layers.1.q.weight"] = torch.zeros(7, 6)
        load = partial(twin.ours.load_state_dict, wrong)
        raises(LayoutError, load, "layers.1.q.weight", f"rank {rank}", "[7, 6]", "[6, 6]")
        with torch.device("meta"):
            wrong["layers.1.q.weight"] = torch.zeros(6, 6)
        raises(LayoutError, load, "layers.1.q.weight", "meta device")
    pair = Pair(Experts(weight=2, expert_weight=1, expert=2))
    changed = {name: value * 1.5 for name, value in pair.plain.state_dict().items()}
    pair.plain.load_state_dict(changed)
    pair.ours.load_state_dict(changed)
    assert pair.furthest_parameter() == 0.0
    for p in pair.ours.parameters():
        p.data.mul_(0.5)
    set_model_state_dict(
        pair.ours,
        dict(changed) if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    assert pair.furthest_parameter() == 0.0
    found: Any = get_model_state_dict(pair.ours, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(found[name], changed[name]) for name in changed)
