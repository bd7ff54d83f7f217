"""Divides blocks into several units, as rules of the plan say. Pure.

``unit = "each"`` makes every matched module inside a block a unit of its own. The weights of a
divided block that are in none of its units are its rest (:mod:`internsp.schedule.enclosing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from internsp.base.names import matches
from internsp.errors import StructureError
from internsp.structure.rules import MatchedRule, Rules

Named = tuple[str, nn.Module]


@dataclass(frozen=True)
class Block:
    """A unit of the gather queue and its prefetch trigger.

    It is a transformer block; or, where rules of the plan say so, a part of one.

    Attributes:
        name: its module's.
        layer: index of the model's block that it is, or is a part of.
        around: index of the enclosing block that it is a part of; -1: none.
        trigger: which prefetch trigger was looked for.
        trigger_name, trigger_module: the prefetch trigger; ``None``: the unit's entry.
        rule_options: what the plan's rules set for it, by key.
    """

    name: str
    module: nn.Module
    layer: int
    around: int = -1
    trigger: str = "qkv"
    trigger_name: str | None = None
    trigger_module: nn.Module | None = None
    rule_options: Mapping[str, Any] = field(default_factory=dict)


def divide_into_units(blocks: Sequence[Named], rules: Rules) -> list[Block]:
    """The units of a model's ``blocks``, in the order in which they run, without triggers.

    Units of one block are in the order of the patterns if one rule makes all of them, else in the
    order in which their modules are registered.

    Raises:
        StructureError: a rule makes a unit of a module outside the blocks, inside another unit, or
            that is a unit already.
    """
    own: dict[int, list[tuple[str, MatchedRule]]] = {}
    numbers = {name: number for number, (name, _) in enumerate(blocks)}
    for name, matched_rule in _unit_rules(rules).items():
        if name in numbers:
            raise StructureError(f"{matched_rule}: {name} is a unit already: leave it out")
        around = next((n for b, n in numbers.items() if name.startswith(f"{b}.")), None)
        if around is None:
            raise StructureError(
                f"{matched_rule}: {name} lies in no block (they are {', '.join(numbers)}): "
                "name it in weight_parallel.blocks, in the order in which they run"
            )
        own.setdefault(around, []).append((name, matched_rule))
    parts: list[Block] = []
    divided = sorted(own)
    for number, block in enumerate(blocks):
        if number in own:
            parts += _units_inside(number, divided.index(number), block, own[number])
        else:
            parts.append(Block(*block, number))
    return parts


def _unit_rules(rules: Rules) -> dict[str, MatchedRule]:
    """The rule that makes a unit of a module, by the module's name; the configuration's first."""
    found: dict[str, MatchedRule] = {}
    for matched_rule in rules.matched:
        for name in matched_rule.names if "unit" in matched_rule.rule.options() else ():
            if name not in matched_rule.modules:
                raise StructureError(
                    f"{matched_rule}: unit is for modules, and {name} is a parameter"
                )
            found[name] = rules.of_module(name).deciding([name], {"unit"})["unit"]
    return found


def _units_inside(
    number: int, around: int, named: Named, own: Sequence[tuple[str, MatchedRule]]
) -> list[Block]:
    block_name, block = named
    registered = [f"{block_name}.{name}" for name, _ in block.named_modules() if name]
    modules = {name: block.get_submodule(name[len(block_name) + 1 :]) for name, _ in own}
    for name in modules:
        inner = [other for other in modules if other.startswith(f"{name}.")]
        if inner:
            raise StructureError(
                f"weight_parallel.rules: {inner[0]} lies inside {name}, and rules make a unit of "
                "both: units do not nest, and the rest of the block is a unit already"
            )
    ordered = sorted(modules, key=registered.index)
    if len({id(matched_rule) for _, matched_rule in own}) == 1:
        patterns = own[0][1].rule.match
        ordered.sort(key=lambda name: next(i for i, p in enumerate(patterns) if matches(name, p)))
    return [Block(name, modules[name], number, around) for name in ordered]
