"""The experts that a rank keeps of a model, by the configuration of its weights."""

from __future__ import annotations

from torch import nn

from internsp.base.names import ancestors
from internsp.config import WeightParallelConfig
from internsp.errors import StructureError
from internsp.experts.owners import OwnExperts
from internsp.sp.mixing import Refused
from internsp.structure.assign import experts_among
from internsp.structure.rules import match_rules


def take_experts(
    model: nn.Module, config: WeightParallelConfig, owners: int, rank: int
) -> OwnExperts:
    """Let ``model`` keep the experts of owner ``rank`` of ``owners``, in place.

    Does nothing with one owner, nor to experts whose module declares ``expert_ranks``: they are
    this rank's already.

    Returns:
        What was taken; its ``undo`` gives the rest back.

    Raises:
        StructureError: see :meth:`OwnExperts.take`.
    """
    rules = match_rules(model, config.rules)
    own = OwnExperts(owners, rank, lambda name: name in experts_among([name], config, rules))
    if owners > 1:
        own.take(model)
    return own


def find_unowned(model: nn.Module, config: WeightParallelConfig, owners: int) -> list[Refused]:
    """The modules with experts that ``owners`` ranks cannot divide among them, and why.

    Changes nothing in the end.
    """
    try:
        taken = take_experts(model, config, owners, 0)
    except StructureError as error:
        return [Refused("", str(error))]
    found: list[Refused] = []
    parameters = [name for name, _ in model.named_parameters()]
    experts = experts_among(parameters, config, match_rules(model, config.rules))
    names = dict.fromkeys(n.rpartition(".")[0] for n in parameters if n in experts)
    declared = {n for n, m in model.named_modules() if getattr(m, "expert_ranks", 1) == owners}
    for name in names:
        if not declared & {*ancestors(name), ""}:
            kind = type(model.get_submodule(name)).__name__
            reason = f"{kind}: nothing sends its tokens to {owners} owners of experts"
            found.append(Refused(name, f"{reason}; make the mesh with expert = 1"))
    taken.undo()
    return found
