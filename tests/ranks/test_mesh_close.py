"""The end of a mesh: closed, left, or dropped; its threads end, and nothing hangs or is lost."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import internsp
from internsp.errors import MeshError
from internsp.mesh import ParallelMesh
from internsp.mesh.owned import MANY_GROUPS, _forget_meshes
from internsp.optim import ZeroOptimizer
from tests.support.compare import check, parameters
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks
from tests.support.versions import since


def threads() -> set[str]:
    """The threads of this process, those of C++ libraries among them."""
    return set(os.listdir("/proc/self/task"))


def left(before: set[str], seconds: float = 10.0, but: int = 0) -> set[str]:
    """The threads that have come since and do not end, if they are more than ``but``.

    Linux lists a thread for a moment after another one has joined it: until it is off its core.
    """
    end = time.monotonic() + seconds
    while len(found := threads() - before) > but and time.monotonic() < end:
        time.sleep(0.01)
    return found


def create(**degrees: Any) -> ParallelMesh:
    return ParallelMesh.create(**({"weight": 2} | degrees), device_type="cpu", timeout_seconds=30)


def twin_on(mesh: ParallelMesh, **config: Any) -> Twin:
    return Twin(partial(Tiny, layers=2), mesh, **config)


def trained(mesh: ParallelMesh) -> Twin:
    twin = twin_on(mesh)
    optimizer = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1)
    twin.ours(*twin.batch()[1]).backward()
    optimizer.step()
    return twin


@ranks(2, fresh=True)
def test_a_closed_mesh_ends_its_threads_and_connections() -> None:
    trained(create()).communicator.mesh.close()  # the threads of a first use
    gc.collect()
    before = threads()
    for number in range(1, 4):
        with create() as mesh:
            trained(mesh)
            assert threads() - before
        assert mesh.is_closed
        mesh.close()  # once more
        gc.collect()
        # Before 2.13 torch keeps the mesh of a DTensor for ever once that is detached: two groups.
        kept = 0 if since("2.13") else 6 * number
        assert len(left(before, but=kept)) <= kept


@pytest.mark.thorough(4)
@ranks(2, fresh=True)
def test_dropped_meshes_end_their_threads_as_garbage() -> None:
    before = threads()
    for _ in range(4):
        trained(create())
    assert threads() - before
    groups = []
    for _ in range(16):  # many groups are a reason to collect garbage
        trained(create())
        groups.append(len(dist.distributed_c10d._world.pg_map))
    assert max(groups) < groups[0] + MANY_GROUPS, groups


@ranks(2, fresh=True)
def test_ranks_find_parameters_by_one_group_though_one_alone_has_many(rank: int) -> None:
    """torch gives a parameter that is written in place the mesh of an earlier equal one."""
    if rank:
        own = [dist.new_group([1], use_local_synchronization=True) for _ in range(MANY_GROUPS)]
        assert len(own) == MANY_GROUPS
    for _ in range(2):
        model = Tiny(layers=2)
        internsp.parallelize(model, create())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
    found = [each.group_name for p in model.parameters() for each in p.device_mesh.get_all_groups()]
    told: list[Any] = [None, None]
    dist.all_gather_object(told, [name for name in found if name.isdigit()])
    assert told[0] == told[1] != []


@pytest.mark.thorough(1)
@ranks(2, fresh=True)
def test_a_group_that_a_program_has_kept_outlives_the_mesh(rank: int) -> None:
    group = create().weight_group
    gc.collect()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=group)
    assert total.item() == 3.0
    model = Tiny(layers=2)
    internsp.parallelize(model, create())  # parameters know the mesh, and so does the model
    gc.collect()
    assert model.layers[0].q.weight.full_tensor().shape == (6, 6)  # type: ignore[operator]


def forward(twin: Twin) -> Any:
    return twin.ours(*twin.batch()[1])


USES: dict[str, Callable[[Twin], Any]] = {
    "a forward": forward,
    "full_tensor()": lambda twin: twin.ours.layers[0].q.weight.full_tensor(),
    "full_params()": lambda twin: internsp.full_params(twin.ours).__enter__(),
    "the mesh's group": lambda twin: twin.communicator.mesh.weight_group,
    "another model": lambda twin: internsp.parallelize(Tiny(layers=2), twin.communicator.mesh),
}


@ranks(2, fresh=True)
def test_what_needs_a_closed_mesh_is_refused_by_name_and_parameters_keep_their_shards(
    rank: int,
) -> None:
    mesh = create()
    twin = trained(mesh)
    optimizer = ZeroOptimizer(twin_on(mesh).communicator, torch.optim.SGD, lr=0.1)
    held = {n: p.to_local().clone() for n, p in twin.ours.named_parameters()}
    mesh.close()
    for name, use in USES.items():
        try:
            raises(MeshError, partial(use, twin), f"was closed on rank {rank}", "make a new mesh")
        except BaseException as error:
            raise AssertionError(name) from error
    raises(MeshError, optimizer.step, "was closed")
    for name, parameter in twin.ours.named_parameters():
        assert torch.equal(parameter.to_local(), held[name]), name
    again = twin_on(create())
    again.backward()
    again.check_gradients("on a new mesh, as the text says")
    with pytest.raises(AttributeError, match="a ParallelMesh has no 'wieght_group'"):
        getattr(create(), "wieght_group")  # noqa: B009 - misspelled on purpose


@pytest.mark.thorough(1)
@ranks(2, fresh=True)
def test_each_rank_closes_when_it_has_done_and_what_is_in_flight_arrives(rank: int) -> None:
    mesh, other = create(), create()
    twin = twin_on(mesh)
    saved = parameters(twin.plain)
    twin.communicator.prefetch_all()  # gathers are in flight
    if rank == 0:
        mesh.close()
    with other:  # a second mesh goes on
        second = twin_on(other)
        second.backward()
        second.check_gradients("on another mesh")
    if rank == 1:
        mesh.close()
    check(parameters(twin.plain), saved, "the plain model")


@ranks(2, fresh=True)
def test_a_pass_that_runs_or_has_failed_is_not_cut_off(rank: int) -> None:
    mesh = create()
    twin = twin_on(mesh)

    def closing(*_: Any) -> None:
        mesh.close()

    hook = twin.ours.layers[1].register_forward_hook(closing)
    raises(MeshError, partial(forward, twin), f"on rank {rank}", "call it between two passes")
    hook.remove()
    raises(MeshError, mesh.close, "after a pass that failed", "run the next pass")
    twin.backward()  # the remedy: the ranks recover
    twin.check_gradients("after a pass that failed")
    mesh.close()
    assert mesh.is_closed


@pytest.mark.thorough(1)
@ranks(2, fresh=True)
def test_an_exception_leaves_a_mesh_open_by_which_other_ranks_learn_of_it() -> None:
    mesh = create()

    def use() -> None:
        with mesh:
            trained(mesh)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert not mesh.is_closed
    trained(mesh)
    mesh.close()


@ranks(2, fresh=True)
def test_a_mesh_that_is_dropped_or_closed_after_the_default_group_leaves_nothing_behind() -> None:
    unraisable: list[Any] = []
    sys.unraisablehook = unraisable.append
    callbacks = len(gc.callbacks)
    trained(create())
    with create() as mesh:
        trained(mesh)
        dist.destroy_process_group()
    assert mesh.is_closed
    del mesh
    _forget_meshes()
    for _ in range(2):
        gc.collect()
    assert unraisable == []
    assert len(gc.callbacks) == callbacks


@pytest.mark.thorough(1)
@ranks(4, fresh=True)
def test_groups_that_the_program_made_stay(rank: int) -> None:
    given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mesh = ParallelMesh.from_device_mesh(given, weight="shard", replicas="replicate")
    trained(mesh)
    mesh.close()
    total = torch.ones(1)
    for name in ("replicate", "shard"):
        dist.all_reduce(total, group=given.get_group(name))
    assert total.item() == 4.0


@ranks(4, fresh=True)
def test_meshes_of_pipelines_sequences_and_experts_close() -> None:
    for degrees in (
        {"weight": 2, "sequence": 2}, {"weight": 1, "pipeline": 2}, {"weight": 4, "zero": 1},
        {"weight": 4, "expert_weight": 1, "expert": 2}, {"sequence": 4, "ring": 2},
    ):  # fmt: skip
        gc.collect()
        before = threads()
        mesh = create(**degrees)
        assert threads() - before
        mesh.close()
        gc.collect()
        assert not left(before), degrees


@ranks(2, fresh=True)
def test_groups_of_a_mesh_are_made_though_ranks_have_made_others_before() -> None:
    """torch names a group that its ranks make alone by the groups that a process knows."""
    dist.new_group([0])  # a program's own: rank 1 does not count it
    for _ in range(2):
        with create(weight=1) as mesh:
            for replicas in (False, True):
                for size in mesh.reading_mesh(mesh.dense, replicas).get_all_groups():
                    found = torch.ones(1)
                    dist.all_reduce(found, group=size)
                    assert found.item() == size.size()


@ranks(2, fresh=True)
def test_a_group_of_some_ranks_does_not_split_a_communicator_that_is_bound() -> None:
    """Of NCCL's, which a program has bound to its device: a split waits for the whole world."""
    sources: list[object] = []
    make, distributed_c10d._get_split_source = dist.new_group, lambda _: "the world's"  # type: ignore[assignment, return-value]

    def new_group(*given: Any, **options: Any) -> Any:
        sources.append(distributed_c10d._get_split_source(dist.group.WORLD))
        return make(*given, **options)

    with create(weight=2) as mesh:
        dist.new_group = new_group
        found = torch.ones(1)
        dist.all_reduce(found, group=mesh.near_group(mesh.dense, 2))
        assert found.item() == 2
    assert sources == [None]
    assert distributed_c10d._get_split_source(dist.group.WORLD) == "the world's"
