"""Finds a model's blocks, prefetch triggers, embedding and head by name patterns (WP-7).

Nothing is guessed: what no pattern finds is an error that lists candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from internsp.base.names import did_you_mean, matches
from internsp.config import PlanRule
from internsp.errors import StructureError
from internsp.structure.inner import Block, Named, divide_into_units
from internsp.structure.prefetch import prefetch_counts
from internsp.structure.rules import BLOCK_KEYS, NO_RULES, Rules, match_rules

BLOCK_LISTS = ("layers", "blocks", "h", "block", "layer", "decoder_layers", "transformer_blocks")
HEADS = ("head", "lm_head", "output", "output_layer", "unembed")
TRIGGERS: dict[str, tuple[str, ...]] = {
    "attention": ("attend", "core_attention", "inner_attention", "attn_core", "inner_attn"),
    "out_proj": ("out_proj", "wo", "o_proj", "c_proj", "dense", "proj", "to_out"),
    "mlp": ("w1", "gate_proj", "fc1", "c_fc", "up_proj", "dense_h_to_4h", "fc_in", "gate_up_proj"),
}


@dataclass(frozen=True)
class EnclosingBlock:
    """A block of the model that is divided into several units.

    Attributes:
        layer: its index among the model's blocks.
        first, last: indices of its first and last unit.
    """

    name: str
    module: nn.Module
    layer: int
    first: int
    last: int


@dataclass(frozen=True)
class Structure:
    """The parts of a model that weight communication needs.

    Attributes:
        blocks: its units in the order in which they run: its blocks, unless rules divide them.
        enclosing: blocks that are divided into several units.
        layers: number of the model's blocks.
        compilers: what compiles the forward of a module, of those that a program has compiled.
    """

    blocks: tuple[Block, ...]
    embedding: tuple[str, nn.Module] | None
    head: tuple[str, nn.Module] | None
    rules: Rules = NO_RULES
    prefetch_counts: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """How many units rules make a unit prefetch, by phase and unit index
    (:mod:`internsp.structure.prefetch`)."""
    enclosing: tuple[EnclosingBlock, ...] = ()
    layers: int = 0
    compilers: Mapping[nn.Module, Callable[[Any], Any]] = field(default_factory=dict)

    @cached_property
    def unit_of(self) -> Mapping[str, int]:
        """Index of each unit by its name."""
        return {block.name: number for number, block in enumerate(self.blocks)}

    @cached_property
    def enclosing_of(self) -> Mapping[str, int]:
        """Index of each enclosing block by its name."""
        return {around.name: number for number, around in enumerate(self.enclosing)}

    def recomputes(self, block: int, chosen: Collection[int]) -> bool:
        """Whether the unit of index ``block`` is checkpointed, where the blocks ``chosen`` are."""
        unit = self.blocks[block]
        return unit.layer in chosen and unit.around < 0


def read_structure(
    model: nn.Module,
    trigger: str = "out_proj",
    blocks: Sequence[str] = (),
    gather_before_modules: Sequence[str] = (),
    rules: Sequence[PlanRule] = (),
) -> Structure:
    """Find the units, prefetch triggers, embedding and head of ``model``.

    Args:
        trigger: which prefetch trigger to look for; ``"qkv"``, the block's entry, and ``"rolling"``
            need none.
        blocks: patterns of block names (``layers.*``); empty: children of module lists with
            usual names.
        gather_before_modules: patterns, matched against names within a block; empty: usual names.
        rules: those of the configuration, which take precedence over the model's own rules.

    Raises:
        StructureError: when no block, or in a block no prefetch trigger, is found, or a rule
            matches nothing; lists candidates.
    """
    found = _blocks(model, blocks)
    matched_rules = match_rules(model, rules)
    divided = divide_into_units(found, matched_rules)
    parts = tuple(
        _with_trigger(
            part, trigger, gather_before_modules,
            matched_rules.options_for([part.name], BLOCK_KEYS),
        )
        for part in divided
    )  # fmt: skip
    require_triggers_matched([module for _, module in found], gather_before_modules)
    for matched_rule in matched_rules.matched:
        own = [module for name, module in found if matched_rule.applies_to(name)]
        if own:
            require_triggers_matched(own, matched_rule.rule.gather_before_modules)
    inside = {id(m) for _, block in found for m in block.modules()}
    outside = [(n, m) for n, m in model.named_modules() if id(m) not in inside]
    embeddings = [(n, m) for n, m in outside if isinstance(m, nn.Embedding)]
    heads = [(n, m) for n, m in outside if isinstance(m, nn.Linear) and n.split(".")[-1] in HEADS]
    head = heads[-1] if heads else None
    options = [part.rule_options for part in parts]
    counts = prefetch_counts([part.name for part in parts], options, head is not None)
    embedding = embeddings[0] if embeddings else None
    around = _enclosing(found, parts)
    return Structure(parts, embedding, head, matched_rules, counts, around, len(found))


def _enclosing(blocks: Sequence[Named], parts: Sequence[Block]) -> tuple[EnclosingBlock, ...]:
    inside: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        if part.around >= 0:
            inside.setdefault(part.layer, []).append(index)
    return tuple(
        EnclosingBlock(*blocks[layer], layer, own[0], own[-1]) for layer, own in inside.items()
    )


def _blocks(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    named = [(n, m) for n, m in model.named_modules() if n]
    if patterns:
        chosen: list[tuple[str, nn.Module]] = []
        for pattern in patterns:
            hits = [(n, m) for n, m in named if matches(n, pattern)]
            if not hits:
                meant = did_you_mean(pattern, [*_block_lists(named), *(n for n, _ in named)])
                raise StructureError(
                    f"weight_parallel.blocks: {pattern!r} matches no module{meant}; "
                    f"{_block_candidates(named)}"
                )
            chosen += [hit for hit in hits if hit not in chosen]
        for name, _ in chosen:
            if inner := [n for n, _ in chosen if n.startswith(name + ".")]:
                raise StructureError(
                    f"block {inner[0]} lies inside block {name}: a weight belongs to one unit; "
                    "make the patterns of weight_parallel.blocks match one level only, and have a "
                    'rule of weight_parallel.rules set unit = "each" for the inner ones'
                )
        return chosen
    lists = [
        (n, m)
        for n, m in named
        if isinstance(m, (nn.ModuleList, nn.Sequential))
        and n.split(".")[-1] in BLOCK_LISTS
        and len(m) > 0
        and all(any(True for _ in child.parameters()) for child in m)
    ]
    outermost = [
        (n, m) for n, m in lists if not any(n.startswith(o + ".") for o, _ in lists if o != n)
    ]
    if not outermost:
        raise StructureError(
            "no transformer blocks found by the usual names "
            f"({', '.join(BLOCK_LISTS)}); set weight_parallel.blocks, {_block_candidates(named)}"
        )
    first: dict[int, tuple[str, nn.Module]] = {}  # a block that is registered twice is one block
    for n, m in outermost:
        for i, child in enumerate(m):
            first.setdefault(id(child), (f"{n}.{i}", child))
    return list(first.values())


def trigger_matches(pattern: str, blocks: Iterable[nn.Module]) -> bool:
    """Whether a prefetch trigger's pattern matches a module in any of the blocks."""
    return any(
        matches(name, pattern) or matches(name.split(".")[-1], pattern)
        for block in blocks
        for name, _ in block.named_modules()
        if name
    )


def require_triggers_matched(blocks: Sequence[nn.Module], patterns: Sequence[str]) -> None:
    """Check that each of a user's prefetch triggers matches a module (WP-7).

    Raises:
        StructureError: one matches no module of any block; lists candidates.
    """
    for pattern in patterns:
        if not trigger_matches(pattern, blocks):
            raise StructureError(
                f"weight_parallel.gather_before_modules: {pattern!r} matches no module of any block"
                f"{_meant_trigger(pattern, blocks)}; candidates: {_trigger_candidates(blocks[0])}"
            )


def _meant_trigger(pattern: str, blocks: Iterable[nn.Module]) -> str:
    names = [name for block in blocks for name, _ in block.named_modules() if name]
    return did_you_mean(pattern, [*(name.split(".")[-1] for name in names), *names])


def _trigger_candidates(block: nn.Module) -> str:
    named = [(n, m) for n, m in block.named_modules() if n]
    linear = [n for n, m in named if any(True for _ in m.parameters(recurse=False))]
    return ", ".join(linear) or "none"


def _block_lists(named: list[tuple[str, nn.Module]]) -> list[str]:
    return [f"{n}.*" for n, m in named if isinstance(m, (nn.ModuleList, nn.Sequential))]


def _block_candidates(named: list[tuple[str, nn.Module]]) -> str:
    lists = _block_lists(named)
    classes = sorted({type(m).__name__ for _, m in named if any(True for _ in m.children())})
    return (
        f"candidates: {', '.join(lists) or 'no module list in this model'}; "
        f"composite classes: {', '.join(classes) or 'none'}"
    )


def _with_trigger(
    part: Block, trigger: str, patterns: Sequence[str], rule_options: Mapping[str, Any]
) -> Block:
    if "gather_before" in rule_options:  # the configured modules are for the other blocks
        trigger, patterns = rule_options["gather_before"], ()
    patterns = rule_options.get("gather_before_modules", patterns)
    entry, module = replace(part, trigger=trigger, rule_options=rule_options), part.module
    if trigger in ("qkv", "rolling") and not patterns:
        return entry
    usual = TRIGGERS.get(trigger, ())
    for pattern in patterns or usual:
        for inner, child in module.named_modules():
            if inner and (matches(inner, pattern) or matches(inner.split(".")[-1], pattern)):
                return replace(entry, trigger_name=inner, trigger_module=child)
    by_rule = rule_options.keys() & {"gather_before", "gather_before_modules"}
    if part.around >= 0 and not by_rule:
        return entry  # not every part of a block has a trigger module: its entry is the trigger
    key = "weight_parallel.gather_before_modules"
    key = "gather_before_modules in its rule" if by_rule else key
    remedy = f"set {key}, candidates: {_trigger_candidates(module)}"
    if not any(True for _ in module.children()):
        remedy = "it has none: set gather_before = 'qkv', its entry, in a rule for it"
    raise StructureError(
        f"no prefetch trigger {trigger!r} in block {part.name}: none of its modules is named "
        f"{', '.join(patterns or usual)}{''.join(_meant_trigger(p, [module]) for p in patterns)}; "
        f"{remedy}"
    )


def trigger_position(block: Block, owners: Sequence[str]) -> int:
    """Position among ``owners`` of the first weight that is used after the prefetch trigger.

    Args:
        owners: for each sharded weight of the block, in the order of use, the name of its module
            within the block.

    Returns:
        -1 where the block's entry is the trigger; ``len(owners)`` where no weight follows it.
    """
    if block.trigger_name is None:
        return -1
    names = [block.trigger_name]
    if block.trigger == "attention":  # the module owns no weight; the out-projection follows it
        names += list(TRIGGERS["out_proj"])
    for name in names:
        for position, owner in enumerate(owners):
            if owner == name or owner.startswith(name + ".") or owner.split(".")[-1] == name:
                return position
    return len(owners)
