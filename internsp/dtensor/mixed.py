"""What is made of parameters outside of a forward, and keeps their name until it is mixed wrongly.

At rest a parameter is a ``DTensor``, and so is what operations make of it. torch computes them with
plain tensors only where it can take those for equal on all ranks, which it does for single elements
alone; everything else is its own error, at times as late as in backward. Here the operation that
mixes is refused, by the name of the parameter, whatever its size.

Python calls alone are looked at (``__torch_function__``): what an optimizer or autograd computes of
parameters keeps ``DTensor``'s fast C++ path, and gradients are ordinary ``DTensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import resolve_name

from internsp.errors import GradientError, InternspError, StructureError

# New memory, of which only shape and place are the parameter's: state of optimizers.
_FRESH = frozenset({
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
    "new_tensor", "new_zeros", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
})  # fmt: skip
# Of which every rank would draw its own for its part, and for what several ranks hold.
_RANDOM = frozenset({
    torch.rand_like, torch.randint_like, torch.randn_like, torch.bernoulli, torch.normal,
    Tensor.bernoulli, Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_,
    Tensor.log_normal_, Tensor.normal_, Tensor.random_, Tensor.uniform_,
    *(getattr(nn.init, name) for name in (
        "kaiming_normal_", "kaiming_uniform_", "normal_", "orthogonal_", "sparse_",
        "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_",
    )),
})  # fmt: skip
# They run other operations, or give gradients.
_PASSED = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

plainly: Any = torch._C._disabled_torch_function_impl
"""Call past ``__torch_function__``: function, types, arguments, options."""
_tensor: Any = Tensor


def each(read: Callable[[Any], Any], tensors: Iterable[Tensor]) -> list[Any]:
    """What ``read`` says of each, past ``__torch_function__`` in one call for all."""
    found: list[Any] = plainly(list, (), (map(read, tensors),), {})
    return found


def raw_property(name: str) -> Any:
    """``Tensor``'s property of that name, read and set without a look at what is called.

    A read that comes by ``__torch_function__`` takes six times as long.
    """
    found = getattr(_tensor, name)
    read, write = found.__get__, found.__set__

    def get(self: Tensor) -> Any:
        return plainly(read, (), (self,), {})

    def put(self: Tensor, value: Any) -> None:
        plainly(write, (), (self, value), {})

    return property(get, put, doc=f"As ``Tensor.{name}``.")


raw_grad: Any = raw_property("grad")
"""What autograd itself has put into ``.grad``."""


class OfParameters(DTensor):
    """A parameter, or a value made of parameters."""

    @property
    def of(self) -> str:
        """The name of the parameter, or of the first of those that it was made of."""
        raise NotImplementedError

    grad = raw_grad
    requires_grad = raw_property("requires_grad")
    _version = raw_property("_version")
    shape = property(lambda self: self._spec.tensor_meta.shape, doc="Of the whole tensor.")
    dtype = property(lambda self: self._spec.tensor_meta.dtype, doc="Of its elements.")

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """As ``DTensor.redistribute``; what it gives is a value made of the same parameter."""
        return _carry(super().redistribute(*args, **options), self.of)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy belongs to no communicator: an ordinary ``DTensor`` (parameter)."""
        copied = self._plain(self._local_tensor.detach().clone())
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold an ordinary ``DTensor`` (parameter), and of its memory only its own part.

        torch cannot save a ``DTensor`` that begins within a storage (seen with torch 2.13), as
        those of an optimizer's buckets do.
        """
        local = self._local_tensor.detach()
        if local.untyped_storage().nbytes() != local.nbytes:
            local = local.clone()
        return self._plain(local).__reduce_ex__(protocol)

    def _plain(self, local: Tensor) -> Tensor:
        plain = DTensor(local, self._spec, requires_grad=False)
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        return plain.requires_grad_(self.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as ``DTensor`` does.

        Raises:
            GradientError: the gradient of a plain tensor would be a ``DTensor``.
            StructureError: torch cannot compute this with plain tensors, or of shards; or random
                numbers, which would be others on each rank.
        """
        options = kwargs or {}
        if func in _RANDOM:
            _refuse_random(func, args, options)
        try:
            found = plainly(func, types, args, options)
        except InternspError:
            raise
        except Exception as error:
            refusal = _refusal(func, args, options, error)
            if refusal is None:
                raise
            raise refusal from error
        kind = type(found)
        if kind is DTensor or kind is Tensor or kind is tuple or kind is list:
            return _result(func, args, options, found)
        return found


class ParameterValue(OfParameters):
    """What an operation made of parameters outside of a forward. Saved as an ordinary ``DTensor``.

    Gradients and new memory (``zeros_like``) are none.
    """

    _of: str

    @property
    def of(self) -> str:
        """See :attr:`OfParameters.of`."""
        return self._of


def _carry(found: Any, name: str) -> Any:
    if type(found) is DTensor:
        made: Any = found
        made.__class__ = ParameterValue
        made._of = name
    return found


def _flat(args: Any, options: Any) -> Iterator[Any]:
    for arg in (*args, *options.values()):
        if isinstance(arg, (list, tuple)):
            yield from _flat(arg, {})
        else:
            yield arg


def _others(args: Any, options: Any) -> list[Tensor]:
    """The plain tensors among the arguments of a call."""
    return [a for a in _flat(args, options) if isinstance(a, Tensor) and not isinstance(a, DTensor)]


def _written(func: Any, args: Any, options: Any) -> Any:
    """What the call writes into: its first argument in place, or ``out``."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    return args[0] if in_place and args else options.get("out")


def _result(func: Any, args: Any, options: Any, found: Any) -> Any:
    """What the user gets for ``found``."""
    if func in _PASSED or getattr(func, "__self__", None) is _tensor.grad:
        return found
    written = _written(func, args, options)
    if written is not None:
        if isinstance(written, Tensor) and not isinstance(written, DTensor):
            raise _mixed(func, args, options)
        return found
    if getattr(func, "__name__", "") in _FRESH:
        return found
    values = found if isinstance(found, (tuple, list)) else (found,)
    name = ""
    for value in values:
        if type(value) is not DTensor:
            continue
        if value.requires_grad and any(other.requires_grad for other in _others(args, options)):
            raise _beside_a_graph(func, args, options)
        name = name or _first(args, options).of
        _carry(value, name)
    return found


def _refusal(func: Any, args: Any, options: Any, error: Exception) -> InternspError | None:
    """What to say instead of torch's ``error``, or ``None`` where that says it right."""
    if func in _PASSED:
        return None
    words = str(error)
    if "mixed torch.Tensor and DTensor" in words:
        return _mixed(func, args, options)
    if _others((_written(func, args, options),), {}):
        return _mixed(func, args, options)
    if "harding propagation failed" not in words and not isinstance(error, NotImplementedError):
        return None
    why = words.strip().splitlines()[0] if words.strip() else type(error).__name__
    return StructureError(
        f"{_what(func, args, options)}, which torch cannot do with it as it is placed ({why}). "
        "Take whole values first, all ranks together: .full_tensor() of the parameter or of what "
        "was made of it; one vector of all is torch.cat([p.full_tensor().view(-1) for p in "
        "model.parameters()]), which vector_to_parameters takes"
    )


def _refuse_random(func: Any, args: Any, options: Any) -> None:
    if _first(args, options)._spec.mesh.size() > 1:
        raise StructureError(
            f"{_what(func, args, options)}: each rank would draw other numbers, so that what "
            "several ranks hold would no longer be the same. Draw whole values, the same on all "
            "ranks (a generator of one seed), and write them by p.data = values or within "
            "internsp.full_params(model); or fill the model by internsp.initialize"
        )


def _mixed(func: Any, args: Any, options: Any) -> StructureError:
    shapes = ", ".join(str(list(other.shape)) for other in _others(args, options)[:3])
    return StructureError(
        f"{_what(func, args, options)} with a plain tensor (of shape {shapes}), which may differ "
        "between ranks. Do it in that forward, where a parameter is a whole plain tensor, "
        "or take whole values, all ranks together: .full_tensor() of the parameter or of what was "
        "made of it (where a rank's own data multiply it, full_tensor(grad_placements=[Partial()] "
        "* p.device_mesh.ndim) sums the gradients of all). Averages kept beside a parameter: "
        "p.detach().clone(); whole values written into one: p.data = values"
    )


def _beside_a_graph(func: Any, args: Any, options: Any) -> GradientError:
    return GradientError(
        f"{_what(func, args, options)} with a plain tensor, whose gradient would then be a "
        "DTensor, which the operations before it cannot take. Add .full_tensor() of a term made "
        "of parameters alone (all ranks together), let it have a backward of its own "
        "(loss.backward(), then penalty.backward()), or use the optimizer's weight_decay; compute "
        "in the model's forward what depends on its inputs"
    )


def _first(args: Any, options: Any) -> OfParameters:
    return next(arg for arg in _flat(args, options) if isinstance(arg, OfParameters))


def _what(func: Any, args: Any, options: Any) -> str:
    first = _first(args, options)
    made = "" if not isinstance(first, ParameterValue) else "a value made of "
    called = resolve_name(func) or getattr(func, "__name__", func)
    return (
        f"{made}{first.of} (a DTensor of shape {list(first.shape)}, placed "
        f"{first._spec.placements}) was used on rank {first._spec.mesh.get_rank()}, outside of the "
        f"forward in which it is whole (its block's; beside the blocks the model's), in {called}"
    )
