"""Chooses the modules that are computed in tiles of positions, and the number of tiles. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from internsp.base.names import did_you_mean, matches
from internsp.config import ActivationCheckpointConfig
from internsp.errors import ConfigError, StructureError
from internsp.structure.blocks import Structure

FEED_FORWARDS = ("feed_forward", "feedforward", "ffn", "mlp")


@dataclass(frozen=True, eq=False)
class Tiling:
    """A module that is computed in tiles."""

    name: str
    module: nn.Module


def find_tiled(structure: Structure, config: ActivationCheckpointConfig | None) -> list[Tiling]:
    """The modules of a model that are computed in tiles.

    Raises:
        ConfigError: ``tiles`` is still ``"auto"``, or a module's numbers follow from all positions.
        StructureError: a pattern matches nothing, a block has no feed-forward with a usual name,
            or units of a block are inside a tiled module.
    """
    if config is None or config.tiles == 1:
        return []
    if config.tiles == "auto":
        raise ConfigError(
            'activation_checkpoint.tiles = "auto" follows from data.sequence_length, which '
            "parallelize() does not know: give a number of tiles"
        )
    blocks = [(around.name, around.module) for around in structure.enclosing]
    blocks += [(block.name, block.module) for block in structure.blocks if block.around < 0]
    patterns = config.tiled_modules or FEED_FORWARDS
    found: list[Tiling] = []
    used: set[str] = set()
    for prefix, block in blocks:
        mine: list[tuple[str, nn.Module]] = []
        for name, module in block.named_modules():
            hits = [p for p in patterns if matches(name, p) or matches(name.split(".")[-1], p)]
            if not name or not hits:
                continue
            used.update(hits)
            if not any(name.startswith(f"{outer}.") for outer, _ in mine):
                mine.append((name, module))
        if not mine and not config.tiled_modules:
            children = ", ".join(child for child, _ in block.named_children()) or "none"
            raise StructureError(
                f"activation_checkpoint.tiles: no feed-forward found in block {prefix} by the "
                f"usual names ({', '.join(patterns)}); name it in "
                f"activation_checkpoint.tiled_modules; candidates: {children}"
            )
        tiled = [Tiling(f"{prefix}.{name}", module) for name, module in mine]
        _refuse_sums_over_positions(block, tiled)
        found += tiled
    for pattern in config.tiled_modules:
        if pattern not in used:
            names = [name for _, block in blocks for name, _ in block.named_modules() if name]
            raise StructureError(
                f"activation_checkpoint.tiled_modules: {pattern!r} matches no module of any block"
                f"{did_you_mean(pattern, [*names, *(n.split('.')[-1] for n in names)])}"
            )
    units = {id(block.module): block.name for block in structure.blocks}
    for tiling in found:
        inside = [units[id(m)] for m in tiling.module.modules() if id(m) in units]
        if inside:
            raise StructureError(
                f"activation_checkpoint.tiles: {inside[0]} is a unit that is gathered by itself "
                f"and lies in {tiling.name}, whose tiles would gather it each: leave "
                f"{tiling.name} out of activation_checkpoint.tiled_modules, or the unit out of the "
                "plan"
            )
    return found


def _refuse_sums_over_positions(block: nn.Module, tiled: Iterable[Tiling]) -> None:
    """Refuse a module that says, in an attribute ``over_all_positions``, which of its options
    computes a number from all positions of a forward: each tile would have its own, and in forward
    no graph. Mixtures of transformers say so in the configuration that a block's attention has.

    Raises:
        ConfigError: there is one.
    """
    losses = ["output_router_logits"]
    told = [getattr(module, "config", None) for module in block.modules()]
    theirs = losses if any(getattr(each, losses[0], False) for each in told) else []
    for tiling in tiled:
        for name, module in tiling.module.named_modules(prefix=tiling.name):
            own = theirs if hasattr(module, "experts") else []
            options = getattr(module, "over_all_positions", own)
            if options:
                raise ConfigError(
                    f"activation_checkpoint.tiles: {' and '.join(options)} of {name} follow from "
                    f"all tokens of a forward, and {tiling.name} is computed in tiles: use 1, or "
                    "name what may be tiled in activation_checkpoint.tiled_modules"
                )
