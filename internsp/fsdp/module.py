"""``fully_shard`` and ``FSDPModule``: FSDP2's names and meanings, the library's communicator.

torch's own ``fully_shard`` checks the arguments, shards the parameters and notes what was said. Its
hooks are removed before any of them runs; at the first forward :mod:`internsp.fsdp.attach` makes
the communicator of what is noted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import cache, partial, wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, UnshardHandle
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register  # noqa: F401
from torch.distributed.tensor import DTensor

from internsp.dtensor.mixed import raw_grad
from internsp.dtensor.unfinished import UnfinishedGradient
from internsp.errors import OrderError, StructureError
from internsp.fsdp.attach import ATTRIBUTE, at_rest, attach, attached_to, hide, show
from internsp.fsdp.compiled import compiler_around
from internsp.fsdp.torchs import ties_checked
from internsp.fsdp.units import note_parameters
from internsp.modules.methods import RUNNING, as_forward

_LOG = logging.getLogger("internsp.fsdp")
_NO_CAST, _NO_OFFLOAD = MixedPrecisionPolicy(), OffloadPolicy()


class FSDPModule(TorchFSDPModule):
    """A module of ``fully_shard``: torch's ``FSDPModule``, whose passes are the library's.

    Methods that are not here are torch's: they note what is said, which is read at the first
    forward, or followed at once (``_FOLLOWED``).
    """

    _orig_cls_mro_index = 4  # FSDPLinear, FSDPModule, torch's of both names, Linear

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the first call makes the communicator (collective)."""
        if torch.compiler.is_dynamo_compiling():
            return _call_uncompiled(self, *args, **kwargs)
        own: dict[str, Any] = self.__dict__
        if ATTRIBUTE not in own:
            attach(self)
        found = own[ATTRIBUTE]
        if found is not None:
            if found.root is self:
                found.require_planned()
            if found.shown:
                hide(found.shown)
                found.shown.clear()
        if own.get(RUNNING):  # within a method that is registered as a forward
            return self.forward(*args, **kwargs)  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Let the module hold whole plain tensors until :meth:`reshard` or the next forward.

        With ``async_op`` start its gathers for the next forward; ``wait()`` then does the former.
        """
        if not async_op:
            show(self)
            return None
        if found := at_rest(self):
            communicator, units = found
            with suppress(OrderError):  # no room in the slots: gathered when it is used
                communicator.unshard_units(units)
        handle = UnshardHandle()
        handle.wait = partial(show, self)  # type: ignore[method-assign]
        return handle

    def reshard(self) -> None:
        """Let the module hold its shards, and drop what is unsharded between two passes."""
        hide([self])
        if found := at_rest(self):
            communicator, units = found
            communicator.reshard_units(units)

    def reset_iter_state(self) -> None:
        """Drop the gradients of an iteration that failed; the next forward recovers by itself."""
        if self._get_fsdp_state()._is_root is False:
            raise RuntimeError("reset_iter_state() must be called on the root FSDP module")
        if found := attached_to(self):
            for member in found.communicator.replicated.all_parameters():
                if isinstance(raw_grad.__get__(member.parameter), UnfinishedGradient):
                    member.parameter.grad = None
            found.loop.placeholders.drop_removed()

    def set_post_optim_event(self, event: Any) -> None:
        """Let the current stream wait for ``event``; gathers wait for the current stream."""
        torch.accelerator.current_stream().wait_event(event)


@torch._disable_dynamo
def _call_uncompiled(module: FSDPModule, *args: Any, **kwargs: Any) -> Any:
    """Call a module from code that is being compiled: the graph is broken, as by FSDP2's hooks."""
    if ATTRIBUTE not in vars(module):
        attach(module, compiler_around())
    found = attached_to(module)
    if found is not None and not found.compiled and _UNCOMPILED not in found.notes:
        found.notes[_UNCOMPILED] = None
        _LOG.warning(_UNCOMPILED)
    return module(*args, **kwargs)


_UNCOMPILED = (
    "torch.compile around the model compiles nothing of it: what has a fully_shard of its own "
    "within the model is compiled, if the first forward is"
)
_OWN = "write internsp.parallelize(..., communicator=yours) (docs/howto/own_communicator.md)"
_SLOTS = "leave it out: slots are allocated once, before training"
_FOLLOWED = (
    "set_requires_gradient_sync", "set_requires_all_reduce", "set_gradient_divide_factor",
    "set_reduce_scatter_unused_params", "set_all_reduce_hook",
)  # fmt: skip
"""Setters that torch notes; they hold from the next backward on."""
_PLANNED = (
    "set_reshard_after_forward", "set_reshard_after_backward", "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch", "set_reduce_scatter_max_input_buffers",
)  # fmt: skip
"""Setters that torch notes; the plan is made of them at the first forward."""
_REFUSED = {
    "set_custom_all_gather": _OWN,
    "set_custom_reduce_scatter": _OWN,
    "set_allocate_memory_from_process_group_for_comm": _SLOTS,
    "set_symm_mem_for_comm": _SLOTS,
}
"""Setters that mean something which is not done, and the line to write instead."""


def _setter(name: str) -> Callable[..., None]:
    """Torch's method ``name``, and what follows from it here."""
    torchs = getattr(TorchFSDPModule, name)

    @wraps(torchs)
    def call(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        if name in _REFUSED and not any(x is False for x in (*args, *kwargs.values())):
            raise StructureError(
                f"{name}() means something that internsp.fsdp does not do: {_REFUSED[name]}"
            )
        torchs(self, *args, **kwargs)
        found = attached_to(self)
        if found is not None and name in _FOLLOWED:
            found.follow()
        elif found is not None and name not in found.notes:
            found.notes[name] = None
            _LOG.warning("%s: memory and traffic stay as planned at the first forward", name)

    return call


for _name in (*_FOLLOWED, *_PLANNED, *_REFUSED):
    if hasattr(TorchFSDPModule, _name):  # torch 2.11 has fewer
        setattr(FSDPModule, _name, _setter(_name))


@cache
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    """torch's class of a sharded module with :class:`FSDPModule` before it, under its name."""
    return type(kind.__name__, (FSDPModule, kind), {})


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _NO_CAST,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """``torch.distributed.fsdp.fully_shard``, with the library's communicator. In place.

    Arguments, errors and the result are torch's: parameters are ``DTensor`` on ``mesh`` when it
    returns. The communicator is made at the first forward.

    Raises:
        StructureError: what the library does not do, with the line to write instead.
    """
    some = mesh is not None and mesh.mesh.numel() < dist.get_world_size()
    if some and type(reshard_after_forward) is int:  # torch's own groups for it would hang
        raise StructureError(
            f"reshard_after_forward={reshard_after_forward} needs a mesh of all ranks: leave it "
            f"out, and write internsp.fsdp.options(model, near_ranks={reshard_after_forward})"
        )
    for part in parts_of(module):
        if isinstance(part, nn.Module):  # else torch refuses it
            _require_no_hooks(part, ignored_params or ())
    with ties_checked(parts_of(module)):
        made = torch_fully_shard(
            module, mesh=mesh, reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn, mp_policy=mp_policy,
            offload_policy=offload_policy, ignored_params=ignored_params,
            **{} if dp_mesh_dims is None else {"dp_mesh_dims": dp_mesh_dims},  # torch 2.13 takes it
        )  # fmt: skip
    for part in parts_of(made):
        _make_ours(part)
    return made


fully_shard.state = torch_fully_shard.state  # type: ignore[attr-defined]


def parts_of(given: Any) -> Sequence[Any]:
    """The modules of a call of ``fully_shard``, which takes one or several."""
    return given if isinstance(given, (list, tuple)) else [given]


def _require_no_hooks(module: nn.Module, ignored: Container[nn.Parameter]) -> None:
    """FSDP2 makes new parameters, and loses these hooks without a word."""
    for name, parameter in module.named_parameters():
        hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if hooked and parameter not in ignored and not isinstance(parameter, DTensor):
            raise StructureError(
                f"{name} has a gradient hook, which fully_shard() would lose, since it makes new "
                "parameters: call register_post_accumulate_grad_hook after it"
            )


def _make_ours(module: Any) -> None:
    if not isinstance(module, TorchFSDPModule):
        return  # within another module of the list
    noted: Any = module._get_fsdp_state()
    noted._pre_forward_hook_handle.remove()
    noted._post_forward_hook_handle.remove()
    noted._pre_forward = _refuse_torchs
    note_parameters(cast("Any", module), noted)
    module.__class__ = cast("Any", _class_of(cast("Any", type(module))))


def _refuse_torchs(*_: Any) -> Any:
    raise StructureError(
        "torch.distributed.fsdp.register_fsdp_forward_method was called with a module of "
        "internsp.fsdp: import it from internsp.fsdp too"
    )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` run as a forward; of another module, do nothing, as torch."""
    if isinstance(module, FSDPModule):
        if not hasattr(module, method_name):
            raise ValueError(f"{type(module)} does not have a method {method_name}")
        as_forward(module, method_name)
