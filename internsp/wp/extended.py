"""A weight whose shard has a class with all-gather functions of its own (FSDP2's extensions)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from internsp.dtensor.placed import local_values
from internsp.wp.parameter import ShardedParameter, SlotViews

if TYPE_CHECKING:
    from internsp.schedule.extended import ExtendedShard


class ExtendedParameter(ShardedParameter):
    """A sharded parameter that lies where the program has it, in the program's class.

    ``storage`` has the shape of a padded shard and no memory.
    """

    @property
    def slot_nbytes(self) -> int:
        """See :class:`ShardedParameter`."""
        return self._extended.slot_nbytes

    def views_in(self, place: Tensor) -> SlotViews:
        """See :class:`ShardedParameter`: the bytes of the tensors that make it up."""
        return SlotViews(place, place, place)

    def read(self) -> Tensor:
        """See :class:`ShardedParameter`: in its class."""
        made = self._extended.unsharded
        assert made is not None, "gathered before"
        with torch.inference_mode(False):  # in which a class cannot be detached
            return made.detach()

    @property
    def _extended(self) -> ExtendedShard:
        return cast("ExtendedShard", self.encoding)

    def fresh(self) -> Tensor:
        """See :class:`ShardedParameter`; a placeholder, as its class reads the shard itself."""
        return self._flat

    def load(self, values: Tensor) -> None:
        """See :class:`ModelParameter`. What the program took before keeps the old values."""
        with torch.no_grad():
            for alias in [known() for known in list(self.aliases.values())]:
                if isinstance(alias, DTensor):  # its class does not say where its memory lies
                    alias._local_tensor = alias._local_tensor.clone()
            local = local_values(self.name, values, self.parameter)
            local = self.own(values) if local is None else local
            self.parameter._local_tensor.copy_(local.detach())  # type: ignore[attr-defined]
