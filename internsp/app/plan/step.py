"""A planned step: its schedule, the bytes of its collectives, and memory; runs nothing.

The model is built on the meta device, so that a plan of any size takes a second and no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from internsp.app.config import Config
from internsp.app.models.factory import build_model, device_type
from internsp.app.plan.configured import planned_shape
from internsp.app.plan.kinds import block_kinds
from internsp.app.plan.matrices import MatrixTraffic
from internsp.app.plan.offloaded import (
    AT_STEP,
    OffloadedMemory,
    exchange_buffer_bytes,
    stepping_bytes,
)
from internsp.app.plan.pipeline import PipelinePlan, RankPlan, sharded
from internsp.app.plan.sequences import SequenceTraffic
from internsp.base.host import GRADIENTS, OPTIMIZER, WEIGHTS
from internsp.errors import ConfigError
from internsp.mesh import MeshShape
from internsp.parallel.experts import take_experts
from internsp.schedule.chunk import ChunkLayout, Schedule, WeightLayout
from internsp.schedule.simulate import simulate
from internsp.structure.assign import ParameterSharding, require_patterns_matched
from internsp.structure.dtypes import DTYPES
from internsp.structure.rules import Rules
from internsp.wp.encode import encoder_bytes

SUMS = "gradient sums"
_LONGEST_STEP = 20_000  # micro-batches x blocks that are simulated within a minute


@dataclass(frozen=True)
class Plan:
    """A step as it will run, and the memory and traffic of each rank.

    Attributes:
        parameters: elements of the whole model.
        shardings: of its parameters.
        kinds: of each block, the first one of its kind.
    """

    config: Config
    shape: MeshShape
    parameters: int
    chunk: ChunkLayout
    shardings: tuple[ParameterSharding, ...]
    traffic: SequenceTraffic
    rules: Rules
    kinds: tuple[int, ...]

    @cached_property
    def schedule(self) -> Schedule:
        """Its collectives, when first asked: memory is planned without, in half the time."""
        config = self.config
        return simulate(self.chunk, config.train.micro_batches, config.weight_parallel.overlap)

    @cached_property
    def memory(self) -> tuple[tuple[str, int], ...]:
        """(component, bytes) of a rank, without activations."""
        rows = _memory(self.config, self.shape, self.chunk, self.shardings, lambda: self.schedule)
        return tuple(rows)

    @cached_property
    def matrices(self) -> MatrixTraffic:
        """What steps of whole matrices keep and send."""
        return MatrixTraffic.of(self.config, self.shape, self.shardings)


def make_plan(config: Config, world_size: int) -> Plan:
    """Plan a step of ``config`` on ``world_size`` ranks. Needs no process group and no memory.

    Raises:
        ConfigError: degrees that do not fit the number of ranks; lists all mistakes.
    """
    shape = planned_shape(config, world_size)
    weights = config.weight_parallel
    model = build_model(config)
    parameters = sum(p.numel() for p in model.parameters())
    kinds = block_kinds(config, model)
    take_experts(model, weights, shape.expert, 0)
    require_patterns_matched((name for name, _ in model.named_parameters()), weights)
    checkpoint = config.activation_checkpoint
    structure, shardings, chunk = sharded(config, shape, model, weights, checkpoint)
    again = len(checkpoint.selected(structure.layers))
    traffic = SequenceTraffic.of(config, shape, config.model.layers, again)
    return Plan(
        config, shape, parameters, chunk, shardings, traffic, structure.rules, kinds
    )


def _memory(
    config: Config,
    shape: MeshShape,
    chunk: ChunkLayout,
    shardings: Sequence[ParameterSharding],
    schedule: Callable[[], Schedule],
) -> list[tuple[str, int]]:
    """(component, bytes) of one rank; slots are exact, reductions an upper bound (WP-1, WP-6)."""
    weights = [w for u in chunk.units for w in u.weights]
    shards = sum(w.shard_bytes for w in weights)
    train = config.train
    parts = max(train.micro_batches, 2 if train.batch_tokens else 1)  # as many as rows need
    off = OffloadedMemory.of(chunk, shape, config.optimizer.moments, parts, device_type(config))
    small = [a.parameter for a in shardings if a.unit is None]
    small_bytes = sum(p.numel() * p.element_size() for p in small)
    size = DTYPES[config.train.dtype].itemsize
    wide = max(size, 4)
    elements = (shards - off.shards[GRADIENTS] + small_bytes) // size
    summed = config.weight_parallel.reduce == "backend"

    def moving(weight: WeightLayout) -> int:
        """Bytes in flight; in a weight group of one, which sends nothing, what is to be added."""
        more = weight.gradient_bytes if parts > 1 and weight.trainable else 0
        return weight.reduction_bytes(summed) if weight.reduce_bytes else more

    largest = sorted((sum(map(moving, u.weights)) for u in chunk.units), reverse=True)
    pending = sum(largest[: config.weight_parallel.reductions_in_flight])
    masters = int(size < 4)
    stated = [w for w in weights if OPTIMIZER not in w.offload]
    own = sum(w.shard_bytes for w in stated if not w.expert) + small_bytes
    owned = -(-(own // size) // shape.zero_size)
    owned += -(-(sum(w.shard_bytes for w in stated if w.expert) // size) // shape.experts.zero)
    summed = chunk.policy.accumulate_whole and parts > 1
    held = [w for w in weights if w.trainable and GRADIENTS not in w.offload]
    unsharded_sums = sum(w.sum_bytes for w in held) if summed else 0
    slices = sum(w.slice_bytes for w in weights)
    matrices = MatrixTraffic.of(config, shape, shardings)
    values = owned * wide * config.optimizer.moments
    if config.optimizer.name in ("adafactor", "muon"):  # state by parameter
        values = matrices.state
    device_state = values + owned * wide * masters
    quantized = any(w.encoding is not None for w in weights)
    encoded = encoder_bytes(chunk, schedule(), shape) if quantized else 0
    return [
        ("weight shards", shards - off.shards[WEIGHTS]),
        ("replicated parameters", small_bytes),
        ("unsharded weights (slots, exact)", sum(chunk.slots())),
        *([("quantized shards in flight (exact)", encoded)] if encoded else []),
        *([("slices within near groups (exact)", slices)] if slices else []),
        ("reductions in flight (at most)", pending),
        ("sums on their way to the optimizer (at most)", exchange_buffer_bytes(chunk, shape)),
        (SUMS, elements * wide),
        ("unsharded gradient sums (full accumulation)", unsharded_sums),
        ("optimizer state", device_state),
        *matrices.rows(),
        (AT_STEP, stepping_bytes(chunk, shape)),
        *off.rows(),
    ]


def check_length(config: Config) -> None:
    """Refuse steps that take too long to simulate: some milliseconds a block and micro-batch."""
    layers, number = config.model.layers, config.train.micro_batches
    if layers * number > _LONGEST_STEP:
        raise ConfigError(
            f"train.micro_batches: {number} micro-batches x {layers} blocks are too many to plan "
            f"one by one (at most {_LONGEST_STEP}); plan fewer micro-batches, since one is as the "
            "other after the first few"
        )


def rank_memory(config: Config, plan: PipelinePlan, rank: RankPlan) -> dict[str, int]:
    """Bytes by component, of all chunks of a pipeline rank, without activations."""
    found: Counter[str] = Counter()
    for chunk in rank.chunks:
        told = config, plan.shape, chunk.plan, chunk.shardings
        found.update(dict(_memory(*told, lambda: rank.schedule)))
    return dict(found)
