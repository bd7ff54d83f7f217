"""The end of a plain loop's backward: every ``.grad`` complete, on every rank (WP-5, WP-9).

What a loop without a ``ZeroOptimizer`` has in the place of :mod:`internsp.optim.reduction`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from internsp.dtensor.placed import grad_dtype
from internsp.dtensor.unfinished import UnfinishedGradients
from internsp.errors import ConfigError
from internsp.host import OPTIMIZER
from internsp.wp.collectives import Handle
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ReplicatedParameter, ShardedParameter, trained
from internsp.wp.perform import Chunk
from internsp.wp.reductions import Parcel
from internsp.wp.replicated import SMALL, ReplicatedParameters


class PlainLoop:
    """All-reduces a chunk's reduced gradients over replicas, weight by weight, and completes
    ``.grad``.

    Attributes:
        sums: of exchanges that are finished.
        unfinished: gradients whose sums wait for a later backward.
    """

    def __init__(self, communicator: ISPCommunicator) -> None:
        self._communicator, self._state = communicator, communicator.state
        self._flying: deque[tuple[ShardedParameter, Tensor, Handle] | None] = deque()
        self.sums: dict[ShardedParameter, Tensor] = {}
        discard = partial(discard_sums, communicator.state, communicator.replicated)
        self.unfinished = UnfinishedGradients(discard, communicator.mesh.rank)
        beside = communicator.beside()
        head = [u for u in communicator.units() if u.block < 0 and u not in beside]
        per_unit = [
            [
                Parcel(w.name, (w,), w.storage.numel() * _wide(w).itemsize)
                for w in reversed(unit.weights)
                if w.axis.replicas > 1
            ]
            for unit in (*head, *reversed(communicator.blocks), *beside)
        ]  # in the order in which a backward completes them
        parcels = {parcel.name: parcel for unit in per_unit for parcel in unit}
        sizes = sorted(sum(parcel.nbytes for parcel in unit) for unit in per_unit)
        self._state.queue.reductions.exchanges.declare([*parcels.values()], sum(sizes[-2:]))
        self._state.replicas = self

    def backward_ended(self, more: bool) -> None:
        """Complete ``.grad``, or where ``more`` is to come say that it is not complete."""
        if more:
            sums = [*self._communicator.replicated.with_gradient(), *self._state.reducer.touched]
            self.unfinished.show(sums)
        else:
            self.unfinished.take()
            self._collect()

    def start(self, parcel: Parcel[ShardedParameter]) -> None:
        """See :class:`internsp.wp.reductions.ReplicaExchange`.

        Also of a weight without a gradient here: the data of another replica may have gone through
        a block that this one left out, and then this one's part is zero.
        """
        weight = parcel.weights[0]
        if not weight.requires_grad and weight not in self._state.reducer.touched:
            self._flying.append(None)
            return
        if weight.reduced_grad is None:
            weight.add_reduced_grad(weight.zeros(_wide(weight)))
        mine = weight.own_reduced_grad()
        weight.drop_reduced_grad()  # a later gradient must not be added to what is on its way
        collectives = self._state.between[weight.axis].replica
        handle = collectives.all_reduce(mine, "", weight.name)
        self._flying.append((weight, mine, handle))

    def finish_oldest(self) -> None:
        """See :class:`internsp.wp.reductions.ReplicaExchange`."""
        exchange = self._flying.popleft()
        if exchange is None:
            return
        weight, total, handle = exchange
        self._state.collectives.wait(handle, "", weight.name, "finish")
        handle.keep = ()
        before = self.sums.get(weight)
        self.sums[weight] = total if before is None else before.add_(total)

    def discard(self) -> None:
        """See :class:`internsp.wp.reductions.ReplicaExchange`."""
        while self._flying:
            self.finish_oldest()
        self.sums.clear()

    def _collect(self) -> None:
        """Finish all reductions and complete ``.grad`` of every parameter. Collective; blocks.

        Raises:
            ConfigError: optimizer state is to lie in host memory, and no ``ZeroOptimizer`` has it.
        """
        communicator, state = self._communicator, self._state
        replicated, mesh, mean = communicator.replicated, communicator.mesh, communicator.mean
        if state.link is not None:
            for weight in replicated.sharded:
                if OPTIMIZER in weight.offload and weight.requires_grad:
                    raise ConfigError(
                        f'weight_parallel: offload = "optimizer" of {weight.name} (on rank '
                        f"{mesh.rank}) is the business of a ZeroOptimizer, and there is none: a "
                        "torch optimizer has its state where the parameters are, which offload = "
                        '"weights" puts into host memory'
                    )
        flat = replicated.reduce(state.reducer.touched, state.collectives)
        state.complete_gradients()
        if flat is not None:
            state.collectives.ledger.wait(flat, SMALL)
        used_small, used_sharded = replicated.used(_settled)
        ranks = mesh.shape.stage_size
        small, values = replicated.members, replicated.values()
        read = zip(small, used_small, trained(small), values, strict=True)
        for member, used, wanted, value in read:
            if used and wanted:
                _accumulate(member, value.div_(ranks) if mean else value)
        _own(replicated.sharded)
        hosted: list[tuple[ShardedParameter, Tensor]] = []
        sharded = replicated.sharded
        for weight, used, wanted in zip(sharded, used_sharded, trained(sharded), strict=True):
            total = self.sums.pop(weight) if weight in self.sums else weight.reduced()
            if used and wanted and total is not None:
                value = total.div_(ranks) if mean else total
                if weight.hosted and weight.link is not None:
                    value = value.to(grad_dtype(weight.parameter))
                    hosted.append((weight, weight.link.empty("grad", value.shape, value.dtype)))
                    weight.link.store([(hosted[-1][1], value)])
                else:
                    _accumulate(weight, value)
            weight.drop_reduced_grad()
        if state.link is not None:
            state.link.rest()
        for weight, value in hosted:
            _accumulate(weight, value)
        replicated.reset()
        state.reducer.touched.clear()


def _wide(weight: ShardedParameter) -> torch.dtype:
    return torch.promote_types(weight.reduce_dtype, torch.float32)


def _settled(member: Member) -> bool | None:
    """Zeros may be added to a ``.grad`` that is there, whether or not another rank used it."""
    if not member.requires_grad:
        return False
    return None if member.parameter.grad is None else True


def _own(weights: Iterable[ShardedParameter]) -> None:
    """Copy borrowed gradients that two weights were given: they are about to be changed."""
    seen: set[int] = set()
    for weight in weights:
        if weight.reduced_grad is not None and weight.borrowed:
            place = weight.reduced_grad.data_ptr()
            if place in seen:
                weight.own_reduced_grad()
            seen.add(place)


def _accumulate(member: Member, value: Tensor) -> None:
    """Add ``value`` (like the parameter's storage) to ``.grad``, in the dtype of that."""
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
    """Forget ``member``'s sums on this rank; waits for what is in flight. No message.

    A sum becomes zeros, not nothing: the ranks' next messages stay the same (WP-2).

    Args:
        used: whether its gradient is zeros rather than none, where this rank had one: a gradient
            that was set to zero in place exists, and optimizers step with it.
    """
    state.finish_reductions()
    if isinstance(member, ReplicatedParameter):
        replicated.discard(member, used)
        return
    state.reducer.whole.drop(member)
    if member.reduced_grad is not None:
        wide = torch.promote_types(member.reduced_grad.dtype, torch.float32)
        member.drop_reduced_grad()
        member.add_reduced_grad(member.zeros(wide))
    if member in state.reducer.touched:
        state.reducer.touched[member] &= used
