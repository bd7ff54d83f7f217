"""Gradual unfreezing with a ``ZeroOptimizer``, by value against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from internsp.errors import CollectiveError, LayoutError
from internsp.optim import LossScaler, ZeroOptimizer
from tests.support.compare import check, parameters
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks

STAGES = (("layers.1.", "gate"), ("layers.0.", "embed."))
"""What is unfrozen, one after the other; the rest trains from the start."""


class Gated(Tiny):
    """With a parameter that has no dimensions, and one that is replicated in every block."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(layers=2, tied=tied)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        return super().blocks(x) + self.gate


def later(name: str) -> bool:
    return any(name.startswith(start) for stage in STAGES for start in stage)


def chosen(model: nn.Module, starts: tuple[str, ...]) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if any(n.startswith(s) for s in starts)]


def frozen_at_first(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not later(name))
    return model


SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {"lr": 5e-2}),
}
MESHES = {"weight 2": {"weight": 2}, "zero 2": {"weight": 1, "zero": 2}}


def make_optimizers(
    twin: Twin, name: str, at_first: bool, **options: Any
) -> tuple[Any, Any, Callable[[int], None]]:
    """Both optimizers, and a function that unfreezes a stage in both models.

    Args:
        at_first: whether the frozen parameters are in groups from the start, or are added.
    """
    cls, settings = SETTINGS[name]

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        rest = [p for n, p in model.named_parameters() if not later(n)]
        frozen = [{"params": chosen(model, stage), "lr": 2e-2} for stage in STAGES]
        return [{"params": rest}, *(frozen if at_first else [])]

    ours = ZeroOptimizer(
        twin.communicator, cls, param_groups=groups(twin.ours), **settings, **options
    )
    theirs = cls(groups(twin.plain), **settings)

    def unfreeze(stage: int) -> None:
        for model, optimizer in ((twin.plain, theirs), (twin.ours, ours)):
            for parameter in chosen(model, STAGES[stage]):
                parameter.requires_grad_(True)
            if not at_first:
                optimizer.add_param_group({"params": chosen(model, STAGES[stage]), "lr": 2e-2})

    return ours, theirs, unfreeze


def train(twin: Twin, ours: Any, theirs: Any, steps: int, micro: int = 1) -> None:
    for _ in range(steps):
        for _ in range(micro):
            everybody, mine = twin.batch()
            twin.plain(*everybody).backward()
            ours.scale(twin.ours(*mine)).backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow(15)
@pytest.mark.parametrize("at_first", [True, False], ids=["in groups", "added"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SETTINGS)
@ranks(2)
def test_stages_that_are_unfrozen_train_as_on_one_process(
    name: str, mesh: str, at_first: bool
) -> None:
    """State is from when they first train; frozen again they keep it; with micro-batches."""
    twin = Twin(partial(frozen_at_first, Gated), mesh_of(**MESHES[mesh]))
    ours, theirs, unfreeze = make_optimizers(twin, name, at_first)
    first = dict(ours.memory())["optimizer state"]
    train(twin, ours, theirs, 2, micro=2)
    assert dict(ours.memory())["optimizer state"] >= first
    for stage in range(len(STAGES)):
        unfreeze(stage)
        train(twin, ours, theirs, 2, micro=2)
        twin.check_parameters(f"stage {stage}", 1e-9)
    for model in (twin.plain, twin.ours):
        for parameter in chosen(model, STAGES[0]):
            parameter.requires_grad_(False)
    train(twin, ours, theirs, 2)
    unfreeze_again = chosen(twin.plain, STAGES[0]) + chosen(twin.ours, STAGES[0])
    for parameter in unfreeze_again:
        parameter.requires_grad_(True)
    twin.trace.clear()
    train(twin, ours, theirs, 1)
    stepped = [event.unit for event in twin.trace.events if event.kind == "STEP"]
    order = ["small", "embed", *(unit.name for unit in twin.communicator.blocks), "head"]
    if name != "adafactor":  # whose matrices are stepped together
        assert stepped == sorted(stepped, key=order.index), "as the next forward needs them"
    train(twin, ours, theirs, 1)
    twin.check_parameters("frozen and unfrozen again", 1e-9)


@pytest.mark.parametrize("within", ["no_sync", "no_replica_sync", ""])
@ranks(2)
def test_unfreezing_between_micro_batches_keeps_what_was_summed(within: str) -> None:
    twin = Twin(partial(frozen_at_first, Gated), mesh_of(1, zero=2))
    ours, theirs, unfreeze = make_optimizers(twin, "adamw", True)
    unfreeze(1)
    # After steps of one backward the next one is taken for the last: replicas exchange in it.
    train(twin, ours, theirs, 2, micro=2 if within else 1)
    if within:
        with getattr(twin.communicator, within)():
            twin.backward()
    else:
        twin.backward()
    unfreeze(0)
    twin.backward()
    twin.backward()
    for optimizer in (ours, theirs):
        optimizer.step()
        optimizer.zero_grad()
    train(twin, ours, theirs, 2, micro=2)
    twin.check_parameters("unfrozen in the middle", 1e-9)


@ranks(2)
def test_it_may_come_after_a_prefetch_within_unchanged_and_after_a_failed_forward() -> None:
    twin = Twin(partial(frozen_at_first, Gated), mesh_of(2))
    ours, theirs, unfreeze = make_optimizers(twin, "adamw", True)
    train(twin, ours, theirs, 1)
    unfreeze(0)
    twin.communicator.prefetch_all()
    train(twin, ours, theirs, 1)
    with twin.communicator.unchanged():
        with torch.no_grad():
            twin.ours(*twin.batch()[1])
        unfreeze(1)
        twin.backward()
    hook = twin.ours.layers[1].w1.register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[union-attr]
    raises(ZeroDivisionError, partial(twin.ours, *twin.batch()[1]))
    hook.remove()
    for optimizer in (ours, theirs):
        optimizer.zero_grad()
    train(twin, ours, theirs, 2)
    twin.check_parameters("afterwards", 1e-9)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["tied", "offloaded"])
@ranks(2)
def test_tied_and_offloaded_parameters_are_unfrozen_as_on_one_process(how: str) -> None:
    config = {"offload": ("weights", "optimizer", "gradients")} if how == "offloaded" else {}
    make = partial(frozen_at_first, partial(Gated, tied=how == "tied"))
    twin = Twin(make, mesh_of(2), **config)
    ours, theirs, unfreeze = make_optimizers(twin, "adamw", how == "tied")
    for stage in (1, 0):
        train(twin, ours, theirs, 2)
        unfreeze(stage)
    train(twin, ours, theirs, 2)
    twin.check_parameters(how, 1e-9)


@ranks(2)
def test_frozen_parameters_in_groups_take_no_memory_until_they_train() -> None:
    twin = Twin(partial(frozen_at_first, Gated), mesh_of(2), dtype=torch.bfloat16)
    ours, _, unfreeze = make_optimizers(twin, "adamw", True)
    alone = Twin(partial(frozen_at_first, Gated), mesh_of(2), dtype=torch.bfloat16)
    without = ZeroOptimizer(alone.communicator, torch.optim.AdamW, lr=1e-2)
    assert ours.memory() == without.memory()
    embedding = twin.ours.embed.weight
    assert ours.state[embedding] == {}
    unfreeze(1)
    twin.ours(*twin.batch()[1]).backward()
    ours.step()
    assert ours.state[embedding]["master"].dtype == torch.float32
    assert dict(ours.memory())["optimizer state"] > dict(without.memory())["optimizer state"]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("added", [True, False])
@ranks(2)
def test_with_a_loss_scaler_a_skipped_step_makes_no_state(added: bool) -> None:
    twin = Twin(partial(frozen_at_first, Gated), mesh_of(2))
    scaler = LossScaler(64.0, growth_interval=2)
    ours, theirs, unfreeze = make_optimizers(twin, "adamw", not added, loss_scaler=scaler)
    train(twin, ours, theirs, 1)
    unfreeze(0)
    mine = twin.batch()[1]
    ours.scale(twin.ours(*mine) * float("inf")).backward()
    ours.step()
    assert ours.skipped
    train(twin, ours, theirs, 2)
    twin.check_parameters("scaled", 1e-9)


@pytest.mark.slow(15)
@pytest.mark.parametrize("how", ["state_dict", "local", "torch", "full"])
@pytest.mark.parametrize("at_first", [True, False], ids=["in groups", "added"])
@ranks(2)
def test_a_save_between_two_stages_goes_on_on_another_mesh(
    how: str, at_first: bool, tmp_path: Path
) -> None:
    """What is saved when one stage trains and the other does not is loaded by a new process,
    which unfreezes what had been unfrozen."""
    twin = Twin(partial(frozen_at_first, Gated), mesh_of(2))
    ours, theirs, unfreeze = make_optimizers(twin, "adamw", at_first)
    unfreeze(0)
    train(twin, ours, theirs, 3)
    other = Twin(partial(frozen_at_first, Gated), mesh_of(1, zero=2))
    fresh, _, unfreeze_fresh = make_optimizers(other, "adamw", at_first)
    unfreeze_fresh(0)
    options = StateDictOptions(full_state_dict=how == "full")
    if how == "full":
        state = get_optimizer_state_dict(twin.ours, ours, options=options)
        values = {n: p.full_tensor() for n, p in twin.ours.named_parameters()}  # type: ignore[operator]
        other.ours.load_state_dict(values)
    else:

        def read(model: nn.Module, optimizer: Any) -> dict[str, Any]:
            state = {
                "state_dict": lambda: optimizer.state_dict(),
                "local": lambda: optimizer.local_state_dict(),
                "torch": lambda: get_optimizer_state_dict(model, optimizer),
            }
            return {"m": model.state_dict(), "o": state[how]()}

        dcp.save(read(twin.ours, ours), checkpoint_id=tmp_path)
        loaded = read(other.ours, fresh)
        dcp.load(loaded, checkpoint_id=tmp_path)
        other.ours.load_state_dict(loaded["m"])
        state = loaded["o"]
    if how in ("torch", "full"):
        set_optimizer_state_dict(other.ours, fresh, state, options=options)
    else:
        (fresh.load_state_dict if how == "state_dict" else fresh.load_local_state_dict)(state)
    for stage in (None, 1):
        if stage is not None:
            unfreeze(stage)
            for parameter in chosen(other.ours, STAGES[stage]):
                parameter.requires_grad_(True)
            if not at_first:
                fresh.add_param_group({"params": chosen(other.ours, STAGES[stage]), "lr": 2e-2})
        for _ in range(2):
            everybody, mine = twin.batch()
            for model, optimizer, given in (
                (twin.plain, theirs, everybody), (twin.ours, ours, mine),
                (other.ours, fresh, mine),
            ):  # fmt: skip
                model(*given).backward()
                optimizer.step()
                optimizer.zero_grad()
        twin.check_parameters(f"stage {stage}", 1e-9)
        check(parameters(other.ours), parameters(twin.plain), f"loaded, stage {stage}", 1e-9)


@ranks(2)
def test_state_of_what_is_frozen_here_is_loaded_or_refused_with_a_remedy_that_works(
    tmp_path: Path,
) -> None:
    twin = Twin(partial(frozen_at_first, Gated), mesh_of(2))
    ours, theirs, unfreeze = make_optimizers(twin, "adamw", True)
    unfreeze(0)
    train(twin, ours, theirs, 2)
    dcp.save({"o": ours.local_state_dict()}, checkpoint_id=tmp_path)

    def again() -> tuple[Twin, Any]:
        other = Twin(partial(frozen_at_first, Gated), mesh_of(2))
        return other, make_optimizers(other, "adamw", True)[0]

    wanted = ours.state[chosen(twin.ours, STAGES[0])[0]]
    other, fresh = again()
    fresh.load_state_dict(ours.state_dict())
    assert torch.equal(fresh.state[chosen(other.ours, STAGES[0])[0]]["exp_avg"], wanted["exp_avg"])

    other, fresh = again()
    state = {"o": fresh.local_state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    raises(
        LayoutError, partial(fresh.load_local_state_dict, state["o"]),
        "has trained", "layers.1.q.weight", "unfreeze them (requires_grad_(True)) before",
    )  # fmt: skip
    parts = chosen(other.ours, STAGES[0])
    for parameter in parts:
        parameter.requires_grad_(True)
    state = {"o": fresh.local_state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    fresh.load_local_state_dict(state["o"])
    for parameter in parts:
        parameter.requires_grad_(False)
    assert torch.equal(fresh.state[parts[0]]["exp_avg"], wanted["exp_avg"])


@ranks(2)
def test_groups_that_differ_between_ranks_are_refused_on_all_of_them(rank: int) -> None:
    twin = Twin(partial(frozen_at_first, Gated), mesh_of(2))
    ours, theirs, unfreeze = make_optimizers(twin, "adamw", False)
    ours._communicator.consensus._seconds = 2.0
    names = dict(twin.ours.named_parameters())

    def add(*params: str, **settings: Any) -> Callable[[], None]:
        return partial(ours.add_param_group, {"params": [names[p] for p in params], **settings})

    one, other = ("layers.0.q.weight", "layers.1.q.weight")[:: 1 if rank == 0 else -1]
    raises(CollectiveError, add(one), f"add_param_group() of {one}", f"of {other}")
    raises(CollectiveError, add("gate", lr=0.1 + rank), "'lr': 0.1", "'lr': 1.1")
    if rank == 0:  # the other one does not come
        raises(CollectiveError, add("gate"), "add_param_group() of gate", "ranks [1]")
    dist.barrier()
    wrong = add("norm.weight") if rank == 0 else add("gate")
    raises(
        ValueError if rank == 0 else CollectiveError, wrong,
        "norm.weight is in param_groups[0] and in the group to add",
    )  # fmt: skip
    raises(ValueError, add("gate", "gate"), "gate is in the group to add twice")
    raises(
        ValueError, lambda: ours.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
        "not this communicator's; take the parameters from the model after parallelize()",
    )  # fmt: skip
    assert len(ours.param_groups) == 1, "nothing was added"
    unfreeze(0)
    train(twin, ours, theirs, 2)
    twin.check_parameters("afterwards", 1e-9)


@ranks(2)
def test_what_is_unfrozen_without_a_group_is_refused_until_it_has_one() -> None:
    twin = Twin(partial(frozen_at_first, Gated), mesh_of(2))
    ours, theirs, _ = make_optimizers(twin, "adamw", False)
    for model in (twin.plain, twin.ours):
        for parameter in chosen(model, STAGES[0]):
            parameter.requires_grad_(True)
    mine = twin.batch()[1]
    raises(
        ValueError, partial(twin.ours, *mine), "trainable parameters in no group: ",
        "gate", "by add_param_group)", "requires_grad_(False)",
    )  # fmt: skip
    with torch.no_grad():
        twin.ours(*mine)
    for model, optimizer in ((twin.plain, theirs), (twin.ours, ours)):
        optimizer.add_param_group({"params": chosen(model, STAGES[0])})
    train(twin, ours, theirs, 2)
    twin.check_parameters("with a group", 1e-9)
