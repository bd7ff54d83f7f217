"""Averaged weights swapped through ``.data``, and state files of a model with an optimizer."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from tests.support.compare import close, local_part
from tests.support.models import ALL, Tiny, Twin
from tests.support.ranks import ranks

Saved = dict[str, Tensor]


def by_data(model: nn.Module) -> Saved:
    return {name: p.data for name, p in model.named_parameters()}


def by_detach(model: nn.Module) -> Saved:
    return {name: p.detach() for name, p in model.named_parameters()}


def by_state(model: nn.Module) -> Saved:
    return dict(model.state_dict())


def put(model: nn.Module, values: Saved) -> None:
    """Uses a copy: on one process ``p.data = x`` shares memory with ``x``, here it copies."""
    for name, p in model.named_parameters():
        p.data = values[name]
        p.data = p.data.clone()


def swap(twin: Twin, optimizers: list[Any], save: Callable[[nn.Module], Saved]) -> None:
    models = (twin.plain, twin.ours)
    average = [{name: p.data * 0.5 for name, p in model.named_parameters()} for model in models]
    for _ in range(2):
        twin.backward()
        kept, twice = [], []
        for model, optimizer, values in zip(models, optimizers, average, strict=True):
            optimizer.step()
            model.zero_grad()
            kept.append(save(model))  # while parameter all-gathers are still in flight
            twice.append(by_data(model))
            put(model, values)
        twin.check_parameters("the average")
        for model, values in zip(models, kept, strict=True):
            put(model, values)
        twin.check_parameters("back again")
        for name, p in twin.ours.named_parameters():
            wanted = twice[0][name]
            close(twice[1][name].to_local(), local_part(wanted, p), f"kept {name}")
            p.data = p.data  # its own values: nothing happens
        twin.check_parameters("itself")


def saved_file(twin: Twin) -> None:
    file = io.BytesIO()
    torch.save(twin.ours.state_dict(), file)
    file.seek(0)
    for (name, found), p in zip(
        torch.load(file, weights_only=False).items(), twin.plain.parameters(), strict=True
    ):
        assert type(found) is DTensor
        close(found.to_local(), local_part(p, found), f"{name} in the file")


@ranks(2)
def test_data_kept_before_it_was_replaced_has_the_old_values_and_files_have_their_own() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for save in (by_data, by_detach, by_state):
        for zero in (True, False):
            twin = Twin(Tiny, mesh, **({} if zero else ALL))  # type: ignore[arg-type]
            plain = torch.optim.AdamW(twin.plain.parameters(), lr=0.01)
            ours: Any = (
                # A plain list of parameters is one group, as in torch.
                ZeroOptimizer(
                    twin.communicator,
                    torch.optim.AdamW,
                    lr=0.01,
                    param_groups=twin.ours.parameters(),
                )
                if zero
                else torch.optim.AdamW(twin.ours.parameters(), lr=0.01)
            )
            swap(twin, [plain, ours], save)
            saved_file(twin)
