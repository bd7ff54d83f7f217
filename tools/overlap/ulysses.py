"""DeepSpeed's exchange of heads instead of ours: one all-to-all each for queries, keys, values and
output, one after another. Weights, kernel and projections are unchanged.

Accelerate uses DeepSpeed's (``UlyssesSPAttentionHF``), with the same all-to-alls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from internsp.sp import DistributedAttention, SequenceLayout

Rotation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def unavailable(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Why DeepSpeed cannot exchange these heads, or ``None``."""
    from tools.overlap import zero3

    if heads % ranks or kv_heads % ranks:
        return f"{heads} heads over {kv_heads} are not cut evenly over {ranks} ranks"
    return zero3.unavailable()


class Ulysses(nn.Module):
    """An attention sublayer whose heads DeepSpeed exchanges over ``group``."""

    def __init__(self, ours: DistributedAttention, group: dist.ProcessGroup) -> None:
        from deepspeed.sequence.layer import (  # type: ignore[import-not-found, unused-ignore]
            DistributedAttention as Theirs,
        )

        super().__init__()
        size = dist.get_world_size(group)
        local = DistributedAttention(
            ours.heads // size, ours.kv_heads // size, ours.head_dim, ours.causal, ours.kernel,
            window=ours.window, scale=ours.scale,
        )  # fmt: skip
        self.head_dim = ours.head_dim
        self.theirs: Any = Theirs(local, group, 2, 1)

    def sublayer(
        self,
        x: Tensor,
        projections: Sequence[nn.Module],
        rotations: Sequence[Rotation],
        out_projection: nn.Module,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """See :meth:`internsp.sp.DistributedAttention.sublayer`; ranks have equal lengths."""
        assert layout is None or len(set(layout.sizes)) == 1, "as the benchmark cuts them"
        q, k, v = (
            turn(project(x).unflatten(-1, (-1, self.head_dim)))
            for project, (turn, _) in zip(projections, rotations, strict=True)
        )
        made: Tensor = out_projection(self.theirs(q, k, v, 0).flatten(-2))
        return made


def exchange_by_deepspeed(model: nn.Module) -> None:
    """Replace every attention of ``model``. Collective."""
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, DistributedAttention) and child.group is not None:
                setattr(module, name, Ulysses(child, child.group.process_group))
