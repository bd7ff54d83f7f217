"""Weights in the modules' own places: shards at rest, whole tensors in a forward (DESIGN 4.1, 4.3).

``module._parameters`` becomes a :class:`Weights`. At rest it answers with the parameter, a
``DTensor``. In the forward of the module that owns it (:func:`wrap`), of its block or, beside the
blocks, of the model (:func:`enclose`), a read answers with a differentiable view: forward gives the
unsharded weight in its slot, backward starts the reduction of its gradient. So anything that reads
``module.weight`` computes with the unsharded weight, whichever module reads it, and no module is
converted. Where no communicator is attached a module is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor

from internsp.autograd import (
    Given,
    apart,
    before_backward_of,
    given,
    in_backward,
    no_second_derivatives,
    own,
    refuse_compiled,
    tensors,
    transforming,
    under_transform,
)
from internsp.errors import GradientError, StaleWeightError, StructureError
from internsp.wp.parameter import Member, not_to_be_copied


class Use:
    """One view: a use of one weight, from the forward that reads it to its gradient.

    Args:
        scoped: read past the forward of the module that owns it: its values are made present by the
            gradients of the block's outputs, and by nothing else.
    """

    __slots__ = ("entered", "scoped", "shown", "weights")

    shown: Any

    def __init__(self, weight: Member, scoped: bool = False) -> None:
        self.weights: Sequence[Member] = (weight,)
        self.scoped, self.entered = scoped, False

    def unshard(self) -> Sequence[Tensor]:
        """The tensor to compute with."""
        weight = self.weights[0]
        tensor = weight.communicator.unshard(weight)
        self.shown = weight.shown
        return (tensor,)

    def before_backward(self, saved: bool) -> None:
        """A node that was made with the view is about to run: the same values must be there.

        Args:
            saved: the node has the view among autograd's saved tensors, so that a recompute comes
                before it is read.
        """
        weight = self.weights[0]
        communicator = weight.communicator
        self.entered = True
        if communicator.weight_part:
            return  # weight gradients need no weight
        weight.show_again(self.shown)
        if saved:
            communicator.before_backward(weight)
        else:
            communicator.before_nodes(weight)

    def on_grad_ready(self, gradients: Sequence[Tensor | None]) -> None:
        """The gradient of the unsharded weight is ready; ``None``: there is none.

        Raises:
            StaleWeightError: backward did not come through an output of the block.
        """
        gradient, weight = gradients[0], self.weights[0]
        if gradient is None:
            return
        communicator = weight.communicator
        if self.scoped and weight.guarded and not self.entered and not communicator.weight_part:
            raise StaleWeightError(
                f"{weight.name} was read past the forward of the module that owns it, and backward "
                "entered its block through a tensor that left it by another way than its output, "
                "so that the weight may not have been whole: return that tensor from the block"
            )
        self.entered = False
        if communicator.weight_part or not weight.guarded:
            weight.show_again(self.shown)
        communicator.on_grad_ready(weight, gradient)


class Views(torch.autograd.Function):
    """Differentiable views: parameters (shards) -> whole tensors in their slots.

    Backward starts the reductions and returns ``None``: ``.grad`` stays unset until the finish,
    while the parameters stay visible in the graph.
    """

    @staticmethod
    def forward(ctx: Any, use: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        """``use`` is a :class:`Use`, or that of several weights (:mod:`internsp.layers.entry`)."""
        ctx.use = use
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        pairs = zip(use.weights, use.unshard(), strict=True)
        views = tuple([t if w.tensor is None else w.tensor.present(t) for w, t in pairs])
        wanted = ctx.needs_input_grad[1:]
        if len(views) > 1 and not all(wanted):  # of several, those of frozen ones need no gradient
            frozen = [view for view, want in zip(views, wanted, strict=True) if not want]
            ctx.mark_non_differentiable(*frozen)
        return views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """See the class."""
        if torch.is_grad_enabled():
            no_second_derivatives()
        answers: list[Tensor | None] = [None] * (len(gradients) + 1)
        ready, use, executed = list(gradients), ctx.use, torch._C._will_engine_execute_node
        for i, ((leaf, _), weight) in enumerate(zip(ctx.next_functions, use.weights, strict=True)):
            gradient = ready[i]
            if gradient is None:
                continue
            if weight.tensor is not None:
                ready[i] = gradient = weight.tensor.local_gradient(gradient)
            # ``inputs=`` may leave a leaf out; ``torch.autograd.grad`` captures it (WP-9), and then
            # torch will not say whether it executes the leaf.
            try:
                if not executed(leaf):
                    ready[i] = None
            except RuntimeError:
                answers[i + 1] = _captured(weight, gradient, ctx.parameters[i])
        use.on_grad_ready(ready)
        return tuple(answers)


def _captured(weight: Member, gradient: Tensor, shard: Tensor) -> Tensor:
    """What a captured shard is given: torch's split backward wants a tensor, without memory."""
    if not weight.communicator.weight_part:
        raise GradientError(
            "torch.autograd.grad over a sharded weight is not supported: its gradient is "
            "reduced over ranks asynchronously; call backward() and read .grad"
        )
    return gradient.new_zeros((), dtype=shard.dtype).expand(shard.shape)


views: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, Views).apply
"""Of a use and its parameters, where no transform of ``torch.func`` runs: past ``Function.apply``,
which looks into each argument for what such a transform has left."""


def view(use: Use) -> Tensor:
    """The tensor to compute with, of one weight."""
    if transforming():  # beneath torch.vmap and its kin: a tensor that all share
        with temporarily_clear_interpreter_stack():
            return Views.apply(use, use.weights[0].parameter)[0]  # type: ignore[no-any-return]
    return views(use, use.weights[0].parameter)[0]


def weights_behind(node: Any) -> Sequence[Member] | None:
    """The weights whose views a node of the autograd graph is, if it is such a node."""
    if not isinstance(node, Views._backward_cls):  # type: ignore[attr-defined]
        return None
    weights: Sequence[Member] = node.use.weights  # type: ignore[attr-defined]
    return weights


Taken = dict[Member, tuple[Tensor, Use]]
"""The views that were made in one forward."""


class Scope:
    """A forward in which parameters are read: of a block, or of the model for those beside them.

    Attributes:
        taken: the views made since it began; ``None`` outside of it.
        block: whether it is a block's. Beside the blocks slots are not shared, so that it does not
            matter by which way backward enters.
        recomputed: whether backward runs it again, long after it was called.
        members: what the modules in it hold.
        module, name: whose forward it is (name: empty for the model).
        communicator: of the chunk (:class:`internsp.wp.communicator.ISPCommunicator`).
    """

    __slots__ = ("block", "communicator", "members", "module", "name", "recomputed", "taken")

    module: nn.Module
    name: str
    communicator: Any

    def __init__(self, block: bool = True, recomputed: bool = False) -> None:
        self.taken: Taken | None = None
        self.block, self.recomputed = block, recomputed
        self.members: list[Weights] = []


class Weights(dict[str, Any]):
    """``_parameters`` of a module: answers a read with what the moment asks for.

    ``items``, ``values`` and ``get`` answer with the parameters themselves, as ``state_dict``,
    ``parameters()`` and optimizers want them. It cannot be copied, so neither can the model.

    Attributes:
        weights: those of the module that ``parallelize`` has made, by their names in it.
        scope: in which they may be read past the module's forward.
        taken: the views made in the module's own forward, while it runs.
        copies: where else the module holds which of them, as ``nn.LSTM`` in a list: a path of an
            attribute and keys, and the name. In a forward the view stands there, too.
    """

    __slots__ = ("copies", "owner", "scope", "taken", "weights")

    def __init__(self, parameters: Mapping[str, Any], owner: str, scope: Scope) -> None:
        super().__init__(parameters)
        self.owner, self.scope = owner, scope
        self.weights: dict[str, Member] = {}
        self.taken: Taken | None = None
        self.copies: list[tuple[tuple[Any, ...], str]] = []

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        weight = self.weights.get(name)
        if weight is None or parameter is None:
            return parameter
        taken = self.taken
        if taken is None:
            taken = self.scope.taken
        if taken is None:
            if in_backward() and parameter is weight.parameter:
                if weight.communicator.at_hand(weight):  # a recompute that the user wrote
                    return view(Use(weight))
            return parameter
        if parameter is not weight.parameter:
            return self.other(name)
        found = taken.get(weight)
        if found is not None:
            tensor = found[0]
            # One made without a graph (torch.no_grad, a checkpoint) has no gradient to give.
            recorded = tensor.requires_grad or not torch.is_grad_enabled()
            if recorded or not parameter.requires_grad:
                return tensor
        use = Use(weight, taken is not self.taken and self.scope.block)
        tensor = view(use)
        taken[weight] = tensor, use
        return tensor

    def __setitem__(self, name: str, value: Any) -> None:
        weight = self.weights.get(name)
        if weight is not None and value is not weight.parameter:
            for taken in (self.taken, self.scope.taken):
                if taken is not None and weight in taken and taken[weight][0] is value:
                    value = weight.parameter  # a read is put back (torch.func.functional_call)
        super().__setitem__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_to_be_copied()

    def other(self, name: str) -> Any:
        """What a user has put in the place of our parameter: a whole tensor is computed with.

        Raises:
            StructureError: it is a parameter, or a ``DTensor``.
        """
        parameter = self.get(name)
        self.scope.communicator.require_shards()
        if isinstance(parameter, (nn.Parameter, DTensor)):
            raise StructureError(
                f"parameter {self.weights[name].name} (of a {self.owner}) was replaced after "
                "parallelize(), so that its gradient would not be reduced: write into it, or use "
                "load_state_dict; torch.func.functional_call takes whole plain tensors "
                "(full_tensor().detach())"
            )
        return parameter

    def require_copies(self, module: nn.Module) -> None:
        """Before a forward: what else holds parameters of ``module`` still holds them.

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
        """A forward begins: they shall hold the views."""
        for path, name in self.copies:
            put(module, path, views[name])

    def restore_copies(self, module: nn.Module) -> None:
        """The forward is over: they hold the parameters again."""
        for path, name in self.copies:
            put(module, path, self.weights[name].parameter)

    def before_recomputed(self) -> None:
        """A forward of a block begins that recomputes its activations in backward.

        Raises:
            StructureError: a weight was replaced from outside, by ``torch.func.functional_call``:
                the recompute would be with ours, since that call is over by then.
        """
        for name, weight in self.weights.items():
            if self.get(name) is not weight.parameter:
                self.other(name)
                raise StructureError(
                    f"{weight.name} was replaced around a block that recomputes its activations in "
                    "backward, when ours is in its place again: leave the block out of "
                    "activation_checkpoint, or copy the values into the parameter"
                )

    def require_scope(self) -> None:
        """Under ``torch.vmap`` and its kin, where a module cannot keep its own weights.

        Raises:
            StructureError: outside of the model's forward, or around a whole block.
        """
        if self.scope.taken is None:
            for name, weight in self.weights.items():
                if self.get(name) is weight.parameter:
                    raise under_transform(weight.name)


# Modules that do nothing with their weights but hand them to one function of torch, which has them
# among its saved tensors, or (a lookup) does not need them in backward. Of these alone it is known
# that they neither write into a weight nor return a part of it.
_PLAIN: dict[type[nn.Module], bool] = {
    nn.Linear: True,
    nn.LayerNorm: True,
    nn.RMSNorm: True,
    nn.Embedding: False,
}


def plain(saves: bool) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Class decorator: see ``_PLAIN``.

    Args:
        saves: whether backward needs the weights.
    """

    def note(kind: type[nn.Module]) -> type[nn.Module]:
        _PLAIN[kind] = saves
        return kind

    return note


def wrap(module: nn.Module) -> None:
    """Have ``module``'s own forward take its own weights, and keep them for the backward.

    The forward is wrapped and not the call, so that a checkpoint around it, and a direct call of
    ``forward``, find the weights.
    """
    held, inner = module._parameters, module.forward
    assert isinstance(held, Weights), "attach() came before"
    saves = _PLAIN.get(type(module)) if set(held) <= {"weight", "bias"} else None
    simple = saves is not None
    copied = held if held.copies else None

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if type(module._parameters) is not Weights:  # a block that takes all weights at its entry
            return inner(*args, **kwargs)
        if torch.compiler.is_compiling():
            refuse_compiled(held.owner)
        if transforming():
            held.require_scope()
            return inner(*args, **kwargs)  # the block keeps them
        if copied is not None:
            copied.require_copies(module)
        before = {} if simple else given((args, kwargs))
        outside, held.taken = held.taken, {}
        try:
            if copied is not None:
                copied.fill_copies(module, held)
            output = inner(*args, **kwargs)
        except BaseException:
            _release(held.taken)
            raise
        finally:
            taken, held.taken = held.taken, outside
            if copied is not None:
                copied.restore_copies(module)
        if not taken:
            return output
        if simple:
            kept = _release(taken)
            if saves and kept:
                before_backward_of(output, partial(_before_nodes, kept, True), before)
            return output
        _require_tensors(held.owner, taken, output, before)
        return leave(taken, output, before)

    module.forward = forward  # type: ignore[method-assign]


def _require_tensors(owner: str, taken: Taken, output: Any, before: Given) -> None:
    """Backward must be seen to come to a module that keeps its weights."""
    if not torch.is_grad_enabled() or not any(weight.guarded for weight in taken):
        return
    if not own(output, before) and not tensors(output):
        raise StructureError(
            f"{owner} returns a {type(output).__name__}, in which no tensor can be found, so that "
            "its weights could not be kept for its backward: return tensors, or tuples, lists, "
            "mappings or dataclasses of them"
        )


def enclose(module: nn.Module, scope: Scope) -> None:
    """Make ``module``'s forward the scope in which its parameters may be read.

    The forward is wrapped and not the call, so that a checkpoint around it finds the weights again
    in its recompute.
    """
    held, inner = module._parameters, module.forward
    # of a block with weights of its own
    copied = held if isinstance(held, Weights) and held.copies else None

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if scope.recomputed:
            for weights in scope.members:
                weights.before_recomputed()
        if copied is not None:
            copied.require_copies(module)
        before = given((args, kwargs))
        outside, scope.taken = scope.taken, {}
        try:
            if copied is not None:
                copied.fill_copies(module, copied)
            output = inner(*args, **kwargs)
        finally:
            taken, scope.taken = scope.taken, outside
            if copied is not None:
                copied.restore_copies(module)
        return leave(taken, output, before) if taken else output

    module.forward = forward  # type: ignore[method-assign]


def open_weights(module: nn.Module) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Take ``module``'s own weights once for several products: one gather, one reduction.

    Returns:
        What to compute with, by name, and a function to be applied to the result of it all, which
        keeps the weights present for its backward.
    """
    held = module._parameters
    if type(held) is not Weights:
        return dict(held), lambda output: output
    if torch.compiler.is_compiling():
        refuse_compiled(held.owner)
    outside, held.taken = held.taken, {}
    try:
        found = {name: held[name] for name in held}
    finally:
        taken, held.taken = held.taken, outside
    return found, partial(_close, taken)


def _close(taken: Taken, output: Any) -> Any:
    kept = _release(taken)
    if kept:
        before_backward_of(output, partial(_before_nodes, kept, True), {})
    return output


def leave(taken: Taken, output: Any, before: Given) -> Any:
    """A forward that took weights is over: keep them for its backward, and end their use.

    Args:
        before: what the forward was given (:func:`internsp.autograd.given`).

    Returns:
        ``output``; what of it lies in a weight's memory is cloned.

    Raises:
        StructureError: the forward wrote into a weight.
    """
    for weight, (tensor, _) in taken.items():
        unwritten(weight, tensor)
    output = apart(output, [tensor for tensor, _ in taken.values()])
    kept = _release(taken)
    if kept:
        before_backward_of(output, partial(_before_nodes, kept, False), before)
    return output


def _release(taken: Taken) -> list[Use]:
    """End the use of weights in forward; those that backward needs again."""
    kept = []
    for weight, (_, use) in taken.items():
        if weight.guarded:
            weight.communicator.release(weight)
            kept.append(use)
    return kept


def _before_nodes(kept: list[Use], saved: bool, gradients: tuple[Tensor, ...]) -> None:
    if torch.is_grad_enabled():
        no_second_derivatives()
    for use in reversed(kept):  # the last used first, as backward runs
        use.before_backward(saved)


def unwritten(weight: Member, tensor: Tensor) -> None:
    """Check that a forward has not written into ``tensor``, a view that it was handed.

    Raises:
        StructureError: it has. What is written into a slot never reaches the shard.
    """
    if not tensor.is_inference() and tensor._version:
        weight.invalidate()
        raise StructureError(
            f"{weight.name} was written into during a forward (max_norm, an in-place operation, "
            "a normalization of the weight): the write would reach this rank's copy only. Write "
            "into the parameter between optimizer steps, under torch.no_grad()"
        )


def attach(module: nn.Module, module_name: str, name: str, weight: Member, scope: Scope) -> None:
    """Make ``module`` hold its parameter ``name`` as ``weight`` from now on."""
    held = module._parameters
    if not isinstance(held, Weights):
        owner = f"{type(module).__name__} {module_name}".strip()
        held = module.__dict__["_parameters"] = Weights(held, owner, scope)
        scope.members.append(held)
    held.weights[name] = weight


def put(module: nn.Module, path: tuple[Any, ...], value: Any) -> None:
    """Set what the attribute ``path[0]`` of ``module`` holds under the keys that follow."""
    place: Any = vars(module)  # past __setattr__, in which nn.LSTM renews its list
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value


def held_at(module: nn.Module, path: tuple[Any, ...]) -> Any:
    """What stands at ``path`` (:func:`put`); ``None`` where it does not lead anywhere."""
    place: Any = vars(module)
    try:
        for key in path:
            place = place[key]
    except (KeyError, IndexError, TypeError):
        return None
    return place


def weights_of(module: nn.Module) -> dict[str, Member]:
    """What was attached to ``module`` itself, by parameter name."""
    held = module._parameters
    return held.weights if isinstance(held, Weights) else {}
