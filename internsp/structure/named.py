"""The structure of a model whose units a program has named itself, in any nesting. Pure.

A named unit is a block if no other named unit lies in it, a block with units of its own if blocks
do, and else one that stays unsharded from the model's entry to the end of backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from internsp.schedule.terms import FORWARD
from internsp.structure.blocks import EnclosingBlock, Structure
from internsp.structure.inner import Block, Named
from internsp.structure.prefetch import KEYS


@dataclass(eq=False)
class NamedUnit:
    """One unit that a program has named.

    Attributes:
        modules: one, or several that the program has put together.
        keeps: whether it stays unsharded from forward to backward.
        ahead: units that it gathers ahead, by the key of a rule (``forward_prefetch``, ...).
        kind: ``"block"``, ``"enclosing"`` or ``"root"``.
        number: index among those of its kind.
        around: of a block, the number of the enclosing one; -1: none.
    """

    modules: Sequence[Named]
    keeps: bool = False
    ahead: Mapping[str, Sequence[NamedUnit]] = field(default_factory=dict)
    kind: str = "root"
    number: int = -1
    around: int = -1

    @property
    def name(self) -> str:
        """That of its module; several are joined by ``+``."""
        return "+".join(name for name, _ in self.modules) or "the root"


def arrange(units: Sequence[NamedUnit]) -> None:
    """Set ``kind``, ``number`` and ``around`` of ``units``, in order; the first is the root's."""
    inside: dict[NamedUnit, set[NamedUnit]] = {}
    for unit in units:
        below = {id(part) for _, module in unit.modules for part in module.modules()}
        within = (o for o in units if o is not unit and any(id(m) in below for _, m in o.modules))
        inside[unit] = set(within)
    single = [unit for unit in units[1:] if len(unit.modules) == 1]
    leaves = {unit for unit in single if not inside[unit]}
    enclosing = [unit for unit in single if inside[unit] and inside[unit] <= leaves]
    for number, unit in enumerate(enclosing):
        unit.kind, unit.number = "enclosing", number
    for number, unit in enumerate(unit for unit in units if unit in leaves):
        unit.kind, unit.number = "block", number
        unit.around = next((o.number for o in enclosing if unit in inside[o]), -1)


def structure_of(
    units: Sequence[NamedUnit], free: bool, compilers: Mapping[nn.Module, Any], notes: list[str]
) -> Structure:
    """The structure of arranged ``units``.

    Args:
        free: the configuration says which blocks stay unsharded, besides those that ``keeps``.
        compilers: see :class:`internsp.structure.blocks.Structure`.
        notes: gets a line for each list of units to gather ahead that the plan does not follow.
    """
    layers = [u for u in units if u.kind == "enclosing" or (u.kind == "block" and u.around < 0)]
    number_of = {unit: number for number, unit in enumerate(layers)}
    owners = [unit for unit in layers if unit.kind == "enclosing"]
    blocks = [
        _block(unit, number_of[owners[unit.around] if unit.around >= 0 else unit], free)
        for unit in units
        if unit.kind == "block"
    ]
    enclosing = []
    for unit in owners:
        own = [u.number for u in units if u.kind == "block" and u.around == unit.number]
        module = unit.modules[0][1]
        enclosing.append(EnclosingBlock(unit.name, module, number_of[unit], own[0], own[-1]))
    return Structure(
        tuple(blocks), None, None, prefetch_counts=_prefetches(units, notes),
        enclosing=tuple(enclosing), layers=len(layers),
        compilers=compilers,
    )  # fmt: skip


def _block(unit: NamedUnit, layer: int, free: bool) -> Block:
    options: dict[str, Any] = {}
    if unit.keeps or not free:
        options["keep_unsharded"] = unit.keeps
    return Block(unit.name, unit.modules[0][1], layer, unit.around, rule_options=options)


def _prefetches(units: Sequence[NamedUnit], notes: list[str]) -> dict[tuple[str, int], int]:
    """How many units each block gathers ahead, by phase and index, where the program says so.

    Weights are gathered in the order in which they are used, so that it can only name the blocks
    that come next, without a gap.
    """
    blocks = [unit for unit in units if unit.kind == "block"]
    found: dict[tuple[str, int], int] = {}
    for number, unit in enumerate(blocks):
        for key, others in unit.ahead.items():
            named = {other for other in others if other.kind == "block"}
            coming = blocks[number + 1 :] if KEYS[key] == FORWARD else blocks[:number][::-1]
            if named == {*coming[: len(named)]}:
                found |= {(KEYS[key], number): len(named)} if named else {}
            else:
                why = "it names others than the next blocks"
                notes.append(f"{key} of {unit.name}: one block ahead, as planned ({why})")
    return found


def modules_of(units: Iterable[NamedUnit]) -> list[nn.Module]:
    """The modules of all units."""
    return [module for unit in units for _, module in unit.modules]
