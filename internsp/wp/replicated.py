"""Gradients of replicated parameters, reduced in one flat collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.base.accelerator import StreamTurns, copy_to, current_stream
from internsp.mesh import ParallelMesh
from internsp.wp.collectives import Collectives, all_reduce
from internsp.wp.parameter import Member, ReplicatedParameter, ShardedParameter, unflatten

if TYPE_CHECKING:  # these follow the passes; gradients that are ready only name them
    from internsp.wp.events import Events

SMALL = "gradients of replicated parameters"  # what the all-reduce is called in errors


class ReplicatedParameters:
    """All replicated parameters of a chunk, and one flat gradient for them.

    The flat gradient ends with one flag for each parameter, replicated or sharded. After the
    all-reduce the flags tell every rank which parameters some rank has used: an unused parameter
    keeps ``grad = None``, as on one process.

    Attributes:
        members: the replicated parameters.
        scalars: those without dimensions.
        sharded: the chunk's sharded parameters, which have flags only.
        flat: the flat gradient; ``None`` until it is first needed.
        given: indices of the parameters of which this rank has a gradient.
        trained: parameters that were trained in some backward since :meth:`reset`.
        numel: number of the flat gradient's elements before the flags.
        events: where the program is in its passes (:meth:`bind`).
        streams: whether the device has streams, so that :meth:`take_turn` does something.
    """

    events: Events

    def __init__(self, mesh: ParallelMesh, sharded: list[ShardedParameter]) -> None:
        self._mesh = mesh
        self.members: list[ReplicatedParameter] = []
        self.scalars: list[ReplicatedParameter] = []
        self.sharded = sharded
        self.flat: Tensor | None = None
        self.numel = 0
        self._views: Sequence[Tensor] = ()  # of the flat gradient, one a parameter
        self.given: set[int] = set()
        self.trained: set[Member] = set()
        self._mine: list[bool] = []  # this rank's flags in the last reduction
        self._sent, self._there = list[bool](), torch.empty(0)  # the last copied to the device
        self._current, self._turns = current_stream(mesh.device), StreamTurns()
        self.streams = self._current is not None

    def bind(self, events: Events) -> None:
        """Let the gradients that are ready be reported to ``events``."""
        self.events = events

    def all_parameters(self) -> list[Member]:
        """All parameters of the chunk, replicated and sharded."""
        return [*self.members, *self.sharded]

    def append(self, member: ReplicatedParameter) -> None:
        """Add a parameter; the flat gradient is allocated at the first ready gradient."""
        member.sums, member.index = self, len(self.members)
        self.members.append(member)
        self.numel += member.shape.numel()
        if not member.shape:
            self.scalars.append(member)

    # the flat sum

    def take_turn(self) -> None:
        """Make the current stream, which uses the flat gradient next, stand behind those before it.

        Passes on several streams add to it. Without streams this does nothing.
        """
        if self._current is not None:
            self._turns.take(self._current())

    def gradient(self) -> Tensor:
        """The flat gradient, fp32 or wider: values, then flags. Allocated when first needed."""
        self.take_turn()
        if self.flat is None:
            dtype = torch.float32
            for member in self.members:
                dtype = torch.promote_types(dtype, member.dtype)
            length = self.numel + len(self.members) + len(self.sharded)
            self.flat = torch.zeros(length, dtype=dtype, device=self._mesh.device)
            self._there = self.flat.new_empty(length - self.numel)
            self._views = self._shaped(self.flat)
            for member, view in zip(self.members, self._views, strict=True):
                member.total = view
        return self.flat

    def with_gradient(self) -> list[ReplicatedParameter]:
        """The parameters of which this rank has a gradient."""
        return [self.members[index] for index in self.given]

    def discard(self, member: ReplicatedParameter, used: bool) -> None:
        """Set one parameter's gradient on this rank to zero.

        Args:
            used: it still counts as used by this rank.
        """
        index = member.index
        if index in self.given:
            self.views()[index].zero_()
            if not used:
                self.given.remove(index)

    def _flag(self, had_gradient: dict[ShardedParameter, bool]) -> None:
        """Write this rank's flags: which parameters had a gradient (sharded: ``had_gradient``)."""
        flags = [i in self.given for i in range(len(self.members))]
        flags += [had_gradient.get(weight, False) for weight in self.sharded]
        self._mine = flags
        region = self.gradient()[self.numel :]
        if all(flags):
            region.fill_(1)
            return
        if flags != self._sent:  # a step that is like the one before copies nothing from the host
            self._there.copy_(copy_to(region.device, torch.tensor(flags, dtype=region.dtype)))
            self._sent = flags
        region.copy_(self._there)

    def reduce(
        self, had_gradient: dict[ShardedParameter, bool], collectives: Collectives
    ) -> dist.Work | None:
        """Start the one flat all-reduce over all ranks that hold these parameters.

        Args:
            had_gradient: for each sharded parameter with a reduction, whether this rank had a
                gradient.
            collectives: any collectives of the chunk, for counters and errors.
        """
        self._flag(had_gradient)
        try:
            return all_reduce(self.gradient(), self._among(), collectives.counters)
        except RuntimeError as error:  # another rank has closed the connection
            raise collectives.comm_context.record_failure(SMALL, error) from error

    def _among(self) -> dist.ProcessGroup:
        """All ranks that hold these parameters; of programs with experts over tensor ranks, which
        shard every parameter, all that hold some of them: there are only flags."""
        mesh = self._mesh
        return mesh.model_group if mesh.shape.experts_over_tensor else mesh.stage_group

    def views(self) -> Sequence[Tensor]:
        """The gradient of every parameter, in its shape: views of the flat gradient."""
        if self.flat is None:
            self.gradient()
        return self._views

    def values(self) -> Sequence[Tensor]:
        """A copy of the gradient of every parameter, in its shape."""
        return self._shaped(self.gradient().clone())

    def _shaped(self, flat: Tensor) -> Sequence[Tensor]:
        return unflatten(flat[: self.numel], [member.storage for member in self.members])

    def used(self, settled: Callable[[Member], bool | None]) -> tuple[list[bool], list[bool]]:
        """After the reduction: which replicated and which sharded parameters some rank used.

        For parameters that this rank has not used, the flags of other ranks tell. Reading them
        makes the host wait for the device, so they are read only if the answer matters: no rank has
        used what was frozen in every backward.

        Args:
            settled: for a parameter that this rank did not use, an answer that is right whatever
                other ranks did; ``None``: their flags are needed.
        """
        pairs = zip(self.all_parameters(), self._mine, strict=True)
        known = [
            mine or ((member in self.trained or member.requires_grad) and settled(member))
            for member, mine in pairs
        ]
        flags = self._everyones() if None in known else [bool(flag) for flag in known]
        return flags[: len(self.members)], flags[len(self.members) :]

    def _everyones(self) -> list[bool]:
        """The flags of all ranks, read from the device (the host waits)."""
        flags: list[bool] = (self.gradient()[self.numel :] != 0).tolist()
        return flags

    def reset(self) -> None:
        """Set the flat gradient to zero: no parameter has a gradient."""
        self.given.clear()
        self.trained.clear()
        if self.flat is not None:
            self.flat.zero_()
