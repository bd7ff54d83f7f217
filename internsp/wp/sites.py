"""One module's use of one sharded parameter, and a block's use of all of its own at its entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from internsp.autograd import in_backward
from internsp.wp.communicator import ISPCommunicator, WPCommunicator
from internsp.wp.parameter import ShardedParameter, Tag
from internsp.wp.perform import Chunk
from internsp.wp.slots import Unit


class WeightSite:
    """One module's use of one sharded weight (:class:`internsp.layers.views.Site`).

    Args:
        owner: the chunk's communicator; ``communicator`` is the unit's own.
    """

    guarded = True

    def __init__(
        self,
        owner: ISPCommunicator,
        communicator: WPCommunicator,
        unit: Unit,
        weight: ShardedParameter,
    ) -> None:
        self.owner, self.communicator = owner, communicator
        self.chunk: Chunk = owner.state
        self.unit = unit
        self.weight = weight
        self.parameter = weight.parameter
        self.tag: Tag = (-1, weight.compute_dtype)

    @property
    def name(self) -> str:
        """The weight's."""
        return self.weight.name

    def acquire(self) -> Tensor:
        """See :meth:`WPCommunicator.unshard`."""
        tensor = self.communicator.unshard(self.unit, self.weight)
        self.tag = self.chunk.shown(self.unit, self.weight)
        return tensor

    def release(self) -> None:
        """See :meth:`WPCommunicator.release`."""
        self.communicator.release(self.unit, self.weight)

    @property
    def apart(self) -> bool:
        """Whether the weight part of a split backward runs."""
        return self.chunk.queue.split == "weights"

    def before_backward(self, tag: Tag) -> None:
        """See :meth:`WPCommunicator.before_backward`; a weight part needs no weight."""
        if not self.apart:
            self.communicator.before_backward(self.unit, self.weight, tag)

    def before_nodes(self, tag: Tag) -> None:
        """See :meth:`ISPCommunicator.before_nodes`; a weight part needs no weight."""
        if self.apart:
            return
        if self.communicator is self.owner:
            self.owner.before_nodes(self.unit, self.weight, tag)
        else:
            self.communicator.before_backward(self.unit, self.weight, tag)

    def at_hand(self) -> bool:
        """In backward: whether the weight may be used without a message of this rank alone."""
        return not self.weight.moves or self.owner.at_hand(self.unit, self.weight)

    def spoiled(self) -> None:
        """A forward wrote into the unsharded weight: gather it anew."""
        self.weight.invalidate()

    def on_grad_ready(self, gradient: Tensor, tag: Tag) -> None:
        """See :meth:`WPCommunicator.on_grad_ready`."""
        if self.chunk.queue.split:
            self.chunk.restore(self.weight, tag)
        self.communicator.on_grad_ready(self.unit, self.weight, gradient)


class BlockUses:
    """The uses of one block's parameters, replicated ones included, in the order of use.

    Attributes:
        sites: one for each parameter.
        cut: those whose weights are sharded, all of the block's own unit.
    """

    def __init__(self, sites: Sequence[Any]) -> None:
        self.sites = list(sites)
        self.cut = [site for site in sites if isinstance(site, WeightSite)]

    def acquire(self) -> list[Tensor]:
        """The tensors to compute with; see :meth:`WeightSite.acquire`."""
        if self.cut:
            first = self.cut[0]
            first.owner.unshard_all(first.unit)
        found = []
        for site in self.sites:
            if isinstance(site, WeightSite):
                site.tag = site.chunk.shown(site.unit, site.weight)
                found.append(site.chunk.view(site.unit, site.weight))
            else:
                found.append(site.acquire())
        return found

    def release(self) -> None:
        """The block's forward is over: its bytes are released when it is left."""
        if self.cut and not in_backward():
            first = self.cut[0]
            if first.chunk.queue.policy.rolling or first.chunk.trace.enabled:
                first.chunk.perform(first.chunk.queue.release_all(first.unit))

    def tags(self) -> list[Tag]:
        """What :meth:`acquire` showed of the sharded weights."""
        return [site.tag for site in self.cut]

    def before_backward(self, tags: Sequence[Tag]) -> None:
        """See :meth:`WeightSite.before_nodes`; the last used first, or as a recompute will."""
        unit = self.cut[0].unit
        pairs = list(zip(self.cut, tags, strict=True))
        if unit.recomputed or self.cut[0].chunk.queue.split:
            for site, tag in pairs if unit.recomputed else reversed(pairs):
                site.before_nodes(tag)
            return
        self.cut[0].owner.before_all(unit, [(site.weight, tag) for site, tag in pairs])

    def on_grad_ready(self, gradients: Sequence[Tensor | None], tags: Sequence[Any]) -> None:
        """Gradients of all sites, ``None`` where there is none; the last used is ready first."""
        cut = []
        all_of_them = list(zip(self.sites, gradients, tags, strict=True))
        for site, gradient, tag in reversed(all_of_them):
            if gradient is None:
                continue
            if isinstance(site, WeightSite) and not site.chunk.queue.split:
                cut.append((site.weight, gradient))
            else:
                site.on_grad_ready(gradient, tag)
        if cut:
            self.cut[0].owner.on_grads_ready(self.cut[0].unit, cut)
