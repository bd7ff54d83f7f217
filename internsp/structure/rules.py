"""Matches the rules of a plan with a model, and finds the options they set for one name. Pure.

A rule applies to the modules and parameters that its patterns match, and to everything inside
them. Two rules of the configuration (or two of the model's own) that set the same key of one name
are an error; their order never decides. The configuration's rules take precedence over the
model's, and both over the options of ``[weight_parallel]``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from internsp.base.names import ancestors, did_you_mean, matches
from internsp.config import PlanRule
from internsp.errors import ConfigError, StructureError

BLOCK_KEYS = frozenset({
    "keep_unsharded", "prefetch_depth", "forward_prefetch", "backward_prefetch", "gather_before",
    "gather_before_modules",
})  # fmt: skip
"""Keys that are options of blocks."""
MODULE_KEYS = frozenset({"output_dtype", "cast_inputs", "unit"})
"""Keys that are options of the matched modules themselves; all others are of parameters."""
SHARDED_KEYS = frozenset({
    "shard_dim", "axis", "coalesce_bytes", "reduce_dtype", "quantize", "pre_all_gather",
    "post_all_gather", "offload", "near_ranks",
})  # fmt: skip
"""Keys that have an effect on sharded parameters only."""
_NUMBER = re.compile(r"(?:(?<=\.)|^)(?:\d+|\{[^}]*\})(?=\.|$)")  # a number in a name or a pattern
FROM_CONFIG = "weight_parallel.rules"
FROM_MODEL = "the model's own weight_parallel_plan"


@dataclass(frozen=True, eq=False)
class MatchedRule:
    """One rule, and the modules and parameters that it matches.

    Attributes:
        origin: which list of rules it is from.
        names: of the modules and parameters that its patterns match.
        modules: the names among them that are modules.
        parameters: number of parameters that are matched or inside a matched module.
        nbytes: bytes of these parameters.
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
        """The :attr:`names` that are not inside another matched module."""
        return [n for n in self.names if not self.applies_to(n.rpartition(".")[0])]

    def applies_to(self, name: str) -> bool:
        """Whether ``name``, or a module that contains it, is matched."""
        return any(above in self.names for above in ancestors(name))


@dataclass(frozen=True)
class Rules:
    """All rules of a model: those of the configuration first, then the model's own."""

    matched: tuple[MatchedRule, ...] = ()

    def options_for(self, names: Iterable[str], keys: Collection[str]) -> Mapping[str, Any]:
        """The options among ``keys`` that rules set for a weight or module, by key.

        See :meth:`deciding`.
        """
        return {key: getattr(rule.rule, key) for key, rule in self.deciding(names, keys).items()}

    def deciding(self, names: Iterable[str], keys: Collection[str]) -> Mapping[str, MatchedRule]:
        """The rule that sets each of ``keys`` for a weight or module, for those that one sets.

        Args:
            names: its names; a shared weight has several.

        Raises:
            StructureError: two rules of one origin set the same key.
        """
        names = list(names)
        found: dict[str, MatchedRule] = {}
        for matched_rule in self.matched:
            own = [key for key in matched_rule.rule.options() if key in keys]
            if not own or not any(map(matched_rule.applies_to, names)):
                continue
            for key in own:
                first = found.setdefault(key, matched_rule)
                if first is not matched_rule and first.origin == matched_rule.origin:
                    raise StructureError(
                        f"{matched_rule.origin}: {key} of {names[0]} is set twice, by "
                        f"{first.rule} and by {matched_rule.rule}: let their patterns match "
                        "different things"
                    )
        return found

    def of_module(self, name: str) -> Rules:
        """The rules that match the module ``name`` itself, not only its parents."""
        return Rules(tuple(each for each in self.matched if name in each.modules))


NO_RULES = Rules()


def own_rules(model: object) -> tuple[PlanRule, ...]:
    """The model's own rules: its ``weight_parallel_plan``, a list or a method that returns one.

    Raises:
        StructureError: ``weight_parallel_plan`` is something else, or a rule of it is invalid.
    """
    given = getattr(model, "weight_parallel_plan", ())
    given = given() if callable(given) else given
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise StructureError(
            f"weight_parallel_plan of {type(model).__name__} is a {type(given).__name__}: give a "
            "list of rules (internsp.PlanRule or mappings), or a method that returns one"
        )
    found = []
    for number, rule in enumerate(given, 1):
        if not isinstance(rule, (PlanRule, Mapping)):
            raise StructureError(
                f"weight_parallel_plan of {type(model).__name__}: rule {number} is a "
                f"{type(rule).__name__}: give an internsp.PlanRule or a mapping of its keys"
            )
        try:
            found.append(rule if isinstance(rule, PlanRule) else PlanRule(**rule))
        except ConfigError as error:
            raise StructureError(
                f"weight_parallel_plan of {type(model).__name__}, rule {number}: {error}"
            ) from None
    return tuple(found)


def match_rules(model: nn.Module, plan: Sequence[PlanRule]) -> Rules:
    """Match the rules of ``plan`` and the model's own rules with ``model``.

    Raises:
        StructureError: a pattern matches nothing; gives the nearest name, or lists candidates.
    """
    given = [(FROM_CONFIG, rule) for rule in plan]
    given += [(FROM_MODEL, rule) for rule in own_rules(model)]
    if not given:
        return NO_RULES
    names = list(dict.fromkeys(_names(model)))
    modules = {name for name, _ in model.named_modules()}
    found = []
    for origin, rule in given:
        matched_rule: dict[str, None] = {}
        for pattern in rule.match:
            hits = [name for name in names if matches(name, pattern)]
            if not hits:
                raise StructureError(
                    f"{origin}: {pattern!r} matches no module and no parameter"
                    f"{_candidates(pattern, names)}"
                )
            matched_rule |= dict.fromkeys(hits)
        inside = {
            id(p): p for name, p in model.named_parameters(remove_duplicate=False)
            if any(above in matched_rule for above in ancestors(name))
        }  # fmt: skip
        nbytes = sum(p.numel() * p.element_size() for p in inside.values())
        found.append(
            MatchedRule(
                origin,
                rule,
                matched_rule.keys(),
                matched_rule.keys() & modules,
                len(inside),
                nbytes,
            )
        )
    return Rules(tuple(found))


def rules_of_chunk(model: nn.Module, rules: Iterable[PlanRule]) -> tuple[PlanRule, ...]:
    """The rules of a complete model that concern one pipeline chunk of it, ``model``."""
    names = list(_names(model))
    found = []
    for rule in rules:
        here = tuple(p for p in rule.match if any(matches(name, p) for name in names))
        if here:
            found.append(rule.model_copy(update={"match": here}))
    return tuple(found)


def _names(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_modules() if name)
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))


def _candidates(pattern: str, names: Iterable[str]) -> str:
    """A question with the nearest name, or up to 40 names, with ``{*}`` for numbers."""
    folded = list(dict.fromkeys(_NUMBER.sub("{*}", name) for name in names))
    meant = did_you_mean(_NUMBER.sub("{*}", pattern), folded)
    return meant or f"; candidates: {', '.join(folded[:40])}"
