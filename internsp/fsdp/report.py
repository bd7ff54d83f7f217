"""What was planned for a program written for FSDP2, and what FSDP2 would do."""

from __future__ import annotations

from torch import nn

from internsp.base.sizes import human
from internsp.fsdp.attach import plan_of
from internsp.fsdp.units import ProgramUnit
from internsp.schedule.described import described


def report(model: nn.Module) -> str:
    """Units, bytes and memory of a model after its first forward, one a line. No message.

    Raises:
        ValueError: ``model`` is no module of ``fully_shard``, or has not run.
    """
    found = plan_of(model, "report")
    mesh, plan = found.communicator.mesh, found.communicator.plan
    sizes = {u.name: sum(w.unsharded_bytes for w in u.weights) for u in plan.units}
    own = [(unit.kind, sizes.get(unit.name, 0)) for unit in found.units]
    most = sorted(size for kind, size in own if kind != "root")[-2:]
    peak = sum(most) + sum(size for kind, size in own if kind == "root")
    told = [
        f"{type(found.root).__name__}: {mesh.describe()}",
        *described(plan, {unit.name: _while(unit) for unit in found.units}),
        f"FSDP2 would hold {human(peak)} of whole weights at its peak, and "
        f"{human(max(sizes.values()))} in the buffer of a gather",
    ]
    if found.zero:
        told.append(f"optimizer state is over {mesh.zero * mesh.weight} ranks")
    elif mesh.replicas > 1:
        told.append(
            f"each of {mesh.replicas} replicas has all optimizer state, which "
            "internsp.fsdp.zero_optimizer(model, optimizer) would shard"
        )
    return "\n".join([*told, *(f"taken from the program: {note}" for note in found.notes)])


def _while(unit: ProgramUnit) -> str:
    if unit.kind == "root":
        return "whole from the model's entry to the end of backward"
    if unit.keeps:
        return "whole from its forward to its backward"
    near = max(map(unit.near_ranks, unit.groups), default=0)
    slices = f", from slices on {near} near ranks" if near else ""
    return f"gathered one ahead, in forward and in backward{slices}"
