"""``ParameterTensor``: refuses operations that mix parameters with plain tensors outside of a
forward.

Outside of a forward a parameter is a ``DTensor``, and so is every result of an operation on it.
torch computes such an operation with plain tensors only if it can assume that they are equal on all
ranks, which it does for single elements alone; for everything else it raises an error of its own,
at times as late as in backward. Here the operation itself is refused, with the name of the
parameter; single elements are computed with, unless they need a gradient.

Only calls from Python are checked (``__torch_function__``): what an optimizer or autograd computes
keeps ``DTensor``'s fast C++ path, and gradients are ordinary ``DTensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import resolve_name

from internsp.base.bits import plain_parts
from internsp.errors import GradientError, InternspError, StructureError

# Return new memory with only the parameter's shape and placements: the state of optimizers.
_NEW_MEMORY = frozenset({
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
    "new_tensor", "new_zeros", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
})  # fmt: skip
# Random: each rank would draw other numbers, even for elements that several ranks hold.
_RANDOM = frozenset({
    torch.rand_like, torch.randint_like, torch.randn_like, torch.bernoulli, torch.normal,
    Tensor.bernoulli, Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_,
    Tensor.log_normal_, Tensor.normal_, Tensor.random_, Tensor.uniform_,
    *(getattr(nn.init, name) for name in (
        "kaiming_normal_", "kaiming_uniform_", "normal_", "orthogonal_", "sparse_",
        "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_",
    )),
})  # fmt: skip
# Of what ranks have yet to add up, or of one row: each rank would get another number.
_NUMBERS = frozenset({
    Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__,
})  # fmt: skip
# Their results stay as they are: these run other operations, or return gradients.
_UNCHANGED = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

without_torch_function: Any = torch._C._disabled_torch_function_impl
"""Call a function without ``__torch_function__``: function, types, arguments, options."""


def read_each(read: Callable[[Any], Any], tensors: Iterable[Tensor]) -> list[Any]:
    """``read`` of each tensor, without ``__torch_function__``: one call for all is faster."""
    found: list[Any] = without_torch_function(list, (), (map(read, tensors),), {})
    return found


raw_grad: Any = Tensor.grad
"""``Tensor``'s own ``.grad``, of any class: what autograd has put there, without any check."""


class _Traced:
    """What a parameter belongs to in a function that is compiled for all of its kind."""

    name, meet = "a parameter in a compiled function", None

    def __init__(self) -> None:
        self.aliases: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        raise StructureError(
            "a function that torch.compile compiles needs of a parameter, or its result, what only "
            "internsp knows (gradients of full_tensor(), .data =, writes into a part): leave that "
            "out of the function"
        )


class ParameterTensor(DTensor):
    """A parameter, or a value computed from parameters."""

    _member: Any
    """The parameter's :class:`internsp.dtensor.parameter.Member`, or that of the first parameter
    from which the value was computed."""

    @property
    def parameter_name(self) -> str:
        """The name of the parameter, or of the first one from which the value was computed."""
        name: str = self._member.name
        return name

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """As ``DTensor.redistribute``; the result keeps the name of the parameter.

        Raises:
            StructureError: in a forward, where its gradient would not be summed over ranks.
        """
        self._require_no_gradient("redistribute()")
        return self._redistribute(*args, **options)

    def to_local(self, **options: Any) -> Tensor:
        """As ``DTensor.to_local``.

        Raises:
            StructureError: as :meth:`redistribute`.
        """
        self._require_no_gradient("to_local()")
        local: Tensor = super().to_local(**options)
        return local

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """As ``DTensor.full_tensor``.

        Raises:
            StructureError: as :meth:`redistribute`.
        """
        self._require_no_gradient("full_tensor()")
        return self._full_tensor(grad_placements)

    def _redistribute(self, *args: Any, **options: Any) -> DTensor:
        return _as_parameter_value(super().redistribute(*args, **options), self._member)

    def _full_tensor(self, grad_placements: Any = None) -> Tensor:
        there: Any = self._redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        whole: Tensor = DTensor.to_local(there, grad_placements=grad_placements)
        return whole.view_as(whole)  # never the parameter's own local tensor

    def _require_no_gradient(self, what: str) -> None:
        """Refuse a call in a forward that would not sum its gradient."""
        if torch.is_grad_enabled() and self.requires_grad and self._member.reads is not None:
            of = "a value made of " if isinstance(self, ParameterValue) else ""
            self._member.reads.refuse(self._member, f"{what} of {of}{self.parameter_name}")

    def data_ptr(self) -> int:
        """0: only the local tensor has memory.

        torch says the offset within the local tensor's storage, as if it were an address, and
        ``dcp.async_save`` copies from there (seen with torch 2.13).
        """
        return 0

    @classmethod
    def __tensor_unflatten__(cls, *parts: Any) -> Tensor:  # type: ignore[override]
        """What ``torch.compile`` traces in the place of a parameter, and what a compiled function
        returns: of the same class, or torch would refuse the parameter itself."""
        made: Any = DTensor.__tensor_unflatten__(*parts)
        made.__class__, made._member = cls, _Traced()
        return made  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy belongs to no communicator: an ordinary ``DTensor`` (parameter)."""
        copied = self._as_dtensor(self._local_tensor.detach().clone())
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold an ordinary ``DTensor`` (parameter), and of its storage only its own part.

        torch cannot save a ``DTensor`` that begins within a storage (seen with torch 2.13), as
        those in an optimizer's buckets do.
        """
        local = self._local_tensor.detach()
        if local.untyped_storage().nbytes() != local.nbytes:
            local = local.clone()
        return self._as_dtensor(local).__reduce_ex__(protocol)

    def _as_dtensor(self, local: Tensor) -> Tensor:
        plain = DTensor(local, self._spec, requires_grad=False)
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        return plain.requires_grad_(self.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as ``DTensor`` does.

        Raises:
            GradientError: the gradient of a plain tensor would be a ``DTensor``.
            StructureError: torch cannot compute this with plain tensors, or on shards; or the
                result is random or this rank's part of a number, and would differ between ranks,
                or is written into a copy.
        """
        options = kwargs or {}
        if func in _RANDOM:
            _require_not_random(func, args, options)
        elif func in _NUMBERS:
            _require_whole(func, args[0])
        try:
            found = without_torch_function(func, types, args, options)
        except InternspError:
            raise
        except Exception as error:
            refusal = _clearer_error(func, args, options, error)
            if refusal is None:
                raise
            raise refusal from error
        kind = type(found)
        if kind is ParameterValue and found is _write_target(func, args, options):
            _require_own_memory(func, args, options, found)
        if kind is DTensor or kind is Tensor or kind is tuple or kind is list:
            return _result(func, args, options, found)
        return found


class ParameterValue(ParameterTensor):
    """The result of an operation on parameters outside of a forward. Saved as an ordinary
    ``DTensor``.

    Gradients and new memory (``zeros_like``) do not become a ``ParameterValue``.
    """


def _as_parameter_value(found: Any, member: Any) -> Any:
    if type(found) is DTensor:
        made: Any = found
        made.__class__ = ParameterValue
        made._member = member
    return found


def flatten(args: Any, options: Any) -> Iterator[Any]:
    """The arguments of a call, and what lists and tuples among them hold."""
    for arg in (*args, *options.values()):
        if isinstance(arg, (list, tuple)):
            yield from flatten(arg, {})
        else:
            yield arg


def _plain_tensors(args: Any, options: Any) -> list[Tensor]:
    """The plain tensors among the arguments of a call."""
    return [
        a for a in flatten(args, options) if isinstance(a, Tensor) and not isinstance(a, DTensor)
    ]


def _write_target(func: Any, args: Any, options: Any) -> Any:
    """What the call writes into: its first argument if it works in place, or ``out``."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    return args[0] if in_place and args else options.get("out")


def _result(func: Any, args: Any, options: Any, found: Any) -> Any:
    """What the call returns to the user, given the result ``found`` that torch has computed."""
    if func in _UNCHANGED or getattr(func, "__self__", None) is raw_grad:
        return found
    written = _write_target(func, args, options)
    if written is not None:
        if isinstance(written, Tensor) and not isinstance(written, DTensor):
            raise _mixed_error(func, args, options)
        return found
    if getattr(func, "__name__", "") in _NEW_MEMORY:
        return found
    values = found if isinstance(found, (tuple, list)) else (found,)
    member = None
    for value in values:
        if type(value) is not DTensor:
            continue
        if value.requires_grad and any(
            other.requires_grad for other in _plain_tensors(args, options)
        ):
            raise _mixed_gradient_error(func, args, options)
        member = member or _first_parameter(args, options)._member
        _as_parameter_value(value, member)
    return found


def _clearer_error(func: Any, args: Any, options: Any, error: Exception) -> InternspError | None:
    """The error to raise instead of torch's ``error``; ``None`` where torch's is clear."""
    if func in _UNCHANGED:
        return None
    words = str(error)
    if "mixed torch.Tensor and DTensor" in words:
        return _mixed_error(func, args, options)
    if _plain_tensors((_write_target(func, args, options),), {}):
        return _mixed_error(func, args, options)
    if "harding propagation failed" not in words and not isinstance(error, NotImplementedError):
        return None
    why = words.strip().splitlines()[0] if words.strip() else type(error).__name__
    return StructureError(
        f"{_describe_call(func, args, options)}, which torch cannot do with its placements "
        f"({why}). Gather first, on all ranks together: .full_tensor() of the parameter or of the "
        "value computed from it; one vector of all is torch.cat([p.full_tensor().view(-1) for p in "
        "model.parameters()]), which vector_to_parameters takes"
    )


def _require_not_random(func: Any, args: Any, options: Any) -> None:
    if _first_parameter(args, options)._spec.mesh.size() > 1:
        raise StructureError(
            f"{_describe_call(func, args, options)}: each rank would draw other numbers, so that "
            "elements that several ranks hold would differ. Draw full tensors, the same on all "
            "ranks (a generator of one seed), and write them by p.data = values or within "
            "internsp.full_params(model, write='shards'); or fill the model by internsp.initialize"
        )


def _require_whole(func: Any, value: Any) -> None:
    """Refuse a number of this rank's part. A truth value passes: ``assert p.isfinite().all()``."""
    mesh, kinds = value._spec.mesh, value._spec.placements
    if value.dtype != torch.bool and any(
        mesh.size(i) > 1 and not kind.is_replicate() for i, kind in enumerate(kinds)
    ):
        raise StructureError(
            f"{_describe_call(func, (value,), {})}, which is of this rank's part, and not of all: "
            "write .full_tensor() before it, on all ranks together; or .to_local() for the part"
        )


def _require_own_memory(func: Any, args: Any, options: Any, written: Any) -> None:
    """Refuse a write into a view that torch has made of a gathered copy: ``p[1].zero_()``."""
    base = written._base
    computed = isinstance(base, ParameterValue) and isinstance(base._member, _Traced)
    if computed or not isinstance(base, ParameterTensor):
        return
    parts = (plain_parts(t._local_tensor) for t in (written, base, written._member.parameter))
    theirs, ours, parameter = (next(part).untyped_storage().data_ptr() for part in parts)
    if ours == parameter != theirs:
        raise StructureError(
            f"{_describe_call(func, args, options)}: it is a view across the shards, which torch "
            "copies, so that the parameter would keep its values. Write all of its values by "
            "p.data = values, or a part of them within internsp.full_params(model, write='shards')"
        )


def _mixed_error(func: Any, args: Any, options: Any) -> StructureError:
    shapes = ", ".join(str(list(other.shape)) for other in _plain_tensors(args, options)[:3])
    return StructureError(
        f"{_describe_call(func, args, options)} with a plain tensor (of shape {shapes}), which may "
        "differ between ranks. Do it in that forward, where a parameter is an unsharded plain "
        "tensor, or gather first, on all ranks together: .full_tensor() of the parameter or of the "
        "value computed from it (where a rank's own data multiply it, "
        "full_tensor(grad_placements=[Partial()] * p.device_mesh.ndim) sums the gradients of all "
        "ranks). For averages of a parameter: p.detach().clone(); to write full tensors into one: "
        "p.data = values"
    )


def _mixed_gradient_error(func: Any, args: Any, options: Any) -> GradientError:
    return GradientError(
        f"{_describe_call(func, args, options)} with a plain tensor, whose gradient would then be "
        "a DTensor, which the operations before it cannot take. Add .full_tensor() of a term made "
        "of parameters alone (all ranks together), let it have a backward of its own "
        "(loss.backward(), then penalty.backward()), or use the optimizer's weight_decay; a term "
        "that depends on the model's inputs must be computed in its forward"
    )


def _first_parameter(args: Any, options: Any) -> ParameterTensor:
    return next(arg for arg in flatten(args, options) if isinstance(arg, ParameterTensor))


def _describe_call(func: Any, args: Any, options: Any) -> str:
    first = _first_parameter(args, options)
    made = "" if not isinstance(first, ParameterValue) else "a value made of "
    called = resolve_name(func) or getattr(func, "__name__", func)
    return (
        f"{made}{first.parameter_name} (a DTensor of shape {list(first.shape)}, placed "
        f"{first._spec.placements}) was used on rank {first._spec.mesh.get_rank()}, outside of the "
        "forward in which it is unsharded (its block's, or else the model's), or there from "
        f"parameters() and not by its module's attribute, in {called}"
    )
