"""The memory of activations on one rank, by a step of the model on tensors without memory.

A few short forwards and backwards of few blocks are observed (:mod:`internsp.plan.observe`). Memory
is linear in the number of blocks, and in the positions while tiles and chunks of the loss have a
fixed length: they give that of any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from internsp.config import Config
from internsp.config.kept import size_in_bytes
from internsp.factory import device_type
from internsp.host import pinned
from internsp.layers.offload import offloaded_blocks
from internsp.layers.tiles import ROWS
from internsp.mesh import MeshShape
from internsp.mesh.sequence import HEADS, RING
from internsp.plan.dtypes import DTYPES
from internsp.plan.observe import Observed, Place, observe
from internsp.plan.tiles import tile_tokens

_LEAST = 512  # positions of the shortest step; small ones round to ROWS
_FACTORS = (1, 4, 16, 32)  # times the shortest, of the steps; what is longer is on the last's line


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank in a forward and backward of one micro-batch, of the model or of a chunk.

    Attributes:
        batch: token ids, labels and positions.
        kept: on the device between forward and backward.
        forward: beside that at the peak of a forward.
        working: beside that at the peak, in the backward of a block or of the loss, what is in
            ``moving`` left out.
        between: after the gradients of inputs and before those of weights, where they come apart.
        host: in host memory, at the end of forward, as torch takes it for a device.
        away: blocks whose activations are in host memory.
        block: what one keeps on the device that is not.
        moving: beside ``kept`` at the peak: what operators have made that exchange heads or go
            round a ring.
        before: beside ``kept`` at the peaks of a forward and the loss, and of the last norm.
        pieces: of one block in host memory.
    """

    batch: int
    kept: int
    forward: int
    working: int
    between: int
    host: int
    away: int
    block: int
    moving: Mapping[str, int]
    before: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()

    def highest(self) -> Activations:
        """With ``working`` and ``moving`` of the highest peak."""
        highest = max(self.before, default=0)
        if highest <= self.working + sum(self.moving.values()):
            return self
        return replace(self, working=highest, moving=dict.fromkeys(self.moving, 0))

    def rows(self, micro_batches: int) -> list[tuple[str, int]]:
        """(component, bytes) on the device, in a step of so many micro-batches one by one."""
        found = [
            ("token ids, labels and positions", micro_batches * self.batch),
            ("activations that are kept", self.kept),
            ("block or loss at work", self.working),
        ]
        return found + moving_rows(self.moving)


def moving_rows(moving: Mapping[str, int]) -> list[tuple[str, int]]:
    """(component, bytes) of what is on its way."""
    names = {HEADS: "exchanges of heads", RING: "keys and values around a ring"}
    return [(name, moving[kind]) for kind, name in names.items() if moving.get(kind)]


class ActivationModel:
    """Of one configuration, for any length of its sequences.

    Args:
        place: which chunk of a pipeline; ``None``: the whole model.
        layers, recomputing: blocks of the chunk, and how many of them recompute.
    """

    def __init__(
        self,
        config: Config,
        shape: MeshShape,
        place: Place | None = None,
        layers: int | None = None,
        recomputing: int | None = None,
    ) -> None:
        self.config, self.shape = config, shape
        self.place = place or Place(shape)
        self.rows = config.train.global_batch // (config.train.micro_batches * shape.data)
        self.layers = config.model.layers if layers is None else layers
        again = len(config.activation_checkpoint.selected(self.layers))
        self.recomputing = again if recomputing is None else recomputing
        self._steps: dict[int, Activations] = {}

    def at(self, length: int) -> Activations:
        """For sequences of ``length`` tokens over all ranks."""
        local = -(-length // self.shape.sequence)
        # Where a phase's peak is changes with the length: a line through the lengths next to it.
        lengths = [self._least() * factor for factor in _FACTORS]
        above = next((i for i, each in enumerate(lengths) if i and each >= local), len(lengths) - 1)
        small, large = lengths[above - 1], lengths[above]
        found = _line((small, large), [self._step(small), self._step(large)], local)
        if found.pieces and device_type(self.config) != "cpu":
            taken = sum(map(pinned, found.pieces))
            found = replace(found, host=found.host * taken // sum(found.pieces))
        return (self._with_formulas(found, local) if self._formulas else found).highest()

    def _least(self) -> int:
        """Positions of the shortest step: whole tiles, where their length is fixed, and chunks."""
        tiles = self.config.activation_checkpoint.tiles
        if tiles == "auto":
            return self._tile
        return max(_LEAST, -(-self.config.train.loss_chunk // self.rows), ROWS * tiles)

    @property
    def _tile(self) -> int:
        """Positions of a tile, where their length is fixed."""
        return -(-tile_tokens(self.config) // self.rows // ROWS) * ROWS

    def _tiles(self, positions: int) -> int:
        tiles = self.config.activation_checkpoint.tiles
        return positions // self._tile if tiles == "auto" else tiles

    def _step(self, positions: int) -> Activations:
        if positions not in self._steps:
            self._steps[positions] = self._deep(positions, self._tiles(positions))
        return self._steps[positions]

    def _deep(self, positions: int, tiles: int) -> Activations:
        """A step of all blocks, from steps of two and three recomputing and other ones."""
        offload = self.config.activation_checkpoint.offload
        layers, recomputing = self.layers, self.recomputing

        def few(
            layers: int, again: int, offload: int | None = None, backward: bool = True
        ) -> Observed:
            place = self.place
            return observe(
                self.config, self.rows, positions, tiles, layers, again, offload, place, backward
            )

        plain = 0
        if recomputing < layers:
            peaks = not recomputing
            two = few(2, 0, backward=peaks)
            three = few(3, 0, backward=peaks and self.place.split)
            plain = three.kept - two.kept
        if not recomputing:
            found = _activations(two, (layers - 2) * plain)
            each = three.between - two.between
            return replace(found, between=two.between + (layers - 2) * each)
        step = few(2, 2, 1) if offload else None
        away = offloaded_blocks(offload, recomputing)
        limit = size_in_bytes(offload) if isinstance(offload, str) else None
        if step is not None and step.host and limit is not None:
            away = min(away, limit // sum(step.host))
        base = step if away else None
        whole = few(2, 2, backward=base is None)  # of peaks, one step's are asked for
        block = few(3, 3, backward=False).kept - whole.kept
        stays = recomputing - 2 - max(away - 1, 0)
        more = stays * block + (layers - recomputing) * plain
        return _activations(base or whole, more, base.host if base else (), away, block)

    @property
    def _formulas(self) -> bool:
        """Whether what is on its way is not seen: transformers' models run as on one rank."""
        return self.config.model.family == "hf" and self.shape.sequence > 1

    def _with_formulas(self, found: Activations, local: int) -> Activations:
        moving = {HEADS: self._exchanged(local), RING: self._around(local)}
        return replace(found, moving=moving)

    def _exchanged(self, local: int) -> int:
        """At most: copies of queries, keys and values that exchanges of heads have in flight."""
        shares = self.shape.sequence // self.shape.ring
        if shares == 1:
            return 0
        model = self.config.model
        heads = model.heads + 2 * (model.kv_heads or model.heads)
        features = heads * (model.head_dim or model.hidden_size // model.heads)
        size = DTYPES[self.config.weight_parallel.compute_dtype or self.config.train.dtype].itemsize
        return 2 * self.rows * local * features * size

    def _around(self, local: int) -> int:
        """At most: in a step of the ring's backward (:mod:`internsp.sp.ring`), sums of gradients
        for queries and, of two parts, for keys and values, wide; a part of these that has come and
        gradients that come home; the next part, where there is one (two of a double ring, all that
        are sent directly); gradients that leave, where they are narrower than their sums."""
        ring, model = self.shape.ring, self.config.model
        if ring == 1:
            return 0
        dtype = DTYPES[self.config.weight_parallel.compute_dtype or self.config.train.dtype]
        size, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
        form = self.config.weight_parallel.ring_form
        more = {"double": 2, "direct": ring - 2}.get(form, 1)
        blocks = 4 + 2 * min(more, ring - 2) + 2 * (size < wide)
        features = model.head_dim or model.hidden_size // model.heads
        each = model.heads * wide + (model.kv_heads or model.heads) * (4 * wide + blocks * size)
        return self.rows * local * features * each


def _activations(
    seen: Observed, more: int, pieces: tuple[int, ...] = (), away: int = 0, block: int = 0
) -> Activations:
    """What was seen, with ``more`` bytes that are kept."""
    *before, above = (max(peak - seen.kept, 0) for peak in seen.phases)
    moving = {}
    for kind, nbytes in seen.moving.items():
        moving[kind] = min(nbytes, above)
        above -= moving[kind]
    return Activations(
        seen.batch, seen.kept + more, seen.forward - seen.kept, above, 0, away * sum(pieces), away,
        block, moving, tuple(before), pieces,
    )  # fmt: skip


def _line(at: tuple[int, int], steps: Sequence[Activations], wanted: int) -> Activations:
    """What two lengths say of a third."""
    low, high = steps

    def line(small: int, large: int) -> int:
        return round(large + (large - small) / (at[1] - at[0]) * (wanted - at[1]))

    names = ("batch", "kept", "forward", "working", "between", "host", "block")
    values = {name: line(getattr(low, name), getattr(high, name)) for name in names}
    moving = {kind: line(low.moving[kind], high.moving[kind]) for kind in high.moving}
    before = tuple(line(*each) for each in zip(low.before, high.before, strict=True))
    pieces = tuple(line(*each) for each in zip(low.pieces, high.pieces, strict=False))
    return Activations(moving=moving, before=before, pieces=pieces, away=high.away, **values)
