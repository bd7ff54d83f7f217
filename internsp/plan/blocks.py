"""Reads a model into blocks, prefetch triggers, embedding and head (WP-7: patterns.

Never a guess).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from internsp.config import PlanRule
from internsp.config.names import matches, nearest
from internsp.errors import StructureError
from internsp.plan.prefetch import ahead
from internsp.plan.rules import BLOCK_KEYS, NO_RULES, Rules, lay

BLOCK_LISTS = ("layers", "blocks", "h", "block", "layer", "decoder_layers", "transformer_blocks")
HEADS = ("head", "lm_head", "output", "output_layer", "unembed")
TRIGGERS: dict[str, tuple[str, ...]] = {
    "attention": ("attend", "core_attention", "inner_attention", "attn_core", "inner_attn"),
    "out_proj": ("out_proj", "wo", "o_proj", "c_proj", "dense", "proj", "to_out"),
    "mlp": ("w1", "gate_proj", "fc1", "c_fc", "up_proj", "dense_h_to_4h", "fc_in", "gate_up_proj"),
}


@dataclass(frozen=True)
class Block:
    """One transformer block and the module whose forward triggers the next block's gather.

    Attributes:
        trigger: which prefetch trigger was looked for.
        said: what the plan's rules say of it, by key.
    """

    name: str
    module: nn.Module
    trigger_name: str | None
    trigger_module: nn.Module | None
    trigger: str = "qkv"
    said: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Structure:
    """A model as weight communication sees it."""

    blocks: tuple[Block, ...]
    embedding: tuple[str, nn.Module] | None
    head: tuple[str, nn.Module] | None
    rules: Rules = NO_RULES
    ahead: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """What rules say of prefetching in one direction (:mod:`internsp.plan.prefetch`)."""


def read(
    model: nn.Module,
    trigger: str = "out_proj",
    blocks: Sequence[str] = (),
    prefetch_triggers: Sequence[str] = (),
    plan: Sequence[PlanRule] = (),
) -> Structure:
    """Find the parts of ``model``.

    Args:
        trigger: which prefetch trigger to look for; ``"qkv"``, the block's entry, and ``"rolling"``
            need none.
        blocks: patterns of block names (``layers.*``); empty: children of module lists with
            usual names.
        prefetch_triggers: patterns, matched against names within a block; empty: usual names.
        plan: rules for some of it alone, before those that the model brings.

    Raises:
        StructureError: when no block, or in a block no prefetch trigger, is found, or a rule
            matches nothing; lists candidates.
    """
    found = _blocks(model, blocks)
    rules = lay(model, plan)
    parts = tuple(
        _block(name, module, trigger, prefetch_triggers, rules.say([name], BLOCK_KEYS))
        for name, module in found
    )
    require_triggers_matched([module for _, module in found], prefetch_triggers)
    for caught in rules.caught:
        own = [module for name, module in found if caught.holds_for(name)]
        if own:
            require_triggers_matched(own, caught.rule.prefetch_triggers)
    inside = {id(m) for _, block in found for m in block.modules()}
    outside = [(n, m) for n, m in model.named_modules() if id(m) not in inside]
    embeddings = [(n, m) for n, m in outside if isinstance(m, nn.Embedding)]
    heads = [(n, m) for n, m in outside if isinstance(m, nn.Linear) and n.split(".")[-1] in HEADS]
    head = heads[-1] if heads else None
    counts = ahead([p.name for p in parts], [p.said for p in parts], head and head[0])
    return Structure(parts, embeddings[0] if embeddings else None, head, rules, counts)


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
        _refuse_nested(chosen)
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
    first: dict[int, tuple[str, nn.Module]] = {}  # a block that stands at two places is one block
    for n, m in outermost:
        for i, child in enumerate(m):
            first.setdefault(id(child), (f"{n}.{i}", child))
    return list(first.values())


def trigger_matches(pattern: str, blocks: Iterable[nn.Module]) -> bool:
    """Whether an prefetch trigger's pattern names some module of one of the blocks."""
    return any(
        matches(name, pattern) or matches(name.split(".")[-1], pattern)
        for block in blocks
        for name, _ in block.named_modules()
        if name
    )


def require_triggers_matched(blocks: Sequence[nn.Module], patterns: Sequence[str]) -> None:
    """Each of a user's prefetch triggers matches something (WP-7).

    Raises:
        StructureError: one matches no module of any block; lists candidates.
    """
    for pattern in patterns:
        if not trigger_matches(pattern, blocks):
            raise StructureError(
                f"weight_parallel.prefetch_triggers: {pattern!r} matches no module of any block"
                f"{_meant_trigger(pattern, blocks)}; candidates: {_trigger_candidates(blocks[0])}"
            )


def did_you_mean(pattern: str, names: Iterable[str]) -> str:
    """The nearest of ``names`` as a question in brackets; empty where none is near."""
    near = nearest(pattern, list(dict.fromkeys(names)))
    return f" (did you mean {near!r}?)" if near else ""


def _meant_trigger(pattern: str, blocks: Iterable[nn.Module]) -> str:
    names = [name for block in blocks for name, _ in block.named_modules() if name]
    return did_you_mean(pattern, [*(name.split(".")[-1] for name in names), *names])


def _trigger_candidates(block: nn.Module) -> str:
    named = [(n, m) for n, m in block.named_modules() if n]
    linear = [n for n, m in named if any(True for _ in m.parameters(recurse=False))]
    return ", ".join(linear) or "none"


def _refuse_nested(chosen: list[tuple[str, nn.Module]]) -> None:
    for name, _ in chosen:
        inner = [n for n, _ in chosen if n.startswith(name + ".")]
        if inner:
            raise StructureError(
                f"block {inner[0]} lies inside block {name}: a weight belongs to one unit; "
                "make the patterns of weight_parallel.blocks match one level only"
            )


def _block_lists(named: list[tuple[str, nn.Module]]) -> list[str]:
    return [f"{n}.*" for n, m in named if isinstance(m, (nn.ModuleList, nn.Sequential))]


def _block_candidates(named: list[tuple[str, nn.Module]]) -> str:
    lists = _block_lists(named)
    classes = sorted({type(m).__name__ for _, m in named if any(True for _ in m.children())})
    return (
        f"candidates: {', '.join(lists) or 'no module list in this model'}; "
        f"composite classes: {', '.join(classes) or 'none'}"
    )


def _block(
    block: str,
    module: nn.Module,
    trigger: str,
    patterns: Sequence[str],
    said: Mapping[str, Any],
) -> Block:
    if "trigger" in said:  # and no module that is configured for the others
        trigger, patterns = said["trigger"], ()
    patterns = said.get("prefetch_triggers", patterns)
    if trigger in ("qkv", "rolling") and not patterns:
        return Block(block, module, None, None, trigger, said)
    usual = TRIGGERS.get(trigger, ())
    named = [(n, m) for n, m in module.named_modules() if n]
    for pattern in patterns or usual:
        for name, child in named:
            if matches(name, pattern) or matches(name.split(".")[-1], pattern):
                return Block(block, module, name, child, trigger, said)
    raise StructureError(
        f"no prefetch trigger {trigger!r} in block {block}: none of its modules is named "
        f"{', '.join(patterns or usual)}{''.join(_meant_trigger(p, [module]) for p in patterns)}; "
        "set weight_parallel.prefetch_triggers, candidates: "
        f"{_trigger_candidates(module)}"
    )


def trigger_position(block: Block, owners: Sequence[str]) -> int:
    """Position of the first weight used after the prefetch trigger among ``owners`` (in order of
    use).

    Args:
        owners: for each sharded weight of the block, the name of its module within the block.
    """
    if block.trigger_name is None:
        return -1
    names = [block.trigger_name]
    if block.trigger == "attention":  # owns no weight itself; the out-projection follows it
        names += list(TRIGGERS["out_proj"])
    for name in names:
        for position, owner in enumerate(owners):
            if owner == name or owner.startswith(name + ".") or owner.split(".")[-1] == name:
                return position
    return len(owners)
