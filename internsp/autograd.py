"""Where autograd is, what a call made of what it was given, and what of torch cannot be served.

The phase; the tensors of an output, and which of them lie in the memory of a weight; the programs
(compile, vmap, create_graph) through which weights cannot travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from internsp.errors import GradientError, StructureError

# The autograd graph task that runs on this thread, or NO_TASK: the phase, from where we are (WP-9).
# Asked at every use of a weight: a Python function around it would cost more than it.
graph_task = torch._C._current_graph_task_id
NO_TASK = -1


def in_backward() -> bool:
    """Whether a graph task runs on this thread."""
    return graph_task() != NO_TASK


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a module's output, through tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    items: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        items = value
    elif isinstance(value, (dict, Mapping)):  # the first answers at once
        items = value.values()
    elif hasattr(value, "__dataclass_fields__"):
        items = [getattr(value, name) for name in value.__dataclass_fields__]
    return [tensor for item in items for tensor in tensors(item)]


# Whether torch.vmap, torch.func.grad or another of their kind runs (torch has no public name).
transforming = torch._C._are_functorch_transforms_active


def no_second_derivatives() -> None:
    """Called where backward comes to weights that travel, and gradients are recorded there.

    Raises:
        GradientError: always: the backward that runs is recorded (``create_graph=True``).
    """
    raise GradientError(
        "create_graph=True is not supported through a parallel model: the graph of the gradients "
        "would read weights from slots that other blocks have taken by then. Compute second "
        "derivatives (a gradient penalty) on one process, or with finite differences of two "
        "forwards; torch.autograd.grad for inputs without create_graph is right"
    )


def under_transform(name: str) -> StructureError:
    """The error for a whole block, or a module by itself, under ``torch.vmap`` and its kin."""
    return StructureError(
        f"{name} was used under torch.vmap or another transform of torch.func, which cannot keep "
        "its weights for their backward: call the module on the batch itself, use the transform "
        "within a block's forward, or hand whole plain tensors to torch.func.functional_call"
    )


def compiled(name: str) -> StructureError:
    """The error for a module that is compiled past us."""
    return StructureError(
        f"{name} is compiled by torch.compile around what gathers its weights, which no compiler "
        "can trace: have blocks compiled by weight_parallel.compile = true (with trigger 'qkv' or "
        "'rolling'); functions of plain tensors may be compiled freely"
    )


@torch._disable_dynamo
def refuse_compiled(name: str) -> None:
    """Called where ``torch.compile`` meets what moves weights, which it cannot trace.

    Raises:
        StructureError: always. Not from within the traced code, from which no error of ours
            would reach the user.
    """
    raise compiled(name)


def refuse_transformed(name: str, compiles: bool) -> None:
    """Called where a block, or the model, is entered.

    Args:
        compiles: the module was told to compile itself (``module.compile()``).

    Raises:
        StructureError: under ``torch.compile``, ``torch.vmap`` or their kin.
    """
    if compiles or torch.compiler.is_compiling():
        refuse_compiled(name)
    if transforming():
        raise under_transform(name)


def refuse_traced(name: str) -> None:
    """Called where the model is entered.

    Raises:
        StructureError: under ``torch.jit.trace``, or with tensors that have no values.
    """
    tracing = torch._C._get_tracing_state() is not None  # type: ignore[no-untyped-call]
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if tracing or fake:
        under = "torch.jit.trace" if tracing else "a FakeTensorMode (torch.export, an estimator)"
        raise StructureError(
            f"{name} was called under {under}, where no weight can be gathered from another rank: "
            "do that with the plain model, before parallelize(), or with whole parameters exported "
            "by internsp.full_params"
        )


Given = dict[int, tuple[Tensor, Any]]


def given(inputs: Any) -> Given:
    """Note the tensors in ``inputs`` before a call, so that :func:`own` can tell what it made.

    Empty where no graph is recorded.
    """
    if not torch.is_grad_enabled():
        return {}
    # The tensors themselves: while they are kept, no other can have their identity.
    return {id(tensor): (tensor, tensor.grad_fn) for tensor in tensors(inputs)}


def own(output: Any, before: Given) -> list[Tensor]:
    """The tensors whose backward is that of the call: what it made, in place or not.

    An input that is merely passed on is not among them; one that the call has written into is,
    returned or not.
    """
    if isinstance(output, Tensor):
        made = [] if id(output) in before else [output]
    else:
        made = [tensor for tensor in tensors(output) if id(tensor) not in before]
    made += [tensor for tensor, node in before.values() if tensor.grad_fn is not node]
    return made


def before_backward_of(
    output: Any, call: Callable[[tuple[Tensor, ...]], None], before: Given
) -> None:
    """Have ``call`` called before backward runs through any tensor that the call made itself.

    Args:
        before: of :func:`given`.
    """
    last = None
    for tensor in own(output, before):
        node = beneath(tensor, before) or tensor.grad_fn
        # Views of one tensor, as ``chunk`` gives, have one node beneath them.
        if node is not None and node is not last:
            # A hook of the node, not of the tensor: the same moment at half the cost.
            node.register_prehook(call)
        last = node


def on_gradient(tensor: Tensor, call: Callable[[Tensor], None], before: Given) -> None:
    """Have ``call`` called when ``tensor``'s gradient arrives, also if it is written into later.

    That may be twice; the second time with the gradient of what ``tensor`` is a view of.

    Args:
        before: of :func:`given`.
    """
    tensor.register_hook(call)
    node = beneath(tensor, before)
    if node is not None:
        node.register_prehook(partial(_first, call))


def _first(call: Callable[[Tensor], None], gradients: tuple[Tensor | None, ...]) -> None:
    for gradient in gradients:
        if gradient is not None:
            call(gradient)
            return


def beneath(tensor: Tensor, before: Given) -> Any:
    """The node of what ``tensor`` is a view of, if the call made that; ``None`` otherwise.

    Writing into a view takes the view's own node out of the graph, with its hooks and with those
    of the tensor: backward then comes to this one by another way. A linear layer with a bias
    answers rows of sequences with such a view, and ``nn.ReLU(inplace=True)`` writes into it.
    """
    base = tensor._base
    if base is None or base.grad_fn is None:
        return None
    node = base.grad_fn
    for known, made in before.values():
        if node is made or (
            known._base is not None and known.grad_fn is made and known._base.grad_fn is node
        ):
            return None  # a view of what the call was given: its node is another's
    return node


def apart(output: Any, weights: Iterable[Tensor]) -> Any:
    """``output`` with its tensors that lie in the memory of ``weights`` cloned, differentiably.

    A slot is given up after a module's or a block's forward, and what lies in it changes behind
    autograd's back. Found through tuples, lists, mappings and dataclasses; those that can be
    changed are changed in place.
    """
    held = list(weights)
    starts = [weight.data_ptr() for weight in held]
    if not starts:
        return output
    first, last = min(starts), _end(held[starts.index(max(starts))])
    if not any(first <= _address(tensor) < last for tensor in tensors(output)):
        return output  # the usual case: what was computed lies elsewhere
    ranges = [(start, _end(weight)) for start, weight in zip(starts, held, strict=True)]

    def within(tensor: Tensor) -> bool:
        start = _address(tensor)
        return any(first <= start < last for first, last in ranges)

    return cloned(output, within) if any(map(within, tensors(output))) else output


def cloned(value: Any, wanted: Callable[[Tensor], bool]) -> Any:
    """``value`` with the tensors that are ``wanted`` cloned; see :func:`apart`."""
    if isinstance(value, Tensor):
        return value.clone() if wanted(value) else value
    if isinstance(value, tuple):
        items = [cloned(item, wanted) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableSequence):
        for i, item in enumerate(value):
            value[i] = cloned(item, wanted)
    elif isinstance(value, MutableMapping):
        for key, item in list(value.items()):
            value[key] = cloned(item, wanted)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:  # of a frozen one, too
            object.__setattr__(value, name, cloned(getattr(value, name), wanted))
    return value


def _end(tensor: Tensor) -> int:
    """The byte behind the last one; an unsharded weight lies in one piece, transposed or not."""
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _address(tensor: Tensor) -> int:
    """Of the first element; 0 for a tensor without memory of its own (a ``DTensor``, sparse)."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
