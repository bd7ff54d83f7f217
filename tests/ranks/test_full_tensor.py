"""``full_tensor()`` of a parameter in a forward: its gradient is the sum over ranks."""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import CollectiveError, GradientError, StructureError
from internsp.optim import ZeroOptimizer
from internsp.parallel.parallelize import parallelize
from tests.support import pipeline
from tests.support.compare import TOLERANCE, check, gradients
from tests.support.few import some
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, Block, Tiny, Twin, raises
from tests.support.ranks import ranks
from tests.support.versions import since

FULL = ActivationCheckpointConfig(mode="full")
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
SMALL = {"min_shard_elements": 10**6}


def whole(parameter: Any) -> Tensor:
    """The parameter as a plain tensor, on one process too."""
    found: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return found


class Past(Block):
    """Reads its parameters past its modules, and uses them as usual."""

    def forward(self, x: Tensor) -> Tensor:
        named = dict(self.named_parameters())
        x = x + torch.tanh(x @ whole(named["q.weight"]) * whole(named["norm.weight"]))
        return super().forward(x)


class PastModel(Tiny):
    """Reads parameters of its blocks before and after these, and those of head and embedding."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        named = dict(self.named_parameters(remove_duplicate=False))
        h = self.embed(ids) @ whole(named["layers.1.wo.weight"])
        h = self.norm(self.blocks(h) @ whole(named["layers.0.q.weight"]))
        logits = self.head(h) + h @ whole(named["head.weight"]).t() * 0.5
        logits = logits + h @ whole(named["embed.weight"]).t()
        assert labels is not None
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def train(twin: Twin) -> None:
    """Accumulation in each form, a frozen weight, then steps of a ``ZeroOptimizer``."""
    twin.backward()
    twin.check_gradients("the first")
    twin.backward()
    twin.check_gradients("accumulated")
    twin.zero_grad()
    for context in (twin.communicator.no_sync, twin.communicator.no_replica_sync):
        with context():
            twin.backward()
        twin.backward()
        twin.check_gradients(context.__name__)
        twin.zero_grad()
    frozen: list[Any] = [model.get_parameter("layers.0.q.weight") for model in twins(twin)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    twin.backward()
    twin.check_gradients("a frozen weight")
    for parameter in frozen:
        parameter.requires_grad_(True)
    twin.zero_grad()
    own = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.05)
    plain = torch.optim.SGD(twin.plain.parameters(), lr=0.05)
    for step in range(2):
        for _ in range(2):
            twin.backward()
        for optimizer in (own, plain):
            optimizer.step()
            optimizer.zero_grad()
        twin.check_parameters(f"step {step} of a ZeroOptimizer")


def twins(twin: Twin) -> tuple[Any, Any]:
    return twin.plain, twin.ours


@pytest.mark.thorough(10)
@pytest.mark.parametrize("config", [{}, ALL, ROLLING, SMALL], ids=str)
@pytest.mark.parametrize("checkpoint", [None, FULL, REENTRANT], ids=["kept", "full", "reentrant"])
@ranks(2)
def test_full_tensor_in_a_forward_sums_its_gradient_over_ranks(
    checkpoint: Any, config: dict[str, Any]
) -> None:
    for weight, tied in ((2, False), (2, True), (1, False)):
        make = partial(PastModel, Past, layers=2, tied=tied)
        train(Twin(make, mesh_of(weight), checkpoint, **config))


@pytest.mark.thorough(5)
@ranks(4)
def test_full_tensor_in_a_forward_sums_over_shards_and_replicas_once() -> None:
    for config in ({}, SMALL):
        train(Twin(partial(PastModel, Past, layers=2), mesh_of(2), FULL, **config))


@ranks(2)
def test_full_tensor_in_a_forward_is_averaged_where_gradients_are() -> None:
    for weight, config in ((2, {}), (1, {}), (2, SMALL)):
        twin = Twin(partial(PastModel, Past, layers=2), mesh_of(weight), reduction="mean", **config)
        everybody, mine = twin.batch()
        (twin.plain(*everybody) / 2).backward()
        twin.ours(*mine).backward()
        twin.check_gradients(f"a mean, {config}")


class Sometimes(Past):
    """Runs the module of a weight that it reads whole on one rank alone."""

    runs = True

    def __init__(self) -> None:
        super().__init__()
        self.past = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(x @ whole(dict(self.past.named_parameters())["weight"]))
        return super().forward(x + self.past(x) * 0.3 if self.runs else x)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("weight", [1, 2])
@ranks(2)
def test_full_tensor_is_right_where_only_some_ranks_run_the_weights_module(weight: int) -> None:
    """What a rank has in flight when it comes to the sum depends on what it runs."""
    for config in ({}, ROLLING):
        twin = Twin(partial(Tiny, Sometimes, layers=3), mesh_of(weight), **config)
        for step in range(2):
            everybody, mine = twin.batch()
            for rank in range(2):
                for layer in twin.plain.layers:  # type: ignore[union-attr]
                    layer.runs = rank == step
                rows = slice(2 * rank, 2 * rank + 2)
                twin.plain(everybody[0][rows], everybody[1][rows]).backward()
            for layer in twin.ours.layers:  # type: ignore[union-attr]
                layer.runs = twin.mesh.rank == step
            twin.ours(*mine).backward()
            twin.check_gradients(f"step {step}")
            twin.zero_grad()


class Apart(Tiny):
    """Calls another read of a parameter in its forward."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        weight: Any = dict(self.named_parameters())["layers.1.w1.weight"]
        return super().forward(ids, labels) + self.read(weight)

    def read(self, weight: Any) -> Tensor:
        raise NotImplementedError


class Local(Apart):
    def read(self, weight: Any) -> Tensor:
        return weight.to_local().sum()  # type: ignore[no-any-return]


class Redistributed(Apart):
    def read(self, weight: Any) -> Tensor:
        there = weight.redistribute(placements=[Replicate()] * weight.device_mesh.ndim)
        return there.to_local().sum()  # type: ignore[no-any-return]


class OfAValue(Apart):
    def read(self, weight: Any) -> Tensor:
        return weight.pow(2).sum().full_tensor()  # type: ignore[no-any-return]


class WithoutGradient(Apart):
    """What the refusals propose."""

    def read(self, weight: Any) -> Tensor:
        term = whole(weight).pow(2).sum()
        if not isinstance(weight, DTensor):
            return term * 2  # each of two ranks adds it to its loss
        still = weight.detach()
        return term + still.to_local().sum() * 0 + still.pow(2).sum().full_tensor() * 0


READS: dict[type[Apart], str] = {
    Local: "to_local() of layers.1.w1.weight",
    Redistributed: "redistribute() of layers.1.w1.weight",
    OfAValue: "full_tensor() of a value made of layers.1.w1.weight",
}


@pytest.mark.parametrize("make", READS)
@ranks(2)
def test_reads_whose_gradient_no_rank_would_sum_are_refused_by_name(
    make: type[Apart], rank: int
) -> None:
    for weight, config in ((2, {}), (1, {}), (2, SMALL)):
        twin = Twin(partial(make, layers=2), mesh_of(weight), **config)
        words = (READS[make], f"on rank {rank}", "self.weight", "full_tensor()", "detach()")
        _, mine = twin.batch()
        raises(StructureError, partial(twin.ours, *mine), *words)
        with torch.no_grad():
            twin.ours(*mine)
        twin = Twin(partial(WithoutGradient, layers=2), mesh_of(weight), **config)
        twin.backward()
        twin.check_gradients(f"as the refusal proposes, {config}")


def calls(read: Callable[[], Any]) -> int:
    """How many functions of Python ``read`` calls."""
    seen: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: seen.append(event))
    try:
        read()
    finally:
        sys.setprofile(before)
    return seen.count("call")


@ranks(2)
def test_a_read_takes_no_more_calls_in_a_model_of_more_blocks() -> None:
    """Forwards that run are counted, not looked for in all modules: programs read all parameters in
    a loop."""
    found = []
    for layers in (2, 6):
        weight: Any = Twin(partial(Tiny, layers=layers), mesh_of(2)).ours.head.weight
        weight.to_local()
        found.append(calls(weight.to_local))
    assert 0 < found[0] == found[1]


@pytest.mark.skipif(not since("2.12"), reason="calls of a mode come on top")
@ranks(2)
def test_a_parameter_of_a_zero_optimizer_is_operated_on_with_few_more_calls() -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))
    weight: Any = twin.ours.head.weight
    weight.detach()
    before = calls(weight.detach)
    ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1)
    weight.detach()
    assert before < calls(weight.detach) <= before + 30
    assert torch.equal(*(n.full_tensor() for n in torch._foreach_norm([weight, weight.detach()])))


class Explicit(Apart):
    """Says itself how the gradient is placed, which is taken as it is."""

    def read(self, weight: Any) -> Tensor:
        if not isinstance(weight, DTensor):
            return weight.pow(2).sum() * 2
        each = [Partial()] * weight.device_mesh.ndim
        return weight.full_tensor(grad_placements=each).pow(2).sum()


class Checkpointed(Apart):
    """Reads a parameter in a part of its forward that torch's own checkpoint recomputes."""

    def read(self, weight: Any) -> Tensor:
        start = torch.ones((), dtype=torch.float64, requires_grad=True)
        term = checkpoint(lambda one: whole(weight).pow(2).sum() * one, start, use_reentrant=True)
        return term if isinstance(weight, DTensor) else term * 2  # type: ignore[no-any-return]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("make", [Explicit, Checkpointed])
@ranks(2)
def test_full_tensor_is_right_in_the_other_ways_that_a_forward_may_call_it(
    make: type[Apart],
) -> None:
    for weight, config in ((2, {}), (1, {}), (2, SMALL)):
        twin = Twin(partial(make, layers=2), mesh_of(weight), **config)
        twin.backward()
        twin.check_gradients(f"{make.__name__}, {config}")


@pytest.mark.thorough(1)
@pytest.mark.parametrize("config", [{}, ALL], ids=str)
@ranks(2)
def test_full_tensor_is_right_in_blocks_that_a_program_calls_itself(config: dict[str, Any]) -> None:
    for weight in (2, 1):
        twin = Twin(partial(PastModel, Past, layers=2), mesh_of(weight), **config)
        everybody, mine = twin.batch()
        for model, (ids, labels) in ((twin.plain, everybody), (twin.ours, mine)):
            x = model.embed(ids)  # type: ignore[operator]
            for layer in model.layers:  # type: ignore[union-attr]
                x = layer(x)
            logits = model.head(model.norm(x))  # type: ignore[operator]
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        twin.check_gradients(f"blocks called by a program, {config}")


class Some(Apart):
    """Only the first rank's loss depends on the weight that all of them gather."""

    def read(self, weight: Any) -> Tensor:
        found = whole(weight).sum()
        first = not isinstance(weight, DTensor) or weight.device_mesh.get_rank() == 0
        return found if first else found.detach()


@ranks(2)
def test_a_sum_that_one_rank_alone_reaches_is_an_error_and_no_hang(rank: int) -> None:
    twin = Twin(partial(Some, layers=2), mesh_of(2, timeout=3))
    _, mine = twin.batch()
    loss = twin.ours(*mine)
    if rank == 0:
        words = ("the gradient of full_tensor() of layers.1.w1.weight", "ranks [1]")
        raises(CollectiveError, loss.backward, *words)
    else:
        with pytest.raises(Exception, match="rank"):
            loss.backward()


@ranks(2)
def test_second_derivatives_of_full_tensor_in_a_forward_are_refused() -> None:
    twin = Twin(partial(PastModel, layers=2), mesh_of(2))
    _, mine = twin.batch()
    loss = twin.ours(*mine)
    raises(GradientError, partial(loss.backward, create_graph=True), "create_graph")


def reading_past(model: Any) -> None:
    """Let each block read one of its weights past its modules, too."""
    for layer in model.layers:
        layer.register_forward_pre_hook(read_past)


def read_past(block: Any, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
    x, *others = args
    squares = {n: p for n, p in block.named_parameters() if p.shape == (12, 12)}
    return x + torch.tanh(x @ whole(squares[min(squares)])), *others


@pytest.mark.parametrize("schedule", some(["Interleaved1F1B", "1F1B"], 1))
@ranks(4)
def test_full_tensor_in_a_pipeline_sums_over_the_ranks_of_its_stage(schedule: str) -> None:
    chunks = 1 if schedule == "1F1B" else 2
    for weight in (2, 1):
        case = pipeline.Case(schedule, chunks=chunks, weight=weight, pipeline=2)
        made, plain = pipeline.make(case, alter=reading_past, mesh=mesh_of(weight, 1, 2))
        losses = made.step(pipeline.batches(case, made.mesh))
        found = pipeline.compare(case, made, plain, losses)
        assert found.loss < TOLERANCE
        assert found.gradient < TOLERANCE


@ranks(4)
def test_full_tensor_where_a_schedule_splits_backward_is_refused_by_name() -> None:
    case = pipeline.Case("InterleavedZeroBubble", chunks=2, weight=2)
    made, _ = pipeline.make(case, alter=reading_past)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - torch's, around the first cause
        made.step(pipeline.batches(case, made.mesh))
    words = "".join(traceback.format_exception(caught.value))
    refused = "full_tensor() of layers." in words and "splits backward" in words
    assert refused or "has failed" in words, words
    assert refused or made.mesh.pipeline_rank == 0, "the other stage reports it"


class PastTensor(PastModel):
    """Reads a weight that is tensor parallel, too, once :attr:`reads` says so."""

    reads = False

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.reads:
            whole(dict(self.named_parameters())["layers.0.w1.weight"])
        return super().forward(ids, labels)


@ranks(4)
def test_full_tensor_beside_tensor_parallel_layers_is_right_and_of_them_refused() -> None:
    mesh = mesh_of(2, tensor=2)
    torch.manual_seed(0)
    plain: Any = PastTensor(Past, layers=2).double()
    ours = copy.deepcopy(plain)
    layers: dict[str, Any] = {}
    for block in ("layers.0", "layers.1"):
        layers[f"{block}.w1"] = ColwiseParallel(use_local_output=False)
        layers[f"{block}.w2"] = RowwiseParallel()
    parallelize_module(ours, mesh.tensor_mesh, layers)
    parallelize(ours, mesh, WeightParallelConfig(min_shard_elements=20, coalesce_bytes=0))
    ids, labels = torch.randint(0, 11, (2, 2, 5), generator=torch.Generator().manual_seed(1))
    plain(ids, labels).backward()
    mine = slice(mesh.data_rank, mesh.data_rank + 1)
    ours(ids[mine], labels[mine]).backward()
    check(gradients(ours), gradients(plain), "beside tensor parallel layers")
    ours.reads = True
    with pytest.raises(StructureError, match=r"layers\.0\.w1.*tensor parallel.*self\.weight"):
        ours(ids[mine], labels[mine])
