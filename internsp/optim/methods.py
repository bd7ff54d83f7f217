"""By which optimizer a group's parameters are stepped, and whether it needs whole matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from internsp.errors import ConfigError
from internsp.optim.elementwise import (
    OptimizerClass,
    default_settings,
    name_of,
    require_elementwise,
    require_whole_matrix,
)
from internsp.optim.muon import MuonSlices, splits
from internsp.wp.parameter import Member, ShardedParameter

_OWN_KEYS = ("params", "param_names", "optimizer", "whole_matrix")


@dataclass(frozen=True)
class Method:
    """A class of optimizers.

    Attributes:
        whole: a step needs a whole parameter, so that one rank makes it
            (:mod:`internsp.optim.matrices`); else it works on any slice.
        on_slices: what has the state, and steps unless ``whole``, on any slice; ``None``: each
            matrix's state is its owner's.
    """

    cls: OptimizerClass
    whole: bool
    on_slices: OptimizerClass | None

    @property
    def name(self) -> str:
        """Of the class."""
        return name_of(self.cls)

    @property
    def stacks(self) -> bool:
        """Whether a 3-D parameter is a stack of matrices, each stepped by itself: Muon's own are
        2-D, and so are the experts of a grouped weight."""
        return _is(self.cls, "Muon")

    def make(self, tensor: Tensor, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        """The optimizer of one tensor."""
        return self.cls([{**settings, "params": [tensor]}])


def _is(cls: Any, name: str) -> bool:
    known = getattr(torch.optim, name, None)
    return known is not None and isinstance(cls, type) and issubclass(cls, known)


def whole_by_name(cls: OptimizerClass) -> bool:
    """Whether it is known that a step needs a whole parameter: of torch's Muon, any Adafactor."""
    named = [base.__name__ for base in getattr(cls, "__mro__", ())]
    return _is(cls, "Muon") or "Adafactor" in named  # transformers has its own


def methods_of(
    groups: Iterable[dict[str, Any]],
    cls: OptimizerClass,
    whole_matrix: bool | None,
    defaults: dict[str, Any],
    device: torch.device,
) -> list[Method]:
    """Of each group, which then has all settings of its class, and no longer says which it is.

    Args:
        cls, whole_matrix, defaults: of groups that name no ``"optimizer"`` of their own. One that
            does has ``lr`` of ``defaults``, if it gives none.

    Raises:
        TypeError: a class is not what it is declared to be.
        Exception: whatever a class itself raises about its settings.
    """
    checked: dict[tuple[Any, bool], Method] = {}
    found = []
    for group in groups:
        given = {name: value for name, value in group.items() if name not in _OWN_KEYS}
        own, said = group.pop("optimizer", None), group.pop("whole_matrix", None)
        if own is None:
            chosen, arguments = cls, defaults
            said = whole_matrix if said is None else said
        else:
            chosen = own
            arguments = {**({"lr": defaults["lr"]} if "lr" in defaults else {}), **given}
        key = chosen, whole_by_name(chosen) if said is None else bool(said)
        if key not in checked:
            check = require_whole_matrix if key[1] else require_elementwise
            check(chosen, device, arguments)
            on_slices: OptimizerClass | None = chosen
            if key[1]:
                on_slices = MuonSlices if splits(chosen, device, arguments) else None
            checked[key] = Method(*key, on_slices)
        for name, value in default_settings(chosen, arguments, key[1]).items():
            group.setdefault(name, value)
        found.append(checked[key])
    return found


def require_steppable(member: Member, method: Method) -> None:
    """Check that a step of ``member`` is possible, of slices or of whole matrices.

    Raises:
        ConfigError: it is not; names the parameter and the remedy.
    """
    if member.dtype.is_complex:
        raise ConfigError(
            f"{member.name} is complex, and a ZeroOptimizer keeps parameters in one real vector: "
            "hold its torch.view_as_real in the module, or take a torch optimizer in a plain loop"
        )
    if not method.whole:
        return
    shape = tuple(member.shape)
    why = ""
    if method.stacks and len(shape) not in (2, 3):
        why = f"its shape is {list(shape)}, no matrix and no stack of them"
    elif member.tensor is not None and member.tensor.cut:
        why = "its layer is tensor parallel, so that no rank of the weight group has all of it"
    elif member.offload:
        why = (
            f"{', '.join(sorted(member.offload))} of it lie in host memory "
            "(weight_parallel.offload), from where no matrix is sent yet: do not offload it"
        )
    elif isinstance(member, ShardedParameter):
        if member.axis.expert > 1 and not method.stacks:
            why = (
                "ranks own parts of it (parallel.expert), which one process steps as one"
            )
        elif method.stacks and len(shape) == 3 and member.layout.dim:
            why = (
                f"a stack of matrices that is cut on dimension {member.layout.dim}: cut it on "
                "dimension 0 (a rule with shard_dim = 0, docs/plan.md)"
            )
    if why:
        raise ConfigError(
            f"{member.name} cannot be stepped by {method.name}, which needs whole matrices: {why}. "
            "Or give it to an elementwise optimizer: in a group of param_groups with "
            '"optimizer": torch.optim.AdamW, in a configuration by optimizer.rest = "adamw" or a '
            "group of optimizer.groups"
        )
