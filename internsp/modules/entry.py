"""Blocks that unshard all their weights at their entry: compiled ones, and ones of small weights.

At its entry every parameter of the block is replaced by the unsharded tensor, and put back at the
exit. The forward in between sees plain tensors: ``torch.compile`` meets no hook of ours (WP-13),
and a block whose weights share one collective anyway needs one autograd node instead of one for
each weight. All gradients are ready together, at the end of the block's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, wraps
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from internsp.base.autograd import (
    clone_aliases,
    input_tensors,
    register_pre_backward_hook,
)
from internsp.modules.parameters import Taken, put_back, require_unwritten, views, weights_of
from internsp.modules.wrapping import Forward, Wrapping
from internsp.wp.parameter import Member, ShardedParameter


class BlockHandle:
    """The use of all parameters of a block in one forward.

    Args:
        weights: sharded and replicated ones, in the order of use.
        sharded: the sharded weights of the block's unit, which backward needs in their slot again.
        shared: sharded weights of units outside of the blocks: other blocks use them, too.
    """

    def __init__(
        self,
        weights: Sequence[Member],
        sharded: Sequence[ShardedParameter],
        shared: Sequence[ShardedParameter],
    ) -> None:
        self.weights, self.sharded, self.shared = weights, sharded, shared

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
        self._shown: dict[Member, Any] = {weight: weight.used_version for weight in self.weights}
        return whole

    def release(self) -> None:
        """Release the weights after the block's forward."""
        if self.sharded:
            self.sharded[0].communicator.release_all(self.sharded)
        for weight in self.shared:
            weight.communicator.release(weight)

    def pre_backward(self, gradients: Any) -> None:
        """Unshard the weights for the backward of the block: the same values in their slot."""
        for weight in (*self.sharded, *self.shared):
            weight.require_version(self._shown[weight])
        if self.sharded:
            self.sharded[0].communicator.pre_backward_all(self.sharded)
        for weight in self.shared:
            weight.communicator.pre_backward(weight)

    def on_grad_ready(self, gradients: Sequence[Tensor | None]) -> None:
        """Hand over the gradients of all weights (``None`` if there is none), last used first."""
        sharded, together = [], not self.weights[0].communicator.weight_part
        for weight, gradient in reversed(list(zip(self.weights, gradients, strict=True))):
            if gradient is None:
                continue
            if together and isinstance(weight, ShardedParameter) and weight.unit.block >= 0:
                sharded.append((weight, gradient))
            else:
                weight.require_version(self._shown[weight])
                weight.communicator.on_grad_ready(weight, gradient)
        if sharded:
            self.sharded[0].communicator.on_grads_ready(sharded)


def unshard_at_block_entry(block: nn.Module) -> None:
    """Put a function around ``block.forward`` that unshards the weights first.

    While it runs, ``_parameters`` of each module is a plain dictionary of plain tensors.
    """
    Wrapping.of(block).add(partial(_unsharding_all, block))


def _unsharding_all(block: nn.Module, inner: Forward) -> Forward:
    modules = [m for m in block.modules() if weights_of(m)]
    held: list[Any] = [m._parameters for m in modules]
    own = [weight for weights in held for weight in weights.weights.values()]
    found = [weight for weight in own if isinstance(weight, ShardedParameter)]
    sharded = [weight for weight in found if weight.unit.block >= 0]
    shared = [weight for weight in found if weight.unit.block < 0]
    copied = [(m, weights) for m, weights in zip(modules, held, strict=True) if weights.copies]
    opened = held[0].scope.opened

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outside = [m._parameters for m in modules]
        within = outside[0] is not held[0]  # the block's own forward recomputes it
        for module, weights in () if within else copied:
            weights.require_copies(module)
        before = input_tensors((args, kwargs))
        handle = BlockHandle(own, sharded, shared)
        # Also under no_grad: a block may record a part by itself, as a reversible one in backward.
        with torch.enable_grad():
            unsharded = views(handle, *[weight.parameter for weight in own])
        plain = _plain(held, unsharded)
        handed = [dict(inside) for inside in plain]
        opened.number += 1
        try:
            for module, inside in zip(modules, plain, strict=True):
                module.__dict__["_parameters"] = inside
            for module, weights in copied:
                weights.fill_copies(module, module._parameters)
            output = inner(*args, **kwargs)
        finally:
            opened.number -= 1
            for module, inside in zip(modules, outside, strict=True):
                module.__dict__["_parameters"] = inside
            for module, weights in copied:
                if within:
                    weights.fill_copies(module, module._parameters)
                else:
                    weights.restore_copies(module)
            taken = _keep_what_was_put_in(held, plain, handed)
        if any(not tensor.is_inference() and tensor._version for tensor in unsharded):
            reset = [weights.weights[name] for weights, name, _ in taken]
            for weight, tensor in zip(own, unsharded, strict=True):
                require_unwritten(weight, tensor, reset.count(weight))
        output = clone_aliases(output, unsharded)
        handle.release()
        if handle.sharded or handle.shared:
            register_pre_backward_hook(output, handle.pre_backward, before)
        return output

    return forward


def _plain(held: list[Any], unsharded: Sequence[Tensor]) -> list[dict[str, Any]]:
    """``_parameters`` of each module while the block's forward runs: unsharded views, and what a
    user has put there."""
    plain: list[dict[str, Any]] = []
    remaining = iter(unsharded)
    for weights in held:
        if weights.scope.recomputed:
            weights.before_recomputed()
        inside = dict(weights)
        for name, weight in weights.weights.items():
            view = next(remaining)
            inside[name] = view if inside[name] is weight.parameter else weights.replacement(name)
        plain.append(inside)
    return plain


def _keep_what_was_put_in(
    held: list[Any], plain: list[dict[str, Any]], handed: list[dict[str, Any]]
) -> list[Taken]:
    """Keep what the forward itself has put into ``_parameters``; the next use refuses it.

    Returns:
        The weights that a parametrization has taken out, and that are back in their modules.
    """
    taken: list[Taken] = []
    for weights, inside, before in zip(held, plain, handed, strict=True):
        if inside.keys() == before.keys() and all(map(is_, inside.values(), before.values())):
            continue  # the usual case
        if len(inside) < len(before):
            gone = [name for name in before if name not in inside and name in weights.weights]
            taken += [Taken(weights, name, tuple(weights)) for name in gone]
        for name, value in inside.items():
            if value is not before.get(name):
                weights[name] = value
    put_back(taken)
    return taken
