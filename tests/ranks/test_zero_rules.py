"""Properties of ZeroOptimizer besides its values: slices, messages, all-gathers, refusals."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from internsp.config import WeightParallelConfig
from internsp.errors import GradientError, StaleWeightError
from internsp.optim import ZeroOptimizer, step_together
from internsp.optim.bucket import Bucket
from internsp.parallel.parallelize import parallelize
from internsp.wp.collectives import Collectives
from tests.support.late import publish_late
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks, run_ranks
from tests.support.zero import Case, alone, batch, furthest, little, setup, share, train, whole


def kept(rank: int, world: int) -> list[str]:
    """Parameters of which some tensor still holds the first storage after they were moved."""
    s = setup(Case(weight=2))
    return [
        m.name
        for m in s.communicator.replicated.all_parameters()
        for held in (m._counter, m.parameter)  # the version counter's DTensor, too
        if held._local_tensor.untyped_storage().data_ptr()  # type: ignore[attr-defined]
        != m.storage.untyped_storage().data_ptr()
    ]


@pytest.mark.thorough(1)
def test_shards_are_not_kept_a_second_time_beside_the_buckets() -> None:
    assert run_ranks(kept, 2) == [[], []]


def memory(rank: int, world: int) -> tuple[int, int, int, int]:
    """(elements of exp_avg here, sharded and replicated elements in all, reported state bytes)."""
    s = setup(Case(weight=2, zero=2, dtype=torch.float32))
    ids, labels = batch(0, world)
    s.model(share(ids, rank), share(labels, rank), side=True).backward()
    s.optimizer.step()
    states = s.optimizer.local_state_dict()["state"].values()
    entries = [part for e in states for part in e["exp_avg"].parts.values()]
    small = sum(m.storage.numel() for m in s.communicator.replicated.members)
    cut = sum(p.numel() for p in s.model.parameters()) - small
    told = dict(s.optimizer.memory())["optimizer state"]
    return sum(e.numel() for e in entries), cut, small, told


@pytest.mark.thorough(1)
def test_optimizer_state_exists_for_each_ranks_slice_alone() -> None:
    found = run_ranks(memory, 4)
    cut, small = found[0][1], found[0][2]
    # Sharded weights once in all; replicated parameters once for each of the two weight ranks.
    assert sum(elements for elements, *_ in found) == cut + 2 * small
    assert all(told == 2 * 4 * elements for elements, _, _, told in found)
    assert max(elements for elements, *_ in found) < 0.4 * (cut + small)


def messages(rank: int, world: int, weight: int, zero: int) -> dict[str, Any]:
    case = Case(weight=weight, zero=zero, dtype=torch.float32)
    s = setup(case)
    ids, labels = batch(0, world)
    s.model(share(ids, rank), share(labels, rank)).backward()
    s.communicator.state.finish_reductions()
    counters = s.communicator.state.collectives.counters
    counters.reset()
    summed: list[int] = []
    exchanged: list[int] = []
    real = dist.all_reduce, Collectives.exchange

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        summed.append(tensor.numel())
        return real[0](tensor, *args, **kwargs)

    def exchange(self: Collectives, output: torch.Tensor, *args: Any) -> Any:
        exchanged.append(output.numel())
        return real[1](self, output, *args)

    dist.all_reduce, Collectives.exchange = all_reduce, exchange  # type: ignore[method-assign]
    try:
        s.optimizer.step()
    finally:
        dist.all_reduce, Collectives.exchange = real  # type: ignore[method-assign]
    buckets = s.optimizer._buckets
    mine = [*s.model.parameters()]
    return {
        # The square, a flag of each rank and parameter, the settings of each rank.
        "norm": 1 + 2 * world + len(mine) + 1,
        "summed": summed,
        "exchanged": exchanged,
        "flat": s.communicator.replicated.gradient().numel(),
        "big": [b.flat.numel() for b in buckets if not b.replicated],
        "all": [b.flat.numel() for b in buckets],
        "reduced": counters.reduced_bytes,
        "gathered": counters.gathered_bytes,
    }


def test_gradients_go_by_reduce_scatter_and_only_small_ones_by_all_reduce() -> None:
    for found in run_ranks(messages, 2, 1, 2):
        assert found["summed"] == [found["flat"], found["norm"]]  # the replicated parameters first
        assert found["exchanged"] == found["big"][::-1]  # in the order of backward
        assert found["reduced"] == 4 * sum(found["big"]) // 2 + 4 * found["flat"]
        assert found["gathered"] == 4 * sum(found["all"]) // 2


def test_with_fewer_zero_ranks_than_replicas_slices_alone_are_summed_between_them() -> None:
    for found in run_ranks(messages, 4, 1, 2):
        assert found["exchanged"] == found["big"][::-1]
        slices = [n // 2 for n in found["big"]]
        assert sorted(found["summed"]) == sorted([found["flat"], found["norm"], *slices])


def reading(rank: int, world: int) -> tuple[list[str], list[bool]]:
    s = setup(Case(weight=2))
    ids, labels = (share(t, rank) for t in batch(0, world))
    parameter = s.model.layers[0].q.weight
    quiet = [parameter.grad is None]
    s.model(ids, labels).backward()
    complaints = []
    for read in (
        lambda: parameter.grad.norm(),
        lambda: s.model.layers[0].norm.bias.grad + 1,
        lambda: parameter.grad.to_local(),
        lambda: parameter.grad.mul_(2),
        lambda: torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0),
        lambda: torch.optim.SGD(s.model.parameters(), lr=0.1).step(),
        lambda: setattr(parameter, "grad", parameter.detach()),
    ):
        with pytest.raises(GradientError) as caught:
            read()
        complaints.append(str(caught.value))
    before = whole(s.model)
    s.optimizer.zero_grad()
    quiet.append(parameter.grad is None)
    s.optimizer.step()  # there is nothing left to step with
    norm = s.optimizer.grad_norm
    after = whole(s.model)
    quiet += [norm == 0.0, all(torch.equal(before[n], after[n]) for n in before)]
    s.model(ids, labels).backward()
    s.optimizer.step()
    s.model.zero_grad()
    quiet.append(parameter.grad is None)
    quiet.append(type(copy.deepcopy(parameter)).__name__ == "DTensor")
    return complaints, quiet


def test_an_unfinished_gradient_cannot_be_read_or_set_and_can_be_dropped() -> None:
    for rank, (complaints, quiet) in enumerate(run_ranks(reading, 2)):
        assert all(f"on rank {rank}" in c for c in complaints)
        assert complaints[0].startswith("layers.0.q.weight.grad was read")
        assert "gather_gradients" in complaints[0]
        assert "was set" in complaints[-1]
        assert all(quiet), quiet


def late(rank: int, world: int, weight: int) -> tuple[float, list[str], list[float]]:
    """Training with late parameter all-gathers; the order of waits in a forward; other readers."""
    case = Case(weight=weight, steps=4, trace=True)
    s = setup(case, blocks=2)
    publish_late(s.communicator)
    mine = train(s, case, rank, world)
    _, theirs = alone(case, world)
    trace = s.communicator.state.trace
    readers = []
    ids, labels = (share(t, rank) for t in batch(9, world))
    for read in (
        lambda: s.model.layers[1].q.weight.full_tensor(),
        lambda: s.model.layers[1].q.weight.to_local(),
        lambda: s.model.layers[1].norm.weight * 2,
        lambda: s.model.state_dict()["head.weight"],
        lambda: s.model(ids, labels),
    ):
        s.model(ids, labels).backward()
        s.optimizer.step()
        with torch.no_grad():
            value = read()
        readers.append(float(torch.as_tensor(getattr(value, "_local_tensor", value)).sum()))
    s.communicator.wait_until_ready()
    s.model(ids, labels).backward()
    s.optimizer.step()
    trace.clear()
    with torch.no_grad():
        s.model(ids, labels)
    order = [
        f"{e.kind} {e.unit}"
        for e in trace.events
        if (e.kind == "WAIT" and e.phase == "publish") or e.kind == "USE"
    ]
    return furthest(theirs, mine), list(dict.fromkeys(order)), readers


@pytest.mark.parametrize(("weight", "waits"), [(2, False), (1, True)])
@ranks(2)
def test_only_values_that_replicas_send_each_other_are_waited_for(weight: int, waits: bool) -> None:
    model = Tiny(layers=2)
    communicator = parallelize(model, mesh_of(weight), WeightParallelConfig(min_shard_elements=1))
    optimizer = ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1)
    ids = torch.zeros(2, 5, dtype=torch.long)
    model(ids, ids).backward()
    optimizer.step()
    members = communicator.replicated.sharded
    assert {member.ready is not None for member in members} == {waits}
    members[0].parameter.to_local()
    assert members[0].ready is None, "who reads it waits"
    communicator.wait_until_ready()
    assert [member.ready for member in members] == [None] * len(members)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("kind", ["zero", "together", "plain"])
@ranks(2)
def test_a_step_makes_stale_what_it_has_stepped_and_nothing_else(kind: str) -> None:
    model = Tiny(layers=2)
    communicator = parallelize(model, mesh_of(2), WeightParallelConfig(min_shard_elements=1))
    members = communicator.replicated.all_parameters()
    before = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    ids = torch.zeros(2, 5, dtype=torch.long)
    model(ids, ids).backward()
    before.step()  # a later optimizer does not count these steps anew
    before.zero_grad()
    model.layers[0].requires_grad_(False)
    model.embed.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.1, foreach=True)
    if kind != "plain":
        used = [member.version() for member in members]
        optimizer = ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1)
        for member, version in zip(members, used, strict=True):
            assert (member.version() > version) is member.requires_grad, member.name
    model(ids, ids).backward()
    graph = model(ids, ids)
    versions = [member.version() for member in members]
    if kind == "together":
        assert isinstance(optimizer, ZeroOptimizer)
        step_together([optimizer])
    else:
        optimizer.step()
    for member, version in zip(members, versions, strict=True):
        assert (member.version() > version) is member.requires_grad, member.name
    raises(StaleWeightError, graph.backward, "changed on rank")


@pytest.mark.thorough(2)
@pytest.mark.parametrize("weight", [1, 2])
def test_a_late_publication_is_waited_for_by_whoever_reads_block_by_block(weight: int) -> None:
    world = 2 * weight
    for apart, order, readers in run_ranks(late, world, weight):
        assert apart < 1e-10
        assert all(value == value for value in readers), readers
        # Block 0 computes before block 1's values arrive.
        assert order.index("WAIT layers.0") < order.index("USE layers.1")
        assert order.index("USE layers.0") < order.index("WAIT layers.1")
        assert order.index("USE layers.0") < order.index("WAIT head")


def failing(rank: int, world: int) -> tuple[list[str], float]:
    """An exception in a second micro-batch, on all ranks; then a complete new one."""
    s = setup(Case(weight=2))
    ids, labels = batch(0, world)
    mine = share(ids, rank), share(labels, rank)
    raised = []
    for where in ("backward", "forward"):
        s.model(*mine).backward()
        s.optimizer.finish_reductions()  # sums in slices must be discarded too
        block = s.model.layers[1]
        broken = (
            block.register_full_backward_hook(_explode)
            if where == "backward"
            else block.register_forward_hook(_explode)
        )
        try:
            s.model(*mine).backward()
        except RuntimeError as error:
            raised.append(str(error))
        broken.remove()
        if where == "forward":  # without the lost part no step continues (test_discarded)
            raises(GradientError, s.optimizer.gather_gradients, "zero_grad()")
        s.optimizer.zero_grad()
    s.model(*mine).backward()
    got = s.optimizer.gather_gradients()
    reference = gradient_alone(world)
    return raised, max((got[n] - g).abs().max().item() for n, g in reference.items())


def _explode(*_: Any) -> None:
    raise RuntimeError("boom")


def gradient_alone(world: int) -> dict[str, torch.Tensor]:
    model = little()
    model(*batch(0, world)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_after_a_failure_that_all_ranks_met_the_next_gradient_is_right() -> None:
    for raised, apart in run_ranks(failing, 2):
        assert raised == ["boom", "boom"]
        assert apart < 1e-12


class Filter(Tiny):
    """With a complex parameter."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.filter = nn.Parameter(torch.ones(3, dtype=torch.complex128))


def early() -> None:
    """An optimizer that was made before its model was parallelized."""
    model = little()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize(model, mesh_of(2), WeightParallelConfig(min_shard_elements=20))
    model(*batch(0, 1)).backward()
    optimizer.step()


def refused(rank: int, world: int) -> list[str]:
    s = setup(Case(weight=2))
    found = []
    parameters = list(s.model.parameters())
    attempts: list[Any] = [
        lambda: ZeroOptimizer(s.communicator, torch.optim.SGD, lr=0.1),
        lambda: s.optimizer.add_param_group({"params": parameters[:1]}),
    ]
    config = WeightParallelConfig(min_shard_elements=20)
    fresh = parallelize(little(), s.communicator.mesh, config)
    chosen = [w.parameter for w in fresh.replicated.sharded]

    def make(groups: Any, cls: Any = torch.optim.SGD, **said: Any) -> Any:
        return lambda: ZeroOptimizer(fresh, cls, lr=0.1, param_groups=groups, **said)

    attempts += [
        make(None, torch.optim.LBFGS),
        make(None, torch.optim.Adafactor, whole_matrix=False),
        make(None, whole_matrix=True),
        make(None, torch.optim.Muon),
        make([{"params": chosen}, {"params": chosen}]),
        make([{"params": chosen}]),
        make([{"params": parameters}]),
        make([{"lr": 1.0}]),
        make(None, max_grad_norm=-1.0),
        lambda: ZeroOptimizer(s.model.parameters(), torch.optim.SGD, lr=0.1),  # type: ignore[arg-type]
        lambda: ZeroOptimizer(
            parallelize(Filter(), s.communicator.mesh, config), torch.optim.SGD, lr=0.1
        ),
        lambda: parallelize(s.model, s.communicator.mesh),
        lambda: mesh_of("2"),  # type: ignore[arg-type]
        early,
        lambda: parallelize(s.communicator.mesh, s.model),  # type: ignore[arg-type]
        lambda: parallelize(little(), s.communicator.mesh, {"overlap": True}),  # type: ignore[arg-type]
        lambda: parallelize(little(), s.communicator.mesh, activation_checkpoint=False),  # type: ignore[arg-type]
    ]
    for attempt in attempts:
        try:
            attempt()
            found.append("taken")
        except (TypeError, ValueError) as error:
            found.append(str(error))
    assert not fresh.state.consumer.is_optimizer  # a refusal leaves the plain loop unchanged
    return found


def test_impossible_requests_are_refused_by_name() -> None:
    for found in run_ranks(refused, 2):
        expected = [
            "has a ZeroOptimizer already",
            "embed.weight is in param_groups[0] and in the group to add",
            "LBFGS is not one",
            "Adafactor is not one: it is Adafactor. Declare whole_matrix",
            "SGD is declared to need whole matrices",
            "layers.0.norm.weight cannot be stepped by Muon",
            "embed.weight is in param_groups[0] and in param_groups[1]",
            "trainable parameters in no group: layers.0.norm.weight",
            "take the parameters from the model after parallelize",
            "param_groups[0] has no 'params'",
            "max_grad_norm = -1.0 on rank",
            "a generator in the place of the communicator",
            "filter is complex",
            "belongs to a parallel model",
            "weight='2' of type str must be a whole number",
            "before parallelize(), which nothing trains",
            "a ParallelMesh in the place of a Module",
            "a dict in the place of a WeightParallelConfig",
            "a bool in the place of a ActivationCheckpointConfig",
        ]
        assert len(found) == len(expected)
        for message, part in zip(found, expected, strict=True):
            assert part in message, message


def closures(rank: int, world: int) -> tuple[list[Any], float]:
    case = Case(weight=2, steps=2)
    by_hand, by_closure = setup(case), setup(case)
    returned: list[Any] = []
    for step in range(case.steps):
        ids, labels = (share(t, rank) for t in batch(step, world))
        by_hand.optimizer.zero_grad()
        loss = by_hand.model(ids, labels)
        loss.backward()
        returned.append(by_hand.optimizer.step() is None)
        calls: list[bool] = []

        def closure(ids: Any = ids, labels: Any = labels, calls: list[bool] = calls) -> Any:
            calls.append(torch.is_grad_enabled())
            by_closure.optimizer.zero_grad()
            loss = by_closure.model(ids, labels)
            loss.backward()
            return loss

        with torch.no_grad():  # a step enables gradients for its closure alone
            given = by_closure.optimizer.step(closure)
        returned += [calls == [True], torch.equal(given, loss)]
        returned.append(by_closure.optimizer.grad_norm == by_hand.optimizer.grad_norm > 0)
    found, wanted = whole(by_closure.model), whole(by_hand.model)
    return returned, max(float((found[n] - wanted[n]).abs().max()) for n in wanted)


def test_a_step_returns_the_closures_loss_or_nothing_as_torchs_does() -> None:
    for returned, gap in run_ranks(closures, 2):
        assert returned == [True] * 8
        assert gap == 0.0


@ranks(2)
def test_schedules_that_look_for_a_momentum_take_it() -> None:
    """OneCycleLR changes betas with the learning rate; it reads the optimizer's defaults."""
    s = setup(Case(weight=2))
    theirs = torch.optim.AdamW(little().parameters(), lr=0.1)
    for optimizer in (s.optimizer, theirs):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        optimizer.step()
        schedule.step()
    for group in s.optimizer.param_groups:
        assert group["betas"] == theirs.param_groups[0]["betas"]
        assert group["lr"] == theirs.param_groups[0]["lr"]


@ranks(2)
def test_a_fused_step_looks_at_each_bucket_once_for_what_begins() -> None:
    """Once for each parameter of a bucket would grow with the square of the model's blocks, since
    one bucket has their norms and biases."""
    twin = Twin(partial(Tiny, layers=3), mesh_of(2))
    optimizer = ZeroOptimizer(twin.communicator, torch.optim.AdamW, lr=0.1, fused=True)
    for state in ("made", "there"):
        twin.backward()
        own = Bucket.begins
        with mock.patch.object(Bucket, "begins", autospec=True, side_effect=own) as looks:
            optimizer.step()
        assert 1 <= looks.call_count <= len(optimizer._buckets), state
    assert max(len(bucket.segments) for bucket in optimizer._buckets) > 3
