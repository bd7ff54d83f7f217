"""Pure: units below blocks, and several modules as one unit, as rules of the plan say.

``unit = "each"`` makes every matched module inside a block a unit of its own; ``unit = "one"`` the
matched modules of one block together, or matched blocks that follow each other. What of a block
lies in none of its units is its rest (:mod:`internsp.wp.enclosing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from internsp.config.names import matches
from internsp.errors import StructureError
from internsp.plan.rules import Caught, Rules

Named = tuple[str, nn.Module]


@dataclass(frozen=True)
class Part:
    """What becomes one unit of the gather queue.

    Attributes:
        name: of its module; of several their parent's with all their own.
        modules: in the order of registration.
        layers: of which blocks of the model, by number.
        inside: whether it lies inside of a block.
    """

    name: str
    modules: tuple[Named, ...]
    layers: tuple[int, ...]
    inside: bool = False


def divide(blocks: Sequence[Named], rules: Rules) -> list[Part]:
    """The units of a model's ``blocks``, in the order in which they run.

    Units of one block come in the order of the patterns, where one rule makes all of them, else
    as their modules were registered.

    Raises:
        StructureError: a rule makes a unit of what lies in no block, in another unit, or is one.
    """
    said = _said(rules)
    own: dict[int, list[tuple[str, Caught]]] = {}
    merged: dict[Caught, list[int]] = {}
    numbers = {name: number for number, (name, _) in enumerate(blocks)}
    for name, caught in said.items():
        kind = caught.rule.unit
        if name in numbers:
            if kind == "each":
                raise StructureError(f"{caught}: {name} is a unit already")
            merged.setdefault(caught, []).append(numbers[name])
            continue
        around = next((n for b, n in numbers.items() if name.startswith(f"{b}.")), None)
        if around is None:
            raise StructureError(
                f"{caught}: {name} lies in no block (they are {', '.join(numbers)}): name it in "
                "weight_parallel.blocks, in the order in which they run"
            )
        own.setdefault(around, []).append((name, caught))
    parts: list[Part] = []
    for number, (name, module) in enumerate(blocks):
        if number in own:
            parts += _inside(number, module, name, own[number])
            continue
        together = next((c for c in merged.values() if number in c), [number])
        if number == together[0]:
            parts.append(_together(together, blocks, own))
    return parts


def _said(rules: Rules) -> dict[str, Caught]:
    """The rule that makes a unit of a module, by name; what is configured goes first."""
    found: dict[str, Caught] = {}
    for caught in rules.caught:
        if "unit" not in caught.rule.said():
            continue
        for name in caught.names:
            if name not in caught.modules:
                raise StructureError(f"{caught}: unit is of modules, and {name} is a parameter")
            first = found.setdefault(name, caught)
            if first is not caught and first.origin == caught.origin:
                raise StructureError(
                    f"{caught.origin}: unit of {name} is said twice, by {first.rule} and by "
                    f"{caught.rule}: let their patterns match different things"
                )
    return found


def _inside(
    number: int, block: nn.Module, block_name: str, own: Sequence[tuple[str, Caught]]
) -> list[Part]:
    registered = [f"{block_name}.{name}" for name, _ in block.named_modules() if name]
    modules = {name: block.get_submodule(name[len(block_name) + 1 :]) for name, _ in own}
    for name in modules:
        inner = [other for other in modules if other.startswith(f"{name}.")]
        if inner:
            raise StructureError(
                f"weight_parallel.plan: {inner[0]} lies inside {name}, and rules make a unit of "
                "both: a unit of a block has no units of its own, what is left of the block is one"
            )
    units: dict[object, list[str]] = {}
    for name, caught in sorted(own, key=lambda pair: registered.index(pair[0])):
        units.setdefault(caught if caught.rule.unit == "one" else name, []).append(name)
    if len({id(caught) for _, caught in own}) == 1:
        patterns = own[0][1].rule.match
        place = {n: next(i for i, p in enumerate(patterns) if matches(n, p)) for n in modules}
        ordered = sorted(units.values(), key=lambda names: place[names[0]])
    else:
        ordered = list(units.values())
    return [
        Part(_name(names), tuple((n, modules[n]) for n in names), (number,), inside=True)
        for names in ordered
    ]


def _together(
    numbers: Sequence[int], blocks: Sequence[Named], own: dict[int, list[tuple[str, Caught]]]
) -> Part:
    numbers = sorted(numbers)
    names = [blocks[number][0] for number in numbers]
    if numbers[-1] - numbers[0] + 1 != len(numbers):
        raise StructureError(
            f"weight_parallel.plan: one unit of {', '.join(names)}, which do not follow each other"
        )
    divided = [blocks[number][0] for number in numbers if number in own]
    if divided:
        raise StructureError(
            f"weight_parallel.plan: {divided[0]} is one unit with other blocks, and has units of "
            "its own"
        )
    return Part(_name(names), tuple(blocks[number] for number in numbers), tuple(numbers))


def _name(names: Sequence[str]) -> str:
    """One module's own; ``layers.0.(norm+attention)`` of several."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    common = 0
    while len({tuple(p[: common + 1]) for p in parts}) == 1:
        common += 1
    inner = "+".join(".".join(p[common:]) for p in parts)
    return ".".join([*parts[0][:common], f"({inner})"])
