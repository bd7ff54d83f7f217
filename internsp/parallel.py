"""``parallelize``: where weight parallel, sequence parallel and layers meet one model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from internsp.agreement.additions import Additions
from internsp.agreement.batch import SameBatch
from internsp.agreement.compare import agree, equal_counts
from internsp.agreement.meeting import FrozenSet, Meeting, guard_reads
from internsp.agreement.order import OrderLearner
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.dtensor.tensor_parallel import require_on_tensor_ranks
from internsp.errors import ConfigError, StructureError
from internsp.failure.ledger import Counters, Ledger
from internsp.host import HostLink
from internsp.layers.casts import find_casts, register_casts
from internsp.layers.offload import ActivationOffload
from internsp.layers.parameters import Scope, attach, put
from internsp.layers.supported import copies_of, require_supported
from internsp.layers.tiles import tile_all
from internsp.layers.watch import stay
from internsp.mesh import ParallelMesh
from internsp.meta import Unfilled, materialize_buffers
from internsp.near import NearSlices
from internsp.optim.plain_loop import PlainLoop
from internsp.plan.assign import (
    Assignment,
    Owner,
    WeightOptions,
    around_of,
    assign,
    block_of,
    require_patterns_matched,
)
from internsp.plan.blocks import Structure, read
from internsp.plan.chunk import ChunkPlan
from internsp.plan.dtypes import DTYPES
from internsp.plan.tiles import find_tiled
from internsp.plan.units import chunk_plan
from internsp.quantize import Quantizer
from internsp.sequence_parts import (
    attach_sequences,
    require_cut_attention,
    take_head_output,
)
from internsp.sp import checkpoint_context_fn
from internsp.trace import Trace
from internsp.wp.collectives import Collectives, ReplicaCollectives
from internsp.wp.communicator import (
    ChunkWeights,
    EmbeddingWeightParallelCommunicator,
    HeadWeightParallelCommunicator,
    ISPCommunicator,
    UsersCommunicator,
    WPCommunicator,
)
from internsp.wp.enclosing import Enclosing, EnclosingBlocks
from internsp.wp.hooks import BlockHooks, register_hooks
from internsp.wp.layout import ShardLayout
from internsp.wp.parameter import Member, ReplicatedParameter, ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.queue import GatherQueue
from internsp.wp.reduce import Buffers, GradientReducer
from internsp.wp.replicated import ReplicatedParameters
from internsp.wp.schedule import Group
from internsp.wp.slots import MemoryPool, Unit

MakeCollectives = Callable[..., Collectives]
Initialize = Callable[[str, Tensor, torch.Generator], None]


def parallelize(
    model: nn.Module,
    mesh: ParallelMesh,
    config: WeightParallelConfig | None = None,
    *,
    activation_checkpoint: ActivationCheckpointConfig | None = None,
    trace: Trace | None = None,
    communicator: WPCommunicator | None = None,
    collectives: MakeCollectives = Collectives,
    split: bool = False,
) -> ISPCommunicator:
    """Cut ``model``'s weights over the weight group and attach communication to it, in place.

    Every parameter becomes a ``DTensor`` on ``mesh.param_mesh``, an expert's
    (``weight_parallel.experts``) on ``mesh.experts.param_mesh``. Where ``mesh.expert`` is above 1,
    the model holds this rank's own experts, and a ``DTensor`` is those of all expert ranks, one
    after another on dimension 0, as one process would hold them. Layers may be tensor parallel:
    call torch's ``parallelize_module`` with ``mesh.tensor_mesh`` before. The model may be on the
    meta device; then call :func:`initialize` before its first forward. Collective: all ranks call
    it.

    Args:
        model: blocks, embedding and head are found by name patterns (WP-7).
        activation_checkpoint: blocks that recompute their activations.
        trace: where events of communication go.
        communicator: gathers weights and reduces their gradients in place of the library's
            (``docs/own_communicator.md``).
        collectives: makes what carries the messages of one group, with the arguments of
            :class:`internsp.wp.collectives.Collectives` (a benchmark passes an emulated link).
        split: a pipeline's schedule computes its input and its weight gradients apart.

    Returns:
        The communicator of the blocks, with ``head``, ``embedding``, ``replicated``
        and ``state``.

    Raises:
        StructureError: when no block or prefetch trigger is found, or a weight is shared between
            blocks.
        TypeError: ``communicator`` is none.
    """
    config = config or WeightParallelConfig()
    given = (model, nn.Module), (mesh, ParallelMesh), (config, WeightParallelConfig)
    for value, wanted in given:
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
    structure, recomputed = agree(
        model, mesh, config, activation_checkpoint, split,
        lambda: _examined(model, mesh, config, activation_checkpoint),
    )  # fmt: skip
    trace = trace or Trace()
    builder = _Builder(model, mesh, config, structure, recomputed, collectives, split, communicator)
    made = builder.build(trace, activation_checkpoint)
    attach_sequences(model, mesh, trace, made.mean, config, split)
    return made


def _examined(
    model: nn.Module,
    mesh: ParallelMesh,
    config: WeightParallelConfig,
    checkpoint: ActivationCheckpointConfig | None,
) -> tuple[Structure, set[int]]:
    """The model's parts, and which blocks recompute; refuses what is not supported."""
    materialize_buffers(model, mesh.device)
    require_supported(model)
    require_on_tensor_ranks(model, mesh)
    structure = read(
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
    find_casts(model, structure, config)  # refuses what it must before anything is changed
    if checkpoint is not None and checkpoint.offload is not None and checkpoint.mode == "none":
        raise ConfigError(
            "activation_checkpoint.offload takes what recomputing blocks keep, and none recomputes "
            '(activation_checkpoint.mode = "none"): set mode to "full" or "selective", or offload '
            "nothing"
        )
    if find_tiled(structure, checkpoint) and config.compile:
        raise ConfigError(
            "weight_parallel.compile compiles whole blocks, in which no part can be computed in "
            "tiles: set activation_checkpoint.tiles = 1, or compile = false"
        )
    require_cut_attention(model, mesh, config)
    take_head_output(model, mesh, config)
    return structure, recomputed_blocks(checkpoint, structure.layers)


def recomputed_blocks(config: ActivationCheckpointConfig | None, blocks: int) -> set[int]:
    """Indices of the blocks that recompute, of a model of so many.

    Raises:
        StructureError: one of them is not there.
    """
    chosen = set(config.selected(blocks)) if config is not None else set()
    wrong = sorted(i for i in chosen if not 0 <= i < blocks)
    if wrong:
        raise StructureError(
            f"activation_checkpoint.blocks names {wrong}, but the model has {blocks} blocks (0 to "
            f"{blocks - 1})"
        )
    return chosen


class _Builder:
    """Assigns every parameter to a unit or to the small ones, and makes the communicators."""

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        config: WeightParallelConfig,
        structure: Structure,
        recomputed: set[int],
        collectives: MakeCollectives = Collectives,
        split: bool = False,
        own: WPCommunicator | None = None,
    ) -> None:
        self.make_collectives, self.split, self.own = collectives, split, own
        self.model, self.mesh, self.config = model, mesh, config
        self.structure = structure
        self.recomputed = recomputed
        self.dtype = None  # to which the model's inputs are cast
        if config.compute_dtype is not None and config.cast_inputs:
            self.dtype = DTYPES[config.compute_dtype]
        self.sharded: list[ShardedParameter] = []
        self.originals: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self.replicated = ReplicatedParameters(mesh, self.sharded)
        self.units: dict[str, Unit] = {}
        self.options: dict[str, WeightOptions] = {}
        self.link: HostLink | None = None
        self.unfilled: list[Member] = []
        self.again = [structure.recomputes(i, recomputed) for i in range(len(structure.blocks))]
        around = [around.layer in recomputed for around in structure.enclosing]
        self.scopes = {
            i: Scope(recomputed=self.again[i] or (block.around >= 0 and around[block.around]))
            for i, block in enumerate(structure.blocks)
        }
        self.enclosed = [Scope(recomputed=again) for again in around]
        self.scopes[-1] = Scope(block=False)

    def build(
        self, trace: Trace, checkpoint: ActivationCheckpointConfig | None
    ) -> ISPCommunicator:
        shape = self.mesh.shape
        assignments = assign(self.model, self.structure, self.config, shape.expert)
        plan = chunk_plan(
            assignments,
            self.structure,
            self.config,
            shape,
            self.recomputed,
            self.split,
            self.mesh.device.type,
        )
        places: list[tuple[Owner, Member]] = []
        offloaded = [a.name for a in assignments if a.unit is not None and a.options.offload]
        if offloaded:
            if self.own is not None:
                raise ConfigError(
                    f"weight_parallel.offload of {offloaded[0]}: a communicator of your own reads "
                    "shards on the device; offload nothing, or take the library's communicator"
                )
            self.link = HostLink(self.mesh.device)
        quantized = [
            a.name for a in assignments
            if a.unit is not None and (a.options.own is not None or a.options.quantize != "none")
        ]  # fmt: skip
        if quantized and self.own is not None:
            raise ConfigError(
                f"weight_parallel.quantize (or a rule's functions) of {quantized[0]}: a "
                "communicator of your own decides what travels; quantize nothing, or take the "
                "library's communicator"
            )
        self._make_units(plan)
        for assignment in assignments:
            made = self._place(assignment)
            places += made
            if assignment.parameter.is_meta:
                self.unfilled.append(made[0][1])
        blocks = [self.units[block.name] for block in self.structure.blocks]
        state = self._state(blocks, plan, trace)
        communicator = ISPCommunicator(
            state,
            self.mesh,
            blocks,
            self.replicated,
            mean=self.config.reduction == "mean",
        )
        communicator.plan = plan
        communicator.enclosing = EnclosingBlocks(communicator.queue, self._enclosing(plan))
        communicator.plain = PlainLoop(communicator)
        learns = self.config.unexpected_order == "learn"
        if learns and self.own is None:
            communicator.learning = OrderLearner(communicator)
        self._give_communicators(communicator, plan)
        named: list[Any] = [*self.structure.blocks, None, *self.structure.enclosing]
        for scope, block in zip([*self.scopes.values(), *self.enclosed], named, strict=True):
            scope.module = self.model if block is None else block.module
            scope.name = "" if block is None else block.name
            scope.communicator = communicator
        copies = {m: list(copies_of(m)) for m in self.model.modules()}
        for owner, member in places:
            scope = self._scope(owner)
            attach(owner.module, owner.module_name, owner.name, member, scope)
            communicator.places[owner.module, owner.name] = member
            before: Any = self.originals[owner.module, owner.name]
            if before is not member.parameter:
                before.replaced = member.name  # see layers.watch.stepping
            for copy in copies[owner.module]:
                if copy.parameter is self.originals[owner.module, owner.name]:
                    owner.module._parameters.copies.append((copy.path, owner.name))  # type: ignore[attr-defined]
                    put(owner.module, copy.path, member.parameter)
        hooked = [
            BlockHooks(
                communicator.enclosing.blocks[number],
                [around.module],
                self.enclosed[number],
                checkpoint if around.layer in self.recomputed else None,
            )
            for number, around in enumerate(self.structure.enclosing)
        ]
        hooked += [
            BlockHooks(
                blocks[i],
                [module for _, module in block.modules],
                self.scopes[i],
                checkpoint if self.again[i] else None,
                block.trigger_module,
            )
            for i, block in enumerate(self.structure.blocks)
        ]
        casts = find_casts(self.model, self.structure, self.config)
        selective = checkpoint is not None and checkpoint.mode == "selective"
        state.activations = self._activations(checkpoint)
        register_hooks(
            self.model,
            self.scopes[-1],
            hooked,
            communicator,
            self._entered(communicator),
            self.dtype,
            self.config.compile,
            checkpoint_context_fn if selective else None,
            state.activations,
        )
        register_casts(casts)
        stay(self.model, communicator.places)
        self._tile(checkpoint)
        return communicator

    def _activations(
        self, checkpoint: ActivationCheckpointConfig | None
    ) -> ActivationOffload | None:
        if checkpoint is None or checkpoint.offload in (None, 0):
            return None
        link = HostLink(self.mesh.device)
        return ActivationOffload(link, checkpoint.offload, len(self.recomputed))

    def _tile(self, checkpoint: ActivationCheckpointConfig | None) -> None:
        if checkpoint is not None and isinstance(checkpoint.tiles, int):
            triggers = [b.trigger_module for b in self.structure.blocks if b.trigger_module]
            tile_all(find_tiled(self.structure, checkpoint), checkpoint.tiles, triggers)

    def _place(self, a: Assignment) -> list[tuple[Owner, Member]]:
        for o in a.owners:
            self.originals[o.module, o.name] = a.parameter
        if a.unit is None:
            member = ReplicatedParameter(a.name, a.parameter, self.mesh, a.dtypes.compute)
            member.parameter.grad_dtype = a.dtypes.grad
            self.replicated.append(member)
            for o in a.owners:
                o.module._parameters[o.name] = member.parameter
            return [(o, member) for o in a.owners]
        axis = self.mesh.experts if a.expert else self.mesh.dense
        layout = ShardLayout.create(a.shape, a.dim, axis.size)
        weight = ShardedParameter(
            a.name, a.parameter, layout, axis, self.mesh.device, a.dtypes.compute, a.autocasts,
            a.dtypes.reduce, a.options.offload, self.link,
        )  # fmt: skip
        weight.parameter.grad_dtype = a.dtypes.grad
        self.sharded.append(weight)
        self.options[a.name] = a.options
        self.units[a.unit].weights.append(weight)
        for o in a.owners:
            o.module._parameters[o.name] = weight.parameter
        return [(o, weight) for o in a.owners]

    def _scope(self, owner: Owner) -> Scope:
        """In whose forward parameters of a module may be read: the model's if blocks share it."""
        module_name = owner.module_name
        block = block_of(module_name, self.structure)
        if any(block_of(other, self.structure) != block for other in owner.others):
            return self.scopes[-1]
        around = around_of(module_name, self.structure) if block < 0 else -1
        return self.enclosed[around] if around >= 0 else self.scopes[block]

    def _enclosing(self, plan: ChunkPlan) -> list[Enclosing[Unit]]:
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

    def _make_units(self, plan: ChunkPlan) -> None:
        """Those of the plan, to be filled with weights."""
        for planned in plan.units:
            within: list[str] = []
            if planned.block >= 0:
                block = self.structure.blocks[planned.block]
                within = [name for name, _ in block.modules]
                if block.around >= 0 and plan.enclosing[block.around].first == planned.block:
                    within = [plan.enclosing[block.around].name]  # its rest's too
            self.units[planned.name] = Unit(
                planned.name, [], planned.slot, planned.block, planned.recomputed,
                planned.trigger_at, planned.at_entry and self.own is None, planned.around,
                within=tuple(f"{name}." for name in within),
            )  # fmt: skip

    def _state(self, blocks: list[Unit], plan: ChunkPlan, trace: Trace) -> Chunk:
        by_name, units = {weight.name: weight for weight in self.sharded}, self.units
        for planned in plan.units:
            groups = [
                Group([by_name[weight.name] for weight in group.weights], group.start, group.end)
                for group in planned.groups
            ]
            # With a communicator of the user's own nothing is queued, and there are no slots.
            units[planned.name].place(groups if self.own is None else ())
        queue = GatherQueue[Unit, ShardedParameter](
            plan.policy,
            blocks,
            [units[unit.name] for unit in plan.outer],
            units[plan.head.name] if plan.head is not None else None,
            overlap=self.config.overlap,
            strict=self.config.unexpected_order == "error",
            limit=plan.pending_bytes,
        )
        sizes = plan.slots() if self.own is None else [0] * len(plan.slots())
        counters = Counters()
        pool = MemoryPool(sizes, self.mesh.device, self.config.memory_pool)
        ledger, overlap = Ledger(self.mesh.next_model()), self.config.overlap
        gathers, reductions = (
            {
                axis: self.make_collectives(
                    group(axis), overlap, trace, counters, ledger, self.mesh.device
                )
                for axis in self.mesh.axes
            }
            for group in (attrgetter("weight_group"), attrgetter("gradient_group"))
        )
        between = {
            axis: ReplicaCollectives(*(
                Collectives(group, overlap, trace, counters, ledger, self.mesh.device)
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
        state.link = self.link
        slices = {w.name: w.slices for unit in plan.units for w in unit.weights if w.slices}
        if slices and self.own is None:
            for name, near in slices.items():
                by_name[name].slices = near
            sliced = [by_name[name] for name in slices]
            near_gathers = {
                (axis, near): self.make_collectives(
                    self.mesh.near_group(axis, near), overlap, trace, counters, ledger,
                    self.mesh.device,
                )
                for axis, near in sorted(
                    {(w.axis, w.slices) for w in sliced}, key=lambda key: (key[0].name, key[1])
                )
            }  # fmt: skip
            state.near = NearSlices(sliced, near_gathers, pool)
        names = {w.name for unit in plan.units for w in unit.weights if w.quantized}
        if names:
            options = {by_name[name]: self.options[name] for name in names}
            kinds = {weight: said.own or said.quantize for weight, said in options.items()}
            state.quantizer = Quantizer(kinds, self.mesh.device, self.config.memory_pool)
        return state

    def _give_communicators(self, communicator: ISPCommunicator, plan: ChunkPlan) -> None:
        """To each cut weight the one that gathers it."""
        state = communicator.state
        of_all: WPCommunicator = ChunkWeights(state)
        if self.own is not None:
            of_all = UsersCommunicator(state, self.own)
        for weight in self.sharded:
            weight.communicator = of_all
        if plan.head is not None:
            communicator.head = HeadWeightParallelCommunicator(state, self.units[plan.head.name])
        if plan.embedding is not None:
            unit = self.units[plan.embedding.name]
            communicator.embedding = EmbeddingWeightParallelCommunicator(state, unit)
        for beside in (communicator.head, communicator.embedding):  # a tied weight is the latter's
            if beside is not None and self.own is None:
                for weight in beside.unit.weights:
                    weight.communicator = beside

    def _entered(self, communicator: ISPCommunicator) -> Callable[[Any, Any], None]:
        """What is looked at whenever the model is entered: what may have changed since."""
        mesh = self.mesh
        lookout = communicator.recovery.lookout
        shared = communicator.recovery.shared_name
        guard_reads(self.sharded, shared, mesh.timeout_seconds, lookout)
        # Of all tensor ranks' stages: they share names, shapes and what is frozen.
        place, ranks = f"internsp/{shared}", mesh.model_ranks
        meeting = Meeting(place, mesh.rank, ranks, mesh.timeout_seconds, lookout)
        communicator.meeting = meeting
        frozen = FrozenSet(self.replicated.everyone(), meeting, mesh.rank)
        held = ((m, n) for m in self.model.modules() for n in m._parameters)  # ignored ones too
        additions = Additions(self.model, {*communicator.places, *held})
        unfilled = Unfilled(self.model, self.unfilled, mesh.rank)
        counts = equal_counts(mesh) if communicator.mean else None
        batch = SameBatch(mesh)
        communicator.confirm = batch.settle
        communicator.after_rest.append(batch.forget)

        def entered(args: Any, kwargs: Any) -> None:
            additions.look()
            unfilled.look()
            frozen.look()
            batch.look(args, kwargs)
            if counts is not None:
                counts(args, kwargs)

        return entered


def initialize(communicator: ISPCommunicator, fill: Initialize, seed: int) -> None:
    """Give every parameter its first values, the same whatever the mesh. Not collective.

    One whole parameter at a time is made, filled and cut.

    Args:
        fill: ``fill(name, whole, generator)`` writes the whole parameter ``name`` in place (of a
            weight that other stages have too: its name in the whole model).
        seed: together with the name decides the generator's state.
    """
    device = communicator.mesh.device
    for member in communicator.replicated.everyone():
        name = member.name_in_model
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:7], "big"))
        parameter = member.parameter
        value = torch.empty(parameter.shape, dtype=member.dtype)
        fill(name, value, generator)
        with torch.no_grad():
            member.local(member.storage).copy_(member.own(value).to(device))
        member.invalidate()
