"""Activation checkpointing of blocks with torch's checkpoint, reentrant or not.

A block's ``forward`` is wrapped, not its ``__call__``: the block's hooks run outside of the
checkpoint, so that its pre-backward hook unshards weights for recompute and backward together, in
either form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from internsp.base.autograd import in_backward, tensors
from internsp.errors import StructureError
from internsp.modules.wrapping import Forward, Wrapping

if TYPE_CHECKING:
    from internsp.modules.offload import OffloadGroup

ContextFn = Callable[..., tuple[Any, Any]]
"""Called with a function that saves a tensor (:meth:`OffloadGroup.save`), or without arguments."""


def checkpoint_block(
    block: nn.Module,
    reentrant: bool = False,
    context_fn: ContextFn | None = None,
    recomputed: Callable[[], object] | None = None,
    group: Callable[[], OffloadGroup] | None = None,
) -> None:
    """Make ``block`` recompute its activations in backward.

    Args:
        reentrant: torch's reentrant form. It propagates gradients to positional tensors only; a
            call with other tensors, or with none that requires a gradient, is not reentrant.
        context_fn: chooses what to save nevertheless (selective checkpointing); not reentrant.
        recomputed: called after a recompute, before the block's own backward.
        group: returns the group in which a call saves tensors (:mod:`internsp.modules.offload`);
            ``None``: they stay on the device.
    """
    Wrapping.of(block).add(partial(_recomputing, block, reentrant, context_fn, recomputed, group))


def _recomputing(
    block: nn.Module,
    reentrant: bool,
    context_fn: ContextFn | None,
    recomputed: Callable[[], object] | None,
    group: Callable[[], OffloadGroup] | None,
    inner: Forward,
) -> Forward:
    inner = _running_again(block, recomputed, inner)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_cache(block, (*args, *kwargs.values()))
        versions = _versions((args, kwargs))
        output = run(*args, **kwargs)
        for tensor, version in versions:
            if tensor._version != version:
                raise StructureError(
                    f"a {type(block).__name__} writes into one of its inputs, from which its "
                    "activations cannot be recomputed: write into a copy of it, or leave the block "
                    "out of activation_checkpoint"
                )
        return output

    def run(*args: Any, **kwargs: Any) -> Any:
        if group is None or not torch.is_grad_enabled() or in_backward():
            return plain(context_fn, *args, **kwargs)
        kept = group()
        contexts = None if context_fn is None else partial(context_fn, kept.save)
        given = [t for t in tensors((args, kwargs)) if _is_activation(t)]
        names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        if any(_is_activation(kwargs[name]) for name in names) and not reentrant:
            # torch shows only positional tensors to the hooks of saved tensors.
            args, kwargs, inside = _as_positional(inner, args, kwargs, names)
        else:
            inside = inner
        with kept.saving(given):
            output = plain(contexts, *args, inner=inside, **kwargs)
        kept.end_forward()
        return output

    def plain(context_fn: ContextFn | None, *args: Any, inner: Any = inner, **kwargs: Any) -> Any:
        if reentrant and _reentrant_possible(args, kwargs):
            output = checkpoint(partial(inner, **kwargs), *args, use_reentrant=True)
            parts = output if isinstance(output, tuple) else (output,)
            if any(True for part in parts if not isinstance(part, Tensor) for _ in tensors(part)):
                raise StructureError(
                    f"a {type(block).__name__} returns tensors inside of a {type(output).__name__},"
                    " where reentrant checkpointing loses their gradients: set "
                    "activation_checkpoint.reentrant = false"
                )
            return output
        if context_fn is not None:
            return checkpoint(inner, *args, use_reentrant=False, context_fn=context_fn, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return forward


def _is_activation(tensor: Any) -> bool:
    """Whether it is a floating tensor that another operation computed, and not a leaf."""
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.grad_fn is not None


def _as_positional(
    inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any], Callable[..., Any]]:
    """The same call with the keyword tensors ``names`` passed after the positional arguments."""
    count = len(args)

    def call(*given: Any, **others: Any) -> Any:
        return inner(*given[:count], **dict(zip(names, given[count:], strict=True)), **others)

    others = {name: value for name, value in kwargs.items() if name not in names}
    return (*args, *(kwargs[name] for name in names)), others, call


def _refuse_cache(block: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse transformers' cache of keys and values: a recompute would write into it once more."""
    for value in inputs:
        if hasattr(value, "get_seq_length") and hasattr(value, "update"):
            raise StructureError(
                f"a {type(block).__name__} that recomputes its activations was given a "
                f"{type(value).__name__} in training, into which its recompute would write once "
                "more: call the model with use_cache=False (or set model.config.use_cache = False)"
            )


def _versions(inputs: Any) -> list[tuple[Tensor, int]]:
    if not torch.is_grad_enabled():
        return []
    return [(given, given._version) for given in tensors(inputs) if not given.is_inference()]


def _running_again(
    block: nn.Module, recomputed: Callable[[], object] | None, inner: Forward
) -> Forward:
    """``inner``, whose recomputes write into copies of the block's buffers (experts' token counts,
    running statistics), and call ``recomputed`` at their end.

    A recompute runs the forward once more, and must not count twice. A buffer that the forward both
    reads and writes has, in the recompute, its value after the forward, as in torch's checkpoint.
    """
    modules = list(block.modules())
    writing: list[nn.Module] = []  # modules whose buffers a forward has written

    def first(*args: Any, **kwargs: Any) -> Any:
        before = [
            (module, name, value, value._version)
            for module in modules
            for name, value in module._buffers.items()
            if value is not None and not value.is_inference()
        ]
        named = [list(module._buffers) for module in modules]
        try:
            return inner(*args, **kwargs)
        finally:
            for module, name, value, version in before:
                same = module._buffers.get(name) is value and value._version == version
                if not same and module not in writing:
                    writing.append(module)
            for module, names in zip(modules, named, strict=True):
                if list(module._buffers) != names and module not in writing:
                    writing.append(module)  # it registered a buffer

    def again(*args: Any, **kwargs: Any) -> Any:
        # Copy all buffers of a module: no version counter shows what a batch norm writes.
        held: list[dict[str, Any]] = [dict(module._buffers) for module in writing]
        for module, buffers in zip(writing, held, strict=True):
            for name, value in buffers.items():  # a buffer that autograd saved must not change
                module._buffers[name] = None if value is None else value.detach().clone()
        try:
            return inner(*args, **kwargs)
        finally:  # torch's early stop leaves by an exception
            for module, buffers in zip(writing, held, strict=True):
                module._buffers.update(buffers)
            if recomputed is not None:
                recomputed()

    return lambda *args, **kwargs: (again if in_backward() else first)(*args, **kwargs)


def _reentrant_possible(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether gradients are required, and only by positional tensors."""
    hidden = [value for value in args if not isinstance(value, Tensor)]
    return (
        torch.is_grad_enabled()
        and any(isinstance(value, Tensor) and value.requires_grad for value in args)
        and not any(tensor.requires_grad for tensor in tensors([hidden, kwargs]))
    )
