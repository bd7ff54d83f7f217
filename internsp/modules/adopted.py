"""Puts a program's own sharded parameters into a parallel model, in the place of the library's.

A program that shards parameters itself, as FSDP2 does, makes its optimizer of them before the
library sees them: they must stay the objects that they are, on the program's mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from internsp.dtensor.parameter import make_shard_parameter, tensors_over
from internsp.modules.parameters import Weights, put
from internsp.structure.assign import ParameterOwner
from internsp.wp.parameter import ShardedParameter


def adopt(
    member: ShardedParameter, given: Any, owners: Iterable[ParameterOwner], memory: Tensor
) -> Tensor | None:
    """Let ``given`` be the parameter of ``member``. Not collective.

    Args:
        given: a ``DTensor`` parameter whose local tensor has this rank's values.
        owners: the modules that hold the parameter.
        memory: what the local tensor lies in, flat and padded. Where it is a shard like
            ``member``'s it becomes that, so that a state dict that the program has kept stays the
            model's; otherwise (another dimension than 0) the values move.

    Returns:
        The local tensor that it had, if the values have moved, for :func:`follow`.
    """
    before, local = member.parameter, given._local_tensor
    fits = memory.numel() == member.storage.numel() and memory.data_ptr() == local.data_ptr()
    moves = not fits or member.layout.dim != 0
    if moves:
        given._local_tensor = member.local(member.storage)
        with torch.no_grad():
            given._local_tensor.copy_(local)
    else:
        member.hold(memory.view(member.storage.shape))
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
    return local if moves and local.numel() else None


def follow(moved: Mapping[Tensor, ShardedParameter]) -> None:
    """Let what the program took of the local tensors that adopted parameters had lie where these
    lie now."""
    for local, held in tensors_over(moved):
        to = moved[local].parameter._local_tensor  # type: ignore[attr-defined]
        getattr(held, "_local_tensor", held).data = to
