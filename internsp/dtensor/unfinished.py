"""Placeholders in ``.grad`` for gradients whose sums are elsewhere until they are complete.

Within ``no_sync`` and ``no_replica_sync``, and between backward and step with a ``ZeroOptimizer``,
the communicator holds the sums of gradients. So that ``zero_grad()`` and ``p.grad = None`` drop
these sums, as they do on one process and under torch's DDP, ``.grad`` must hold something: an
:class:`UnfinishedGradient`, which has no values and no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from internsp.base.autograd import in_backward
from internsp.dtensor.asked import asked
from internsp.dtensor.mixed import flatten
from internsp.dtensor.parameter import Member
from internsp.dtensor.placed import grad_dtype, spec_with_dtype
from internsp.errors import GradientError

M = TypeVar("M", bound=Member)

_aten: Any = torch.ops.aten


class _NoValues(Tensor):
    """The local tensor of an :class:`UnfinishedGradient`, without memory."""

    _of: weakref.ref[UnfinishedGradient]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What autograd adds in C++ under a torch that does not ask the gradient's class
        (:mod:`internsp.dtensor.asked`); every other operation raises."""
        given = flatten(args, kwargs or {})
        found = next((x for x in given if isinstance(x, _NoValues)), None)
        owner = None if found is None else found._of()
        if owner is None:
            raise GradientError("an unfinished gradient")
        if func is not _aten.add_.Tensor or owner._on_add is None or not in_backward():
            raise owner._read_error()
        owner._on_add(DTensor(args[1], owner._spec, requires_grad=False))
        return args[0]


@asked
class UnfinishedGradient(DTensor):
    """A gradient without values: it can be set to zero or dropped; every read raises (WP-9).

    A subclass of ``DTensor``, so that calls on lists that hold real gradients, too, are dispatched
    to it.
    """

    _message: str
    _on_zero: Callable[[], None]
    _on_add: Callable[[Tensor], None] | None

    @staticmethod
    def of(
        member: Member,
        message: str,
        on_zero: Callable[[], None],
        on_add: Callable[[Tensor], None] | None = None,
    ) -> UnfinishedGradient:
        """The placeholder for ``member``'s gradient.

        Args:
            message: the error message of every read.
            on_zero: called when it is set to zero in place.
            on_add: called with a gradient that autograd itself adds to it.
        """
        parameter: Any = member.parameter
        like, dtype = parameter._local_tensor, grad_dtype(parameter)
        local = Tensor._make_wrapper_subclass(
            _NoValues, like.shape, dtype=dtype, device=like.device
        )  # type: ignore[attr-defined]
        spec = spec_with_dtype(parameter, dtype)
        made = DTensor.__new__(UnfinishedGradient, local, spec, requires_grad=False)
        made = cast("UnfinishedGradient", made)
        made._message, made._on_zero, made._on_add = message, on_zero, on_add
        local._of = weakref.ref(made)
        return made

    def _read_error(self) -> GradientError:
        return GradientError(self._message)

    def _refuse(self, *_: Any, **options: Any) -> Any:
        """Raises ``GradientError``: there are no values."""
        raise self._read_error()

    to_local = full_tensor = redistribute = _refuse
    __deepcopy__ = __reduce_ex__ = __tensor_flatten__ = _refuse

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<unfinished gradient of shape {tuple(self.shape)}: {self._message}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first: Any = args[0] if args else None
        if func is _aten._foreach_zero_.default:
            for gradient in first:  # the list may hold real gradients, too
                if isinstance(gradient, UnfinishedGradient):
                    gradient._on_zero()
                else:
                    gradient.zero_()
            return None
        if isinstance(first, UnfinishedGradient):
            if func is _aten.detach.default:  # `.grad.data.zero_()`
                return first
            if func is _aten.zero_.default:
                first._on_zero()
                return first
            if func is _aten.add_.Tensor and first._on_add is not None and in_backward():
                first._on_add(args[1])
                return first
        given = flatten(args, kwargs or {})
        found = next((x for x in given if isinstance(x, UnfinishedGradient)), None)
        raise found._read_error() if found is not None else GradientError("an unfinished gradient")


def gradients_lost(parameters: int, rank: int) -> GradientError:
    """The error of a step that would lack the gradients of micro-batches before a failed pass."""
    return GradientError(
        f"a pass that failed has taken with it the gradients of the micro-batches before it, of "
        f"{parameters} parameters on rank {rank}: call zero_grad() on every rank and repeat all "
        "micro-batches of this step"
    )


class UnfinishedGradients(Generic[M]):
    """The placeholders of one chunk in a plain loop, and the gradients that they stand for.

    Args:
        discard: drops a parameter's sums on this rank; its second argument is whether the gradient
            is zero rather than absent (see :func:`internsp.wp.plain_loop.discard_sums`).
    """

    def __init__(self, discard: Callable[[M, bool], None], rank: int) -> None:
        self._discard = discard
        self._rank = rank
        self._placeholders: dict[M, UnfinishedGradient] = {}
        self._before: dict[M, Tensor | None] = {}  # `.grad` of before, plus what autograd added
        self._zeroed: set[M] = set()  # set to zero by the user since the last backward
        self._lost: set[M] = set()  # their sums were lost in a failed pass

    def __len__(self) -> int:
        return len(self._placeholders)

    def set_placeholders(self, members: Iterable[M], failed: bool = False) -> None:
        """Put a placeholder into ``.grad`` of each of ``members``: its sum is not complete.

        Args:
            failed: there is no sum either: a failed step has added part of the gradient to
                ``.grad``.
        """
        for member in members:
            self._zeroed.discard(member)
            if member in self._placeholders or not member.requires_grad:
                continue
            before = member.parameter.grad
            if isinstance(before, UnfinishedGradient):
                raise GradientError(
                    f"{member.name}.grad on rank {self._rank} is an unfinished gradient whose sums "
                    "were dropped when it was taken out of .grad: it cannot be put back"
                )
            message = self._message_failed(member) if failed else self._message(member)
            made = UnfinishedGradient.of(
                member, message, partial(self._zero, member), partial(self._add, member)
            )
            self._placeholders[member], self._before[member] = made, before
            member.parameter.grad = made

    def drop_removed(self) -> None:
        """Drop the sums of gradients that the user dropped (``.grad`` set to ``None`` or
        replaced)."""
        for member, made in list(self._placeholders.items()):
            if member.parameter.grad is not made:
                self._remove(member)
                self._discard(member, False)

    def restore_grad(self) -> bool:
        """Remove the placeholders before the sums are completed: ``.grad`` is again what earlier
        backwards have left.

        Returns:
            Whether there were any.

        Raises:
            GradientError: the sums were lost in a failed pass, and the user has not dropped them.
        """
        self.drop_removed()
        any_left = bool(self._placeholders)
        if self._lost:
            raise gradients_lost(len(self._lost), self._rank)
        for member, made in list(self._placeholders.items()):
            before = self._remove(member)
            if member.parameter.grad is made:
                member.parameter.grad = before
        return any_left

    def mark_lost(self) -> None:
        """Note that a failed pass has lost all sums. Placeholders stay until the user drops
        them."""
        self.drop_removed()
        self._lost = self._placeholders.keys() - self._zeroed

    def require_finished(self, parameters: Iterable[Tensor]) -> None:
        """Called before an optimizer steps with ``parameters``.

        Raises:
            GradientError: the gradient of one of them is unfinished.
        """
        waiting = {id(made): member for member, made in self._placeholders.items()}
        for parameter in parameters if waiting else ():
            member = waiting.get(id(parameter.grad))
            if member is not None:
                raise self._placeholders[member]._read_error()

    def _message(self, member: M) -> str:
        return (
            f"{member.name}.grad is not complete on rank {self._rank}: its sums wait for the "
            "first backward outside no_sync() and no_replica_sync(). Run the last micro-batch "
            "outside, or drop them by zero_grad() or .grad = None"
        )

    def _message_failed(self, member: M) -> str:
        return (
            f"{member.name}.grad on rank {self._rank} is not complete: a step of the pipeline that "
            "failed has added a part of its gradient. Drop it by zero_grad() or .grad = None on "
            "every rank, and repeat all steps since the optimizer's last"
        )

    def _add(self, member: M, gradient: Tensor) -> None:
        """Add a gradient that autograd stores itself, as the loss used the parameter itself."""
        before = self._before[member]
        self._before[member] = gradient.clone() if before is None else before + gradient

    def _zero(self, member: M) -> None:
        """Set the gradient to zero: it exists, as on one process."""
        if member in self._placeholders:
            before = self._before[member]
            if before is not None:
                before.zero_()
            self._zeroed.add(member)
            self._lost.discard(member)
            self._discard(member, True)

    def _remove(self, member: M) -> Tensor | None:
        del self._placeholders[member]
        self._zeroed.discard(member)
        self._lost.discard(member)
        return self._before.pop(member)
