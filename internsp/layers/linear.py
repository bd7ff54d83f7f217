"""Linear layers whose weights may be sharded over a weight group.

Without a communicator each is an ordinary layer; with one, its weight enters the computation as
a differentiable view of a slot (see :mod:`internsp.modules.parameters`). The names are InternEvo's.
Column and row parallel layers differ only in the dimension on which the weight is sharded, because
under weight parallelism every rank computes the full product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.layers.experts import grouped_product
from internsp.modules.parameters import open_weights, plain, weights_of

_OURS = open_weights.__module__  # where forwards are wrapped


@plain(saves=True)
class ParallelLinearWithCommExt(nn.Linear):
    """``y = x W^T + b``, where each rank's shard of ``W`` ``[out, in]`` is ``ceil(out / wp)`` rows.

    ``[..., in]`` -> ``[..., out]``, as an ordinary layer. With a communicator attached, its forward
    waits for this weight's all-gather only.
    """

    shard_dim = 0

    def forward(self, input: Any) -> Tensor:
        """The product with ``input``: a tensor, or a function of weight and bias that multiplies
        one which arrives in parts."""
        if not isinstance(input, Tensor) and callable(input):
            return input(self.weight, self.bias)  # type: ignore[no-any-return]
        return F.linear(input, self.weight, self.bias)

    def can_compute_in_parts(self) -> bool:
        """Whether the result depends on weight and bias only, so that it can be computed in parts:
        no other forward, and both are plain tensors."""
        forward: Any = self.__dict__.get("forward")
        while hasattr(forward, "__wrapped__"):
            if forward.__globals__["__name__"] != _OURS:
                return False
            forward = forward.__wrapped__
        own = ParallelLinearWithCommExt.forward
        if forward is not None and getattr(forward, "__func__", None) is not own:
            return False
        return (
            type(self).forward is own
            and self._parameters.keys() >= {"weight", "bias"}  # no parametrization
            and all(weight.tensor is None for weight in weights_of(self).values())
        )

    def unshard_weight_and_bias(self) -> tuple[Tensor, Tensor | None, Callable[[Any], Any]]:
        """Unshard weight and bias once for several products.

        Returns:
            Weight, bias, and a function to be applied to the result of all products, which
            registers the pre-backward hook that unshards them again.
        """
        weights, guard = open_weights(self)
        return weights["weight"], weights["bias"], guard

    def unshard_once(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Unshard the weight once for several products (one gather, one reduction).

        Returns:
            ``project``, which computes the product with the unsharded weight, and ``guard``, to be
            applied to the result of all products, which registers the pre-backward hook that
            unshards the weight again.
        """
        weight, bias, guard = self.unshard_weight_and_bias()
        return lambda input: F.linear(input, weight, bias), guard


@plain(saves=True)
class ColumnParallelLinearWithCommExt(ParallelLinearWithCommExt):
    """A linear layer sharded on the output dimension (dimension 0 of the weight)."""


@plain(saves=True)
class RowParallelLinearWithCommExt(ParallelLinearWithCommExt):
    """A linear layer sharded on the input dimension (dimension 1 of the weight).

    The shard is kept transposed, so that the gathered weight is one contiguous byte range of its
    slot, and the unsharded ``[out, in]`` weight a transposed view of it, without a copy.
    """

    shard_dim = 1


@plain(saves=True)
class GroupedLinearWithCommExt(nn.Module):
    """``groups`` linear maps in one 3-D weight ``[groups, in, out]``, as experts keep them."""

    shard_dim = 0
    autocasts = True  # torch.autocast casts inputs of its products

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
        weight = self.weight
        if counts is None:
            return torch.bmm(input, weight)
        return grouped_product(input, weight, counts)


@plain(saves=False)
class ParallelEmbeddingWithCommExt(nn.Embedding):
    """An embedding table ``[vocabulary, hidden]``, sharded on either dimension over a weight group.

    int64 ``[...]`` -> ``[..., hidden]``. Its backward needs no table and gathers none.
    """

    shard_dim = 0
