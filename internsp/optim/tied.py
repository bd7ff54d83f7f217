"""Gradients that one step of a pipeline adds to a ``ZeroOptimizer``'s, for weights tied over
stages.

Such a weight has a bucket of its own (:func:`internsp.optim.bucket.make_buckets`), so that slices
of its copies end at the same elements on all stages and can be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from internsp.optim.bucket import Bucket
from internsp.wp.parameter import Member


class ZeroGradients:
    """This rank's slices of tied weights' gradients
    (:class:`internsp.wp.tied.StepGradients`).

    Args:
        bucket_of: the bucket of each parameter, kept up to date.
        finish: finishes the reductions, and returns the parameters that some rank used.
        used: the parameters that the optimizer will step, kept up to date.
    """

    def __init__(
        self,
        bucket_of: Mapping[Member, Bucket],
        finish: Callable[[], set[Member]],
        used: set[Member],
    ) -> None:
        self._bucket = bucket_of
        self._finish, self._used = finish, used
        self._before: dict[Member, Tensor | None] = {}
        self._added: set[Member] = set()

    def trains(self, member: Member) -> bool:
        """See :class:`StepGradients`; a parameter that was never trained has no bucket."""
        return member.requires_grad and member in self._bucket

    def begin_step(self, member: Member) -> None:
        """See :class:`StepGradients`."""
        bucket = self._bucket[member]
        self._before[member] = bucket.gradient
        # Host memory of an offloaded sum is used again.
        if bucket.gradient is not None and bucket.host_sum is not None:
            self._before[member] = bucket.gradient.clone()
        bucket.gradient = None

    def finish(self) -> None:
        """See :class:`StepGradients`."""
        self._added = self._finish()

    def local_sum(self, member: Member) -> tuple[Tensor, bool]:
        """See :class:`StepGradients`."""
        bucket = self._bucket[member]
        return bucket.reduced.to(bucket.device), member in self._added

    def set_total(self, member: Member, total: Tensor | None) -> None:
        """See :class:`StepGradients`."""
        bucket, before = self._bucket[member], self._before.pop(member)
        if total is None:
            bucket.reduced.zero_()
        else:
            bucket.reduced.copy_(total)
            self._used.add(member)
        if before is not None:
            bucket.reduced.add_(before)

    def discard_step(self) -> None:
        """See :class:`StepGradients`."""
        for member, before in self._before.items():
            bucket = self._bucket[member]
            bucket.gradient = None if bucket.host_sum is not None else before
        self._before.clear()

    def values(self, member: Member) -> list[Tensor]:
        """See :class:`StepGradients`."""
        bucket, parameter = self._bucket.get(member), member.parameter
        local: Any = parameter._local_tensor  # type: ignore[attr-defined]
        if bucket is None:
            return [local]
        bucket.merge_external_writes()
        return [local, *([bucket.master] if bucket.has_master else [])]
