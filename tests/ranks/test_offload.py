"""Weights, optimizer state and gradient sums in host memory: values do not change (H12, L11).

Copies are delayed (``tests/support/late_copies.py``): memory that is reused before its copy has
ended, or read too early, gives other values.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import internsp
from internsp.base import host
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import ConfigError, StaleWeightError
from internsp.mesh import ParallelMesh
from internsp.optim import streamed
from tests.support.experts import Case as Experts
from tests.support.experts import Pair
from tests.support.few import few
from tests.support.late_copies import HastyLink, LateLink, install
from tests.support.models import ALL, Block, Tiny, Twin, raises
from tests.support.pipeline import Case as PipelineCase
from tests.support.pipeline import batches, compare, make
from tests.support.ranks import ranks, run_ranks
from tests.support.zero import Case, batch, setup, share, train, whole

FULL = ActivationCheckpointConfig(mode="full")
EVERYTHING = ("weights", "optimizer", "gradients")
PART = [{"match": ("layers.{1-2}", "head"), "offload": ("weights", "gradients")}]


class Frozen(Tiny):
    def __init__(self, tied: bool = False) -> None:
        super().__init__(tied=tied)
        self.layers[1].w1.weight.requires_grad_(False)  # type: ignore[union-attr]


PLAIN: tuple[tuple[int, Any, dict[str, Any], Any], ...] = (
    (1, Tiny, {"offload": ("weights",)}, FULL),
    (1, partial(Frozen, True), {"offload": ("weights", "gradients"), "memory_pool": False}, None),
    (1, Tiny, {"offload": ("gradients",), "accumulation": "full"}, None),
    (2, partial(Frozen, True), {"offload": ("weights",), "gather_before": "rolling"}, None),
    (2, Tiny, {"offload": ("weights", "gradients"), "keep_unsharded": 2, **ALL}, FULL),
    (2, Tiny, {"offload": ("gradients",), "overlap": False}, None),
    (2, partial(Frozen, True), {"rules": PART, "granularity": "module"}, None),
)


@pytest.mark.unmeasured
@few("cases", PLAIN, 4)
@ranks(2)
def test_a_plain_loop_accumulates_clips_and_steps_as_one_process(cases: list[Any]) -> None:
    install(LateLink)
    for weight, make_model, config, checkpoint in cases:
        mesh = ParallelMesh.create(weight=weight, device_type="cpu", timeout_seconds=20)
        twin = Twin(make_model, mesh, checkpoint, **config)
        models = twin.plain, twin.ours
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
        link = twin.communicator.state.link
        assert link is not None
        for step in range(3):
            what = f"weight {weight} {config} step {step}"
            with twin.communicator.no_sync():
                twin.backward()
            with twin.communicator.no_replica_sync():
                twin.backward()
            if "gradients" in config.get("offload", ()):
                assert link.allocated["gradients"], (
                    f"{what}: sums lie on the host between backwards"
                )
            twin.backward()
            twin.check_gradients(what)
            wanted = torch.nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.5)
            found = internsp.clip_grad_norm_(twin.ours.parameters(), 0.5)
            assert abs(found / wanted - 1) < 1e-10, what
            twin.check_step(optimizers, what)
        if "weights" in config.get("offload", ()):
            sharded = twin.communicator.replicated.sharded
            assert all(w.needs_gather and w.hosted for w in sharded)
            assert link.allocated["weights"] == sum(w.storage.nbytes for w in sharded)


ZERO: tuple[dict[str, Any], ...] = (
    {"weight": 2, "micro_batches": 2},
    {"weight": 1, "optimizer": "sgd", "micro_batches": 2, "tied": True},
    {"weight": 1, "zero": 1, "optimizer": "rmsprop"},
    {"weight": 2, "dtype": torch.bfloat16, "micro_batches": 3, "config": {"accumulation": "full"}},
    {"weight": 1, "dtype": torch.bfloat16, "config": {"compute_dtype": "float32"}},
)
Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]


def trained(rank: int, world: int, case: dict[str, Any], offload: Any) -> Outcome:
    options = {**case.get("config", {}), "offload": offload}
    made = Case(**{"steps": 3, "max_grad_norm": None, **case, "config": options})
    s = setup(made)
    return train(s, made, rank, world), whole(s.model)


def same(one: Outcome, other: Outcome) -> bool:
    losses = [loss for loss, _ in one[0]] == [loss for loss, _ in other[0]]
    return losses and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def small_pieces() -> None:
    """Small pieces, so that even a tiny model's state is copied to the device in several."""
    host.PIECE_BYTES = streamed.PIECE_BYTES = 64


@pytest.mark.thorough(4)
@pytest.mark.unmeasured
@few("cases", ZERO, 2)
@ranks(2)
def test_a_zero_optimizer_steps_to_the_same_bits_whatever_is_offloaded(
    rank: int, cases: list[dict[str, Any]]
) -> None:
    small_pieces()
    install(LateLink)
    for case in cases:
        wanted = trained(rank, 2, case, ())
        for offload in (("weights",), ("optimizer",), ("gradients",), EVERYTHING):
            found = trained(rank, 2, case, offload)
            assert same(found, wanted), f"{case} {offload}"
            for (_, norm), (_, other) in zip(found[0], wanted[0], strict=True):
                assert norm == pytest.approx(other, rel=1e-12), f"{case} {offload}: norm"


@ranks(2)
def test_a_verdict_on_the_device_steps_what_lies_on_the_host_to_the_same_bits(rank: int) -> None:
    """Also where the program leaves all alone, so that the host waits for no copy, and nothing that
    it wrote is looked for. Two of five steps are skipped."""
    small_pieces()
    install(LateLink)
    for name, more in (("adamw", {}), ("sgd", {"momentum": 0.0})):
        ends: list[Any] = []
        others = (EVERYTHING, False), (EVERYTHING, True), (("weights",), True), ((), True)
        for offload, alone in (((), False), *others):
            s = setup(
                Case(
                    zero=2, optimizer=name, dtype=torch.bfloat16, max_grad_norm=0.5,
                    options={"fused": True, **more}, config={"offload": offload},
                )
            )  # fmt: skip
            s.communicator.events.contents.left_alone = alone
            told = []
            for step in range(5):
                ids, labels = (share(part, rank) for part in batch(step, 2))
                (s.model(ids, labels) * (torch.inf if step in (0, 3) and rank else 1)).backward()
                s.optimizer.step()
                assert (s.optimizer.unread is None) == (step < 2), "a first step is read in itself"
                if step == 1:
                    told.append(s.optimizer.skipped_steps)
            told += [s.optimizer.skipped_steps, s.optimizer.grad_norm]
            s.communicator.events.contents.left_alone = False
            s.communicator.events.contents.hand_over(state=True)
            ends.append((told, whole(s.model)))
        for told, values in ends[1:]:
            assert told == pytest.approx([1, 2, ends[0][0][2]], rel=1e-12)
            assert all(torch.equal(values[each], ends[0][1][each]) for each in values), name


@pytest.mark.unmeasured
@ranks(4)
def test_slices_of_replicas_experts_and_pipelines_are_exact(rank: int) -> None:
    small_pieces()
    install(LateLink)
    for case in ({"weight": 1, "zero": 2, "micro_batches": 2}, {"weight": 2}):
        assert same(trained(rank, 4, case, EVERYTHING), trained(rank, 4, case, ())), case
    pair = Pair(Experts(2, 2, 2, config={"offload": ("weights", "gradients")}))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.plain, pair.ours)]
    for step in range(2):
        pair.backward(step)
        assert pair.furthest_gradient() < 1e-10
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {"offload": ("weights", "gradients")}
    for schedule in ("1F1B", "InterleavedZeroBubble"):
        chunks = 1 if schedule == "1F1B" else 2
        case = PipelineCase(schedule, chunks=chunks, weight=2, weights=weights)
        pipeline, plain = make(case)
        losses = pipeline.step(batches(case, pipeline.mesh))
        found = compare(case, pipeline, plain, losses)
        assert found.loss < 1e-10, schedule
        assert found.gradient < 1e-10, schedule


def hasty(rank: int, world: int) -> bool:
    small_pieces()
    case = {"weight": 2, "micro_batches": 3, "config": {"accumulation": "full"}}
    wanted = trained(rank, world, case, ())
    install(HastyLink)
    return same(trained(rank, world, case, EVERYTHING), wanted)


def test_memory_that_is_given_back_before_its_copy_ended_would_be_seen() -> None:
    assert run_ranks(hasty, 2) == [False, False]


@ranks(2)
def test_quantized_gathers_carry_the_same_bits() -> None:
    install(LateLink)
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    found = []
    for offload in ((), ("weights",)):
        twin = Twin(
            partial(Tiny, partial(Block, 22), layers=3, width=22), mesh, quantize="int8",
            offload=offload,
        )  # fmt: skip
        optimizer = torch.optim.SGD(twin.ours.parameters(), lr=0.01)
        for _ in range(2):
            twin.ours(*twin.batch()[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.full_tensor() for p in twin.ours.parameters()])  # type: ignore[operator]
    assert twin.communicator.state.encoder is not None
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.unmeasured
@ranks(2)
def test_a_checkpoint_goes_on_with_or_without_offload(rank: int, tmp_path: Path) -> None:
    small_pieces()
    install(LateLink)
    ends = []
    for index, (first, then) in enumerate((((), ()), ((), EVERYTHING), (EVERYTHING, ()))):
        for form in ("slices", "whole"):
            made = [
                setup(Case(weight=1, dtype=torch.bfloat16, steps=2, config={"offload": offload}))
                for offload in (first, then)
            ]
            train(made[0], Case(steps=2), rank, 2)
            if form == "whole":
                made[1].model.load_state_dict(made[0].model.state_dict())
                made[1].optimizer.load_state_dict(made[0].optimizer.state_dict())
            else:
                folder = str(tmp_path / f"{index}")
                for s, act in zip(made, (dcp.save, dcp.load), strict=True):
                    state = {"model": s.model.state_dict()}
                    state["optimizer"] = s.optimizer.local_state_dict()
                    act(state, checkpoint_id=folder)
                made[1].optimizer.load_local_state_dict(state["optimizer"])
            ends.append((train(made[1], Case(steps=2), rank, 2, start=2), whole(made[1].model)))
    assert all(same(end, ends[0]) for end in ends[1:])


@ranks(2)
def test_whole_parameters_gradients_and_writes_reach_host_memory(rank: int) -> None:
    install(LateLink)
    ends = []
    for offload in ((), EVERYTHING):
        s = setup(Case(weight=2, dtype=torch.bfloat16, config={"offload": offload}))
        ids, labels = (share(part, rank) for part in batch(0, 2))
        s.model(ids, labels).backward()
        with internsp.full_params(s.model, write="shards", with_grads=True), torch.no_grad():
            for parameter in s.model.parameters():
                parameter.mul_(0.5)
                if parameter.grad is not None:
                    parameter.grad.mul_(2.0)
        s.optimizer.step()
        with torch.no_grad():
            s.model.layers[0].w1.weight.data = s.model.layers[0].w1.weight.full_tensor() * 3  # type: ignore[union-attr, operator]
        s.model(ids, labels).backward()
        s.model.head.weight.grad = None
        s.optimizer.step()
        ends.append(([(0.0, 0.0)], whole(s.model)))
        with s.communicator.unchanged():
            s.model(ids, labels)
            with torch.no_grad():
                s.model.head.weight.mul_(2.0)
            raises(StaleWeightError, lambda: s.model(ids, labels), "head.weight was written")  # noqa: B023
    assert same(*ends)


@ranks(2)
def test_an_evaluation_before_training_and_a_step_that_raises_leave_nothing_behind(
    rank: int,
) -> None:
    install(LateLink)
    ends = []
    for offload in ((), EVERYTHING):
        config = {"offload": offload, "compute_dtype": "float32"}
        s = setup(Case(weight=2, dtype=torch.bfloat16, config=config))
        ids, labels = (share(part, rank) for part in batch(0, 2))
        with torch.inference_mode():
            s.model(ids, labels)
        s.model(ids, labels).backward()
        s.optimizer.step()
        ends.append(([(0.0, 0.0)], whole(s.model)))
        s.model(ids, labels).backward()
        s.optimizer.param_groups[0]["eps"] = "none"
        with pytest.raises(TypeError):
            s.optimizer.step()
        for bucket in s.optimizer._buckets:
            home = bucket.master.untyped_storage().data_ptr()
            for segment in bucket.segments:
                assert segment.tensor.untyped_storage().data_ptr() == home, segment.key
    assert same(*ends)


@ranks(2)
def test_what_cannot_be_offloaded_is_refused_by_name() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Twin(Tiny, mesh, offload=("optimizer",))
    words = 'offload = "optimizer" of embed.weight', "ZeroOptimizer"
    raises(ConfigError, lambda: twin.ours(*twin.batch()[1]).backward(), *words)

    class Own(internsp.WPCommunicator):
        unshard = release = pre_backward = on_grad_ready = None  # type: ignore[assignment]

    Own.__abstractmethods__ = frozenset()
    config = WeightParallelConfig(min_shard_elements=20, offload=("weights",))
    call = partial(internsp.parallelize, Tiny().double(), mesh, config, communicator=Own())
    raises(ConfigError, call, "embed.weight", "communicator of your own")
