"""Attention over a sequence that is cut over a group (DeepSpeed-Ulysses, arXiv 2309.14509; as the
sequence half of Intern sequence parallelism, arXiv 2401.09149).

One all-to-all turns ``[B, S / sp, heads, d]`` into ``[B, S, heads / sp, d]``, any attention kernel
runs on whole sequences, and a second all-to-all turns the result back.

Where ranks are more than heads, or a near group is smaller than the ranks, a *ring* cuts attention
itself: of ``sp = shares x ring`` ranks, ``shares`` exchange heads as above, each with its share of
the positions of ``ring`` parts, and keys and values travel between the parts (:mod:`.ring`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.errors import LayoutError
from internsp.mesh.sequence import SequenceAxes
from internsp.sp.dispatch import by_part
from internsp.sp.exchange import Channel, PendingExchange, exchange, start_exchange
from internsp.sp.fused import Parts, Whole, divisible, others_hooks
from internsp.sp.heads import HeadPlan
from internsp.sp.kernels import AttentionMask, check_kernel, choose_kernel
from internsp.sp.layout import SequenceLayout
from internsp.sp.messages import Shape
from internsp.sp.ranges import Ranges, Seen
from internsp.sp.ring import Ring, Rings, ring_attention
from internsp.trace import Trace

_ROLES = ("q", "k", "v")


class DistributedAttention(nn.Module):
    """Softmax attention of ``heads`` query heads over ``kv_heads`` key/value heads.

    Without :meth:`attach`, or with a group of one rank, it is plain attention and touches no
    process group. Any number of heads works with any number of ranks; a rank may have none.

    Args:
        heads: query heads of the whole model.
        kv_heads: key/value heads of the whole model, a divisor of ``heads``.
        head_dim: ``d``.
        causal: a query sees no later key.
        kernel: ``auto``, ``sdpa``, ``flash`` or ``varlen``.
        window: a query sees keys less than this many positions away; None: all.
        scale: of the scores; None: ``1 / sqrt(d)``.

    Raises:
        LayoutError: head counts that do not fit.
        ConfigError: an unknown kernel or an empty window.
        MissingDependencyError: a kernel asked for by name that is not installed.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        causal: bool = True,
        kernel: str = "auto",
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        check_kernel(kernel)
        if window is not None and window < 1:
            raise LayoutError(f"A window of {window} hides every key; give 1 or more, or None.")
        if head_dim < 1 or (scale is not None and not math.isfinite(scale)):
            raise LayoutError(
                f"Attention needs head_dim above 0 and a finite scale, got {head_dim} and {scale}."
            )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.causal, self.kernel, self.window = causal, kernel, window
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self.unit = ""
        self.channel: Channel | None = None
        self.around: Rings | None = None
        self.axes = SequenceAxes()
        self.in_parts, self.overlap = False, True
        self.plan = HeadPlan.create(heads, kv_heads, 1)

    def attach(
        self,
        group: dist.ProcessGroup | None,
        trace: Trace | None = None,
        unit: str = "",
        *,
        ring: dist.ProcessGroup | None = None,
        axes: SequenceAxes | None = None,
        form: str = "auto",
        inner: int = 1,
        in_parts: bool = False,
        overlap: bool = True,
    ) -> None:
        """Exchange heads over ``group`` from now on (None: not at all).

        Args:
            trace: gets ``A2A`` for each exchange that really runs and ``A2A_WAIT`` for the time
                spent waiting for it; ``RING`` and ``RING_WAIT`` for keys and values that travel.
            unit: this module's name in the trace.
            ring: ranks between which keys and values travel: those with the same heads, in the
                order of their positions' parts.
            axes: which ranks of the sequence both are (``mesh.sequence_axes``); None: those of
                ``group`` are neighbors.
            form, inner: how they travel, see :func:`internsp.sp.routes.routes`.
            in_parts: exchange heads in messages between pairs, a part at a time, where that can be
                (on the host, over gloo): :meth:`sublayer` makes its products meanwhile.
            overlap: of these; when false nothing is computed while messages travel (WP-12).

        Raises:
            LayoutError: groups that are not those of ``axes``.
            ConfigError: a form that cannot be.
        """
        channel = None if group is None else Channel.of(group, trace)
        size = 1 if channel is None else channel.size
        self.channel = channel if size > 1 else None
        parts = None if ring is None else Channel.of(ring, trace)
        count = 1 if parts is None else parts.size
        self.axes = SequenceAxes(size, count) if axes is None else axes
        if not isinstance(group, Channel) and not isinstance(ring, Channel):
            self.axes.require_groups(_ranks(group), _ranks(ring))
        gloo = not isinstance(group, Channel) and size > 1 and dist.get_backend(group) == "gloo"
        self.in_parts, self.overlap = in_parts and gloo, overlap
        self.around = None
        if parts is not None and count > 1:
            self.around = Rings(parts, form, inner)
        self.plan = HeadPlan.create(self.heads, self.kv_heads, size)
        self.unit = unit

    @torch.compiler.disable
    def start(self, x: Tensor, role: str, layout: SequenceLayout | None = None) -> PendingExchange:
        """Launch the exchange of ``x`` early and return at once; :meth:`forward` waits for it.

        To overlap the exchange of the queries with the projection of the keys, write
        ``attend(attend.start(q(x), "q", layout), attend.start(k(x), "k", layout), ...)``. In
        backward the three exchanges are launched before the first is waited for.

        Args:
            x: ``[B, s, heads, d]`` for ``q``, ``[B, s, kv_heads, d]`` for ``k`` and ``v``.
            role: ``q``, ``k`` or ``v``.
        """
        if role not in _ROLES:
            raise ValueError(f"The role of an exchange is one of {_ROLES}, not {role!r}.")
        heads = self.heads if role == "q" else self.kv_heads
        cut = self.plan.query_cut() if role == "q" else self.plan.kv_cut()
        return self._start(x, heads, cut, role, layout)

    @torch.compiler.disable
    def forward(
        self,
        q: Tensor | PendingExchange,
        k: Tensor | PendingExchange,
        v: Tensor | PendingExchange,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """Attention of this rank's positions to the whole sequence.

        Args:
            q: ``[B, s, heads, d]``, or what :meth:`start` returned for it.
            k, v: ``[B, s, kv_heads, d]``, likewise.
            layout: lengths of the ranks and documents. None: equal lengths, one document a row, and
                on a ring the positions of each rank behind those of the one before: not as
                :meth:`SequenceLayout.create` deals them there by default (``balance``).

        Returns:
            ``[B, s, heads, d]``.

        Raises:
            LayoutError: shapes or a layout that do not fit this module and its group.
            ConfigError: a kernel that cannot compute this device, dtype or head_dim.
        """
        given = (q, k, v)
        if isinstance(q, Whole) and isinstance(k, Whole) and isinstance(v, Whole):
            return self._local(q.wait(), k.wait(), v.wait(), layout)
        tensors = [x for x in given if isinstance(x, Tensor)]
        if len(tensors) == 3 and self._in_parts(tensors[0]):
            parts, whole = self._divided(tensors, layout)
            return parts.collect(self._local(*whole, layout))
        pending = [
            x if isinstance(x, PendingExchange) else self.start(x, role, layout)
            for x, role in zip(given, _ROLES, strict=True)
        ]
        whole_q, whole_k, whole_v = (x.wait() for x in pending)
        return self._attend(whole_q, whole_k, whole_v, layout)

    def sublayer(
        self,
        x: Tensor,
        projections: Sequence[nn.Module],
        turns: Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]],
        out_projection: nn.Module,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """A whole attention sublayer: projections, attention, out-projection.

        The same as calling one after the other, and just that on one rank. Where the exchange is
        made in parts (see :meth:`attach`), products of linear layers are, too, so that messages
        travel meanwhile (:mod:`.fused`).

        Args:
            x: ``[B, s, hidden]``.
            projections: ``[B, s, hidden]`` to queries ``[B, s, heads * d]``, keys and values
                ``[B, s, kv_heads * d]``.
            turns: what is done to each, in the shape ``[B, s, heads, d]``, and its adjoint.
            out_projection: of ``[B, s, heads * d]``.

        Returns:
            What ``out_projection`` gives.
        """
        in_parts = self._in_parts(x)
        early = self.channel is not None and not in_parts
        in_parts = in_parts and not others_hooks(self)
        if in_parts and all(divisible(linear) for linear in projections):
            parts = self._parted(x, layout)
            whole = parts.project(x, projections, turns)
        else:
            made: list[Any] = []
            for role, project, (turn, _) in zip(_ROLES, projections, turns, strict=True):
                made.append(turn(project(x).unflatten(-1, (-1, self.head_dim))))
                if early:  # one projection's exchange hides behind the next product
                    made[-1] = self.start(made[-1], role, layout)
            if not in_parts:
                out: Tensor = out_projection(self(*made, layout).flatten(-2))
                return out
            parts, whole = self._divided(made, layout)
        return parts.output(self(*map(Whole, whole), layout), out_projection)

    @torch.compiler.disable
    def packed_qkv(self, qkv: Tensor, layout: SequenceLayout | None = None) -> Tensor:
        """The same from ``[B, s, heads + 2 kv_heads, d]`` (queries, keys, values): one exchange."""
        heads = self.heads + 2 * self.kv_heads
        x = self._start(qkv, heads, self.plan.qkv_cut(), "qkv", layout).wait()
        queries, kv = self._mine()
        q, k, v = x.split([queries, kv, kv], dim=2)
        return self._attend(q, k, v, layout)

    @torch.compiler.disable
    def packed_kv(
        self, q: Tensor | PendingExchange, kv: Tensor, layout: SequenceLayout | None = None
    ) -> Tensor:
        """The same from ``q [B, s, heads, d]`` and ``kv [B, s, 2, kv_heads, d]``: two exchanges."""
        if kv.dim() != 5 or kv.shape[2] != 2:
            raise LayoutError(f"Packed kv must be [B, s, 2, kv_heads, d], got {list(kv.shape)}.")
        first = q if isinstance(q, PendingExchange) else self.start(q, "q", layout)
        flat = kv.flatten(2, 3)
        second = self._start(flat, 2 * self.kv_heads, self.plan.kv_cut(2), "kv", layout)
        whole_q = first.wait()
        k, v = second.wait().split([self._mine()[1]] * 2, dim=2)
        return self._attend(whole_q, k, v, layout)

    def extra_repr(self) -> str:
        """The settings, and the size of the group."""
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, window={self.window}, kernel={self.kernel!r}, "
            f"sequence={self.axes.size}"
        )

    def _in_parts(self, x: Any) -> bool:
        """Whether heads of ``x`` are exchanged in parts: the same on all ranks."""
        return (
            self.in_parts
            and isinstance(x, Tensor)
            and x.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cpu")
        )

    def _divided(
        self, given: Sequence[Tensor], layout: SequenceLayout | None
    ) -> tuple[Parts, tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values of own positions, exchanged in parts."""
        for x, role in zip(given, _ROLES, strict=True):
            self._checked(x, role, layout)
        parts = self._parted(given[0], layout)
        return parts, parts.divide(*given)

    def _parted(self, x: Tensor, layout: SequenceLayout | None) -> Parts:
        """One forward's exchange, of the positions of ``x`` ``[B, s, ...]``."""
        assert self.channel is not None, "in parts among several ranks only"
        lengths = self._lengths(x.shape[1], layout)
        shape = Shape(self.plan, self._rank, lengths, len(x), self.head_dim, x.dtype)
        return Parts(self.channel, shape, self.unit, self.overlap)

    @property
    def _part(self) -> int:
        """Of the positions over which attention is cut."""
        return 0 if self.around is None else self.around.channel.rank

    @property
    def _rank(self) -> int:
        """Among those that share heads."""
        return 0 if self.channel is None else self.channel.rank

    def _mine(self) -> tuple[int, int]:
        """Query and key/value heads that this rank computes."""
        (q0, q1), (kv0, kv1) = self.plan.query[self._rank], self.plan.key_value[self._rank]
        return q1 - q0, kv1 - kv0

    def _lengths(self, length: int, layout: SequenceLayout | None) -> tuple[int, ...]:
        """Positions of each rank that shares heads, from the layout or taken to be equal."""
        if layout is None:
            return (length,) * self.plan.size
        self.axes.require_layout(layout.axes)
        size, rank = self.axes.size, self.axes.rank(self._part, self._rank)
        if layout.size != size or layout.rank != rank:
            raise LayoutError(
                f"The layout is for rank {layout.rank} of {layout.size}, but this "
                f"DistributedAttention is rank {rank} of {size}. Attach the "
                "sequence group (attach), or make the layout for it."
            )
        return tuple(layout.sizes[rank] for rank in self.axes.sharing(self._part))

    def _checked(
        self, x: Tensor, label: str, layout: SequenceLayout | None, heads: int | None = None
    ) -> tuple[int, ...]:
        """Positions of each rank that shares heads; ``x`` is in the shape of its role."""
        if heads is None:
            heads = self.heads if label == "q" else self.kv_heads
        lengths = self._lengths(x.shape[1], layout)
        wanted = (lengths[self._rank], heads, self.head_dim)
        if x.dim() != 4 or tuple(x.shape[1:]) != wanted:
            raise LayoutError(
                f"Rank {self._rank}: {label} of {self.unit or 'attention'} must be "
                f"[B, {', '.join(map(str, wanted))}], got {list(x.shape)}."
            )
        return lengths

    def _start(
        self,
        x: Tensor,
        heads: int,
        cut: Sequence[int],
        label: str,
        layout: SequenceLayout | None,
    ) -> PendingExchange:
        lengths = self._checked(x, label, layout, heads)
        return start_exchange(
            x, self.channel, lengths, cut, to="heads", unit=self.unit, label=label
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout | None) -> Tensor:
        """Attention of this rank's heads over all positions, then back to its positions."""
        out = self._local(q, k, v, layout)
        if self.channel is None:
            return out
        # Taken from the output's own length: with no layout every rank has as many.
        lengths = self._lengths(q.shape[1] // self.plan.size, layout)
        return exchange(
            out,
            self.channel,
            lengths,
            self.plan.query_cut(),
            to="sequence",
            unit=self.unit,
            label="out",
        )

    def _local(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout | None) -> Tensor:
        """Attention of this rank's heads over all positions, ``[B, S, own heads, d]``."""
        documents = None if layout is None else layout.documents
        if documents is not None and len(documents.lengths) != q.shape[0]:
            raise LayoutError(
                f"The layout has {len(documents.lengths)} rows, the queries {q.shape[0]}."
            )
        if self.around is not None:
            out = ring_attention(self._ring(self.around, q.shape[1], layout), q, k, v, self.unit)
        elif q.numel():
            mask = AttentionMask(self.causal, self.window, documents)
            kernel = choose_kernel(self.kernel, q.device, q.dtype, self.head_dim)
            out = kernel(q, k, v, self.plan.key_value_of(self._rank), mask, self.scale)
        else:
            out = no_heads(q, k, v)
        return out

    def _ring(self, around: Rings, length: int, layout: SequenceLayout | None) -> Ring:
        """How keys and values travel for a batch."""
        ranges: tuple[Ranges, ...]
        if layout is None:  # as long on every rank, one after another
            each, size = length // self.axes.heads, self.axes.size
            ranges = tuple(((n * each, n * each + each),) for n in range(size))
            documents: tuple[tuple[int, ...], ...] = ((size * each,),)
        else:
            ranges, documents = layout.ranges, layout.documents.rows
        held = by_part(ranges, self.axes)
        seen = Seen(self.causal, self.window, documents)
        return around.of(held, seen, self.plan.key_value_of(self._rank), self.scale)


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks; of none this one alone, which without a process group is the only one."""
    if group is None:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return dist.get_process_group_ranks(group)


def no_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of no heads, ``[B, S, 0, d of v]``, whose backward reaches every input, so that a
    rank without heads takes its place in the exchanges of backward too (WP-2)."""
    out: Tensor = _NoHeads.apply(q, k, v)
    return out.sum(3, keepdim=True).expand(*q.shape[:3], v.shape[3])


class _NoHeads(torch.autograd.Function):
    """See :func:`no_heads`."""

    @staticmethod
    def forward(ctx: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        ctx.like = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))  # type: ignore[attr-defined]
        return q.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.zeros_like(x) for x in ctx.like)  # type: ignore[attr-defined]
