"""The optimizer of a run: its class and arguments, and parameters with settings of their own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from internsp.config import Config
from internsp.config.functions import OPTIMIZERS, options, resolve
from internsp.config.names import matches
from internsp.config.sections import ParameterGroup
from internsp.errors import ConfigError
from internsp.optim import LossScaler, ZeroOptimizer
from internsp.optim.groups import members
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.tied import name_in_model

_CLASSES = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
assert _CLASSES.keys() == set(OPTIMIZERS), "each name has a class"


def make_optimizer(
    config: Config, communicator: ISPCommunicator, scaler: LossScaler | None
) -> ZeroOptimizer:
    """The optimizer of one module. Norms and biases have no weight decay, unless a group says so.

    Raises:
        ConfigError: there is no such class, or it takes other arguments.
        TypeError: it is not elementwise.
    """
    settings = config.optimizer
    cls, arguments = _class_of(config)
    replicated = {id(member) for member in communicator.replicated.members}
    groups: dict[tuple[float, float], list[Any]] = {}
    for member in members(communicator):
        own = _group_of(name_in_model(member), settings.groups)
        lr, decay = settings.lr, 0.0 if id(member) in replicated else settings.weight_decay
        if own is not None:
            lr = lr if own.lr is None else own.lr
            decay = decay if own.weight_decay is None else own.weight_decay
        groups.setdefault((lr, decay), []).append(member.parameter)
    decays = "weight_decay" in inspect.signature(cls).parameters
    if any(decay for _, decay in groups) and not decays:
        raise ConfigError(
            f"optimizer.weight_decay: {settings.name} takes none; set it to 0, here and in groups"
        )
    return ZeroOptimizer(
        communicator,
        cls,
        param_groups=[
            {"params": held, "lr": lr, **({"weight_decay": decay} if decays else {})}
            for (lr, decay), held in groups.items()
        ],
        lr=settings.lr,
        max_grad_norm=settings.max_grad_norm,
        loss_scaler=scaler,
        **arguments,
    )


def names_matched(config: Config, names: Iterable[str]) -> None:
    """Check that every pattern of ``optimizer.groups`` matches one of the whole model's ``names``.

    Raises:
        ConfigError: one does not.
    """
    every = list(names)
    for number, group in enumerate(config.optimizer.groups, start=1):
        for pattern in group.match:
            if not any(_below(name, pattern) for name in every):
                raise ConfigError(
                    f"optimizer.groups: group {number}: {pattern!r} matches no parameter of the "
                    f"model; there are {', '.join(every[:8])}, ..."
                )


def _class_of(config: Config) -> tuple[Any, dict[str, Any]]:
    """The class and its arguments, without rate and decay."""
    settings = config.optimizer
    more = options(settings.options)
    if settings.name == "adamw":
        arguments: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps}
    else:
        arguments = {"momentum": settings.momentum} if settings.name == "sgd" else {}
    named = settings.name in _CLASSES
    cls: Any = _CLASSES[settings.name] if named else resolve(settings.name, "optimizer.name")
    if doubled := {"lr", "weight_decay", "params", *arguments} & more.keys():
        raise ConfigError(f"optimizer.options: {', '.join(sorted(doubled))} has a key of its own")
    try:
        inspect.signature(cls).bind([], lr=settings.lr, **arguments, **more)
    except TypeError as error:
        raise ConfigError(f"optimizer.options: {settings.name}: {error}") from None
    return cls, arguments | more


def _group_of(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    found = (g for g in groups if any(_below(name, pattern) for pattern in g.match))
    return next(found, None)


def _below(name: str, pattern: str) -> bool:
    """Whether ``pattern`` matches a parameter's name, or that of a module above it."""
    return matches(name, pattern) or matches(name, f"{pattern}.**")
