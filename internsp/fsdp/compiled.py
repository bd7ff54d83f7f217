"""Modules that a program compiles: ``module.compile()``, or ``torch.compile`` of what calls them.

FSDP2's hooks break the graph at a unit's entry and exit. Here a unit's weights are gathered before
its compiled forward and released after it (WP-13), so that the forward is one graph, with the
program's own backend and options. Of a compiled model, too, the units' forwards are compiled.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from internsp.fsdp.units import ProgramUnit
from internsp.modules.supported import is_compiled
from internsp.modules.wrapping import Forward, Layer
from internsp.structure.named import modules_of


@contextmanager
def compilers_taken(
    root: Any, units: Sequence[ProgramUnit], whole: Layer | None, notes: list[str]
) -> Iterator[Mapping[nn.Module, Layer]]:
    """Take ``compile()`` off modules: their forwards are compiled instead, inside our hooks.

    It is taken off units without others in them, or what only wraps one, and off modules outside of
    these; one that stays compiled, with weights, is refused later. Where the model is compiled,
    such units are. Put back after an error.

    Args:
        whole: what compiles a function that calls the model.
        notes: gets a line if there is any.
    """
    blocks = {*modules_of(unit for unit in units if unit.kind == "block")}
    within = {part for block in blocks for part in block.modules()} - blocks
    named = {*modules_of(units)}
    taken: dict[nn.Module, Any] = {}
    # What torch.compile(module) has returned compiles by itself.
    compilers: dict[nn.Module, Layer] = {m: _as_it_is for m in blocks if hasattr(m, "dynamo_ctx")}
    for module in root.modules():
        told: Any = module._compiled_call_impl
        if told is None or not is_compiled(module) or not (context := _context_of(told)):
            continue
        if module is root:
            taken[root], whole = told, context
            root._compiled_call_impl = None
            continue
        inner = module  # accelerate shards a block and its checkpoint wrapper, which it compiles
        while len(only := [*inner.children()]) == 1 and not named.isdisjoint(only[0].modules()):
            inner = only[0]
        if inner in within or not named.isdisjoint([*inner.modules()][1:]):
            continue
        taken[module], compilers[inner] = told, context
        module._compiled_call_impl = None
    if compilers:
        notes.append(f"compile() of {len(compilers)} modules: their forwards are, gathers are not")
    optimized = getattr(root, "dynamo_ctx", None)  # the root is what torch.compile(model) returned
    if whole := whole or optimized:
        left = blocks - compilers.keys()
        notes.append(f"compile() of the model: the forwards of {len(left)} units are compiled")
        compilers |= dict.fromkeys(left, whole)
    try:
        yield compilers
    except BaseException:
        for module, told in taken.items():
            module._compiled_call_impl = told
        raise
    if optimized:
        root._orig_mod._call_impl = torch.compiler.disable(root._orig_mod._call_impl)


def _as_it_is(forward: Forward) -> Forward:
    return forward


def _context_of(compiled: Any) -> Layer | None:
    """What ``torch.compile`` has made of its options; applied to a function it compiles that."""
    asked = getattr(compiled, "get_compiler_config", None)
    return inspect.getclosurevars(asked).nonlocals.get("self") if asked else None


def compiler_around() -> Layer | None:
    """The same of the innermost compiled function that is running."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return frame and frame.f_locals.get("self")  # type: ignore[no-any-return]
