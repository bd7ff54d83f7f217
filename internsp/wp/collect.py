"""The end of a plain loop's backward: every ``.grad`` complete, on every rank (WP-5, WP-9)."""

from __future__ import annotations

import torch
from torch import Tensor

from internsp.mesh import ParallelMesh
from internsp.wp.collectives import all_reduce, wait_all
from internsp.wp.parameter import ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.replicated import ReplicatedParameter, ReplicatedParameters


def collect(
    state: Chunk, replicated: ReplicatedParameters, mesh: ParallelMesh, mean: bool
) -> None:
    """Finish all reductions and complete ``.grad`` of every parameter. Collective; blocks."""
    state.finish_reductions()
    replicated.flag(state.reducer.touched)
    weights = _weights(state, replicated)
    _own(weights)
    ledger, what = state.collectives.ledger, "gradients of replicas"
    with ledger.launching(what):
        works = [replicated.reduce(mesh.stage_group, state.counters)]
        works += [
            all_reduce(w.reduced_grad, w.axis.replica_group, state.counters)
            for w in weights
            if w.reduced_grad is not None and w.axis.replicas > 1
        ]
    wait_all(works, ledger, what)
    used_small, used_sharded = replicated.used(_settled)
    ranks = mesh.shape.stage_size
    values = replicated.values()
    for member, used, value in zip(replicated.members, used_small, values, strict=True):
        if used and member.requires_grad:
            _accumulate(member, value.div_(ranks) if mean else value)
    for weight, used in zip(replicated.sharded, used_sharded, strict=True):
        if used and weight.reduced_grad is not None:
            _accumulate(weight, weight.reduced_grad.div_(ranks) if mean else weight.reduced_grad)
        weight.drop_reduced_grad()
    replicated.reset()
    state.reducer.touched.clear()


def _weights(state: Chunk, replicated: ReplicatedParameters) -> list[ShardedParameter]:
    """Those whose sums replicas exchange, in the declared order, which all ranks share (WP-2).

    All that are trained, not only those with a gradient here: the data of another replica may have
    gone through a block that this one left out, and then this one's part is zero.
    """
    found = []
    for weight in replicated.sharded:
        if weight not in state.reducer.touched:
            if weight.axis.replicas == 1 or not weight.requires_grad:
                continue
            wide = torch.promote_types(weight.reduce_dtype, torch.float32)
            weight.reduced_grad = torch.zeros_like(weight.storage, dtype=wide)
        found.append(weight)
    return found


def _settled(member: ShardedParameter | ReplicatedParameter) -> bool | None:
    """Zeros may be added to a ``.grad`` that is there, whether or not another rank used it."""
    if not member.requires_grad:
        return False
    return None if member.parameter.grad is None else True


def _own(weights: list[ShardedParameter]) -> None:
    """Copy borrowed gradients that are about to be changed, or that two weights were given."""
    seen: set[int] = set()
    for weight in weights:
        if weight.reduced_grad is None or not weight.borrowed:
            continue
        place = weight.reduced_grad.data_ptr()
        if weight.axis.replicas > 1 or place in seen:
            weight.own_reduced_grad()
        seen.add(place)


def _accumulate(member: ShardedParameter | ReplicatedParameter, value: Tensor) -> None:
    """Add ``value`` (like the parameter's storage) to ``.grad``, which keeps its own dtype."""
    gradient = member.wrap(value if value.dtype == member.dtype else value.to(member.dtype))
    if member.parameter.grad is None:
        member.parameter.grad = gradient
    else:
        member.parameter.grad._local_tensor.add_(gradient._local_tensor)  # type: ignore[attr-defined]
