"""Reads what a program has told FSDP2: units, parameters, dtypes. Its answers are our plan's input.

torch's own ``fully_shard`` has sharded the parameters and noted every argument on its states. A
state is a unit here, too: a block if no other unit lies in it, a block with units of its own if
blocks do, and else one that stays unsharded from the model's entry to the end of backward, as
FSDP2's root does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from internsp.config import WeightParallelConfig
from internsp.errors import StructureError
from internsp.structure.assign import (
    ParameterOwner,
    ParameterSharding,
    WeightOptions,
    names_by_module,
)
from internsp.structure.blocks import Block, EnclosingBlock, Structure
from internsp.structure.dtypes import WeightDtypes
from internsp.structure.prefetch import KEYS, prefetch_counts

ROOT = "the root"
"""Name of the root's own unit."""


@dataclass(eq=False)
class ProgramUnit:
    """One call of ``fully_shard``.

    Attributes:
        state: torch's ``FSDPState`` of it, which holds its arguments.
        name: of its module; several are joined by ``+``.
        kind: ``"block"``, ``"enclosing"`` (a block with units of its own) or ``"root"`` (unsharded
            from the model's entry to the end of backward).
        number: index among those of its kind; of a block also that of its enclosing one, or -1.
    """

    state: Any
    name: str
    kind: str
    number: int = -1
    around: int = -1
    modules: Sequence[tuple[str, nn.Module]] = field(default=())

    @property
    def groups(self) -> Sequence[Any]:
        """torch's ``FSDPParamGroup`` of it: none without parameters, else one."""
        return cast("Sequence[Any]", self.state._fsdp_param_groups)

    @property
    def keeps(self) -> bool:
        """Whether it stays unsharded from forward to backward."""
        return bool(self.groups) and self.groups[0].post_forward_mesh_info is None

    @property
    def near_ranks(self) -> int:
        """Ranks of the smaller group that keeps it after forward; 0: none."""
        if not self.groups or self.groups[0].post_forward_mesh_info is None:
            return 0
        group = self.groups[0]
        size: int = group.post_forward_mesh_info.shard_mesh_size
        return 0 if size == group.mesh_info.shard_mesh_size else size


def units_of(root: nn.Module, states: Sequence[Any]) -> list[ProgramUnit]:
    """The units below ``root``, in the order in which their modules are registered."""
    names = {module: name for name, module in root.named_modules()}
    modules = {state: [(names[m], m) for m in state._modules] for state in states}
    inside: dict[Any, set[Any]] = {}
    for state in states:
        below = {id(part) for _, module in modules[state] for part in module.modules()}
        inside[state] = {
            other for other in states
            if other is not state and any(id(m) in below for _, m in modules[other])
        }  # fmt: skip
    single = {state: len(modules[state]) == 1 and state is not states[0] for state in states}
    leaves = {state for state in states if single[state] and not inside[state]}
    around = {
        state for state in states if single[state] and inside[state] and inside[state] <= leaves
    }
    found, blocks = [], 0
    enclosing: dict[Any, int] = {}
    for state in states:
        name = "+".join(name for name, _ in modules[state]) or ROOT
        unit = ProgramUnit(state, name, "root", modules=modules[state])
        if state in around:
            unit.kind, unit.number = "enclosing", len(enclosing)
            enclosing[state] = unit.number
        elif state in leaves:
            unit.kind, unit.number = "block", blocks
            unit.around = next((n for o, n in enclosing.items() if state in inside[o]), -1)
            blocks += 1
        found.append(unit)
    return found


def structure_of(units: Sequence[ProgramUnit], free: bool, notes: list[str]) -> Structure:
    """The units as the library's structure.

    Args:
        free: the program's options say which other blocks stay unsharded.
        notes: gets a line for each list of modules to prefetch that the plan does not follow.
    """
    by_state = {unit.state: unit for unit in units}
    layers = [u for u in units if u.kind == "enclosing" or (u.kind == "block" and u.around < 0)]
    layer_of = {id(unit): number for number, unit in enumerate(layers)}
    owners = [unit for unit in units if unit.kind == "enclosing"]
    blocks = []
    for unit in units:
        if unit.kind != "block":
            continue
        options: dict[str, Any] = {}
        if unit.keeps or not free:
            options["keep_unsharded"] = unit.keeps
        for key, states in (
            ("forward_prefetch", unit.state._states_to_forward_prefetch),
            ("backward_prefetch", unit.state._states_to_backward_prefetch),
        ):
            named = [by_state[state] for state in states if state in by_state]
            ahead = tuple(other.name for other in named if other.kind == "block")
            if ahead:
                options[key] = ahead
        owner = owners[unit.around] if unit.around >= 0 else unit
        blocks.append(
            Block(
                unit.name, unit.modules[0][1], None, None, rule_options=options,
                modules=tuple(unit.modules), layers=(layer_of[id(owner)],), around=unit.around,
            )
        )  # fmt: skip
    enclosing = []
    for unit in owners:
        own = [u.number for u in units if u.kind == "block" and u.around == unit.number]
        enclosing.append(
            EnclosingBlock(unit.name, unit.modules[0][1], layer_of[id(unit)], own[0], own[-1])
        )
    return Structure(
        tuple(blocks), None, None, prefetch_counts=_prefetches(blocks, notes),
        enclosing=tuple(enclosing), layers=len(layers),
    )  # fmt: skip


def _prefetches(blocks: Sequence[Block], notes: list[str]) -> dict[tuple[str, int], int]:
    """How many units each block gathers ahead, by phase and index, where the program says so."""
    names = [block.name for block in blocks]
    found: dict[tuple[str, int], int] = {}
    for number, block in enumerate(blocks):
        for key in KEYS.keys() & block.rule_options.keys():
            rules: list[dict[str, Any]] = [{} for _ in blocks]
            rules[number] = {key: block.rule_options[key]}
            try:
                found |= prefetch_counts(names, rules, None)
            except StructureError as error:
                notes.append(f"set_modules_to_{key}: one block ahead, as planned ({error})")
    return found


def shardings_of(
    root: nn.Module, units: Sequence[ProgramUnit], config: WeightParallelConfig
) -> dict[Any, ParameterSharding]:
    """How each parameter is sharded, by torch's ``FSDPParam``, in the order of registration.

    The modules hold the parameters of :func:`stand_in` after this call.

    Raises:
        StructureError: a parameter has a class of its own with all-gather functions.
    """
    places = names_by_module(root)
    order = {module: number for number, module in enumerate(places)}
    found: dict[Any, ParameterSharding] = {}
    for unit in units:
        for group in unit.groups:
            for param in group.fsdp_params:
                found[param] = _sharding(unit, param, places, config)

    def registered(param: Any) -> tuple[int, int]:
        info = param._module_info
        return order[info.module], list(info.module._parameters).index(info.param_name)

    return {param: found[param] for param in sorted(found, key=registered)}


def _sharding(
    unit: ProgramUnit, param: Any, places: dict[nn.Module, list[str]], config: WeightParallelConfig
) -> ParameterSharding:
    parameter = param.sharded_param
    order = {module: number for number, module in enumerate(places)}
    owners = tuple(
        ParameterOwner(places[module][0], module, name, tuple(places[module][1:]))
        for module, name in sorted(holders(param), key=lambda held: order[held[0]])
    )
    if hasattr(parameter._local_tensor, "fsdp_pre_all_gather"):
        raise StructureError(
            f"{owners[0].full_name} is a {type(parameter._local_tensor).__name__} with "
            "fsdp_pre_all_gather, which internsp.fsdp does not call: hold a plain parameter, and "
            "give both functions to a rule of internsp.WeightParallelConfig (pre_all_gather, "
            "post_all_gather; docs/howto/rules.md), or take internsp.fsdp.options(quantize=...)"
        )
    if parameter.is_floating_point() and parameter.dtype.itemsize == 1:
        raise StructureError(
            f"{owners[0].full_name} is stored as {parameter.dtype}, in which nothing is summed: "
            "give it to fully_shard(ignored_params={...}); it stays whole on every rank then"
        )
    offload = ("weights",) if param.offload_to_cpu else ()
    near = (unit.near_ranks or config.near_ranks) if unit.kind == "block" else 0
    options = WeightOptions(config.coalesce_bytes, offload, near, config.quantize)
    grad = parameter.grad_dtype or parameter.dtype
    dtypes = WeightDtypes(param.param_dtype or parameter.dtype, param.reduce_dtype, grad)
    block = unit.number if unit.kind == "block" else -1
    linear = getattr(owners[0].module, "autocasts", isinstance(owners[0].module, nn.Linear))
    return ParameterSharding(
        stand_in(param), owners, unit.name, block, param.fsdp_placement.dim, False, linear,
        dtypes, options,
    )  # fmt: skip


def holders(param: Any) -> list[tuple[nn.Module, str]]:
    """The modules that hold torch's ``FSDPParam``, and its names in them."""
    info = param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def stand_in(param: Any) -> nn.Parameter:
    """A parameter like the one that FSDP2 has sharded, before that: without memory, or values.

    The library makes its own shards of it, as of any parameter; the program's take their place.
    """
    parameter = param.sharded_param
    like = torch.zeros((), dtype=parameter.dtype, device=param.device)
    whole: Any = like.expand(param._orig_size)
    spec: DTensorSpec | None = param._unsharded_dtensor_spec
    if spec is not None:  # of a layer that torch's parallelize_module has sharded
        whole = DTensor.__new__(DTensor, whole, spec, requires_grad=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
