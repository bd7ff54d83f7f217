"""Makes the library's communicator for a model that a program has given to ``fully_shard``.

It happens at the first forward, as FSDP2's lazy initialization does: by then a program has sharded
all units, filled their parameters and made its optimizer of them. So the program's parameters stay
the objects that they are, on the program's mesh; only their local tensors move into our shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.utils import _to_kwargs

from internsp.base.autograd import refuse_transformed
from internsp.config import WeightParallelConfig
from internsp.errors import MeshError, StructureError
from internsp.fsdp.compiled import compilers_taken
from internsp.fsdp.torchs import (
    extension,
    gathered,
    gives_zeros,
    input_buffers,
    mesh_over,
    param_groups,
    unsharded_spec,
)
from internsp.fsdp.units import (
    ProgramUnit,
    by_mesh,
    groups_of,
    params_of,
    require_noted,
    shardings_of,
    units_of,
)
from internsp.mesh import ParallelMesh
from internsp.mesh.program import mesh_of_program
from internsp.modules.adopted import adopt, follow
from internsp.modules.casts import ModuleCasts, register_casts
from internsp.modules.parameters import SHOWN
from internsp.modules.wrapping import Layer
from internsp.parallel.planned import parallelize_as
from internsp.schedule.terms import Unit
from internsp.structure.named import modules_of, structure_of
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.mean_loop import MeanLoop
from internsp.wp.parameter import ShardedParameter
from internsp.wp.plain_loop import PlainLoop

ATTRIBUTE = "_internsp_fsdp"
"""Name under which each module of ``fully_shard`` holds its :class:`Attached`."""
OPTIONS = "_internsp_options"


@dataclass(eq=False)
class Attached:
    """A root module and its communicator.

    Attributes:
        units: the program's.
        loop: completes ``.grad`` at the end of backward.
        notes: what was taken from the program in another way than FSDP2 takes it, for
            :func:`internsp.fsdp.report`.
        compiled: whether forwards of units are compiled.
        plain: weights whose classes have no all-gather functions of their own.
        shown: modules that hold whole plain tensors.
    """

    root: nn.Module
    units: Sequence[ProgramUnit]
    communicator: ISPCommunicator
    loop: MeanLoop
    notes: dict[str, None]
    compiled: bool
    plain: Sequence[ShardedParameter]
    shown: list[Any] = field(default_factory=list)
    _syncs: ExitStack = field(default_factory=ExitStack)
    _followed: tuple[bool, bool] = (True, True)

    @property
    def zero(self) -> bool:
        """Whether an optimizer takes gradients, in the place of the loop."""
        return self.communicator.state.consumer.is_optimizer

    def require_planned(self) -> None:
        """Check at a forward that no weight has all-gather functions that its gather is planned
        without.

        Raises:
            StructureError: one has.
        """
        for weight in self.plain:
            local: Any = weight.parameter._local_tensor  # type: ignore[attr-defined]
            if hasattr(local, "fsdp_pre_all_gather"):
                raise StructureError(
                    f"{weight.name} has got fsdp_pre_all_gather since its gather was planned, at "
                    "the first forward: put the functions on its local tensor before"
                )

    def finish(self) -> None:
        """Complete ``.grad`` of what a pipeline's backwards have only summed."""
        self.communicator.events.begin_backward_part(weights=True)  # of no graph
        self.communicator.events.end_backward_part()

    def follow(self) -> None:
        """Follow the setters: which backwards only sum, what changes sums, what is zeros.

        Raises:
            StructureError: see :meth:`require_unchanged`.
        """
        groups, replicas = groups_of(self.units), self.communicator.mesh.replicas > 1
        says = [(g.reduce_grads, g.all_reduce_grads or not replicas) for g in groups]
        now = says[0] if len({*says}) == 1 else (True, True)
        if now != self._followed:
            self._syncs.close()
            self._followed = now
            if not now[0]:
                self._syncs.enter_context(self.communicator.no_sync())
            elif not now[1]:
                self._syncs.enter_context(self.communicator.no_replica_sync())
        loop = self.loop
        for noted in (loop.waiting, loop.divisors, loop.hooks, loop.zeros):
            noted.clear()
        for group, said in zip(groups, says, strict=True):
            members = [member_of(self.communicator, param) for param in group.fsdp_params]
            loop.waiting.update(members if all(now) and not all(said) else ())
            if (factor := group.gradient_divide_factor) is not None:
                loop.divisors.update(dict.fromkeys(members, factor))
            if (hook := _hook_of(group)) is not None:
                loop.hooks.update(dict.fromkeys(members, hook))
            loop.zeros.update(members if gives_zeros(group) else ())
        if self.zero:
            self.require_unchanged()

    def require_unchanged(self) -> None:
        """Check that nothing is said of some weights' gradients, which an optimizer takes as sums
        that it divides by one number.

        Raises:
            StructureError: it is.
        """
        loop = self.loop
        hooked = any(hooks for taken in loop.taken.values() for hooks in taken)
        if loop.waiting or loop.hooks or loop.zeros or hooked:
            raise StructureError(
                "a hook, zeros of unused parameters and a setter of some units need .grad, which a "
                "model of zero_optimizer has not: call setters of synchronization on the whole "
                "model, and leave the others out"
            )
        members = self.communicator.replicated.all_parameters()
        consumer = self.communicator.state.consumer
        divisors = {each.divisor(m): m.name for each in (consumer, loop) for m in members}
        if len(divisors) > 1:
            told = ", ".join(f"those of {name} by {by:g}" for by, name in divisors.items())
            raise StructureError(
                f"sums of gradients are divided by several numbers ({told}), and an optimizer of "
                "zero_optimizer divides all by one, which stays: call set_gradient_divide_factor "
                "with the same number on every module of fully_shard, also those of experts, "
                "before zero_optimizer"
            )


@torch.inference_mode(False)  # the first forward may be an evaluation
def attach(root: Any, compiler: Layer | None = None) -> None:
    """Make the communicator of ``root``, which is about to run its first forward. Collective.

    Args:
        compiler: compiles what calls the model.

    Raises:
        RuntimeError, ValueError: what FSDP2's own initialization refuses, in its words.
        StructureError, MeshError: what the library does not do.
    """
    refuse_transformed("the model", False)
    hide(module for module in root.modules() if isinstance(module, FSDPModule))
    noted = root._get_fsdp_state()
    noted._lazy_init()
    if not noted._is_root:
        raise RuntimeError(
            "FSDP state has already been lazily initialized: the root's first forward has failed, "
            "so run the root again before a module within it"
        )
    units = units_of(root, noted._state_ctx.all_states)
    for unit in units:
        if isinstance(getattr(unit.state, "_pre_forward", None), MethodType):
            raise StructureError(
                f"{unit.name} was sharded by torch's fully_shard: call internsp.fsdp's, or "
                "internsp.fsdp.install() before, for all modules of a model"
            )
    require_noted(root, units)
    modules = modules_of(units)
    if not params_of(units):  # nothing to gather: torch accepts it, too
        for module in modules:
            vars(module)[ATTRIBUTE] = None
        return
    mesh, config, notes = _mesh(units), _config(root, units), list[str]()
    try:
        shardings = shardings_of(root, units, config)
        with compilers_taken(root, units, compiler, notes) as compilers:
            communicator = parallelize_as(
                root, mesh, config,
                lambda: structure_of(units, config.keep_unsharded is not None, compilers, notes),
                [*shardings.values()],
            )  # fmt: skip
    except BaseException:
        for param in params_of(units):
            param._setattr_on_modules(param.sharded_param)
        raise
    moved: dict[Tensor, ShardedParameter] = {}
    plain = []
    for param, sharding in shardings.items():  # the program's parameter is the library's
        member, memory = member_of(communicator, param), param._sharded_param_data
        if not member.of_class:
            plain.append(member)
            before = adopt(member, param.sharded_param, sharding.owners, memory)
            if before is not None:
                moved[before] = member
        param._post_load_hook_handle.remove()  # ours copies loaded values into the shard
        param._sharded_param_data = torch.empty(0)  # torch's is ours, or freed
    follow(moved)
    register_casts(_casts(units))
    if mesh.device.type != "cpu":  # FSDP2's root moves its inputs, as DDP does
        move = partial(_moved, mesh.device)
        root.register_forward_pre_hook(move, prepend=True, with_kwargs=True)
    chunk = communicator.state
    assert isinstance(chunk.consumer, PlainLoop), "no optimizer can have come before"
    loop = MeanLoop(chunk.consumer, chunk, mesh, communicator.replicated)
    chunk.attach(loop)
    attached = Attached(
        root, units, communicator, loop, dict.fromkeys(notes), bool(compilers), plain
    )
    attached.follow()
    noted._root_post_backward_final_callback = attached.finish  # torch's pipelines call it
    for module in modules:
        vars(module)[ATTRIBUTE] = attached


def _config(root: nn.Module, units: Sequence[ProgramUnit]) -> WeightParallelConfig:
    """The program's options (:func:`internsp.fsdp.options`), and what its calls imply."""
    given: dict[str, Any] = {
        "unexpected_order": "gather", "gather_before": "qkv", "compare_ranks": False,
        "reduction": "mean",
        "reductions_in_flight": max(2, *map(input_buffers, groups_of(units))),  # 2: the default
    }  # fmt: skip
    return WeightParallelConfig(**given | vars(root).get(OPTIONS, {}))


def _hook_of(group: Any) -> Callable[[Tensor], None] | None:
    """The hook that the program has given to the reductions of torch's ``group``."""
    hook, stream = group._all_reduce_hook, group._all_reduce_hook_stream
    if hook is None or stream is None:
        return cast("Callable[[Tensor], None] | None", hook)

    def on_stream(mean: Tensor) -> None:
        here = torch.accelerator.current_stream()
        stream.wait_stream(here)
        with stream:
            hook(mean)
        here.wait_stream(stream)

    return on_stream


def member_of(communicator: ISPCommunicator, param: Any) -> ShardedParameter:
    """The library's parameter of torch's ``FSDPParam``."""
    info = param._module_info
    member = communicator.parameters_of[info.module, info.param_name]
    assert isinstance(member, ShardedParameter), "fully_shard shards every parameter"
    return member


def _mesh(units: Sequence[ProgramUnit]) -> ParallelMesh:
    """Our groups for the program's meshes; several roots on the same share them.

    Raises:
        MeshError: parameters are on more than two meshes, or see :func:`mesh_of_program`.
    """
    found = by_mesh(units)
    if len(found) > 2:
        listed = (f"{p._param_fqn} over {p.mesh_info.mesh.mesh.tolist()}" for p, *_ in found)
        raise MeshError(
            f"parameters are sharded over the ranks of {len(found)} meshes ({'; '.join(listed)}): "
            "give every fully_shard of one model the same mesh, or one beside it for all experts"
        )
    data, *experts = (params[0].mesh_info for params in found)
    return mesh_of_program(
        data.mesh, [*map(mesh_over, found[0])], *(own.mesh for own in experts),
        sharded=isinstance(data, FSDPMeshInfo),
    )  # fmt: skip


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


def _moved(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    moved, named = _to_kwargs(args, kwargs, device, False)  # type: ignore[no-untyped-call]
    return (moved[0], named[0]) if args or kwargs else None


def attached_to(module: Any) -> Attached | None:
    """What :func:`attach` has made of a model that ``module`` is a unit of; ``None`` before."""
    found: Attached | None = vars(module).get(ATTRIBUTE)
    return found


def plan_of(module: nn.Module, asks: str) -> Attached:
    """The same, of a module that must have it.

    Raises:
        ValueError: it is no module of ``fully_shard``, or has not run.
    """
    if (found := attached_to(module)) is None:
        raise ValueError(
            f"{asks}: this {type(module).__name__} has no plan: call internsp.fsdp.fully_shard on "
            "it, and run a forward, at which gathers are planned"
        )
    return found


def at_rest(module: Any) -> tuple[ISPCommunicator, Sequence[Unit[ShardedParameter]]] | None:
    """The communicator and the units of a module's own parameters, if no pass runs.

    The root's unit, which has norms and biases of others, is the root's alone.
    """
    found = attached_to(module)
    if found is None or found.communicator.events.busy:
        return None
    root, params = found.units[0].name, param_groups(module._get_fsdp_state())
    units = [member_of(found.communicator, p).unit for group in params for p in group.fsdp_params]
    own = [unit for unit in units if module is found.root or unit.name != root]
    return found.communicator, [*dict.fromkeys(own)]


def show(module: Any) -> None:
    """Put whole plain tensors in the place of the parameters of a module's unit. Collective.

    torch's hooks put the parameters back before a state dict is saved or loaded.
    """
    for group in param_groups(module._get_fsdp_state()):
        group.lazy_init()
        for param in group.fsdp_params if group.is_sharded else ():
            given = param.sharded_param
            spec = unsharded_spec(param)  # of a part of it, on a program's other ranks
            with torch.no_grad():
                if extended := extension(param):
                    whole = gathered(param, extended)
                    if spec is not None:
                        whole = DTensor.from_local(whole, spec.mesh, spec.placements)
                else:
                    whole = given.full_tensor().to(param.param_dtype or given.dtype)
                    if spec is not None:
                        whole = distribute_tensor(
                            whole, spec.mesh, spec.placements, src_data_rank=None
                        )
            shown = nn.Parameter(whole, given.requires_grad)
            setattr(shown, SHOWN, True)
            param._setattr_on_modules(shown)
        group._sharded_state = ShardedState.UNSHARDED
    found = attached_to(module)
    if found is not None:
        found.shown.append(module)


def hide(modules: Iterable[Any]) -> None:
    """Put the parameters back where :func:`show` has put tensors."""
    for module in modules:
        for group in param_groups(module._get_fsdp_state()):
            group._to_sharded()
