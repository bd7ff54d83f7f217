"""Makes the parts of one parallel model, each by a step that returns it, from the bottom up.

Until :func:`_put` the modules hold the parameters that they had. The hooks come last: from there on
the model runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from internsp.base.host import HostLink, HostPool
from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.failure.comm_context import CommContext, Counters
from internsp.failure.consensus import Consensus
from internsp.failure.recovery import StageRecovery
from internsp.mesh import ParallelMesh, WeightAxis
from internsp.modules.casts import find_casts, register_casts
from internsp.modules.hooks import BlockHooks, register_hooks
from internsp.modules.parameters import OpenForwards, Scope, attach, put
from internsp.modules.reads import ForwardReads
from internsp.modules.supported import copies_of
from internsp.modules.watch import keep_parameters_in_place
from internsp.parallel.checks import RootChecks, register_read_checks
from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.enclosing import Enclosing
from internsp.schedule.layout import ShardLayout
from internsp.schedule.queue import GatherQueue
from internsp.schedule.terms import Group
from internsp.structure.assign import (
    ParameterOwner,
    ParameterSharding,
    block_of,
    enclosing_block_of,
)
from internsp.structure.blocks import Structure
from internsp.wp.checks import RootCheck
from internsp.wp.collectives import Collectives, ReplicaCollectives
from internsp.wp.communicator import (
    EmbeddingWeightParallelCommunicator,
    HeadWeightParallelCommunicator,
    ISPCommunicator,
    WPCommunicator,
)
from internsp.wp.contents import Contents
from internsp.wp.events import Events
from internsp.wp.parameter import Member, ReplicatedParameter, ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.reduce import Buffers, GradientReducer
from internsp.wp.replicated import ReplicatedParameters
from internsp.wp.run_order import RunOrder
from internsp.wp.slots import MemoryPool, Unit, Units

if TYPE_CHECKING:
    from internsp.modules.offload import ActivationOffload
    from internsp.modules.recompute import ContextFn
    from internsp.wp.backend_sums import BackendSums
    from internsp.wp.encode import Encoder
    from internsp.wp.near import NearSlices
    from internsp.wp.two_level import Sum, TwoLevels

CollectivesFactory = Callable[..., Collectives]


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


def build(
    model: nn.Module,
    mesh: ParallelMesh,
    config: WeightParallelConfig,
    checkpoint: ActivationCheckpointConfig | None,
    examined: Examined,
    trace: Trace,
    own: WPCommunicator | None,
    make_collectives: CollectivesFactory,
) -> ISPCommunicator:
    """Attach communication to ``model``. Collective: groups agree on names.

    Args:
        own: gathers and reduces instead of the library's communicator; it has no gather queue and
            no slots.
        make_collectives: makes the collectives of one group.
    """
    structure, layout, shardings = examined.structure, examined.plan, examined.shardings
    link = None
    if any(each.unit is not None and each.options.offload for each in shardings):
        link = HostLink(mesh.device)
    members = _make_parameters(shardings, mesh, link)
    sharded = [m for m in members.values() if isinstance(m, ShardedParameter)]
    replicated = ReplicatedParameters(mesh, sharded)
    for member in members.values():
        if isinstance(member, ReplicatedParameter):
            replicated.append(member)
    by_name = _make_units(layout, structure, sharded, own is None)
    enclosing = _make_enclosing(layout, by_name)
    blocks = [by_name[block.name] for block in structure.blocks]
    outside = [by_name[unit.name] for unit in layout.root_units]
    head = by_name[layout.head.name] if layout.head is not None else None
    rests = [block.rest for block in enclosing if block.rest.weights]
    units = Units(blocks, [*outside, *rests], head if head not in outside else None)
    queue = GatherQueue[ShardedParameter](
        layout.policy,
        blocks,
        outside,
        head,
        enclosing,
        overlap=config.overlap,
        strict=config.unexpected_order == "error",
        limit=layout.pending_bytes,
    )
    activations = _activation_offload(mesh, checkpoint, examined)
    chunk = _make_chunk(
        mesh, config, examined, units, queue, trace, link,
        activations.pool if activations is not None else None, own is None, make_collectives,
    )  # fmt: skip
    torchs = {g for m in members.values() if m.tensor for g in m.tensor.mesh.get_all_groups()}
    recovery = StageRecovery(mesh, chunk.collectives.comm_context, torchs)
    # Of all tensor ranks' stages: they have the same names, shapes and frozen parameters.
    consensus = recovery.among(recovery.shared_name, mesh.model_ranks)
    contents = Contents(chunk, replicated.all_parameters(), mesh.rank)
    parameters_of = {
        (owner.module, owner.name): members[each.name]
        for each in shardings
        for owner in each.owners
    }
    mean = config.reduction == "mean"
    checks = RootChecks(
        model,
        mesh,
        replicated.all_parameters(),
        # Also parameters that a rule of the plan ignores.
        {*parameters_of, *((m, name) for m in model.modules() for name in m._parameters)},
        [members[each.name] for each in shardings if each.parameter.is_meta],
        consensus,
        _batch_check(model, mesh),
        mean and config.compare_ranks,
    )
    mode = config.unexpected_order if own is None else "error"
    order = _make_order(mode, chunk, layout, replicated, contents, recovery, consensus)
    events = Events(chunk, mesh, replicated, recovery, contents, order, checks)
    roots = {unit: EmbeddingWeightParallelCommunicator(chunk, events, unit) for unit in units.root}
    communicator = ISPCommunicator(
        chunk,
        events,
        mesh,
        replicated,
        mean,
        HeadWeightParallelCommunicator(chunk, events, head) if head is not None else None,
        roots[by_name[layout.embedding.name]] if layout.embedding is not None else None,
        parameters_of,
        consensus,
    )
    scopes = Scopes(model, structure, examined.recomputed, communicator)
    _bind(communicator, roots, ForwardReads(communicator, scopes.opened, examined.split), own)
    _put(model, shardings, members, scopes)
    _register(model, structure, config, checkpoint, communicator, enclosing, scopes, activations)
    return communicator


def _make_parameters(
    shardings: Sequence[ParameterSharding], mesh: ParallelMesh, link: HostLink | None
) -> dict[str, Member]:
    """The sharded and replicated parameters, by name, with the values that the modules hold."""
    made: dict[str, Member] = {}
    for each in shardings:
        dtypes = each.dtypes
        if each.unit is None:
            member: Member = ReplicatedParameter(each.name, each.parameter, mesh, dtypes.compute)
        else:
            axis = mesh.experts if each.expert else mesh.dense
            given = (
                each.name, each.parameter, ShardLayout.create(each.shape, each.dim, axis.size),
                axis, mesh.device, dtypes.compute, each.autocasts, dtypes.reduce,
                each.options.offload, link,
            )  # fmt: skip
            own = each.options.custom_gather
            if own is None or own.sharded is None:
                member = ShardedParameter(*given)
            else:
                from internsp.wp.extended import ExtendedParameter  # few models have any

                member = ExtendedParameter(own.sharded, *given)
        member.parameter.grad_dtype = dtypes.grad
        made[each.name] = member
    return made


def _make_units(
    layout: ChunkLayout, structure: Structure, weights: Sequence[ShardedParameter], library: bool
) -> dict[str, Unit]:
    """The units of ``layout`` at run time, by name.

    Args:
        library: the library's communicator gathers them, in slots.
    """
    by_name, units = {weight.name: weight for weight in weights}, {}
    for planned in layout.units:
        within = ""
        if planned.block >= 0:
            within, around = planned.name, planned.around
            if around >= 0 and layout.enclosing[around].first == planned.block:
                within = layout.enclosing[around].name  # its own parameters' too
        units[planned.name] = unit = Unit(
            planned.name, [by_name[weight.name] for weight in planned.weights], planned.slot,
            planned.block, planned.recomputed, planned.trigger_at,
            planned.unshard_at_entry and library, planned.around,
            within=within and f"{within}.",
        )  # fmt: skip
        for weight in planned.weights if library else ():
            member = by_name[weight.name]
            member.slices, member.encoding = weight.slices, weight.encoding
            member.needs_gather = weight.needs_gather
        unit.assign_bytes(
            [
                Group([by_name[weight.name] for weight in group.weights], group.start, group.end)
                for group in (planned.groups if library else ())
            ]
        )
    return units


def _make_enclosing(
    layout: ChunkLayout, units: Mapping[str, Unit]
) -> list[Enclosing[ShardedParameter]]:
    return [
        Enclosing(
            each.name,
            each.number,
            units.get(each.name) or Unit(each.name, []),
            each.first,
            each.last,
            each.recomputed,
        )
        for each in layout.enclosing
    ]


def _make_chunk(
    mesh: ParallelMesh,
    config: WeightParallelConfig,
    examined: Examined,
    units: Units,
    queue: GatherQueue[ShardedParameter],
    trace: Trace,
    link: HostLink | None,
    activations: HostPool | None,
    library: bool,
    make_collectives: CollectivesFactory,
) -> Chunk:
    """What performs the queue's actions: collectives, slots, reductions."""
    counters, comm_context = Counters(), CommContext(mesh.next_model())

    def over(group: Any, make: CollectivesFactory = make_collectives) -> Collectives:
        return make(group, config.overlap, trace, counters, comm_context, mesh.device)

    gathers = {axis: over(axis.weight_group) for axis in mesh.axes}
    between = {
        axis: ReplicaCollectives(*(
            over(group, Collectives) for group in (
                axis.replica_group, axis.zero_group, axis.zero_replica_group, axis.zero_group
            )
        ))
        for axis in mesh.axes
    }  # fmt: skip
    sizes = examined.plan.slots()
    pool = MemoryPool(sizes if library else [0] * len(sizes), mesh.device, config.memory_pool)
    buffers = Buffers(mesh.device, config.memory_pool)
    near = examined.plan.reduce_near
    reductions, sums = _make_reductions(mesh, config.reduce, near, buffers, over)
    reducer = GradientReducer(reductions, trace, buffers, sums)
    return Chunk(
        units, gathers[mesh.dense], gathers, between, pool, reducer, queue, trace,
        _make_encoder(mesh, config, units), link, activations,
        _make_near(mesh, units, pool, over),
    )  # fmt: skip


def _make_reductions(
    mesh: ParallelMesh, form: str | int, near: int, buffers: Buffers, over: CollectivesFactory
) -> tuple[Mapping[WeightAxis, Collectives | TwoLevels | BackendSums], Iterable[Sum]]:
    """The collectives of each axis's reductions, at once or in two levels; sums in flight."""
    if form == "backend":
        from internsp.wp.backend_sums import BackendSums

        return {axis: BackendSums(over(axis.gradient_group)) for axis in mesh.axes}, ()
    if not near or all(axis.size <= near for axis in mesh.axes):
        return {axis: over(axis.gradient_group) for axis in mesh.axes}, ()
    from internsp.wp.two_level import TwoLevels

    in_flight: deque[Sum] = deque()
    made: dict[WeightAxis, Collectives | TwoLevels] = {}
    for axis in mesh.axes:
        if axis.size <= near:
            made[axis] = over(axis.gradient_group)
        else:
            within, between = (over(mesh.near_group(axis, near, use)) for use in ("sums", "far"))
            made[axis] = TwoLevels(within, between, buffers, in_flight)
    return made, in_flight


def _make_near(
    mesh: ParallelMesh, units: Units, pool: MemoryPool, over: Callable[[Any], Collectives]
) -> NearSlices | None:
    sliced = [weight for unit in units.all for weight in unit.weights if weight.slices]
    if not sliced:
        return None
    from internsp.wp.near import NearSlices

    kinds = {(weight.axis, weight.slices) for weight in sliced}
    gathers = {
        (axis, near): over(mesh.near_group(axis, near))
        for axis, near in sorted(kinds, key=lambda kind: (kind[0].name, kind[1]))
    }
    return NearSlices(sliced, gathers, pool)


def _make_encoder(
    mesh: ParallelMesh, config: WeightParallelConfig, units: Units
) -> Encoder | None:
    if all(weight.encoding is None for unit in units.all for weight in unit.weights):
        return None
    from internsp.wp.encode import Encoder

    return Encoder(mesh.device, config.memory_pool)


def _activation_offload(
    mesh: ParallelMesh, checkpoint: ActivationCheckpointConfig | None, examined: Examined
) -> ActivationOffload | None:
    if checkpoint is None or checkpoint.offload in (None, 0):
        return None
    from internsp.modules.offload import ActivationOffload

    return ActivationOffload(HostLink(mesh.device), checkpoint.offload, len(examined.recomputed))


def _batch_check(model: nn.Module, mesh: ParallelMesh) -> RootCheck | None:
    if mesh.sequence == 1:
        return None
    from internsp.sp import DistributedAttention
    from internsp.sp.same_batch import SameBatch

    return SameBatch(mesh, [m for m in model.modules() if isinstance(m, DistributedAttention)])


def _make_order(
    mode: str,
    chunk: Chunk,
    layout: ChunkLayout,
    replicated: ReplicatedParameters,
    contents: Contents,
    recovery: StageRecovery,
    consensus: Consensus,
) -> RunOrder:
    """The order of blocks, as ``unexpected_order`` (``mode``) says."""
    rank = dist.get_rank()
    if mode == "error":
        return RunOrder(chunk, layout, rank)
    from internsp.wp.unexpected_order import OrderLearner, make_agreement  # few models need it

    learner = None
    if mode == "learn":
        learner = OrderLearner(chunk, replicated.all_parameters(), contents, consensus, rank)
    agreement = make_agreement(recovery, replicated.sharded, rank, learner is not None)
    return RunOrder(chunk, layout, rank, agreement, learner)


def _bind(
    communicator: ISPCommunicator,
    roots: Mapping[Any, EmbeddingWeightParallelCommunicator],
    reads: ForwardReads,
    own: WPCommunicator | None,
) -> None:
    """Let each parameter know its communicator, and what reads it in a forward."""
    chunk, events, replicated = communicator.state, communicator.events, communicator.replicated
    replicated.bind(events)
    register_read_checks(replicated.sharded, communicator.recovery)
    for member in replicated.all_parameters():
        member.reads = reads
    of_unit: dict[object, WPCommunicator] = {**roots}
    if communicator.head is not None:
        of_unit[communicator.head.unit] = communicator.head
    for weight in replicated.sharded:
        weight.assign(of_unit.get(weight.unit, communicator))
    if own is not None:
        from internsp.wp.users import UsersCommunicator

        wrapped = UsersCommunicator(chunk, events, own)
        for weight in replicated.sharded:
            weight.assign(wrapped)


class Scopes:
    """The forwards in which parameters may be read: the model's, and that of each block.

    Attributes:
        root, blocks, enclosing: of the model, of the units, of blocks that hold units.
        opened: how many run.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        recomputed: set[int],
        communicator: ISPCommunicator,
    ) -> None:
        self._structure = structure
        self.opened = opened = OpenForwards()
        self.enclosing = [
            Scope(block.module, block.name, communicator, opened, True, block.layer in recomputed)
            for block in structure.enclosing
        ]
        self.recomputes = [
            structure.recomputes(i, recomputed) for i in range(len(structure.blocks))
        ]
        self.blocks = [
            Scope(
                block.module, block.name, communicator, opened, True,
                recomputes or (block.around >= 0 and self.enclosing[block.around].recomputed),
            )
            for block, recomputes in zip(structure.blocks, self.recomputes, strict=True)
        ]  # fmt: skip
        self.root = Scope(model, "", communicator, opened, block=False)

    def of(self, owner: ParameterOwner) -> Scope:
        """The scope in which a parameter may be read: the model's if several blocks share it."""
        block = block_of(owner.module_name, self._structure)
        if any(block_of(other, self._structure) != block for other in owner.others):
            return self.root
        if block >= 0:
            return self.blocks[block]
        around = enclosing_block_of(owner.module_name, self._structure)
        return self.enclosing[around] if around >= 0 else self.root


def _put(
    model: nn.Module,
    shardings: Sequence[ParameterSharding],
    members: Mapping[str, Member],
    scopes: Scopes,
) -> None:
    """Put the parameters into the modules, and wherever else these keep the ones before."""
    for each in shardings:
        for owner in each.owners:
            owner.module._parameters[owner.name] = members[each.name].parameter
    copies = {module: list(copies_of(module)) for module in model.modules()}
    for each in shardings:
        member, before = members[each.name], each.parameter
        if before is not member.parameter:
            before.replaced = member.name  # type: ignore[attr-defined]  # see watch.before_step
        for owner in each.owners:
            attach(owner.module, owner.module_name, owner.name, member, scopes.of(owner))
            for copy in copies[owner.module]:
                if copy.parameter is before:
                    owner.module._parameters.copies.append((copy.path, owner.name))  # type: ignore[attr-defined]
                    put(owner.module, copy.path, member.parameter)


def _register(
    model: nn.Module,
    structure: Structure,
    config: WeightParallelConfig,
    checkpoint: ActivationCheckpointConfig | None,
    communicator: ISPCommunicator,
    enclosing: Sequence[Enclosing[ShardedParameter]],
    scopes: Scopes,
    activations: ActivationOffload | None,
) -> None:
    """Register all hooks."""
    hooked = [
        BlockHooks(block, around.module, scope, checkpoint if scope.recomputed else None)
        for block, around, scope in zip(
            enclosing, structure.enclosing, scopes.enclosing, strict=True
        )
    ]
    hooked += [
        BlockHooks(
            communicator.blocks[i],
            block.module,
            scopes.blocks[i],
            checkpoint if scopes.recomputes[i] else None,
            block.trigger_module,
        )
        for i, block in enumerate(structure.blocks)
    ]
    compiled = structure.blocks if config.compile else ()
    compilers = {block.module: torch.compile for block in compiled}
    register_hooks(
        model,
        scopes.root,
        hooked,
        communicator,
        {**compilers, **structure.compilers},
        _context_fn(checkpoint),
        activations,
    )
    register_casts(find_casts(model, structure, config))
    keep_parameters_in_place(model, communicator.parameters_of)
    if checkpoint is not None and checkpoint.tiles != 1:
        from internsp.modules.tiles import tile_all
        from internsp.structure.tiles import find_tiled

        tiled = find_tiled(structure, checkpoint)  # refuses "auto"
        triggers = [b.trigger_module for b in structure.blocks if b.trigger_module]
        tile_all(tiled, int(checkpoint.tiles), triggers)


def _context_fn(checkpoint: ActivationCheckpointConfig | None) -> ContextFn | None:
    """What selective checkpointing keeps."""
    if checkpoint is None or checkpoint.mode != "selective":
        return None
    from internsp.sp.checkpointing import checkpoint_context_fn

    return checkpoint_context_fn
