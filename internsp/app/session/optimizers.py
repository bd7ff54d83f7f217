"""The optimizer of a run: its class, its arguments, its parameter groups and learning rates."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from internsp.app.config import Config
from internsp.app.config.sections import OPTIMIZERS, options
from internsp.base.accelerator import has_streams
from internsp.base.names import below
from internsp.config.functions import resolve
from internsp.errors import ConfigError
from internsp.optim import LossScaler, ZeroOptimizer
from internsp.optim.groups import trainable_members
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member

_CLASSES = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}
_FORMS = {"fused", "foreach", "capturable", "differentiable"}
_KEYS = ("params", "lr", "weight_decay")  # have keys of their own in [optimizer]
assert _CLASSES.keys() == set(OPTIMIZERS), "each name has a class"


def make_optimizer(
    config: Config, communicator: ISPCommunicator, scaler: LossScaler | None
) -> ZeroOptimizer:
    """Make the optimizer of one module.

    Norms and biases have no weight decay, unless a parameter group sets it.

    Raises:
        ConfigError: there is no such class, it is no optimizer, takes other arguments or is not
            elementwise, or it is for matrices and was given a parameter that is none.
    """
    settings = config.optimizer
    cls, arguments = class_of(config)
    matrices = _block_matrices(communicator)
    groups: dict[tuple[str, float, float], list[Any]] = {}
    for member in trainable_members(communicator):
        name = member.name_in_model
        own, by = settings.group_of(name), settings.stepped_by(name, member in matrices)
        lr = settings.lr
        # By their shape: whether a matrix is sharded or not must not change any number.
        decay = settings.weight_decay if len(member.shape) > 1 else 0.0
        if own is not None:
            lr = lr if own.lr is None else own.lr
            decay = decay if own.weight_decay is None else own.weight_decay
        groups.setdefault((by, lr, decay), []).append(member.parameter)
    decays = "weight_decay" in inspect.signature(cls).parameters
    if any(decay for by, _, decay in groups if by == settings.name) and not decays:
        raise ConfigError(
            f"optimizer.weight_decay: {settings.name} takes none; set it to 0, here and in groups"
        )
    fused = _fused(cls, arguments, communicator)
    rest = {"optimizer": torch.optim.AdamW, "betas": settings.betas, "eps": settings.eps, **fused}
    param_groups = [
        {
            "params": held,
            "lr": lr,
            **({"weight_decay": decay} if decays or by != settings.name else {}),
            **(rest if by != settings.name else {}),
        }
        for (by, lr, decay), held in groups.items()
    ]
    try:
        return ZeroOptimizer(
            communicator, cls, param_groups=param_groups, lr=settings.lr,
            max_grad_norm=settings.max_grad_norm, loss_scaler=scaler, **arguments, **fused,
        )  # fmt: skip
    except TypeError as error:
        raise ConfigError(f"optimizer.name = {settings.name!r}: {error}") from error


def _fused(cls: Any, arguments: dict[str, Any], communicator: ISPCommunicator) -> dict[str, Any]:
    """On a device: torch's fused step, which takes the verdict on a step there, so that the host
    waits for none. Not if the configuration chooses a form, nor where torch has none."""
    device = communicator.mesh.device
    known = cls in (torch.optim.AdamW, torch.optim.SGD) and not _FORMS & arguments.keys()
    if not known or not has_streams(device):
        return {}
    tensor = torch.zeros(1, device=device)
    tensor.grad = torch.zeros_like(tensor)
    try:
        cls([tensor], **arguments, fused=True).step()
    except RuntimeError:  # torch has no fused kernels for this device
        return {}
    return {"fused": True}


def _block_matrices(communicator: ISPCommunicator) -> set[Member]:
    """Parameters of blocks with two or more dimensions, without embeddings."""
    blocks = [b.name for b in communicator.blocks]
    blocks += [b.name for b in communicator.queue.backward.enclosing.blocks]
    embeds = nn.Embedding, nn.EmbeddingBag
    parameters = communicator.parameters_of.items()
    looked_up = {member for (module, _), member in parameters if isinstance(module, embeds)}
    return {
        member
        for member in trainable_members(communicator)
        if member.parameter.dim() > 1
        and member not in looked_up
        and any(member.name.startswith(f"{block}.") for block in blocks)
    }


def check_group_patterns(config: Config, names: Iterable[str]) -> None:
    """Check that every pattern of ``optimizer.groups`` matches one of the full model's ``names``.

    Raises:
        ConfigError: a pattern matches none.
    """
    every = list(names)
    for number, group in enumerate(config.optimizer.groups, start=1):
        for pattern in group.match:
            if not any(below(name, pattern) for name in every):
                raise ConfigError(
                    f"optimizer.groups: group {number}: {pattern!r} matches no parameter of the "
                    f"model; there are {', '.join(every[:8])}, ..."
                )


def class_of(config: Config) -> tuple[Any, dict[str, Any]]:
    """The optimizer class and its arguments, without learning rate and weight decay.

    Raises:
        ConfigError: there is no such class, it is no optimizer, or it refuses the arguments.
    """
    settings = config.optimizer
    more = options(settings.options)
    arguments: dict[str, Any] = {}
    if settings.name == "adamw":
        arguments = {"betas": settings.betas, "eps": settings.eps}
    elif settings.name in ("sgd", "muon"):
        arguments = {"momentum": settings.momentum_used}
    if settings.name == "muon" and "adjust_lr_fn" not in more:
        # The same learning rate and decay fit muon and adamw (Moonshot, arXiv 2502.16982).
        more["adjust_lr_fn"] = "match_rms_adamw"
    named = settings.name in _CLASSES
    cls: Any = _CLASSES[settings.name] if named else resolve(settings.name, "optimizer.name")
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.name = {settings.name!r} is no subclass of torch's Optimizer")
    given = [name for text in settings.options for name in options([text])]
    if twice := [name for name in more if given.count(name) > 1]:
        raise ConfigError(f"optimizer.options: {twice[0]} is given twice")
    if doubled := {*_KEYS, *arguments} & more.keys():
        raise ConfigError(f"optimizer.options: {', '.join(sorted(doubled))} has a key of its own")
    try:
        cls([torch.zeros(1, 1)], **{"lr": settings.lr, **arguments, **more})
    except Exception as error:
        known = [name for name in inspect.signature(cls).parameters if name not in _KEYS]
        takes = f"; it takes {', '.join(known)}" if more.keys() - known else ""
        raise ConfigError(f"optimizer.options: {settings.name}: {error}{takes}") from error
    return cls, arguments | more


def rate_factor(config: Config, steps: int) -> Callable[[int], float]:
    """The learning rate of a step, counted from 0, as a factor of ``optimizer.lr``.

    Every schedule is a closed form of the step, given to torch's ``LambdaLR``. A run that resumes
    with another number of steps, warm-up or schedule therefore has at once the rate that a run with
    these settings would have at that step. Where torch has the schedule, the values are the same.

    ============== =========================================================== =================
    schedule       after the warm-up                                           torch
    ============== =========================================================== =================
    constant       1                                                           ConstantLR
    linear         a line down to ``min_lr_ratio`` at the last step            LinearLR
    cosine         half a cosine down to it (arXiv 1608.03983)                 CosineAnnealingLR
    wsd            1, then a line down to it within the last ``decay_steps``
                   (warm-up, stable, decay; MiniCPM, arXiv 2404.06395)         ConstantLR, LinearLR
    inverse_sqrt   ``sqrt(warmup / step)``, not below ``min_lr_ratio``
                   (arXiv 1706.03762)
    ============== =========================================================== =================

    Args:
        steps: length of the run.
    """
    optimizer = config.optimizer
    schedule, warmup, floor = optimizer.schedule, optimizer.warmup_steps, optimizer.min_lr_ratio
    start = warmup
    if schedule == "wsd":
        decay = max(steps // 10, 1) if optimizer.decay_steps is None else optimizer.decay_steps
        start = max(steps - decay, warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant":
            return 1.0
        if schedule == "inverse_sqrt":
            return max(math.sqrt(max(warmup, 1) / (step + 1)), floor)
        progress = min(max(step - start, 0) / max(steps - start, 1), 1.0)
        if schedule == "cosine":
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            return floor + (1 - floor) * cosine
        return 1.0 + (floor - 1.0) * progress

    return factor
