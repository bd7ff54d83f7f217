"""``parallelize``: attaches weight and sequence parallelism to one model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from internsp.base.host import HostLink
from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig, SequenceConfig, WeightParallelConfig
from internsp.config.combinations import mistakes, require_none, too_small_a_share
from internsp.dtensor.tensor_parallel import require_on_tensor_ranks
from internsp.errors import ConfigError, StructureError
from internsp.failure.comm_context import CommContext, Counters
from internsp.mesh import MeshShape, ParallelMesh
from internsp.modules.casts import find_casts, register_casts
from internsp.modules.hooks import BlockHooks, register_hooks
from internsp.modules.parameters import Scope, attach, put
from internsp.modules.reads import ForwardReads
from internsp.modules.recompute import ContextFn
from internsp.modules.supported import copies_of, require_supported
from internsp.modules.watch import keep_parameters_in_place
from internsp.parallel.additions import AddedParameterCheck
from internsp.parallel.checks import FrozenParameterCheck, register_read_checks
from internsp.parallel.compare import require_same_model, token_count_check
from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.enclosing import Enclosing
from internsp.schedule.layout import ShardLayout
from internsp.schedule.queue import GatherQueue
from internsp.schedule.terms import Group
from internsp.structure.assign import (
    ParameterOwner,
    ParameterSharding,
    WeightOptions,
    block_of,
    enclosing_block_of,
    plan_sharding,
    require_patterns_matched,
)
from internsp.structure.blocks import Structure, read_structure
from internsp.structure.dtypes import DTYPES
from internsp.structure.units import chunk_layout
from internsp.values.meta import MissingValueCheck, materialize_buffers
from internsp.wp.checks import RootCheck
from internsp.wp.collectives import Collectives, ReplicaCollectives
from internsp.wp.communicator import (
    ChunkWeights,
    EmbeddingWeightParallelCommunicator,
    HeadWeightParallelCommunicator,
    ISPCommunicator,
    UsersCommunicator,
    WPCommunicator,
)
from internsp.wp.parameter import Member, ReplicatedParameter, ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.reduce import Buffers, GradientReducer
from internsp.wp.replicated import ReplicatedParameters
from internsp.wp.slots import MemoryPool, Unit

if TYPE_CHECKING:
    from internsp.modules.offload import ActivationOffload

CollectivesFactory = Callable[..., Collectives]
InitFunction = Callable[[str, Tensor, torch.Generator], None]


def parallelize(
    model: nn.Module,
    mesh: ParallelMesh,
    config: WeightParallelConfig | None = None,
    *,
    sequence: SequenceConfig | None = None,
    activation_checkpoint: ActivationCheckpointConfig | None = None,
    trace: Trace | None = None,
    communicator: WPCommunicator | None = None,
    collectives: CollectivesFactory = Collectives,
    split: bool = False,
) -> ISPCommunicator:
    """Shard ``model``'s weights over the weight group and attach communication to it, in place.

    Every parameter becomes a ``DTensor`` on ``mesh.param_mesh``, an expert's parameter
    (``weight_parallel.experts``) on ``mesh.experts.param_mesh``. With ``mesh.expert`` above 1 the
    model must hold this rank's own experts; a ``DTensor`` then contains the experts of all expert
    ranks, one after another on dimension 0, as one process would hold them. Layers may be tensor
    parallel: call torch's ``parallelize_module`` with ``mesh.tensor_mesh`` first. The model may be
    on the meta device; then call :func:`initialize` before its first forward. Collective: all ranks
    call it.

    Args:
        model: blocks, embedding and head are found by name patterns (WP-7).
        sequence: how the ranks of a sequence group compute.
        activation_checkpoint: blocks that recompute their activations.
        trace: records communication events.
        communicator: gathers weights and reduces their gradients instead of the library's
            communicator (``docs/own_communicator.md``).
        collectives: makes the collectives of one group, with the arguments of
            :class:`internsp.wp.collectives.Collectives` (a benchmark passes an emulated link).
        split: a pipeline's schedule splits this chunk's backward into input and weight backward.

    Returns:
        The communicator of the blocks, with ``head``, ``embedding``, ``replicated`` and ``state``.

    Raises:
        StructureError: no block or prefetch trigger is found, or a weight is shared between blocks.
        TypeError: an argument has a wrong type, for example ``communicator``.
    """
    config, sequence = config or WeightParallelConfig(), sequence or SequenceConfig()
    given = (model, nn.Module), (mesh, ParallelMesh), (config, WeightParallelConfig)
    for value, wanted in (*given, (sequence, SequenceConfig)):
        if not isinstance(value, wanted):
            raise TypeError(
                f"parallelize() was given a {type(value).__name__} in the place of a "
                f"{wanted.__name__}: call parallelize(model, mesh, WeightParallelConfig(...)); "
                "ParallelMesh.from_device_mesh makes a mesh of torch's DeviceMesh"
            )
    if communicator is not None and not isinstance(communicator, WPCommunicator):
        raise TypeError(
            f"communicator is a {type(communicator).__name__}: give a WPCommunicator, made "
            "(docs/own_communicator.md)"
        )
    examined = require_same_model(
        model, mesh, config, sequence, activation_checkpoint, split,
        lambda: _examine(
            model, mesh, config, sequence, activation_checkpoint, split, communicator is not None
        ),
    )  # fmt: skip
    trace = trace or Trace()
    builder = _Builder(model, mesh, config, examined, collectives, communicator)
    made = builder.build(trace, activation_checkpoint)
    if _has_sequences(model, mesh, sequence):
        from internsp.parallel.sequences import attach_sequences

        attach_sequences(model, mesh, trace, made.mean, sequence, config.overlap, split)
    return made


def _examine(
    model: nn.Module,
    mesh: ParallelMesh,
    config: WeightParallelConfig,
    sequence: SequenceConfig,
    checkpoint: ActivationCheckpointConfig | None,
    split: bool,
    own: bool,
) -> Examined:
    """Read the model's structure and plan its shards and units; refuse what is not supported."""
    materialize_buffers(model, mesh.device)
    require_on_tensor_ranks(model, mesh)
    # A pipeline has checked for all of its chunks together what recomputes.
    again = (checkpoint if mesh.pipeline == 1 else None) or ActivationCheckpointConfig()
    require_none(mistakes(config, sequence, again, ring=mesh.ring, pipeline=False, own=own))
    found = examine(model, config, checkpoint, mesh.shape, split, mesh.device.type, own)
    if _has_sequences(model, mesh, sequence):
        from internsp.parallel.sequences import require_sequence_attention, set_head_output

        require_sequence_attention(model, mesh, sequence)
        set_head_output(model, mesh, sequence)
    return found


@dataclass(frozen=True)
class Examined:
    """What was found of a model, before anything is changed.

    Attributes:
        recomputed: indices of the blocks that recompute.
        split: whether a pipeline's schedule splits backward.
    """

    structure: Structure
    recomputed: set[int]
    shardings: list[ParameterSharding]
    plan: ChunkLayout
    split: bool


def examine(
    model: nn.Module,
    config: WeightParallelConfig,
    checkpoint: ActivationCheckpointConfig | None,
    shape: MeshShape,
    split: bool = False,
    device: str = "cpu",
    own_communicator: bool = False,
) -> Examined:
    """What can be known without ranks or values: the blocks, shards and units, what recomputes.

    Args:
        split, device, own_communicator: see :func:`internsp.structure.units.chunk_layout`.

    Raises:
        ConfigError, StructureError: a pattern matches nothing, the model or an option of it is not
            supported, or an option has no effect.
    """
    require_supported(model, config.plan)
    structure = read_structure(
        model, config.trigger, config.blocks, config.prefetch_triggers, config.plan
    )
    if config.compile and any(block.trigger_module is not None for block in structure.blocks):
        raise ConfigError(
            f"weight_parallel.compile compiles whole blocks, but trigger {config.trigger!r} lies "
            "inside a block, where no hook of ours may run (WP-13): set weight_parallel.trigger = "
            "'qkv' (the block's entry) and no prefetch_triggers"
        )
    if config.unexpected_order == "learn" and structure.enclosing:
        raise ConfigError(
            'weight_parallel.unexpected_order = "learn" learns an order of blocks, but a rule of '
            f"the plan makes units within {structure.enclosing[0].name}: leave one out"
        )
    require_patterns_matched((name for name, _ in model.named_parameters()), config)
    find_casts(model, structure, config)  # raises its errors before anything is changed
    if checkpoint is not None and checkpoint.tiles != 1:
        from internsp.structure.tiles import find_tiled

        find_tiled(structure, checkpoint)
    recomputed = recomputed_blocks(checkpoint, structure.layers)
    shardings = plan_sharding(model, structure, config, shape.expert)
    if own_communicator:
        _require_own_serves(shardings)
    plan = chunk_layout(
        shardings, structure, config, shape, recomputed, split, device, own_communicator
    )
    return Examined(structure, recomputed, shardings, plan, split)


def _require_own_serves(shardings: Sequence[ParameterSharding]) -> None:
    """Refuse what a communicator of the user's own cannot do for a weight."""
    for sharding in shardings:
        options = sharding.options
        if sharding.unit is None:
            continue
        if options.offload:
            raise ConfigError(
                f"weight_parallel.offload of {sharding.name}: a communicator of your own reads "
                "shards on the device; offload nothing, or take the library's communicator"
            )
        if options.custom_gather is not None or options.quantize != "none":
            raise ConfigError(
                f"weight_parallel.quantize (or a rule's functions) of {sharding.name}: a "
                "communicator of your own decides what travels; quantize nothing, or take the "
                "library's communicator"
            )


def _has_sequences(model: nn.Module, mesh: ParallelMesh, config: SequenceConfig) -> bool:
    """Whether sequences are cut, or an option or an attention of ours asks for it.

    Only then is :mod:`internsp.sp` loaded.
    """
    return (
        mesh.sequence > 1
        or config != SequenceConfig()
        or any(
            base.__module__.startswith("internsp.sp.")
            for m in model.modules()
            for base in type(m).__mro__
        )
    )


def recomputed_blocks(config: ActivationCheckpointConfig | None, blocks: int) -> set[int]:
    """Indices of the blocks that recompute, in a model with ``blocks`` blocks.

    Raises:
        StructureError: the configuration names a block that does not exist.
        ConfigError: it means less than one block.
    """
    if config is not None and (less := too_small_a_share(config, blocks)):
        raise ConfigError(f"activation_checkpoint.fraction: {less}")
    chosen = set(config.selected(blocks)) if config is not None else set()
    wrong = sorted(i for i in chosen if not 0 <= i < blocks)
    if wrong:
        raise StructureError(
            f"activation_checkpoint.blocks names {wrong}, but the model has {blocks} blocks (0 to "
            f"{blocks - 1})"
        )
    return chosen


class _Builder:
    """Makes the sharded and replicated parameters, the units, hooks and communicators."""

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        config: WeightParallelConfig,
        examined: Examined,
        collectives: CollectivesFactory = Collectives,
        own: WPCommunicator | None = None,
    ) -> None:
        self.make_collectives, self.user_communicator = collectives, own
        self.model, self.mesh, self.config = model, mesh, config
        self.structure = structure = examined.structure
        self.recomputed = recomputed = examined.recomputed
        self.shardings, self.plan, self.split = examined.shardings, examined.plan, examined.split
        self.dtype = None  # dtype to which the model's inputs are cast
        if config.compute_dtype is not None and config.cast_inputs:
            self.dtype = DTYPES[config.compute_dtype]
        self.sharded: list[ShardedParameter] = []
        self.originals: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self.replicated = ReplicatedParameters(mesh, self.sharded)
        self.units: dict[str, Unit] = {}
        self.options: dict[str, WeightOptions] = {}
        self.host_link: HostLink | None = None
        self.unfilled: list[Member] = []
        indices = range(len(structure.blocks))
        self.recomputes = [structure.recomputes(i, recomputed) for i in indices]
        outer = [around.layer in recomputed for around in structure.enclosing]
        self.scopes = {
            i: Scope(recomputed=self.recomputes[i] or (block.around >= 0 and outer[block.around]))
            for i, block in enumerate(structure.blocks)
        }
        self.enclosing_scopes = [Scope(recomputed=recomputes) for recomputes in outer]
        self.scopes[-1] = Scope(block=False)

    def build(
        self, trace: Trace, checkpoint: ActivationCheckpointConfig | None
    ) -> ISPCommunicator:
        plan = self.plan
        members: list[tuple[ParameterOwner, Member]] = []
        if any(a.unit is not None and a.options.offload for a in self.shardings):
            self.host_link = HostLink(self.mesh.device)
        self._make_units(plan)
        for sharding in self.shardings:
            made = self._make_member(sharding)
            members += made
            if sharding.parameter.is_meta:
                self.unfilled.append(made[0][1])
        blocks = [self.units[block.name] for block in self.structure.blocks]
        state = self._make_state(blocks, plan, trace)
        communicator = ISPCommunicator(
            state,
            self.mesh,
            blocks,
            self.replicated,
            mean=self.config.reduction == "mean",
            batch_check=self._batch_check(),
        )
        communicator.plan = plan
        learns = self.config.unexpected_order == "learn"
        if learns and self.user_communicator is None:
            from internsp.parallel.order import OrderLearner  # few models need it

            communicator.learning = OrderLearner(communicator)
        self._assign_communicators(communicator, plan)
        named: list[Any] = [*self.structure.blocks, None, *self.structure.enclosing]
        for scope, block in zip(
            [*self.scopes.values(), *self.enclosing_scopes], named, strict=True
        ):
            scope.module = self.model if block is None else block.module
            scope.name = "" if block is None else block.name
            scope.communicator = communicator
        copies = {m: list(copies_of(m)) for m in self.model.modules()}
        for owner, member in members:
            scope = self._scope_of(owner)
            attach(owner.module, owner.module_name, owner.name, member, scope)
            communicator.parameters_of[owner.module, owner.name] = member
            before: Any = self.originals[owner.module, owner.name]
            if before is not member.parameter:
                before.replaced = member.name  # see layers.watch.stepping
            for copy in copies[owner.module]:
                if copy.parameter is self.originals[owner.module, owner.name]:
                    owner.module._parameters.copies.append((copy.path, owner.name))  # type: ignore[attr-defined]
                    put(owner.module, copy.path, member.parameter)
        hooked = [
            BlockHooks(
                communicator.queue.backward.enclosing.blocks[number],
                [around.module],
                self.enclosing_scopes[number],
                checkpoint if around.layer in self.recomputed else None,
            )
            for number, around in enumerate(self.structure.enclosing)
        ]
        hooked += [
            BlockHooks(
                blocks[i],
                [module for _, module in block.modules],
                self.scopes[i],
                checkpoint if self.recomputes[i] else None,
                block.trigger_module,
            )
            for i, block in enumerate(self.structure.blocks)
        ]
        casts = find_casts(self.model, self.structure, self.config)
        state.activations = self._activation_offload(checkpoint)
        register_hooks(
            self.model,
            self.scopes[-1],
            hooked,
            communicator,
            self._forward_checks(communicator),
            self.dtype,
            self.config.compile,
            self._context_fn(checkpoint),
            state.activations,
        )
        register_casts(casts)
        keep_parameters_in_place(self.model, communicator.parameters_of)
        self._tile_blocks(checkpoint)
        return communicator

    def _context_fn(self, checkpoint: ActivationCheckpointConfig | None) -> ContextFn | None:
        if checkpoint is None or checkpoint.mode != "selective":
            return None
        from internsp.sp.checkpointing import checkpoint_context_fn

        return checkpoint_context_fn

    def _activation_offload(
        self, checkpoint: ActivationCheckpointConfig | None
    ) -> ActivationOffload | None:
        if checkpoint is None or checkpoint.offload in (None, 0):
            return None
        from internsp.modules.offload import ActivationOffload

        link = HostLink(self.mesh.device)
        return ActivationOffload(link, checkpoint.offload, len(self.recomputed))

    def _tile_blocks(self, checkpoint: ActivationCheckpointConfig | None) -> None:
        if checkpoint is not None and checkpoint.tiles != 1:
            from internsp.modules.tiles import tile_all
            from internsp.structure.tiles import find_tiled

            tiled = find_tiled(self.structure, checkpoint)  # refuses "auto"
            triggers = [b.trigger_module for b in self.structure.blocks if b.trigger_module]
            tile_all(tiled, int(checkpoint.tiles), triggers)

    def _make_member(self, sharding: ParameterSharding) -> list[tuple[ParameterOwner, Member]]:
        name, parameter, dtypes = sharding.name, sharding.parameter, sharding.dtypes
        for owner in sharding.owners:
            self.originals[owner.module, owner.name] = parameter
        if sharding.unit is None:
            member = ReplicatedParameter(name, parameter, self.mesh, dtypes.compute)
            member.parameter.grad_dtype = dtypes.grad
            self.replicated.append(member)
            for owner in sharding.owners:
                owner.module._parameters[owner.name] = member.parameter
            return [(owner, member) for owner in sharding.owners]
        axis = self.mesh.experts if sharding.expert else self.mesh.dense
        layout = ShardLayout.create(sharding.shape, sharding.dim, axis.size)
        weight = ShardedParameter(
            name, parameter, layout, axis, self.mesh.device, dtypes.compute, sharding.autocasts,
            dtypes.reduce, sharding.options.offload, self.host_link,
        )  # fmt: skip
        weight.parameter.grad_dtype = dtypes.grad
        self.sharded.append(weight)
        self.options[name] = sharding.options
        self.units[sharding.unit].weights.append(weight)
        for owner in sharding.owners:
            owner.module._parameters[owner.name] = weight.parameter
        return [(owner, weight) for owner in sharding.owners]

    def _scope_of(self, owner: ParameterOwner) -> Scope:
        """The scope in which a parameter may be read: the model's if several blocks share it."""
        module_name = owner.module_name
        block = block_of(module_name, self.structure)
        if any(block_of(other, self.structure) != block for other in owner.others):
            return self.scopes[-1]
        around = enclosing_block_of(module_name, self.structure) if block < 0 else -1
        return self.enclosing_scopes[around] if around >= 0 else self.scopes[block]

    def _make_enclosing(self, plan: ChunkLayout) -> list[Enclosing[ShardedParameter]]:
        return [
            Enclosing(
                each.name,
                each.number,
                self.units.get(each.name) or Unit(each.name, []),
                each.first,
                each.last,
                each.recomputed,
            )
            for each in plan.enclosing
        ]

    def _make_units(self, plan: ChunkLayout) -> None:
        """Make the units of ``plan``, still without weights."""
        for planned in plan.units:
            within: list[str] = []
            if planned.block >= 0:
                block = self.structure.blocks[planned.block]
                within = [name for name, _ in block.modules]
                if block.around >= 0 and plan.enclosing[block.around].first == planned.block:
                    within = [plan.enclosing[block.around].name]  # its own parameters' too
            self.units[planned.name] = Unit(
                planned.name, [], planned.slot, planned.block, planned.recomputed,
                planned.trigger_at, planned.unshard_at_entry and self.user_communicator is None,
                planned.around,
                within=tuple(f"{name}." for name in within),
            )  # fmt: skip

    def _make_state(self, blocks: list[Unit], plan: ChunkLayout, trace: Trace) -> Chunk:
        by_name, units = {weight.name: weight for weight in self.sharded}, self.units
        for planned in plan.units:
            groups = [
                Group([by_name[weight.name] for weight in group.weights], group.start, group.end)
                for group in planned.groups
            ]
            # A communicator of the user's own has no gather queue and no slots.
            units[planned.name].assign_bytes(groups if self.user_communicator is None else ())
        queue = GatherQueue[ShardedParameter](
            plan.policy,
            blocks,
            [units[unit.name] for unit in plan.root_units],
            units[plan.head.name] if plan.head is not None else None,
            self._make_enclosing(plan),
            overlap=self.config.overlap,
            strict=self.config.unexpected_order == "error",
            limit=plan.pending_bytes,
        )
        sizes = plan.slots() if self.user_communicator is None else [0] * len(plan.slots())
        counters = Counters()
        pool = MemoryPool(sizes, self.mesh.device, self.config.memory_pool)
        comm_context, overlap = CommContext(self.mesh.next_model()), self.config.overlap
        gathers, reductions = (
            {
                axis: self.make_collectives(
                    group(axis), overlap, trace, counters, comm_context, self.mesh.device
                )
                for axis in self.mesh.axes
            }
            for group in (attrgetter("weight_group"), attrgetter("gradient_group"))
        )
        between = {
            axis: ReplicaCollectives(*(
                Collectives(group, overlap, trace, counters, comm_context, self.mesh.device)
                for group in (
                    axis.replica_group, axis.zero_group, axis.zero_replica_group, axis.zero_group
                )
            ))
            for axis in self.mesh.axes
        }  # fmt: skip
        buffers = Buffers(self.mesh.device, self.config.memory_pool)
        reducer = GradientReducer(reductions, trace, buffers)
        collectives = gathers[self.mesh.dense]
        state = Chunk(collectives, gathers, between, pool, reducer, queue, counters, trace)
        state.link = self.host_link
        slices = {w.name: w.slices for unit in plan.units for w in unit.weights if w.slices}
        if slices and self.user_communicator is None:
            from internsp.wp.near import NearSlices

            for name, near in slices.items():
                by_name[name].slices = near
            sliced = [by_name[name] for name in slices]
            near_gathers = {
                (axis, near): self.make_collectives(
                    self.mesh.near_group(axis, near), overlap, trace, counters, comm_context,
                    self.mesh.device,
                )
                for axis, near in sorted(
                    {(w.axis, w.slices) for w in sliced}, key=lambda key: (key[0].name, key[1])
                )
            }  # fmt: skip
            state.near = NearSlices(sliced, near_gathers, pool)
        names = {w.name for unit in plan.units for w in unit.weights if w.quantized}
        if names:
            from internsp.wp.quantize import Quantizer

            options = {by_name[name]: self.options[name] for name in names}
            kinds = {weight: o.custom_gather or o.quantize for weight, o in options.items()}
            state.quantizer = Quantizer(kinds, self.mesh.device, self.config.memory_pool)
        return state

    def _assign_communicators(self, communicator: ISPCommunicator, plan: ChunkLayout) -> None:
        """Give each sharded weight the communicator that gathers it, and all what reads them."""
        scopes = [*self.scopes.values(), *self.enclosing_scopes]
        reads = ForwardReads(communicator, scopes, self.split)
        for member in self.replicated.all_parameters():
            member.reads = reads
        state = communicator.state
        of_all: WPCommunicator = ChunkWeights(state)
        if self.user_communicator is not None:
            of_all = UsersCommunicator(state, self.user_communicator)
        for weight in self.sharded:
            weight.communicator = of_all
        if plan.head is not None:
            communicator.head = HeadWeightParallelCommunicator(state, self.units[plan.head.name])
        if plan.embedding is not None:
            unit = self.units[plan.embedding.name]
            communicator.embedding = EmbeddingWeightParallelCommunicator(state, unit)
        for root in (communicator.head, communicator.embedding):  # the embedding gets a tied weight
            if root is not None and self.user_communicator is None:
                for weight in root.unit.weights:
                    weight.communicator = root

    def _batch_check(self) -> RootCheck | None:
        if self.mesh.sequence == 1:
            return None
        from internsp.sp.same_batch import SameBatch

        return SameBatch(self.mesh)

    def _forward_checks(self, communicator: ISPCommunicator) -> Callable[[Any, Any], None]:
        """The checks of each root forward, for unsupported changes since the last one."""
        mesh = self.mesh
        register_read_checks(self.sharded, communicator.recovery)
        if self.config.unexpected_order != "error" and self.user_communicator is None:
            from internsp.parallel.order import make_agreement  # few models need it

            communicator.agreement = make_agreement(communicator, self.sharded)
        members = self.replicated.all_parameters()
        frozen = FrozenParameterCheck(members, communicator.consensus)
        # Also parameters that a rule of the plan ignores.
        held = ((m, n) for m in self.model.modules() for n in m._parameters)
        additions = AddedParameterCheck(self.model, {*communicator.parameters_of, *held})
        unfilled = MissingValueCheck(self.model, self.unfilled, mesh.rank)
        counts = token_count_check(mesh) if communicator.mean else None
        batch = communicator.batch_check

        def check(args: Any, kwargs: Any) -> None:
            additions.check()
            unfilled.check()
            frozen.check()
            if batch is not None:
                batch.check(args, kwargs)
            if counts is not None:
                counts(args, kwargs)

        return check


def initialize(communicator: ISPCommunicator, fill: InitFunction, seed: int) -> None:
    """Initialize every parameter; values do not depend on the mesh. Not collective.

    One full parameter at a time is allocated, filled and sharded.

    Args:
        fill: ``fill(name, full, generator)`` writes the full parameter ``name`` in place (for a
            tied weight of a pipeline: its name in the model).
        seed: determines, together with the name, the generator's state.
    """
    device = communicator.mesh.device
    for member in communicator.replicated.all_parameters():
        name = member.name_in_model
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:7], "big"))
        parameter = member.parameter
        value = torch.empty(parameter.shape, dtype=member.dtype)
        fill(name, value, generator)
        with torch.no_grad():
            member.local(member.storage).copy_(member.own(value).to(device))
        member.invalidate()
