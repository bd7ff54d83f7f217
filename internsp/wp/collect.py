"""The end of a plain loop's backward: every ``.grad`` complete, on every rank (WP-5, WP-9)."""

from __future__ import annotations

import torch
from torch import Tensor

from internsp.mesh import ParallelMesh
from internsp.wp.collectives import all_reduce, wait_all
from internsp.wp.communicator import ChunkState
from internsp.wp.replicated import ReplicatedParameter, SmallParameters
from internsp.wp.shard import ShardedWeight


def collect(state: ChunkState, small: SmallParameters, mesh: ParallelMesh, mean: bool) -> None:
    """Drain all reductions and complete ``.grad`` of every parameter. Collective; blocks."""
    state.pending.drain()
    small.flag(state.touched)
    weights = _weights(state, small)
    _own(weights)
    works = [small.reduce(mesh.stage_group, state.counters)]
    works += [
        all_reduce(w.partial, w.axis.replica_group, state.counters)
        for w in weights
        if w.partial is not None and w.axis.replicas > 1
    ]
    wait_all(works, state.collectives.ledger, "gradients of replicas")
    used_small, used_sharded = small.used()
    ranks = mesh.shape.stage_size
    for member, used, value in zip(small.members, used_small, small.values(), strict=True):
        if used and member.requires_grad:
            _accumulate(member, value.div_(ranks) if mean else value)
    for weight, used in zip(small.sharded, used_sharded, strict=True):
        if used and weight.partial is not None:
            _accumulate(weight, weight.partial.div_(ranks) if mean else weight.partial)
        weight.drop_partial()
    small.reset()
    state.touched.clear()


def _weights(state: ChunkState, small: SmallParameters) -> list[ShardedWeight]:
    """Those whose sums replicas exchange, in the declared order, which all ranks share (WP-2).

    All that are trained, not only those with a gradient here: the data of another replica may have
    gone through a block that this one left out, and then this one's part is zero.
    """
    found = []
    for weight in small.sharded:
        if weight not in state.touched:
            if weight.axis.replicas == 1 or not weight.requires_grad:
                continue
            wide = torch.promote_types(weight.reduce_dtype, torch.float32)
            weight.partial = torch.zeros_like(weight.storage, dtype=wide)
        found.append(weight)
    return found


def _own(weights: list[ShardedWeight]) -> None:
    """Copy lent gradients that are about to be changed, or that two weights were given."""
    seen: set[int] = set()
    for weight in weights:
        if weight.partial is None or not weight.lent:
            continue
        place = weight.partial.data_ptr()
        if weight.axis.replicas > 1 or place in seen:
            weight.own_partial()
        seen.add(place)


def _accumulate(member: ShardedWeight | ReplicatedParameter, value: Tensor) -> None:
    """Add ``value`` (like the parameter's storage) to ``.grad``, which keeps its own dtype."""
    gradient = member.wrap(value if value.dtype == member.dtype else value.to(member.dtype))
    if member.parameter.grad is None:
        member.parameter.grad = gradient
    else:
        member.parameter.grad._local_tensor.add_(gradient._local_tensor)  # type: ignore[attr-defined]
