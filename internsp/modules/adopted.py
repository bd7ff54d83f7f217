"""Puts a program's own sharded parameters into a parallel model, in the place of the library's.

A program that shards parameters itself, as FSDP2 does, makes its optimizer of them before the
library sees them: they must stay the objects that they are, on the program's mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from internsp.dtensor.parameter import make_shard_parameter
from internsp.modules.parameters import Weights, put
from internsp.structure.assign import ParameterOwner
from internsp.wp.parameter import ShardedParameter


def adopt(member: ShardedParameter, given: Any, owners: Iterable[ParameterOwner]) -> None:
    """Let ``given`` be the parameter of ``member``. Not collective.

    Args:
        given: a ``DTensor`` parameter whose local tensor has this rank's values; its local tensor
            moves into ``member``'s shard.
        owners: the modules that hold the parameter.
    """
    local, before = member.local(member.storage), member.parameter
    with torch.no_grad():
        local.copy_(given._local_tensor)
    given._local_tensor = local
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
