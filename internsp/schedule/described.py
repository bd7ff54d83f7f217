"""A chunk's units, messages and memory as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from internsp.base.sizes import human
from internsp.schedule.chunk import ChunkLayout


def described(plan: ChunkLayout, remarks: Mapping[str, str]) -> Iterator[str]:
    """One line a unit, in the order of ``remarks``, then one of the memory of this rank.

    Args:
        remarks: what to say of each unit, by name; units without a sharded weight are left out.
    """
    units = {unit.name: unit for unit in plan.units}
    for name, remark in remarks.items():
        if name in units:
            weights, messages = units[name].weights, len(units[name].groups)
            size = human(sum(weight.unsharded_bytes for weight in weights))
            yield f"  {name}: {len(weights)} weights, {size} whole, {messages} messages; {remark}"
    shards = sum(weight.shard_bytes for unit in plan.units for weight in unit.weights)
    yield (
        f"memory: {human(shards)} of shards, {human(sum(plan.slots()))} of slots for whole "
        f"weights, at most {human(plan.pending_bytes)} of gradients in flight"
    )
