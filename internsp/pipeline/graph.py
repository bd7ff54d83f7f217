"""Whether a chunk's backward can be split, read from the autograd graph of one forward.

torch's split backward follows each weight toward the output, up to the first node on a path from
the chunk's input, and keeps that node's gradients for the weight backward. It silently ignores a
weight that reaches no such node. Nodes between a weight and that node run only in the weight
backward, when other blocks may have overwritten the slots whose contents the nodes have saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc

from internsp.modules.parameters import weights_behind
from internsp.wp.communicator import ISPCommunicator

Node = Any  # torch.autograd.graph.Node, or the context of a Function


def split_blocker(outputs: Iterable[Tensor], inputs: Iterable[Any], shared: Collection[int]) -> str:
    """Why this backward cannot be split, as text; empty if it can be.

    Args:
        outputs: the chunk's outputs, or its loss.
        inputs: the chunk's inputs; inputs that need no gradient are ignored.
        shared: storages (``data_ptr``) that other blocks overwrite between the input backward and
            the weight backward.
    """
    roots = [node for node in map(_get_grad_fn_or_grad_acc, outputs) if node is not None]
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    off_path = _weights_off_path(roots, {_get_grad_fn_or_grad_acc(t) for t in wanted})
    for root in roots:
        if off_path[root]:
            names = _first_and_count(off_path[root])
            return f"{names} is used by an output through which no gradient reaches the input"
    for node, weights in off_path.items():
        if weights and any(t.untyped_storage().data_ptr() in shared for t in _saved(node)):
            return (
                f"{_first_and_count(weights)} gets its gradient through {node.name()}, which does "
                "not lie between the chunk's input and its output and needs an unsharded weight, "
                'overwritten by then without weight_parallel.keep_unsharded = "all"'
            )
    return ""


def shared_slot_storages(communicator: ISPCommunicator) -> set[int]:
    """Storages (``data_ptr``) of the slots that several blocks share by overwriting each other."""
    users = Counter(unit.slot for unit in communicator.blocks)
    slots = [slot for slot in communicator.state.pool.slots if users[slot.index] > 1]
    return set().union(*(slot.storages() for slot in slots))


def _weights_off_path(roots: Iterable[Node], inputs: set[Node]) -> dict[Node, frozenset[str]]:
    """For each node that ``roots`` depend on, the names of the weights that it depends on; empty
    for a node on a path from ``inputs``."""
    on_path: set[Node] = set()
    found: dict[Node, frozenset[str]] = {}
    stack = [(root, False) for root in roots]
    seen: set[Node] = set()
    while stack:  # each node is decided after the nodes that it depends on
        node, done = stack.pop()
        edges = [(fn, nr) for fn, nr in node.next_functions if fn is not None]
        if not done and node not in seen:
            seen.add(node)
            stack.append((node, True))
            if weights_behind(node) is None:  # a weight's unshard depends on the weight alone
                stack += [(fn, False) for fn, _ in edges]
        elif done:
            found[node] = frozenset()
            if node in inputs or any(fn in on_path for fn, _ in edges):
                on_path.add(node)
            elif weights_behind(node) is None:  # else added by the edges that lead to it
                behind = (_behind_edge(fn, nr, found) for fn, nr in edges)
                found[node] = frozenset().union(*behind)
    return found


def _behind_edge(node: Node, output: int, found: dict[Node, frozenset[str]]) -> frozenset[str]:
    weights = weights_behind(node)
    if weights is None:
        return found[node]
    trained = node.next_functions[output][0] is not None
    return frozenset({weights[output].name} if trained else ())


def _saved(node: Node) -> Iterator[Tensor]:
    """Tensors that ``node`` has saved for its backward."""
    names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
    for value in (getattr(node, name) for name in names):
        yield from (t for t in (value if isinstance(value, (tuple, list)) else (value,))
                    if isinstance(t, Tensor))  # fmt: skip


def _first_and_count(names: Collection[str]) -> str:
    first = min(names)
    return first if len(names) == 1 else f"{first} (and {len(names) - 1} more)"
