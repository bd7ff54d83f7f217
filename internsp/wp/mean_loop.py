"""The end of backward in a plain loop whose gradients are means, as those of FSDP2 are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from internsp.dtensor.mixed import read_each
from internsp.dtensor.placed import dtensor_like, grad_dtype
from internsp.mesh import ParallelMesh
from internsp.schedule.terms import Parcel
from internsp.wp.parameter import Member, ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.plain_loop import PlainLoop
from internsp.wp.replicated import ReplicatedParameters

_tensor: Any = torch.Tensor
_post_accumulate_hooks = _tensor._post_accumulate_grad_hooks.__get__


class MeanLoop(PlainLoop):
    """The plain loop, with means, and with what a program says of single units.

    Args:
        before: the loop whose place it takes.

    Attributes:
        divisors: by what a weight's sum is divided; the number of ranks with parts or replicas of
            it if it is not here.
        hooks: called with a weight's mean, which they may change, before ``.grad`` has it.
        zeros: weights whose ``.grad`` is zeros where no rank has used them.
        taken: a program's hooks on parameters, called at the end of backward (:meth:`take_hooks`).
    """

    def __init__(
        self, before: PlainLoop, state: Chunk, mesh: ParallelMesh, replicated: ReplicatedParameters
    ) -> None:
        super().__init__(state, mesh, replicated, mean=True)
        self.placeholders = before.placeholders  # which the communicator knows
        self.divisors: dict[Member, float] = {}
        self.hooks: dict[Member, Callable[[Tensor], None]] = {}
        self.zeros: set[ShardedParameter] = set()
        self.taken: dict[Member, list[dict[int, Callable[[Tensor], None]]]] = {}
        self._hooked: list[Member] = []  # of those, what this backward has completed

    def start(self, parcel: Parcel[ShardedParameter]) -> None:
        """See :class:`internsp.wp.consumer.GradientConsumer`; sums that wait are not exchanged."""
        if parcel.weights[0] in self.waiting:
            self._in_flight.append(None)
        else:
            super().start(parcel)

    def value_of(self, member: Member, total: Tensor) -> Tensor:
        """See :class:`PlainLoop`."""
        value = super().value_of(member, total)
        if member in self.hooks:
            self.hooks[member](value)
        if member in self.taken:
            self._hooked.append(member)
        return value

    def divisor(self, member: Member) -> float:
        """See :class:`internsp.wp.consumer.GradientConsumer`."""
        return self.divisors.get(member, member.axis.size * member.axis.replicas)

    def known_use(self, member: Member) -> bool | None:
        """See :class:`PlainLoop`; what others do with their experts does not matter to a rank that
        shares its own with none. Hooks do not run again on what no rank has used."""
        axis = member.axis
        if axis.expert > 1 and axis.size * axis.replicas == 1:
            return False
        known = super().known_use(member)
        hooked = member in self.hooks or member in self.taken
        return None if known and hooked and member not in self.zeros else known

    def backward_begins(self) -> None:
        """See :class:`internsp.wp.consumer.GradientConsumer`; takes hooks that are new since the
        forward."""
        super().backward_begins()
        members = self._replicated.all_parameters()
        hooked = read_each(_post_accumulate_hooks, [member.parameter for member in members])
        for member, hooks in zip(members, hooked, strict=True):
            if hooks:
                self.take_hooks(member)

    def backward_ended(self, more: bool) -> None:
        """See :class:`internsp.wp.consumer.GradientConsumer`."""
        self._hooked.clear()
        super().backward_ended(more)
        if more:
            return
        self.placeholders.set_placeholders(self._state.reducer.had_gradient)
        for weight in self.zeros:
            if weight.requires_grad and weight.parameter.grad is None:
                local = weight.local(weight.storage)
                zeros = torch.zeros_like(local, dtype=grad_dtype(weight.parameter))
                weight.parameter.grad = dtensor_like(weight.parameter, zeros)
                self._hooked += [weight] if weight in self.taken else []

    def take_hooks(self, member: Member) -> bool:
        """See :class:`internsp.wp.consumer.GradientConsumer`."""
        parameter: Any = member.parameter
        # The dictionary itself: what has registered a hook removes it from there.
        before = [hooks for hooks in self.taken.get(member, ()) if hooks]
        self.taken[member] = [*before, parameter._post_accumulate_grad_hooks]
        parameter._post_accumulate_grad_hooks = OrderedDict()
        return True

    def call_hooks(self) -> None:
        """See :class:`internsp.wp.consumer.GradientConsumer`."""
        hooked, self._hooked = self._hooked, []  # a hook may run the model again
        for member in hooked:
            for hooks in self.taken[member]:
                for hook in [*hooks.values()]:
                    hook(member.parameter)
