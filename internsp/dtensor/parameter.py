"""``ShardParameter``: a model's parameter, a ``DTensor`` with the ``.data`` that one process has.

torch gives a ``DTensor``'s ``.data`` a version counter of its own, so that no counter shows a write
through it, and it ignores ``p.data = x`` (the local tensor stays; seen with torch 2.13). Here
``p.data`` is ``p.detach()``, which shares the counter, and ``p.data = x`` copies ``x`` into the
shard. Results of operations on it outside of a forward keep its name
(:mod:`internsp.dtensor.mixed`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from internsp.dtensor.mixed import ParameterTensor, ParameterValue
from internsp.errors import StructureError

Aliases = dict[int, "weakref.ref[Any]"]


class Reads(Protocol):
    """Reads parameters in a forward (:class:`internsp.modules.reads.ForwardReads`)."""

    def full_tensor(self, member: Any) -> Tensor | None:
        """The unsharded parameter with a gradient that ranks sum; ``None`` outside of a forward."""

    def refuse(self, member: Any, what: str) -> None:
        """Raise in a forward, where the gradient of ``what`` would not be summed."""


class Meet(Protocol):
    """Raises unless all ranks that take part in a collective reach it."""

    def __call__(self, what: str, everyone: bool = False) -> None:
        """With ``everyone``, all that hold a part or a replica take part; else one replica's."""


class StepCount:
    """How many optimizer steps have written some parameters: what ``foreach`` and fused operations
    write no version counter shows.

    Parameters that share a counter are stepped together, so that one number is raised once a step.
    """

    steps = 0


class Member(Protocol):
    """What a ``ShardParameter`` belongs to: a sharded weight or a replicated parameter."""

    name: str
    parameter: nn.Parameter
    meet: Meet | None
    """Called before a collective on the parameter: raises unless all ranks of its mesh reach it."""

    reads: Reads | None
    """Reads it in a forward; ``None`` before :func:`internsp.parallelize` has ended."""

    def load(self, values: Tensor) -> None:
        """Copy ``values``, unsharded or a ``DTensor`` of the same placements, into the shard."""

    def invalidate(self) -> None:
        """The values were written in a way that no version counter shows."""

    stepped: StepCount
    """Counts the steps that have written it."""

    aliases: Aliases
    """Results of ``detach`` and ``to_local`` that are still alive, by ``id``."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is stored."""

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained at the moment."""


class ShardParameter(ParameterTensor):
    """A model's parameter."""

    _member: Member

    def detach(self) -> ShardParameter:
        """A ``ShardParameter`` with the same memory and version counter, as in ``state_dict``.

        It must be of the same type, or ``nn.Parameter`` (and so ``model.to``) would refuse it.
        """
        found: Any = super().detach()
        found.__class__ = ShardParameter
        found._member = self._member
        note_alias(self._member.aliases, found)
        return found  # type: ignore[no-any-return]

    def to_local(self, **options: Any) -> Tensor:
        """This rank's rows, which share the memory of the parameter as long as they are held."""
        local = super().to_local(**options)
        if local is self._local_tensor:
            local = local.detach()  # an object of its own: whether it is held can be known
        note_alias(self._member.aliases, local)
        return local

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """:meth:`detach`: a write through it raises the version with which slots are compared."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        """Copy ``values`` into the shard: unsharded ones, the same on all ranks, or a ``DTensor``.

        Tensors that ``data`` or ``detach`` returned before keep the old values, as on one process
        (``old = p.data; p.data = average; ...; p.data = old``).

        Raises:
            LayoutError: another shape or placement.
            StructureError: another dtype.
        """
        member = self._member
        if values.dtype != member.dtype:
            raise StructureError(
                f"{member.name}.data was given {values.dtype} for its {member.dtype}: cast the "
                "model before parallelize(), or set weight_parallel.compute_dtype"
            )
        member.load(values)
        member.invalidate()

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The unsharded parameter. Collective, blocks.

        In a forward its gradient is summed over all ranks, as each has its own; elsewhere it is
        taken for equal on all ranks, as torch does.

        Args:
            grad_placements: how the gradient of the result will be placed, as in
                ``DTensor.full_tensor``; ``[Partial()] * device_mesh.ndim`` sums it everywhere.

        Raises:
            CollectiveError: some rank of its group does not call it.
            StructureError: in a forward, where the sum is not known.
        """
        has_gradient = torch.is_grad_enabled() and self.requires_grad
        if grad_placements is None and has_gradient and self._member.reads is not None:
            found = self._member.reads.full_tensor(self._member)
            if found is not None:
                return found
        return self._full_tensor(grad_placements)

    def _redistribute(self, *args: Any, **options: Any) -> DTensor:
        """As ``DTensor.redistribute``: collective, blocks.

        A whole result has memory of its own, also where this rank holds the whole parameter: a
        state dict that is kept must not change with the next step.

        Raises:
            CollectiveError: some rank of its group does not call it.
        """
        if self._member.meet is not None:
            self._member.meet(f"full_tensor() or redistribute() of {self._member.name}")
        kind = self.device_mesh.device_type
        if self._local_tensor.device.type != kind:  # offloaded: collectives need the device
            there: Any = self.to(kind)
            return there._redistribute(*args, **options)  # type: ignore[no-any-return]
        found: Any = super()._redistribute(*args, **options)
        if not all(placement.is_replicate() for placement in found.placements):
            return found  # type: ignore[no-any-return]
        memory = found._local_tensor.untyped_storage()._cdata  # what is compiled has no address
        if memory != self._local_tensor.untyped_storage()._cdata:
            return found  # type: ignore[no-any-return]
        return found.clone()  # type: ignore[no-any-return]


def note_alias(aliases: Aliases, found: Tensor) -> None:
    """Note that the program has ``found``, as long as something holds it."""
    key = id(found)
    aliases[key] = weakref.ref(found, lambda _: aliases.pop(key, None))


def tensors_over(locals_: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of ``locals_`` with each other tensor, or ``DTensor``, that lies where it does, as far
    as Python holds them. Looks at all objects once."""
    lying = {local.data_ptr(): local for local in locals_ if local.numel()}
    for held in gc.get_objects() if lying else ():
        if not issubclass(type(held), Tensor):
            continue
        own = getattr(held, "_local_tensor", held)
        try:
            local = lying.get(own.data_ptr())
        except RuntimeError:  # a tensor without memory
            continue
        if local is not None and own is not local and own.shape == local.shape:
            yield local, held


def _of_parameter(aliases: Aliases, local: Tensor) -> list[tuple[Any, Tensor]]:
    """The aliases that are alive and lie where ``local`` does, each with its own local tensor."""
    alive = [alias for alias in (known() for known in list(aliases.values())) if alias is not None]
    found = [(alias, getattr(alias, "_local_tensor", alias)) for alias in alive]
    return [(alias, own) for alias, own in found if own.data_ptr() == local.data_ptr()]


def move_aliases(parameter: nn.Parameter, aliases: Aliases, to: Tensor) -> None:
    """Let ``aliases`` of ``parameter``, whose local tensor is about to lie ``to``, follow it there:
    a state dict that a program keeps stays that of the model."""
    local: Tensor = parameter._local_tensor  # type: ignore[attr-defined]
    for _, own in _of_parameter(aliases, local):
        own.data = to


def detach_aliases(parameter: nn.Parameter, aliases: Aliases, values: Tensor) -> None:
    """Give ``aliases`` of ``parameter`` a copy of its values, before ``values`` are copied into it.

    On one process ``p.data = values`` gives ``p`` other memory, so that aliases keep the old
    values; here the parameter must stay in its own memory.
    """
    local: Tensor = parameter._local_tensor  # type: ignore[attr-defined]
    held = [alias for alias, own in _of_parameter(aliases, local) if alias is not own]
    if any(alias is values for alias in held):  # the parameter's own values: nothing changes
        return
    old = local.detach().clone() if held else local
    for alias in held:
        alias._local_tensor = old.detach()


def make_shard_parameter(parameter: nn.Parameter, member: Member) -> nn.Parameter:
    """Turn ``parameter``, a ``DTensor``, into ``member``'s ``ShardParameter`` in place."""
    owned: Any = parameter
    owned.__class__ = ShardParameter
    owned._member = member
    return parameter


# As torch does for DTensor itself, so that its optimizers take their foreach path on a device.
for _module in (torch_optimizer, _foreach_utils):
    for _type in (ShardParameter, ParameterValue):
        if _type not in _module._foreach_supported_types:
            _module._foreach_supported_types.append(_type)
