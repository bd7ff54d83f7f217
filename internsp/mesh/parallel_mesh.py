"""Process groups of all parallel axes. A mesh is made once and passed in; none is global (WP-8).

:mod:`internsp.mesh.shape` computes which ranks form each group.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from datetime import timedelta
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from internsp.base import accelerator
from internsp.config.sections import MAX_TIMEOUT_SECONDS
from internsp.errors import MachineError, MeshError
from internsp.mesh import fresh_store
from internsp.mesh.axes import Axes, degrees_of
from internsp.mesh.owned import MeshUsers, OwnedGroups, collect_garbage, has_many_groups
from internsp.mesh.shape import AxisShape, MeshShape

_AXIS_GROUPS = ("weight", "gradient", "replica", "zero", "zero_replica")


class WeightAxis:
    """One rank's coordinates on an axis over which weights are sharded, with its process groups.

    Attributes:
        name: ``"weight"`` or ``"expert_weight"``.
        size, rank: of the weight group, over which a weight is sharded.
        replicas, replica_rank: of the ranks that hold the same shard.
        zero, zero_rank: of the ranks over which a shard's optimizer state is sharded.
        expert, expert_rank: of the ranks that hold different experts under the same names.
        weight_group: process group for all-gathers.
        gradient_group: the same ranks, for reductions: all-gathers run in one order on all ranks,
            reductions in another (WP-2), and neither waits in the other's queue.
        replica_group, zero_group, zero_replica_group: process groups.
        param_mesh: the mesh of the parameters' ``DTensor``: dimensions ``("replica", "weight")``,
            or ``("replica", "expert", "weight")`` where ``expert`` is above 1, or ``("replica",
            "tensor", "weight")`` where layers are tensor parallel.

    A weight carries its axis: its layout, messages, sums, norm and checkpoint follow from it.

    Args:
        inside: this rank's index in its stage.
        stage: global ranks ``[ranks of the stage, tensor]``.
        groups: process groups that exist, by name: making the axis is not collective.
    """

    def __init__(
        self,
        name: str,
        shape: AxisShape,
        inside: int,
        stage: torch.Tensor,
        groups: dict[str, dist.ProcessGroup],
        device_type: str,
    ) -> None:
        self.name, self.size, self.replicas = name, shape.size, shape.replicas
        self.zero, self.expert = shape.zero, shape.expert
        self.replica_rank, self.expert_rank, self.rank = shape.coordinates(inside)
        self.zero_rank = self.replica_rank % shape.zero
        self.weight_group, self.gradient_group = groups["weight"], groups["gradient"]
        self.replica_group = groups["replica"]
        self.zero_group, self.zero_replica_group = groups["zero"], groups["zero_replica"]
        between = "expert" if shape.expert > 1 else "tensor"
        names = ["replica", between, "weight"]
        # Tensor ranks come before weight ranks: a layer is sharded over them first.
        grid = shape.factored(stage.t()).permute(1, 2, 0, 3)
        grid = grid.reshape(shape.replicas, -1, shape.size)
        if grid.shape[1] == 1:
            names, grid = ["replica", "weight"], grid[:, 0]
        self.param_mesh = DeviceMesh.from_group(
            [groups[n] for n in names], device_type, mesh=grid, mesh_dim_names=tuple(names)
        )

    def data_ranks(self) -> list[int]:
        """Global ranks over which gradients of this rank's weights are summed, its own among
        them."""
        own = self.param_mesh.get_coordinate()
        assert own is not None, "this rank is on its own mesh"
        ranks = self.param_mesh.mesh
        return (ranks if ranks.ndim == 2 else ranks[:, own[1]]).flatten().tolist()

    def placements(self, own: Placement, tensor: Placement | None = None) -> list[Placement]:
        """Placements on :attr:`param_mesh` of a parameter.

        Experts of different ranks are concatenated on dimension 0.

        Args:
            own: its placement on the weight axis.
            tensor: the placement that ``parallelize_module`` has given it; ``None`` if none.
        """
        between: list[Placement] = []
        if self.expert > 1:
            between = [Shard(0)]
        elif self.param_mesh.ndim > 2:
            between = [tensor or Replicate()]
        return [Replicate(), *between, own]


RequestedDegrees = tuple[int | str | tuple[int, ...] | None, ...]
"""The arguments of :class:`MeshShape` between ``world_size`` and ``machines``, in order; ``order``
is only set by a user's DeviceMesh."""

_GROUPS = (
    "stage", "weight", "gradient", "replica", "zero", "zero_replica", "sequence", "data",
    "pipeline", "expert", "tensor", "model", "heads", "ring",
)  # fmt: skip

_LIKE = {
    "model": "stage", "data": "stage", "heads": "sequence", "zero": "replica",
    "expert_zero": "expert_replica",
}  # fmt: skip
"""Groups that are the other one where both have the same ranks: the program's own order is theirs.
All-gathers and reductions each keep an order, and a group, of their own."""


class ParallelMesh:
    """One rank's coordinates and process groups on every parallel axis.

    Make it with :meth:`create` or :meth:`from_device_mesh`, on all ranks together. It is a context
    manager, which closes it (:meth:`close`); a mesh that is dropped ends as garbage.

    Attributes:
        shape: the degrees, a :class:`MeshShape`.
        rank, world_size: of the default process group.
        tensor, tensor_rank, tensor_group: of the ranks over which ``parallelize_module`` shards
            the layers.
        tensor_ranks: global ranks of :attr:`tensor_group`, by their tensor rank.
        stage_ranks, model_ranks: global ranks of :attr:`stage_group`, and of ``model_group``,
            which joins the stages of all tensor ranks.
        ring: number of a sequence's ranks between which keys and values are sent.
        near: which of a sequence's groups are neighboring ranks, ``heads`` or ``ring``.
        sequence_axes: how a sequence's ranks are numbered (``internsp.mesh.sequence``).
        heads_group, ring_group: a sequence's ranks that share heads, which hold neighboring
            positions, and its ranks with the same heads.
        dense, experts: weight axes (:class:`WeightAxis`); the same object unless experts have an
            axis of their own.
        weight, sequence, pipeline, data, replicas, zero: degrees (of the dense axis).
        weight_rank, sequence_rank, pipeline_rank, data_rank, replica_rank, zero_rank: this rank's
            coordinates.
        weight_group, gradient_group, sequence_group, data_group, replica_group, zero_group,
            zero_replica_group, stage_group, pipeline_group: process groups.
        expert, expert_rank, expert_group: of the ranks that hold different experts and exchange
            tokens.
        timeout_seconds: timeout of a collective in these groups.
        pairs: by group name, messages between pairs on the host that this rank has begun: gloo's
            own count of a group's collectives has them, too.
        param_mesh: of the dense axis.
        device: the device on which this rank computes.
        is_closed: whether :meth:`close` has ended the groups, which cannot be read any more.
    """

    def __init__(
        self,
        shape: MeshShape,
        rank: int,
        device: torch.device,
        groups: dict[str, dist.ProcessGroup],
        timeout_seconds: float = 300.0,
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.device = device
        self.timeout_seconds = timeout_seconds
        self._models = 0
        self.users = MeshUsers()
        self.pairs: Counter[str] = Counter()
        self.is_closed = False
        self._near_groups: dict[tuple[str, int, str], dist.ProcessGroup] = {}
        self._reading_meshes: dict[tuple[str, bool], DeviceMesh] = {}
        self.world_size = shape.world_size
        self.weight, self.sequence, self.pipeline = shape.weight, shape.sequence, shape.pipeline
        self.data, self.replicas, self.zero = shape.data, shape.replicas, shape.zero_size
        self.pipeline_rank, inside, self.tensor_rank = shape.coordinates(rank)
        self.tensor = shape.tensor
        self.sequence_rank, self.data_rank = inside % shape.sequence, inside // shape.sequence
        self.stage_group = groups["stage"]
        self.sequence_group = groups["sequence"]
        self.ring, self.near, self.sequence_axes = shape.ring, shape.near, shape.sequence_axes
        self.heads_group, self.ring_group = groups["heads"], groups["ring"]
        self.data_group = groups["data"]
        self.pipeline_group = groups["pipeline"]
        self.tensor_group, self.model_group = groups["tensor"], groups["model"]
        self.tensor_ranks: list[int] = shape.grid[self.pipeline_rank, inside].tolist()
        self.stage_ranks = next(r for r in shape.ranks("stage") if rank in r)
        self.model_ranks = next(r for r in shape.ranks("model") if rank in r)
        stage = shape.grid[self.pipeline_rank]
        self.dense = WeightAxis("weight", shape.dense, inside, stage, groups, device.type)
        self.experts = self.dense
        if shape.separate:
            own = {name: groups[f"expert_{name}"] for name in _AXIS_GROUPS}
            own["expert"] = groups["expert"]
            if shape.experts_over_tensor:
                inside, stage = inside * self.tensor + self.tensor_rank, stage.reshape(-1, 1)
            self.experts = WeightAxis(
                "expert_weight", shape.experts, inside, stage, own, device.type
            )
        dense, experts = self.dense, self.experts
        self.weight_rank, self.replica_rank = dense.rank, dense.replica_rank
        self.zero_rank = dense.zero_rank
        self.weight_group, self.gradient_group = dense.weight_group, dense.gradient_group
        self.replica_group, self.zero_group = dense.replica_group, dense.zero_group
        self.zero_replica_group, self.param_mesh = dense.zero_replica_group, dense.param_mesh
        self.expert, self.expert_rank = experts.expert, experts.expert_rank
        self.expert_group = groups["expert"]
        # DTensors find the groups by their names.
        self._owned = OwnedGroups(groups.values(), [axis.param_mesh for axis in self.axes])

    @classmethod
    def create(
        cls,
        weight: int = 1,
        sequence: int = 1,
        pipeline: int = 1,
        zero: int | None = None,
        device_type: str | None = None,
        timeout_seconds: float = 300.0,
        *,
        expert_weight: int | None = None,
        expert: int = 1,
        tensor: int = 1,
        ring: int = 1,
        near: str = "heads",
        near_experts: str = "expert_weight",
    ) -> ParallelMesh:
        """Make the groups. Collective: all ranks call it with the same arguments; blocks.

        Args:
            weight: ranks over which a weight is sharded.
            sequence: ranks over which a sequence is split; independent of ``weight``.
            pipeline: pipeline stages.
            zero: replicas that shard optimizer state (``None``: all of them; fewer is ZeRO-1.5).
            device_type: ``"cpu"``, or the type of torch's accelerator here (``"cuda"``, ``"xpu"``,
                a plugin's); ``None`` takes the accelerator where there is one.
            timeout_seconds: timeout of a collective in these groups.
            expert_weight: ranks over which experts' weights are sharded (``None``: ``weight``).
            expert: expert parallel degree: so many ranks hold different experts.
            tensor: neighboring ranks over which torch's ``parallelize_module`` will shard layers
                (on :attr:`tensor_mesh`, before ``internsp.parallelize``).
            ring: ranks of a sequence over which attention itself is split, by positions; for each
                of them, ``sequence / ring`` ranks share its heads.
            near: which ranks are neighbors, on the fastest links: those that share ``heads``, or
                those of a ``ring``. No effect where one of the two degrees is 1.
            near_experts: likewise, the ranks of ``expert_weight``, or the owners, ``expert``.

        Raises:
            MeshError: on every rank, when a degree does not fit or ranks disagree, or when no
                process group exists and ``RANK`` is not set.
        """
        degrees = weight, sequence, pipeline, zero, expert_weight, expert, tensor, ring, near
        return cls._create(lambda: (*degrees, near_experts), device_type, timeout_seconds)

    @classmethod
    def from_device_mesh(
        cls,
        device_mesh: DeviceMesh,
        *,
        weight: Axes,
        replicas: Axes = (),
        sequence: Axes = (),
        pipeline: Axes = (),
        tensor: Axes = (),
        zero: int | None = None,
        timeout_seconds: float = 300.0,
        expert_weight: int | None = None,
        expert: int = 1,
        ring: int = 1,
        near: str = "heads",
        near_experts: str = "expert_weight",
    ) -> ParallelMesh:
        """:meth:`create` with the degrees of ``device_mesh``. Collective; blocks.

        Name each axis in ``weight``, ``replicas``, ``pipeline`` or ``tensor`` (over which
        ``parallelize_module`` shards the layers). Sequences are split independently, so
        ``sequence`` may name axes that ``weight`` or ``replicas`` name too; over an axis that only
        ``sequence`` names, weights are replicated. Several axes are given as a tuple.

        The axes may be in any order, so that a group's ranks need not be neighbors; along each
        axis the ranks must ascend. The axes of ``sequence`` must include those of ``weight``, or
        the other way round. With axes ``("pp", "dp", "sp")``::

            from_device_mesh(m, pipeline="pp", replicas="dp", weight="sp", sequence="sp")
            from_device_mesh(m, pipeline="pp", weight=("dp", "sp"), sequence="sp")
            from_device_mesh(m, pipeline="pp", replicas="dp", weight="sp", sequence=("dp", "sp"))

        New process groups are made, since all-gathers and reductions each need an order of their
        own; ``device_mesh`` is not changed, and parameters are on :attr:`param_mesh`, not on it.

        Args:
            device_mesh: a mesh of all ranks, with names of its axes; its device type is used.
            weight, replicas, sequence, pipeline, tensor: names of axes; ``()`` for none.
            zero, timeout_seconds, expert_weight, expert, ring, near, near_experts: see
                :meth:`create`.

        Raises:
            MeshError: on every rank: an axis is named twice, does not exist or is not named, the
                mesh lacks ranks, or they do not ascend along an axis; and as :meth:`create`.
        """
        axes = {
            "weight": weight, "replicas": replicas, "sequence": sequence, "pipeline": pipeline,
            "tensor": tensor,
        }  # fmt: skip

        def request() -> RequestedDegrees:
            found, order = degrees_of(device_mesh, dist.get_world_size(), axes)
            *degrees, tensors = found.values()
            own = ring, near, near_experts, order
            return (*degrees, zero, expert_weight, expert, tensors, *own)

        kind = getattr(device_mesh, "device_type", None)
        return cls._create(request, kind, timeout_seconds)

    @classmethod
    def _create(
        cls, request: Callable[[], RequestedDegrees], device_type: str | None, seconds: float
    ) -> ParallelMesh:
        """Make the requested mesh if all ranks request the same one and it is possible.

        Collective; blocks.

        Raises:
            MeshError: on every rank otherwise.
        """
        if not isinstance(seconds, Real) or not 0 < seconds <= MAX_TIMEOUT_SECONDS:  # or NaN
            raise MeshError(
                f"timeout_seconds = {seconds!r} must be above 0 and at most {MAX_TIMEOUT_SECONDS} "
                "(30 days): the clocks of collectives overflow beyond it, and wait without an end"
            )
        if not dist.is_initialized():
            _initialize(device_type, seconds)
        device, world, rank = device_of(device_type), dist.get_world_size(), dist.get_rank()
        try:
            requested = request()
            shape = MeshShape(world, *requested)  # type: ignore[arg-type]
            _require_sends(shape, device)
        except MeshError as error:
            _require_same_request(str(error), rank)
            raise
        many, machines = _require_same_request(requested, rank)
        if many:
            collect_garbage()
        shape = replace(shape, machines=dict(enumerate(machines)))
        groups = make_groups(shape, timedelta(seconds=seconds))
        # NCCL makes a communicator in a group's first call, unless the default group was bound to a
        # device, and all its ranks must make that call: with a window or documents not all send.
        if accelerator.backends_of(None).get(device.type) != "gloo":
            for name, ranks in (("ring", shape.ring), ("pipeline", shape.pipeline)):
                if ranks > 1:
                    dist.all_reduce(torch.zeros(1, device=device), group=groups[name])
        return cls(shape, rank, device, groups, seconds)

    def close(self) -> None:
        """End the mesh's process groups, and with them their threads and connections.

        Not collective: each rank closes its mesh when it needs it no more, which is once its calls
        on this mesh have returned. Waits for what is in flight. Groups that the program gave
        (``device_mesh``, its own groups) are not touched; those by which DTensors are found on
        ``param_mesh`` end once no DTensor on it is left. Parameters keep their shards; forwards,
        steps and ``full_tensor()`` on this mesh are refused. A second call does nothing.

        Raises:
            MeshError: a pass of a model on this mesh runs, or has failed on this rank.
        """
        if self.is_closed:
            return
        users = self.users.all()
        for user in users:
            user.before_close()
        if accelerator.has_streams(self.device):
            torch.accelerator.synchronize(self.device)
        self.is_closed = True
        self.users.end(f"this ParallelMesh ({self.describe()}) was closed on rank {self.rank}")
        self._near_groups.clear()
        self._reading_meshes.clear()
        found: set[dist.ProcessGroup] = set()
        with suppress(RuntimeError):  # the program has destroyed the default group, and all others
            found = {group for axis in self.axes for group in axis.param_mesh.get_all_groups()}
        for name in [*vars(self)]:
            if isinstance(vars(self)[name], (dist.ProcessGroup, WeightAxis, DeviceMesh)):
                delattr(self, name)
        self._owned.end(but=found)
        del self._owned  # the others end as garbage

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        """:meth:`close`; not after an exception, which other ranks learn by these groups."""
        if kind is None:
            self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for attributes that do not exist, as after :meth:`close`."""
            if self.__dict__.get("is_closed") and not name.startswith("__"):
                raise self.users.refusal(f"its {name}")
            raise AttributeError(f"a ParallelMesh has no {name!r}")

    def renew_pipeline_group(self) -> None:
        """Replace ``pipeline_group`` after a failed step, whose messages may still arrive.

        Collective over all ranks. The old group is destroyed.
        """
        if self.pipeline == 1:
            return
        old, timeout = self.pipeline_group, timedelta(seconds=self.timeout_seconds)
        ranks = self.shape.ranks("pipeline")
        self.pipeline_group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
        self._owned.add(self.pipeline_group)
        self._owned.end_one(old)

    def next_model(self) -> int:
        """Number of the next model on this mesh, the same on all ranks of a stage."""
        self._models += 1
        return self._models

    def near_group(self, axis: WeightAxis, ranks: int, use: str = "gathers") -> dist.ProcessGroup:
        """Group of ``ranks`` neighbors of a weight group, this rank among them.

        The first call with these arguments is collective over these ranks.

        Args:
            use: each has an order of its own, and a group: ``"gathers"``, ``"sums"``, or ``"far"``,
                the group of the ranks at this rank's place in their near groups.
        """
        if (axis.name, ranks, use) not in self._near_groups:
            everyone = dist.get_process_group_ranks(axis.weight_group)
            first = axis.rank // ranks * ranks
            near = everyone[first : first + ranks]
            own = everyone[axis.rank % ranks :: ranks] if use == "far" else near
            self._near_groups[axis.name, ranks, use] = self._add_group(own)
        return self._near_groups[axis.name, ranks, use]

    def _add_group(self, ranks: list[int]) -> dist.ProcessGroup:
        from internsp.mesh.named_group import new_group

        timeout = timedelta(seconds=self.timeout_seconds)
        group = new_group(ranks, self.model_group.group_name, timeout)
        self._owned.add(group)
        return group

    def reading_mesh(self, axis: WeightAxis, replicas: bool = False) -> DeviceMesh:
        """The dimension of the replicas in ``axis.param_mesh`` alone, or all others, with groups of
        their own in which no pass has anything in flight: data may decide the moment of a read.

        The first call with these arguments is collective over the ranks of the mesh.
        """
        if (axis.name, replicas) not in self._reading_meshes:
            from internsp.mesh.named_group import reading_mesh

            made = reading_mesh(axis.param_mesh, axis.replica_rank, replicas, self._add_group)
            self._reading_meshes[axis.name, replicas] = made
        return self._reading_meshes[axis.name, replicas]

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The mesh of the tensor ranks, for ``parallelize_module``.

        Raises:
            MeshError: the tensor degree is 1.
        """
        if self.tensor == 1:
            raise MeshError("this mesh has no tensor ranks: give ParallelMesh.create(tensor=...)")
        return self.param_mesh["tensor"]

    @property
    def axes(self) -> list[WeightAxis]:
        """Each weight axis once."""
        return list(dict.fromkeys((self.dense, self.experts)))

    @property
    def pass_groups(self) -> list[dist.ProcessGroup]:
        """Process groups whose collectives a forward or backward may wait for, each once."""
        groups = [self.sequence_group, self.heads_group, self.ring_group, self.expert_group]
        for axis in self.axes:
            groups += [axis.weight_group, axis.gradient_group, axis.replica_group]
        groups += [g for mesh in self._reading_meshes.values() for g in mesh.get_all_groups()]
        return list(dict.fromkeys([*groups, *self._near_groups.values()]))

    @property
    def stage_groups(self) -> list[dist.ProcessGroup]:
        """Process groups within this rank's stage that have several ranks, each once."""
        groups = [self.stage_group, self.data_group, *self.pass_groups]
        for axis in self.axes:
            groups += [axis.zero_group, axis.zero_replica_group]
        return [group for group in dict.fromkeys(groups) if group.size() > 1]

    def describe(self) -> str:
        """The degrees in one line, for logs."""
        s, e = self.shape, self.shape.experts
        line = (
            f"world {s.world_size} = pipeline {s.pipeline} x data {s.data} x sequence {s.sequence}"
            f" = pipeline {s.pipeline} x replicas {s.replicas} x weight {s.weight}"
            f" (ZeRO over {s.zero_size})"
        )
        if s.ring > 1:
            line += f"; sequence {s.sequence_axes}"
        if s.tensor > 1:
            line += f", each x tensor {s.tensor}"
        if s.separate:
            line += (
                f" = pipeline {s.pipeline} x expert replicas {e.replicas} x expert {e.expert} x "
                f"expert weight {e.size} (ZeRO over {e.zero})"
            )
        return line


def make_groups(
    shape: MeshShape,
    timeout: timedelta,
    make: Callable[..., Any] = dist.new_subgroups_by_enumeration,
) -> dict[str, dist.ProcessGroup]:
    """Make every named group of this rank. Collective over all ranks.

    Groups of one rank share one process group, which never carries a message, and so do those of
    equal ranks whose messages have one order (a communicator costs a device memory).

    Args:
        make: gives this rank's group of those whose ranks are listed, as torch's function does.
    """
    names = [*_GROUPS, *(f"expert_{name}" for name in _AXIS_GROUPS if shape.separate)]
    groups: dict[str, dist.ProcessGroup] = {}
    single_rank_group: dist.ProcessGroup | None = None
    for name in names:  # in the same order on all ranks: making a group is collective
        ranks, like = shape.ranks(name), _LIKE.get(name)
        if like is not None and ranks == shape.ranks(like):
            groups[name] = groups[like]
            continue
        if len(ranks[0]) > 1:
            groups[name], _ = make(ranks, timeout=timeout)
            continue
        if single_rank_group is None:
            # Made by each rank alone; a collective call would make one group for each rank.
            own = [dist.get_rank()]
            single_rank_group = dist.new_group(own, timeout=timeout, use_local_synchronization=True)
        groups[name] = single_rank_group
    return groups


def _initialize(device_type: str | None, timeout_seconds: float) -> None:
    if "RANK" not in os.environ:
        raise MeshError(
            "no process group: start the program with torchrun or `internsp train`, or call "
            "torch.distributed.init_process_group first"
        )
    device, timeout = device_of(device_type), timedelta(seconds=timeout_seconds)
    backend = dist.get_default_backend_for_device(device)
    # Bound, NCCL makes the mesh's communicators by splitting one that exists.
    bound = None if device.type == accelerator.HOST else device
    given: dict[str, Any] = {}
    try:
        if fresh_store.is_shared():
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            store = fresh_store.for_this_start(store, rank, world_size, timeout_seconds)
            given = {"store": store, "rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=timeout, device_id=bound, **given)
    except (dist.DistError, ValueError) as error:  # the store's address: MASTER_ADDR and so on
        variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        settings = ", ".join(f"{name}={os.environ.get(name)}" for name in variables)
        raise MeshError(
            f"this rank could not meet the others ({settings}): {str(error).splitlines()[0]}; "
            "start all ranks with one launcher, such as torchrun"
        ) from error


def _require_sends(shape: MeshShape, device: torch.device) -> None:
    """Refuse what goes from rank to rank where gloo would read a device's memory as the host's."""
    degree = "pipeline" if shape.pipeline > 1 else "ring" if shape.ring > 1 else None
    streams = accelerator.has_streams(device)
    if degree and streams and accelerator.backends_of(None).get(device.type) == "gloo":
        raise MeshError(
            f"{degree}={getattr(shape, degree)} sends tensors of {device} from rank to rank, which "
            "gloo cannot: leave out init_process_group, or call it with torch's backend for "
            f'{device.type}, or make the mesh with device_type="cpu"'
        )


def device_of(device_type: str | None) -> torch.device:
    """This rank's device of a type; ``None``: of the accelerator, where there is one."""
    device_type = device_type or accelerator.default_device_type()
    if device_type == accelerator.HOST:
        return torch.device(device_type)
    if not accelerator.device_count(device_type):
        raise MachineError(
            f"device_type = {device_type!r}: torch finds no {device_type.upper()} device on this "
            "machine; use 'cpu', or install torch's plugin for it"
        )
    return accelerator.local_device(device_type)


def machine() -> str:
    """What the ranks of this rank's machine have in common: torchrun's number, or the name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def _require_same_request(requested: RequestedDegrees | str, rank: int) -> tuple[bool, list[str]]:
    """Check that all ranks request the same mesh. Collective; blocks.

    Args:
        requested: degrees, or the error text for the arguments of this rank.

    Returns:
        Whether some rank has many groups; and each rank's machine.

    Raises:
        MeshError: requests differ; raised on every rank, so that none waits (WP-10).
    """
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (requested, has_many_groups(), machine()))
    everyone = [request for request, _, _ in told]
    odd = [r for r, other in enumerate(everyone) if other != everyone[0]]
    if odd:
        first, other = everyone[0], everyone[odd[0]]
        names = [field.name for field in fields(MeshShape)][1:-1]
        names = names if isinstance(first, str) else names[: len(first)]
        texts = [f"({a})" if isinstance(a, str) else a for a in (first, other)]
        raise MeshError(
            f"ranks ask for different meshes: rank 0 ({', '.join(names)}) = {texts[0]}, but rank "
            f"{odd[0]} {texts[1]} (this is rank {rank}); start every rank with the same "
            "configuration"
        )
    return any(many for _, many, _ in told), [name for _, _, name in told]
