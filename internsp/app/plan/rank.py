"""What one pipeline rank holds and does in a planned step: chunks, schedule, bytes.

A step without a pipeline has one, with the whole model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from internsp.app.config import Config
from internsp.app.models.factory import device_type
from internsp.app.plan.offloaded import (
    AT_STEP,
    OffloadedMemory,
    exchange_buffer_bytes,
    stepping_bytes,
)
from internsp.app.plan.sequences import sequence_rows
from internsp.base.host import GRADIENTS, OPTIMIZER, WEIGHTS
from internsp.mesh import MeshShape
from internsp.pipeline.hooks import ComputeAction
from internsp.pipeline.simulate import simulate_with_launches
from internsp.schedule.chunk import ChunkLayout, Schedule, WeightLayout
from internsp.schedule.simulate import simulate
from internsp.structure.assign import ParameterSharding
from internsp.structure.dtypes import DTYPES
from internsp.wp.encode import encoder_bytes

SUMS = "gradient sums"
PASSING = "whole matrices in the step (at most)"


@dataclass(frozen=True)
class MatrixTraffic:
    """Whole-matrix optimizer steps of one chunk, on one rank.

    Attributes:
        exchanges: number of collectives in a step.
        received: bytes that a rank receives in them, on average.
        passing: upper bound of the bytes that the collectives and the step take: two unsharded
            matrices and the send buffers; without the optimizer's own temporary memory.
        state: bytes of the optimizer state on the device, without master weights; the average
            over ranks that own matrices.
    """

    exchanges: int
    received: int
    passing: int
    state: int

    @classmethod
    def of(
        cls, config: Config, shape: MeshShape, shardings: Sequence[ParameterSharding]
    ) -> MatrixTraffic:
        """Count the exchanges of the rounds of :mod:`internsp.optim.matrices`, and their bytes."""
        settings = config.optimizer
        item = max(DTYPES[config.train.dtype].itemsize, 4)
        kept = settings.moments
        # Number of kinds of tensors sent to an owner, and bytes an element, there and back.
        kinds, sent = (1, 2) if settings.name == "muon" else (2, item)
        rounds: dict[int, list[int]] = {}
        state, largest = 0.0, 0
        for each in shardings:
            parameter, axis = each.parameter, shape.axis(each.expert)
            if not parameter.requires_grad:
                continue
            over = axis.zero if each.unit is None else axis.zero * axis.size
            embeds = isinstance(each.owners[0].module, nn.Embedding | nn.EmbeddingBag)
            matrix = each.block >= 0 and parameter.dim() > 1 and not embeds
            by = settings.stepped_by(each.name, matrix)
            if OPTIMIZER not in each.options.offload:
                state += _values(parameter, by, kept) * item / over
            if by in ("muon", "adafactor"):
                stack = by == "muon" and parameter.dim() == 3
                count = len(parameter) if stack else 1
                numel = parameter.numel() // count
                rounds.setdefault(over, []).extend([numel] * count)
                largest = max(largest, numel)
        several = {over: numels for over, numels in rounds.items() if over > 1}
        received = sum(
            (kinds + 1) * sent * sum(numels) * (over - 1) // over**2
            for over, numels in several.items()
        )
        return cls(
            exchanges=sum(2 * math.ceil(len(numels) / over) for over, numels in several.items()),
            received=received,
            passing=(3 * kinds + 3) * sent * largest,
            state=math.ceil(state),
        )


def _values(parameter: nn.Parameter, by: str, kept: int) -> int:
    """Number of values that the optimizer keeps for an unsharded parameter."""
    if by == "adafactor":  # one a row and one a column
        if parameter.dim() < 2:
            return parameter.numel()
        *stack, rows, columns = parameter.shape
        return math.prod(stack) * (rows + columns)
    return parameter.numel() * (2 if by == "adamw" else kept)


@dataclass(frozen=True)
class ChunkOutline:
    """One chunk of a pipeline, or the whole model: its stage, blocks and shardings.

    Attributes:
        splits: whether it can split its backward into input and weight backward.
        recomputed: how many of its blocks recompute.
    """

    stage: int
    blocks: range
    plan: ChunkLayout
    shardings: tuple[ParameterSharding, ...]
    splits: bool
    recomputed: int


@dataclass(frozen=True)
class RankPlan:
    """What one pipeline rank does in a step.

    Attributes:
        actions: its computations, in their order.
        messages: number of hidden states and gradients received from other stages.
    """

    config: Config
    shape: MeshShape
    chunks: tuple[ChunkOutline, ...]
    actions: tuple[ComputeAction, ...]
    messages: int

    @property
    def schedule(self) -> Schedule:
        """Its collectives."""
        return self._simulated[0]

    @property
    def launched(self) -> Sequence[tuple[int, int]]:
        """Number of gathers and of reductions in each pass of a pipeline."""
        return self._simulated[1]

    @cached_property
    def _simulated(self) -> tuple[Schedule, list[tuple[int, int]]]:
        """When first asked: memory is planned without, and takes a fifth of the time."""
        plans = [chunk.plan for chunk in self.chunks]
        overlap = self.config.weight_parallel.overlap
        if self.shape.pipeline == 1:  # a loop does not know its next pass
            return simulate(plans[0], self.config.train.micro_batches, overlap), []
        return simulate_with_launches(self.actions, plans, overlap)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by component, of all of its chunks, without activations."""
        found: Counter[str] = Counter()
        for chunk in self.chunks:
            found.update(dict(self._memory(chunk)))
        return dict(found)

    @property
    def traffic(self) -> list[tuple[str, int]]:
        """(name, bytes) of what it exchanges for attention."""
        blocks = sum(len(chunk.blocks) for chunk in self.chunks)
        again = sum(chunk.recomputed for chunk in self.chunks)
        return sequence_rows(self.config, self.shape, blocks, again)

    def matrices(self) -> tuple[int, int]:
        """Exchanges of steps of whole matrices, and bytes that it receives in them, on average."""
        each = [MatrixTraffic.of(self.config, self.shape, one.shardings) for one in self.chunks]
        return sum(one.exchanges for one in each), sum(one.received for one in each)

    def _memory(self, outline: ChunkOutline) -> Iterator[tuple[str, int]]:
        """(component, bytes) of a chunk: slots are exact, reductions at most (WP-1, WP-6)."""
        config, shape, chunk = self.config, self.shape, outline.plan
        weights = [w for u in chunk.units for w in u.weights]
        shards = sum(w.shard_bytes for w in weights)
        train = config.train
        parts = max(train.micro_batches, 2 if train.batch_tokens else 1)  # as many as rows need
        off = OffloadedMemory.of(chunk, shape, config.optimizer.moments, parts, device_type(config))
        small = [a.parameter for a in outline.shardings if a.unit is None]
        small_bytes = sum(p.numel() * p.element_size() for p in small)
        size = DTYPES[config.train.dtype].itemsize
        wide = max(size, 4)
        elements = (shards - off.shards[GRADIENTS] + small_bytes) // size
        summed = config.weight_parallel.reduce == "backend"

        def moving(weight: WeightLayout) -> int:
            """Bytes in flight; of a weight group of one, which sends nothing, what is added."""
            more = weight.gradient_bytes if parts > 1 and weight.trainable else 0
            return weight.reduction_bytes(summed) if weight.reduce_bytes else more

        largest = sorted((sum(map(moving, u.weights)) for u in chunk.units), reverse=True)
        pending = sum(largest[: config.weight_parallel.reductions_in_flight])
        masters = int(size < 4)
        stated = [w for w in weights if OPTIMIZER not in w.offload]
        own = sum(w.shard_bytes for w in stated if not w.expert) + small_bytes
        owned = -(-(own // size) // shape.zero_size)
        owned += -(-(sum(w.shard_bytes for w in stated if w.expert) // size) // shape.experts.zero)
        whole = chunk.policy.accumulate_whole and parts > 1
        held = [w for w in weights if w.trainable and GRADIENTS not in w.offload]
        matrices = MatrixTraffic.of(config, shape, outline.shardings)
        values = owned * wide * config.optimizer.moments
        if config.optimizer.name in ("adafactor", "muon"):  # state by parameter
            values = matrices.state
        yield "weight shards", shards - off.shards[WEIGHTS]
        yield "replicated parameters", small_bytes
        yield "unsharded weights (slots, exact)", sum(chunk.slots())
        if any(w.encoding is not None for w in weights):
            yield "quantized shards in flight (exact)", encoder_bytes(chunk, self.schedule, shape)
        if slices := sum(w.slice_bytes for w in weights):
            yield "slices within near groups (exact)", slices
        yield "reductions in flight (at most)", pending
        yield "sums on their way to the optimizer (at most)", exchange_buffer_bytes(chunk, shape)
        yield SUMS, elements * wide
        name = "unsharded gradient sums (full accumulation)"
        yield name, sum(w.sum_bytes for w in held) if whole else 0
        yield "optimizer state", values + owned * wide * masters
        if matrices.passing:  # else no matrix is stepped unsharded
            yield PASSING, matrices.passing
        yield AT_STEP, stepping_bytes(chunk, shape)
        yield from off.rows()
