"""A user's own communicator in place of the library's (``docs/howto/own_communicator.md``)."""

from __future__ import annotations

import torch
from torch import Tensor

from internsp.base.autograd import NO_TASK, graph_task
from internsp.wp.autocast import follow
from internsp.wp.communicator import WPCommunicator
from internsp.wp.events import Events
from internsp.wp.parameter import ShardedParameter
from internsp.wp.perform import Chunk


class UsersCommunicator(WPCommunicator):
    """Wraps a user's own implementation.

    That implementation hands reduced gradients to :attr:`ShardedParameter.reduced`;
    exchange between replicas, ``.grad`` and optimizers go on from there.
    """

    def __init__(self, chunk: Chunk, events: Events, own: WPCommunicator) -> None:
        self._chunk, self._events, self.own = chunk, events, own

    @property
    def weight_part(self) -> bool:
        """See :attr:`WPCommunicator.weight_part`."""
        return self._events.weight_part

    def unshard(self, weight: ShardedParameter) -> Tensor:
        """See :meth:`WPCommunicator.unshard`."""
        follow(weight)
        weight.used_version = weight.current_version()
        return self.own.unshard(weight)

    def release(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.release`."""
        if graph_task() == NO_TASK:
            self.own.release(weight)

    def pre_backward(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.pre_backward`."""
        if not self.weight_part:
            self.own.pre_backward(weight)

    def on_grad_ready(self, weight: ShardedParameter, gradient: Tensor) -> None:
        """See :meth:`WPCommunicator.on_grad_ready`."""
        if self._events.backward < 0:
            self._events.begin_at_gradient()
        reducer = self._chunk.reducer
        if weight.frozen:  # since the forward; other ranks' reductions need this one's
            gradient = torch.zeros_like(gradient)
            reducer.had_gradient.setdefault(weight, False)
        else:
            reducer.had_gradient[weight] = True
        self.own.on_grad_ready(weight, gradient)
