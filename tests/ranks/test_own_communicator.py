"""The communicator of ``examples/own_communicator.py``, compared with one process (4.2)."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from examples.own_communicator import Synchronous
from internsp import ParallelMesh, WeightParallelConfig, WPCommunicator, ZeroOptimizer, parallelize
from internsp.config import ActivationCheckpointConfig
from internsp.errors import ConfigError
from internsp.wp.users import UsersCommunicator
from tests.support.compare import check, close, gradients, parameters
from tests.support.models import CUT, VOCABULARY, Tiny
from tests.support.ranks import RankError, run_ranks

FULL = ActivationCheckpointConfig(mode="full")
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)


class Counting(WPCommunicator):
    """Delegates to another communicator, and counts calls of each method."""

    def __init__(self, inner: WPCommunicator) -> None:
        self.inner, self.calls = inner, dict.fromkeys(METHODS, 0)

    def _count(self, method: str, *args: Any) -> Any:
        self.calls[method] += 1
        return getattr(self.inner, method)(*args)

    def unshard(self, weight: Any) -> Any:
        return self._count("unshard", weight)

    def release(self, weight: Any) -> Any:
        return self._count("release", weight)

    def pre_backward(self, weight: Any) -> Any:
        return self._count("pre_backward", weight)

    def on_grad_ready(self, weight: Any, gradient: Any) -> Any:
        return self._count("on_grad_ready", weight, gradient)


METHODS = ("unshard", "release", "pre_backward", "on_grad_ready")


def train(
    rank: int,
    world: int,
    weight: int,
    zero: bool,
    checkpoint: ActivationCheckpointConfig | None,
    options: dict[str, Any],
) -> dict[str, int]:
    """Four steps of two micro-batches compared with one process, every gradient and parameter."""
    torch.manual_seed(0)
    tied = bool(options.get("tied"))
    plain = Tiny(tied=tied).double()
    ours = copy.deepcopy(plain)
    if options.get("frozen"):
        for model in (plain, ours):
            model.layers[0].wo.weight.requires_grad_(False)  # type: ignore[union-attr]
    mesh = ParallelMesh.create(weight=weight, sequence=1, device_type="cpu")
    own = Counting(Synchronous())
    if options.get("broken"):
        own.inner.on_grad_ready = lambda weight, gradient: None  # type: ignore[method-assign]
    config = WeightParallelConfig(
        min_shard_elements=CUT, coalesce_bytes=options.get("coalesce_bytes", 0)
    )
    communicator = parallelize(
        ours, mesh, config, activation_checkpoint=checkpoint, communicator=own
    )
    assert communicator.state.pool.slot_nbytes == 0
    single = torch.optim.AdamW(plain.parameters(), lr=0.02)
    step: Any = partial(torch.optim.AdamW, lr=0.02)
    optimizer: Any = ZeroOptimizer(communicator, step) if zero else step(ours.parameters())
    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        for _ in range(2):
            ids = torch.randint(0, VOCABULARY, (world, 3, 5), generator=generator)
            plain(ids.flatten(0, 1), ids.flatten(0, 1)).backward()
            ours(ids[rank], ids[rank]).backward()
        if not zero:
            check(gradients(ours), gradients(plain), f"gradients of step {number}")
        single.step()
        optimizer.step()
        single.zero_grad()
        optimizer.zero_grad()
        communicator.wait_until_ready()
        check(parameters(ours), parameters(plain), f"parameters after step {number}")
    with torch.no_grad():
        ids = torch.randint(0, VOCABULARY, (2, 4), generator=generator)
        close(ours(ids), plain(ids), "logits of an evaluation")
    return own.calls


@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
@pytest.mark.parametrize(
    "checkpoint", [None, FULL, REENTRANT], ids=["kept", "recomputed", "reentrant"]
)
def test_the_communicator_of_the_document_trains_as_one_process(
    zero: bool, checkpoint: ActivationCheckpointConfig | None
) -> None:
    for calls in run_ranks(train, 2, 2, zero, checkpoint, {}):
        assert all(calls[method] > 0 for method in METHODS), calls


@pytest.mark.thorough(4)
@pytest.mark.parametrize(
    "options",
    [{"tied": True}, {"frozen": True}, {"coalesce_bytes": 65536}],
    ids=["tied", "frozen", "small"],
)
def test_tied_frozen_and_small_weights_are_right_with_it(options: dict[str, Any]) -> None:
    run_ranks(train, 2, 2, True, None, options)


@pytest.mark.thorough(3)
def test_replicas_are_summed_with_it() -> None:
    run_ranks(train, 4, 2, True, None, {})


def test_it_unshards_in_the_dtype_of_the_autocast_around_the_use() -> None:
    weight: Any = SimpleNamespace(
        autocasts=True, device=torch.device("cpu"), base_compute_dtype=torch.float32,
        compute_dtype=torch.float32, current_version=lambda: 7,
    )  # fmt: skip
    weight.compute_in = partial(setattr, weight, "compute_dtype")
    own: Any = SimpleNamespace(unshard=lambda weight: (weight.compute_dtype, weight.used_version))
    wrapped = UsersCommunicator(None, None, own)  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        assert wrapped.unshard(weight) == (torch.bfloat16, 7)
    assert wrapped.unshard(weight) == (torch.float32, 7)


def test_one_that_reduces_nothing_is_seen() -> None:
    with pytest.raises(RankError, match=r"embed\.weight: only one process has it"):
        run_ranks(train, 2, 2, False, None, {"broken": True})


def frozen_since_the_forward(rank: int, world: int, zero: bool) -> None:
    torch.manual_seed(0)
    plain = Tiny().double()
    ours = copy.deepcopy(plain)
    mesh = ParallelMesh.create(weight=world, sequence=1, device_type="cpu")
    config = WeightParallelConfig(min_shard_elements=CUT, coalesce_bytes=0)
    communicator = parallelize(ours, mesh, config, communicator=Synchronous())
    optimizer = ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1) if zero else None
    ids = torch.randint(0, VOCABULARY, (world, 3, 5), generator=torch.Generator().manual_seed(1))
    for model, batch in (plain, ids.flatten(0, 1)), (ours, ids[rank]):
        loss = model(batch, batch)
        model.layers[1].w1.weight.requires_grad_(False)  # type: ignore[union-attr]
        loss.backward()
    found = gradients(ours) if optimizer is None else optimizer.gather_gradients()
    wanted = {n: g for n, g in gradients(plain).items() if not zero or g is not None}
    assert gradients(plain)["layers.1.w1.weight"] is None
    check(found, wanted, "frozen between the forward and its backward")


@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
def test_a_weight_frozen_since_the_forward_has_no_gradient_with_it(zero: bool) -> None:
    run_ranks(frozen_since_the_forward, 2, zero)


class Bare(nn.Module):
    """Not a communicator."""


def refused(rank: int, world: int) -> None:
    mesh = ParallelMesh.create(weight=2, sequence=1, device_type="cpu")
    with pytest.raises(TypeError, match=r"communicator is a Bare: give a WPCommunicator"):
        parallelize(Tiny(), mesh, communicator=Bare())  # type: ignore[arg-type]
    rounded = WeightParallelConfig(min_shard_elements=20, quantize="int8", coalesce_bytes=0)
    with pytest.raises(ConfigError, match="decides what travels; quantize nothing"):
        parallelize(Tiny(), mesh, rounded, communicator=Counting(Synchronous()))


def test_what_is_no_communicator_is_refused_by_name() -> None:
    run_ranks(refused, 2)
