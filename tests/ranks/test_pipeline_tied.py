"""Weights that several stages share, such as a tied head: gradients, norms and steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from internsp.config import WeightParallelConfig
from internsp.errors import OrderError, StructureError
from internsp.layers import ParallelLinearWithCommExt
from internsp.optim import ZeroOptimizer, clip_grad_norm_, step_together
from internsp.parallel.parallelize import parallelize
from internsp.pipeline import (
    ComputeAction,
    ISPPipelineStage,
    MicroBatch,
    Pipeline,
    SchedulerHook,
    schedule_kind,
)
from internsp.values.load import load_weights
from internsp.values.whole import full_params, iterate_full_params
from tests.support.compare import check, gradients, on_all_stages, parameters
from tests.support.few import some
from tests.support.meshes import mesh_of
from tests.support.parity import VOCABULARY
from tests.support.pipeline import Case, batches, make, plain_loss
from tests.support.ranks import ranks

SCHEDULES = {
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}  # fmt: skip


def tied(schedule: str = "1F1B", **changes: Any) -> Case:
    model = {"tie_embeddings": True, **changes.pop("model", {})}
    return Case(schedule, chunks=SCHEDULES[schedule], model=model, **changes)


def same(pipeline: Pipeline, found: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    """All names of this rank's chunks, copies by the name of their weight. Collective."""
    copies = {
        place.name: wanted[weight.name]
        for weight in pipeline.tied.weights
        for place in weight.copies
    }
    check(found, on_all_stages(found, {**wanted, **copies}), what)


def trains(case: Case, steps: int = 3, alter: Any = lambda model: None) -> list[str]:
    """A plain loop, with a norm and momentum; copies stay equal to the bit.

    Returns:
        The tied weights.
    """
    pipeline, plain = make(case, alter=alter)
    everything = [p for chunk in pipeline.chunks for p in chunk.parameters()]
    ours = torch.optim.SGD(everything, lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        pipeline.step(batches(case, pipeline.mesh))
        plain_loss(case, plain, pipeline.mesh.data).backward()
        same(pipeline, gradients(*pipeline.chunks), gradients(plain), f"gradients of step {step}")
        found = clip_grad_norm_(everything, 0.5, pipeline.mesh.pipeline_group)
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert wanted > 0.5, "nothing is clipped"
        assert found.item() == pytest.approx(float(wanted), rel=1e-12)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        same(pipeline, parameters(*pipeline.chunks), parameters(plain), f"after step {step}")
    return [str(weight) for weight in pipeline.tied.weights]


@pytest.mark.parametrize("schedule", SCHEDULES)
@ranks(2)
def test_gradients_norm_and_steps_are_one_processs_under_every_schedule(schedule: str) -> None:
    trains(tied(schedule))


@pytest.mark.parametrize(
    "case",
    [
        tied(weight=2, weights={"accumulation": "full"}),
        tied(weight=2, weights={"rules": [{"match": ["embed", "head"], "shard_dim": 1}]}),
        pytest.param(
            tied("ZBVZeroBubble", sequence=2, weights={"offload": ["weights", "gradients"]}),
            marks=pytest.mark.thorough(5),
        ),
        pytest.param(
            tied("InterleavedZeroBubble", weights={"min_shard_elements": 10_000}),
            marks=pytest.mark.thorough(4),
        ),
        tied(pipeline=4, checkpoint={"mode": "full"}, static=False),
    ],
    ids=["weight", "of columns", "sequence, offloaded", "replicas, not cut", "four stages"],
)
@ranks(4)
def test_a_tied_weight_of_any_mesh_is_one_weight(case: Case) -> None:
    trains(case)


def optimizers(pipeline: Pipeline, **options: Any) -> list[ZeroOptimizer]:
    return [
        ZeroOptimizer(c, torch.optim.AdamW, lr=0.02, eps=1e-3, max_grad_norm=0.5, **options)
        for c in pipeline.communicators
    ]


@pytest.mark.parametrize(
    "case",
    [
        tied(weight=2),
        pytest.param(tied("ZBVZeroBubble"), marks=pytest.mark.thorough(6)),
        tied("Interleaved1F1B", weights={"offload": ["weights", "optimizer", "gradients"]}),
        pytest.param(
            tied("InterleavedZeroBubble", weights={"min_shard_elements": 10_000}),
            marks=pytest.mark.thorough(5),
        ),
    ],
    ids=["weight", "V, replicas", "replicas, offloaded", "replicas, not cut"],
)
@ranks(4)
def test_a_zero_optimizer_steps_and_clips_as_one_process(case: Case) -> None:
    """Two steps of the pipeline per optimizer step; gradients are complete after each."""
    pipeline, plain = make(case)
    ours = optimizers(pipeline)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.02, eps=1e-3)
    for step in range(3):
        for _ in range(2):
            pipeline.step(batches(case, pipeline.mesh))
            plain_loss(case, plain, pipeline.mesh.data).backward()
            if step == 1:
                found = {n: g for o in ours for n, g in o.gather_gradients().items()}
                same(pipeline, found, gradients(plain), "gradients")
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert wanted > 0.5, "nothing is clipped"
        step_together(ours)
        assert ours[0].grad_norm == pytest.approx(float(wanted), rel=1e-10)
        theirs.step()
        theirs.zero_grad()
        same(pipeline, parameters(*pipeline.chunks), parameters(plain), f"after step {step}")


class Scaled(nn.Module):
    """A scaled embedding, with a bias that the model's head has too."""

    def __init__(self, inner: nn.Embedding, bias: nn.Parameter) -> None:
        super().__init__()
        self.inner, self.bias = inner, bias

    def forward(self, ids: Tensor) -> Tensor:
        h: Tensor = self.inner(ids)
        return 3.5 * h + self.bias[ids].unsqueeze(-1)


class Looked(nn.Module):
    """A block that uses the embedding's weight: a third stage with a copy."""

    def __init__(self, block: nn.Module, weight: nn.Parameter) -> None:
        super().__init__()
        self.block = block
        self.table = ParallelLinearWithCommExt(12, len(weight), False, dtype=torch.float64)
        self.table.weight = weight

    def forward(self, h: Tensor, *args: Any) -> Tensor:
        h = self.block(h, *args)
        return h + self.table(h).mean(-1, keepdim=True)


def scaled(model: Any) -> None:
    model.head = ParallelLinearWithCommExt(12, VOCABULARY, True, dtype=torch.float64)
    model.head.weight = model.embed.weight
    model.embed.padding_idx = 3
    model.embed = Scaled(model.embed, model.head.bias)


def looked(model: Any) -> None:
    model.layers[2] = Looked(model.layers[2], model.embed.weight)


def one_weight(model: Any) -> None:
    """Two blocks share a large weight, three a small one."""
    first, *_, fourth, last = model.layers
    last.attention.wq.weight = first.attention.wq.weight
    first.ffn_norm.weight = fourth.ffn_norm.weight = last.ffn_norm.weight


def one_block(model: Any) -> None:
    """Shared modules, as in ALBERT (arXiv 1909.11942)."""
    model.layers[4], model.layers[3] = model.layers[0], model.layers[1]


ALTERED: dict[str, tuple[Any, str, list[str]]] = {
    "padding, scaled, tied bias": (
        scaled, "1F1B",
        ["embed.bias of stage 0 and head.bias of stage 1",
         "embed.inner.weight of stage 0 and head.weight of stage 1"],
    ),
    "a third place": (
        looked, "Interleaved1F1B",
        ["embed.weight of stage 0 and layers.2.table.weight of stage 1 and head.weight of stage 3"],
    ),
    "a third place, in a V": (
        looked, "ZBVZeroBubble",
        ["embed.weight of stage 0 and layers.2.table.weight of stage 1 and head.weight of stage 3"],
    ),
    "blocks": (one_weight, "GPipe", []),
    "whole blocks": (one_block, "1F1B", []),
    "whole blocks, in a V": (one_block, "ZBVZeroBubble", []),
}  # fmt: skip


@pytest.mark.parametrize("name", some(ALTERED, 3))
@ranks(2)
def test_whatever_several_stages_share_is_one_weight(name: str) -> None:
    alter, schedule, wanted = ALTERED[name]
    found = trains(tied(schedule), alter=alter)
    assert not set(wanted) - set(found), found


@pytest.mark.thorough(2)
@ranks(3)
def test_the_stages_between_have_nothing_to_do_with_it() -> None:
    assert trains(tied(pipeline=3)) == ["embed.weight of stage 0 and head.weight of stage 2"]


def told(call: Any, kind: type[Exception] = StructureError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@ranks(2)
def test_copies_that_were_written_or_stepped_apart_are_refused_and_made_equal(rank: int) -> None:
    case = tied()
    pipeline, plain = make(case)
    given = batches(case, pipeline.mesh)

    def refused() -> None:
        for call in (pipeline.step, pipeline.evaluate):
            text = told(lambda call=call: call(given))
            assert "embed.weight of stage 0 and head.weight of stage 1 have different" in text

    if rank == 1:
        with torch.no_grad():
            pipeline.chunks[0].head.weight.mul_(2)
    refused()
    pipeline.equalize()
    pipeline.step(given)
    plain_loss(case, plain, 1).backward()
    same(pipeline, gradients(*pipeline.chunks), gradients(plain), "after equalize()")
    torch.optim.SGD(pipeline.chunks[0].parameters(), lr=0.1 * (1 + rank)).step()
    refused()
    pipeline.equalize()
    pipeline.chunks[0].requires_grad_(rank == 1)
    assert "some are frozen and others trained" in told(lambda: pipeline.step(given))


@pytest.mark.thorough(1)
@ranks(2)
def test_a_frozen_one_has_no_gradient_until_it_is_thawed() -> None:
    case = tied("ZBVZeroBubble")
    pipeline, plain = make(case)
    names = {"embed.weight", "head.weight"}
    found = [pair for chunk in pipeline.chunks for pair in chunk.named_parameters()]
    everywhere = [parameter for name, parameter in found if name in names]
    for trained in (False, True):
        for parameter in (*everywhere, plain.embed.weight):
            parameter.requires_grad_(trained)
        pipeline.step(batches(case, pipeline.mesh))
        plain_loss(case, plain, 1).backward()
        mine = gradients(*pipeline.chunks)
        same(pipeline, mine, gradients(plain), f"trained: {trained}")
        assert all((mine[name] is not None) == trained for name in names & mine.keys())


@ranks(2)
def test_masters_of_16_bit_copies_are_made_equal_too(rank: int) -> None:
    case = tied("1F1B", weights={"min_shard_elements": 24})
    pipeline, _ = make(case, alter=lambda model: model.to(torch.bfloat16))
    (optimizer,) = optimizers(pipeline)
    given, name = batches(case, pipeline.mesh), ("embed", "head")[rank] + ".weight"
    parameter = pipeline.chunks[0].get_parameter(name)
    for number in range(4):
        pipeline.step(given)
        optimizer.step()
        if number == 1:
            with torch.no_grad():
                parameter += 0.5 * rank
            pipeline.equalize()
    everyone = [torch.empty(VOCABULARY, 12) for _ in range(2)]
    with full_params(pipeline.chunks[0]):
        mine = pipeline.chunks[0].get_parameter(name).detach()
        assert mine.dtype == torch.float32
        torch.distributed.all_gather(everyone, mine)
    assert torch.equal(*everyone)
    assert not torch.equal(everyone[0], everyone[0].bfloat16().float()), "as rounded as the weights"


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (
            {"rules": [{"match": ["embed"], "shard_dim": 1}]},
            "embed.weight of stage 0 is sharded on dimension 1 of",
        ),
        ({"rules": [{"match": ["head"], "min_shard_elements": 1 << 20}]}, "stage 1 is replicated"),
        ({"rules": [{"match": ["head"], "ignore": True}]},
         "head.weight of stage 1 is not parallel"),
    ],
    ids=["cut otherwise", "replicated", "ignored"],
)
@ranks(4)
def test_copies_that_are_cut_differently_are_refused(weights: dict[str, Any], wanted: str) -> None:
    text = told(lambda: make(tied(weight=2, weights=weights)))
    assert text.startswith("stages share embed.weight, but embed.weight of stage 0 is sharded on")
    assert wanted in text


@ranks(2)
def test_values_come_from_a_file_that_has_the_weight_once(rank: int, tmp_path: Path) -> None:
    case = tied("ZBVZeroBubble")
    pipeline, plain = make(case)
    torch.manual_seed(3)
    new = {name: torch.randn_like(value) for name, value in plain.named_parameters()}
    save_file(new, tmp_path / f"{rank}.safetensors")
    for chunk in pipeline.chunks:
        missing, _ = load_weights(chunk, tmp_path / f"{rank}.safetensors", strict=False)
        assert not missing
    plain.load_state_dict({**new, "head.weight": new["embed.weight"]})
    pipeline.evaluate(batches(case, pipeline.mesh))  # copies are equal
    same(pipeline, parameters(*pipeline.chunks), parameters(plain), "values")
    counted = [n for c in pipeline.chunks for _, part in iterate_full_params(c) for n in part]
    assert sorted(counted) == sorted(set(counted))
    assert "head.weight" not in counted
    assert ("embed.weight" in counted) == (rank == 0)


@pytest.mark.parametrize("where", ["first, at its end", "last, at its end", "first, in backward"])
@ranks(2, timeout=60)
def test_a_rank_that_fails_lets_no_other_wait_for_its_gradient(rank: int, where: str) -> None:
    failing = 0 if where.startswith("first") else 1
    case = tied("1F1B", timeout=20)

    class Fails(SchedulerHook):
        now = False

        def after_last_micro_batch(self, action: ComputeAction) -> None:
            if self.now and rank == failing and "end" in where:
                raise ArithmeticError("mine")

        def before_backward(self, action: ComputeAction) -> None:
            if self.now and rank == failing and "backward" in where and action.micro_batch == 3:
                raise ArithmeticError("mine")

    hook = Fails()
    pipeline, plain = make(case, hooks=[hook])
    given = batches(case, pipeline.mesh)
    pipeline.step(given)
    hook.now = True
    begun = time.monotonic()
    kind = ArithmeticError if rank == failing and "end" in where else Exception
    text = told(lambda: pipeline.step(given), kind)
    assert time.monotonic() - begun < 10, "it has waited for the group's timeout"
    assert rank == failing or f"rank {failing}" in text
    hook.now = False
    for chunk in pipeline.chunks:
        chunk.zero_grad()
    pipeline.step(given)
    plain_loss(case, plain, 1).backward()
    same(pipeline, gradients(*pipeline.chunks), gradients(plain), "the step after")


class Square(nn.Module):
    """A user-defined block."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(12, 12, dtype=torch.float64)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.proj(h))


class Stage(nn.Module):
    """One of two user-defined stages, which create their tables separately."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.number, self.uses = number, True
        self.layers = nn.ModuleList([Square()])
        if number == 0:
            self.table = nn.Embedding(VOCABULARY, 12, dtype=torch.float64)
        else:
            self.out = nn.Linear(12, VOCABULARY, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](self.table(x) if self.number == 0 else x)
        return h if self.number == 0 or not self.uses else torch.tanh(self.out(h))


@ranks(4)
def test_stages_of_ones_own_say_what_is_tied(rank: int) -> None:
    """The last stage does not use its copy in the first step: it gets the other's gradient."""
    mesh = mesh_of(2, 1, 2)
    number, plain = mesh.pipeline_rank, [Stage(0), Stage(1)]
    plain[1].out.weight = plain[0].table.weight
    kind = schedule_kind("1F1B")
    module = Stage(number)
    config = WeightParallelConfig(min_shard_elements=24, gather_before="qkv")
    communicator = parallelize(module, mesh, config)
    ids = torch.arange(24).view(2, 2, 6) % VOCABULARY
    hidden = torch.empty(2, 6, 12, dtype=torch.float64, device="meta", requires_grad=True)

    def pipeline(*tied: Any) -> Pipeline:
        hooks: list[SchedulerHook] = []
        stage = ISPPipelineStage(
            module, number, 2, mesh.device, chunk=0, communicator=communicator, hooks=hooks,
            group=mesh.pipeline_group, input_args=hidden if number else ids[0].to("meta"),
            output_args=hidden,
        )  # fmt: skip
        return Pipeline(
            kind, mesh, [stage], 2, hooks, lambda output, _: output.square().sum(), tied=tied
        )

    for wrong, why in (
        ({0: "table.weight", 1: "head.weight"}, "head.weight of stage 1 is not there"),
        ({0: "table.weight", 1: "layers.0.proj.weight"}, "stage 1 is sharded on dimension 0 of ["),
        ({0: "table.weight", 5: "out.weight"}, "tied names stage 5 on rank"),
        ({0: "table.weight", 5 if number else 1: "out.weight"}, "tied names stage 5 on rank"),
    ):
        right = dict.fromkeys((0, 1), "layers.0.proj.weight")  # each is compared with its own
        assert why in told(lambda wrong=wrong, right=right: pipeline(right, wrong))
    assert "pipeline ranks tie different weights" in told(
        lambda: pipeline({0: f"table.{'weight' if number else 'bias'}", 1: "out.weight"})
    )
    ours = pipeline({0: "table.weight", 1: "out.weight"})
    for uses in (False, True):
        module.uses = plain[1].uses = uses
        ours.step([MicroBatch((each,)) for each in ids])
        for each in ids:
            # Both weight ranks have the same rows, and gradients are sums over them.
            (2 * plain[1](plain[0](each)).square().sum()).backward()
        wanted = plain[0].table.weight.grad
        name = "out" if number else "table"
        check(gradients(module), gradients(plain[number]) | {f"{name}.weight": wanted}, f"{uses}")
    alone = None if number else ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1)
    with pytest.raises(OrderError, match="has a ZeroOptimizer for a chunk with tied weights"):
        pipeline({0: "table.weight", 1: "out.weight"})
    if alone is not None:
        alone.zero_grad()
