"""The end of backward in a plain loop: every ``.grad`` complete, on every rank (WP-5, WP-9).

A plain loop is one without a ``ZeroOptimizer``, which has :mod:`internsp.optim.reduction` instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from internsp.base.host import OPTIMIZER
from internsp.dtensor.mixed import without_torch_function
from internsp.dtensor.placed import grad_dtype
from internsp.dtensor.unfinished import UnfinishedGradients
from internsp.errors import ConfigError
from internsp.mesh import ParallelMesh
from internsp.schedule.terms import Parcel
from internsp.wp.collectives import Handle
from internsp.wp.parameter import Member, ReplicatedParameter, ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.replicated import SMALL, ReplicatedParameters

if TYPE_CHECKING:
    from internsp.wp.tied import StepGradients


class PlainLoop:
    """All-reduces a chunk's reduced gradients over replicas, weight by weight, and completes
    ``.grad``: a :class:`internsp.wp.consumer.GradientConsumer`.

    Args:
        mean: gradients are averaged over the ranks of the stage, not summed.

    Attributes:
        sums: results of finished all-reduces that are not in ``.grad`` yet.
        waiting: weights whose sums wait for a later backward, while those of others are completed.
        placeholders: those in ``.grad`` while sums wait for a later backward.
    """

    is_optimizer = False

    def __init__(
        self,
        state: Chunk,
        mesh: ParallelMesh,
        replicated: ReplicatedParameters,
        mean: bool,
    ) -> None:
        self._state, self._mesh = state, mesh
        self._replicated, self._divisor = replicated, mesh.shape.stage_size if mean else 1
        self._completed = False  # .grad was completed since a pipeline's step began
        self._in_flight: deque[tuple[ShardedParameter, Tensor, Handle] | None] = deque()
        self.sums: dict[ShardedParameter, Tensor] = {}
        self.waiting: set[ShardedParameter] = set()
        discard = partial(discard_sums, state, replicated)
        self.placeholders: UnfinishedGradients[Member] = UnfinishedGradients(discard, mesh.rank)
        per_unit = [
            [
                Parcel(w.name, (w,), w.storage.numel() * _sum_dtype(w).itemsize)
                for w in reversed(unit.weights)
                if w.axis.replicas > 1
            ]
            for unit in state.units.by_completion
        ]
        parcels = {parcel.name: parcel for unit in per_unit for parcel in unit}
        self.parcels: Sequence[Parcel[ShardedParameter]] = [*parcels.values()]
        sizes = sorted(sum(parcel.nbytes for parcel in unit) for unit in per_unit)
        self.limit = sum(sizes[-2:])

    @cached_property
    def tied(self) -> StepGradients:
        """See :class:`GradientConsumer`."""
        from internsp.wp.tied import PlainGradients  # few models need it

        return PlainGradients()

    def pass_begins(self) -> None:
        """Does nothing."""

    def step_begins(self) -> bool:
        """See :class:`GradientConsumer`: a step completes ``.grad``, so that no sums wait."""
        self._completed = False
        return False

    def expects_exchange(self) -> bool:
        """A backward of which the program has said nothing completes ``.grad``."""
        return True

    def backward_begins(self) -> None:
        """See :class:`GradientConsumer`."""
        self.placeholders.drop_removed()

    def backward_ended(self, more: bool) -> None:
        """Complete ``.grad``; if ``more`` backwards come before that, put placeholders there."""
        if more:
            self.placeholders.set_placeholders(self._replicated.with_gradient())
            self.placeholders.set_placeholders(self._state.reducer.had_gradient)
        else:
            self.placeholders.restore_grad()
            # Each read and write of a parameter's `.grad` would go through `__torch_function__`.
            without_torch_function(self._finalize_gradients, (), (), {})
            self._completed = True

    def reset(self, earlier: bool, step: bool) -> None:
        """See :class:`GradientConsumer`."""
        lost = step and self._completed  # what is in .grad cannot be taken out again
        if lost:
            members = self._replicated.all_parameters()
            added = [member for member in members if member.parameter.grad is not None]
            self.placeholders.set_placeholders(added, failed=True)
        if earlier or lost:
            self.placeholders.mark_lost()
        else:
            self.placeholders.restore_grad()

    def start(self, parcel: Parcel[ShardedParameter]) -> None:
        """See :class:`GradientConsumer`.

        A weight without a gradient on this rank is exchanged, too: another replica's data may have
        gone through a block that this rank's data left out. This rank contributes zeros then.
        """
        weight = parcel.weights[0]
        if not weight.requires_grad and weight not in self._state.reducer.had_gradient:
            self._in_flight.append(None)
            return
        if weight.reduced.total is None:
            weight.reduced.add(weight.zeros(_sum_dtype(weight)))
        mine = weight.reduced.own()
        weight.reduced.drop()  # a later gradient must not be added to a tensor in flight
        collectives = self._state.between[weight.axis].replica
        handle = collectives.all_reduce(mine, "", weight.name)
        self._in_flight.append((weight, mine, handle))

    def finish_oldest(self) -> None:
        """See :class:`GradientConsumer`."""
        exchange = self._in_flight.popleft()
        if exchange is None:
            return
        weight, total, handle = exchange
        self._state.collectives.wait(handle, "", weight.name, "finish")
        handle.keep = ()
        before = self.sums.get(weight)
        self.sums[weight] = total if before is None else before.add_(total)

    def discard(self) -> None:
        """See :class:`GradientConsumer`."""
        while self._in_flight:
            self.finish_oldest()
        self.sums.clear()

    def take_hooks(self, member: Member) -> bool:
        """See :class:`GradientConsumer`."""
        return False

    def call_hooks(self) -> None:
        """Does nothing: none were taken."""

    def value_of(self, member: Member, total: Tensor) -> Tensor:
        """What comes to ``.grad`` of a finished sum; in its memory."""
        divisor = self.divisor(member)
        return total if divisor == 1 else total.div_(divisor)

    def divisor(self, member: Member) -> float:
        """See :class:`GradientConsumer`."""
        return self._divisor

    def known_use(self, member: Member) -> bool | None:
        """Whether ``member``, which this rank has not used, counts as used; ``None``: ask others.

        True where ``.grad`` exists: adding zeros to that is right, whether another rank used
        ``member`` or not.
        """
        return None if member.parameter.grad is None else True

    def _finalize_gradients(self) -> None:
        """Finish all reductions and complete ``.grad`` of every parameter. Collective; blocks.

        Raises:
            ConfigError: optimizer state is to be offloaded to host memory, which needs a
                ``ZeroOptimizer``.
        """
        state, replicated, mesh = self._state, self._replicated, self._mesh
        if state.link is not None:
            for weight in replicated.sharded:
                if OPTIMIZER in weight.offload and weight.requires_grad:
                    raise ConfigError(
                        f'weight_parallel: offload = "optimizer" of {weight.name} (on rank '
                        f"{mesh.rank}) needs a ZeroOptimizer, and there is none: a torch optimizer "
                        "has its state where the parameters are, which offload = "
                        '"weights" puts into host memory'
                    )
        flat = replicated.reduce(state.reducer.had_gradient, state.collectives)
        state.complete_gradients()
        if flat is not None:
            with state.collectives.comm_context.awaiting(SMALL):
                flat.wait()
        used_replicated, used_sharded = replicated.used(self.known_use)
        members, values = replicated.members, replicated.values()
        for member, used, value in zip(members, used_replicated, values, strict=True):
            if used:
                _accumulate(member, self.value_of(member, value))
        _copy_shared_gradients(replicated.sharded)
        hosted: list[tuple[ShardedParameter, Tensor]] = []
        sharded = replicated.sharded
        had_gradient, waiting = state.reducer.had_gradient, self.waiting
        for weight, used in zip(sharded, used_sharded, strict=True):
            if weight in waiting:
                continue
            had_gradient.pop(weight, None)
            total = self.sums.pop(weight, weight.reduced.pop())
            if used and total is not None:
                value = self.value_of(weight, total)
                if state.link is not None and weight.hosted:
                    value = value.to(grad_dtype(weight.parameter))
                    hosted.append((weight, state.link.empty("grad", value.shape, value.dtype)))
                    state.link.copy_to_host([(hosted[-1][1], value)])
                else:
                    _accumulate(weight, value)
        if state.link is not None and hosted:
            state.link.synchronize()  # a program reads `.grad`
        for weight, value in hosted:
            _accumulate(weight, value)
        replicated.reset()
        replicated.trained.update(waiting)


def _sum_dtype(weight: ShardedParameter) -> torch.dtype:
    return torch.promote_types(weight.reduce_dtype, torch.float32)


def _copy_shared_gradients(weights: Iterable[ShardedParameter]) -> None:
    """Copy a gradient of autograd that two weights borrow: each is about to be changed in place."""
    seen: set[int] = set()
    for weight in weights:
        if weight.reduced.total is not None and weight.reduced.borrowed:
            address = weight.reduced.total.data_ptr()
            if address in seen:
                weight.reduced.own()
            seen.add(address)


def _accumulate(member: Member, value: Tensor) -> None:
    """Add ``value`` (like the parameter's storage) to ``.grad``, in the dtype of ``.grad``."""
    dtype = grad_dtype(member.parameter)
    gradient = member.wrap(value if value.dtype == dtype else value.to(dtype))
    before: Any = member.parameter.grad
    if before is None:
        member.parameter.grad = gradient
    else:
        before._local_tensor.add_(gradient._local_tensor)


def discard_sums(
    state: Chunk, replicated: ReplicatedParameters, member: Member, used: bool
) -> None:
    """Drop ``member``'s sums on this rank; waits for reductions in flight, launches nothing.

    A sum becomes zeros instead of ``None``, so that all ranks go on launching the same collectives
    (WP-2).

    Args:
        used: whether a gradient that this rank had counts as zero, not as absent: one that was set
            to zero in place exists, and optimizers step with it.
    """
    state.finish_reductions()
    if isinstance(member, ReplicatedParameter):
        replicated.discard(member, used)
        return
    state.reducer.unsharded_sums.drop(member)
    if member.reduced.total is not None:
        wide = torch.promote_types(member.reduced.total.dtype, torch.float32)
        member.reduced.drop()
        member.reduced.add(member.zeros(wide))
    if member in state.reducer.had_gradient:
        state.reducer.had_gradient[member] &= used
