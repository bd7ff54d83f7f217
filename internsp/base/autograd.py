"""What the library needs to know of autograd.

The phase of a pass; the tensors of an output, which of these a call has made, and which lie in the
memory of a weight; hooks on tensors and nodes of the graph; errors for uses of torch (compile,
vmap, create_graph) in which weights cannot be gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from internsp.errors import GradientError, StructureError

# The autograd graph task that runs on this thread, or NO_TASK; from it follows the phase (WP-9).
# Called at every use of a weight, so without a Python function around it.
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
    elif isinstance(value, (dict, Mapping)):  # dict first: it is the faster check
        items = value.values()
    elif hasattr(value, "__dataclass_fields__"):
        items = [getattr(value, name) for name in value.__dataclass_fields__]
    found: list[Tensor] = []
    for item in items:
        found += [item] if isinstance(item, Tensor) else tensors(item)
    return found


# Whether torch.vmap, torch.func.grad or the like runs (torch has no public name for it).
transforming = torch._C._are_functorch_transforms_active


def no_second_derivatives() -> None:
    """Refuse ``create_graph=True``: called when such a backward comes to a parallel model.

    Raises:
        GradientError: always.
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
        "within a block's forward, or use it on torch.func.functional_call of a copy of the model "
        "from before parallelize(), with whole tensors, p.full_tensor(grad_placements=[Partial()] "
        "* p.device_mesh.ndim) of each parameter"
    )


def compiled(name: str) -> StructureError:
    """The error for a module that the user has compiled, with the code that gathers its weights."""
    return StructureError(
        f"{name} is compiled by torch.compile around what gathers its weights, which no compiler "
        "can trace: have blocks compiled by weight_parallel.compile = true (with gather_before = "
        "'qkv' or 'rolling'), or under internsp.fsdp by torch.compile of the model, or compile() "
        "of it, of a block or of the checkpoint wrapper around one, before the first forward; "
        "functions of plain tensors may be compiled freely"
    )


@torch._disable_dynamo
def refuse_compiled(name: str) -> None:
    """Called where ``torch.compile`` meets code that gathers weights, which it cannot trace.

    The compiler does not trace this function: an error raised in traced code would not reach the
    user.

    Raises:
        StructureError: always.
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


InputTensors = dict[int, tuple[Tensor, Any]]
"""Tensors that a call got, by id, each with its ``grad_fn`` before the call."""


def input_tensors(inputs: Any) -> InputTensors:
    """The tensors in a call's ``inputs``, for :func:`new_tensors`; empty without a graph."""
    if not torch.is_grad_enabled():
        return {}
    # The tensors themselves are kept: meanwhile no other tensor has the same id.
    return {id(tensor): (tensor, tensor.grad_fn) for tensor in tensors(inputs)}


def new_tensors(output: Any, before: InputTensors) -> list[Tensor]:
    """The tensors that a call has made or has written into: backward through them runs the call's.

    An input that is only passed on is not among them; an input that the call has written into is,
    whether it is returned or not.
    """
    if isinstance(output, Tensor):
        made = [] if id(output) in before else [output]
    else:
        made = [tensor for tensor in tensors(output) if id(tensor) not in before]
    if before:
        made += [tensor for tensor, node in before.values() if tensor.grad_fn is not node]
    return made


def register_pre_backward_hook(
    output: Any, call: Callable[[tuple[Tensor, ...]], None], before: InputTensors
) -> None:
    """Have ``call`` called before backward runs through a new tensor of ``output``.

    Args:
        before: the call's :func:`input_tensors`.
    """
    last = None
    for tensor in new_tensors(output, before):
        node = pre_backward_node(tensor, before)
        # Several views of one tensor, as ``chunk`` returns, share the node of their base.
        if node is not None and node is not last:
            # A hook on the node and not on the tensor: the same moment at half the cost.
            node.register_prehook(call)
        last = node


def register_gradient_hook(
    tensor: Tensor, call: Callable[[Tensor], None], before: InputTensors
) -> None:
    """Have ``call`` called when ``tensor``'s gradient arrives, even if the tensor is changed later.

    It may be called twice, the second time with the gradient of the base of which ``tensor`` is a
    view.

    Args:
        before: :func:`input_tensors` of the call that returned ``tensor``.
    """
    tensor.register_hook(call)
    node = base_node(tensor, before)
    if node is not None:
        node.register_prehook(partial(_first, call))


def _first(call: Callable[[Tensor], None], gradients: tuple[Tensor | None, ...]) -> None:
    for gradient in gradients:
        if gradient is not None:
            call(gradient)
            return


def pre_backward_node(tensor: Tensor, before: InputTensors) -> Any:
    """The node by which backward comes to the call that returned ``tensor``; ``None``: it does not.

    Args:
        before: the call's :func:`input_tensors`.
    """
    base, node = base_node(tensor, before), cast("Any", tensor.grad_fn)
    # A view that a custom function made has other inputs, to which backward may come first.
    while base is not None and node is not base and len(node.next_functions) == 1:
        ((node, _),) = node.next_functions
    return base if node is base else tensor.grad_fn


def base_node(tensor: Tensor, before: InputTensors) -> Any:
    """The node of the base of which ``tensor`` is a view, if the call made the base; else ``None``.

    Writing into a view removes the view's own node from the graph, with the hooks on it and on the
    tensor; backward then comes to the node of the base by another path. A linear layer with a bias
    returns such a view for batches of sequences, and ``nn.ReLU(inplace=True)`` writes into it.
    """
    base = tensor._base
    if base is None or base.grad_fn is None:
        return None
    node = base.grad_fn
    for known, made in before.values():
        if node is made or (
            known._base is not None and known.grad_fn is made and known._base.grad_fn is node
        ):
            return None  # a view of an input: the call did not make this node
    return node


def clone_aliases(output: Any, weights: Iterable[Tensor]) -> Any:
    """``output`` with its tensors that lie in the memory of ``weights`` cloned, differentiably.

    A slot is released after the forward, and its contents change without autograd's notice. Tensors
    are found through tuples, lists, mappings and dataclasses; mutable ones are changed in place.
    """
    held = list(weights)
    starts = [_address(weight) for weight in held]
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
    """``value`` with the tensors that are ``wanted`` cloned; see :func:`clone_aliases`."""
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
        for name in value.__dataclass_fields__:  # past __setattr__: it may be frozen
            object.__setattr__(value, name, cloned(getattr(value, name), wanted))
    return value


def _end(tensor: Tensor) -> int:
    """Address behind the last byte of an unsharded weight, whose memory has no gaps."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return _address(local) + local.numel() * local.element_size()


def _address(tensor: Tensor) -> int:
    """Address of the first element, of a ``DTensor`` of its local tensor; 0 without memory."""
    try:
        address: int = getattr(tensor, "_local_tensor", tensor).data_ptr()
        return address
    except RuntimeError:
        return 0
