"""Degrees that do not fit the number of ranks, of a mesh or of a command. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def impossible(
    world: int, degrees: Mapping[str, Any], whose: str = ""
) -> Iterator[tuple[str, str]]:
    """(name, sentence) of each of ``MeshShape``'s degrees, from 1, that does not fit ``world``.

    Args:
        whose: for the sentence, where the number of ranks comes from.
    """
    pipeline, tensor, sequence = degrees["pipeline"], degrees.get("tensor", 1), degrees["sequence"]
    if world % pipeline:
        text = f"{pipeline} does not divide the world of {_ranks(world)}{whose}"
        yield "pipeline", f"{text}; choose one of {_divisors(world)}"
        return
    stages = f"ranks of a pipeline stage (world {world} / pipeline {pipeline}"
    if world // pipeline % tensor:
        text = f"{tensor} does not divide the {world // pipeline} {stages})"
        yield "tensor", f"{text}; choose one of {_divisors(world // pipeline)}"
        return
    stage = world // (pipeline * tensor)
    where = f"does not divide the {_ranks(stage)}{whose}"
    if pipeline * tensor > 1:
        where = f"does not divide the {stage} {stages}{f' / tensor {tensor}' * (tensor > 1)})"
    for name in ("weight", "sequence"):
        if stage % degrees[name]:
            yield name, f"{degrees[name]} {where}; choose one of {_divisors(stage)}"
    if sequence % degrees["ring"]:
        text = f"{degrees['ring']} does not divide the sequence degree of {sequence}"
        yield "ring", f"{text}; choose one of {_divisors(sequence)}"
    zero, (replicas, left) = degrees["zero"], divmod(stage, degrees["weight"])
    if zero is not None and not left and replicas % zero:
        text = f"{zero} does not divide the {replicas} replicas of a weight shard"
        yield "zero", f"{text}; choose one of {_divisors(replicas)}"
    own, expert = degrees["expert_weight"], degrees["expert"]
    if own is None and expert == 1:
        return
    size, over = (own or degrees["weight"]) * expert, degrees.get("experts_over_tensor")
    if stage * (tensor if over else 1) % size:
        that = f"{own or degrees['weight']}{' (that of weight)' * (own is None)}"
        text = f"{that} x expert={expert} = {size} {where}"
        yield "expert_weight", f"{text}; choose a product among {_divisors(stage)}"
    if tensor > 1 and not over:
        yield "tensor", (
            f"{tensor} together with an axis for experts (expert_weight or expert) is not "
            "supported: shard the experts' weights over the same ranks as all others"
        )


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
