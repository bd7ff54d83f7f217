"""Ranks -> named groups. A mesh is made once and passed in; nothing here is global (WP-8).

The same ranks are factored twice. With ``r = 0 .. world - 1`` inside one pipeline stage::

    data x sequence      r = data_rank * sequence + sequence_rank
    replica x weight     r = replica_rank * weight + weight_rank
    replica              replica_rank = zero_replica_rank * zero + zero_rank

so that the degrees of ``weight`` and ``sequence`` are independent (InternEvo, arXiv 2401.09149).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from internsp.errors import MeshError


@dataclass(frozen=True)
class MeshShape:
    """The degrees of a mesh, checked by arithmetic alone (no process group is needed).

    Raises:
        MeshError: when a degree is not positive or does not divide what it must divide.
    """

    world_size: int
    weight: int = 1
    sequence: int = 1
    pipeline: int = 1
    zero: int | None = None

    def __post_init__(self) -> None:
        mistakes = self.mistakes()
        if mistakes:
            raise MeshError("; ".join(mistakes))

    def mistakes(self) -> list[str]:
        """Every reason why these degrees are impossible; empty when they fit."""
        degrees = {"weight": self.weight, "sequence": self.sequence, "pipeline": self.pipeline}
        found = [f"{k}={v} must be at least 1" for k, v in degrees.items() if v < 1]
        if found:
            return found
        if self.world_size % self.pipeline:
            return [
                f"pipeline={self.pipeline} does not divide the world of {self.world_size} ranks; "
                f"choose one of {_divisors(self.world_size)}"
            ]
        stage = self.world_size // self.pipeline
        for name in ("weight", "sequence"):
            if stage % degrees[name]:
                found.append(
                    f"{name}={degrees[name]} does not divide the {stage} ranks of a pipeline stage "
                    f"(world {self.world_size} / pipeline {self.pipeline}); "
                    f"choose one of {_divisors(stage)}"
                )
        if self.zero is not None and stage % self.weight == 0:
            replicas = stage // self.weight
            if self.zero < 1 or replicas % self.zero:
                found.append(
                    f"zero={self.zero} does not divide the {replicas} replicas of a weight shard; "
                    f"choose one of {_divisors(replicas)}"
                )
        return found

    @property
    def stage_size(self) -> int:
        """Ranks in one pipeline stage."""
        return self.world_size // self.pipeline

    @property
    def data(self) -> int:
        """Different batches processed at a time by one pipeline stage."""
        return self.stage_size // self.sequence

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weight shard."""
        return self.stage_size // self.weight

    @property
    def zero_size(self) -> int:
        """Replicas over which optimizer state is cut."""
        return self.replicas if self.zero is None else self.zero

    def ranks(self, name: str) -> list[list[int]]:
        """Global ranks of every group of one kind, in a fixed order.

        Args:
            name: ``weight, gradient, replica, zero, zero_replica, sequence, data, stage`` or
                ``pipeline``.
        """
        shape = (self.pipeline, self.stage_size)
        world = torch.arange(self.world_size).view(shape)
        if name == "stage":
            grid = world
        elif name == "pipeline":
            grid = world.T
        elif name in ("sequence", "data"):
            grid = world.view(self.pipeline, self.data, self.sequence)
            grid = grid if name == "sequence" else grid.transpose(1, 2)
        else:
            inner = (self.replicas // self.zero_size, self.zero_size, self.weight)
            grid = world.view(self.pipeline, *inner)
            axes = {
                "weight": (0, 1, 2, 3),
                "gradient": (0, 1, 2, 3),
                "zero": (0, 1, 3, 2),
                "zero_replica": (0, 3, 2, 1),
                "replica": (0, 3, 1, 2),
            }[name]
            grid = grid.permute(axes)
            if name == "replica":
                grid = grid.flatten(2)
        return grid.reshape(-1, grid.shape[-1]).tolist()


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


_GROUPS = (
    "stage", "weight", "gradient", "replica", "zero", "zero_replica", "sequence", "data", "pipeline"
)  # fmt: skip


class ParallelMesh:
    """One rank's place in every group. Make it with :meth:`create`, on all ranks together.

    Attributes:
        shape: the degrees, a :class:`MeshShape`.
        rank, world_size: of the default process group.
        weight, sequence, pipeline, data, replicas, zero: degrees.
        weight_rank, sequence_rank, pipeline_rank, data_rank, replica_rank, zero_rank: places.
        weight_group, sequence_group, data_group, replica_group, zero_group,
            zero_replica_group, stage_group, pipeline_group: process groups.
        gradient_group: the ranks of ``weight_group``, for reductions: gathers and reductions each
            have an order of their own, which all ranks share (WP-2), and do not wait in one queue.
        timeout_seconds: after which a collective of these groups fails.
        param_mesh: ``DeviceMesh`` with dimensions ``("replica", "weight")``, on which every
            parameter lives as a ``DTensor``.
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
        self.world_size = shape.world_size
        self.weight, self.sequence, self.pipeline = shape.weight, shape.sequence, shape.pipeline
        self.data, self.replicas, self.zero = shape.data, shape.replicas, shape.zero_size
        inside = rank % shape.stage_size
        self.pipeline_rank = rank // shape.stage_size
        self.weight_rank, self.replica_rank = inside % shape.weight, inside // shape.weight
        self.sequence_rank, self.data_rank = inside % shape.sequence, inside // shape.sequence
        self.zero_rank = self.replica_rank % shape.zero_size
        self.stage_group = groups["stage"]
        self.weight_group = groups["weight"]
        self.gradient_group = groups["gradient"]
        self.replica_group = groups["replica"]
        self.zero_group = groups["zero"]
        self.zero_replica_group = groups["zero_replica"]
        self.sequence_group = groups["sequence"]
        self.data_group = groups["data"]
        self.pipeline_group = groups["pipeline"]
        stage = torch.tensor(shape.ranks("stage")[self.pipeline_rank])
        self.param_mesh = DeviceMesh.from_group(
            [self.replica_group, self.weight_group],
            device.type,
            mesh=stage.view(shape.replicas, shape.weight),
            mesh_dim_names=("replica", "weight"),
        )

    @classmethod
    def create(
        cls,
        weight: int = 1,
        sequence: int = 1,
        pipeline: int = 1,
        zero: int | None = None,
        device_type: str | None = None,
        timeout_seconds: float = 300.0,
    ) -> ParallelMesh:
        """Make the groups. Collective: all ranks call it with the same arguments; blocks.

        Args:
            weight: ranks over which a weight is cut.
            sequence: ranks over which a sequence is cut; independent of ``weight``.
            pipeline: pipeline stages.
            zero: replicas over which optimizer state is cut (``None``: all of them; fewer is
                ZeRO-1.5).
            device_type: ``"cpu"`` or ``"cuda"``; ``None`` takes CUDA where it is available.
            timeout_seconds: after which a collective of these groups fails.

        Raises:
            MeshError: on every rank, when a degree does not fit or ranks disagree, or when no
                process group exists and ``RANK`` is not set.
        """
        if not dist.is_initialized():
            _initialise(device_type, timeout_seconds)
        world, rank = dist.get_world_size(), dist.get_rank()
        shape = MeshShape(world, weight, sequence, pipeline, zero)
        _agree((weight, sequence, pipeline, zero), rank)
        device = _device(device_type)
        timeout = timedelta(seconds=timeout_seconds)
        groups = {}
        for name in _GROUPS:  # the same order on all ranks: making a group is collective
            group, _ = dist.new_subgroups_by_enumeration(shape.ranks(name), timeout=timeout)
            groups[name] = group
        return cls(shape, rank, device, groups, timeout_seconds)

    def describe(self) -> str:
        """The degrees in one line, for logs."""
        s = self.shape
        return (
            f"world {s.world_size} = pipeline {s.pipeline} x data {s.data} x sequence {s.sequence}"
            f" = pipeline {s.pipeline} x replicas {s.replicas} x weight {s.weight}"
            f" (ZeRO over {s.zero_size})"
        )


def _initialise(device_type: str | None, timeout_seconds: float) -> None:
    if "RANK" not in os.environ:
        raise MeshError(
            "no process group: start the program with torchrun or `internsp train`, or call "
            "torch.distributed.init_process_group first"
        )
    backend = "gloo" if _device(device_type).type == "cpu" else "nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))


def _device(device_type: str | None) -> torch.device:
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", 0)) % max(torch.cuda.device_count(), 1)
    return torch.device(device_type, local)


def _agree(degrees: Sequence[int | None], rank: int) -> None:
    """All ranks must ask for the same mesh; otherwise every rank raises, none waits (WP-10)."""
    everyone: list[Sequence[int | None] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(degrees))
    odd = [r for r, d in enumerate(everyone) if d != everyone[0]]
    if odd:
        raise MeshError(
            f"ranks ask for different meshes: rank 0 (weight, sequence, pipeline, zero) = "
            f"{everyone[0]}, but rank {odd[0]} {everyone[odd[0]]} (this is rank {rank}); "
            "start every rank with the same configuration"
        )
