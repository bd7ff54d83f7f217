"""The step of offloaded weights: what lies in host memory passes the device in bounded pieces.

The device steps, not the host: any elementwise optimizer then runs its own device kernels and gives
the bits that it gives without offload, however few cores a rank has. The link carries optimizer
state both ways, about 24 bytes an element of AdamW in fp32; both directions at once, while the
device steps the piece between, so that a step takes as long as its slower direction. (A step on the
host would send less, and read and write the same bytes by its cores, at several times fewer a
second unless a rank has many of them.)

A piece is one weight's slice or several small ones. Three are on the device at the most: one comes,
one steps, one leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from internsp.host import OPTIMIZER, PIECE, HostLink
from internsp.optim.bucket import Bucket, Segment
from internsp.wp.parameter import Member


def update(bucket: Bucket, link: HostLink, used: set[Member], factor: float) -> None:
    """One step of ``bucket``'s segments with ``factor`` times the gradient.

    Host memory is complete after :meth:`HostLink.rest`.
    """
    ahead: _Piece | None = None
    for segments in (*_pieces(bucket, used), None):
        coming = None if segments is None else _Piece(bucket, link, segments)
        if ahead is not None:
            ahead.step(factor)
        ahead = coming


def _pieces(bucket: Bucket, used: set[Member]) -> Iterator[Sequence[Segment]]:
    """An unused one is skipped, as torch skips grad None."""
    size = PIECE // bucket.master.element_size()
    piece: list[Segment] = []
    for segment in bucket.segments:
        if segment.member not in used:
            continue
        if piece and sum(s.tensor.numel() for s in (*piece, segment)) > size:
            yield piece
            piece = []
        piece.append(segment)
    if piece:
        yield piece


class _Piece:
    """Some segments of a bucket, on their way to the device, there, and back."""

    def __init__(self, bucket: Bucket, link: HostLink, segments: Sequence[Segment]) -> None:
        assert bucket.inner is not None, "a bucket with segments has an inner optimizer"
        assert bucket.gradient is not None, "finish_reductions gives each bucket a gradient"
        self.bucket, self.link, self.segments = bucket, link, segments
        self._inner: Any = bucket.inner
        pairs: list[tuple[Tensor, Tensor]] = []

        def there(values: Tensor, hosted: bool) -> Tensor:
            if not hosted:
                return values
            pairs.append((torch.empty_like(values, device=link.device), values))
            return pairs[-1][0]

        self.values, self.owned, self.gradients, self.states = [], [], [], []
        for s in segments:
            reach = slice(s.start, s.stop)
            self.values.append(there(s.tensor.data, bucket.master_hosted))
            self.owned.append(there(bucket.owned[reach], bucket.has_master and bucket.hosted))
            self.gradients.append(there(bucket.gradient[reach], bucket.sum is not None))
            state = self._inner.state.get(s.tensor, {})
            self.states.append({
                name: there(value, OPTIMIZER in bucket.offload)
                for name, value in state.items()
                if isinstance(value, Tensor) and value.dim()
            })  # fmt: skip
        self._came = link.fetch(pairs)

    def step(self, factor: float) -> None:
        """Step, and send back what came, and new state."""
        bucket, segments = self.bucket, self.segments
        self._came.wait()
        homes = [s.tensor.data for s in segments]
        for i, s in enumerate(segments):
            if bucket.has_master:
                self.values[i].copy_(bucket.adopted(self.values[i], self.owned[i]))
            s.tensor.data = self.values[i]
            s.tensor.grad = self.gradients[i].mul_(factor) if factor != 1.0 else self.gradients[i]
            if self.states[i]:
                self._inner.state[s.tensor].update(self.states[i])
        try:
            self._inner.step()
        finally:
            for s, home in zip(segments, homes, strict=True):
                s.tensor.grad, s.tensor.data = None, home
        back: list[tuple[Tensor, Tensor]] = []
        for i, s in enumerate(segments):
            if bucket.master_hosted:
                back.append((homes[i], self.values[i]))
            if bucket.has_master:
                rounded, own = self.values[i].to(bucket.owned.dtype), bucket.owned[s.start : s.stop]
                if bucket.hosted:
                    back.append((own, rounded))
                else:
                    own.copy_(rounded)
            if OPTIMIZER in bucket.offload:
                state = self._inner.state[s.tensor]
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim():
                        state[name] = bucket.home(s, name, value.dtype)
                        back.append((state[name], value))
        self.link.store(back)


def brought(bucket: Bucket, link: HostLink) -> tuple[Tensor, Tensor]:
    """Room on the device for a bucket's weights, and this rank's new slice at its place in it."""
    own, rank = bucket.owned, bucket.axis.zero_rank
    link.settle()  # the slice is new
    flat = torch.empty(bucket.flat.numel(), dtype=own.dtype, device=link.device)
    place = flat[rank * own.numel() : (rank + 1) * own.numel()]
    link.fetch([(place, own)]).wait()
    return flat, place
