"""Activation checkpointing of blocks, with torch's own checkpoint in either form.

A block's ``forward`` is wrapped, not its call: the block's hooks stay outside, so that its output
hook starts the regather for recompute and backward together, whichever form is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from internsp.autograd import in_backward, tensors
from internsp.errors import StructureError
from internsp.layers.offload import Group

ContextFn = Callable[..., tuple[Any, Any]]
"""Called with what keeps a tensor elsewhere, or with nothing."""


def checkpoint_block(
    block: nn.Module,
    reentrant: bool = False,
    context_fn: ContextFn | None = None,
    recomputed: Callable[[], object] | None = None,
    group: Callable[[], Group] | None = None,
) -> None:
    """Make ``block`` recompute its activations in backward.

    Args:
        reentrant: torch's reentrant form. It carries gradients through positional tensors only;
            a call with others, or with none that needs a gradient, takes the other form.
        context_fn: what to keep all the same (selective checkpointing); not reentrant.
        recomputed: called when a recompute is over and the block's backward proper begins.
        group: where what a call keeps goes (:mod:`internsp.layers.offload`); ``None``: it stays.
    """
    inner = _WrittenBuffers(block).once(block.forward)
    if recomputed is not None:
        inner = _telling(inner, recomputed)

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
        contexts = None if context_fn is None else partial(context_fn, kept.keep)
        given = [t for t in tensors((args, kwargs)) if _made(t)]
        names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        if any(_made(kwargs[name]) for name in names) and not reentrant:
            # torch keeps positional tensors alone where autograd's hooks see them.
            args, kwargs, inside = _positioned(inner, args, kwargs, names)
        else:
            inside = inner
        with kept.keeping(given):
            output = plain(contexts, *args, inner=inside, **kwargs)
        kept.close()
        return output

    def plain(context_fn: ContextFn | None, *args: Any, inner: Any = inner, **kwargs: Any) -> Any:
        if reentrant and _positional(args, kwargs):
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

    block.forward = forward  # type: ignore[method-assign]


def _made(tensor: Any) -> bool:
    """Whether something else than the block has made it, and no program holds it as a leaf."""
    return (
        isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.grad_fn is not None
    )


def _positioned(
    inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any], Callable[..., Any]]:
    """The same call with the tensors of ``names`` behind the positional arguments."""
    count = len(args)

    def call(*given: Any, **others: Any) -> Any:
        return inner(*given[:count], **dict(zip(names, given[count:], strict=True)), **others)

    others = {name: value for name, value in kwargs.items() if name not in names}
    return (*args, *(kwargs[name] for name in names)), others, call


def _refuse_cache(block: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A cache of keys and values (transformers') is written into: a recompute would write again."""
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


class _WrittenBuffers:
    """Buffers that a block's forward writes: tokens that an expert got, running statistics.

    A recompute runs the forward once more, which must not count twice. A value that the forward
    both reads and writes is, in the recompute, the one after the forward, as in torch's checkpoint.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = list(block.modules())
        self._writing: list[nn.Module] = []  # those whose buffers a forward was seen to write

    def once(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """``inner``, which in a recompute writes into copies of them."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                before = [
                    (module, name, value, value._version)
                    for module in self._modules
                    for name, value in module._buffers.items()
                    if value is not None and not value.is_inference()
                ]
                named = [list(module._buffers) for module in self._modules]
                try:
                    return inner(*args, **kwargs)
                finally:
                    for module, name, value, version in before:
                        same = module._buffers.get(name) is value and value._version == version
                        if not same and module not in self._writing:
                            self._writing.append(module)
                    for module, names in zip(self._modules, named, strict=True):
                        if list(module._buffers) != names and module not in self._writing:
                            self._writing.append(module)  # it has made one
            # All of a module's: no counter shows what a batch norm does to its statistics.
            held: list[dict[str, Any]] = [dict(module._buffers) for module in self._writing]
            for module, buffers in zip(self._writing, held, strict=True):
                for name, value in buffers.items():  # what autograd saves of one must not change
                    module._buffers[name] = None if value is None else value.detach().clone()
            try:
                return inner(*args, **kwargs)
            finally:  # torch's early stop leaves by an exception
                for module, buffers in zip(self._writing, held, strict=True):
                    module._buffers.update(buffers)

        return forward


def _telling(inner: Callable[..., Any], recomputed: Callable[[], object]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        finally:  # torch's early stop leaves by an exception
            if in_backward():
                recomputed()

    return forward


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether gradients are wanted, and of positional tensors alone."""
    hidden = [value for value in args if not isinstance(value, Tensor)]
    return (
        torch.is_grad_enabled()
        and any(isinstance(value, Tensor) and value.requires_grad for value in args)
        and not any(tensor.requires_grad for tensor in tensors([hidden, kwargs]))
    )
