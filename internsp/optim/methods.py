"""Which optimizer steps each group of parameters, and whether it needs whole matrices."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from internsp.base.stand_in import OptimizerClass, copied, is_torchs_own, settings_of
from internsp.errors import ConfigError
from internsp.optim.elementwise import (
    base_names,
    default_settings,
    name_of,
    reproducible,
    require_elementwise,
    require_whole_matrix,
)
from internsp.optim.group_state import kept_in_group
from internsp.optim.muon import MuonSlices
from internsp.wp.parameter import Member, ShardedParameter

_OWN_KEYS = ("params", "param_names", "optimizer", "whole_matrix")


@dataclass(frozen=True)
class Method:
    """The class of optimizer that steps a group.

    Attributes:
        whole_matrix: whether a step needs a whole parameter, so that one rank makes it
            (:mod:`internsp.optim.matrices`); else the class steps any slice.
        slice_optimizer: the class that holds the state of slices, and steps them unless
            ``whole_matrix``; ``None``: each matrix's state lies with its owner.
        kept: names of what the class keeps in its group (:mod:`internsp.optim.group_state`).
    """

    cls: OptimizerClass
    whole_matrix: bool
    slice_optimizer: OptimizerClass | None
    kept: tuple[str, ...] = ()

    def like(self, device: torch.device) -> Tensor:
        """A stand-in for a parameter, which the class can step."""
        shape = (2, 2) if self.whole_matrix else (1,)
        return torch.ones(shape, device=device)

    @property
    def name(self) -> str:
        """The name of the class."""
        return name_of(self.cls)

    @property
    def stacks(self) -> bool:
        """Whether a 3-D parameter is a stack of matrices, each stepped by itself. So it is for
        Muon, which takes 2-D matrices: the experts of a grouped weight are such a stack."""
        return _is_muon(self.cls)

    @cached_property
    def takes_verdict(self) -> bool:
        """Whether its fused step takes ``found_inf`` from the device, as ``GradScaler`` asks it.
        Only of torch's own: a subclass may do more in its step, which would not be skipped."""
        if not is_torchs_own(self.cls) or "fused" not in inspect.signature(self.cls).parameters:
            return False
        made = self.cls([torch.zeros(1)], fused=True)
        return bool(getattr(made, "_step_supports_amp_scaling", False))

    def make_optimizer(self, tensor: Tensor, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        """The optimizer of one tensor."""
        return self.cls([{**copied(settings), "params": [tensor]}])


def _is_muon(cls: OptimizerClass) -> bool:
    return isinstance(cls, type) and issubclass(cls, torch.optim.Muon)


def is_known_whole_matrix(cls: OptimizerClass) -> bool:
    """Whether the class is known to need a whole parameter: torch's Muon, and any Adafactor."""
    return _is_muon(cls) or "Adafactor" in base_names(cls)  # transformers has its own


def methods_of(
    groups: Iterable[dict[str, Any]],
    cls: OptimizerClass,
    whole_matrix: bool | None,
    defaults: dict[str, Any],
    device: torch.device,
) -> list[Method]:
    """The method of each group. Fills all settings of its class into each group, and removes
    ``"optimizer"`` and ``"whole_matrix"`` from it.

    Args:
        cls, whole_matrix, defaults: for groups without an ``"optimizer"`` of their own. A group
            with one takes only ``lr`` from ``defaults``, unless it has its own.

    Raises:
        TypeError: a class is not what it is declared to be.
        Exception: whatever a class itself raises about its settings.
    """
    checked: dict[tuple[Any, bool], Method] = {}
    found = []
    for group in groups:
        given = {name: value for name, value in group.items() if name not in _OWN_KEYS}
        own, declared = group.pop("optimizer", None), group.pop("whole_matrix", None)
        if own is None:
            chosen, arguments = cls, defaults
            declared = whole_matrix if declared is None else declared
        else:
            chosen = own
            arguments = {**({"lr": defaults["lr"]} if "lr" in defaults else {}), **given}
        key = chosen, is_known_whole_matrix(chosen) if declared is None else bool(declared)
        if key not in checked:
            check = require_whole_matrix if key[1] else require_elementwise
            with reproducible(device):
                check(chosen, device, arguments)
            slice_optimizer: OptimizerClass | None = chosen
            if key[1]:
                # A subclass may step in another way than the functions of optim/muon.py do.
                slice_optimizer = MuonSlices if chosen is torch.optim.Muon else None
            checked[key] = Method(*key, slice_optimizer)
        for name, value in default_settings(chosen, arguments, key[1]).items():
            group.setdefault(name, value)
        method = checked[key]
        kept = kept_in_group(chosen, settings_of(group), method.like(device))
        for name, value in kept.items():
            group.setdefault(name, value)
        found.append(replace(method, kept=tuple(sorted(kept))))
    return found


def require_steppable(member: Member, method: Method) -> None:
    """Check that ``method`` can step ``member``, by slices or by whole matrices.

    Raises:
        ConfigError: it cannot; names the parameter and the remedy.
    """
    if isinstance(member, ShardedParameter) and member.of_class and member.requires_grad:
        raise ConfigError(
            f"{member.name} has fsdp_pre_all_gather, and what its class holds is not known, of "
            "which other ranks would step parts: keep a torch optimizer in a plain loop (under "
            "internsp.fsdp, the program's own)"
        )
    if member.dtype.is_complex:
        raise ConfigError(
            f"{member.name} is complex, and a ZeroOptimizer keeps parameters in one real vector: "
            "hold its torch.view_as_real in the module, or take a torch optimizer in a plain loop"
        )
    if not method.whole_matrix:
        return
    shape = tuple(member.shape)
    why = ""
    if method.stacks and len(shape) not in (2, 3):
        why = f"its shape is {list(shape)}, no matrix and no stack of them"
    elif member.tensor is not None and member.tensor.sharded:
        why = "its layer is tensor parallel, so that no rank of the weight group has all of it"
    elif member.offload:
        why = (
            f"{', '.join(sorted(member.offload))} of it lie in host memory "
            "(weight_parallel.offload), from where matrices cannot be sent yet: do not offload it"
        )
    elif isinstance(member, ShardedParameter):
        if member.axis.expert > 1 and not method.stacks:
            why = "ranks own parts of it (parallel.expert), which one process steps together"
        elif method.stacks and len(shape) == 3 and member.layout.dim:
            why = (
                f"a stack of matrices that is sharded on dimension {member.layout.dim}: shard "
                "it on dimension 0 (a rule with shard_dim = 0, docs/howto/rules.md)"
            )
    if why:
        raise ConfigError(
            f"{member.name} cannot be stepped by {method.name}, which needs whole matrices: {why}. "
            "Or give it to an elementwise optimizer: in a group of param_groups with "
            '"optimizer": torch.optim.AdamW, in a configuration by optimizer.other = "adamw" or a '
            "group of optimizer.groups"
        )
