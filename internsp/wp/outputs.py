"""What a call was given, what it made of it, and what of its output lies in a weight's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, MutableSequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from internsp.autograd import tensors

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
