"""Models built on the meta device: compute their buffers, and refuse values that are missing.

Parameters get values after ``parallelize`` (:func:`internsp.initialize`,
:func:`internsp.load_weights`). Buffers that are in no checkpoint (rotary frequencies, masks) are
computed again by the module that made them. A forward refuses tensors without values by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from internsp.base.bits import same_bits
from internsp.errors import StructureError
from internsp.wp.parameter import Member

RESETS = ("reset_buffers", "reset_running_stats", "reset_parameters", "_reset_parameters", "reset")
"""Methods with which modules compute their buffers; names that torch and its users have."""


def materialize_buffers(model: nn.Module, device: torch.device) -> None:
    """Allocate buffers that are on the meta device, with the values that their modules compute.

    A module's own method (:data:`RESETS`) computes them, else ``_init_weights(module)`` of a model
    around it, as in ``transformers``. Values are taken only if they do not depend on the previous
    values. Random values are seeded by the module's name alone, so that they are the same on every
    rank and mesh. Parameters are not changed. Persistent buffers that no method computes stay on
    the meta device, to be loaded.

    Raises:
        StructureError: no method computes a buffer that is in no checkpoint.
    """
    # Old and new buffer by id of the old one, so that modules still share what they shared.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    unknown = []
    for path, module in model.named_modules():
        names = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        found = _compute_buffers(model, path, module, names) if names else {}
        for name in names:
            old: Any = module._buffers[name]
            if name in found:
                made.setdefault(id(old), (old, found[name].to(device, old.dtype)))
            elif name in module._non_persistent_buffers_set and id(old) not in made:
                unknown.append(f"{path}.{name} (of a {type(module).__name__})".removeprefix("."))
    if unknown:
        raise StructureError(
            f"buffers on the meta device whose values are not known: {', '.join(unknown)}. No "
            f"checkpoint has them, and no method of their module ({', '.join(RESETS)}) or "
            "_init_weights of the model computes them: add one, or build these modules on a real "
            "device"
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in made:
                module._buffers[name] = made[id(buffer)][1]


def _compute_buffers(
    model: nn.Module, path: str, module: nn.Module, names: list[str]
) -> dict[str, Tensor]:
    """The buffers of ``names`` to which one method gives the same values in two tries.

    The tries fill the buffers with 0 and with 1 first.
    """
    found: dict[str, Tensor] = {}
    for compute in _reset_methods(model, path, module):
        tries = [_values_after(compute, path, module, names, fill) for fill in (0, 1)]
        for name in names:
            one, other = (values.get(name) for values in tries)
            if name in found or one is None or other is None or one.dtype != other.dtype:
                continue
            if one.shape == other.shape == module._buffers[name].shape and same_bits(one, other):  # type: ignore[union-attr]
                found[name] = one
        if len(found) == len(names):
            break
    return found


def _reset_methods(model: nn.Module, path: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
    """Functions that may compute the buffers of ``module``, its own methods first."""
    for name in RESETS:
        method = getattr(module, name, None)
        if callable(method):
            yield method
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):
        above = model.get_submodule(".".join(parts[:count]))
        initialize: Any = getattr(above, "_init_weights", None)
        if callable(initialize):
            yield lambda initialize=initialize: initialize(module)  # type: ignore[misc]


def _values_after(
    compute: Callable[[], Any], path: str, module: nn.Module, names: Sequence[str], fill: int
) -> dict[str, Tensor]:
    """Buffers that were filled with ``fill``, after ``compute``; empty if it raises."""
    with _meta_stand_ins(module), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(zlib.crc32(path.encode()))
        for name in names:
            like: Any = module._buffers[name]
            module._buffers[name] = torch.full(like.shape, fill, dtype=like.dtype, device="cpu")
        try:
            compute()
        except Exception:  # noqa: BLE001 - another method may work; else the caller names the buffer
            return {}
        values = {name: module._buffers.get(name) for name in names}
        return {n: v.detach().clone() for n, v in values.items() if v is not None and not v.is_meta}


@contextmanager
def _meta_stand_ins(module: nn.Module) -> Iterator[None]:
    """Context in which ``module`` and its submodules hold meta tensors, so that none is written."""
    kept = [(m, m._parameters, m._buffers) for m in module.modules()]
    try:
        for each, parameters, buffers in kept:
            stand_ins = {
                n: None if p is None else nn.Parameter(_on_meta(p), p.requires_grad)
                for n, p in parameters.items()
            }
            vars(each)["_parameters"] = stand_ins
            vars(each)["_buffers"] = {
                n: None if b is None else _on_meta(b) for n, b in buffers.items()
            }
        yield
    finally:
        for each, parameters, buffers in kept:
            vars(each)["_parameters"], vars(each)["_buffers"] = parameters, buffers


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


class MissingValueCheck:
    """Checks that parameters and buffers from the meta device have got values.

    Args:
        members: parameters that were on the meta device.
    """

    def __init__(self, model: nn.Module, members: Sequence[Member], rank: int) -> None:
        self._model, self._rank = model, rank
        self._members = [(member, member.version()) for member in members]
        self._buffers = [name for name, b in model.named_buffers() if b.is_meta]

    def check(self) -> None:
        """Require, at a forward, that all have got values.

        Raises:
            StructureError: some have none.
        """
        if not self._members and not self._buffers:
            return
        self._members = [(m, version) for m, version in self._members if m.version() == version]
        self._buffers = [n for n, b in self._model.named_buffers() if b.is_meta]
        names = [*(member.name for member, _ in self._members), *self._buffers]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise StructureError(
                f"{', '.join(names[:3])}{more} came from the meta device and have no values on "
                f"rank {self._rank}: call internsp.initialize, internsp.load_weights or "
                "load_state_dict before the first forward"
            )
