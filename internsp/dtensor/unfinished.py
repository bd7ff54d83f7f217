"""Gradients whose sums are not in ``.grad`` yet, and what a user does with ``.grad`` meanwhile.

Within ``no_sync`` and ``no_replica_sync``, and between backward and step where a ``ZeroOptimizer``
is attached, sums of gradients lie with the communicator. So that ``zero_grad()`` and
``p.grad = None`` drop them, as they do on one process and under torch's DDP, something must stand
in ``.grad`` that they find: an :class:`UnfinishedGradient`, which has no values and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from internsp.autograd import in_backward
from internsp.dtensor.parameter import Member
from internsp.dtensor.placed import grad_dtype, spec_in
from internsp.errors import GradientError

M = TypeVar("M", bound=Member)

_aten: Any = torch.ops.aten


class UnfinishedGradient(DTensor):
    """A gradient without values: it can be set to zero or dropped; every read raises (WP-9).

    ``DTensor``'s subclass, so that lists of gradients with real ones among them come by here.
    """

    _why: str
    _zeroed: Callable[[], None]
    _added: Callable[[Tensor], None] | None

    @staticmethod
    def of(
        member: Member,
        why: str,
        zeroed: Callable[[], None],
        added: Callable[[Tensor], None] | None = None,
    ) -> UnfinishedGradient:
        """One for ``member``'s parameter.

        Args:
            why: begins the error of every read.
            zeroed: called when it is set to zero in place.
            added: called with what autograd itself adds to it.
        """
        parameter: Any = member.parameter
        like, dtype = parameter._local_tensor, grad_dtype(parameter)
        local = torch.zeros((), dtype=dtype, device=like.device).expand(like.shape)
        spec = spec_in(parameter, dtype)
        made = DTensor.__new__(UnfinishedGradient, local, spec, requires_grad=False)
        made = cast("UnfinishedGradient", made)
        made._why, made._zeroed, made._added = why, zeroed, added
        return made

    def _refused(self) -> GradientError:
        return GradientError(self._why)

    def to_local(self, **options: Any) -> Tensor:
        """Raises: there are no values."""
        raise self._refused()

    def full_tensor(self, **options: Any) -> Tensor:
        """Raises: there are no values."""
        raise self._refused()

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """Raises: there are no values."""
        raise self._refused()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        raise self._refused()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refused()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<unfinished gradient of shape {tuple(self.shape)}: {self._why}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first: Any = args[0] if args else None
        if func is _aten._foreach_zero_.default:
            for gradient in first:
                gradient.zero_()  # real ones too: they may stand in one list
            return None
        if isinstance(first, UnfinishedGradient):
            if func is _aten.detach.default:  # `.grad.data.zero_()`
                return first
            if func is _aten.zero_.default:
                first._zeroed()
                return first
            if func is _aten.add_.Tensor and first._added is not None and in_backward():
                first._added(args[1])
                return first
        flat = [x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,))]
        found = next((x for x in flat if isinstance(x, UnfinishedGradient)), None)
        raise found._refused() if found is not None else GradientError("an unfinished gradient")


def gradients_lost(parameters: int, rank: int) -> GradientError:
    """A step is about to go without the gradients of micro-batches before a pass that failed."""
    return GradientError(
        f"a pass that failed has taken with it the gradients of the micro-batches before it, of "
        f"{parameters} parameters on rank {rank}: call zero_grad() on every rank and repeat all "
        "micro-batches of this step"
    )


class UnfinishedGradients(Generic[M]):
    """Those of one chunk in a plain loop: which stand in ``.grad``, and what they stand for.

    Args:
        discard: forgets a parameter's sums; what else it is told is whether it was used all the
            same (see :func:`internsp.optim.plain_loop.discard_sums`).
    """

    def __init__(self, discard: Callable[[M, bool], None], rank: int) -> None:
        self._discard = discard
        self._rank = rank
        self._shown: dict[M, UnfinishedGradient] = {}
        self._before: dict[M, Tensor | None] = {}  # unsharded gradients of earlier backwards
        self._zeroed: set[M] = set()  # of those, by the user and since the last backward
        self._lost: set[M] = set()  # whose sums a failed pass has taken with it

    def __len__(self) -> int:
        return len(self._shown)

    def show(self, members: Iterable[M], failed: bool = False) -> None:
        """Sums of ``members`` are kept elsewhere for now: their ``.grad`` says so.

        Args:
            failed: no sums are: a step that failed has added to ``.grad``.
        """
        for member in members:
            self._zeroed.discard(member)
            if member in self._shown or not member.requires_grad:
                continue
            before = member.parameter.grad
            if isinstance(before, UnfinishedGradient):
                raise GradientError(
                    f"{member.name}.grad on rank {self._rank} is an unfinished gradient whose sums "
                    "were dropped when it was taken out of .grad: it cannot be put back"
                )
            why = self._why_failed(member) if failed else self._why(member)
            made = UnfinishedGradient.of(
                member, why, partial(self._zero, member), partial(self._add, member)
            )
            self._shown[member], self._before[member] = made, before
            member.parameter.grad = made

    def look(self) -> None:
        """Forget the sums of those that were dropped (``.grad`` set to ``None`` or replaced)."""
        for member, made in list(self._shown.items()):
            if member.parameter.grad is not made:
                self._forget(member)
                self._discard(member, False)

    def take(self) -> bool:
        """The sums are about to be completed: ``.grad`` is what earlier backwards have left.

        Returns:
            Whether there were any.

        Raises:
            GradientError: a pass that failed has taken them with it, and they were not dropped.
        """
        self.look()
        any_left = bool(self._shown)
        if self._lost:
            raise gradients_lost(len(self._lost), self._rank)
        for member, made in list(self._shown.items()):
            before = self._forget(member)
            if member.parameter.grad is made:
                member.parameter.grad = before
        return any_left

    def lose(self) -> None:
        """A pass has failed, and no sum is left: ``.grad`` goes on saying that one is missing."""
        self.look()
        self._lost = self._shown.keys() - self._zeroed

    def refuse(self, parameters: Iterable[Tensor]) -> None:
        """Raises:
        GradientError: an optimizer is about to step with one of ``parameters`` unfinished.
        """
        waiting = {id(made): member for member, made in self._shown.items()}
        for parameter in parameters:
            member = waiting.get(id(parameter.grad))
            if member is not None:
                raise self._shown[member]._refused()

    def _why(self, member: M) -> str:
        return (
            f"{member.name}.grad is not complete on rank {self._rank}: its sums wait for the "
            "first backward outside no_sync() and no_replica_sync(). Run the last micro-batch "
            "outside, or drop them by zero_grad() or .grad = None"
        )

    def _why_failed(self, member: M) -> str:
        return (
            f"{member.name}.grad on rank {self._rank} is not complete: a step of the pipeline that "
            "failed has added a part of its gradient. Drop it by zero_grad() or .grad = None on "
            "every rank, and repeat all steps since the optimizer's last"
        )

    def _add(self, member: M, gradient: Tensor) -> None:
        """The loss used the parameter itself, so that autograd stores a part of the gradient."""
        before = self._before[member]
        self._before[member] = gradient.clone() if before is None else before + gradient

    def _zero(self, member: M) -> None:
        """As on one process: the gradient is there, and zero."""
        if member in self._shown:
            before = self._before[member]
            if before is not None:
                before.zero_()
            self._zeroed.add(member)
            self._lost.discard(member)
            self._discard(member, True)

    def _forget(self, member: M) -> Tensor | None:
        del self._shown[member]
        self._zeroed.discard(member)
        self._lost.discard(member)
        return self._before.pop(member)
