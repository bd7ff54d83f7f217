"""Activations in host memory: values do not change, with late and reordered copies."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.base.host import HostLink, HostPool, Pairs
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import ConfigError, OrderError
from internsp.mesh import ParallelMesh
from internsp.modules.offload import ActivationOffload
from internsp.modules.recompute import checkpoint_block
from internsp.parallel import build
from internsp.parallel.parallelize import parallelize
from internsp.sp import checkpoint_context_fn
from tests.support.compare import TOLERANCE
from tests.support.few import some
from tests.support.late_copies import HastyLink, LateLink, install
from tests.support.models import Tiny, Twin, raises
from tests.support.parity import Case, run_case
from tests.support.pipeline import Case as PipelineCase
from tests.support.pipeline import batches, compare, make
from tests.support.ranks import ranks, run_ranks

CPU = torch.device("cpu")
FULL = {"mode": "full", "offload": "all"}
SELECTIVE = {"mode": "selective", "offload": "all"}
CASES = {
    "full": Case(2, 1, checkpoint=FULL),
    "full, sequence, tiles": Case(2, 2, 35, packed=True, checkpoint={**FULL, "tiles": 2}),
    "reentrant": Case(1, 2, checkpoint={**FULL, "reentrant": True}),
    "selective": Case(1, 1, micro_batches=2, checkpoint=SELECTIVE),
    "selective, sequence": Case(2, 2, 13, model={"kv_heads": 1}, checkpoint=SELECTIVE),
    "every block, some of them": Case(
        2, 2, checkpoint={"mode": "selective", "offload": 4, "blocks": (0, 1, 3)}
    ),
    "as many as fit": Case(1, 2, checkpoint={"mode": "full", "offload": "1100 B"}),
}


@pytest.mark.parametrize("name", some(CASES, 4))
@ranks(2)
def test_loss_every_gradient_and_a_step_equal_one_process(name: str) -> None:
    install(LateLink)
    loss, gradient = run_case(CASES[name])
    assert loss <= TOLERANCE
    assert gradient <= TOLERANCE


@pytest.mark.thorough(2)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@ranks(2)
def test_pipelines_with_several_forwards_in_flight_are_exact(schedule: str) -> None:
    install(LateLink)
    chunks = 2 if schedule == "ZBVZeroBubble" else 1
    mode = "selective" if chunks == 1 else "full"
    checkpoint = {"mode": mode, "offload": "all"}
    case = PipelineCase(schedule, chunks=chunks, layers=7, checkpoint=checkpoint)
    pipeline, plain = make(case)
    losses = pipeline.step(batches(case, pipeline.mesh))
    found = compare(case, pipeline, plain, losses)
    assert max(found.loss, found.gradient) <= TOLERANCE


def hasty(rank: int, world: int) -> float:
    install(HastyLink)
    return max(run_case(CASES["full"]))


@pytest.mark.thorough(1)
def test_memory_that_is_used_again_before_its_copy_ended_would_be_seen() -> None:
    assert all(not found <= TOLERANCE for found in run_ranks(hasty, 2))


class Counted(HostLink):
    """Records each group that is copied back, and how many offloaded bytes are on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.log: list[str] = []
        self.here = 0

    def copy_to_host(self, pairs: Pairs, then: Any = None) -> None:
        for _, source in pairs:
            self.here += source.nbytes
            weakref.finalize(source.untyped_storage(), self.gone, source.nbytes)
        self.log.append("out")
        super().copy_to_host(pairs, then)

    def gone(self, nbytes: int) -> None:
        self.here -= nbytes

    def copy_to_device(self, pairs: Pairs) -> Any:
        self.log.append(f"in {len(pairs)}")
        return super().copy_to_device(pairs)


class Step(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.inner, self.log = nn.Linear(8, 8), log

    def forward(self, x: Tensor, *, more: Tensor | None = None) -> Tensor:
        self.log.append("block")
        y = torch.tanh(self.inner(x))
        return y if more is None else y * more


def blocks(offload: Any, count: int = 4) -> tuple[list[Step], ActivationOffload, Counted]:
    link = Counted(CPU)
    made = ActivationOffload(link, offload, count)
    found = [Step(link.log) for _ in range(count)]
    for number, block in enumerate(found):
        checkpoint_block(block, group=lambda number=number: made.group(number))
    return found, made, link


def forward(steps: list[Step]) -> Tensor:
    x = torch.ones(2, 5, 8, requires_grad=True) * 1.0
    for step in steps:
        x = step(x)
    return x.sum()


def test_groups_leave_as_they_are_made_and_come_back_one_block_ahead() -> None:
    steps, made, link = blocks("all")
    loss = forward(steps)
    one = 2 * 5 * 8 * 4
    assert link.log == ["out", "block"] * 3 + ["block"]
    assert made.pool.used == made.pool.peak == link.allocated["activations"] == 3 * one
    loss.backward()
    # Block 3 stays on the device; its backward starts the copy of group 2, and so on.
    assert link.log[7:] == [
        "in 1", "block", "in 1", "block", "in 1", "block", "block",
    ]  # fmt: skip
    del loss
    assert (made.pool.used, made.pool.nbytes) == (0, 3 * one)
    forward(steps).backward()
    assert made.pool.nbytes == link.allocated["activations"] == 3 * one, "the same memory again"


@pytest.mark.thorough(1)
def test_what_has_left_is_freed_here() -> None:
    for held in (False, True):
        steps, _, link = blocks("all")
        inputs: list[Any] = []
        for step in steps if held else ():
            step.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args))
        loss = forward(steps)
        gc.collect()
        assert link.here == (3 * 320 if held else 0)
        loss.backward()


@pytest.mark.parametrize(("offload", "left"), [(None, 0), (0, 0), (2, 2), (9, 4), ("700 B", 2)])
def test_as_many_blocks_leave_as_are_asked_for_or_fit(offload: Any, left: int) -> None:
    steps, made, link = blocks(offload)
    loss = forward(steps)
    assert link.log.count("out") == left
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert made.pool.used == left * 320, "a graph that is kept"
    assert all(step.inner.weight.grad is not None for step in steps)


def test_graphs_that_are_kept_dropped_or_given_keywords_have_the_same_gradients() -> None:
    torch.manual_seed(0)
    steps, made, _ = blocks("all")
    plain = [Step([]) for _ in steps]
    for step, other in zip(steps, plain, strict=True):
        other.load_state_dict(step.state_dict())
    x = torch.randn(2, 5, 8, requires_grad=True)

    def run(some: list[Step]) -> Tensor:
        y = x * 1.0
        for step in some:
            y = step(y, more=y.sin())
        return y.square().sum()

    wanted = torch.autograd.grad(run(plain), x)[0]
    loss = run(steps)
    assert made.pool.used == 6 * 320, "two inputs of three blocks"
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss, x, retain_graph=True)[0], wanted)
    run(steps)  # dropped without a backward
    del loss
    assert made.pool.used == 0
    with torch.no_grad():
        run(steps)
    assert made.pool.used == 0


def test_a_graph_that_ends_while_its_copies_come_waits_for_them() -> None:
    link = LateLink(CPU)
    made = ActivationOffload(link, 1, 2)
    first, second = made.group(0), made.group(1)
    there, stays = first.save(torch.ones(4)), second.save(torch.ones(4))
    assert stays.unpack() is not None  # starts the copy of the first group
    coming = there.copies[0]
    assert not coming.over  # type: ignore[attr-defined]
    del there
    assert coming.over, "memory was freed into which a copy was still to write"  # type: ignore[attr-defined]


def test_shapes_and_strides_are_kept() -> None:
    made = ActivationOffload(HostLink(CPU), 1, 1)
    x = torch.randn(6, 5, 4)
    for tensor in (x.transpose(0, 2), x[1:3, 2:], x[:, :, 1], x[:0], x.expand(2, 6, 5, 4)):
        got = made.group(0).save(tensor).unpack()
        assert torch.equal(got, tensor)
        assert got.stride() == tensor.stride()


def test_a_pool_never_has_more_than_was_in_use() -> None:
    pool = HostPool(HostLink(CPU), "activations", limit=100)
    pieces = [pool.acquire(40), pool.acquire(40)]
    assert pool.acquire(40) is None
    for piece in pieces:
        pool.release(piece)  # type: ignore[arg-type]
    assert pool.nbytes == 80
    assert pool.acquire(40) is pieces[1]
    large = pool.acquire(60)
    assert (pool.used, pool.nbytes) == (100, 100)
    pool.release(large)  # type: ignore[arg-type]


class Attends(nn.Module):
    def __init__(self, write: bool) -> None:
        super().__init__()
        self.qkv, self.write = nn.Linear(8, 24), write

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (2, 12)).transpose(1, 2).split(4, 3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.write:
            with torch.no_grad():
                y.mul_(2.0)
        return y.transpose(1, 2).flatten(2)


def test_selective_checkpointing_offloads_attentions_output_and_log_sum_exp() -> None:
    link = Counted(CPU)
    made = ActivationOffload(link, 1, 1)
    block, writes = Attends(False), Attends(True)
    for each in (block, writes):
        checkpoint_block(each, context_fn=checkpoint_context_fn, group=lambda: made.group(0))
    x = torch.randn(2, 5, 8, requires_grad=True) * 1.0
    y = block(x)
    assert made.pool.used == (2 * 5 * 8 + 2 * 5 * 8 + 2 * 5 * 2) * 4  # input, output, lse
    y.sum().backward()
    assert link.log == ["out"] * 3 + ["in 3"]
    raises(OrderError, lambda: writes(x), "written to in place")


@ranks(1)
def test_without_recompute_there_is_nothing_to_offload() -> None:
    mesh = ParallelMesh.create(device_type="cpu", timeout_seconds=20)
    config = ActivationCheckpointConfig(offload="all")
    raises(
        ConfigError,
        lambda: parallelize(Tiny(), mesh, WeightParallelConfig(), activation_checkpoint=config),
        "no block recomputes", "full",
    )  # fmt: skip
    assert build.HostLink is HostLink
    twin = Twin(Tiny, mesh, ActivationCheckpointConfig(mode="full", offload=0))
    assert twin.communicator.state.activations is None
