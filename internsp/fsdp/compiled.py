"""Modules that a program has compiled with ``module.compile()``, as torchtitan and accelerate do.

FSDP2's hooks break the graph at a unit's entry and exit. Here a unit's weights are gathered before
its compiled forward and released after it (WP-13), so that the forward is one graph, with the
program's own backend and options.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from internsp.fsdp.units import ProgramUnit
from internsp.modules.supported import is_compiled
from internsp.modules.wrapping import Layer
from internsp.structure.named import modules_of


@contextmanager
def compilers_taken(
    root: nn.Module, units: Sequence[ProgramUnit], notes: list[str]
) -> Iterator[Mapping[nn.Module, Layer]]:
    """Take ``compile()`` off modules: their forwards are compiled instead, inside our hooks.

    It is taken off units without others in them, or what only wraps one, and off modules outside of
    these; one that stays compiled, with weights, is refused later. Put back after an error.

    Args:
        notes: gets a line if there is any.
    """
    blocks = {*modules_of(unit for unit in units if unit.kind == "block")}
    within = {part for block in blocks for part in block.modules()} - blocks
    named = {*modules_of(units)}
    taken: dict[nn.Module, Any] = {}
    compilers: dict[nn.Module, Layer] = {}
    for module in root.modules():
        told: Any = module._compiled_call_impl
        if told is None or module is root or not is_compiled(module):
            continue
        inner = module  # accelerate shards a block and its checkpoint wrapper, which it compiles
        while len(only := [*inner.children()]) == 1 and not named.isdisjoint(only[0].modules()):
            inner = only[0]
        if inner in within or not named.isdisjoint([*inner.modules()][1:]):
            continue
        # What torch.compile has made of its options; applied to a function it compiles that.
        asked = getattr(told, "get_compiler_config", None)
        context = asked and inspect.getclosurevars(asked).nonlocals.get("self")
        if context:
            taken[module], compilers[inner] = told, context
            module._compiled_call_impl = None
    if taken:
        notes.append(f"compile() of {len(taken)} modules: their forwards are, gathers are not")
    try:
        yield compilers
    except BaseException:
        for module, told in taken.items():
            module._compiled_call_impl = told
        raise
