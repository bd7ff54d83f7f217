"""Refuses models that cannot be made parallel, before anything is sharded."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from internsp.base.autograd import compiled
from internsp.config import PlanRule
from internsp.dtensor.asked import TORCH_ASKS
from internsp.dtensor.mixed import ParameterTensor
from internsp.errors import StructureError
from internsp.structure.rules import match_rules

_TABLES = (nn.Embedding, nn.EmbeddingBag)
# What a class has in any case, and so adds nothing to a parameter by it.
_OF_ANY_CLASS = frozenset({
    "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__orig_bases__",
    "__parameters__", "__slots__", "__static_attributes__", "__weakref__",
})  # fmt: skip


def require_supported(
    model: nn.Module, plan: Sequence[PlanRule] = (), compiles: bool = False,
    placed: Container[nn.Parameter] | None = None,
) -> None:  # fmt: skip
    """Check all modules and parameters of ``model``. Does not communicate.

    Args:
        plan: the configuration's rules; a parameter that a rule ignores may be of any class.
        compiles: blocks are to be compiled.
        placed: the parameters that are made parallel, if that is decided already; others are left
            as they are, of any class and with hooks.

    Raises:
        StructureError: something is unsupported; names the module or parameter, and the remedy.
    """
    rules = match_rules(model, plan)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ParameterTensor):
            raise StructureError(
                f"{name} belongs to a parallel model: parallelize() was called with it, or with a "
                "model around it, before; call it once, with the whole model"
            )
    for name, module in model.named_modules():
        if any(p is not None for p in module._parameters.values()):
            _check_module(name, module)
        if is_compiled(module):
            raise compiled(name or "the model")
        if compiles and not TORCH_ASKS and hasattr(module, "dispatch"):  # as `Experts` has
            raise StructureError(
                f"{name}: torch {torch.__version__} computes wrong gradients in compiled blocks "
                "with experts: set weight_parallel.compile = false, or install torch 2.12"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise StructureError(
                f"{name or 'the model'} is a ScriptModule, which reads its weights past Python: "
                "use the module that it was scripted from"
            )
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{name}.{parameter_name}".lstrip(".")
            if placed is not None and parameter not in placed:
                continue
            _check_parameter(full, parameter)
            if not rules.options_for([full], {"ignore"}).get("ignore"):
                _require_plain(full, parameter)
    _refuse_copies(model)
    _refuse_globals(model)


def _check_module(name: str, module: nn.Module) -> None:
    if isinstance(module, _TABLES) and (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    ):
        raise StructureError(
            f"embedding {name}: max_norm, sparse gradients and scale_grad_by_freq need the whole "
            "table or the whole batch in one place; build it without them"
        )


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module``, which has weights, is to be compiled by torch.compile as a whole."""
    if next(module.parameters(), None) is None:
        return False
    if getattr(module, "_compiled_call_impl", None) is not None:  # module.compile()
        return True
    wrapper = "torch._dynamo.eval_frame", "OptimizedModule"  # torch.compile(module), not imported
    return (type(module).__module__, type(module).__qualname__) == wrapper


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise StructureError(
            f"{name} has no shape yet (a lazy module): run a forward before parallelize()"
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise StructureError(
            f"{name} has a gradient hook, which parallelize() would lose, since it makes new "
            "parameters: remove it and read .grad when backward() has returned, or hook the "
            "modules' outputs"
        )


def _shown_order(name: str) -> tuple[bool, str]:
    return name.startswith("_"), name


def _require_plain(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter whose class adds something, as those of quantized weights do, unless it
    says how it is all-gathered."""
    # The layer of a DTensor is tensor parallel: of that it is checked with its mesh.
    kind = type(parameter._local_tensor if isinstance(parameter, DTensor) else parameter)
    if all(hasattr(parameter, f"fsdp_{when}_all_gather") for when in ("pre", "post")):
        return
    classes = [c for c in kind.__mro__[: kind.__mro__.index(Tensor)] if c is not nn.Parameter]
    adds = {key for c in classes for key in vars(c)} - _OF_ANY_CLASS
    adds |= {"quant_state"} & vars(parameter).keys()
    if adds:
        some = ", ".join(sorted(adds, key=_shown_order)[:4])
        raise StructureError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, not a plain parameter: "
            f"parallelize() would lose what it adds ({some}), since shards and slots are plain "
            "tensors, and a quantized weight would be computed with as if its codes were values. "
            "Load or build the model unquantized (with torchao, "
            "module.weight = nn.Parameter(module.weight.dequantize()); "
            'weight_parallel.quantize = "int8" sends plain weights as int8), or leave it whole on '
            "every rank by a rule of weight_parallel.rules with ignore = true. A class that "
            "gathers itself (fsdp_pre_all_gather and fsdp_post_all_gather, as NF4) is taken"
        )


def _refuse_copies(model: nn.Module) -> None:
    """Refuse parameters in unregistered attributes: these would keep the replaced parameter."""
    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    for module_name, module in model.named_modules():
        own = {id(parameter) for parameter in module._parameters.values()}
        for copy in copies_of(module):
            if id(copy.parameter) not in names or (copy.settable and id(copy.parameter) in own):
                continue
            where = f"{module_name}.{copy.path[0]}".lstrip(".")
            raise StructureError(
                f"{where} holds the parameter {names[id(copy.parameter)]} past torch's "
                f"registration (in a {type(vars(module)[copy.path[0]]).__name__}): parallelize() "
                "would not find it there, and the module would compute with the old one. Use "
                "nn.ParameterList or nn.ParameterDict, a list of the module's own parameters, or "
                "read the attribute where it is needed"
            )


def _refuse_globals(model: nn.Module) -> None:
    """Refuse parameters that a forward reads from a global: replaced or unregistered ones."""
    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    for module_name, module in model.named_modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType):
            continue
        for read in forward.__code__.co_names:
            value = forward.__globals__.get(read)
            if not isinstance(value, nn.Parameter):
                continue
            what = "which the model does not register, so that ranks would not sum its gradient"
            if id(value) in names:
                what = f"which is {names[id(value)]}: parallelize() would not find it there"
            raise StructureError(
                f"{module_name or 'the model'}: forward of {type(module).__name__} reads the "
                f"parameter {read} from a global, {what}. Make it an attribute of the module"
            )


class ParameterCopy(NamedTuple):
    """A parameter that an attribute of a module holds, outside of torch's registration.

    Attributes:
        path: the attribute, followed by keys or indices in it.
        settable: it can be replaced, because all containers on the path are lists or dictionaries.
    """

    path: tuple[Any, ...]
    parameter: nn.Parameter
    settable: bool


_LEAF_TYPES = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
"""Types that hold no parameter: those of most values in a module's attributes."""


def copies_of(module: nn.Module) -> Iterator[ParameterCopy]:
    """Find parameters in attributes of ``module``, in containers nested up to three deep.

    Containers are lists, tuples, sets, mappings, functions (closures, defaults, arguments bound by
    ``functools.partial``) and the attributes of plain objects.
    """
    for attribute, value in vars(module).items():
        if isinstance(value, dict) and not value:  # as most of torch's tables of hooks are
            continue
        if attribute not in ("_parameters", "_modules", "_buffers"):
            yield from _copies((attribute,), value, 3, True)


def _copies(
    path: tuple[Any, ...], value: Any, depth: int, settable: bool
) -> Iterator[ParameterCopy]:
    if type(value) in _LEAF_TYPES:
        return
    if isinstance(value, nn.Parameter):
        yield ParameterCopy(path, value, settable)
    elif depth:
        for key, item, kept in _items(value):
            yield from _copies((*path, key), item, depth - 1, settable and kept)


def _items(value: Any) -> Iterator[tuple[Any, Any, bool]]:
    """The items that ``value`` holds: key, item, and whether the item can be replaced."""
    if isinstance(value, (list, tuple, set)):
        for index, item in enumerate(value):
            yield index, item, type(value) is list
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key, item, isinstance(value, dict)
    elif isinstance(value, partial):
        for index, item in enumerate((value.func, value.args, value.keywords)):
            yield index, item, False
    elif isinstance(value, FunctionType):
        for index, item in enumerate((*_closure(value), value.__defaults__, value.__kwdefaults__)):
            yield index, item, False
    elif not isinstance(value, (nn.Module, Tensor, type)):
        for name, item in getattr(value, "__dict__", {}).items():
            if isinstance(item, (nn.Parameter, list, tuple, dict)):  # no further objects
                yield name, item, False


def _closure(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty
            yield cell.cell_contents
