"""Attention over a sequence that is sharded over a group (DeepSpeed-Ulysses, arXiv 2309.14509; the
sequence half of Intern sequence parallelism, arXiv 2401.09149).

One all-to-all turns ``[B, S / sp, heads, d]`` into ``[B, S, heads / sp, d]``, any attention kernel
runs on whole sequences, and a second all-to-all turns the output back.

Where there are more ranks than heads, or fewer near ranks than ranks, attention itself is sharded
over a *ring*: of ``sp = n x ring`` ranks, groups of ``n`` ranks exchange heads as above, so that
each group has ``1 / ring`` of the positions, and ranks with the same heads send each other keys and
values (:mod:`.ring`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.base.accelerator import HOST, backends_of
from internsp.base.trace import Trace
from internsp.errors import LayoutError
from internsp.mesh.sequence import SequenceAxes
from internsp.sp.dispatch import ring_ranges
from internsp.sp.exchange import (
    ExchangeGroup,
    FinishedExchange,
    PendingExchange,
    start_exchange,
)
from internsp.sp.heads import HeadPlan, Rotation
from internsp.sp.kernels import AttentionMask, choose_kernel, find_kernel
from internsp.sp.layout import SequenceLayout
from internsp.sp.ranges import MaskSpec, Ranges
from internsp.sp.ring import Ring, RingGroup, ring_attention

if TYPE_CHECKING:
    from internsp.sp.gloo.fused import FusedSublayer

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
        scale: factor of the scores; None: ``1 / sqrt(d)``.

    Raises:
        LayoutError: head counts that do not fit.
        ConfigError: an unknown kernel or an empty window.
        MissingDependencyError: a kernel given by name is not installed.
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
        find_kernel(kernel)  # told at once where it is unknown or not installed
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
        self.group: ExchangeGroup | None = None
        self.ring: RingGroup | None = None
        self.axes = SequenceAxes()
        self.heads_rank = self.ring_rank = 0  # this rank in these groups
        self.parts: type[FusedSublayer] | None = None  # None: heads are exchanged as a whole
        self.overlap = True
        self.plan = HeadPlan.create(heads, kv_heads, 1)
        self.model_layout: SequenceLayout | None = None  # what the model's last forward was given

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
        """Exchange heads over ``group`` from now on (None: no exchange).

        Args:
            trace: records ``A2A`` for each exchange that really runs and ``A2A_WAIT`` for the time
                spent waiting for it; ``RING`` and ``RING_WAIT`` for the keys and values of a ring.
            unit: this module's name in the trace.
            ring: the ranks between which keys and values are sent: those with the same heads, in
                the order of the ring.
            axes: which ranks of the sequence group these two groups are (``mesh.sequence_axes``);
                None: the ranks of ``group`` are neighbors.
            form, inner: how keys and values are sent, see :func:`internsp.sp.routes.route`.
            in_parts: exchange heads in messages between pairs of ranks, one part at a time, where
                possible (on the host, over gloo); :meth:`sublayer` computes meanwhile.
            overlap: when false, nothing is computed while these messages are in flight (WP-12).

        Raises:
            LayoutError: the groups are not those of ``axes``.
            ConfigError: a form that the ring cannot use.
        """
        both = [None if x is None else ExchangeGroup.of(x, trace) for x in (group, ring)]
        size, count = (1 if each is None else each.size for each in both)
        self.heads_rank, self.ring_rank = (0 if each is None else each.rank for each in both)
        self.axes = SequenceAxes(size, count) if axes is None else axes
        known = [None if each is None else each.process_group for each in both]
        if group is None or known[0] is not None:  # else a plan's, of one rank
            self.axes.require_groups(*map(_ranks, known))
        self.group = both[0] if size > 1 else None
        self.parts, self.overlap = None, overlap
        if in_parts and size > 1 and backends_of(known[0]).get(HOST) == "gloo":
            from internsp.sp.gloo.fused import FusedSublayer

            self.parts = FusedSublayer
        around = both[1] if count > 1 else None
        self.ring = None if around is None else RingGroup(around, form, inner)
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
        return self._start(x, role, layout)

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
            layout: lengths of the ranks, and documents. None: equal lengths, one document a row,
                and consecutive positions on consecutive ranks, also on a ring, where
                :meth:`SequenceLayout.create` by default balances them otherwise (``balance``).

        Returns:
            ``[B, s, heads, d]``.

        Raises:
            LayoutError: shapes or a layout that do not fit this module and its group.
            ConfigError: a kernel that cannot compute this device, dtype or head_dim.
        """
        given = (q, k, v)
        finished = [x.wait() for x in given if isinstance(x, FinishedExchange)]
        if len(finished) == 3:
            return self._local(finished[0], finished[1], finished[2], layout)
        tensors = [x for x in given if isinstance(x, Tensor)]
        parts = self._parts_of(q)
        if len(tensors) == 3 and parts is not None:
            fused, whole = self._exchange_in_parts(parts, tensors, layout)
            return fused.gather_out(self._local(*whole, layout))
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
        rotations: Sequence[Rotation],
        out_projection: nn.Module,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """A whole attention sublayer: projections, attention, out-projection.

        The result is that of calling one after the other, which is what happens on one rank. Where
        heads are exchanged in parts (see :meth:`attach`), the products of linear layers are
        computed in parts, too, while messages are in flight (:mod:`.gloo`).

        Args:
            x: ``[B, s, hidden]``.
            projections: ``[B, s, hidden]`` to queries ``[B, s, heads * d]``, keys and values
                ``[B, s, kv_heads * d]``.
            rotations: for each, a function of ``[B, s, heads, d]`` to apply, and its adjoint.
            out_projection: takes ``[B, s, heads * d]``.

        Returns:
            The output of ``out_projection``.
        """
        parts = self._parts_of(x)
        early = self.group is not None and parts is None
        if parts is not None and parts.is_hooked(self):
            parts = None
        if parts is not None and all(map(parts.can_compute, projections)):
            fused = self._fused(parts, x, layout)
            whole = fused.project(x, projections, rotations)
        else:
            made: list[Any] = []
            for role, project, (rotate, _) in zip(_ROLES, projections, rotations, strict=True):
                made.append(rotate(project(x).unflatten(-1, (-1, self.head_dim))))
                if early:  # this exchange overlaps with the next projection
                    made[-1] = self.start(made[-1], role, layout)
            if parts is None:
                out: Tensor = out_projection(self(*made, layout).flatten(-2))
                return out
            fused, whole = self._exchange_in_parts(parts, made, layout)
        return fused.out_projection(self(*map(FinishedExchange, whole), layout), out_projection)

    @torch.compiler.disable
    def packed_qkv(self, qkv: Tensor, layout: SequenceLayout | None = None) -> Tensor:
        """Attention of packed ``[B, s, heads + 2 kv_heads, d]`` (q, k, v): one exchange."""
        q, k, v = self._split(self._start(qkv, "qkv", layout).wait(), "qkv")
        return self._attend(q, k, v, layout)

    @torch.compiler.disable
    def packed_kv(
        self, q: Tensor | PendingExchange, kv: Tensor, layout: SequenceLayout | None = None
    ) -> Tensor:
        """Attention of ``q [B, s, heads, d]`` and ``kv [B, s, 2, kv_heads, d]``: two exchanges."""
        if kv.dim() != 5 or kv.shape[2] != 2:
            raise LayoutError(f"Packed kv must be [B, s, 2, kv_heads, d], got {list(kv.shape)}.")
        first = q if isinstance(q, PendingExchange) else self.start(q, "q", layout)
        second = self._start(kv.flatten(2, 3), "kv", layout)
        whole_q = first.wait()
        k, v = self._split(second.wait(), "kv")
        return self._attend(whole_q, k, v, layout)

    def extra_repr(self) -> str:
        """The settings, and the size of the group."""
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, window={self.window}, kernel={self.kernel!r}, "
            f"sequence={self.axes.size}"
        )

    def _parts_of(self, x: object) -> type[FusedSublayer] | None:
        """What exchanges heads of ``x`` in parts; ``None``: they are exchanged as a whole."""
        return self.parts if self.parts is not None and self.parts.takes(x) else None

    def _exchange_in_parts(
        self, parts: type[FusedSublayer], given: Sequence[Tensor], layout: SequenceLayout | None
    ) -> tuple[FusedSublayer, tuple[Tensor, Tensor, Tensor]]:
        """Exchange queries, keys and values of own positions in parts."""
        for x, role in zip(given, _ROLES, strict=True):
            self._check_shape(x, role, layout)
        fused = self._fused(parts, given[0], layout)
        return fused, fused.exchange_qkv(*given)

    def _fused(
        self, parts: type[FusedSublayer], x: Tensor, layout: SequenceLayout | None
    ) -> FusedSublayer:
        """One forward, whose input is ``x [B, s, ...]``."""
        assert self.group is not None, "heads are exchanged in parts among several ranks only"
        lengths = self._lengths(x.shape[1], layout)
        return parts(x, self.group, self.plan, lengths, self.head_dim, self.unit, self.overlap)

    def _split(self, x: Tensor, roles: str) -> Sequence[Tensor]:
        """This rank's heads of each of ``roles``, which ``x`` has one after another."""
        spans = (self.plan.of(role)[0][self.heads_rank] for role in roles)
        return x.split([stop - first for first, stop in spans], dim=2)

    def _lengths(self, length: int, layout: SequenceLayout | None) -> tuple[int, ...]:
        """Positions of each rank of the heads group, from the layout or, without one, all equal."""
        if layout is None:
            self._require_none_given(length)
            return (length,) * self.plan.size
        self.axes.require_layout(layout.axes)
        size, rank = self.axes.size, self.axes.rank(self.ring_rank, self.heads_rank)
        if layout.size != size or layout.rank != rank:
            raise LayoutError(
                f"The layout is for rank {layout.rank} of {layout.size}, but this "
                f"DistributedAttention is rank {rank} of {size}. Attach the "
                "sequence group (attach), or make the layout for it."
            )
        return tuple(layout.sizes[rank] for rank in self.axes.sharing(self.ring_rank))

    def _require_none_given(self, length: int) -> None:
        """Check that the model was given no layout in which this rank has ``length`` positions but
        ranks hold others than without one. On the host gloo ends a process that gets another number
        of them than it waits for, and a ring would take the positions of a rank for others.
        """
        given = self.model_layout
        if given is None or given.sizes[given.rank] != length:  # or of another sequence
            return
        each = given.length // given.size
        if given.ranges != tuple(((n * each, n * each + each),) for n in range(given.size)):
            raise LayoutError(
                f"Rank {given.rank}: {self.unit or 'attention'} was called without the layout that "
                "the model was given, in which ranks hold other positions than equally many in "
                "order: pass it, as attend(q, k, v, layout)."
            )

    def _check_shape(self, x: Tensor, roles: str, layout: SequenceLayout | None) -> tuple[int, ...]:
        """Check the shape of ``x``; return the positions of each rank that shares heads."""
        heads = sum(self.plan.of(role)[1] for role in roles)
        lengths = self._lengths(x.shape[1], layout)
        wanted = (lengths[self.heads_rank], heads, self.head_dim)
        if x.dim() != 4 or tuple(x.shape[1:]) != wanted:
            raise LayoutError(
                f"Rank {self.heads_rank}: {roles} of {self.unit or 'attention'} must be "
                f"[B, {', '.join(map(str, wanted))}], got {list(x.shape)}."
            )
        return lengths

    def _start(self, x: Tensor, roles: str, layout: SequenceLayout | None) -> PendingExchange:
        lengths, ranges = self._check_shape(x, roles, layout), self.plan.ranges(roles)
        return start_exchange(
            x, self.group, lengths, ranges, to="heads", unit=self.unit, label=roles
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout | None) -> Tensor:
        """Attention of this rank's heads over all positions, then the exchange back."""
        out = self._local(q, k, v, layout)
        if self.group is None:
            return out
        # Without a layout all ranks have equally many positions.
        lengths = self._lengths(q.shape[1] // self.plan.size, layout)
        return start_exchange(
            out, self.group, lengths, self.plan.ranges("q"), to="sequence", unit=self.unit,
            label="out",
        ).wait()  # fmt: skip

    def _local(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout | None) -> Tensor:
        """Attention of this rank's heads over all positions, ``[B, S, own heads, d]``."""
        documents = None if layout is None else layout.documents
        if documents is not None and len(documents.lengths) != q.shape[0]:
            raise LayoutError(
                f"The layout has {len(documents.lengths)} rows, the queries {q.shape[0]}."
            )
        if self.ring is not None:
            out = ring_attention(self._ring(self.ring, q.shape[1], layout), q, k, v, self.unit)
        elif q.numel():
            mask = AttentionMask(self.causal, self.window, documents)
            kernel = choose_kernel(self.kernel, q.device, q.dtype, self.head_dim)
            out = kernel(q, k, v, self.plan.kv_index(self.heads_rank), mask, self.scale)
        else:
            out = no_heads(q, k, v)
        return out

    def _ring(self, group: RingGroup, length: int, layout: SequenceLayout | None) -> Ring:
        """The ring for one batch."""
        ranges: tuple[Ranges, ...]
        if layout is None:  # equally many positions on every rank, in order
            each, size = length // self.axes.heads, self.axes.size
            ranges = tuple(((n * each, n * each + each),) for n in range(size))
            documents: tuple[tuple[int, ...], ...] = ((size * each,),)
        else:
            ranges, documents = layout.ranges, layout.documents.rows
        held = ring_ranges(ranges, self.axes)
        spec = MaskSpec(self.causal, self.window, documents)
        return group.ring(held, spec, self.plan.kv_index(self.heads_rank), self.scale)


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks of ``group``; without a group, this rank alone (0 without a process group)."""
    if group is None:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return dist.get_process_group_ranks(group)


def no_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention on a rank without heads: ``[B, S, 0, d of v]``.

    Its backward gives every input a gradient, so that the rank takes part in the exchanges of
    backward, too (WP-2).
    """
    return torch.cat([q, k, v], dim=3)[..., : v.shape[3]]
