"""Estimates one rank's activation memory from steps of the model without values.

A few forwards and backwards with few blocks and short sequences are measured
(:mod:`internsp.app.plan.observe`). Memory is linear in the number of blocks, and in the number of
positions while tiles and chunks of the loss have a fixed length, so these measurements determine
the memory of any number of blocks and any length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from internsp.app.config import Config
from internsp.app.config.tiles import tile_tokens
from internsp.app.models.factory import device_type
from internsp.app.plan.observe import ModelPart, Observations, Observed
from internsp.app.plan.step import shown_kinds
from internsp.base.host import pinned_bytes
from internsp.mesh.sequence import HEADS, RING
from internsp.modules.offload import offloaded_blocks
from internsp.modules.tiles import ROWS
from internsp.structure.dtypes import DTYPES

_SHORTEST = 512  # positions of the shortest step; shorter ones would be rounded to ROWS
# Lengths of the measured steps as multiples of the shortest; longer lengths are extrapolated.
_FACTORS = (1, 4, 16, 32)


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank in the forward and backward of one micro-batch, for a model or one chunk.

    Attributes:
        batch: token ids, labels and positions.
        kept: on the device between forward and backward.
        freed: of ``kept``, what is freed before the last backward of a block.
        forward: in addition to ``kept`` at the peak of a forward.
        working: in addition to ``kept`` and ``exchanges`` at the peak, which is in the backward of
            a block or of the loss.
        between_parts: between input backward and weight backward, where they are separate.
        host: in host memory at the end of forward, rounded up as torch's pinned allocator does
            for a device.
        offloaded: number of blocks whose activations are in host memory, without a limit.
        block: what one recomputing block that is not offloaded keeps on the device.
        exchanges: at the peak, what the operators that exchange heads, or send keys and values
            around a ring, have allocated; by kind.
        earlier_peaks: in addition to ``kept`` at the peaks of forward and loss, and of the last
            norm.
        host_pieces: what one block keeps in host memory, by tensor.
    """

    batch: int
    kept: int
    forward: int
    working: int
    between_parts: int
    host: int
    offloaded: int
    block: int
    exchanges: Mapping[str, int]
    freed: int = 0
    earlier_peaks: tuple[int, ...] = ()
    host_pieces: tuple[int, ...] = ()


def exchange_rows(exchanges: Mapping[str, int]) -> list[tuple[str, int]]:
    """(component, bytes) of the exchanges of heads and of the ring."""
    names = {HEADS: "exchanges of heads", RING: "keys and values around a ring"}
    return [(name, exchanges[kind]) for kind, name in names.items() if exchanges.get(kind)]


class ActivationModel:
    """Activation memory of one configuration, for any sequence length.

    Args:
        model_part: the model, or which chunk of a pipeline.
        kinds: of its blocks (:func:`internsp.app.plan.step.block_kinds`).
        recomputing: how many of them recompute, the first ones.
        observations: what was measured before, for models that differ in how weights are sharded.
    """

    def __init__(
        self,
        config: Config,
        model_part: ModelPart,
        kinds: Sequence[int],
        recomputing: int,
        observations: Observations,
    ) -> None:
        self.config, self.shape, self.observations = config, model_part.shape, observations
        self.model_part, self.kinds, self.recomputing = model_part, kinds, recomputing
        self.rows = config.train.global_batch // (config.train.micro_batches * self.shape.data)
        self._step = cache(self._all_blocks)

    def at(self, length: int) -> Activations:
        """Activation memory for sequences of ``length`` tokens, counted over all ranks.

        That of the configured length is measured, unless it is very long, and of others
        interpolated.
        """
        local = -(-length // self.shape.sequence)
        lengths = [self._shortest() * factor for factor in _FACTORS]
        whole = self.config.activation_checkpoint.tiles != "auto" or local % self._tile == 0
        configured = length == self.config.data.sequence_length and local <= lengths[-1]
        if local in lengths or (configured and whole):
            found = self._step(local)
        else:
            # Which operation is the peak depends on the length: between adjacent lengths.
            after = (i for i, each in enumerate(lengths) if i and each >= local)
            above = next(after, len(lengths) - 1)
            small, large = lengths[above - 1], lengths[above]
            found = _interpolate((small, large), self._step(small), self._step(large), local)
        if found.host_pieces and device_type(self.config) != "cpu":
            taken = sum(map(pinned_bytes, found.host_pieces))
            found = replace(found, host=found.host * taken // sum(found.host_pieces))
        if self.config.model.family == "hf" and self.shape.sequence > 1:  # run as on one rank
            found = replace(found, exchanges=self._exchange_bytes(local))
        highest = max(found.earlier_peaks, default=0)
        if highest > found.working + sum(found.exchanges.values()):  # whichever peak is highest
            return replace(found, working=highest, exchanges=dict.fromkeys(found.exchanges, 0))
        return found

    def _shortest(self) -> int:
        """Positions of the shortest step: complete tiles (if their length is fixed) and chunks."""
        tiles = self.config.activation_checkpoint.tiles
        if tiles == "auto":
            return self._tile
        return max(_SHORTEST, -(-self.config.train.loss_chunk // self.rows), ROWS * tiles)

    @property
    def _tile(self) -> int:
        """Positions of a tile, where the length of tiles is fixed."""
        return -(-tile_tokens(self.config) // self.rows // ROWS) * ROWS

    def _all_blocks(self, positions: int) -> Activations:
        """A step of all blocks, computed from steps of few blocks of each kind."""
        tiles: Any = self.config.activation_checkpoint.tiles
        if tiles == "auto":
            tiles = positions // self._tile
        offload = self.config.activation_checkpoint.offload
        again, plain = self.kinds[: self.recomputing], self.kinds[self.recomputing :]

        def measure(
            kinds: tuple[int, ...], again: bool, offload: int | None = None, backward: bool = True
        ) -> Observed:
            count = len(kinds)
            return self.observations.of(
                self.config, self.rows, positions, tiles, count, count * again, offload,
                replace(self.model_part, kinds=kinds), backward,
            )  # fmt: skip

        def kept(counts: Mapping[int, int], again: bool, known: Mapping[int, int]) -> int:
            """What so many blocks of each kind keep; of some it is ``known``."""
            each = (
                number * known[kind] if kind in known
                else number * measure((kind, kind), again, backward=False).block
                for kind, number in counts.items() if number
            )  # fmt: skip
            return sum(each)

        shown = shown_kinds(again or plain)
        others = Counter(again or plain)
        others.subtract(shown)
        if not again:
            step = measure(shown, False)
            more = kept(others, False, {shown[-1]: step.block})
            found = _activations(step, more, (len(shown) - 1) * step.block)
            between = step.between_parts
            if self.model_part.split:
                for kind, number in others.items():
                    if number:
                        longer = measure((*shown, kind), False).between_parts
                        between += number * (longer - step.between_parts)
            return replace(found, between_parts=between if self.model_part.split else 0)
        one = measure(shown, True, 1) if offload else None
        offloaded = offloaded_blocks(offload, self.recomputing)
        base = one if offloaded else None
        whole = measure(shown, True, backward=base is None)  # only one step has to measure peaks
        block = whole.block
        more = kept(others, True, {shown[-1]: block}) - max(offloaded - 1, 0) * block
        more += kept(Counter(plain), False, {})
        freed = (len(shown) - 1) * block
        return _activations(base or whole, more, freed, base.host if base else (), offloaded, block)

    def _exchange_bytes(self, local: int) -> dict[str, int]:
        """Upper bounds of queries, keys and values that exchanges of heads have in flight, and of a
        step of the ring's backward (:mod:`internsp.sp.ring`).

        It holds, in fp32 or wider, the gradient sums of queries and of two parts' keys and values;
        the received part of keys and values, and gradients returned to this rank; the next parts
        (none, one, two of a double ring, or all where parts are sent directly); and copies of the
        gradients that are sent, where their dtype is narrower than that of their sums.
        """
        model, ring, found = self.config.model, self.shape.ring, {HEADS: 0, RING: 0}
        kv, features, positions = model.key_value_heads, model.head_size, self.rows * local
        dtype = DTYPES[self.config.weight_parallel.compute_dtype or self.config.train.dtype]
        size, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
        if self.shape.sequence > ring:
            found[HEADS] = 2 * positions * (model.heads + 2 * kv) * features * size
        if ring > 1:
            more = {"double": 2, "direct": ring - 2}.get(self.config.sequence.ring_form, 1)
            blocks = 4 + 2 * min(more, ring - 2) + 2 * (size < wide)
            each = model.heads * wide + kv * (4 * wide + blocks * size)
            found[RING] = positions * features * each
        return found


def _activations(
    observed: Observed,
    more: int,
    freed: int,
    host_pieces: tuple[int, ...] = (),
    offloaded: int = 0,
    block: int = 0,
) -> Activations:
    """The measurement ``observed`` as :class:`Activations`, with ``more`` bytes in ``kept``.

    Args:
        freed: of what was measured, what its blocks keep but for the last one in backward.
    """
    *earlier_peaks, above = (max(peak - observed.kept, 0) for peak in observed.phases)
    exchanges = {}
    for kind, nbytes in observed.exchanges.items():
        exchanges[kind] = min(nbytes, above)
        above -= exchanges[kind]
    return Activations(
        observed.batch, observed.kept + more, observed.forward - observed.kept, above, 0,
        offloaded * sum(host_pieces), offloaded, block, exchanges, more + freed,
        tuple(earlier_peaks), host_pieces,
    )  # fmt: skip


def _interpolate(
    at: tuple[int, int], low: Activations, high: Activations, wanted: int
) -> Activations:
    """Interpolate (or extrapolate) the steps of the two lengths ``at`` linearly to ``wanted``."""

    def line(small: Any, large: Any) -> Any:
        if isinstance(large, tuple):
            return tuple(map(line, small, large))
        if isinstance(large, Mapping):
            return {kind: line(small[kind], large[kind]) for kind in large}
        return round(large + (large - small) / (at[1] - at[0]) * (wanted - at[1]))

    values = {name: line(getattr(low, name), value) for name, value in vars(high).items()}
    return replace(high, **{**values, "offloaded": high.offloaded})
