"""Blocks that take all their weights at their entry: compiled ones, and small ones.

At the entry, every parameter of the block is replaced by the tensor to compute with, and put back
at the exit. Code in between sees plain tensors: ``torch.compile`` meets no hook of ours (WP-13),
and a block whose weights all travel together anyway needs one node of the graph instead of one a
weight. Gradients are ready together, at the end of the block's backward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from internsp.autograd import apart, before_backward_of, given, no_second_derivatives
from internsp.layers.parameters import unwritten, views, weights_of
from internsp.wp.parameter import Member, ShardedParameter


class BlockWeights:
    """All of a block's weights, replicated ones included.

    Attributes:
        all: in the order of use.
        sharded: those that backward needs at their places again, all of the block's unit.
        beside: those that other blocks share, each a unit of its own.
    """

    def __init__(self, weights: Sequence[Member]) -> None:
        self.all = weights
        guarded = [weight for weight in weights if isinstance(weight, ShardedParameter)]
        self.sharded = [weight for weight in guarded if weight.unit.block >= 0]
        self.beside = [weight for weight in guarded if weight not in self.sharded]
        self.in_unit = frozenset(self.sharded)


class BlockUse:
    """The use of all of a block's weights in one forward."""

    def __init__(self, of: BlockWeights) -> None:
        self.weights, self.sharded, self.beside = of.all, of.sharded, of.beside
        self._in_unit = of.in_unit

    def unshard(self) -> list[Tensor]:
        """The tensors to compute with."""
        found: dict[Member, Tensor] = {}
        if self.sharded:
            tensors = self.sharded[0].communicator.unshard_all(self.sharded)
            found = dict(zip(self.sharded, tensors, strict=True))
        whole = [
            found[weight] if weight in found else weight.communicator.unshard(weight)
            for weight in self.weights
        ]
        self._shown: dict[Member, Any] = {weight: weight.shown for weight in self.weights}
        return whole

    def release(self) -> None:
        """The block's forward is over."""
        if self.sharded:
            self.sharded[0].communicator.release_all(self.sharded)
        for weight in self.beside:
            weight.communicator.release(weight)

    def before_backward(self, gradients: Any) -> None:
        """Backward comes to an output of the block: the same values must be there."""
        if torch.is_grad_enabled():
            no_second_derivatives()
        guarded = [*self.sharded, *self.beside]
        if guarded[0].communicator.weight_part:
            return
        for weight in guarded:
            weight.show_again(self._shown[weight])
        if self.sharded:
            self.sharded[0].communicator.before_all(self.sharded)
        for weight in self.beside:
            weight.communicator.before_backward(weight)

    def on_grad_ready(self, gradients: Sequence[Tensor | None]) -> None:
        """Gradients of all weights, ``None`` where there is none; the last used is ready first."""
        sharded = []
        for weight, gradient in reversed(list(zip(self.weights, gradients, strict=True))):
            if gradient is None:
                continue
            communicator = weight.communicator
            if weight in self._in_unit and not communicator.weight_part:
                sharded.append((weight, gradient))
            else:
                weight.show_again(self._shown[weight])
                communicator.on_grad_ready(weight, gradient)
        if sharded:
            self.sharded[0].communicator.on_grads_ready(sharded)


def take_at_entry(
    block: nn.Module, prepare: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> None:
    """Replace ``block.forward`` by one that takes the weights first.

    In between, ``_parameters`` of each module is a plain dictionary of plain tensors.

    Args:
        prepare: what is done to the code in between, such as ``torch.compile``.
    """
    inner = prepare(block.forward) if prepare is not None else block.forward
    modules = [m for m in block.modules() if weights_of(m)]
    held: list[Any] = [m._parameters for m in modules]
    own = [weight for weights in held for weight in weights.weights.values()]
    parameters = [weight.parameter for weight in own]
    weights_of_block = BlockWeights(own)
    copied = [(m, weights) for m, weights in zip(modules, held, strict=True) if weights.copies]

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for module, weights in copied:
            weights.require_copies(module)
        before = given((args, kwargs))
        use = BlockUse(weights_of_block)
        taken = views(use, *parameters)
        plain = _plain(held, taken)
        handed = [dict(inside) for inside in plain]
        try:
            for module, inside in zip(modules, plain, strict=True):
                module.__dict__["_parameters"] = inside
            for module, weights in copied:
                weights.fill_copies(module, module._parameters)
            output = inner(*args, **kwargs)
        finally:
            for module, weights in zip(modules, held, strict=True):
                module.__dict__["_parameters"] = weights
            for module, weights in copied:
                weights.restore_copies(module)
        _keep_what_was_put_in(held, plain, handed)
        if any(not tensor.is_inference() and tensor._version for tensor in taken):
            for weight, tensor in zip(own, taken, strict=True):
                unwritten(weight, tensor)
        output = apart(output, taken)
        use.release()
        if use.sharded or use.beside:
            before_backward_of(output, use.before_backward, before)
        return output

    block.forward = forward  # type: ignore[method-assign]


def _plain(held: list[Any], taken: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What each module's ``_parameters`` holds meanwhile: views, and what a user has put in."""
    plain: list[dict[str, Any]] = []
    views = iter(taken)
    for weights in held:
        if weights.scope.recomputed:
            weights.before_recomputed()
        inside = dict(weights)
        for name, weight in weights.weights.items():
            view = next(views)
            inside[name] = view if inside[name] is weight.parameter else weights.other(name)
        plain.append(inside)
    return plain


def _keep_what_was_put_in(
    held: list[Any], plain: list[dict[str, Any]], handed: list[dict[str, Any]]
) -> None:
    """A parameter that the forward itself has set stays, and is met at the next use."""
    for weights, inside, before in zip(held, plain, handed, strict=True):
        for name, value in inside.items():
            if value is not before.get(name):
                weights[name] = value


def compile_block(block: nn.Module, **options: Any) -> None:
    """:func:`take_at_entry` around the compiled block.

    Args:
        options: for ``torch.compile``.
    """
    take_at_entry(block, lambda forward: _uncollected(torch.compile(forward, **options)))


def _uncollected(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, in which Python's garbage collector does not run, on any thread.

    To check the guards of what it has compiled before, torch lets go of the interpreter. If another
    thread then collects a class that these guards name, that of a model that was thrown away, torch
    frees them while it reads them: the process dies, there or later (seen with torch 2.13).
    """

    @wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return compiled(*args, **kwargs)
        finally:
            if collects:
                gc.enable()

    return call
