"""Makes the library's communicator for a model that a program has given to ``fully_shard``.

It happens at the first forward, as FSDP2's lazy initialization does: by then a program has sharded
all units, filled their parameters and made its optimizer of them. So the program's parameters stay
the objects that they are, on the program's mesh; only their local tensors move into our shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from internsp.base.trace import Trace
from internsp.config import SequenceConfig, WeightParallelConfig
from internsp.errors import MeshError, StructureError
from internsp.fsdp.loop import ProgramLoop
from internsp.fsdp.units import ROOT, ProgramUnit, holders, shardings_of, structure_of, units_of
from internsp.mesh import ParallelMesh
from internsp.mesh.program import mesh_of_program
from internsp.modules.adopted import adopt
from internsp.modules.casts import ModuleCasts, register_casts
from internsp.modules.supported import is_compiled, require_supported
from internsp.parallel.build import Examined, build
from internsp.parallel.compare import require_same_model
from internsp.structure.assign import ParameterSharding
from internsp.structure.units import chunk_layout
from internsp.wp.collectives import Collectives
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import ShardedParameter
from internsp.wp.plain_loop import PlainLoop

ATTRIBUTE = "_internsp_fsdp"
"""Name under which each module of ``fully_shard`` holds its :class:`Attached`."""
OPTIONS = "_internsp_options"


class Attached:
    """A root module and its communicator.

    Attributes:
        units: the program's.
        loop: completes ``.grad`` at the end of backward.
        notes: what was taken from the program in another way than FSDP2 takes it, for
            :func:`internsp.fsdp.report`.
    """

    def __init__(
        self, root: nn.Module, units: Sequence[ProgramUnit], communicator: ISPCommunicator,
        loop: ProgramLoop, notes: Sequence[str],
    ) -> None:  # fmt: skip
        self.root, self.units, self.communicator = root, units, communicator
        self.loop, self.notes = loop, dict.fromkeys(notes)
        self.shown: list[Any] = []  # modules that hold whole plain tensors
        self._syncs = ExitStack()
        self._followed = (True, True)
        self.follow()

    def hide(self) -> None:
        """Let all modules hold their shards: a forward begins."""
        hide(self.shown)
        self.shown.clear()

    @property
    def groups(self) -> list[Any]:
        """torch's groups of parameters, one a unit that has any."""
        return [group for unit in self.units for group in unit.groups]

    def follow(self) -> None:
        """Do what the program's setters have said: which backwards only sum gradients, what divides
        them, which of them are zeros instead of ``None``."""
        said = {(group.reduce_grads, group.all_reduce_grads) for group in self.groups}
        off = [u.name for u in self.units if u.groups and not u.groups[0].all_reduce_grads]
        self.loop.mixed = ", ".join(off) if len(said) > 1 else ""
        for now in said if len(said) == 1 else ():
            if now != self._followed:
                self._syncs.close()
                self._followed = now
                if not now[0]:
                    self._syncs.enter_context(self.communicator.no_sync())
                elif not now[1]:
                    self._syncs.enter_context(self.communicator.no_replica_sync())
        for group in self.groups:
            members = [member_of(self.communicator, param) for param in group.fsdp_params]
            factor = group.gradient_divide_factor
            factor = factor or self.communicator.mesh.shape.stage_size
            self.loop.divisors.update(dict.fromkeys(members, factor))
            self.loop.zeros.difference_update(members)
            self.loop.zeros.update(members if group.reduce_scatter_unused_params else ())


def attach(root: Any) -> None:
    """Make the communicator of ``root``, which is about to run its first forward. Collective.

    Raises:
        RuntimeError, ValueError: what FSDP2's own initialization refuses, in its words.
        StructureError, MeshError: what the library does not do; all ranks raise.
    """
    hide(module for module in root.modules() if isinstance(module, FSDPModule))
    state = root._get_fsdp_state()
    state._lazy_init()
    if not state._is_root:
        raise RuntimeError(
            "FSDP state has already been lazily initialized: the root's first forward has failed, "
            "so run the root again before a module within it"
        )
    units = units_of(root, state._state_ctx.all_states)
    _require_done(units)
    modules = [module for unit in units for _, module in unit.modules]
    if not any(unit.groups for unit in units):  # nothing to gather: torch accepts it, too
        for module in modules:
            vars(module)[ATTRIBUTE] = None
        return
    mesh = _mesh(units)
    config = _config(root, units)
    notes: list[str] = []
    shardings = shardings_of(root, units, config)
    for param, sharding in shardings.items():
        param._setattr_on_modules(sharding.parameter)
    try:
        communicator = _build(root, mesh, config, units, [*shardings.values()], notes)
    except BaseException:
        for param in shardings:
            param._setattr_on_modules(param.sharded_param)
        raise
    for param in shardings:
        _take_over(communicator, param)
    register_casts(_casts(units))
    chunk = communicator.state
    assert isinstance(chunk.consumer, PlainLoop), "no optimizer can have come before"
    loop = ProgramLoop(chunk.consumer, chunk, mesh, communicator.replicated)
    chunk.attach(loop)
    attached = Attached(root, units, communicator, loop, notes)
    for module in modules:
        vars(module)[ATTRIBUTE] = attached


def _build(
    root: nn.Module,
    mesh: ParallelMesh,
    config: WeightParallelConfig,
    units: Sequence[ProgramUnit],
    shardings: Sequence[ParameterSharding],
    notes: list[str],
) -> ISPCommunicator:
    def examine() -> Examined:
        require_supported(root)
        structure = structure_of(units, config.keep_unsharded is not None, notes)
        layout = chunk_layout(
            shardings, structure, config, mesh.shape, set(), device=mesh.device.type
        )
        return Examined(structure, set(), [*shardings], layout, False)

    examined = require_same_model(root, mesh, config, SequenceConfig(), None, False, examine)
    return build(root, mesh, config, None, examined, Trace(), None, Collectives)


def _config(root: nn.Module, units: Sequence[ProgramUnit]) -> WeightParallelConfig:
    """The program's options (:func:`internsp.fsdp.options`), and what its calls imply."""
    given: dict[str, Any] = {
        "unexpected_order": "gather", "gather_before": "qkv", "compare_ranks": False,
    }  # fmt: skip
    groups = [group for unit in units for group in unit.groups]
    buffers = max((group.reduce_scatter_max_input_buffers for group in groups), default=1)
    if buffers > 2:  # the library's default
        given["reductions_in_flight"] = buffers
    return WeightParallelConfig(**given | vars(root).get(OPTIONS, {}))


def member_of(communicator: ISPCommunicator, param: Any) -> ShardedParameter:
    """The library's parameter of torch's ``FSDPParam``."""
    info = param._module_info
    member = communicator.parameters_of[info.module, info.param_name]
    assert isinstance(member, ShardedParameter), "fully_shard shards every parameter"
    return member


def _take_over(communicator: ISPCommunicator, param: Any) -> None:
    """Let the program's parameter be the library's; torch's copy of its values is freed."""
    adopt(member_of(communicator, param), param.sharded_param, holders(param))
    param._post_load_hook_handle.remove()  # ours copies loaded values into the shard
    param._sharded_param_data = param._sharded_param_data.new_empty(0)


def _mesh(units: Sequence[ProgramUnit]) -> ParallelMesh:
    """Our groups for the program's mesh; several roots on one mesh share them.

    Raises:
        MeshError: units are on different meshes, or see :func:`mesh_of_program`.
    """
    params = [
        (unit, param) for unit in units for group in unit.groups for param in group.fsdp_params
    ]
    data = params[0][1].mesh_info.mesh
    for unit, param in params:
        ranks = param.mesh_info.mesh.mesh.tolist()
        if ranks != data.mesh.tolist():
            raise MeshError(
                f"{unit.name} is sharded over ranks {ranks}, and {params[0][0].name} over "
                f"{data.mesh.tolist()}: give every fully_shard of one model the same mesh; weights "
                "of experts have an axis of their own in internsp.parallelize "
                "(docs/howto/experts.md)"
            )
    return mesh_of_program(data, [param._spmd_mesh for _, param in params])


def _require_done(units: Sequence[ProgramUnit]) -> None:
    """Refuse, by name, what the program has asked for and the library does not do.

    Raises:
        StructureError: names the call, and the line to write.
    """
    for unit in units:
        for name, module in unit.modules:
            if isinstance(getattr(unit.state, "_pre_forward", None), MethodType):
                raise StructureError(
                    f"{name or ROOT} was sharded by torch's fully_shard: call internsp.fsdp's, or "
                    "internsp.fsdp.install() before it, for all modules of a model"
                )
            if is_compiled(module):
                raise StructureError(
                    f"{unit.name} was compiled, and hooks of ours inside a compiled region are not "
                    "possible: leave the compile() out, and write internsp.fsdp.options(model, "
                    "compile=True) before the first forward"
                )


def _casts(units: Sequence[ProgramUnit]) -> list[ModuleCasts]:
    """What ``mp_policy`` says of inputs and outputs of units, outer ones first."""
    found = []
    for unit in units:
        policy = unit.state._mp_policy
        takes = policy.param_dtype if policy.cast_forward_inputs else None
        for name, module in unit.modules:
            if takes is not None or policy.output_dtype is not None:
                found.append(ModuleCasts(name, module, takes, policy.output_dtype))
    return found


def attached_to(module: nn.Module) -> Attached | None:
    """What :func:`attach` has made of a model that ``module`` is a unit of; ``None`` before."""
    found: Attached | None = vars(module).get(ATTRIBUTE)
    return found


def params_of(module: Any) -> list[Any]:
    """torch's ``FSDPParam`` of a module's own unit."""
    state = module._get_fsdp_state()
    return [param for group in state._fsdp_param_groups for param in group.fsdp_params]


def show(module: Any) -> None:
    """Put whole plain tensors in the place of the parameters of a module's unit. Collective.

    torch's hooks put the parameters back before a state dict is saved or loaded.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group.lazy_init()
        for param in group.fsdp_params if group.is_sharded else ():
            given = param.sharded_param
            with torch.no_grad():
                whole = given.full_tensor().to(param.param_dtype or given.dtype)
            param._setattr_on_modules(nn.Parameter(whole, given.requires_grad))
        group._sharded_state = ShardedState.UNSHARDED
    found = attached_to(module)
    if found is not None:
        found.shown.append(module)


def hide(modules: Iterable[Any]) -> None:
    """Put the parameters back where :func:`show` has put tensors."""
    for module in modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            group._to_sharded()
