"""Values of the sections for a model that are valid alone but not together, whatever the model.

A combination is a mistake where the two contradict each other, or where one leaves the other
without an effect (WP-17). A feature that is said to be off (``mode = "none"``, as an override of a
file) may leave its details without one; only where nothing says so they are a mistake. What has no
effect on a certain model is in :mod:`internsp.structure.effect`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from internsp.config.sections import (
    ActivationCheckpointConfig,
    SequenceConfig,
    WeightParallelConfig,
)
from internsp.errors import ConfigError

Mistake = tuple[tuple[str, ...], str]
"""The ``section.key`` names that a mistake concerns, the main one first, and a sentence."""


LEARN_IN_A_PIPELINE = (
    '"learn" in a pipeline: the passes of a step are planned before it, in the order in which '
    "blocks are declared; declare them as they run and leave it out"
)
OWN_DECIDES = (
    "has no effect: a communicator of your own decides when weights are gathered and freed; leave "
    "it out, or take the library's (docs/howto/own_communicator.md)"
)
OF_ORDER = (
    "memory_pool", "prefetch_depth", "gather_before", "granularity", "gather_before_modules",
    "near_ranks", "reduce", "keep_unsharded", "reductions_in_flight", "unexpected_order",
)  # fmt: skip
"""Options of ``weight_parallel`` that a communicator of the user's own replaces."""


def mistakes(
    weights: WeightParallelConfig,
    sequence: SequenceConfig,
    again: ActivationCheckpointConfig,
    *,
    ring: int,
    pipeline: bool,
    own: bool = False,
) -> Iterator[Mistake]:
    """All mistakes in the sections together, for ``parallelize`` and for the application.

    Args:
        ring: ranks of a ring of the mesh.
        pipeline: whether the model runs in a pipeline.
        own: a communicator of the user's own gathers the weights.
    """
    yield from _order(weights)
    yield from _ring(sequence, ring)
    yield from _recompute(weights, again)
    if pipeline and weights.unexpected_order == "learn":
        yield ("weight_parallel.unexpected_order", "parallel.pipeline"), LEARN_IN_A_PIPELINE
    for key in OF_ORDER if own else ():
        if weights.asks(key):
            yield (f"weight_parallel.{key}",), OWN_DECIDES


def require_none(found: Iterable[Mistake]) -> None:
    """Check that there are no :func:`mistakes`.

    Raises:
        ConfigError: lists all mistakes, one a line.
    """
    lines = [f"{keys[0]}: {text}" for keys, text in found]
    if lines:
        from internsp.config.words import listed

        raise ConfigError(listed("the configuration", lines))


def mistakes_of_blocks(again: ActivationCheckpointConfig, blocks: int) -> Iterator[Mistake]:
    """Mistakes in which blocks recompute, of a model with ``blocks`` blocks."""
    outside = [str(i) for i in again.blocks or () if i >= blocks]
    if outside:
        text = f"no block {', '.join(outside)}: the model has {blocks} blocks, counted from 0"
        yield ("activation_checkpoint.blocks", "model.layers"), text
    share = again.fraction * blocks
    if again.mode != "none" and again.blocks is None and share and not round(share):
        text = f"{again.fraction:g} of {blocks} blocks"
        text += " is less than one; raise it or set blocks instead"
        yield ("activation_checkpoint.fraction", "model.layers"), text


def _order(weights: WeightParallelConfig) -> Iterator[Mistake]:
    granularity, trigger = "weight_parallel.granularity", "weight_parallel.gather_before"
    triggers = "weight_parallel.gather_before_modules"
    by_module = weights.granularity == "module"
    # WP-13: an all-gather cannot start inside a compiled region.
    if weights.compile and by_module:
        text = 'gathers module by module; a compiled block needs "block"'
        yield (granularity, "weight_parallel.compile"), text
    if weights.gather_before == "rolling" and by_module:
        text = 'gathers weight by weight in any case; use granularity = "block"'
        yield (trigger, granularity), text
    inside = weights.gather_before not in ("qkv", "rolling") or bool(weights.gather_before_modules)
    if weights.gather_before == "rolling" and weights.gather_before_modules:
        text = 'unused with gather_before = "rolling"; remove them or choose another'
        yield (triggers, trigger), text
    elif weights.compile and inside:
        text = (
            'lies inside a compiled block; use gather_before = "qkv" or "rolling" and no '
            "gather_before_modules"
        )
        key = triggers if weights.gather_before_modules else trigger
        yield (key, "weight_parallel.compile"), text
    elif (
        weights.gather_before_modules
        and weights.asks("gather_before")
        and weights.gather_before != "attention"  # where the out-projection comes after it
    ):
        text = (
            f'"{weights.gather_before}" is unused with gather_before_modules, which replace it; '
            "remove one"
        )
        yield (trigger, triggers), text
    if by_module and weights.coalesce_bytes and weights.asks("coalesce_bytes"):
        text = 'unused with granularity = "module", which gathers each weight alone; leave it out'
        yield ("weight_parallel.coalesce_bytes", granularity), text


def _ring(sequence: SequenceConfig, ring: int) -> Iterator[Mistake]:
    form, inner = sequence.ring_form, sequence.inner_ring
    if form != "auto" and ring == 1:
        text = f'"{form}" of a ring of one rank: make a mesh with a ring, or use "auto"'
        yield ("sequence.ring_form", "sequence.ring"), text
    elif form == "double":
        choices = [n for n in range(2, ring) if ring % n == 0]
        if inner not in choices:
            text = f"{inner} does not split into smaller rings the {ring} ranks"
            remedy = f"choose one of {choices}" if choices else 'use ring_form = "ring"'
            yield ("sequence.inner_ring", "sequence.ring"), f"{text}; {remedy}"
    elif inner > 1:
        text = f'{inner} is of no effect with "{form}"; set ring_form = "double", or leave it out'
        yield ("sequence.inner_ring", "sequence.ring_form"), text


def _recompute(
    weights: WeightParallelConfig, again: ActivationCheckpointConfig
) -> Iterator[Mistake]:
    mode = "activation_checkpoint.mode"
    off = again.mode == "none"
    if off and "mode" not in again.model_fields_set:
        for key in ("fraction", "blocks", "reentrant"):
            if again.asks(key):
                modes = '"full"' if key == "reentrant" else '"full" or "selective"'
                text = f"no block recomputes; set mode to {modes}, or leave it out"
                yield (f"activation_checkpoint.{key}", mode), text
        if again.offload not in (None, 0):
            text = 'no block recomputes, so there is no saved input to offload; set mode to "full"'
            yield ("activation_checkpoint.offload", mode), text
    elif not off and again.blocks is not None and again.asks("fraction"):
        text = "unused where activation_checkpoint.blocks is given; leave one of them out"
        yield ("activation_checkpoint.fraction", "activation_checkpoint.blocks"), text
    elif not off and (again.blocks == () or (again.blocks is None and not again.fraction)):
        key = "fraction" if again.blocks is None else "blocks"
        more = "or raise it" if key == "fraction" else "or name some"
        text = f'"{again.mode}" recomputes no block then; set mode = "none", {more}'
        yield (f"activation_checkpoint.{key}", mode), text
    if again.mode == "selective" and again.reentrant:
        text = 'torch\'s reentrant form cannot be selective; set it to false, or mode = "full"'
        yield ("activation_checkpoint.reentrant", mode), text
    if again.tiles != 1 and weights.compile:
        text = "a compiled block cannot compute in tiles; set tiles = 1, or compile = false"
        yield ("activation_checkpoint.tiles", "weight_parallel.compile"), text
    if again.tiled_modules and again.tiles == 1:
        text = "unused with one tile; set activation_checkpoint.tiles"
        yield ("activation_checkpoint.tiled_modules", "activation_checkpoint.tiles"), text
