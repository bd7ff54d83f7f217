"""What one step of a pipeline adds to a ``ZeroOptimizer``'s gradients of weights that are tied.

Such a weight has a bucket of its own (:func:`internsp.optim.bucket.make_buckets`), so that slices
of its copies end at the same elements on all stages, and can be added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from internsp.optim.bucket import Bucket
from internsp.wp.parameter import Member


class ZeroGradients:
    """This rank's slices (:class:`internsp.pipeline.tied.StepGradients`).

    Args:
        finish: finishes the reductions, and returns what was used on some rank.
        used: what the optimizer will step.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        finish: Callable[[], set[Member]],
        used: Callable[[], set[Member]],
    ) -> None:
        self._bucket = {member: bucket for bucket in buckets for member in bucket.offsets}
        self._finish, self._used = finish, used
        self._before: dict[Member, Tensor | None] = {}
        self._added: set[Member] = set()

    def trains(self, member: Member) -> bool:
        """See :class:`StepGradients`; what was frozen when the optimizer was made has no bucket."""
        return member.requires_grad and member in self._bucket

    def begin(self, member: Member) -> None:
        """See :class:`StepGradients`."""
        bucket = self._bucket[member]
        self._before[member] = bucket.gradient
        if bucket.gradient is not None and bucket.sum is not None:  # its memory is used again
            self._before[member] = bucket.gradient.clone()
        bucket.gradient = None

    def finish(self) -> None:
        """See :class:`StepGradients`."""
        self._added = self._finish()

    def take(self, member: Member) -> tuple[Tensor, bool]:
        """See :class:`StepGradients`."""
        bucket = self._bucket[member]
        assert bucket.gradient is not None, "finish() gives every bucket a gradient"
        return bucket.gradient.to(bucket.device), member in self._added

    def give(self, member: Member, total: Tensor | None) -> None:
        """See :class:`StepGradients`."""
        bucket, before = self._bucket[member], self._before.pop(member)
        assert bucket.gradient is not None, "finish() gives every bucket a gradient"
        if total is None:
            bucket.gradient.zero_()
        else:
            bucket.gradient.copy_(total)
            self._used().add(member)
        if before is not None:
            bucket.gradient.add_(before)

    def forget(self) -> None:
        """See :class:`StepGradients`."""
        for member, before in self._before.items():
            bucket = self._bucket[member]
            bucket.gradient = None if bucket.sum is not None else before
        self._before.clear()

    def values(self, member: Member) -> list[Tensor]:
        """See :class:`StepGradients`."""
        bucket, parameter = self._bucket.get(member), member.parameter
        local: Any = parameter._local_tensor  # type: ignore[attr-defined]
        if bucket is None:
            return [local]
        bucket.adopt()
        return [local, *([bucket.master] if bucket.has_master else [])]
