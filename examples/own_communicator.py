"""A communicator of one's own: each weight is gathered where it is used, without overlap.

    communicator = internsp.parallelize(model, mesh, communicator=Synchronous())

Four methods take the place of the library's (docs/howto/own_communicator.md).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from internsp import ShardedParameter, WPCommunicator


class Synchronous(WPCommunicator):
    """Gathers a weight where it is used, and waits."""

    def __init__(self) -> None:
        # Of each weight its memory, which keeps its address while graphs live.
        self.flat: dict[ShardedParameter, Tensor] = {}
        # Backwards that have begun and not given their gradient.
        self.needed: dict[ShardedParameter, int] = {}

    def _gather(self, weight: ShardedParameter) -> None:
        shard, numel = weight.to_send(), weight.layout.padded_numel
        if weight not in self.flat:
            self.flat[weight] = shard.new_empty(numel)  # on the weight's device
        flat = self.flat[weight]
        flat.untyped_storage().resize_(numel * shard.itemsize)
        # `.data` has a version counter of its own: autograd must not take this for a change of
        # tensors that it has saved.
        dist.all_gather_into_tensor(flat.data, shard, group=weight.axis.weight_group)

    def _free(self, weight: ShardedParameter) -> None:
        self.flat[weight].untyped_storage().resize_(0)

    def unshard(self, weight: ShardedParameter) -> Tensor:
        """Return the unsharded weight: a module is about to use it."""
        self._gather(weight)
        return weight.layout.unsharded_view(self.flat[weight].data)

    def release(self, weight: ShardedParameter) -> None:
        """Free the memory until backward: the module's forward is over."""
        self._free(weight)

    def pre_backward(self, weight: ShardedParameter) -> None:
        """Have the same values at the same address again."""
        if weight.parameter.requires_grad:
            self.needed[weight] = self.needed.get(weight, 0) + 1
        if not self.flat[weight].untyped_storage().size():
            self._gather(weight)

    def on_grad_ready(self, weight: ShardedParameter, gradient: Tensor) -> None:
        """Add this rank's rows of the sum of one use's gradients."""
        layout = weight.layout
        pieces = gradient.new_empty(layout.padded_numel, dtype=weight.reduce_dtype)
        layout.pack(gradient, pieces)  # by rows, the tail padded with zeros
        total = pieces.new_empty(layout.shard_numel)
        dist.reduce_scatter_tensor(total, pieces, group=weight.axis.gradient_group)
        wide = torch.promote_types(total.dtype, torch.float32)
        weight.reduced.add(total.to(wide).view(layout.shard_shape))
        if self.needed.get(weight):  # a lookup's backward does without its table
            self.needed[weight] -= 1
            if not self.needed[weight]:
                self._free(weight)
