"""What was planned for a program written for FSDP2, and what FSDP2 would do."""

from __future__ import annotations

from torch import nn

from internsp.base.sizes import human
from internsp.fsdp.attach import attached_to
from internsp.fsdp.units import ProgramUnit


def report(model: nn.Module) -> str:
    """Units, bytes and memory of a model after its first forward, one a line. No message.

    Raises:
        ValueError: ``model`` is no module of ``fully_shard``, or has not run.
    """
    found = attached_to(model)
    if found is None:
        raise ValueError(
            f"report: this {type(model).__name__} has no plan: call internsp.fsdp.fully_shard on "
            "it, and run a forward, at which gathers are planned"
        )
    communicator = found.communicator
    plan = communicator.plan
    planned = {unit.name: unit for unit in plan.units}
    lines = [f"{type(found.root).__name__}: {communicator.mesh.describe()}"]
    whole, shards = [], 0
    for unit in found.units:
        layout = planned.get(unit.name)
        if layout is None:
            continue
        nbytes = sum(weight.unsharded_bytes for weight in layout.weights)
        whole.append(nbytes)
        shards += sum(weight.shard_bytes for weight in layout.weights)
        lines.append(
            f"  {unit.name}: {len(layout.weights)} parameters, {human(nbytes)} unsharded, "
            f"{len(layout.groups)} messages; {_while(unit)}"
        )
    roots = sum(n for u, n in zip(found.units, whole, strict=False) if u.kind == "root")
    blocks = sorted((n for u, n in zip(found.units, whole, strict=False) if u.kind != "root"))
    lines += [
        f"memory: {human(shards)} of shards, {human(sum(plan.slots()))} of slots for unsharded "
        f"weights, at most {human(plan.pending_bytes)} of gradients in flight",
        f"FSDP2 would hold {human(roots + sum(blocks[-2:]))} of unsharded weights at its peak, and "
        f"{human(max(whole))} in the buffer of a gather",
        *(f"taken from the program: {note}" for note in found.notes),
    ]
    return "\n".join(lines)


def _while(unit: ProgramUnit) -> str:
    if unit.kind == "root":
        return "unsharded from the model's entry to the end of backward"
    if unit.keeps:
        return "unsharded from its forward to its backward"
    if unit.near_ranks:
        return f"kept as slices on {unit.near_ranks} near ranks between forward and backward"
    return "gathered one ahead, in forward and in backward"
