"""A mixture of experts: router, experts with grouped products, shared experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from internsp.experts.dispatch import Dispatch, local
from internsp.experts.routes import Copies, collect, spread
from internsp.layers.router import Router, Routes, require_sizes

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each group's rows times its matrix.

    ``torch.nn.functional.grouped_mm`` where it takes the dtype and the sizes; else one product for
    each group.

    Args:
        rows: ``[n, in]``, sorted by group.
        weight: ``[groups, in, out]``.
        counts: int64 ``[groups]``, rows of each group; their sum is at most ``n``.

    Returns:
        ``[n, out]``; of rows behind the last group anything.
    """
    if not len(rows):
        return rows @ weight[0]
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    if rows.dtype in _GROUPED and weight.dtype == rows.dtype and aligned:
        ends = counts.cumsum(0, dtype=torch.int32)
        product: Tensor = F.grouped_mm(rows.contiguous(), weight, offs=ends)
        return product
    # A plan runs this on tensors that have no values: each group has an equal share.
    number, empty = len(weight), counts.is_meta or is_fake(counts)
    sizes = [len(rows) // number] * number if empty else counts.tolist()
    rest = len(rows) - sum(sizes)
    *pieces, _ = rows.split([*sizes, rest])
    made = [piece @ matrix for piece, matrix in zip(pieces, weight.unbind(0), strict=True)]
    return torch.cat([*made, rows.new_zeros(rest, weight.shape[2])])


class Experts(nn.Module):
    """``num_experts`` SwiGLU experts in grouped weights: ``down(silu(gate(x)) * up(x))``.

    Built whole. ``parallelize`` keeps this rank's experts where the mesh has owners, and sets
    ``dispatch``.

    Attributes:
        gate_up: ``[experts, width, 2 * hidden]``; ``down``: ``[experts, hidden, width]``.
        top_k: how many of the experts a token passes, as far as it is known.
        dispatch: how tokens meet their experts; by default all experts are here.
    """

    autocasts = True  # torch.autocast casts inputs of its products

    def __init__(
        self,
        experts: int,
        width: int,
        hidden: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        top_k: int | None = None,
    ) -> None:
        super().__init__()
        require_sizes(experts=experts, width=width, hidden=hidden)
        self.num_experts, self.top_k = experts, top_k
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_up = nn.Parameter(torch.empty(experts, width, 2 * hidden, **options))
        self.down = nn.Parameter(torch.empty(experts, hidden, width, **options))
        self.dispatch: Dispatch = local
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give both weights their first values."""
        for weight in (self.gate_up, self.down):
            if not weight.is_meta:  # where torch takes longer for no values than for some
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(
        self, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Any = lambda: None
    ) -> tuple[Tensor, Any]:
        """The weighted sum of each token's experts, and what ``meanwhile`` returns.

        Args:
            hidden: tokens ``[T, width]``.
            index, weights: ``[T, k]``, each token's experts among all owners' and their weights;
                -1 and 0 where it has fewer.
            meanwhile: computed while tokens travel.
        """
        return self.dispatch(self._compute, hidden, index, weights, meanwhile)

    def _compute(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Experts of this rank, by their local numbers: ``[n, width]`` -> ``[n, width]``."""
        tokens, each = index.shape
        none = self.num_experts  # a token without an expert is behind all others
        chosen = index.flatten().where(index.flatten() >= 0, none)
        order = chosen.argsort(stable=True)
        counts = index.new_zeros(none + 1)  # bincount would wait, and has no fake tensors
        counts = counts.index_add_(0, chosen, torch.ones_like(chosen))[:none]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        back = back.where(chosen < none, len(order))
        copies = Copies(order // each, back.view(tokens, each))
        gate, up = grouped_product(spread(hidden, copies), self.gate_up, counts).chunk(2, dim=-1)
        made = grouped_product(F.silu(gate) * up, self.down, counts)
        return collect(made * weights.flatten()[order][:, None], copies).to(hidden.dtype)


class SharedExperts(nn.Module):
    """A SwiGLU feed forward that every token passes: ``[..., width]`` -> ``[..., width]``."""

    def __init__(
        self,
        width: int,
        hidden: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False, device=device, dtype=dtype)
        self.w3 = nn.Linear(width, hidden, bias=False, device=device, dtype=dtype)
        self.w2 = nn.Linear(hidden, width, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        down: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return down


class MixtureOfExperts(nn.Module):
    """Each token passes ``top_k`` of ``experts``, weighted, and the shared experts.

    Dropless without ``capacity_factor``: every token reaches all of its experts, however many
    tokens an expert gets. With ``expert_weight`` the experts' weights travel to the tokens, with
    ``expert`` the tokens to the owners of their experts; the numbers are the same.

    Args:
        width: features of a token.
        hidden: features within an expert.
        shared: features within the shared experts; 0: there are none.
        router: options of :class:`Router`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        shared: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **router: Any,
    ) -> None:
        super().__init__()
        require_sizes(least=0, shared=shared)
        self.router = Router(width, experts, top_k, device=device, dtype=dtype, **router)
        self.experts = Experts(experts, width, hidden, device, dtype, top_k)
        self.shared_experts = SharedExperts(width, shared, device, dtype) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` -> ``[..., width]``."""
        tokens = x.reshape(-1, x.shape[-1])
        routes: Routes = self.router(tokens)

        def meanwhile() -> tuple[Callable[[Tensor], Tensor], Tensor | None]:  # needs no experts
            attach = self.router.settle(routes)
            return attach, None if self.shared_experts is None else self.shared_experts(tokens)

        made, (attach, shared) = self.experts(tokens, routes.index, routes.weights, meanwhile)
        made = attach(made)
        return (made if shared is None else made + shared).view_as(x)
