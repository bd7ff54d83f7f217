"""The variants: one model, one batch, plain SGD, and different ways to shard the weights.

Every step is forward, backward until all gradients are complete, and the optimizer step; all of it
is timed. The loss is a sum over ranks divided by the number of elements, and gradients are sums
over ranks (design.md 6), so every variant must train the same from the same weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from internsp import (
    ParallelMesh,
    SequenceConfig,
    WeightParallelConfig,
    ZeroOptimizer,
    parallelize,
)
from internsp.base.trace import Trace
from internsp.schedule.simulate import simulate
from tools.bench.model import DTYPE, Blocks, batch, elements, fresh, full_batch, layout
from tools.bench.options import Sizes
from tools.overlap.laws import HYBRID
from tools.overlap.options import Options, Spec

Mark = Callable[[str], None]


def no_mark(name: str) -> None:
    """Ignores marks, for a step without a timeline."""


@dataclass
class Setting:
    """What the variants of one rank share."""

    options: Options
    weights: dict[str, Tensor] = field(repr=False)
    _meshes: dict[int, ParallelMesh] = field(default_factory=dict, repr=False)

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the model and its data."""
        return self.options.sizes()

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return dist.get_rank()

    @property
    def world(self) -> int:
        """The number of processes."""
        return dist.get_world_size()

    def mesh_for(self, spec: Spec) -> ParallelMesh:
        """The mesh for a variant of ours. Collective, once per group size."""
        size = spec.weight or self.world
        if size not in self._meshes:
            self._meshes[size] = ParallelMesh.create(
                weight=size, sequence=self.options.sequence_ranks, device_type="cpu",
                timeout_seconds=self.options.timeout,
            )  # fmt: skip
        return self._meshes[size]

    @cached_property
    def flat_mesh(self) -> DeviceMesh:
        """For FSDP2."""
        return dist.init_device_mesh("cpu", (self.world,))

    @cached_property
    def hybrid_mesh(self) -> DeviceMesh:
        """For FSDP2: sharded in groups of two, replicated over them. Collective, once."""
        sizes = (self.world // HYBRID, HYBRID)
        return dist.init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


class Variant(ABC):
    """A model in training. Creating one is collective."""

    trace: Trace | None = None

    def __init__(self, setting: Setting, spec: Spec) -> None:
        self.setting, self.spec = setting, spec
        sizes = setting.sizes
        self.batches = [batch(sizes, setting.rank, i) for i in range(sizes.micro_batches)]
        self.elements = elements(sizes)
        self.scale = 1.0 / self.elements
        self.blocks = fresh(sizes, setting.weights)
        self.model: nn.Module = self.prepare(self.blocks)
        self.optimizer: Any = self.optimizer_of(self.model)

    @abstractmethod
    def prepare(self, model: Blocks) -> nn.Module:
        """Parallelize the model."""

    @abstractmethod
    def unsharded_bytes(self) -> int | None:
        """Bytes of unsharded weights that exist now, or ``None`` if unknown."""

    def optimizer_of(self, model: nn.Module) -> Any:
        """Plain SGD on this rank's part of every weight."""
        return torch.optim.SGD(model.parameters(), lr=self.setting.sizes.lr)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """A context for forward and backward of one micro-batch; ``last``: of a step."""
        return nullcontext()

    def micro_batches(self) -> AbstractContextManager[Any]:
        """A context for all micro-batches of a step."""
        return nullcontext()

    def finish(self, last: bool) -> None:
        """Complete the gradients after a backward, if they are not complete yet."""
        return

    def step(self, mark: Mark = no_mark) -> float:
        """One training step; returns this rank's part of the loss."""
        summed = 0.0
        with self.micro_batches():
            for index, (x, target) in enumerate(self.batches, start=1):
                last = index == len(self.batches)
                with self.micro_batch(last):
                    mark("forward")
                    total = self.model(x, target)
                    mark("backward")
                    (total * self.scale).backward()
                self.finish(last)
                x.grad = None
                summed += float(total.detach())
        mark("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark("end")
        return summed / self.elements

    def report(self) -> dict[str, Any]:
        """Figures that only this variant has, as plain values."""
        return {}

    def close(self) -> None:
        """Release what garbage collection would not."""
        return


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


class Compute(Variant):
    """The plain model without communication; its SGD updates as many rows as a shard has."""

    def prepare(self, model: Blocks) -> nn.Module:
        """The plain model needs no change."""
        return model

    def optimizer_of(self, model: nn.Module) -> Any:
        """SGD on this rank's rows."""
        self.rows: list[tuple[nn.Parameter, nn.Parameter, slice]] = []
        for parameter in model.parameters():
            length = -(-len(parameter) // self.setting.world)
            mine = slice(self.setting.rank * length, (self.setting.rank + 1) * length)
            self.rows.append((parameter, nn.Parameter(parameter.data[mine]), mine))
        return torch.optim.SGD([r for _, r, _ in self.rows], lr=self.setting.sizes.lr)

    def finish(self, last: bool) -> None:
        """Assign the rows' gradients."""
        for parameter, rows, mine in self.rows if last else ():
            assert parameter.grad is not None, "backward has just filled it"
            rows.grad, parameter.grad = parameter.grad[mine], None

    def unsharded_bytes(self) -> int:
        """All weights."""
        return parameter_bytes(self.model)


class Ours(Variant):
    """internsp: ``parallelize`` with its defaults, changed by the settings in the name."""

    def prepare(self, model: Blocks) -> nn.Module:
        """Shard the weights over the weight group: all ranks, unless the name says fewer."""
        self.config, sequence = sections(self.spec)
        self.trace = Trace()
        model.layout = layout(self.setting.sizes, self.setting.rank)
        mesh = self.setting.mesh_for(self.spec)
        assert model.layout is None or model.layout.rank == mesh.sequence_rank, "as batch() does"
        self.communicator = parallelize(
            model, mesh, self.config, sequence=sequence, trace=self.trace
        )
        return model

    def optimizer_of(self, model: nn.Module) -> Any:
        """SGD; if shards are replicated a ``ZeroOptimizer`` with bf16 reduction, as in HSDP."""
        if self.communicator.mesh.replicas == 1:
            return super().optimizer_of(model)
        return ZeroOptimizer(
            self.communicator, torch.optim.SGD, lr=self.setting.sizes.lr, reduce_dtype=DTYPE
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """With full accumulation only the last micro-batch reduces gradients."""
        without = self.config.accumulation == "full" and not last
        return self.communicator.no_sync() if without else nullcontext()

    def micro_batches(self) -> AbstractContextManager[Any]:
        """Weights do not change between micro-batches, so slots' contents are reused."""
        return self.communicator.unchanged()

    def unsharded_bytes(self) -> int:
        """Bytes that the pool holds now."""
        return self.communicator.state.pool.live_nbytes()

    def report(self) -> dict[str, Any]:
        """The printed schedule, and the pool's figures."""
        plan = self.communicator.plan
        assert plan is not None, "parallelize always makes a plan"
        pool = self.communicator.state.pool
        micro_batches = self.setting.sizes.micro_batches
        schedule = simulate(plan, micro_batches, overlap=self.config.overlap)
        between = replica_bytes(self.optimizer) if self.communicator.mesh.replicas > 1 else 0
        return {
            "schedule": [(a.kind, a.phase, a.weight, a.nbytes) for a in schedule.actions],
            "payload": schedule.nbytes("AG") + schedule.nbytes("RS") + between,
            "replica_bytes": between,
            "slot_bytes": pool.slot_nbytes,
        }


def replica_bytes(optimizer: ZeroOptimizer) -> int:
    """Bytes a rank sends in a step to the ranks with the same shards: gradients and new weights.

    Replicated parameters (norms) are part of the gradients' all-reduce and do not count.
    """
    total = 0
    for bucket in optimizer._buckets:
        gradients = 0 if bucket.replicated else DTYPE.itemsize
        others = (bucket.axis.zero - 1) * bucket.owned.numel()
        total += others * (gradients + bucket.owned.element_size())
    return total


class Ddp(Variant):
    """``DistributedDataParallel`` with its defaults; it averages, so the loss is scaled up."""

    def prepare(self, model: Blocks) -> nn.Module:
        """Wrap the model."""
        self.scale *= self.setting.world
        self.wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return self.wrapped

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Only the last micro-batch reduces gradients."""
        return nullcontext() if last else self.wrapped.no_sync()

    def unsharded_bytes(self) -> int:
        """All weights."""
        return parameter_bytes(self.model)


def sections(spec: Spec) -> tuple[WeightParallelConfig, SequenceConfig]:
    """The configuration of ``ours``.

    Raises:
        ValueError: a key that there is not, or a wrong value.
    """
    given = dict(spec.arguments)
    own = {key: given.pop(key) for key in given.keys() & SequenceConfig.model_fields.keys()}
    return WeightParallelConfig(**given), SequenceConfig(**own)


def make(setting: Setting, spec: Spec) -> Variant:
    """Build a variant. Collective."""
    from tools.overlap.fsdp import Fsdp2
    from tools.overlap.zero3 import Zero3

    kinds: dict[str, type[Variant]] = {
        "compute": Compute,
        "ours": Ours,
        "ddp": Ddp,
        "fsdp2": Fsdp2,
        "zero3": Zero3,
    }
    return kinds[spec.family](setting, spec)


def unavailable(spec: Spec, options: Options) -> str | None:
    """Why a variant cannot run here, or ``None``."""
    from tools.overlap import zero3

    if spec.family == "ours":
        try:
            sections(spec)
        except ValueError as error:
            first = next((e["msg"] for e in getattr(error, "errors", list)()), str(error))
            return f"weight_parallel does not take {spec.name}: {first}"
    if spec.family == "zero3":
        if options.micro_batches > 1:
            return "here it has one micro-batch a step only"
        return zero3.unavailable()
    return None


def reference(setting: Setting, steps: int) -> list[float]:
    """Reference: losses of one plain process with all ranks' batches. No communication."""
    sizes = setting.sizes
    model = fresh(sizes, setting.weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=sizes.lr)
    groups = sizes.ranks // sizes.sequence_ranks
    batches = [
        full_batch(sizes, data, micro)
        for micro in range(sizes.micro_batches)
        for data in range(groups)
    ]
    losses: list[float] = []
    for _ in range(steps):
        total = 0.0
        for x, target in batches:
            loss = model(x, target) / elements(sizes)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses
