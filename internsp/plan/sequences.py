"""What the ranks of a sequence send each other for attention in one step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from internsp.config import Config
from internsp.mesh.sequence import HEADS, RING
from internsp.mesh.shape import MeshShape
from internsp.plan.dtypes import DTYPES
from internsp.sp.dispatch import FIXED, deal
from internsp.sp.ranges import Seen
from internsp.sp.routes import routes
from internsp.sp.stages import order


@dataclass(frozen=True)
class SequenceTraffic:
    """Of one rank, in one step: payload in bytes.

    Attributes:
        heads: received in the all-to-alls of ranks that share heads, at most.
        ring: keys, values and their gradients that the busiest rank of a ring sends, for one
            document a row.
    """

    heads: int
    ring: int

    @classmethod
    def of(cls, config: Config, shape: MeshShape, blocks: int, again: int) -> SequenceTraffic:
        """Of a rank with ``blocks`` blocks, ``again`` of which recompute attention."""
        axes = shape.sequence_axes
        rows = config.train.global_batch // shape.data
        heads = cls._exchanged(config, shape, rows) * (axes.heads - 1) // axes.heads
        around, home = (0, 0) if axes.ring == 1 else cls._around(config, shape, rows)
        passes = 2 * blocks + again
        return cls(heads * passes, around * passes + home * blocks)

    @staticmethod
    def _exchanged(config: Config, shape: MeshShape, rows: int) -> int:
        """Queries, keys, values there and the output back, of a rank's positions."""
        model = config.model
        heads = 2 * model.heads + 2 * (model.kv_heads or model.heads)
        features = heads * (model.head_dim or model.hidden_size // model.heads)
        tokens = rows * config.data.sequence_length // shape.sequence
        return tokens * features * DTYPES[config.train.dtype].itemsize

    @staticmethod
    def _around(config: Config, shape: MeshShape, rows: int) -> tuple[int, int]:
        """Of a block: keys and values, and their gradients on the way home."""
        model, length = config.model, config.data.sequence_length
        balance = config.parallel.balance if shape.pipeline == 1 else FIXED
        seen = Seen(True, None, ((length,),))
        way = config.weight_parallel.ring_form, config.weight_parallel.inner_ring
        found = routes(deal(length, shape.ring, balance, seen), seen, *way)
        heads = -(-(model.kv_heads or model.heads) // shape.sequence_axes.heads)
        features = 2 * heads * (model.head_dim or model.hidden_size // model.heads)
        one = rows * features * DTYPES[config.train.dtype].itemsize
        sent = max(route.sent_positions for route in found)
        return one * sent, one * max(route.returned_positions for route in found)

    def rows(self, shape: MeshShape) -> list[tuple[str, int]]:
        """(what, bytes) for a person, with the links where both kinds are used."""
        axes = shape.sequence_axes
        links = {HEADS: "", RING: ""}
        if axes.heads > 1 and axes.ring > 1:
            links = {name: ", near ranks" if name == axes.near else ", far ranks" for name in links}
        found = [
            (f"all-to-alls of heads{links[HEADS]}", self.heads),
            (f"keys and values around a ring{links[RING]} (busiest rank sends)", self.ring),
        ]
        return [row for row in found if row[1]]


def way_of_heads(config: Config, shape: MeshShape, device: str, split: bool) -> list[str]:
    """Lines that say how the attention of every block exchanges heads; none where it does not.

    Args:
        split: the pipeline's schedule has backwards in two parts.
    """
    if shape.sequence_axes.heads == 1:
        return []
    whole = "The attention of every block exchanges heads as a whole, in all-to-alls: "
    weights = config.weight_parallel
    if config.model.family == "hf":
        return [whole + "models of transformers attend by their own modules."]
    if device != "cpu":
        return [whole + f"in parts on the host only, not on {device}."]
    if not weights.exchange_in_parts:
        return [whole + "weight_parallel.exchange_in_parts = false."]
    if weights.compile:
        return [whole + "blocks are compiled."]
    made = order(0, shape.sequence_axes.heads, weights.overlap)
    products = "" if config.model.family == "llama" else " (the fused projection as a whole)"
    lines = [f"The attention of every block exchanges heads in parts{products}; on the first rank:"]
    for stage, actions in zip(made._fields, made, strict=True):
        told = ", ".join(action.line() for action in actions)
        lines.append(f"  {stage.replace('_', ' ')}: {told}")
    if split:
        lines.append("  stages whose backward is in two parts: as a whole, in all-to-alls")
    return lines
