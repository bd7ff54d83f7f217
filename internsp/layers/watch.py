"""What a user may do to a parallel model later, and what would go wrong in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from internsp.autograd import compiled
from internsp.dtensor.mixed import each
from internsp.dtensor.placed import dtensor_like
from internsp.errors import GradientError, StructureError
from internsp.layers.parameters import weights_of
from internsp.layers.supported import is_compiled
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member

_tensor: Any = torch.Tensor
_hooks = _tensor._backward_hooks.__get__
_accumulated = _tensor._post_accumulate_grad_hooks.__get__


def require_no_gradient_hooks(model: nn.Module, members: Sequence[Member]) -> Callable[..., None]:
    """A forward pre-hook of ``model`` that refuses what would run past communication.

    Args:
        members: the parameters that ``parallelize`` has made.
    """
    first = [True]

    def look(*_: Any) -> None:
        if first:  # later ones are found where they are entered
            for name, module in model.named_modules():
                if is_compiled(module):
                    raise compiled(name or "the model")
            first.clear()
        parameters = [member.parameter for member in members]
        hooked = zip(members, each(_hooks, parameters), each(_accumulated, parameters), strict=True)
        for member, hooks, accumulated in hooked:
            if hooks or accumulated:
                raise GradientError(
                    f"{member.name} has a gradient hook, which autograd would call without a "
                    "gradient: that exists when its reduction is finished, after backward. Remove "
                    "the hook and read .grad when backward() has returned, or hook the modules' "
                    "outputs"
                )

    return look


def stepping(
    alive: Callable[[], ISPCommunicator | None], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    """Any optimizer of torch is about to step, perhaps ours or another model's.

    Raises:
        StructureError: it was made before ``parallelize``, and would step nothing.
    """
    communicator = alive()
    if communicator is None:
        return
    for parameter in (p for g in optimizer.param_groups for p in g["params"]):
        replaced = getattr(parameter, "replaced", None)
        if replaced is not None:
            raise StructureError(
                f"the optimizer that steps on rank {dist.get_rank()} has {replaced} as it was "
                "before parallelize(), which nothing trains any more: make the optimizer after it"
            )
    members = communicator.replicated.everyone()
    refuse_optimizer(optimizer, (member.parameter for member in members))
    if communicator.plain is not None:
        params = (p for g in optimizer.param_groups for p in g["params"])
        communicator.plain.unfinished.refuse(params)
    if communicator.state.handles or communicator.whole_in:
        # Another model's optimizer writes none of the shards that gathers in flight read.
        ours = {id(member.parameter) for member in members}
        if any(id(p) in ours for g in optimizer.param_groups for p in g["params"]):
            communicator.require_shards()
            communicator.settle_gathers()


def stepped(
    alive: Callable[[], ISPCommunicator | None], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    """It has stepped: no version counter shows what ``foreach`` and fused operations wrote."""
    communicator = alive()
    if communicator is None:
        return
    written = {id(p) for g in optimizer.param_groups for p in g["params"]}
    for member in communicator.replicated.everyone():
        if id(member.parameter) in written:
            member.invalidate()


def loading(
    communicator: ISPCommunicator, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Make ``DTensor`` like the parameters of what a module is about to be loaded with.

    Raises:
        LayoutError: values of another shape.
    """
    if communicator.whole_in:
        return
    for name in weights_of(module):
        values = state.get(prefix + name)
        if isinstance(values, Tensor):
            member = communicator.places[module, name]
            state[prefix + name] = dtensor_like(member.parameter, member.part_of(values))


def loaded(communicator: ISPCommunicator, module: nn.Module, *_: Any) -> None:
    """A module's parameters were loaded; with ``assign=True`` ours were replaced: take the values.

    Our parameters stay, and with them any optimizer's. Whole tensors of one process are cut.
    """
    if communicator.whole_in:  # what was loaded are whole parameters, written back later
        return
    for name in weights_of(module):
        member = communicator.places[module, name]
        given = module._parameters.get(name)
        if given is not None and given is not member.parameter:
            member.take(given)
            module._parameters[name] = member.parameter
        member.invalidate()


# What is in none of them is taken to step DTensor as it would the whole.
_NOT_BY_ELEMENT = (torch.optim.LBFGS, torch.optim.Muon)


def refuse_optimizer(optimizer: torch.optim.Optimizer, ours: Iterable[nn.Parameter]) -> None:
    """Before an optimizer's step.

    Raises:
        StructureError: it lays all parameters in one vector, which shards cannot be, or works on a
            whole matrix.
    """
    if not isinstance(optimizer, _NOT_BY_ELEMENT) and not _is_adafactor(optimizer):
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not isinstance(optimizer, torch.optim.LBFGS):
        _refuse_whole(optimizer, [p for p in ours if id(p) in stepped])
        return
    if any(id(parameter) in stepped for parameter in ours):
        raise StructureError(
            "torch.optim.LBFGS lays all parameters in one vector, which parameters sharded over "
            "ranks cannot be: use an optimizer that works parameter by parameter (AdamW, SGD, ...)"
        )


def _refuse_whole(optimizer: torch.optim.Optimizer, stepped: Iterable[nn.Parameter]) -> None:
    """Muon would sum its products over ranks in bf16: other numbers on each mesh, and, with
    replicas, not surely the same on all of them. Adafactor's statistics fail within ``DTensor``."""
    adafactor = _is_adafactor(optimizer)
    for parameter in stepped:
        cut = any(
            isinstance(placement, Shard) and parameter.device_mesh.size(dim) > 1  # type: ignore[attr-defined]
            for dim, placement in enumerate(parameter.placements)  # type: ignore[attr-defined]
        )
        if adafactor or cut:
            name = type(optimizer).__name__
            raise StructureError(
                f"{name} steps whole matrices, and parameters (one of shape "
                f"{list(parameter.shape)}) are sharded over ranks: its numbers would not be those "
                "of one process. Give it to a ZeroOptimizer, which brings each matrix together on "
                f"one rank: internsp.ZeroOptimizer(communicator, {name}, ...)"
            )


def _is_adafactor(optimizer: torch.optim.Optimizer) -> bool:
    """torch's, or that of transformers."""
    return any(base.__name__ == "Adafactor" for base in type(optimizer).__mro__)


def stay(model: nn.Module, places: Mapping[tuple[nn.Module, str], Member]) -> None:
    """Let ``model.to()``, ``cpu()``, ``half()`` and their kin pass where they change no parameter.

    torch would swap each parameter's object, which is the library's. Buffers move and are cast as
    ever.
    """
    of: dict[nn.Module, list[Member]] = {model: []}
    for (module, _), member in places.items():
        of.setdefault(module, []).append(member)
    everyone = list(dict.fromkeys(places.values()))
    for module, own in of.items():
        module._apply = partial(  # type: ignore[method-assign]
            _apply_beside, module, everyone if module is model else own
        )


def _apply_beside(
    module: nn.Module,
    members: Sequence[Member],
    fn: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> nn.Module:
    """``nn.Module._apply`` of buffers and children.

    Raises:
        StructureError: ``fn`` would change a parameter.
    """
    kinds: dict[tuple[torch.dtype, torch.device, int], Member] = {}
    for member in members:
        kinds.setdefault((member.dtype, member.parameter.device, len(member.shape)), member)
    for (dtype, device, dim), member in kinds.items():  # memory_format is of 4 dimensions, or 5
        probe = torch.empty((2,) * dim, dtype=dtype, device=device)
        if fn(probe) is not probe or (probe.is_shared() and device.type == "cpu"):
            raise StructureError(
                f"{member.name} on rank {dist.get_rank()} was to be moved or cast (model.to(), "
                "half(), to_empty(), share_memory() or their kin), but a parallel model's stay "
                "where parallelize() has put them: move or cast the model before, or set "
                "weight_parallel.compute_dtype; internsp.initialize fills one from the meta device"
            )
    if recurse:
        for child in module.children():
            child._apply(fn)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module
