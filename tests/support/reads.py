"""Small models that read weights in every way that plain PyTorch allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.support.models import VOCABULARY, Block, Tiny


class Table(nn.Module):
    """Exposes its weight in several ways; a view, not a copy."""

    def __init__(self, rows: int = 6, width: int = 6, kind: str = "tuple") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width) / 3)
        self.kind = kind

    def forward(self, rows: int) -> Any:
        view = self.weight[:rows]
        if self.kind == "tuple":
            return self.weight, [view]
        if self.kind == "dict":
            return {"whole": self.weight.t(), "part": {"view": view}}
        return Given(self.weight.detach(), view)


@dataclass(frozen=True)
class Given:
    whole: Tensor
    view: Tensor


class Positions(Block):
    """Adds rows of tables that its modules return."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.rows, self.turned, self.kept = (Table(kind=k) for k in ("tuple", "dict", "data"))

    def forward(self, x: Tensor) -> Tensor:
        # At the end of the block, where backward begins and no hook has waited for a weight yet.
        x = super().forward(x)
        whole, (rows,) = self.rows(x.shape[1])
        turned = self.turned(x.shape[1])
        kept = self.kept(x.shape[1])
        x = torch.tanh(x @ kept.whole + x * kept.view.sigmoid())
        return torch.tanh(x @ whole) * rows + x @ turned["whole"] * turned["part"]["view"]


class Handing(Block):
    """A block that returns its result and a view of one of its weights."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.prompt = nn.Parameter(torch.randn(width, width) / 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": super().forward(x), "more": (self.prompt.t(), [self.wo.weight])}


class Handed(Tiny):
    """Uses each block's returned view after the block, and a table outside the blocks."""

    def __init__(self, block: Callable[[], nn.Module] = Handing, **options: Any) -> None:
        super().__init__(block, **options)
        self.table = Table(kind="dict")

    def blocks(self, x: Tensor) -> Tensor:
        prompts = []
        for layer in self.layers:
            out = layer(x)
            x = out["x"]
            prompts += [out["more"][0], *out["more"][1]]
        table = self.table(x.shape[1])
        return sum((x * x) @ p for p in prompts) + x @ table["whole"] + table["part"]["view"]  # type: ignore[return-value]


class Adding(nn.Module):
    """Writes in place into its two inputs and returns only the first."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 3)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory.add_(torch.tanh(x.clone() @ self.weight))
        x.add_(torch.sigmoid(x.clone() @ self.weight))
        return F.relu(x, inplace=True)


class InPlace(Block):
    """A block that writes into its inputs."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.adding = Adding(width)

    def forward(self, x: Tensor) -> Tensor:
        memory = x * 2
        h = self.adding(x + 0.5, memory)
        h = super().forward(h) + memory.sin()
        return x.add_(h * 0.1)


class Entering(Tiny):
    """A model whose blocks' inputs may be written in place."""

    def blocks(self, x: Tensor) -> Tensor:
        x = x * 1.5
        for layer in self.layers:
            x = layer(x)
        return x


class Keeping(torch.autograd.Function):
    """``x * scale + x @ mix``, which stores its operands without ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, mix: Tensor) -> Tensor:
        ctx.kept = x.detach(), scale.detach(), mix.detach()
        return x * scale + x @ mix

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, scale, mix = ctx.kept
        flat, ours = x.flatten(0, -2), gradient.flatten(0, -2)
        return gradient * scale + gradient @ mix.t(), (ours * flat).sum(0), flat.t() @ ours


class Scaled(Block):
    """Direct parameters, large and small, used at the start, at the end and by a function."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.gamma = nn.Parameter(torch.rand(width))
        self.mix = nn.Parameter(torch.randn(width, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(torch.tanh(x @ self.mix) * self.gamma)
        return Keeping.apply(x + h * self.gamma, self.gamma, self.mix)  # type: ignore[no-any-return]


class Reading(Block):
    """Uses weights of its children without calling them, and also calls them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.plain = nn.ParameterList(nn.Parameter(torch.randn(width, width) / 3) for _ in "ab")
        self.named = nn.ParameterDict({"mix": torch.randn(width, width) / 3, "bias": torch.rand(6)})
        self.never = nn.Linear(width, width)
        self.mapped = nn.Linear(width, width)
        self.pair = nn.Bilinear(width, width, width)

    def forward(self, x: Tensor) -> Tensor:
        assert self.q.weight.dtype == x.dtype
        assert self.q.weight.shape == (6, 6)
        with torch.no_grad():  # the first read has no graph, the second has one
            scale = 1 + self.never.bias.abs().sum()
        h = F.linear(torch.tanh(x), self.never.weight, self.never.bias * scale) @ self.q.weight
        for weight in self.plain:
            h = torch.sin(h @ weight)
        h = h @ self.named["mix"] + self.named["bias"]
        h = self.pair(h, torch.vmap(self.mapped)(x))
        return super().forward(x + h * self.never.bias.sigmoid())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


class Normalized(Block):
    """``weight_norm`` in both forms, ``spectral_norm``, a parametrization and pruning."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        with torch.no_grad():  # otherwise the tensors that the hooks create could not be copied
            self.q = weight_norm(nn.Linear(width, width))
            self.wo = parametrizations.weight_norm(nn.Linear(width, width))
            self.w1 = prune.l1_unstructured(self.w1, "weight", 0.3)
            self.mirrored = nn.Linear(width, width)
            parametrize.register_parametrization(self.mirrored, "weight", Symmetric())
            # In evaluation mode: otherwise each recompute would advance the power iteration.
            self.spectral = parametrizations.spectral_norm(nn.Linear(width, width)).eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.spectral(torch.tanh(self.mirrored(x))))


class Called(Block):
    """Calls a child with substituted weights, then reads the child's own weights."""

    def forward(self, x: Tensor) -> Tensor:
        other = {"weight": self.q.weight * 2 + 1}
        h = torch.func.functional_call(self.q, other, (x,))
        return super().forward(x + torch.tanh(h) + F.linear(x, self.q.weight))


class CalledAgain(Block):
    """The same in a part that a checkpoint of its own computes again, in backward."""

    def part(self, x: Tensor) -> Tensor:
        values = {name: 2 * getattr(self.q, name) for name in ("weight", "bias")}
        return torch.tanh(torch.func.functional_call(self.q, values, (x,)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + checkpoint(self.part, x, use_reentrant=False))


class FunctionalHead(Tiny):
    """The output projection is the embedding's weight, read by the model itself."""

    def __init__(self, block: Callable[[], nn.Module] = Block, **options: Any) -> None:
        super().__init__(block, **options)
        self.head = nn.Linear(6, 6, bias=False)
        self.bias = nn.Parameter(torch.randn(VOCABULARY))
        self.table = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.norm(self.blocks(self.embed(ids) @ self.table))
        logits = F.linear(torch.tanh(self.head(h)) @ self.head.weight, self.embed.weight, self.bias)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


