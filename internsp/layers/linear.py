"""Linear layers whose weights may be cut over a weight group.

Without a communicator each is an ordinary layer; with one, its weight enters the computation as
a differentiable view of a slot (see :mod:`internsp.layers.access`). The names are those that
InternEvo's users know; column and row differ only in the dimension on which the weight is cut,
because under weight parallelism the product itself is always whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.layers.access import guard, guard_sites, whole
from internsp.layers.parameters import sites


class ParallelLinearWithCommExt(nn.Linear):
    """``y = x W^T + b`` with ``W`` [out, in] at rest as ``ceil(out / wp)`` rows a rank."""

    takes_whole = True
    shard_dim = 0

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``. Waits for this weight's own gather only."""
        output = F.linear(input, whole(self, "weight"), whole(self, "bias"))
        return guard(self, output)

    def open(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Take the weight once for several products (one gather, one reduction).

        Returns:
            ``project``, a plain function of the unsharded weight, and ``guard``, to be applied to
            the result of all products, which keeps the weight present for their backward.
        """
        weight, bias = whole(self, "weight"), whole(self, "bias")

        def project(input: Tensor) -> Tensor:
            return F.linear(input, weight, bias)

        def finish(output: Tensor) -> Tensor:
            return guard(self, output)

        return project, finish


class ColumnParallelLinearWithCommExt(ParallelLinearWithCommExt):
    """Cut on the output dimension (dimension 0 of the weight)."""


class RowParallelLinearWithCommExt(ParallelLinearWithCommExt):
    """Cut on the input dimension (dimension 1 of the weight).

    The shard is kept transposed, so that the gathered weight is one contiguous piece of its slot
    and the whole ``[out, in]`` weight a transposed view of it: no copy with wrong strides.
    """

    shard_dim = 1


class GroupedLinearWithCommExt(nn.Module):
    """``groups`` linear maps in one 3-D weight ``[groups, in, out]``, as experts keep them."""

    takes_whole = True
    shard_dim = 0
    autocasts = True  # its products are what torch.autocast lowers

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        self.weight = nn.Parameter(
            torch.empty(groups, in_features, out_features, device=device, dtype=dtype)
        )
        if self.weight.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ``+- 1 / sqrt(in)``, as ``torch.nn.Linear``."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, input: Tensor, counts: Tensor | None = None) -> Tensor:
        """Apply each group's map to its rows.

        Args:
            input: ``[groups, rows, in]``, or ``[rows, in]`` sorted by group with ``counts``.
            counts: int64 ``[groups]``, rows of each group (may be zero); their sum is ``rows``.

        Returns:
            ``[groups, rows, out]``, or ``[rows, out]``.
        """
        weight = whole(self, "weight")
        if counts is None:
            return guard(self, torch.bmm(input, weight))
        pieces = input.split(counts.tolist())
        output = torch.cat([piece @ weight[g] for g, piece in enumerate(pieces)])
        return guard(self, output)


class ParallelEmbeddingWithCommExt(nn.Embedding):
    """An embedding table ``[vocabulary, hidden]``, cut on either dimension over a weight group."""

    takes_whole = True
    shard_dim = 0

    def forward(self, input: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``. Its backward needs no table and gathers none."""
        output = F.embedding(input, whole(self, "weight"), self.padding_idx)
        # No guard: only the forward reads the table. The use in forward still ends here.
        for site in sites(self).values():
            site.release()
        return output


__all__ = [
    "ColumnParallelLinearWithCommExt",
    "GroupedLinearWithCommExt",
    "ParallelEmbeddingWithCommExt",
    "ParallelLinearWithCommExt",
    "RowParallelLinearWithCommExt",
    "guard_sites",
]
