"""Every hook of a parallel model, registered by one function (:func:`register_hooks`).

Nothing here decides what is gathered; every hook says where the model is, and
:class:`internsp.wp.communicator.ISPCommunicator` acts. The phase is found from where a hook fires
(WP-9).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_map_only

from internsp.autograd import (
    NO_TASK,
    Given,
    given,
    graph_task,
    no_second_derivatives,
    on_gradient,
    own,
    refuse_traced,
    refuse_transformed,
    tensors,
    transforming,
)
from internsp.config import ActivationCheckpointConfig
from internsp.errors import GradientError, StructureError
from internsp.layers.entry import compile_block, take_at_entry
from internsp.layers.offload import ActivationOffload
from internsp.layers.parameters import Scope, enclose, weights_of, wrap
from internsp.layers.recompute import ContextFn, checkpoint_block
from internsp.layers.watch import loaded, loading, require_no_gradient_hooks, stepped, stepping
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.enclosing import Enclosing
from internsp.wp.parameter import not_to_be_copied
from internsp.wp.slots import Unit

Entered = Callable[[tuple[Any, ...], Mapping[str, Any]], None]


Block = Unit | Enclosing[Unit]


@dataclass
class BlockHooks:
    """What the hooks of a unit's modules, or of a block that holds units of its own, need.

    Attributes:
        modules: all that are one unit; such a block is one.
        trigger: the module inside whose forward is the prefetch trigger; ``None``: a unit's entry.
        checkpoint: it recomputes its activations, in this form.
    """

    block: Block
    modules: Sequence[nn.Module]
    scope: Scope
    checkpoint: ActivationCheckpointConfig | None
    trigger: nn.Module | None = None

    @property
    def place(self) -> tuple[int, bool]:
        """Among the model's blocks; one with units comes behind its first unit."""
        block = self.block
        return (block.first, True) if isinstance(block, Enclosing) else (block.block, False)


@dataclass
class Together:
    """Several modules that are one unit, in a forward.

    Attributes:
        left: which of them have been left, from the first one's entry until all have; else
            ``None``.
    """

    count: int
    left: set[int] | None = None


def register_hooks(
    root: nn.Module,
    root_scope: Scope,
    blocks: Sequence[BlockHooks],
    communicator: ISPCommunicator,
    entered: Entered | None = None,
    compute_dtype: torch.dtype | None = None,
    compiles: bool = False,
    context_fn: ContextFn | None = None,
    offload: ActivationOffload | None = None,
) -> None:
    """Register all of them, outermost first, in the order in which they fire.

    Those of backward stand on tensors and nodes of a graph, and so are registered in each forward:
    ``Tensor.register_hook`` on the outputs of the model and of each block
    (:meth:`Hooks._leave_root`, :meth:`Hooks._leave_block`: backward enters here, gather),
    ``Node.register_prehook`` on what a module made with its weights
    (:func:`internsp.layers.parameters.leave`: the values must be there again), the weights' own
    nodes (:class:`internsp.layers.parameters.Views`: a gradient is ready), and
    ``Variable._execution_engine.queue_callback`` for the end of the outermost backward
    (:meth:`ISPCommunicator._queue_end`).

    Args:
        blocks: of units, and those that hold units.
        entered: called with the root's arguments at each outermost forward.
        compute_dtype: of the weights, where it is not their own; the root's floating inputs are
            cast to it.
        compiles: ``torch.compile`` takes each block as a whole.
        context_fn: what selective checkpointing keeps.
        offload: takes what recomputing blocks keep.
    """
    hooks = Hooks(communicator, entered, compute_dtype)
    members = communicator.replicated.everyone()

    # The model. First of all hooks, so that a user's own find the weights' state of this pass.
    root.register_forward_pre_hook(hooks._enter_root, prepend=True, with_kwargs=True)
    # After the user's own hooks of the model: a gradient hook on a parameter may be theirs.
    root.register_forward_pre_hook(require_no_gradient_hooks(root, members))
    # Called after an exception too: the ranks that will wait for this one are told.
    root.register_forward_hook(hooks._leave_root, always_call=True)

    for each in blocks:
        hooks.of_block(each)

    # Inside the calls: forwards of modules with weights of their own, ...
    scopes = {id(root), *(id(module) for each in blocks for module in each.modules)}
    for module in root.modules():
        if weights_of(module):
            module.register_load_state_dict_pre_hook(partial(loading, communicator))
            # ``assign=True`` puts other parameters in place of ours: their values are taken.
            module.register_load_state_dict_post_hook(partial(loaded, communicator))
            if id(module) not in scopes:  # those of blocks and of the model are wrapped below
                wrap(module)
    # ... of blocks, which hold weights that are read past their modules, ...
    for each in blocks:
        for module in each.modules:
            if isinstance(each.block, Enclosing) or not (compiles or each.block.at_entry):
                enclose(module, each.scope)
            elif compiles:
                compile_block(module)
            else:
                take_at_entry(module)
    # ... in checkpoints around that, so that the recompute finds the weights, ...
    recomputing = sorted(
        (each for each in blocks if each.checkpoint is not None), key=lambda each: each.place
    )
    for number, each in enumerate(recomputing):
        assert each.checkpoint is not None
        record = partial(communicator.state.trace.record, "BACKWARD", each.block.name)
        group = None if offload is None else partial(offload.group, number)
        for module in each.modules:
            checkpoint_block(module, each.checkpoint.reentrant, context_fn, record, group)
    # ... and of the model, for weights beside the blocks.
    enclose(root, root_scope)

    # Between two passes: what an optimizer writes, no version counter shows (foreach, fused), and
    # what it is still publishing must be there before a state_dict reads it (WP-3, WP-11).
    root.register_state_dict_pre_hook(lambda *_: communicator.publish())
    alive = weakref.ref(communicator)
    # Never removed: a finalizer could run while torch iterates over its hooks.
    register_optimizer_step_pre_hook(partial(stepping, alive))
    register_optimizer_step_post_hook(partial(stepped, alive))


class Hooks:
    """What the hooks of one chunk do."""

    def __init__(
        self,
        communicator: ISPCommunicator,
        entered: Entered | None,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.communicator = communicator
        self._compute_dtype = compute_dtype
        self._entered = entered
        self._given: dict[Block, Given] = {}
        self.together: dict[Unit, Together] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_to_be_copied()

    def of_block(self, hooked: BlockHooks) -> None:
        """Register those of a block's calls.

        A checkpoint lies inside, so that they fire once in forward, and the recompute is seen by
        the gradient of the output.
        """
        block, modules = hooked.block, hooked.modules
        enter: Callable[..., None] = self._enter_block
        leave: Callable[..., None] = self._leave_block
        if isinstance(block, Unit) and len(modules) > 1:
            enter, leave = self._enter_one, self._leave_one
            self.together[block] = Together(len(modules))
        for module in modules:
            before, after = partial(enter, block), partial(leave, block)
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after)
        if isinstance(block, Unit):
            trigger = hooked.trigger if hooked.trigger is not None else modules[0]
            trigger.register_forward_pre_hook(partial(self._on_trigger, block))

    def _enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        compiled = module._compiled_call_impl is not None  # module.compile()
        if compiled or transforming() or torch.compiler.is_compiling():
            refuse_transformed("the model", compiled)
        refuse_traced("the model")
        if graph_task() != NO_TASK:
            return None
        for together in self.together.values():
            together.left = None  # of a forward that has failed
        if self._entered is not None:
            self._entered(args, kwargs)
        self.communicator.begin_forward()
        if self._compute_dtype is None:
            return None
        return tree_map_only(Tensor, self._cast, (args, kwargs))

    def _cast(self, given: Tensor) -> Tensor:
        return given.to(self._compute_dtype) if given.is_floating_point() else given

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if graph_task() != NO_TASK:
            return
        self.communicator.state.inside = False  # by an exception, too: then it stays open
        error = sys.exc_info()[1]
        if output is None and error is not None:  # a failed forward: begin_forward will recover
            self.communicator.forward_failed(error)
            return
        self._leave_unfinished()
        self.communicator.end_forward()
        for tensor in tensors(output):
            if tensor.requires_grad:
                forward = self.communicator.forwards
                plain = not isinstance(tensor, DTensor)
                on_gradient(tensor, partial(self._backward_begins, forward, plain), {})

    def _backward_begins(self, forward: int, plain: bool, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            no_second_derivatives()
        if plain and isinstance(gradient, DTensor):
            raise GradientError(
                "the model's output was added to a term of its parameters themselves, which is a "
                "DTensor: let each have a backward of its own (loss.backward(), then "
                "penalty.backward()), or use the optimizer's weight_decay"
            )
        self.communicator.begin_backward(forward)
        if not self.communicator.weight_part:  # the last block comes first (usually there)
            self.communicator.state.perform(self.communicator.queue.at_output())

    def _enter_block(self, block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        compiled = module._compiled_call_impl is not None
        if compiled or transforming() or torch.compiler.is_compiling():
            refuse_transformed(f"block {block.name}", compiled)
        if isinstance(block, Enclosing):
            self.communicator.enter_enclosing(block)
        else:
            if self.together and graph_task() == NO_TASK:
                self._leave_unfinished()
            self.communicator.enter_block(block)
        self._given[block] = given((args, kwargs))

    def _leave_block(self, block: Block, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(block, Unit):
            if graph_task() == NO_TASK:
                self.communicator.state.perform(self.communicator.queue.leave(block))
            elif block.around >= 0:
                self.communicator.queue.leave_recompute(block)
        self._await_gradient(block, output)

    def _await_gradient(self, unit: Block, output: Any) -> None:
        """Have backward noticed when a gradient of a block's ``output`` arrives."""
        recompute = graph_task() != NO_TASK
        before = self._given.pop(unit, {})
        if not torch.is_grad_enabled():
            return
        if not isinstance(output, Tensor) and not tensors(output):
            raise StructureError(
                f"block {unit.name} returns a {type(output).__name__}, in which no tensor can be "
                "found, so that its backward could not be prefetched: return tensors, or tuples, "
                "lists, mappings or dataclasses of them"
            )
        for tensor in own(output, before):
            if tensor.requires_grad:
                # An inner graph of a reentrant recompute must not queue the end of backward.
                forward = None if recompute else self.communicator.forwards
                run = None if recompute else self.communicator.queue.run_of(unit)
                on_gradient(tensor, partial(self._gradient_arrives, unit, forward, run), before)

    def _gradient_arrives(
        self,
        unit: Block,
        forward: int | None,
        run: int | None,
        gradient: Tensor,
    ) -> None:
        if torch.is_grad_enabled():
            no_second_derivatives()
        if forward is not None:
            self.communicator.begin_backward(forward)
        if isinstance(unit, Enclosing):
            self.communicator.enclosing_backward(unit)
        else:
            self.communicator.enter_backward(unit, run)

    # several modules that are one unit

    def _enter_one(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The unit is entered with the first of them, in a recompute with each."""
        together = self.together[unit]
        if together.left is not None and graph_task() == NO_TASK:
            self._given[unit] = given((args, kwargs))
            return
        self._enter_block(unit, module, args, kwargs)
        if graph_task() == NO_TASK:
            together.left = set()

    def _leave_one(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        """It is left when all of them have run."""
        together = self.together[unit]
        if graph_task() == NO_TASK and together.left is not None:
            together.left.add(id(module))
            if len(together.left) < together.count:
                self._await_gradient(unit, output)
                return
            together.left = None
        self._leave_block(unit, module, args, output)

    def _leave_unfinished(self) -> None:
        """Another unit runs, or the model's end: what of a unit has not run until now does not."""
        for unit, together in self.together.items():
            if together.left is not None:
                together.left = None
                self.communicator.state.perform(self.communicator.queue.leave(unit))

    def _on_trigger(self, unit: Unit, module: nn.Module, args: Any) -> None:
        queue, recompute = self.communicator.queue, graph_task() != NO_TASK
        self.communicator.state.perform(queue.trigger(unit, recompute))
