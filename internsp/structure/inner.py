"""Divides blocks into several units, or merges modules into one, as rules of the plan say. Pure.

``unit = "each"`` makes every matched module inside a block a unit of its own; ``unit = "one"``
makes one unit of the matched modules of a block, or of matched consecutive blocks. The weights of
a divided block that are in none of its units are its rest (:mod:`internsp.schedule.enclosing`).
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

    It is a transformer block; or, where rules of the plan say so, a part of one or several blocks.

    Attributes:
        name: its module's; for several modules the parent's with theirs: ``layers.0.(wq+wk)``.
        modules: all of its modules, by name, in the order of registration.
        layers: indices of the model's blocks that it consists of, or of the one it is a part of.
        around: index of the enclosing block that it is a part of; -1: none.
        trigger: which prefetch trigger was looked for.
        trigger_name, trigger_module: the prefetch trigger; ``None``: the unit's entry.
        rule_options: what the plan's rules set for it, by key.
    """

    name: str
    modules: tuple[Named, ...]
    layers: tuple[int, ...]
    around: int = -1
    trigger: str = "qkv"
    trigger_name: str | None = None
    trigger_module: nn.Module | None = None
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module:
        """The first of its modules."""
        return self.modules[0][1]


def divide_into_units(blocks: Sequence[Named], rules: Rules) -> list[Block]:
    """The units of a model's ``blocks``, in the order in which they run, without triggers.

    Units of one block are in the order of the patterns if one rule makes all of them, else in the
    order in which their modules are registered.

    Raises:
        StructureError: a rule makes a unit of a module outside the blocks, inside another unit, or
            that is a unit already.
    """
    said = _unit_rules(rules)
    own: dict[int, list[tuple[str, MatchedRule]]] = {}
    merged: dict[MatchedRule, list[int]] = {}
    numbers = {name: number for number, (name, _) in enumerate(blocks)}
    for name, matched_rule in said.items():
        kind = matched_rule.rule.unit
        if name in numbers:
            if kind == "each":
                raise StructureError(f"{matched_rule}: {name} is a unit already: leave it out")
            merged.setdefault(matched_rule, []).append(numbers[name])
            continue
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
            continue
        together = next((c for c in merged.values() if number in c), [number])
        if number == together[0]:
            parts.append(_merged_unit(together, blocks, own))
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
    units: dict[object, list[str]] = {}
    for name, matched_rule in sorted(own, key=lambda pair: registered.index(pair[0])):
        units.setdefault(matched_rule if matched_rule.rule.unit == "one" else name, []).append(name)
    if len({id(matched_rule) for _, matched_rule in own}) == 1:
        patterns = own[0][1].rule.match
        position = {n: next(i for i, p in enumerate(patterns) if matches(n, p)) for n in modules}
        ordered = sorted(units.values(), key=lambda names: position[names[0]])
    else:
        ordered = list(units.values())
    return [
        Block(_unit_name(names), tuple((n, modules[n]) for n in names), (number,), around)
        for names in ordered
    ]


def _merged_unit(
    numbers: Sequence[int], blocks: Sequence[Named], own: dict[int, list[tuple[str, MatchedRule]]]
) -> Block:
    numbers = sorted(numbers)
    names = [blocks[number][0] for number in numbers]
    if numbers[-1] - numbers[0] + 1 != len(numbers):
        raise StructureError(
            f"weight_parallel.rules: one unit of {', '.join(names)}, which do not follow each other"
        )
    divided = [blocks[number][0] for number in numbers if number in own]
    if divided:
        raise StructureError(
            f"weight_parallel.rules: {divided[0]} is one unit with other blocks, and has units of "
            "its own"
        )
    return Block(_unit_name(names), tuple(blocks[number] for number in numbers), tuple(numbers))


def _unit_name(names: Sequence[str]) -> str:
    """The only module's name; for several modules ``layers.0.(norm+attention)``."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    common = 0
    while len({tuple(p[: common + 1]) for p in parts}) == 1:
        common += 1
    inner = "+".join(".".join(p[common:]) for p in parts)
    return ".".join([*parts[0][:common], f"({inner})"])
