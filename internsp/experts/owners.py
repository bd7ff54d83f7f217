"""Each owner keeps its own experts of a model that was built whole.

Modules are recognized by their interface and not by their family: those of ``transformers`` that
its ``ExpertsInterface`` dispatches, and modules with a :data:`~internsp.experts.dispatch.Dispatch`
as their attribute ``dispatch``. In both every expert's parameter is one slice, on dimension 0, of a
parameter whose first dimension is the number of experts, ``num_experts``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from internsp.errors import StructureError

# What transformers' `use_experts_implementation` sets on a module.
_INTERFACE = {"config", "has_gate", "has_bias", "is_transposed"}


def of_transformers(module: nn.Module) -> bool:
    """Whether ``transformers`` dispatches the module's experts by its ``ExpertsInterface``."""
    return vars(module).keys() >= _INTERFACE and hasattr(module, "num_experts")


def dispatched(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` whose tokens can be sent to owners of their experts, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if of_transformers(module) or callable(getattr(module, "dispatch", None))
    }


@dataclass
class OwnExperts:
    """This rank's experts, taken out of a model that held all of them.

    Args:
        owners: number of ranks that own different experts; ``rank``: this one's number among them.
        is_expert: whether a parameter, by its name, is sharded with the experts.
    """

    owners: int
    rank: int
    is_expert: Callable[[str], bool]
    _before: list[tuple[nn.Module, int, dict[str, nn.Parameter]]] = field(default_factory=list)
    _replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)

    def take(self, model: nn.Module) -> None:
        """Keep the experts of this rank alone. A module that already holds its own stays as it is.

        Raises:
            StructureError: the owners do not divide the experts, or a module holds something
                that is not an expert's; the model is then as it was.
        """
        try:
            for name, module in dispatched(model).items():
                if getattr(module, "expert_ranks", None) is None:
                    self._take(name, module)
        except StructureError:
            self.undo()
            raise

    def _take(self, name: str, module: nn.Module) -> None:
        number: Any = module.num_experts
        kind = f"{name} ({type(module).__name__})"
        if number % self.owners:
            raise StructureError(
                f"{kind} has {number} experts, which {self.owners} owners do not divide: make the "
                "mesh with expert = a divisor of it, or shard all experts over expert_weight"
            )
        if getattr(module, "_is_expert_parallel", False):
            raise StructureError(
                f"{kind} already is expert parallel by transformers: load the model without its "
                "distributed_config, or make the mesh with expert = 1"
            )
        held = {n: p for n, p in module._parameters.items() if p is not None}
        self._require_experts_alone(name, module, number)
        own = number // self.owners
        for each, parameter in held.items():
            if parameter.shape[:1] == (number,):
                made = self._part(parameter, f"{name}.{each}", self.rank * own, own)
                module._parameters[each] = made
        self._before.append((module, number, held))
        module.num_experts = own  # type: ignore[assignment]
        module.expert_ranks = self.owners  # type: ignore[assignment]

    def _require_experts_alone(self, name: str, module: nn.Module, number: int) -> None:
        """Every parameter with the experts has one slice an expert; every other is no expert's."""
        for each, parameter in module.named_parameters():
            full = f"{name}.{each}".removeprefix(".")
            sliced = each in module._parameters and parameter.shape[:1] == (number,)
            if sliced == self.is_expert(full):
                continue
            if sliced:
                raise StructureError(
                    f"{full} holds {number} experts, but weight_parallel.expert_parameters (or a "
                    'rule with axis = "dense") does not count it among the experts, which the mesh '
                    f"divides among expert = {self.owners} owners: add its name there"
                )
            raise StructureError(
                f"{full} {list(parameter.shape)} lies among {number} experts and is not one slice "
                f"for each, so that expert = {self.owners} owners cannot divide it: give it a rule "
                '(weight_parallel.rules) with axis = "dense", or make the mesh with expert = 1'
            )

    def _part(self, parameter: nn.Parameter, name: str, first: int, count: int) -> nn.Parameter:
        if id(parameter) not in self._replaced:
            values = parameter.detach()[first : first + count].clone()
            made = nn.Parameter(values, requires_grad=parameter.requires_grad)
            self._replaced[id(parameter)] = parameter, made
            parameter.replaced = name  # type: ignore[attr-defined]  # see watch.before_step
        return self._replaced[id(parameter)][1]

    def undo(self) -> None:
        """Give all modules back what they held."""
        for module, number, held in reversed(self._before):
            module._parameters.update(held)
            module.num_experts = number  # type: ignore[assignment]
            del module.expert_ranks
        for parameter, _ in self._replaced.values():
            del parameter.replaced  # type: ignore[attr-defined]
        self._before.clear()
        self._replaced.clear()
