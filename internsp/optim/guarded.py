"""``GuardedParameter``: the class that a model's parameters get under a ZeRO optimizer.

Between backward and step a gradient is in flight or summed in slices, and after a step a
parameter's new values may still be in an all-gather. Only a subclass of ``DTensor`` can notice that
either is read: ``.grad`` has no values then (WP-9) but can be dropped, as ``zero_grad()`` and
``p.grad = None`` do, and every operation on the parameter waits for its all-gather first (WP-3).
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from internsp.dtensor.asked import asked
from internsp.dtensor.mixed import raw_grad
from internsp.dtensor.parameter import ShardParameter
from internsp.dtensor.unfinished import UnfinishedGradient
from internsp.errors import GradientError, StructureError
from internsp.wp.parameter import Member


class GradientOwner(Protocol):
    """What holds the gradients of guarded parameters: a ``ZeroOptimizer``."""

    @property
    def unfinished(self) -> bool:
        """Whether there are gradients that no step has used."""

    def _drop_gradient(self, member: Member, used: bool) -> None:
        """Drop this rank's part of ``member``'s gradient; ``used``: it is zero now, not absent."""


def guard_parameter(member: Member, owner: GradientOwner, rank: int) -> None:
    """Turn ``member``'s parameter into a ``GuardedParameter`` in place (modules keep it)."""
    parameter: Any = member.parameter
    parameter.__class__ = GuardedParameter
    parameter._member, parameter._owner, parameter._rank = member, owner, rank


@asked
class GuardedParameter(ShardParameter):
    """A model's parameter whose gradient belongs to a :class:`ZeroOptimizer`."""

    _member: Member
    _owner: GradientOwner
    _rank: int

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """``None`` when no gradient has become ready since the last step.

        While the gradient is unfinished (WP-9): an :class:`UnfinishedGradient`, of which every read
        raises ``GradientError``, but which can be set to zero.
        """
        if not self._owner.unfinished:
            return raw_grad.__get__(self)  # type: ignore[no-any-return]
        why = (
            f"{self._member.name}.grad was read on rank {self._rank} between backward and "
            "ZeroOptimizer.step(): it is in flight or cut into slices, and the optimizer alone "
            "finishes its reduction. Use optimizer.gather_gradients() to look at gradients, "
            "max_grad_norm to clip, zero_grad() to drop them"
        )
        return UnfinishedGradient.of(self._member, why, self._zero)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise GradientError(
                f"{self._member.name}.grad was set on rank {self._rank}, but its ZeroOptimizer "
                "takes gradients from backward only; change the loss instead"
            )
        self._drop()

    @grad.deleter
    def grad(self) -> None:
        self._drop()

    def _drop(self) -> None:
        raw_grad.__set__(self, None)
        if self._owner.unfinished:
            self._owner._drop_gradient(self._member, used=False)

    def _zero(self) -> None:
        raw = raw_grad.__get__(self)
        if raw is not None:
            raw.zero_()
        if self._owner.unfinished:
            self._owner._drop_gradient(self._member, used=True)

    def full_tensor(self, **options: Any) -> Tensor:
        """The unsharded parameter with its new values. Collective over the weight group; blocks."""
        self._member.wait_until_ready()
        return super().full_tensor(**options)

    def to_local(self, **options: Any) -> Tensor:
        """This rank's rows with their new values; waits for the parameter all-gather."""
        self._member.wait_until_ready()
        return super().to_local(**options)

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """As ``DTensor.redistribute``, after waiting for the parameter all-gather."""
        self._member.wait_until_ready()
        return super().redistribute(*args, **options)

    def __tensor_flatten__(self) -> Any:
        raise StructureError(
            f"{self._member.name} was given on rank {self._rank} to a function that torch.compile "
            "compiles, past what its ZeroOptimizer waits for: give it weight.detach()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary ``DTensor`` parameter, which belongs to no optimizer; waits for the parameter
        all-gather first."""
        self._member.wait_until_ready()
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait for the parameter all-gathers, then compute as plain ``DTensor`` (whose C++ path
        knows no subclasses)."""

        def plain(value: Any) -> Any:
            if isinstance(value, GuardedParameter):
                value._member.wait_until_ready()
                return DTensor(value._local_tensor, value._spec, requires_grad=value.requires_grad)
            return [*map(plain, value)] if isinstance(value, (list, tuple)) else value

        return func(*map(plain, args), **{n: plain(v) for n, v in (kwargs or {}).items()})
