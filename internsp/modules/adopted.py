"""Puts a program's own sharded parameters into a parallel model, in the place of the library's.

A program that shards parameters itself, as FSDP2 does, makes its optimizer of them before the
library sees them: they must stay the objects that they are, on the program's mesh.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from internsp.dtensor.parameter import make_shard_parameter, note_alias
from internsp.modules.parameters import Weights, put
from internsp.structure.assign import ParameterOwner
from internsp.wp.parameter import ShardedParameter


def adopt(
    member: ShardedParameter, given: Any, owners: Iterable[ParameterOwner], memory: Tensor
) -> None:
    """Let ``given`` be the parameter of ``member``. Not collective.

    Args:
        given: a ``DTensor`` parameter whose local tensor has this rank's values.
        owners: the modules that hold the parameter.
        memory: what the local tensor lies in, flat and padded. Where it is a shard like
            ``member``'s it becomes that, so that a state dict that the program has kept stays the
            model's; otherwise (another dimension than 0) the values move.
    """
    before, local = member.parameter, given._local_tensor
    fits = memory.numel() == member.storage.numel() and memory.data_ptr() == local.data_ptr()
    if fits and member.layout.dim == 0:
        member.hold(memory.view(member.storage.shape))
    else:
        own = member.local(member.storage)
        with torch.no_grad():
            own.copy_(local)
        for _, kept in _tensors_over([given]):
            getattr(kept, "_local_tensor", kept).data = own
        given._local_tensor = own
    member._counter = given.detach()  # shares the version counter
    member.parameter = make_shard_parameter(given, member)
    member.parameter.grad_dtype = before.grad_dtype
    for owner in owners:
        held, name = owner.module._parameters, owner.name
        assert isinstance(held, Weights), "of a parallel model"
        assert held.get(name) is before, "of a parallel model"
        held[name] = given
        for path, copied in held.copies:
            if copied == name:
                put(owner.module, path, given)


def note_held(members: Iterable[ShardedParameter]) -> None:
    """Note what the program took of adopted parameters before (a state dict): it follows them where
    an optimizer moves them."""
    owner = {member.parameter: member for member in members}
    for parameter, held in _tensors_over(owner):
        member = owner[parameter]
        known = member._counter, getattr(member._counter, "_local_tensor", None), member.storage
        if not any(held is each for each in known):
            note_alias(member.aliases, held)


def _tensors_over(parameters: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Each parameter with what else lies as its local tensor does, as far as Python holds it."""
    lying = {parameter._local_tensor.data_ptr(): parameter for parameter in parameters}
    for held in gc.get_objects():
        if not issubclass(type(held), Tensor):
            continue
        own = getattr(held, "_local_tensor", held) if isinstance(held, DTensor) else held
        try:
            parameter = lying.get(own.data_ptr())
        except RuntimeError:  # a tensor without memory
            continue
        if parameter is None or not own.numel() or held is parameter:
            continue
        local = parameter._local_tensor
        if own is not local and own.shape == local.shape:
            yield parameter, held
