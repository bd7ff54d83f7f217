"""Every hook of a parallel model, registered by one function (:func:`register_hooks`).

Hooks report where the model is (pre-forward, prefetch trigger, post-forward, pre-backward, ready
gradients, post-backward) to :class:`internsp.wp.events.Events`, which acts. The phase (forward,
recompute, backward) follows from where a hook fires (WP-9).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from internsp.base.autograd import (
    NO_TASK,
    InputTensors,
    graph_task,
    input_tensors,
    new_tensors,
    no_second_derivatives,
    refuse_compiled,
    refuse_traced,
    refuse_transformed,
    register_gradient_hook,
    tensors,
    transforming,
)
from internsp.config import ActivationCheckpointConfig
from internsp.errors import GradientError, StructureError
from internsp.modules.entry import unshard_at_block_entry
from internsp.modules.parameters import Scope, weights_of, wrap_forward, wrap_scope
from internsp.modules.watch import (
    STEPPED,
    after_load,
    before_load,
    require_no_gradient_hooks,
)
from internsp.modules.wrapping import Layer, Wrapping
from internsp.schedule.enclosing import Enclosing
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.events import Block, Events
from internsp.wp.parameter import not_to_be_copied
from internsp.wp.slots import Unit

if TYPE_CHECKING:
    from internsp.modules.offload import ActivationOffload
    from internsp.modules.recompute import ContextFn



@dataclass
class BlockHooks:
    """A module to register hooks on: one unit's, or that of a block that holds units of its own.

    Attributes:
        block: the unit, or the block that holds units.
        scope: in which the block's weights may be read.
        trigger: the module inside that is the prefetch trigger; ``None`` if the unit's entry is.
        checkpoint: how the block recomputes its activations; ``None`` if it does not.
    """

    block: Block
    module: nn.Module
    scope: Scope
    checkpoint: ActivationCheckpointConfig | None
    trigger: nn.Module | None = None

    @property
    def place(self) -> tuple[int, bool]:
        """Sort key among the model's blocks; a block with units comes after its first unit."""
        block = self.block
        return (block.first, True) if isinstance(block, Enclosing) else (block.block, False)


def register_hooks(
    root: nn.Module,
    root_scope: Scope,
    blocks: Sequence[BlockHooks],
    communicator: ISPCommunicator,
    compilers: Mapping[nn.Module, Layer] | None = None,
    context_fn: ContextFn | None = None,
    offload: ActivationOffload | None = None,
) -> None:
    """Register all hooks, outermost first, in the order in which they fire.

    Those of backward are registered on tensors and nodes of the graph, and so in each forward:

    - pre-backward of the model and of each block: ``Tensor.register_hook`` on their outputs
      (:meth:`Hooks._root_post_forward`, :meth:`Hooks._post_forward`);
    - pre-backward of a module with weights: ``Node.register_prehook`` on its outputs
      (:func:`internsp.modules.parameters.end_forward`);
    - gradient ready: backward of the nodes that gave out the weights
      (:class:`internsp.modules.parameters.Views`);
    - post-backward: ``Variable._execution_engine.queue_callback``, at the end of the outermost
      backward (:meth:`Events._queue_post_backward_callback`). A block's post-backward has no hook:
      it is the pre-backward of the block before it, or the end.

    Args:
        root: the model.
        root_scope: in which weights outside of the blocks may be read.
        blocks: the units, and the blocks that hold units.
        compilers: what compiles the forward of a block, or of a module outside of them.
        context_fn: says what selective checkpointing keeps.
        offload: offloads the activations that recomputed blocks keep.
    """
    hooks, compilers = Hooks(communicator.events), compilers or {}

    # The model. Before all other hooks, so that a user's hooks find the state of this pass.
    root.register_forward_pre_hook(hooks._root_pre_forward, prepend=True, with_kwargs=True)
    # After the user's hooks of the model, which may register a gradient hook on a parameter.
    root.register_forward_pre_hook(require_no_gradient_hooks(root, communicator))
    # Called after an exception, too, to report it to the ranks that will wait for this one.
    root.register_forward_hook(hooks._root_post_forward, always_call=True)

    for each in blocks:
        hooks.register_block(each)

    # Inside the calls: forwards of modules with weights of their own, ...
    scopes = {id(root), *(id(each.module) for each in blocks)}
    for module in root.modules():
        if module in compilers:
            Wrapping.of(module).compiler = compilers[module]
            if id(module) not in scopes:
                unshard_at_block_entry(module)
        if weights_of(module):
            module.register_load_state_dict_pre_hook(partial(before_load, communicator))
            # ``assign=True`` puts others in place of our parameters: copy the others' values.
            module.register_load_state_dict_post_hook(partial(after_load, communicator))
            # Blocks and the model are wrapped below.
            if id(module) not in scopes and module not in compilers:
                wrap_forward(module)
    # ... of blocks, where weights may be read outside of the module that owns them, ...
    for each in blocks:
        module, wrapping = each.module, Wrapping.of(each.module)
        wrapping.block = each.block.name
        own = (m for m in module.modules() if weights_of(m) and id(m) not in scopes)
        wrapping.look_inside(own)
        small = isinstance(each.block, Unit) and each.block.unshard_at_entry
        if small or module in compilers:
            unshard_at_block_entry(module)
        else:
            wrap_scope(module, each.scope)
    # ... then checkpoints around that, so that the recompute finds the weights, ...
    recomputing = sorted(
        (each for each in blocks if each.checkpoint is not None), key=lambda each: each.place
    )
    for number, each in enumerate(recomputing):
        from internsp.modules.recompute import checkpoint_block

        assert each.checkpoint is not None
        record = partial(communicator.state.trace.record, "BACKWARD", each.block.name)
        group = None if offload is None else partial(offload.group, number)
        checkpoint_block(each.module, each.checkpoint.reentrant, context_fn, record, group)
    # ... and of the model, for weights outside of the blocks.
    wrap_scope(root, root_scope)

    # Between two passes: no version counter shows what an optimizer writes (foreach, fused), and
    # its all-gathers must have ended before a state_dict reads the shards (WP-3, WP-11).
    root.register_state_dict_pre_hook(lambda *_: communicator.wait_until_ready())
    STEPPED[communicator] = {}


class Hooks:
    """The hooks of one chunk."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._inputs: dict[Block, InputTensors] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_to_be_copied()

    def register_block(self, hooked: BlockHooks) -> None:
        """Register the pre-forward and post-forward hooks of a block, and its prefetch trigger.

        Our checkpoint wraps the module's ``forward``, inside of these hooks, so that they do not
        fire in its recompute: the pre-backward hook on the block's output has come before it.
        """
        block, module = hooked.block, hooked.module
        before = partial(self._pre_forward, block)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(partial(self._post_forward, block))
        # Also where it fails, or torch stops a recompute early: they hold the graph and the model.
        module.register_forward_hook(partial(self._drop_inputs, block), always_call=True)
        if isinstance(block, Unit):
            trigger = hooked.trigger if hooked.trigger is not None else module
            trigger.register_forward_pre_hook(partial(self._at_prefetch_trigger, block))

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        compiled = module._compiled_call_impl is not None  # module.compile()
        if compiled or transforming() or torch.compiler.is_compiling():
            refuse_transformed("the model", compiled)
        refuse_traced("the model")
        if graph_task() != NO_TASK:
            return
        self._events.root_pre_forward(args, kwargs)

    def _root_post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if graph_task() != NO_TASK:
            return
        error = sys.exc_info()[1] if output is None else None
        self._events.root_post_forward(error)
        for tensor in tensors(output):
            if tensor.requires_grad:
                forward = self._events.forwards
                plain = not isinstance(tensor, DTensor)
                register_gradient_hook(tensor, partial(self._root_pre_backward, forward, plain), {})

    def _root_pre_backward(self, forward: int, plain: bool, gradient: Tensor) -> None:
        if torch.compiler.is_compiling():
            refuse_compiled("a function that calls backward()")
        if torch.is_grad_enabled():
            no_second_derivatives()
        if plain and isinstance(gradient, DTensor):
            raise GradientError(
                "the model's output was added to a term of its parameters themselves, which is a "
                "DTensor: let each have a backward of its own (loss.backward(), then "
                "penalty.backward()), or use the optimizer's weight_decay"
            )
        self._events.root_pre_backward(forward, at_output=True)

    def _pre_forward(self, block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        compiled = module._compiled_call_impl is not None
        if compiled or transforming() or torch.compiler.is_compiling():
            refuse_transformed(f"block {block.name}", compiled)
        self._events.pre_forward(block)
        self._inputs[block] = input_tensors((args, kwargs))

    def _post_forward(self, block: Block, module: nn.Module, args: Any, output: Any) -> None:
        """A block's post-forward: register its pre-backward hook, on the tensors of its output."""
        forward, run = self._events.post_forward(block)
        before = self._inputs.get(block, {})
        if not torch.is_grad_enabled():
            return
        if not isinstance(output, Tensor) and not tensors(output):
            raise StructureError(
                f"block {block.name} returns a {type(output).__name__}, in which no tensor can be "
                "found, so that its backward could not be prefetched: return tensors, or tuples, "
                "lists, mappings or dataclasses of them"
            )
        for tensor in new_tensors(output, before):
            # Backward ends at a leaf, as a program makes one of a frozen embedding's output for its
            # checkpoints: nothing of this block runs, and what comes after it may not be complete.
            if tensor.requires_grad and not tensor.is_leaf:
                call = partial(self._pre_backward, block, forward, run)
                register_gradient_hook(tensor, call, before)

    def _drop_inputs(self, block: Block, module: nn.Module, args: Any, output: Any) -> None:
        self._inputs.pop(block, None)

    def _pre_backward(
        self,
        unit: Block,
        forward: int | None,
        run: int | None,
        gradient: Tensor,
    ) -> None:
        if torch.is_grad_enabled():
            no_second_derivatives()
        self._events.pre_backward(unit, forward, run)

    def _at_prefetch_trigger(self, unit: Unit, module: nn.Module, args: Any) -> None:
        self._events.trigger(unit)
