"""Bytes that the ranks of a sequence group exchange for attention in one step. Pure."""

from __future__ import annotations

from functools import lru_cache

from internsp.app.config import Config
from internsp.mesh.sequence import HEADS, RING
from internsp.mesh.shape import MeshShape
from internsp.sp.dispatch import FIXED_BALANCE, balance_ranges
from internsp.sp.ranges import MaskSpec
from internsp.sp.routes import Traffic, traffic
from internsp.structure.dtypes import DTYPES


def sequence_rows(
    config: Config, shape: MeshShape, blocks: int, recomputed: int
) -> list[tuple[str, int]]:
    """(name, bytes) of what one rank with ``blocks`` blocks exchanges for attention in one step.

    Of all-to-alls an upper bound of what it receives; of a ring the keys, values and their
    gradients that the busiest rank sends, if each row is one document. No row without exchanges;
    with the links if both kinds are used.

    Args:
        recomputed: how many of the blocks are checkpointed.
    """
    model, axes = config.model, shape.sequence_axes
    rows, size = config.train.global_batch // shape.data, DTYPES[config.train.dtype].itemsize
    kv, features = model.key_value_heads, model.head_size
    again = config.activation_checkpoint.mode == "full"  # selective keeps what attention sent
    passes = 2 * blocks + again * recomputed
    links = {HEADS: "", RING: ""}
    if axes.heads > 1 and axes.ring > 1:
        links = {name: ", near ranks" if name == axes.near else ", far ranks" for name in links}
    found = []
    if axes.heads > 1:  # queries, keys, values and output of a rank's positions
        tokens = rows * config.data.sequence_length // shape.sequence
        whole = tokens * 2 * (model.heads + kv) * features * size
        nbytes = whole * (axes.heads - 1) // axes.heads * passes
        found.append((f"all-to-alls of heads{links[HEADS]}", nbytes))
    if axes.ring > 1:
        one, sent = 2 * rows * -(-kv // axes.heads) * features * size, ring_traffic(config, shape)
        nbytes = one * (max(sent.sent) * passes + max(sent.returned) * blocks)
        name = f"keys and values around a ring{links[RING]} (busiest rank sends)"
        found.append((name, nbytes))
    return found


def balance_of(config: Config, shape: MeshShape) -> str:
    """How positions are shared out over a ring."""
    return config.sequence.balance if shape.pipeline == 1 else FIXED_BALANCE


def ring_traffic(config: Config, shape: MeshShape) -> Traffic:
    """What the ranks of a ring send, if each row is one document."""
    way = config.sequence.ring_form, config.sequence.inner_ring
    return _traffic(config.data.sequence_length, shape.ring, balance_of(config, shape), *way)


@lru_cache(maxsize=64)  # a search plans many layouts with the same ring
def _traffic(length: int, ring: int, balance: str, form: str, inner: int) -> Traffic:
    spec = MaskSpec(True, None, ((length,),))
    return traffic(balance_ranges(length, ring, balance, spec), spec, form, inner)


def head_exchange_lines(config: Config, shape: MeshShape, device: str, split: bool) -> list[str]:
    """Lines that describe how attention exchanges heads; none if no heads are exchanged.

    Args:
        split: the pipeline's schedule splits backwards into input and weight backward.
    """
    if shape.sequence_axes.heads == 1:
        return []
    all_to_all = "The attention of every block exchanges heads as a whole, in all-to-alls: "
    weights = config.weight_parallel
    if config.model.family == "hf":
        return [all_to_all + "models of transformers attend by their own modules."]
    if device != "cpu":
        return [all_to_all + f"in parts on the host only, not on {device}."]
    if not config.sequence.exchange_in_parts:
        return [all_to_all + "sequence.exchange_in_parts = false."]
    if weights.compile:
        return [all_to_all + "blocks are compiled."]
    from internsp.sp.gloo.stages import exchange_order

    made = exchange_order(0, shape.sequence_axes.heads, weights.overlap)
    if config.model.family == "deepseek":
        return [all_to_all + "latent attention makes its keys from two products."]
    products = "" if config.model.family != "internlm2" else " (the fused projection as a whole)"
    lines = [f"The attention of every block exchanges heads in parts{products}; on the first rank:"]
    for stage, actions in zip(made._fields, made, strict=True):
        text = ", ".join(action.line() for action in actions)
        lines.append(f"  {stage.replace('_', ' ')}: {text}")
    if split:
        lines.append("  stages whose backward is in two parts: as a whole, in all-to-alls")
    return lines
