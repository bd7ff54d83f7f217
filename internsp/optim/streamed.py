"""The step of offloaded weights: their state in host memory passes the device piece by piece.

The device steps, not the host: any elementwise optimizer then runs its own device kernels, with
bitwise the results that it has without offload, however few cores a rank has. The link carries
optimizer state both ways, about 24 bytes an element for AdamW in fp32; both directions are busy at
once while the device steps the piece between, so that a step takes as long as its slower direction.
(A step on the host would send less, but read and write the same bytes by its cores, at several
times fewer bytes a second unless a rank has many of them.)

A piece is one weight's slice or several small ones. At most three are on the device: one is copied
to the device, one is stepped, one is copied back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from internsp.base.host import OPTIMIZER, PIECE_BYTES, HostLink
from internsp.optim.bucket import Bucket, Segment
from internsp.optim.verdict import Verdict
from internsp.wp.parameter import Member


def step(
    bucket: Bucket,
    link: HostLink,
    used: set[Member],
    settings: list[dict[str, Any]],
    verdict: Verdict,
    merges: bool,
) -> None:
    """One step of ``bucket``'s segments as ``verdict`` says.

    The results are complete in host memory only after :meth:`HostLink.synchronize`.

    Args:
        merges: masters take over what a program has written to 16-bit weights.
    """
    if bucket.inner is None:
        return
    factor = bucket.take(verdict)
    current: _Piece | None = None
    for segments in (*_pieces(bucket, used), None):
        following = None if segments is None else _Piece(bucket, link, segments, merges)
        if current is not None:
            bucket.set_settings(settings)
            current.step(factor)
            if verdict.found_inf is not None:
                bucket.note_stepped(current.segments)
        current = following


def _pieces(bucket: Bucket, used: set[Member]) -> Iterator[Sequence[Segment]]:
    """The segments in pieces of at most ``PIECE_BYTES``, or of one segment. Those of unused
    parameters are skipped, as torch skips ``.grad`` ``None``."""
    size = PIECE_BYTES // bucket.master.element_size()
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
    """Some segments of a bucket, copied to the device when created; :meth:`step` steps them and
    copies them back."""

    def __init__(
        self, bucket: Bucket, link: HostLink, segments: Sequence[Segment], merges: bool
    ) -> None:
        assert bucket.inner is not None, "a bucket with segments has an inner optimizer"
        self.bucket, self.link, self.segments = bucket, link, segments
        self._inner: Any = bucket.inner
        self._merges = merges and bucket.has_master
        pairs: list[tuple[Tensor, Tensor]] = []

        def on_device(values: Tensor, hosted: bool) -> Tensor:
            if not hosted:
                return values
            pairs.append((torch.empty_like(values, device=link.device), values))
            return pairs[-1][0]

        self.values, self.owned, self.gradients, self.states = [], [], [], []
        for s in segments:
            index = slice(s.start, s.stop)
            self.values.append(on_device(s.tensor.data, bucket.master_hosted))
            self.owned.append(on_device(bucket.owned[index], self._merges and bucket.hosted))
            self.gradients.append(on_device(bucket.reduced[index], bucket.host_sum is not None))
            state = self._inner.state.get(s.tensor, {})
            self.states.append({
                name: on_device(value, OPTIMIZER in bucket.offload)
                for name, value in state.items()
                if isinstance(value, Tensor) and value.dim()
            })  # fmt: skip
        self._copy_handle = link.copy_to_device(pairs)

    def step(self, factor: float | Tensor) -> None:
        """Step, and start to copy values and state, also new state, back to host memory."""
        bucket, segments = self.bucket, self.segments
        self._copy_handle.wait()
        host_values = [s.tensor.data for s in segments]
        for i, s in enumerate(segments):
            if self._merges:
                bucket.merge_into_master(self.values[i], self.owned[i])
            s.tensor.data = self.values[i]
            scaled = isinstance(factor, Tensor) or factor != 1.0
            s.tensor.grad = self.gradients[i].mul_(factor) if scaled else self.gradients[i]
            if self.states[i]:
                self._inner.state[s.tensor].update(self.states[i])
        try:
            self._inner.step()
        finally:
            for s, host in zip(segments, host_values, strict=True):
                s.tensor.grad, s.tensor.data = None, host
        to_store: list[tuple[Tensor, Tensor]] = []
        for i, s in enumerate(segments):
            if bucket.master_hosted:
                to_store.append((host_values[i], self.values[i]))
            if bucket.has_master:
                rounded, own = self.values[i].to(bucket.owned.dtype), bucket.owned[s.start : s.stop]
                if bucket.hosted:
                    to_store.append((own, rounded))
                else:
                    own.copy_(rounded)
            if OPTIMIZER in bucket.offload:
                state = self._inner.state[s.tensor]
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim():
                        state[name] = bucket.host_state_slice(s, name, value.dtype)
                        to_store.append((state[name], value))
        self.link.copy_to_host(to_store)
