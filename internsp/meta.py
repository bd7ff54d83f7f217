"""Models that were built on the meta device: what their buffers hold, and what was never filled.

A parameter is filled after ``parallelize`` (:func:`internsp.initialize`,
:func:`internsp.load_weights`); a buffer that no checkpoint has (rotary frequencies, masks) must be
computed again, by the module that made it. Whatever is left without values is refused by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from internsp.errors import StructureError
from internsp.wp.parameter import Member, same_bits

RESETS = ("reset_buffers", "reset_running_stats", "reset_parameters", "_reset_parameters", "reset")
"""Methods by which modules compute what they hold, as torch and its users call them."""


def materialize_buffers(model: nn.Module, device: torch.device) -> None:
    """Give buffers on the meta device memory, and the values that their own modules compute.

    A module is asked by its own method (:data:`RESETS`), else by ``_init_weights(module)`` of the
    model around it, as ``transformers`` have it. What these write is believed only if it does not
    depend on what stood there before; random values follow from the module's name alone, so that
    they are the same on every rank and mesh. No parameter is touched. Persistent buffers that no
    method fills stay on meta, to be loaded.

    Raises:
        StructureError: buffers that are in no checkpoint, and that no method fills.
    """
    made: dict[
        int, tuple[Tensor, Tensor]
    ] = {}  # old and new: what modules share they go on sharing
    unknown = []
    for path, module in model.named_modules():
        names = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        found = _computed(model, path, module, names) if names else {}
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


def _computed(
    model: nn.Module, path: str, module: nn.Module, names: list[str]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for compute in _methods(model, path, module):
        tries = [_after(compute, path, module, names, fill) for fill in (0, 1)]
        for name in names:
            one, other = (values.get(name) for values in tries)
            if name in found or one is None or other is None or one.dtype != other.dtype:
                continue
            if one.shape == other.shape == module._buffers[name].shape and same_bits(one, other):  # type: ignore[union-attr]
                found[name] = one
        if len(found) == len(names):
            break
    return found


def _methods(model: nn.Module, path: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
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


def _after(
    compute: Callable[[], Any], path: str, module: nn.Module, names: Sequence[str], fill: int
) -> dict[str, Tensor]:
    """What buffers hold after ``compute``, before which they hold ``fill``; nothing if it fails."""
    with _apart(module), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(zlib.crc32(path.encode()))
        for name in names:
            like: Any = module._buffers[name]
            module._buffers[name] = torch.full(like.shape, fill, dtype=like.dtype, device="cpu")
        try:
            compute()
        except Exception:  # noqa: BLE001 - another method may do; without one the buffer is named
            return {}
        values = {name: module._buffers.get(name) for name in names}
        return {n: v.detach().clone() for n, v in values.items() if v is not None and not v.is_meta}


@contextmanager
def _apart(module: nn.Module) -> Iterator[None]:
    """``module`` and those in it hold stand-ins without values: nothing of theirs is written."""
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


class Unfilled:
    """Parameters and buffers of a model from the meta device that were given no values yet.

    Args:
        members: that were on the meta device.
    """

    def __init__(self, model: nn.Module, members: Sequence[Member], rank: int) -> None:
        self._model, self._rank = model, rank
        self._members = [(member, member.version()) for member in members]
        self._buffers = [name for name, b in model.named_buffers() if b.is_meta]

    def look(self) -> None:
        """At a forward.

        Raises:
            StructureError: some still have none.
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
