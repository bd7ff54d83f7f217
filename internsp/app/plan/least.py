"""A lower bound of what :class:`~internsp.app.plan.longest.MemoryBudget` counts, in microseconds.

A search leaves out what does not fit by it; what is left is counted by the budget itself. Weights
are counted from the model; what a block keeps, and what one that is computed again works in, is
measured once for each way to recompute and to share sequences, and once where a backward is split.
What only adds is left out: small weights, and what other blocks work in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from internsp.app.config import Config
from internsp.app.plan.observe import WHOLE, ModelPart, Observations, Observed
from internsp.app.plan.step import make_plan, shown_kinds
from internsp.app.plan.workload import Workload
from internsp.mesh import MeshShape
from internsp.pipeline.chunks import partition_costs
from internsp.pipeline.pipeline import can_split_backward

_MEASURED = (1024, 2048)  # positions of measured steps
_ENDS = (2048, 1024, 64)  # of those that tell what the loss works in
_SIZES = {"fp32": 4, "fp64": 8}


class _Block(NamedTuple):
    """Elements of a block, and of its matrices, by which blocks are divided among stages."""

    dense: int = 0
    experts: int = 0
    matrices: int = 0


class _Kept(NamedTuple):
    """Bytes of a token between forward and backward, without what is there for any length.

    Attributes:
        block: of one more block.
        more: of a stage, beside those of its blocks; the first may keep less than others.
    """

    block: float
    more: float


class _Work(NamedTuple):
    """Bytes at work in a backward, beside those that are kept, at the measured positions."""

    few: float
    more: float

    def at(self, tokens: int) -> float:
        """Bytes at least: the peak is the highest of several that are linear in the tokens."""
        low, high = _MEASURED
        if low < tokens < high:
            return min(self)
        return max(0.0, self.few + (self.more - self.few) / (high - low) * (tokens - low))


class Moment(NamedTuple):
    """When a pipeline rank has most micro-batches, most gradients of weights that are put off, or
    most that it has sent.

    Attributes:
        whole: of each chunk, micro-batches that have had no backward.
        between: of each chunk, those between the two parts of their backward.
        next: the chunk that has a backward then.
        sent: of each chunk, those that have had theirs, where messages are held to the step's end.
    """

    whole: Sequence[int]
    between: Sequence[int]
    next: int
    sent: Sequence[int]


class Stages(NamedTuple):
    """How blocks are divided among pipeline ranks."""

    ranks: int
    chunks: int
    v_shaped: bool
    expert: int

    @classmethod
    def of_load(cls, load: Workload) -> Stages:
        """Those of a workload."""
        degrees = load.degrees
        return cls(degrees.pipeline, degrees.interleave, degrees.v_shaped, degrees.expert)

    def of(self, rank: int) -> Sequence[int]:
        """The stages of a rank, ascending."""
        if self.v_shaped:
            return rank, 2 * self.ranks - 1 - rank
        return range(rank, self.ranks * self.chunks, self.ranks)

    def moments(self, rank: int, number: int) -> list[Moment]:
        """Of torch's orders of 1F1B, Interleaved1F1B and ZBVZeroBubble, of so many micro-batches:
        each chunk's first backward; of a V that of its turn, and when its first chunk has its last.
        Of several chunks, those after the last forward and the last of all.
        """
        behind = self.ranks - 1 - rank
        none = [0] * self.chunks
        end = Moment(none, none, 0, [number - 1, *[number] * (self.chunks - 1)])
        if self.v_shaped:
            turn = min(self.ranks + behind, number), min(rank + 1, number)
            total = max(2 * self.ranks - 1, number)  # torch leaves out the later ones

            def among(first: int, end: int) -> int:
                return max(0, min(end, number) - first)

            first = total - self.ranks
            left, put_off = among(first + rank, total), among(first, first + rank)
            between = put_off, among(total - rank, total)
            ended = Moment((left, 0), between, 0 if left else 1, none)
            last = [min(self.ranks, number), min(rank + 1, number)]
            return [
                Moment(turn, none, 1, none), ended, end,
                Moment(last, none, 1, [number - some for some in last]),
            ]  # fmt: skip
        if self.chunks == 1:
            return [Moment((min(behind + 1, number),), none, 0, none)]
        passes = min((self.chunks - 1) * self.ranks + 2 * behind + 1, self.chunks * number)
        each = Counter(one // self.ranks % self.chunks for one in range(passes))
        last = [each[chunk] for chunk in range(self.chunks)]
        found = [  # of later chunks some have had theirs
            Moment([*last[: chunk + 1], *none][: self.chunks], none, chunk, none)
            for chunk in range(self.chunks)
        ]
        chunk = 0 if last[0] > self.ranks else self.chunks - 1
        return [*found, Moment(last, none, chunk, [number - some for some in last]), end]


class LeastBytes:
    """Of all layouts of one configuration.

    Args:
        config: its model, sequence and dtypes, with all degrees 1; a layout says the rest.
        base: its workload.
        near_ranks: of a machine.
        observations: what was measured already, for a budget, too.
    """

    def __init__(
        self, config: Config, base: Workload, near_ranks: int, observations: Observations
    ) -> None:
        self.config, self.base, self.observations = config, base, observations
        self.near_ranks = near_ranks
        plan = make_plan(config, 1)
        self.kinds = plan.kinds
        blocks = [[0, 0, 0] for _ in plan.kinds]
        outer: Counter[str] = Counter()
        shardings = plan.ranks[0].chunks[0].shardings
        cut = [one for one in shardings if one.unit is not None]
        owners = nn.ModuleList(owner.module for one in cut for owner in one.owners)
        known = {id(one.parameter) for one in cut}
        self.splits = can_split_backward(owners, known, config.weight_parallel.compile)
        for one in shardings:
            elements = math.prod(one.shape)
            if one.unit is None:
                continue
            if one.block < 0:
                outer[one.unit] += elements
                continue
            blocks[one.block][one.expert] += elements
            blocks[one.block][2] += elements if len(one.shape) > 1 and not one.expert else 0
        self.blocks = [_Block(*each) for each in blocks]
        embedding = plan.chunk.embedding
        self.first = 0 if embedding is None else outer.pop(embedding.name, 0)
        self.last = max(outer.values(), default=0)
        # Rules put any weight anywhere, in any dtype.
        self.divided = not config.weight_parallel.rules
        self._split = lru_cache(maxsize=None)(self._split_into)
        self._weights = lru_cache(maxsize=None)(self._weight_bytes)
        self._activations = lru_cache(maxsize=None)(self._activation_bytes)
        self._steps = lru_cache(maxsize=None)(self._two_blocks)
        self._halves = lru_cache(maxsize=None)(self._halves_bytes)
        self._loss = lru_cache(maxsize=None)(self._loss_bytes)

    def of(self, load: Workload) -> float:
        """Bytes that the fullest rank needs at least."""
        degrees, stages = load.degrees, Stages.of_load(load)
        once = load.micro_batches == 1 and not self.config.train.batch_tokens
        fixed = self._weights(
            stages, degrees.sharded, degrees.optimizer, degrees.expert_shards,
            degrees.expert_optimizer, "optimizer" in load.offload, once,
        )  # fmt: skip
        moving = self._activations(
            stages, degrees.context, degrees.ring, load.rows, load.micro_batches, load.recompute,
            load.tiled, "activations" in load.offload,
        )  # fmt: skip
        # Sums of one micro-batch are made while its activations are freed, from gradients that a
        # weight group of one keeps as they are.
        size, wide = _SIZES.get(self.base.dtype, 2), self.base.habits.sum_bytes
        first = (size if degrees.sharded == 1 else wide) / wide / len(self.blocks)
        one = stages.ranks == 1 and once
        return max(
            own + (max(sums, others + sums * first) if one else sums + others)
            for (own, sums), others in zip(fixed, moving, strict=True)
        )

    def _split_into(self, stages: Stages) -> list[list[range]]:
        """Blocks of each chunk of each pipeline rank."""
        if stages.ranks == 1:
            return [[range(len(self.blocks))]]
        costs = [float(one.matrices + one.experts // stages.expert) for one in self.blocks]
        head = self.last or self.first
        found = partition_costs(costs, stages.ranks * stages.chunks, 4 * head / 3)
        return [[found[stage] for stage in stages.of(rank)] for rank in range(stages.ranks)]

    def _ends(self, stages: Stages, rank: int) -> list[int]:
        """Elements of the embedding and of the head, if a pipeline rank has them."""
        own = stages.of(rank)
        first, last = 0 in own, stages.ranks * stages.chunks - 1 in own
        tied = not self.last
        ends = [self.first] * (first or (last and tied)) + [self.last] * (last and not tied)
        return [one for one in ends if one]

    def _weight_bytes(
        self, stages: Stages, over: int, owners: int, few: int, expert_owners: int, away: bool,
        once: bool,
    ) -> list[tuple[float, float]]:  # fmt: skip
        """Of each pipeline rank, without activations, and its gradient sums.

        Args:
            over, few: ranks over which a weight, and an expert, is sharded.
            owners, expert_owners: ranks that share the state of a shard.
            away: the optimizer's state is in host memory.
            once: a step has one backward.
        """
        if not self.divided:
            return [(0.0, 0.0)] * stages.ranks
        weights, habits = self.config.weight_parallel, self.base.habits
        size = _SIZES.get(self.base.dtype, 2)
        few = max(1, few)
        reducing = self._reduction_bytes(over, few, once)
        state = habits.state_bytes
        if away or self.config.optimizer.name in ("adafactor", "muon"):  # by parameter
            state = 0
        found = []
        for rank, chunks in enumerate(self._split(stages)):
            ends, nbytes, sums = self._ends(stages, rank), 0.0, 0.0
            for number, blocks in enumerate(chunks):
                outer = ends if number == 0 else []  # those of a V's other chunk add no less
                dense = [self.blocks[i].dense / over for i in blocks]
                experts = [self.blocks[i].experts / stages.expert / few for i in blocks]
                beside = [one / over for one in outer]
                shared, own = sum(dense) + sum(beside), sum(experts)
                nbytes += (shared + own) * habits.shard_bytes
                sums += (shared + own) * habits.sum_bytes
                nbytes += (shared / owners + own / expert_owners) * state
                moved = [
                    a * over * (over > 1) + b * few * (few > 1)
                    for a, b in zip(dense, experts, strict=True)
                ]
                beyond = [*outer] if over > 1 else []
                slots = min(1 + weights.prefetch_depth, len(moved))
                nbytes += (max(moved) * slots + sum(beyond)) * size
                reduced = [
                    a * over * reducing[0] + b * few * reducing[1]
                    for a, b in zip(dense, experts, strict=True)
                ]
                reduced += [one * reducing[0] for one in outer]
                nbytes += sum(sorted(reduced, reverse=True)[: weights.reductions_in_flight])
                exchanged = _buffers([*dense, *beside], owners) + _buffers(experts, expert_owners)
                nbytes += exchanged * habits.sum_bytes
            found.append((nbytes, sums))
        return found

    def _reduction_bytes(self, over: int, few: int, once: bool) -> list[float]:
        """Bytes of the buffers in which an element of a gradient is reduced, of a weight and of an
        expert (:meth:`internsp.schedule.chunk.WeightLayout.reduction_bytes`); in a weight group of
        one, of a gradient that waits to be added to others."""
        size, near = self.base.habits.reduce_bytes, self._near(over, few)
        found = []
        for ranks in (over, few):
            each = 1.0 if self.base.habits.reduces_in_ring else 2.0
            parts = ranks // near if 1 < near < ranks else 1
            sums = 4 * (parts - 1) / ranks * max(4, size) + size if parts > 1 else 0
            found.append(each * size + sums if ranks > 1 else 0.0 if once else float(size))
        return found

    def _near(self, over: int, few: int) -> int:
        """Neighbors that sum first, of machines that have as many ranks each: what
        :func:`internsp.structure.near.ranks_near` finds for groups of neighbors."""
        asked = self.config.weight_parallel.reduce
        if asked != "auto":
            return asked if isinstance(asked, int) else 0
        if not any(self.near_ranks % ranks for ranks in (over, few)):
            return 0
        least = 2 if self.base.habits.reduce_bytes < 4 else 1
        for near in range(max(over, few) // 2, least, -1):
            longer = [ranks for ranks in (over, few) if ranks > near]
            if not any(ranks % near for ranks in (*longer, self.near_ranks)):
                return near
        return 0

    def _activation_bytes(
        self, stages: Stages, context: int, ring: int, rows: int, number: int, again: Any,
        tiled: bool, away: bool,
    ) -> list[float]:  # fmt: skip
        """Of each pipeline rank, and its buffers for messages.

        Args:
            again: what is recomputed.
            tiled: feed-forwards are computed in tiles.
            away: what recomputing blocks keep is in host memory.
        """
        mode = "none" if not again.products else "full" if again.attention else "selective"
        kept_by = {
            kind: (
                self._kept("none", tiled, context, ring, kind),
                self._kept(mode, tiled, context, ring, kind),
            )
            for kind in set(self.kinds)
        }
        recomputing = round(again.products * len(self.blocks))
        tokens = rows * self.base.sequence // context
        size = _SIZES.get(self.base.dtype, 2)
        message = tokens * self.base.model.hidden * size
        last = stages.ranks * stages.chunks - 1
        found = []
        for rank, chunks in enumerate(self._split(stages)):
            buffers, kept, between, working, sent = 0.0, [], [], [], []
            own = stages.of(rank)
            for stage, blocks in zip(own, chunks, strict=True):
                kinds = self.kinds[blocks.start : blocks.stop]
                those = len(range(blocks.start, min(blocks.stop, recomputing)))
                redone, plain = kinds[:those], kinds[those:]
                each = sum(kept_by[kind][0].block for kind in plain)
                gone = away and those > 1  # all but the last one
                if not gone:
                    each += min(kept_by[kind][those > 0].more for kind in kinds)
                    each += sum(kept_by[kind][1].block for kind in redone)
                elif (0 < stage < last or not last) and len(set(kinds)) == 1:
                    each += self._left(mode, kinds[0], not last)
                within = message if stage + 1 in own else 0  # a V's turn receives what it sent
                embedded = 0 if stage or stages.ranks == 1 or gone else message
                kept.append(max(0.0, each * tokens + embedded - within))
                buffers += number * message * ((stage > 0) + (stage < last))
                # Its last block is computed again when it has its backward.
                work, (whole, few) = 0.0, kept_by[kinds[-1]]
                if blocks.stop <= recomputing:
                    work = (whole.block - few.block) * tokens
                    if not tiled:
                        redo = self._again(mode, context, ring, kinds[-1], gone)
                        work = max(work, redo.at(tokens))
                if stage == 0:  # the gradient of an embedding comes when measured blocks are freed
                    shown = [kept_by[kind][those > 0] for kind in shown_kinds(redone or plain)]
                    freed = sum(one.block for one in shown) + max(one.more for one in shown)
                    work = max(work, self.first * size - freed * tokens - 2 * message)
                splits = stages.v_shaped and self.splits and stage > 0 and not those
                if stage == last:
                    at = next((n for n in _ENDS if n <= tokens), _ENDS[-1])
                    work = max(work, self._loss(at, splits) * min(1.0, tokens / at))
                later = 0.0
                if splits and len(set(kinds)) == 1:
                    put_off, at_work = self._halves(kinds[0])
                    later = len(blocks) * put_off.block + put_off.more
                    work = max(work, at_work.at(tokens))
                between.append(max(0.0, later * tokens - within))
                working.append(work)
                # To other ranks, of a micro-batch: its output and its input's gradient.
                ends = stage < last and not within, stage > 0 and stage - 1 not in own
                sent.append(sum(ends) * message)
            moments = [
                _product(one.whole, kept) + _product(one.between, between) + working[one.next]
                + _product(one.sent, sent)
                for one in stages.moments(rank, number)
            ]  # fmt: skip
            found.append(buffers + max(moments))
        return found

    def _kept(self, mode: str, tiled: bool, context: int, ring: int, kind: int) -> _Kept:
        """What a stage in the middle, without embedding and head, keeps of blocks of a kind."""
        heads, around = context > ring, ring > 1
        if mode == "full":  # keeps inputs alone, which no other rank has
            heads = around = False
        steps = self._steps(mode, kind, heads, around, tiled)
        return _of_a_token([step.block for step in steps], [step.kept for step in steps])

    def _left(self, mode: str, kind: int, whole: bool) -> float:
        """Bytes of a token that such a stage, or all of the model, keeps if all of its blocks but
        one are in host memory."""
        few, more = self._steps(mode, kind, offload=1, whole=whole)
        return (more.kept - few.kept) / (_MEASURED[1] - _MEASURED[0])

    def _again(self, mode: str, context: int, ring: int, kind: int, away: bool) -> _Work:
        """Of a block that is computed again."""
        few, more = self._steps(
            mode, kind, context > ring, ring > 1, offload=1 if away else None, backward=True
        )
        return _Work(few.phases[-1] - few.kept, more.phases[-1] - more.kept)

    def _two_blocks(
        self, mode: str, kind: int, heads: bool = False, around: bool = False, tiled: bool = False,
        offload: int | None = None, whole: bool = False, backward: bool = False,
    ) -> list[Observed]:  # fmt: skip
        """Steps of two blocks of a kind.

        Args:
            heads, around: two ranks share heads, or are a ring: more do not keep less.
            offload: how many blocks are in host memory.
            whole: of the model, with embedding and head.
        """
        size, parts = (1 + heads) * (1 + around), 2
        if whole or self.config.model.family == "hf":
            parts = 1
        shape = MeshShape(parts * size, sequence=size, ring=1 + around, pipeline=parts)
        part = ModelPart(shape, parts == 1, parts == 1, kinds=(kind, kind))
        config = self.config.replaced({"activation_checkpoint.mode": mode})
        return [
            self.observations.of(
                config, 1, positions, 2 if tiled else 1, 2, 0 if mode == "none" else 2, offload,
                part, backward,
            )
            for positions in _MEASURED
        ]  # fmt: skip

    def _halves_bytes(self, kind: int) -> tuple[_Kept, _Work]:
        """Of a stage in the middle whose backward has two parts, from the first one to that for
        gradients of weights; of sequences on one rank each: more that share them keep no less."""
        part = ModelPart(MeshShape(2, pipeline=2), False, False, split=True)
        two, three = (
            [self._observed(replace(part, kinds=(kind,) * blocks), n) for n in _MEASURED]
            for blocks in (2, 3)
        )
        kept = [step.between_parts for step in two]
        block = [step.between_parts - one for step, one in zip(three, kept, strict=True)]
        return _of_a_token(block, kept), _Work(*(step.peak - step.kept for step in two))

    def _loss_bytes(self, positions: int, splits: bool) -> float:
        """Bytes that head and loss work in, of weights' gradients most: more tokens take more."""
        kinds = 2 * self.kinds[-1:]
        if splits:
            part = ModelPart(MeshShape(2, pipeline=2), False, split=True, kinds=kinds)
            step = self._observed(part, positions)
            return step.peak - step.kept
        step = self._observed(replace(WHOLE, kinds=kinds), positions)
        return step.phases[0] - step.kept

    def _observed(self, part: ModelPart, positions: int) -> Observed:
        """One sequence through blocks that recompute nothing."""
        return self.observations.of(self.config, 1, positions, 1, len(part.kinds), 0, None, part)


def _of_a_token(block: Sequence[int], two: Sequence[int]) -> _Kept:
    """Of what a block, and a stage of two blocks, keep at the measured positions."""
    longer = _MEASURED[1] - _MEASURED[0]
    one = (block[1] - block[0]) / longer
    return _Kept(one, (two[1] - two[0]) / longer - 2 * one)


def _product(numbers: Sequence[int], nbytes: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(numbers, nbytes, strict=True))


def _buffers(lengths: Sequence[float], owners: int) -> float:
    """Elements of the buffers for sums on their way between ranks with the same shard: twice two
    for each length, where they share state."""
    if owners == 1:
        return 0.0
    return sum(2 * min(2, count) * length for length, count in Counter(lengths).items())
