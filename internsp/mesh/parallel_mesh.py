"""Ranks -> named groups. A mesh is made once and passed in; nothing here is global (WP-8).

Which ranks belong together is :mod:`internsp.mesh.shape`'s arithmetic.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from internsp import accelerator
from internsp.config.sections import MAX_TIMEOUT_SECONDS
from internsp.errors import MachineError, MeshError
from internsp.mesh import fresh_store
from internsp.mesh.axes import Axes, degrees_of
from internsp.mesh.shape import AxisShape, MeshShape

_AXIS_GROUPS = ("weight", "gradient", "replica", "zero", "zero_replica")


@dataclass(frozen=True, eq=False)
class WeightAxis:
    """One rank's place on an axis along which weights are cut, and the groups around it.

    Attributes:
        name: ``"weight"`` or ``"expert_weight"``.
        size, rank: of the weight group, over which a weight is cut.
        replicas, replica_rank: of those that hold the same shard.
        zero, zero_rank: of those over which its optimizer state is cut.
        expert, expert_rank: of those that own different weights of the same names.
        weight_group: for gathers.
        gradient_group: the same ranks, for reductions: gathers and reductions each have an order
            of their own, which all ranks share (WP-2), and do not wait in one queue.
        replica_group, zero_group, zero_replica_group: process groups.
        param_mesh: where its parameters live as ``DTensor``: dimensions ``("replica", "weight")``,
            or ``("replica", "expert", "weight")`` where ``expert`` is above 1, or ``("replica",
            "tensor", "weight")`` where layers are tensor parallel.
    """

    name: str
    shape: AxisShape
    rank: int
    expert_rank: int
    replica_rank: int
    weight_group: dist.ProcessGroup
    gradient_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    zero_group: dist.ProcessGroup
    zero_replica_group: dist.ProcessGroup
    param_mesh: DeviceMesh

    @classmethod
    def create(
        cls,
        name: str,
        shape: AxisShape,
        inside: int,
        stage: torch.Tensor,
        groups: dict[str, dist.ProcessGroup],
        device_type: str,
    ) -> WeightAxis:
        """Not collective: the groups exist.

        Args:
            inside: this rank's place in its stage.
            stage: global ranks ``[ranks of the stage, tensor]``.
        """
        replica_rank, expert_rank, rank = shape.place(inside)
        tensor = stage.shape[1]
        between = "expert" if shape.expert > 1 else "tensor"
        names = ["replica", between, "weight"]
        # Tensor ranks stand before weight ranks: a layer is cut by them first.
        grid = stage.view(shape.replicas, shape.expert, shape.size, tensor).permute(0, 1, 3, 2)
        grid = grid.reshape(shape.replicas, -1, shape.size)
        if grid.shape[1] == 1:
            names, grid = ["replica", "weight"], grid[:, 0]
        mesh = DeviceMesh.from_group(
            [groups[n] for n in names], device_type, mesh=grid, mesh_dim_names=tuple(names)
        )
        by_field = {f"{n}_group": groups[n] for n in _AXIS_GROUPS}
        return cls(name, shape, rank, expert_rank, replica_rank, param_mesh=mesh, **by_field)

    @property
    def size(self) -> int:
        """Ranks over which a weight is cut."""
        return self.shape.size

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard."""
        return self.shape.replicas

    @property
    def expert(self) -> int:
        """Ranks that own different weights of the same names."""
        return self.shape.expert

    @property
    def zero(self) -> int:
        """Replicas over which optimizer state is cut."""
        return self.shape.zero

    @property
    def zero_rank(self) -> int:
        """Place in the ZeRO group."""
        return self.replica_rank % self.zero

    def placements(self, own: Placement, tensor: Placement | None = None) -> list[Placement]:
        """Of a parameter that lies ``own`` on the weight axis.

        Experts of different ranks follow each other on dimension 0.

        Args:
            tensor: how ``parallelize_module`` has placed it; ``None``: it has not.
        """
        between: list[Placement] = []
        if self.expert > 1:
            between = [Shard(0)]
        elif self.param_mesh.ndim > 2:
            between = [tensor or Replicate()]
        return [Replicate(), *between, own]


Asked = tuple[int | str | tuple[int, ...] | None, ...]
DEGREES = (
    "weight", "sequence", "pipeline", "zero", "expert_weight", "expert", "tensor", "ring", "near",
    "order",
)  # fmt: skip
"""What is asked for, in this order; ``order`` by a user's DeviceMesh alone."""
"""The arguments of :class:`MeshShape` after the world's size."""

_GROUPS = (
    "stage", "weight", "gradient", "replica", "zero", "zero_replica", "sequence", "data",
    "pipeline", "expert", "tensor", "model", "heads", "ring",
)  # fmt: skip


class ParallelMesh:
    """One rank's place in every group. Make it with :meth:`create` or :meth:`from_device_mesh`,
    on all ranks together.

    Attributes:
        shape: the degrees, a :class:`MeshShape`.
        rank, world_size: of the default process group.
        tensor, tensor_rank, tensor_group: of the ranks over which ``parallelize_module`` cuts the
            layers.
        stage_ranks, model_ranks: global ranks of :attr:`stage_group`, and of ``model_group``, which
            is the stages of all tensor ranks together.
        ring: of the ranks of a sequence, those between which keys and values travel.
        near: whose ranks of a sequence are neighbors, ``heads`` or ``ring``.
        sequence_axes: both, and which ranks these are (``internsp.mesh.sequence``).
        heads_group, ring_group: a sequence's ranks that share heads, which hold neighboring
            positions, and its ranks with the same heads.
        dense, experts: weight axes (:class:`WeightAxis`); the same object where experts have none
            of their own.
        weight, sequence, pipeline, data, replicas, zero: degrees (of the dense axis).
        weight_rank, sequence_rank, pipeline_rank, data_rank, replica_rank, zero_rank: places.
        weight_group, gradient_group, sequence_group, data_group, replica_group, zero_group,
            zero_replica_group, stage_group, pipeline_group: process groups.
        expert, expert_rank, expert_group: of the ranks that own different experts and exchange
            tokens.
        timeout_seconds: after which a collective of these groups fails.
        param_mesh: of the dense axis.
        device: where this rank computes.
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
        self._near: dict[tuple[str, int], dist.ProcessGroup] = {}
        self.world_size = shape.world_size
        self.weight, self.sequence, self.pipeline = shape.weight, shape.sequence, shape.pipeline
        self.data, self.replicas, self.zero = shape.data, shape.replicas, shape.zero_size
        self.pipeline_rank, inside, self.tensor_rank = shape.place(rank)
        self.tensor = shape.tensor
        self.sequence_rank, self.data_rank = inside % shape.sequence, inside // shape.sequence
        self.stage_group = groups["stage"]
        self.sequence_group = groups["sequence"]
        self.ring, self.near, self.sequence_axes = shape.ring, shape.near, shape.sequence_axes
        self.heads_group, self.ring_group = groups["heads"], groups["ring"]
        self.data_group = groups["data"]
        self.pipeline_group = groups["pipeline"]
        self.tensor_group, self.model_group = groups["tensor"], groups["model"]
        self.stage_ranks = _with(rank, shape.ranks("stage"))
        self.model_ranks = _with(rank, shape.ranks("model"))
        stage = shape.grid[self.pipeline_rank]
        self.dense = WeightAxis.create("weight", shape.dense, inside, stage, groups, device.type)
        self.experts = self.dense
        if shape.separate:
            own = {name: groups[f"expert_{name}"] for name in _AXIS_GROUPS}
            own["expert"] = groups["expert"]
            self.experts = WeightAxis.create(
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
    ) -> ParallelMesh:
        """Make the groups. Collective: all ranks call it with the same arguments; blocks.

        Args:
            weight: ranks over which a weight is cut.
            sequence: ranks over which a sequence is cut; independent of ``weight``.
            pipeline: pipeline stages.
            zero: replicas over which optimizer state is cut (``None``: all of them; fewer is
                ZeRO-1.5).
            device_type: ``"cpu"``, or the type of torch's accelerator here (``"cuda"``, ``"xpu"``,
                a plugin's); ``None`` takes the accelerator where there is one.
            timeout_seconds: after which a collective of these groups fails.
            expert_weight: ranks over which the weights of experts are cut (``None``: ``weight``).
            expert: expert parallel degree: so many ranks own different experts.
            tensor: ranks over which torch's ``parallelize_module`` will cut layers (on
                :attr:`tensor_mesh`, before ``internsp.parallelize``): neighbors.
            ring: ranks of a sequence over which attention itself is cut, by positions; the others,
                ``sequence / ring`` for each, share its heads.
            near: which of these are neighbors, on the fastest links: the ranks that share
                ``heads``, or those of a ``ring``. Of no effect where one of the two is one rank.

        Raises:
            MeshError: on every rank, when a degree does not fit or ranks disagree, or when no
                process group exists and ``RANK`` is not set.
        """
        _check_timeout(timeout_seconds)
        if not dist.is_initialized():
            _initialize(device_type, timeout_seconds)
        device = _device(device_type)
        degrees = (weight, sequence, pipeline, zero, expert_weight, expert, tensor, ring, near)
        return cls._made(degrees, device, timeout_seconds)

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
    ) -> ParallelMesh:
        """:meth:`create` with the degrees of ``device_mesh``. Collective; blocks.

        Each axis is named by ``weight``, ``replicas``, ``pipeline`` or ``tensor`` (on which
        ``parallelize_module`` cuts the layers). Sequences are cut in a factoring of their own, so
        ``sequence`` may name what ``weight`` or ``replicas`` name too; along an axis that it names
        alone weights are replicated. Several axes are given as a tuple.

        The axes may stand in any order, so that a group's ranks need not be neighbors; along each
        of them ranks count up. One of ``sequence`` and ``weight`` is a part of the other. With axes
        ``("pp", "dp", "sp")``::

            from_device_mesh(m, pipeline="pp", replicas="dp", weight="sp", sequence="sp")
            from_device_mesh(m, pipeline="pp", weight=("dp", "sp"), sequence="sp")
            from_device_mesh(m, pipeline="pp", replicas="dp", weight="sp", sequence=("dp", "sp"))

        Process groups are new ones, since gathers and reductions each need an order of their own;
        ``device_mesh`` stays as it is, and parameters live on :attr:`param_mesh`, not on it.

        Args:
            device_mesh: of all ranks, with names of its axes. Its device type is taken.
            weight, replicas, sequence, pipeline, tensor: names of axes; ``()`` for none.
            zero, timeout_seconds, expert_weight, expert, ring, near: see :meth:`create`.

        Raises:
            MeshError: on every rank: an axis is named twice, absent or left without a meaning, the
                mesh lacks ranks, or they do not count up along an axis; and as :meth:`create`.
        """
        _check_timeout(timeout_seconds)
        kind = getattr(device_mesh, "device_type", None)
        if not dist.is_initialized():
            _initialize(kind, timeout_seconds)
        axes = {
            "weight": weight, "replicas": replicas, "sequence": sequence, "pipeline": pipeline,
            "tensor": tensor,
        }  # fmt: skip
        asked: Asked | MeshError
        try:
            found, order = degrees_of(device_mesh, dist.get_world_size(), axes)
            *degrees, tensors = found.values()
            asked = (*degrees, zero, expert_weight, expert, tensors, ring, near, order)
        except MeshError as error:
            asked = error
        return cls._made(asked, _device(kind), timeout_seconds)

    @classmethod
    def _made(
        cls, asked: Asked | MeshError, device: torch.device, timeout_seconds: float
    ) -> ParallelMesh:
        """What all ranks ask for, if it is the same and possible; otherwise all of them raise."""
        world, rank = dist.get_world_size(), dist.get_rank()
        shape = None
        if not isinstance(asked, MeshError):
            try:
                shape = MeshShape(world, *asked)  # type: ignore[arg-type]
            except MeshError as error:
                asked = error
        _agree(str(asked) if isinstance(asked, MeshError) else asked, rank)
        if shape is None:
            assert isinstance(asked, MeshError), "without a shape there is a mistake"
            raise asked
        groups = _make_groups(shape, timedelta(seconds=timeout_seconds))
        return cls(shape, rank, device, groups, timeout_seconds)

    def renew_pipeline_group(self) -> None:
        """Make ``pipeline_group`` anew, after a step whose messages may still be on their way.

        Collective over all ranks. The old one is destroyed.
        """
        if self.pipeline == 1:
            return
        old, timeout = self.pipeline_group, timedelta(seconds=self.timeout_seconds)
        ranks = self.shape.ranks("pipeline")
        self.pipeline_group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
        dist.destroy_process_group(old)

    def next_model(self) -> int:
        """A number for one more model on this mesh: the same on all ranks of a stage."""
        self._models += 1
        return self._models

    def near_group(self, axis: WeightAxis, ranks: int) -> dist.ProcessGroup:
        """``ranks`` neighbors of a weight group, this rank among them.

        Collective over them where it is the first call with these arguments.
        """
        if (axis.name, ranks) not in self._near:
            everyone = dist.get_process_group_ranks(axis.weight_group)
            first = axis.rank // ranks * ranks
            timeout = timedelta(seconds=self.timeout_seconds)
            self._near[axis.name, ranks] = dist.new_group(
                everyone[first : first + ranks], timeout=timeout, use_local_synchronization=True
            )
        return self._near[axis.name, ranks]

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """What ``parallelize_module`` takes: the tensor ranks.

        Raises:
            MeshError: there is but one.
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
        """Groups in whose collectives a forward or backward may wait, each once."""
        groups = [self.sequence_group, self.heads_group, self.ring_group, self.expert_group]
        for axis in self.axes:
            groups += [axis.weight_group, axis.gradient_group, axis.replica_group]
        return list(dict.fromkeys([*groups, *self._near.values()]))

    @property
    def stage_groups(self) -> list[dist.ProcessGroup]:
        """Groups of several ranks of this rank's stage, each once."""
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


def _with(rank: int, groups: list[list[int]]) -> list[int]:
    return next(group for group in groups if rank in group)


def _make_groups(shape: MeshShape, timeout: timedelta) -> dict[str, dist.ProcessGroup]:
    """Every named group of this rank; no message ever passes in one of a single rank."""
    names = [*_GROUPS, *(f"expert_{name}" for name in _AXIS_GROUPS if shape.separate)]
    groups: dict[str, dist.ProcessGroup] = {}
    alone: dist.ProcessGroup | None = None
    for name in names:  # the same order on all ranks: making a group is collective
        ranks = shape.ranks(name)
        if name == "model" and shape.tensor == 1:
            groups[name] = groups["stage"]
            continue
        if name == "heads" and shape.ring == 1:
            groups[name] = groups["sequence"]
            continue
        if len(ranks[0]) > 1:
            groups[name], _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
            continue
        if alone is None:  # each rank makes its own; as a collective it would be one for each rank
            own = [dist.get_rank()]
            alone = dist.new_group(own, timeout=timeout, use_local_synchronization=True)
        groups[name] = alone
    return groups


def _initialize(device_type: str | None, timeout_seconds: float) -> None:
    if "RANK" not in os.environ:
        raise MeshError(
            "no process group: start the program with torchrun or `internsp train`, or call "
            "torch.distributed.init_process_group first"
        )
    backend = dist.get_default_backend_for_device(_device(device_type))
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if fresh_store.is_shared():
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            store = fresh_store.fresh(store, rank, world_size, timeout_seconds)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        else:
            dist.init_process_group(backend, timeout=timeout)
    except (dist.DistError, ValueError) as error:  # of the store: RANK, MASTER_ADDR and kin
        variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        told = ", ".join(f"{name}={os.environ.get(name)}" for name in variables)
        raise MeshError(
            f"this rank could not meet the others ({told}): {str(error).splitlines()[0]}; start "
            "all ranks with one launcher, such as torchrun"
        ) from error


def _check_timeout(seconds: float) -> None:
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:  # NaN is not, either
        raise MeshError(
            f"timeout_seconds = {seconds} must be above 0 and at most {MAX_TIMEOUT_SECONDS} (30 "
            "days): the clocks of collectives overflow beyond it, and wait without an end"
        )


def _device(device_type: str | None) -> torch.device:
    if device_type is None:
        device_type = accelerator.kind()
    if device_type == accelerator.HOST:
        return torch.device(device_type)
    if not accelerator.count(device_type):
        raise MachineError(
            f"device_type = {device_type!r}: torch finds no {device_type.upper()} device on this "
            "machine; use 'cpu', or install torch's plugin for it"
        )
    return accelerator.local_device(device_type)


def _agree(asked: Asked | str, rank: int) -> None:
    """All ranks must ask for the same mesh; otherwise every rank raises, none waits (WP-10).

    Args:
        asked: degrees, or what is wrong with what this rank was given.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, asked)
    odd = [r for r, other in enumerate(everyone) if other != everyone[0]]
    if odd:
        first, other = everyone[0], everyone[odd[0]]
        names = DEGREES if isinstance(first, str) else DEGREES[: len(first)]
        told = [f"({a})" if isinstance(a, str) else a for a in (first, other)]
        raise MeshError(
            f"ranks ask for different meshes: rank 0 ({', '.join(names)}) = {told[0]}, but rank "
            f"{odd[0]} {told[1]} (this is rank {rank}); start every rank with the same "
            "configuration"
        )
