"""Pure: the rules of a plan laid over a model: what each catches, and what holds for one weight.

A rule holds for what its patterns match and for all below it. Where two rules of the configuration
(or two of the model's own) say the same key of one thing, that is an error, never a matter of
order; what the configuration says goes before what the model says, and both before the options of
``[weight_parallel]``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import nn

from internsp.config import PlanRule
from internsp.config.names import matches, nearest
from internsp.errors import StructureError

BLOCK_KEYS = frozenset({
    "keep_unsharded", "prefetch_depth", "forward_prefetch", "backward_prefetch", "trigger",
    "prefetch_triggers",
})  # fmt: skip
"""What is said of blocks."""
MODULE_KEYS = frozenset({"output_dtype", "cast_inputs", "unit"})
"""What is said of the matched modules themselves; everything else is said of parameters."""
SHARDED_KEYS = frozenset({
    "shard_dim", "axis", "coalesce_bytes", "reduce_dtype", "quantize", "pre_all_gather",
    "post_all_gather", "offload", "reshard_after_forward",
})  # fmt: skip
"""What has an effect on a cut parameter alone."""
_NUMBER = re.compile(r"(?:(?<=\.)|^)(?:\d+|\{[^}]*\})(?=\.|$)")  # a part of a name, or of a pattern
CONFIGURED = "weight_parallel.plan"
MODELS_OWN = "the model's own weight_parallel_plan"


@dataclass(frozen=True, eq=False)
class Caught:
    """One rule and what it catches.

    Attributes:
        origin: where the rule stands.
        names: of the modules and parameters that its patterns match.
        modules: those of them that are modules.
        parameters: matched, or below what is matched.
        nbytes: of these.
    """

    origin: str
    rule: PlanRule
    names: Collection[str]
    modules: Collection[str]
    parameters: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.origin}: {self.rule}"

    def outermost(self) -> list[str]:
        """Of :attr:`names` those that lie in none of the others."""
        return [n for n in self.names if not self.holds_for(n.rpartition(".")[0])]

    def holds_for(self, name: str) -> bool:
        """Whether ``name``, or what it lies in, is matched."""
        return any(above in self.names for above in _upwards(name))


@dataclass(frozen=True)
class Rules:
    """All rules of a model: those of the configuration first, then the model's own."""

    caught: tuple[Caught, ...] = ()

    def say(self, names: Iterable[str], keys: Collection[str]) -> Mapping[str, Any]:
        """What the rules say, by key, of what goes by ``names`` (a shared weight has several).

        Raises:
            StructureError: two rules of one origin say the same key of it.
        """
        names = list(names)
        found: dict[str, tuple[Caught, Any]] = {}
        for caught in self.caught:
            said = {k: v for k, v in caught.rule.said().items() if k in keys}
            if not said or not any(map(caught.holds_for, names)):
                continue
            for key, value in said.items():
                first = found.setdefault(key, (caught, value))[0]
                if first is not caught and first.origin == caught.origin:
                    raise StructureError(
                        f"{caught.origin}: {key} of {names[0]} is said twice, by {first.rule} and "
                        f"by {caught.rule}: let their patterns match different things"
                    )
        return {key: value for key, (_, value) in found.items()}

    def of_module(self, name: str, keys: Collection[str]) -> Mapping[str, Any]:
        """As :meth:`say`, of the module ``name`` itself: by rules that match it, not from above."""
        own = tuple(caught for caught in self.caught if name in caught.modules)
        return Rules(own).say([name], keys)

    def require_effect(self, cut: Collection[str], blocks: Collection[str]) -> None:
        """Of a whole model: each key of each configured rule has something to act on.

        Args:
            cut: names of the parameters that are cut.
            blocks: names of the blocks.

        Raises:
            StructureError: one has not; says why.
        """
        inside = [name for name in cut if _within_any(name, blocks)]
        acted_on = {**dict.fromkeys(BLOCK_KEYS, blocks), **dict.fromkeys(SHARDED_KEYS, cut)}
        acted_on["quantize"] = acted_on["reshard_after_forward"] = inside
        for caught in self.caught:
            for key in caught.rule.said() if caught.origin == CONFIGURED else ():
                if key in MODULE_KEYS and not caught.modules:
                    raise StructureError(f"{caught}: {key} is of modules, and it catches none")
                if key not in acted_on or any(map(caught.holds_for, acted_on[key])):
                    continue
                what = "a block" if key in BLOCK_KEYS else "a parameter that is cut"
                if key in ("quantize", "reshard_after_forward"):
                    what += " in a block"
                raise StructureError(
                    f"{caught}: {key} has no effect: what it catches is not {what}, and none lies "
                    f"in it; blocks are {', '.join(blocks)}"
                )


NO_RULES = Rules()


def own_rules(model: object) -> tuple[PlanRule, ...]:
    """The rules that a model brings: ``weight_parallel_plan``, a list or a method that returns one.

    Raises:
        StructureError: it is something else, or a rule of it is wrong.
    """
    given = getattr(model, "weight_parallel_plan", ())
    given = given() if callable(given) else given
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise StructureError(
            f"weight_parallel_plan of {type(model).__name__} is a {type(given).__name__}: give a "
            "list of rules (internsp.PlanRule or mappings), or a method that returns one"
        )
    try:
        return tuple(r if isinstance(r, PlanRule) else PlanRule.model_validate(r) for r in given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise StructureError(
            f"weight_parallel_plan of {type(model).__name__}: {place}: {first['msg']}"
        ) from None


def lay(model: nn.Module, plan: Sequence[PlanRule]) -> Rules:
    """The rules of a model: what ``plan`` and the model itself say.

    Raises:
        StructureError: a pattern matches nothing; names what is near, or lists candidates.
    """
    given = [(CONFIGURED, rule) for rule in plan]
    given += [(MODELS_OWN, rule) for rule in own_rules(model)]
    if not given:
        return NO_RULES
    names = list(dict.fromkeys(_names(model)))
    modules = {name for name, _ in model.named_modules()}
    found = []
    for origin, rule in given:
        caught: dict[str, None] = {}
        for pattern in rule.match:
            hits = [name for name in names if matches(name, pattern)]
            if not hits:
                raise StructureError(
                    f"{origin}: {pattern!r} matches no module and no parameter"
                    f"{_candidates(pattern, names)}"
                )
            caught |= dict.fromkeys(hits)
        everything = model.named_parameters(remove_duplicate=False)
        inside = {id(p): p for name, p in everything if _within_any(name, caught)}
        nbytes = sum(p.numel() * p.element_size() for p in inside.values())
        found.append(
            Caught(origin, rule, caught.keys(), caught.keys() & modules, len(inside), nbytes)
        )
    return Rules(tuple(found))


def of_part(model: nn.Module, rules: Iterable[PlanRule]) -> tuple[PlanRule, ...]:
    """Of a whole model's rules those of one part of it, a pipeline's chunk."""
    names = list(_names(model))
    found = []
    for rule in rules:
        here = tuple(p for p in rule.match if any(matches(name, p) for name in names))
        if here:
            update: dict[str, Any] = {"match": here}
            for key in ("forward_prefetch", "backward_prefetch"):  # of blocks on other stages
                if isinstance(named := rule.said().get(key), tuple):
                    update[key] = tuple(p for p in named if any(matches(n, p) for n in names))
            found.append(rule.model_copy(update=update))
    return tuple(found)


def _names(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_modules() if name)
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))


def _upwards(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _within_any(name: str, names: Collection[str]) -> bool:
    return any(above in names for above in _upwards(name))


def _candidates(pattern: str, names: Iterable[str]) -> str:
    """The nearest name as a question, or all of them, with ``{*}`` for numbers."""
    folded = list(dict.fromkeys(_NUMBER.sub("{*}", name) for name in names))
    if near := nearest(_NUMBER.sub("{*}", pattern), folded):
        return f" (did you mean {near!r}?)"
    return f"; candidates: {', '.join(folded[:40])}"
