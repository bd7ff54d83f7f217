"""The weights that several ranks hold are compared, bit for bit, every so many steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from internsp.app.session.session import Session
from internsp.base.bits import checksum
from internsp.errors import ReplicaError
from internsp.failure.objects import Objects
from internsp.wp.parameter import ShardedParameter

_LISTED = 5


def compare_replicas(session: Session, step: int) -> ReplicaError | None:
    """Compare, bit for bit, the weights that several ranks hold. Collective; blocks.

    A replica that has drifted (a flipped bit, a device that computes wrongly, a lost message) does
    not show in the loss for a long time: gradients are summed over replicas, weights are not.

    Returns:
        The error that ends the run if they differ, on every rank; names the weights and the ranks.
    """
    for communicator in session.communicators:
        communicator.wait_until_ready()
    mesh = session.mesh
    mine = [
        (member.name, _part(member), checksum(member.parameter))
        for communicator in session.communicators
        for member in communicator.replicated.all_parameters()
    ]
    found = _differing(Objects(mesh.stage_group).gather(mine), mesh.stage_ranks)
    gathered = Objects().gather(found)  # so that all pipeline stages stop together
    lines = list(dict.fromkeys(line for lines in gathered for line in lines))
    if not lines:
        return None
    more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return ReplicaError(
        f"after step {step} replicas of weights are not equal: {'; '.join(lines[:_LISTED])}"
        f"{more} (this is rank {mesh.rank}). Nothing was saved: look at the machines of the "
        "ranks that differ, and resume from the newest checkpoint"
    )


def _part(member: Any) -> tuple[str, int, int]:
    """Which part of a weight a rank holds; equal for all replicas of that part."""
    if isinstance(member, ShardedParameter):
        return member.axis.name, member.axis.expert_rank, member.rank
    return "", 0, 0


def _differing(everyone: Sequence[Sequence[Any]], ranks: Sequence[int]) -> list[str]:
    """A message for each part of a weight whose bits differ between ranks."""
    holders: dict[Any, dict[int, list[int]]] = {}
    for rank, reported in zip(ranks, everyone, strict=True):
        for name, part, value in reported:
            holders.setdefault((name, part), {}).setdefault(value, []).append(rank)
    lines = []
    for (name, _), by_value in holders.items():
        if len(by_value) > 1:
            most, *few = sorted(by_value.values(), key=len, reverse=True)
            others = ", another on ".join(str(ranks) for ranks in few)
            lines.append(f"{name} differs: one value on ranks {most}, another on {others}")
    return lines
