"""A block that takes all its weights at its entry: one look at what they share, not one a weight.

What is done is what a loop over the block's sites would do; where anything is out of the ordinary
(a trace, autocast, a lease that is not there, a split backward), it is that loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from internsp.wp.communicator import WeightSite, in_backward
from internsp.wp.isp import ISPCommunicator
from internsp.wp.schedule import BACKWARD, FORWARD, RECOMPUTE
from internsp.wp.shard import Tag


class BlockUses:
    """The uses of one block's weights, small ones included, in the order of use.

    Attributes:
        sites: one for each parameter.
        cut: those whose weights are gathered.
    """

    def __init__(self, sites: Sequence[Any]) -> None:
        self.sites = list(sites)
        self.cut = [site for site in sites if isinstance(site, WeightSite)]
        self._weights = [s.weight if isinstance(s, WeightSite) else None for s in sites]
        owners = {(id(site.communicator), id(site.unit)) for site in self.cut}
        communicator = self.cut[0].communicator if self.cut else None
        self._whole = (
            len(owners) == 1
            and isinstance(communicator, ISPCommunicator)
            and communicator.by_block
            and not any(site.weight.resident for site in self.cut)
        )

    def acquire(self) -> list[Tensor]:
        """The tensors to compute with; see :meth:`WeightSite.acquire`."""
        if not self._ordinary() or torch.is_autocast_enabled(self.cut[0].weight.device_type):
            return [site.acquire() for site in self.sites]
        communicator, unit = self.cut[0].communicator, self.cut[0].unit
        state, slot = communicator.state, communicator.state.pool.slots[unit.slot]
        phase = RECOMPUTE if in_backward() else FORWARD
        if phase == RECOMPUTE and isinstance(communicator, ISPCommunicator):
            communicator.recomputes(unit)
        found = []
        for site, weight in zip(self.sites, self._weights, strict=True):
            tag = None if weight is None else slot.tags.get(weight)
            if weight is None or tag is None or tag[1] != weight.base_compute_dtype:
                found.append(site.acquire())
                continue
            weight.compute_dtype, site.tag = weight.base_compute_dtype, tag
            if weight in state.handles:
                communicator.await_gather(unit, weight, phase)
            found.append(slot.whole(unit, weight))
        slot.streams.read(*unit.weights)
        return found

    def release(self) -> None:
        """The block's forward is over: with its lease, all its uses have ended."""
        if not self._ordinary():
            for site in self.cut:
                site.release()

    def tags(self) -> list[Tag]:
        """What :meth:`acquire` showed of the cut weights."""
        return [site.tag for site in self.cut]

    def before_backward(self, tags: Sequence[Tag]) -> None:
        """See :meth:`WeightSite.before_nodes`; the last used first, or as a recompute will."""
        unit, state = self.cut[0].unit, self.cut[0].communicator.state
        pairs = list(zip(self.cut, tags, strict=True))
        if not unit.recomputed:
            pairs.reverse()
        if not self._ordinary() or unit.recomputed or state.split is not None:
            for site, tag in pairs:
                site.before_nodes(tag)
            return
        slot = state.pool.slots[unit.slot]
        slot_tags, handles = slot.tags, state.handles
        for site, tag in pairs:  # WP-14: other values, or not in the slot, are the site's business
            weight = site.weight
            if tag[0] != weight.version() or slot_tags.get(weight) != tag:
                site.before_nodes(tag)
                continue
            weight.compute_dtype = tag[1]
            if weight in handles:
                site.communicator.await_gather(unit, weight, BACKWARD)
        slot.streams.read(*unit.weights)

    def born(self, gradients: Sequence[Tensor | None], tags: Sequence[Any]) -> None:
        """Gradients of all sites, ``None`` where there is none; the last used is born first."""
        together = self._whole and self.cut[0].communicator.state.split is None
        cut = []
        all_of_them = zip(self.sites, self._weights, gradients, tags, strict=True)
        for site, weight, gradient, tag in reversed(list(all_of_them)):
            if gradient is None:
                continue
            if together and weight is not None:
                cut.append((weight, gradient))
            else:
                site.born(gradient, tag)
        if cut:
            communicator = self.cut[0].communicator
            assert isinstance(communicator, ISPCommunicator), "a whole block's"
            communicator.gradients_hook(self.cut[0].unit, cut)

    def _ordinary(self) -> bool:
        """Whether the block holds its slot with everything in it, and nobody keeps a record."""
        if not self._whole:
            return False
        unit, state = self.cut[0].unit, self.cut[0].communicator.state
        slot = state.pool.slots[unit.slot]
        return slot.holder is unit and not state.trace.enabled and not state.policy.per_module
