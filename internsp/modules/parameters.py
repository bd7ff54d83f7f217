"""How modules read their weights: sharded between forwards, unsharded in one (design.md 4.1, 4.3).

``module._parameters`` becomes a :class:`Weights`. Outside of a forward it returns the parameter, a
``DTensor``. In the forward of the module that owns the weight (:func:`wrap_forward`), or of its
block (:func:`wrap_scope`; of the model, for weights outside of the blocks), it returns a
differentiable view: its forward gives the unsharded weight in its slot, its backward starts the
reduction of the gradient. So any code that reads ``module.weight`` computes with the unsharded
weight, and no module is converted. A module without a communicator is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from internsp.base.autograd import (
    InputTensors,
    clone_aliases,
    in_backward,
    input_tensors,
    new_tensors,
    no_second_derivatives,
    pre_backward_node,
    refuse_compiled,
    register_pre_backward_hook,
    tensors,
    transforming,
    under_transform,
)
from internsp.base.bits import same_bits
from internsp.errors import GradientError, StaleWeightError, StructureError
from internsp.modules.wrapping import Forward, Wrapping
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ShardedParameter, not_to_be_copied

# Whether the backward that runs comes to a node; called for each gradient.
_executed = torch._C._will_engine_execute_node


class ParameterHandle:
    """One use of one weight, or of all weights of a module, from the read to the gradient.

    Args:
        weights: read together, in the order of use.
        scoped: they are read outside of the forward of the module that owns them. Only the
            pre-backward hooks on the block's outputs unshard them again.

    Attributes:
        entered: whether a pre-backward hook has come since the last gradient.
        used_versions: the versions of the values that the views were made from (WP-14).
    """

    __slots__ = ("entered", "scoped", "used_versions", "weights")

    used_versions: list[Any]

    def __init__(self, weights: Sequence[Member], scoped: bool = False) -> None:
        self.weights, self.scoped, self.entered = weights, scoped, False

    def unshard(self) -> list[Tensor]:
        """The tensors to compute with."""
        tensors: list[Tensor] = []
        self.used_versions = versions = []
        for weight in self.weights:
            tensors.append(weight.communicator.unshard(weight))
            versions.append(weight.used_version)
        return tensors

    def release(self) -> bool:
        """Release the weights after a forward; returns whether backward unshards any again."""
        shared = False
        for weight in self.weights:
            if weight.shares_slot:
                if weight.communicator.releases:
                    weight.communicator.release(weight)
                shared = True
        return shared

    def pre_backward(self, saved: bool, gradients: tuple[Tensor, ...]) -> None:
        """Unshard the weights for the backward of a node that used the views: the same values.

        Args:
            saved: autograd saved the views for the node, so that a recompute runs before the node
                reads them.
            gradients: of the node's outputs, unused.
        """
        if torch.is_grad_enabled():
            no_second_derivatives()
        self.entered = True
        for index in range(len(self.weights) - 1, -1, -1):  # the last used first
            weight = self.weights[index]
            if not weight.shares_slot:
                continue
            weight.require_version(self.used_versions[index])
            if saved:
                weight.communicator.pre_backward(weight)
            else:
                weight.communicator.pre_backward_of_function(weight)

    def on_grad_ready(self, gradients: Sequence[Tensor | None]) -> None:
        """Hand over the gradients of the unsharded weights (``None`` where there is none).

        Raises:
            StaleWeightError: backward did not enter the block through one of its outputs.
        """
        for index in range(len(self.weights) - 1, -1, -1):
            gradient, weight = gradients[index], self.weights[index]
            if gradient is None:
                continue
            communicator, entered = weight.communicator, self.entered and weight.shares_slot
            if self.scoped and not entered and weight.shares_slot and not communicator.weight_part:
                raise StaleWeightError(
                    f"{weight.name} was read past the forward of the module that owns it, and "
                    "backward entered its block through a tensor that left it by another way than "
                    "its output, so that the weight may not have been unsharded: return that "
                    "tensor from the block"
                )
            if not entered:  # else :meth:`pre_backward` has checked it
                weight.require_version(self.used_versions[index])
            communicator.on_grad_ready(weight, gradient)
        self.entered = False


class Views(torch.autograd.Function):
    """Differentiable views: parameters (shards) -> unsharded tensors in their slots.

    Backward starts the reductions and returns ``None``: ``.grad`` stays unset until the reductions
    are finished. The parameters are inputs, so that they are in the graph.
    """

    @staticmethod
    def forward(ctx: Any, handle: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        """``handle``: of one weight, or of several
        (:class:`internsp.modules.entry.BlockHandle`)."""
        ctx.handle = handle
        ctx.set_materialize_grads(False)
        views = handle.unshard()
        for index, weight in enumerate(handle.weights):
            if weight.tensor is not None:
                views[index] = weight.tensor.as_dtensor(views[index])
        if len(views) > 1:
            wanted = ctx.needs_input_grad[1:]
            if not all(wanted):  # views of frozen weights need no gradient
                frozen = [view for view, want in zip(views, wanted, strict=True) if not want]
                ctx.mark_non_differentiable(*frozen)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """See the class."""
        if torch.is_grad_enabled():
            no_second_derivatives()
        answers: list[Tensor | None] = [None] * (len(gradients) + 1)
        ready, handle = list(gradients), ctx.handle
        weights = handle.weights
        for i, (leaf, _) in enumerate(ctx.next_functions):
            weight, gradient = weights[i], ready[i]
            if gradient is None:
                continue
            if weight.tensor is not None:
                ready[i] = gradient = weight.tensor.local_gradient(gradient)
            elif type(gradient) is not Tensor and is_traceable_wrapper_subclass(gradient):
                ready[i] = gradient = _plain_values(gradient)
            # ``inputs=`` may leave a leaf out; ``torch.autograd.grad`` captures it (WP-9), and then
            # torch will not say whether it executes the leaf.
            try:
                if not _executed(leaf):
                    ready[i] = None
            except RuntimeError:
                answers[i + 1] = _captured(weight, gradient)
        handle.on_grad_ready(ready)
        return tuple(answers)


def _plain_values(gradient: Tensor) -> Tensor:
    """``gradient``, of a class of its own, as a plain tensor, which reductions add."""
    plain = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    plain.copy_(gradient)
    return plain


def _captured(weight: Member, gradient: Tensor) -> Tensor:
    """The gradient that ``torch.autograd.grad`` returns to torch's split backward: zeros without
    memory of their own.

    Raises:
        GradientError: in any other call of ``torch.autograd.grad``.
    """
    if not weight.communicator.weight_part:
        raise GradientError(
            "torch.autograd.grad over a sharded weight is not supported: its gradient is "
            "reduced over ranks asynchronously; call backward() and read .grad. A schedule of "
            "torch's that splits backward needs internsp.Pipeline, or internsp.fsdp.install()"
        )
    shard = weight.parameter
    return gradient.new_zeros((), dtype=shard.dtype).expand(shard.shape)


views: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, Views).apply
"""``Views.apply`` without Python's ``Function.apply``, which examines each argument for transforms
of ``torch.func``: for calls where no such transform runs."""


def view(handle: ParameterHandle) -> Tensor:
    """The unsharded tensor of a handle of one weight, to compute with."""
    if transforming():  # below torch.vmap and the like: one tensor, which all instances share
        with temporarily_clear_interpreter_stack():
            return Views.apply(handle, handle.weights[0].parameter)[0]  # type: ignore[no-any-return]
    return views(handle, handle.weights[0].parameter)[0]


def weights_behind(node: Any) -> Sequence[Member] | None:
    """The weights whose views a node of the autograd graph made; ``None`` for other nodes."""
    if not isinstance(node, Views._backward_cls):  # type: ignore[attr-defined]
        return None
    weights: Sequence[Member] = node.handle.weights  # type: ignore[attr-defined]
    return weights


Unsharded = dict[Member, tuple[Tensor, ParameterHandle]]
"""The views that were made in one forward, by weight."""


class OpenForwards:
    """How many forwards run in which any code may read parameters of a chunk."""

    number = 0


@dataclass(eq=False, slots=True)
class Scope:
    """The forward of a block, or of the model, in which any code may read parameters.

    Attributes:
        module, name: the module whose forward this is, and its name (empty for the model).
        communicator: the chunk's.
        opened: counts the chunk's forwards that run.
        block: whether the forward is a block's. Weights outside of the blocks stay in their slots,
            so that for them it does not matter where backward enters.
        recomputed: whether activation checkpointing runs the forward again.
        unsharded: views made since the forward began; ``None`` outside of it.
        members: ``_parameters`` of the modules in it.
        taken: weights that a parametrization has taken out of their modules in this forward.
    """

    module: nn.Module
    name: str
    communicator: ISPCommunicator
    opened: OpenForwards
    block: bool = True
    recomputed: bool = False
    unsharded: Unsharded | None = None
    members: list[Weights] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)


class Taken(NamedTuple):
    """A weight that ``torch.nn.utils.parametrize`` has taken out of its module in a forward.

    Attributes:
        held: the module's ``_parameters``.
        name: the weight's name in it.
        order: the names that it had.
    """

    held: Weights
    name: str
    order: tuple[str, ...]


_LATE = "_internsp_late"
"""An attribute of a view that was read in a backward, outside of every forward: its weight."""
SHOWN = "_internsp_shown"
"""An attribute of a whole parameter that a program has asked for, in place of ours, to look at."""


class Weights(dict[str, Any]):
    """``_parameters`` of a module: in a forward ``[name]`` is an unsharded view.

    Otherwise it is the parameter. ``items``, ``values`` and ``get`` always return the parameters,
    for ``state_dict``, ``parameters()`` and optimizers. A ``Weights`` cannot be copied, so neither
    can the model.

    Attributes:
        weights: the module's parameters that ``parallelize`` has made, by their names in it.
        scope: the forward in which these may be read outside of the module's own forward.
        module: the module; ``owner``: its class and name, for errors.
        unsharded: views made in the module's own forward; ``None`` outside of it.
        copies: other references that the module keeps, as ``nn.LSTM`` does in a list: a path of
            attribute and keys, and the name. During a forward they hold the view, too.
    """

    __slots__ = ("copies", "module", "owner", "scope", "unsharded", "weights")

    def __init__(
        self, parameters: Mapping[str, Any], module: nn.Module, owner: str, scope: Scope
    ) -> None:
        super().__init__(parameters)
        self.module, self.owner, self.scope = module, owner, scope
        self.weights: dict[str, Member] = {}
        self.unsharded: Unsharded | None = None
        self.copies: list[tuple[tuple[Any, ...], str]] = []

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        weight = self.weights.get(name)
        if weight is None or parameter is None:
            return parameter
        unsharded = self.unsharded
        if unsharded is None:
            unsharded = self.scope.unsharded
        if unsharded is None:
            if in_backward() and parameter is weight.parameter:
                # In a backward outside of our scopes: a recompute that the user wrote.
                if weight.communicator.may_unshard_in_backward(weight):
                    tensor = view(ParameterHandle((weight,)))
                    setattr(tensor, _LATE, weight)
                    return tensor
            return parameter
        if parameter is not weight.parameter:
            return self.replacement(name)
        found = unsharded.get(weight)
        if found is not None:
            tensor = found[0]
            # A view made without a graph (torch.no_grad, a checkpoint) gets no gradient.
            recorded = tensor.requires_grad or not torch.is_grad_enabled()
            if recorded or not parameter.requires_grad:
                return tensor
        handle = ParameterHandle((weight,), unsharded is not self.unsharded and self.scope.block)
        tensor = view(handle)
        unsharded[weight] = tensor, handle
        return tensor

    def read_all(self) -> tuple[ParameterHandle, dict[str, Any]]:
        """Views of all weights, of one node: for a forward that reads each of them once.

        Returns:
            The handle of the views, and what is ``_parameters`` of the module meanwhile.
        """
        inside = dict(self)
        found: dict[str, Member] = {}
        for name, weight in self.weights.items():
            parameter = inside.get(name)
            if parameter is weight.parameter:
                found[name] = weight
            elif parameter is not None:  # a user has put a tensor in its place
                inside[name] = self.replacement(name)
        handle = ParameterHandle([*found.values()])
        if found:
            made = views(handle, *map(inside.__getitem__, found))
            inside.update(zip(found, made, strict=True))
        return handle, inside

    def __setitem__(self, name: str, value: Any) -> None:
        weight = self.weights.get(name)
        if weight is not None and value is not weight.parameter:
            ours: bool = getattr(value, _LATE, None) is weight
            for unsharded in (self.unsharded, self.scope.unsharded):
                if unsharded is not None and weight in unsharded and unsharded[weight][0] is value:
                    ours = True
            if ours:
                value = weight.parameter  # torch.func.functional_call restores what it read
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name in self.weights and self.scope.unsharded is not None:
            self.scope.taken.append(Taken(self, name, tuple(self)))
        super().__delitem__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_to_be_copied()

    def replacement(self, name: str) -> Any:
        """The plain tensor that a user has put in place of our parameter, to compute with.

        Raises:
            StructureError: it is a parameter or a ``DTensor``.
        """
        parameter = self.get(name)
        self.scope.communicator.events.require_shards()
        if hasattr(parameter, SHOWN):
            if torch.is_grad_enabled():
                raise StructureError(
                    f"{self.weights[name].name} was used by a {self.owner} while its unit is held "
                    "whole (FSDPModule.unshard), so that its gradient would be lost: call the unit "
                    "itself, or a method given to register_fsdp_forward_method; under "
                    "torch.no_grad() this is right"
                )
            return parameter
        if isinstance(parameter, (nn.Parameter, DTensor)):
            raise StructureError(
                f"parameter {self.weights[name].name} (of a {self.owner}) was replaced after "
                "parallelize(), so that its gradient would not be reduced: write into it, or use "
                "load_state_dict; torch.func.functional_call takes whole plain tensors "
                "(full_tensor().detach())"
            )
        return parameter

    def require_copies(self, module: nn.Module) -> None:
        """Check before a forward that :attr:`copies` still refer to our parameters.

        Raises:
            StructureError: something else was put there since ``parallelize``.
        """
        for path, name in self.copies:
            weight = self.weights[name]
            if held_at(module, path) is not weight.parameter:
                raise StructureError(
                    f"{path[0]} of a {self.owner} no longer holds {weight.name} where it did at "
                    "parallelize(): change it before, or write into the parameter"
                )

    def fill_copies(self, module: nn.Module, views: Mapping[str, Any]) -> None:
        """Let :attr:`copies` refer to the views, as a forward begins."""
        for path, name in self.copies:
            put(module, path, views[name])

    def restore_copies(self, module: nn.Module) -> None:
        """Let :attr:`copies` refer to the parameters again, after the forward."""
        for path, name in self.copies:
            put(module, path, self.weights[name].parameter)

    def before_recomputed(self) -> None:
        """Check the parameters of a block that is recomputed, as its forward begins.

        Raises:
            StructureError: a weight was replaced from outside by ``torch.func.functional_call``,
                which will have ended when the block is recomputed.
        """
        for name, weight in self.weights.items():
            if self.get(name) is not weight.parameter:
                self.replacement(name)
                raise StructureError(
                    f"{weight.name} was replaced around a block that recomputes its activations in "
                    "backward, when ours is in its place again: leave the block out of "
                    "activation_checkpoint, or copy the values into the parameter"
                )

    def require_scope(self) -> None:
        """Check a use under ``torch.vmap`` and the like, where the module cannot keep its views.

        Raises:
            StructureError: outside of the model's forward, or around a whole block.
        """
        if self.scope.unsharded is None:
            for name, weight in self.weights.items():
                if self.get(name) is weight.parameter:
                    raise under_transform(weight.name)


# Classes of modules that only pass their weights to one function of torch; whether that saves them
# for backward (a lookup does not); and their forward. Only of these it is known that they neither
# write into a weight nor return a part of it.
_PLAIN: dict[type[nn.Module], tuple[bool, Any]] = {
    nn.Linear: (True, nn.Linear.forward),
    nn.LayerNorm: (True, nn.LayerNorm.forward),
    nn.RMSNorm: (True, nn.RMSNorm.forward),
    nn.Embedding: (False, nn.Embedding.forward),
}


def plain(saves: bool) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Class decorator: note the class in ``_PLAIN``.

    Args:
        saves: whether backward needs the weights.
    """

    def note(kind: type[nn.Module]) -> type[nn.Module]:
        _PLAIN[kind] = saves, kind.forward
        return kind

    return note


def wrap_forward(module: nn.Module) -> None:
    """Wrap ``module.forward`` so that it unshards the module's own weights when they are read, and
    registers the pre-backward hook on its output.

    ``forward`` is wrapped and not ``__call__``, for checkpoints around it and direct calls of it.
    """
    held = module._parameters
    assert isinstance(held, Weights), "attach() came before"
    Wrapping.of(module).add(partial(_unsharding, module, held), nests=True)


def _unsharding(module: nn.Module, held: Weights, inner: Forward) -> Forward:
    saves, known = _PLAIN.get(type(module), (False, None))
    simple = getattr(inner, "__func__", None) is known is not None
    simple = simple and set(held) <= {"weight", "bias"} and not held.copies
    copied, opened = held if held.copies else None, held.scope.opened
    own = module.__dict__

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if type(module._parameters) is not Weights:  # its block unshards all weights at its entry
            return inner(*args, **kwargs)
        if torch.compiler.is_compiling():
            refuse_compiled(held.owner)
        if transforming():
            held.require_scope()
            return inner(*args, **kwargs)  # the block's scope keeps the views
        if simple:  # the function that it calls sees plain tensors
            handle, own["_parameters"] = held.read_all()
            opened.number += 1  # a torch function mode may read parameters
            try:
                output = inner(*args, **kwargs)
            finally:
                own["_parameters"] = held
                opened.number -= 1
                shared = handle.release()
            if saves and shared:  # the output is one new tensor
                node = pre_backward_node(output, {})
                if node is not None:
                    node.register_prehook(partial(handle.pre_backward, True))
            return output
        if copied is not None:
            copied.require_copies(module)
        before = input_tensors((args, kwargs))
        outside, held.unsharded = held.unsharded, {}
        opened.number += 1
        try:
            if copied is not None:
                copied.fill_copies(module, held)
            output = inner(*args, **kwargs)
        except BaseException:
            _release(held.unsharded)
            raise
        finally:
            unsharded, held.unsharded = held.unsharded, outside
            opened.number -= 1
            if copied is not None:
                copied.restore_copies(module)
        if not unsharded:
            return output
        _require_tensors(held.owner, unsharded, output, before)
        return end_forward(unsharded, output, before)

    return forward


def _require_tensors(owner: str, unsharded: Unsharded, output: Any, before: InputTensors) -> None:
    """Check that the output has a tensor to register the pre-backward hook on."""
    if not torch.is_grad_enabled() or not any(weight.shares_slot for weight in unsharded):
        return
    if not new_tensors(output, before) and not tensors(output):
        raise StructureError(
            f"{owner} returns a {type(output).__name__}, in which no tensor can be found, so that "
            "its weights could not be kept for its backward: return tensors, or tuples, lists, "
            "mappings or dataclasses of them"
        )


def wrap_scope(module: nn.Module, scope: Scope) -> None:
    """Wrap ``module.forward`` as the scope in which the parameters of ``scope`` may be read.

    ``forward`` is wrapped and not ``__call__``, so that the recompute of a checkpoint around it
    opens the scope, too.
    """
    Wrapping.of(module).add(partial(_in_scope, module, scope))


def _in_scope(module: nn.Module, scope: Scope, inner: Forward) -> Forward:
    held = module._parameters
    # Not None for a block that owns weights itself and keeps other references to them.
    copied = held if isinstance(held, Weights) and held.copies else None

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if scope.recomputed:
            for weights in scope.members:
                weights.before_recomputed()
        if copied is not None:
            copied.require_copies(module)
        before = input_tensors((args, kwargs))
        outside, scope.unsharded = scope.unsharded, {}
        scope.opened.number += 1
        taken: list[Taken] = []
        try:
            if copied is not None:
                copied.fill_copies(module, copied)
            output = inner(*args, **kwargs)
        finally:
            unsharded, scope.unsharded = scope.unsharded, outside
            scope.opened.number -= 1
            if scope.taken:
                taken, scope.taken = scope.taken, []
                put_back(taken)
            if copied is not None:
                copied.restore_copies(module)
        return end_forward(unsharded, output, before, taken) if unsharded else output

    return forward


def put_back(taken: Sequence[Taken]) -> None:
    """Put weights back into their modules, which a parametrization has left as buffers.

    Libraries of adapters (PEFT's ``target_parameters``) register a parametrization for one call of
    a module, and remove it after that. What they register then is the unsharded view.

    Raises:
        StructureError: a parametrization has not been removed.
    """
    for held, name, order in taken:
        module, weight = held.module, held.weights[name]
        if is_parametrized(module, name):
            raise StructureError(
                f"a forward has registered a parametrization of {weight.name} and not removed it: "
                "register it before parallelize(), or remove it before the block's forward ends "
                "(remove_parametrizations(module, name, leave_parametrized=False))"
            )
        module._buffers.pop(name, None)
        values = dict(held.items()) | {name: weight.parameter}
        held.clear()
        held.update({n: values.pop(n) for n in order if n in values} | values)


def open_weights(module: nn.Module) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Unshard ``module``'s own weights once for several products: one gather, one reduction.

    Returns:
        The tensors to compute with, by name; and a function to apply to the result, which registers
        the pre-backward hook that unshards the weights again.
    """
    held = module._parameters
    if type(held) is not Weights:
        return dict(held), lambda output: output
    if torch.compiler.is_compiling():
        refuse_compiled(held.owner)
    outside, held.unsharded = held.unsharded, {}
    try:
        found = {name: held[name] for name in held}
    finally:
        unsharded, held.unsharded = held.unsharded, outside
    return found, partial(_close, unsharded)


def _close(unsharded: Unsharded, output: Any) -> Any:
    kept = _release(unsharded)
    if kept:
        register_pre_backward_hook(output, partial(_pre_backward, kept, True), {})
    return output


def end_forward(
    unsharded: Unsharded, output: Any, before: InputTensors, taken: Sequence[Taken] = ()
) -> Any:
    """End a forward that unsharded weights: release them, register the pre-backward hook.

    Args:
        before: the tensors that the forward got (:func:`internsp.base.autograd.input_tensors`).
        taken: weights that a parametrization has taken out of their modules meanwhile.

    Returns:
        ``output``, with tensors that lie in the memory of a weight cloned.

    Raises:
        StructureError: the forward wrote into a weight.
    """
    reset = [held.weights[name] for held, name, _ in taken]
    for weight, (tensor, _) in unsharded.items():
        require_unwritten(weight, tensor, reset.count(weight))
    output = clone_aliases(output, [tensor for tensor, _ in unsharded.values()])
    kept = _release(unsharded)
    if kept:
        register_pre_backward_hook(output, partial(_pre_backward, kept, False), before)
    return output


def _release(unsharded: Unsharded) -> list[ParameterHandle]:
    """Release weights after a forward; return the handles that backward unshards again."""
    kept: list[ParameterHandle] = []
    for weight, (_, handle) in unsharded.items():
        if weight.shares_slot:
            weight.communicator.release(weight)
            if not kept or kept[-1] is not handle:
                kept.append(handle)
    return kept


def _pre_backward(kept: list[ParameterHandle], saved: bool, gradients: tuple[Tensor, ...]) -> None:
    for handle in reversed(kept):  # the last used first, as backward runs
        handle.pre_backward(saved, gradients)


def require_unwritten(weight: Member, tensor: Tensor, resets: int = 0) -> None:
    """Check that a forward has not written into ``tensor``, the view that it read.

    Args:
        resets: how often a parametrization was registered for it, each of which sets it to itself.

    Raises:
        StructureError: it has written: a write into a slot would not reach the shard.
    """
    if not tensor.is_inference() and tensor._version and not _same(weight, tensor, resets):
        weight.invalidate()
        raise StructureError(
            f"{weight.name} was written into during a forward (max_norm, an in-place operation, "
            "a normalization of the weight, the right_inverse of a parametrization): the write "
            "would reach this rank's copy only. Write into the parameter between optimizer steps, "
            "under torch.no_grad()"
        )


def _same(weight: Member, tensor: Tensor, resets: int) -> bool:
    """Whether ``tensor`` still has this rank's values of ``weight``, after it was set to itself."""
    if not resets:
        return False
    local: Tensor = weight.parameter._local_tensor  # type: ignore[attr-defined]
    if isinstance(weight, ShardedParameter) and weight.needs_gather:
        own = weight.layout.cut(tensor.detach(), weight.rank).movedim(0, weight.layout.dim)
        return same_bits(own.contiguous(), local.detach().to(own.device, own.dtype).contiguous())
    return tensor.data_ptr() == local.data_ptr() and tensor._version == resets


def attach(module: nn.Module, module_name: str, name: str, weight: Member, scope: Scope) -> None:
    """Register ``weight`` as the parameter ``name`` of ``module``."""
    held = module._parameters
    if not isinstance(held, Weights):
        owner = f"{type(module).__name__} {module_name}".strip()
        held = module.__dict__["_parameters"] = Weights(held, module, owner, scope)
        scope.members.append(held)
    held.weights[name] = weight


def put(module: nn.Module, path: tuple[Any, ...], value: Any) -> None:
    """Set the item at ``path`` in ``module``: an attribute, followed by keys."""
    item: Any = vars(module)  # past __setattr__, in which nn.LSTM renews its list
    for key in path[:-1]:
        item = item[key]
    item[path[-1]] = value


def held_at(module: nn.Module, path: tuple[Any, ...]) -> Any:
    """The item at ``path`` (:func:`put`); ``None`` if there is none."""
    item: Any = vars(module)
    try:
        for key in path:
            item = item[key]
    except (KeyError, IndexError, TypeError):
        return None
    return item


def weights_of(module: nn.Module) -> dict[str, Member]:
    """The parameters that were attached to ``module`` itself, by name."""
    held = module._parameters
    return held.weights if isinstance(held, Weights) else {}
