"""Whether a chunk's weight gradients can be computed apart, read from the graph of one forward.

torch's split backward follows each weight toward the output until it meets the way of the chunk's
input; there it keeps the gradients for the weight part. A weight that never meets that way is
passed over in silence. And what lies between a weight and that place is computed in the weight part
alone, when other blocks have long overwritten the slots that it may have saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc

from internsp.layers.parameters import weights_behind

Node = Any  # torch.autograd.graph.Node, or the context of a Function


def obstacle(
    outputs: Iterable[Tensor], inputs: Iterable[Any], shared: Collection[int]
) -> str:
    """Why these weight gradients cannot come apart, in words; empty when they can.

    Args:
        outputs: of the chunk, or its loss.
        inputs: of the chunk; those without a gradient are passed over.
        shared: storages (``data_ptr``) that other blocks overwrite between the two parts.
    """
    roots = [node for node in map(_get_grad_fn_or_grad_acc, outputs) if node is not None]
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    ways = _Ways({_get_grad_fn_or_grad_acc(t) for t in wanted})
    ways.walk(roots)
    for root in roots:
        if ways.weights[root]:
            names = _some(ways.weights[root])
            return f"{names} is behind an output to which no gradient of the chunk's input leads"
    for node, weights in ways.weights.items():
        if weights and any(t.untyped_storage().data_ptr() in shared for t in _saved(node)):
            return (
                f"{_some(weights)} gets its gradient through {node.name()}, which does not lie "
                "between the chunk's input and its output and needs an unsharded weight, "
                "overwritten by then without weight_parallel.keep_unsharded = \"all\""
            )
    return ""


class _Ways:
    """Which nodes lie on a way from the input, and which weights are behind the others.

    Attributes:
        weights: names of the weights behind each node that is on no way from the input.
    """

    def __init__(self, inputs: set[Node]) -> None:
        self._inputs = inputs
        self._on_way: set[Node] = set()
        self.weights: dict[Node, frozenset[str]] = {}

    def walk(self, roots: Iterable[Node]) -> None:
        """Visit everything behind ``roots``, each node after those behind it."""
        stack = [(root, False) for root in roots]
        seen: set[Node] = set()
        while stack:
            node, done = stack.pop()
            if done:
                self._judge(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                if weights_behind(node) is None:  # behind a use there is only its weight
                    stack += [(fn, False) for fn, _ in node.next_functions if fn is not None]

    def _judge(self, node: Node) -> None:
        edges = [(fn, nr) for fn, nr in node.next_functions if fn is not None]
        if node in self._inputs or any(fn in self._on_way for fn, _ in edges):
            self._on_way.add(node)
            self.weights[node] = frozenset()
        elif weights_behind(node) is not None:
            self.weights[node] = frozenset()  # told by the edges that lead to it
        else:
            self.weights[node] = frozenset().union(*(self._behind(fn, nr) for fn, nr in edges))

    def _behind(self, node: Node, output: int) -> frozenset[str]:
        weights = weights_behind(node)
        if weights is None:
            return self.weights[node]
        trained = node.next_functions[output][0] is not None
        return frozenset({weights[output].name} if trained else ())


def _saved(node: Node) -> Iterator[Tensor]:
    """Tensors that ``node`` keeps for its backward."""
    names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
    for value in (getattr(node, name) for name in names):
        yield from (t for t in (value if isinstance(value, (tuple, list)) else (value,))
                    if isinstance(t, Tensor))  # fmt: skip


def _some(names: Collection[str]) -> str:
    first = min(names)
    return first if len(names) == 1 else f"{first} (and {len(names) - 1} more)"
