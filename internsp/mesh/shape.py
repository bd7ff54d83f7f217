"""The arithmetic of a mesh: which ranks form each group. Pure; ``ParallelMesh`` makes the groups.

The same ranks are factored three times. With ``r = 0 .. stage - 1`` inside one pipeline stage::

    data x sequence                         r = data_rank * sequence + sequence_rank
    replica x weight                        r = replica_rank * weight + weight_rank
    expert data x expert x expert weight    r = (expert_replica_rank * expert + expert_rank)
                                                * expert_weight + expert_weight_rank
    (the last two changed round, where owners of experts are neighbors: ``near_experts``)
so that the degrees are independent of each other (InternEvo, arXiv 2401.09149). The last two are
weight axes (:class:`AxisShape`): one for dense weights, one for experts.

With tensor parallel modules (torch's ``parallelize_module``), each of ``tensor`` ranks holds a
shard of every layer, and the ranks with the same shard form a stage. Global ranks enumerate
``pipeline x stage x tensor``, unless ``order`` gives another order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch

from internsp.config.degrees import impossible
from internsp.errors import MeshError
from internsp.mesh.sequence import NEAR, SequenceAxes


@dataclass(frozen=True)
class AxisShape:
    """One factoring of a stage's ranks for weights: ``replica x expert x weight``.

    Attributes:
        stage: number of ranks of a pipeline stage.
        size: number of ranks over which a weight is sharded.
        expert: number of ranks with different experts; 1 if all ranks have the same weights.
        zero: number of replicas over which optimizer state is sharded:
            ``replica_rank = zero_replica_rank * zero + zero_rank``.
        owners_near: neighboring ranks have different experts, not shards of one weight.
    """

    stage: int
    size: int
    expert: int
    zero: int
    owners_near: bool = False

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same shard of the same weight."""
        return self.stage // (self.size * self.expert)

    def coordinates(self, inside: int) -> tuple[int, int, int]:
        """(replica rank, expert rank, weight rank) of the rank at index ``inside`` of its stage."""
        grid = self.factored(torch.arange(self.stage))[0]
        return tuple((grid == inside).nonzero()[0].tolist())  # type: ignore[return-value]

    def factored(self, ranks: torch.Tensor) -> torch.Tensor:
        """``[stages, ranks of a stage]`` as ``[stages, replica, expert, weight]``."""
        if self.owners_near:
            return ranks.view(-1, self.replicas, self.size, self.expert).transpose(2, 3)
        return ranks.view(-1, self.replicas, self.expert, self.size)

    def groups(self, world: torch.Tensor, name: str) -> torch.Tensor:
        """Ranks of every group of one kind, one row a group, in a fixed order.

        Args:
            world: global ranks ``[stages, ranks of a stage]``.
            name: ``weight, gradient, expert, replica, zero`` or ``zero_replica``.
        """
        grid = self.factored(world).unflatten(1, (-1, self.zero))
        axes = {
            "weight": (0, 1, 2, 3, 4),
            "gradient": (0, 1, 2, 3, 4),
            "expert": (0, 1, 2, 4, 3),
            "zero": (0, 1, 3, 4, 2),
            "zero_replica": (0, 3, 4, 2, 1),
            "replica": (0, 3, 4, 1, 2),
        }[name]
        grid = grid.permute(axes)
        return grid.flatten(3) if name == "replica" else grid


@dataclass(frozen=True)
class MeshShape:
    """The degrees of a mesh, checked by arithmetic alone (no process group is needed).

    Attributes:
        weight, ..., near_experts: the arguments of :meth:`internsp.ParallelMesh.create`.
        order: the global ranks in the order of ``pipeline x stage x tensor``; ``None``: ascending.
        experts_over_tensor: experts are divided among ``stage x tensor`` ranks, as the programs of
            torch's meshes have them, and not among those of each stage.
        machines: the machine of each global rank, by any name; ``None``: not known.

    Raises:
        MeshError: when a degree is not positive or does not divide what it must divide.
    """

    world_size: int
    weight: int = 1
    sequence: int = 1
    pipeline: int = 1
    zero: int | None = None
    expert_weight: int | None = None
    expert: int = 1
    tensor: int = 1
    ring: int = 1
    near: str = "heads"
    near_experts: str = "expert_weight"
    order: tuple[int, ...] | None = None
    experts_over_tensor: bool = False
    machines: Mapping[int, Hashable] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        mistakes = self.mistakes()
        if mistakes:
            raise MeshError("; ".join(mistakes))

    def mistakes(self) -> list[str]:
        """Error texts, one for each reason why these degrees are impossible; empty if they fit."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        words = ("near", "near_experts", "order", "experts_over_tensor", "machines")
        degrees = {k: v for k, v in given.items() if v is not None and k not in words}
        found = [
            f"{k}={v!r} of type {type(v).__name__} must be a whole number"
            for k, v in degrees.items()
            if not isinstance(v, int) or isinstance(v, bool)
        ]
        if found:
            return found
        found = [f"{k}={v} must be at least 1" for k, v in degrees.items() if v < 1]
        if self.near not in NEAR:
            found.append(f"near={self.near!r} names no axis of a sequence; choose one of {NEAR}")
        if self.near_experts not in (both := ("expert_weight", "expert")):
            found.append(f"near_experts={self.near_experts!r} is no axis; choose one of {both}")
        if found:
            return found
        found = [f"{key}={text}" for key, text in impossible(self.world_size, given)]
        if not found and self.order is not None:
            found += self._unordered_groups()
        return found

    def _unordered_groups(self) -> list[str]:
        """Error texts for groups whose ranks do not ascend, as torch requires."""
        names = ["tensor", "pipeline", "weight", "replica", "zero", "zero_replica", "sequence"]
        if self.separate:
            names += [f"expert_{n}" for n in ("weight", "replica", "zero", "zero_replica")]
            names.append("expert")
        for name in names:
            for group in self.ranks(name):
                if group != sorted(group):
                    return [
                        f"the ranks {group} of a {name.replace('_', ' ')} group do not ascend: "
                        "make the DeviceMesh of ranks that ascend along each of its axes, as "
                        "init_device_mesh does, and put the axes over which both weights and "
                        "sequences are split after those over which only one of them is"
                    ]
        return []

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage (with the same tensor rank)."""
        return self.world_size // (self.pipeline * self.tensor)

    @property
    def data(self) -> int:
        """Number of different batches that one pipeline stage processes at a time."""
        return self.stage_size // self.sequence

    @cached_property
    def dense(self) -> AxisShape:
        """The axis of all weights except experts."""
        replicas = self.stage_size // self.weight
        zero = replicas if self.zero is None else self.zero
        return AxisShape(self.stage_size, self.weight, 1, zero)

    @cached_property
    def experts(self) -> AxisShape:
        """The axis of experts; equal to :attr:`dense` if they have no axis of their own.

        If ``zero`` does not divide its replicas, optimizer state is sharded over the greatest
        common divisor of both.
        """
        size = self.weight if self.expert_weight is None else self.expert_weight
        stage = self.stage_size * (self.tensor if self.experts_over_tensor else 1)
        replicas = stage // (size * self.expert)
        zero = replicas if self.zero is None else math.gcd(self.zero, replicas)
        both = size > 1 and self.expert > 1  # otherwise there is nothing to place
        owners_near = both and self.near_experts == "expert"
        return AxisShape(stage, size, self.expert, zero, owners_near)

    @property
    def separate(self) -> bool:
        """Whether experts have a weight axis of their own."""
        return self.experts != self.dense

    def axis(self, experts: bool) -> AxisShape:
        """:attr:`experts` or :attr:`dense`."""
        return self.experts if experts else self.dense

    @cached_property
    def sequence_axes(self) -> SequenceAxes:
        """How the ranks of a sequence form groups that share heads, and rings."""
        return SequenceAxes.create(self.sequence, self.ring, self.near)

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same shard of a dense weight."""
        return self.dense.replicas

    @property
    def zero_size(self) -> int:
        """Number of replicas over which the optimizer state of dense weights is sharded."""
        return self.dense.zero

    def degrees(self) -> dict[str, int]:
        """Degrees by name, to print; those of experts only if they have an axis of their own."""
        found = {
            "world": self.world_size,
            "pipeline": self.pipeline,
            "weight": self.weight,
            "replicas": self.replicas,
            "zero": self.zero_size,
            "sequence": self.sequence,
            "data": self.data,
        }
        if self.ring > 1:
            found["ring"] = self.ring
        if self.tensor > 1:
            found["tensor"] = self.tensor
        if self.separate:
            own = self.experts
            found |= {"expert weight": own.size, "expert": own.expert}
            found |= {"expert replicas": own.replicas, "expert zero": own.zero}
        return found

    def ranks(self, name: str) -> list[list[int]]:
        """Global ranks of every group of one kind, in a fixed order.

        Args:
            name: ``weight, gradient, replica, zero, zero_replica, sequence, heads, ring, data,
                stage, pipeline, tensor`` or ``model`` (the stages of all tensor ranks together); of
                experts ``expert, expert_weight, expert_gradient, expert_replica, expert_zero`` or
                ``expert_zero_replica``.
        """
        world = self.grid.permute(2, 0, 1)  # tensor x pipeline x stage
        stages = world.reshape(-1, self.stage_size)
        if name == "stage":
            grid = stages.sort().values
        elif name == "model":
            grid = world.transpose(0, 1).flatten(1).sort().values
        elif name == "tensor":
            grid = self.grid
        elif name == "pipeline":
            grid = world.transpose(1, 2)
        elif name in ("sequence", "data"):
            grid = stages.view(-1, self.data, self.sequence)
            grid = grid if name == "sequence" else grid.transpose(1, 2).sort().values
        elif name in ("heads", "ring"):
            grid = stages.reshape(-1, self.sequence)[:, self.sequence_axes.groups(name)]
        elif name.startswith("expert"):
            among = self.grid.flatten(1) if self.experts_over_tensor else stages
            grid = self.experts.groups(among, name.removeprefix("expert_"))
        else:
            grid = self.dense.groups(stages, name)
        return grid.reshape(-1, grid.shape[-1]).tolist()

    @cached_property
    def grid(self) -> torch.Tensor:
        """Global ranks ``[pipeline, stage, tensor]``."""
        ranks = torch.arange(self.world_size) if self.order is None else torch.tensor(self.order)
        return ranks.view(self.pipeline, self.stage_size, self.tensor)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pipeline rank, index in the stage, tensor rank) of a global rank."""
        pipeline, inside, tensor = (self.grid == rank).nonzero()[0].tolist()
        return pipeline, inside, tensor
