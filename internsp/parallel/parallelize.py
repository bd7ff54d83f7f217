"""``parallelize``: attaches weight and sequence parallelism to one model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig, SequenceConfig, WeightParallelConfig
from internsp.config.combinations import mistakes, mistakes_of_blocks, require_none
from internsp.dtensor.tensor_parallel import require_on_tensor_ranks
from internsp.errors import ConfigError, StructureError
from internsp.mesh import MeshShape, ParallelMesh
from internsp.modules.casts import find_casts
from internsp.modules.supported import require_supported
from internsp.parallel.build import CollectivesFactory, Examined, build
from internsp.parallel.compare import require_same_model
from internsp.structure.assign import ParameterSharding, plan_sharding, require_patterns_matched
from internsp.structure.blocks import read_structure
from internsp.structure.units import chunk_layout
from internsp.wp.collectives import Collectives
from internsp.wp.communicator import ISPCommunicator, WPCommunicator

if TYPE_CHECKING:
    from internsp.schedule.extended import ExtendedGather
    from internsp.structure.own_class import Extend

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
    (``weight_parallel.expert_parameters``) on ``mesh.experts.param_mesh``. With ``mesh.expert``
    above 1 each rank keeps its own experts; a ``DTensor`` contains those of all expert ranks, one
    after another on dimension 0, as one process does. Layers may be tensor parallel: call torch's
    ``parallelize_module`` with ``mesh.tensor_mesh`` first. The model may be on the meta device;
    then call :func:`initialize` before its first forward. Collective: all ranks call it.

    Args:
        model: blocks, embedding and head are found by name patterns (WP-7).
        sequence: how the ranks of a sequence group compute.
        activation_checkpoint: blocks that recompute their activations.
        trace: records communication events.
        communicator: gathers weights and reduces their gradients instead of the library's
            communicator (``docs/howto/own_communicator.md``).
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
    again = ActivationCheckpointConfig() if activation_checkpoint is None else activation_checkpoint
    given = (model, nn.Module), (mesh, ParallelMesh), (config, WeightParallelConfig)
    sections = (sequence, SequenceConfig), (again, ActivationCheckpointConfig)
    for value, wanted in (*given, *sections):
        if not isinstance(value, wanted):
            raise TypeError(
                f"parallelize() was given a {type(value).__name__} in the place of a "
                f"{wanted.__name__}: call parallelize(model, mesh, WeightParallelConfig(...), "
                "sequence = SequenceConfig(...), "
                "activation_checkpoint = ActivationCheckpointConfig(...)); "
                "ParallelMesh.from_device_mesh makes a mesh of torch's DeviceMesh"
            )
    if communicator is not None and not isinstance(communicator, WPCommunicator):
        raise TypeError(
            f"communicator is a {type(communicator).__name__}: give a WPCommunicator, made "
            "(docs/howto/own_communicator.md)"
        )
    given_all = model, mesh, config, sequence, activation_checkpoint, split
    own = communicator is not None
    with ExitStack() as undo:
        examined = require_same_model(*given_all, lambda: _examine(*given_all, own, undo))
        undo.pop_all()
    trace = trace or Trace()
    made = build(
        model, mesh, config, activation_checkpoint, examined, trace, communicator, collectives
    )
    context = made.state.collectives.comm_context
    if _has_sequences(model, mesh, sequence):
        from internsp.parallel.sequences import attach_sequences

        attach_sequences(model, mesh, trace, made.mean, sequence, config.overlap, split, context)
    if mesh.expert > 1 or any(hasattr(module, "router_ranks") for module in model.modules()):
        from internsp.experts.attach import attach_experts

        attach_experts(model, mesh, trace, context)
    return made


def _examine(
    model: nn.Module,
    mesh: ParallelMesh,
    config: WeightParallelConfig,
    sequence: SequenceConfig,
    checkpoint: ActivationCheckpointConfig | None,
    split: bool,
    own: bool,
    undo: ExitStack,
) -> Examined:
    """Read the model's structure and plan its shards and units; refuse what is not supported."""
    if mesh.expert > 1:
        from internsp.parallel.experts import take_experts

        undo.callback(take_experts(model, config, mesh.expert, mesh.expert_rank).undo)
    if any(buffer.is_meta for buffer in model.buffers()):
        from internsp.values.meta import materialize_buffers  # few models need it

        materialize_buffers(model, mesh.device)
    require_on_tensor_ranks(model, mesh)
    # A pipeline has checked for all of its chunks together what recomputes.
    again = (checkpoint if mesh.pipeline == 1 else None) or ActivationCheckpointConfig()
    require_none(mistakes(config, sequence, again, ring=mesh.ring, pipeline=False, own=own))
    found = examine(
        model, config, checkpoint, mesh.shape, split, mesh.device.type, own, partial(_extend, mesh)
    )
    if _has_sequences(model, mesh, sequence):
        from internsp.parallel.sequences import require_sequence_attention, set_head_output

        require_sequence_attention(model, mesh, sequence)
        set_head_output(model, mesh, sequence)
    return found


def _extend(mesh: ParallelMesh, *given: Any) -> ExtendedGather:
    from internsp.parallel.own_class import extend  # few models have any

    return extend(mesh, *given)


def examine(
    model: nn.Module,
    config: WeightParallelConfig,
    checkpoint: ActivationCheckpointConfig | None,
    shape: MeshShape,
    split: bool = False,
    device: str = "cpu",
    own_communicator: bool = False,
    extend: Extend | None = None,
) -> Examined:
    """What can be known without ranks or values: the blocks, shards and units, what recomputes.

    Args:
        split, device, own_communicator: see :func:`internsp.structure.units.chunk_layout`.
        extend: see :func:`internsp.structure.assign.plan_sharding`.

    Raises:
        ConfigError, StructureError: a pattern matches nothing, the model or an option of it is not
            supported, or an option has no effect.
    """
    require_supported(model, config.rules, config.compile)
    structure = read_structure(
        model, config.gather_before, config.blocks, config.gather_before_modules, config.rules
    )
    inside = [block for block in structure.blocks if block.trigger_module is not None]
    if config.compile and inside:
        raise ConfigError(
            "weight_parallel.compile compiles whole blocks, but the prefetch trigger "
            f"{inside[0].trigger_name} lies inside {inside[0].name}, where no hook of ours may run "
            "(WP-13): set weight_parallel.gather_before = 'qkv' (the block's entry) and no "
            "gather_before_modules, and the same in rules"
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
    shardings = plan_sharding(model, structure, config, shape.expert, extend)
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
                f"weight_parallel.quantize (or functions of a rule or a class) of {sharding.name}: "
                "a communicator of your own decides what travels; quantize nothing, or take the "
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
        ConfigError: the configuration names a block that does not exist, or means less than one.
    """
    if config is None:
        return set()
    require_none(mistakes_of_blocks(config, blocks))
    return set(config.selected(blocks))


def initialize(communicator: ISPCommunicator, fill: InitFunction, seed: int) -> None:
    """Initialize every parameter; values do not depend on the mesh. Not collective.

    One full parameter at a time is allocated, filled and sharded.

    Args:
        fill: ``fill(name, full, generator)`` writes the full parameter ``name`` in place (for a
            tied weight of a pipeline: its name in the model).
        seed: determines, together with the name, the generator's state.
    """
    device = communicator.mesh.device
    if of_class := [m.name for m in communicator.replicated.sharded if m.of_class]:
        raise StructureError(
            f"initialize() cannot fill {', '.join(of_class[:3])}, whose shards are of a class of "
            "their own: build the model with values, and initialize others by load_state_dict"
        )
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
