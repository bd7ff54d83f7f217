"""Weights that several stages of a pipeline have: found in a model, and agreed upon by its ranks.

What becomes of them in a step is :mod:`internsp.wp.tied`'s business.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from internsp.errors import OrderError, StructureError
from internsp.mesh import ParallelMesh
from internsp.pipeline.chunks import Chunk
from internsp.pipeline.stage import ISPPipelineStage
from internsp.wp.parameter import ShardedParameter
from internsp.wp.tied import Member, Place, TiedWeight, TiedWeights, Watch

Tie = Mapping[int, str]
"""Of each stage that has the weight, what its chunk calls it."""


def shared_by(model: Any, chunks: Sequence[nn.Module]) -> dict[str, Tie]:
    """Parameters that are the same object in several chunks, by their names in the model.

    Args:
        chunks: of all stages, before any was made parallel.
    """
    found: dict[int, dict[int, str]] = {}
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            found.setdefault(id(parameter), {})[stage] = name
    whole = isinstance(model, nn.Module)
    names = {id(p): name for name, p in model.named_parameters()} if whole else {}
    ties = {key: tie for key, tie in found.items() if len(tie) > 1}
    return {names.get(key, next(iter(tie.values()))): tie for key, tie in ties.items()}


def separate(chunks: Sequence[Chunk]) -> None:
    """Of modules that several of ``chunks`` hold, give the later ones copies, in place.

    Each chunk is made parallel by itself, so that one process cannot have a module in two.
    """
    taken: set[nn.Module] = set()
    for chunk in chunks:
        if not taken.isdisjoint(chunk.modules()):
            # Together, so that what blocks of one chunk share they go on sharing.
            copied = copy.deepcopy(chunk._modules)
            chunk._modules.update(copied)
        taken.update(chunk.modules())


def tie(
    said: Mapping[str, Tie] | Sequence[Tie],
    stages: Sequence[ISPPipelineStage],
    rank_of: Callable[[int], int],
    count: int,
    mesh: ParallelMesh,
    watch: Watch | None,
) -> TiedWeights:
    """What all ranks say, if it is the same and fits. Collective over the ranks of a pipeline.

    Args:
        said: by the whole model's names; without, the first stage's are taken.
        stages: of this rank.
        rank_of: the pipeline rank that has a stage, of which there are ``count``.

    Raises:
        StructureError: on every rank: ranks say different things, a stage has no such parameter,
            or copies are not of one form.
        OrderError: an optimizer was made before the pipeline.
    """
    if not isinstance(said, Mapping):
        said = {one[min(one)]: one for one in said if one}
    weights, facts = [], {}
    for number in (number for one in said.values() for number in one):
        if not 0 <= number < count:
            raise StructureError(
                f"tied names stage {number} on rank {mesh.rank}: stages are 0 to {count - 1}"
            )
    for name, one in said.items():
        places = tuple(Place(stage, rank_of(stage), one[stage]) for stage in sorted(one))
        weight = TiedWeight(name, places)
        for stage in (stage for stage in stages if stage.stage_index in one):
            member = _member(stage.submod, one[stage.stage_index])
            if isinstance(member, str):
                facts[name, stage.stage_index] = member
                continue
            facts[name, stage.stage_index] = _form(member)
            weight.own.append((stage.communicator, member))
        weights.append(weight)
    mine = ([str(weight) for weight in weights], facts)
    everyone: list[Any] = [None] * mesh.pipeline_group.size()
    dist.all_gather_object(everyone, mine, group=mesh.pipeline_group)
    _compare(everyone, weights, mesh)
    early = [c for weight in weights for c, _ in weight.own if not c.collects_itself]
    if early:
        raise OrderError(
            f"rank {mesh.rank} has a ZeroOptimizer for a chunk with tied weights already: make the "
            "Pipeline first, which says what is tied, then the optimizers"
        )
    return TiedWeights(mesh, weights, watch)


def _member(chunk: nn.Module, name: str) -> Member | str:
    try:
        parameter: Any = chunk.get_parameter(name)
    except AttributeError:
        return "is not there"
    member: Member | None = getattr(parameter, "_member", None)
    return "is not parallel (a rule of the plan ignores it)" if member is None else member


def _form(member: Member) -> str:
    """What must be the same of all copies, in words."""
    shape = f"{list(member.parameter.shape)} {member.dtype}"
    if not isinstance(member, ShardedParameter):
        return f"is replicated, {shape}"
    dim, size, axis = member.layout.dim, member.layout.size, member.axis.name
    return f"is cut on dimension {dim} of {shape} over {size} ranks ({axis})"


def _compare(everyone: Sequence[Any], weights: Sequence[TiedWeight], mesh: ParallelMesh) -> None:
    ties = [each for each, _ in everyone]
    for rank, each in enumerate(ties):
        if each != ties[0]:
            raise StructureError(
                f"pipeline ranks tie different weights: {ties[0]} and {each} (pipeline ranks 0 and "
                f"{rank}; this is rank {mesh.rank}): make the same model on every rank"
            )
    forms: dict[tuple[str, int], str] = {}
    for _, facts in everyone:
        forms |= facts
    for weight in weights:
        found = [forms.get((weight.name, place.stage), "is on no rank") for place in weight.places]
        wrong = any(form.startswith(("is not ", "is on ")) for form in found)
        if wrong or len(set(found)) > 1:
            told = [f"{place} {form}" for place, form in zip(weight.places, found, strict=True)]
            raise StructureError(
                f"stages share {weight.name}, but {', '.join(told)} (this is rank {mesh.rank}): "
                "copies of one weight must be cut alike. Name all of them where an option or a "
                "rule of the plan names one (weight_parallel.embedding_cut = \"vocabulary\" for a "
                "tied head), or untie them"
            )
