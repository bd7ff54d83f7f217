"""Gradients of replicated parameters, reduced in one flat collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.mesh import ParallelMesh
from internsp.wp.collectives import Collectives, all_reduce
from internsp.wp.parameter import Member, ReplicatedParameter, ShardedParameter, unflatten

SMALL = "gradients of replicated parameters"  # in errors


class ReplicatedParameters:
    """All replicated parameters of a chunk and one flat gradient for them.

    The flat vector ends with one flag a gradient (small and sharded ones), so that after the
    reduction every rank knows which parameters were used by some rank: an unused one keeps
    ``grad = None``, as on one process.

    Attributes:
        backward: the graph task of the backward that is known to run; -1: none.
        frozen: what had ``requires_grad = False`` when that began.
        began: called at a ready gradient where it is not.
    """

    def __init__(self, mesh: ParallelMesh, sharded: list[ShardedParameter]) -> None:
        self._mesh = mesh
        self.rank = mesh.rank
        self.began: Callable[[], None] = lambda: None
        self.backward = -1
        self.frozen: set[ReplicatedParameter] = set()
        self.members: list[ReplicatedParameter] = []
        self.sharded = sharded
        self.flat: Tensor | None = None
        self.numel = 0
        self._values: Sequence[Tensor] = ()  # views of the flat sum
        self._with_gradient: set[int] = set()
        self._mine: list[bool] = []  # what this rank used, as last flagged

    def everyone(self) -> list[Member]:
        """All parameters of the chunk, small and sharded."""
        return [*self.members, *self.sharded]

    def append(self, member: ReplicatedParameter) -> None:
        """Take in a parameter; the flat gradient is made at the first ready gradient."""
        member.sums, member.index = self, len(self.members)
        self.members.append(member)
        self.numel += member.shape.numel()

    # the flat sum

    def gradient(self) -> Tensor:
        """The flat sum, fp32 or wider: values, then flags. Made when first needed."""
        if self.flat is None:
            dtype = torch.float32
            for member in self.members:
                dtype = torch.promote_types(dtype, member.dtype)
            for weight in self.sharded:
                dtype = torch.promote_types(dtype, weight.dtype)
            length = self.numel + len(self.members) + len(self.sharded)
            self.flat = torch.zeros(length, dtype=dtype, device=self._mesh.device)
            self._values = self._shaped(self.flat)
        return self.flat

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a ready gradient to the flat sum (no message)."""
        self.value(index).add_(gradient)
        self._with_gradient.add(index)

    def with_gradient(self) -> list[ReplicatedParameter]:
        """Those of which this rank has a sum."""
        return [self.members[index] for index in self._with_gradient]

    def discard(self, member: ReplicatedParameter, used: bool) -> None:
        """Forget one parameter's sum on this rank, but not, if ``used``, that there was one."""
        index = member.index
        if index in self._with_gradient:
            self.value(index).zero_()
            if not used:
                self._with_gradient.remove(index)

    def _flag(self, touched: dict[ShardedParameter, bool]) -> None:
        """Note which parameters had a gradient on this rank (the sharded ones: ``touched``)."""
        flags = [i in self._with_gradient for i in range(len(self.members))]
        flags += [touched.get(weight, False) for weight in self.sharded]
        self._mine = flags
        place = self.gradient()[self.numel :]
        if all(flags):
            place.fill_(1)
            return
        # From pinned memory and behind the stream's work: the host must not wait for the device.
        host = torch.tensor(flags, dtype=place.dtype, pin_memory=place.device.type != "cpu")
        place.copy_(host, non_blocking=True)

    def reduce(
        self, touched: dict[ShardedParameter, bool], collectives: Collectives
    ) -> dist.Work | None:
        """Start the one flat all-reduce over all ranks that hold these parameters.

        Args:
            touched: sharded ones with a reduction, and whether this rank had a gradient.
            collectives: any of the chunk's, for its counters and its ledger.
        """
        self._flag(touched)
        try:
            return all_reduce(self.gradient(), self._mesh.stage_group, collectives.counters)
        except RuntimeError as error:  # another rank has closed the connection
            raise collectives.ledger.failed(SMALL, error) from error

    def value(self, index: int) -> Tensor:
        """Parameter ``index``'s part of the flat sum, in its shape (a view)."""
        self.gradient()
        return self._values[index]

    def values(self) -> Sequence[Tensor]:
        """A copy of every parameter's part of the flat sum, in its shape."""
        return self._shaped(self.gradient().clone())

    def _shaped(self, flat: Tensor) -> Sequence[Tensor]:
        return unflatten(flat[: self.numel], [member.storage for member in self.members])

    def used(self, settled: Callable[[Member], bool | None]) -> tuple[list[bool], list[bool]]:
        """After the reduction: which small and which sharded parameters some rank used.

        What this rank used is known. Of the rest other ranks' flags tell, and reading them is the
        one moment at which the host waits for the device: only where the answer matters.

        Args:
            settled: what to say of a parameter that this rank did not use, where the truth makes
                no difference; else ``None``.
        """
        pairs = zip(self.everyone(), self._mine, strict=True)
        known = [mine or settled(member) for member, mine in pairs]
        flags = self._everyones() if None in known else [bool(flag) for flag in known]
        return flags[: len(self.members)], flags[len(self.members) :]

    def _everyones(self) -> list[bool]:
        """Every rank's flags, read from the device."""
        flags: list[bool] = (self.gradient()[self.numel :] != 0).tolist()
        return flags

    def reset(self) -> None:
        """Forget the sum."""
        self._with_gradient.clear()
        if self.flat is not None:
            self.flat.zero_()
