"""When: the hooks that perform the schedule on a model (InternEvo's prefetch, made tag-based).

Nothing here decides what is gathered; every hook says where the model is, and
:class:`internsp.wp.communicator.ISPCommunicator` acts. The phase is found from where a hook fires
(WP-9).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from internsp.autograd import (
    Given,
    given,
    in_backward,
    no_second_derivatives,
    on_gradient,
    own,
    refuse_transformed,
    tensors,
)
from internsp.errors import GradientError, StructureError
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import not_to_be_copied
from internsp.wp.slots import Unit


class Prefetcher:
    """Hooks of one chunk. ``remove`` takes them off again.

    Args:
        at_entry: called with the root's arguments at each outermost forward.
        compute_dtype: of the weights, where it is not their own; the root's floating inputs are
            cast to it.
    """

    def __init__(
        self,
        communicator: ISPCommunicator,
        root: nn.Module,
        blocks: list[tuple[nn.Module, Unit, nn.Module | None]],
        at_entry: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.communicator = communicator
        self._compute_dtype = compute_dtype
        self._at_entry = at_entry
        self._given: dict[Unit, Given] = {}
        self._handles = [
            root.register_forward_pre_hook(self._enter_root, prepend=True, with_kwargs=True),
            root.register_forward_hook(self._leave_root, always_call=True),
        ]
        for module, unit, inside in blocks:
            self._handles += [
                module.register_forward_pre_hook(
                    partial(self._enter_block, unit), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(partial(self._leave_block, unit)),
            ]
            trigger = inside if inside is not None else module
            self._handles.append(trigger.register_forward_pre_hook(partial(self._on_trigger, unit)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_to_be_copied()

    def remove(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        refuse_transformed("the model", module._compiled_call_impl is not None)
        if in_backward():
            return None
        if self._at_entry is not None:
            self._at_entry(args, kwargs)
        self.communicator.begin_forward()
        if self._compute_dtype is None:
            return None
        return tree_map_only(Tensor, self._cast, (args, kwargs))

    def _cast(self, given: Tensor) -> Tensor:
        return given.to(self._compute_dtype) if given.is_floating_point() else given

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        self.communicator.leave_forward()
        error = sys.exc_info()[1]
        if output is None and error is not None:  # a failed forward: begin_forward will recover
            self.communicator.forward_failed(error)
            return
        self.communicator.end_forward()
        for tensor in tensors(output):
            if tensor.requires_grad:
                forward = self.communicator.forwards
                on_gradient(tensor, partial(self._backward_begins, forward), {})

    def _backward_begins(self, forward: int, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            no_second_derivatives()
        if isinstance(gradient, DTensor):
            raise GradientError(
                "the model's output was added to a term of its parameters themselves, which is a "
                "DTensor: let each have a backward of its own (loss.backward(), then "
                "penalty.backward()), or use the optimizer's weight_decay"
            )
        self.communicator.begin_backward(forward)
        self.communicator.expect_last_block()

    def _enter_block(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        refuse_transformed(f"block {unit.name}", module._compiled_call_impl is not None)
        self.communicator.enter_block(unit)
        self._given[unit] = given((args, kwargs))

    def _leave_block(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        recompute = in_backward()
        before = self._given.pop(unit, {})
        if not recompute:
            self.communicator.leave_block(unit)
        if not torch.is_grad_enabled():
            return
        if not any(True for _ in tensors(output)):
            raise StructureError(
                f"block {unit.name} returns a {type(output).__name__}, in which no tensor can be "
                "found, so that its backward could not be prefetched: return tensors, or tuples, "
                "lists, mappings or dataclasses of them"
            )
        for tensor in own(output, before):
            if tensor.requires_grad:
                # An inner graph of a reentrant recompute must not queue the end of backward.
                forward = None if recompute else self.communicator.forwards
                on_gradient(tensor, partial(self._gradient_arrives, unit, forward), before)

    def _gradient_arrives(self, unit: Unit, forward: int | None, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            no_second_derivatives()
        if forward is not None:
            self.communicator.begin_backward(forward)
        self.communicator.enter_backward(unit)

    def _on_trigger(self, unit: Unit, module: nn.Module, args: Any) -> None:
        self.communicator.on_trigger(unit)
