"""Models composed of features that occur in users' models, for the fuzzer.

A block is a base and features; the parts of the model outside the blocks are features, too. Each is
a few lines of ordinary torch: the same class runs on one process and sharded over ranks. ``use``
is a number whose bits select the experts and branches that this pass of this rank uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

BASES = ("plain", "odd", "single", "bare", "conv", "grouped", "deep")

IN_BLOCK = (
    "scale", "matrix", "late_matrix", "one", "twice", "twin", "experts", "branch", "absent",
    "list", "dict_of_parameters", "in_place_input", "in_place_module", "in_place_own",
    "returns_weight", "returns_view", "returns_transposed", "functional", "frozen_norm",
    "frozen_weight", "frozen_block", "unused", "buffer", "aux_tuple", "aux_dict", "aux_data",
    "nested", "custom", "detached", "two_outputs", "dropped_output", "weight_norm", "table",
    "passing_module", "view_output", "gate", "full_tensor",
)  # fmt: skip

BESIDE = (
    "tied", "tied_functional", "positions_table", "positions_own", "positions_module", "prompt",
    "root_matrix", "root_scalar", "adapter", "adapter_idle", "two_heads", "bag", "root_list",
    "counter", "head_bias", "frozen_embedding", "frozen_head", "no_norm", "same_block_twice",
    "run_twice", "reversed", "skipped", "shared_weight_of_blocks", "expert_beside", "sequential",
    "full_tensor_of_any",
)  # fmt: skip

OUTPUTS = ("loss", "logits", "tuple", "dict", "dataclass")


class PlannedError(Exception):
    """Raised by a model on request, on all ranks at the same point."""


@dataclass
class Answer:
    """The output of some of the models."""

    loss: Tensor
    logits: Tensor | None = None
    note: str = ""


class Single(nn.Module):
    """A linear map with one element, [1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(x.mean(-1, keepdim=True))


class Grouped(nn.Module):
    """A 3-D weight of a user-defined module."""

    def __init__(self, groups: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(groups, width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,gio->...o", x, self.weight)


class Weight(nn.Module):
    """A module that returns its weight, or a view of it."""

    def __init__(self, rows: int, width: int, form: str) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.randn(rows, width) * 0.3)

    def forward(self, length: int = 0) -> Tensor:
        if self.form == "view":
            return self.weight[: length or None]
        return self.weight.t() if self.form == "transposed" else self.weight


class Into(nn.Module):
    """Writes into its input and returns it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(torch.tanh(x) @ self.weight)


class Passing(nn.Module):
    """Returns its input unchanged, and another output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.sigmoid(x) @ self.weight


class Split(nn.Module):
    """Two outputs of one weight, one of which may be unused."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * width, width) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, self.weight).chunk(2, -1)


class Square(torch.autograd.Function):
    """A user-defined autograd function, which saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x * x) @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (g,) = gradients
        own = (x * x).flatten(0, -2).t() @ g.flatten(0, -2)
        return 2 * x * (g @ weight.t()), own


class Custom(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(torch.tanh(x), self.weight)


class Block(nn.Module):
    """A residual block: a base and features. Has a module for every prefetch trigger."""

    def __init__(self, width: int, base: str, features: Sequence[str]) -> None:
        super().__init__()
        self.base, self.features, self.fail = base, frozenset(features), False
        self.attend = nn.Identity()
        self.norm: nn.Module = nn.Identity()
        self.q: nn.Module = nn.Identity()
        self.out_proj: nn.Module = nn.Identity()
        self.fc1: nn.Module = nn.Identity()
        self.fc2: nn.Module = nn.Identity()
        self._base(width)
        self._own(width)
        self._others(width)
        self._modules_of_kinds(width)
        self._frozen()

    def _base(self, width: int) -> None:
        if self.base == "single":
            self.out_proj = Single()
        if self.base in ("plain", "deep"):
            self.norm, self.q = nn.LayerNorm(width), nn.Linear(width, width)
            self.out_proj = nn.Linear(width, width, bias=False)
            self.fc1, self.fc2 = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)
        if self.base == "odd":
            self.q, self.out_proj = nn.Linear(width, 3, bias=False), nn.Linear(3, width)
        if self.base == "conv":
            self.norm, self.q = nn.RMSNorm(width), nn.Conv1d(width, width, 3, padding=1)
            self.out_proj = nn.Linear(width, width)
        if self.base == "grouped":
            self.q, self.out_proj = Grouped(3, width), nn.Linear(width, width, bias=False)
        if self.base == "deep":
            self.more = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def _own(self, width: int) -> None:
        f = self.features
        if "scale" in f:
            self.scale = nn.Parameter(torch.randn(width) * 0.1 + 1)
        if "matrix" in f:
            self.matrix = nn.Parameter(torch.randn(width, width) * 0.3)
        if "late_matrix" in f:
            self.late = nn.Parameter(torch.randn(width, width) * 0.3)
        if "one" in f:
            self.single = nn.Parameter(torch.randn(1, 1))
        if "gate" in f:
            self.gate = nn.Parameter(torch.tensor(0.4))
        if "list" in f:
            self.some = nn.ParameterList(torch.randn(width, width) * 0.2 for _ in range(2))
        if "dict_of_parameters" in f:
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(width, width) * 0.2)})
        if "buffer" in f:
            self.register_buffer("shift", torch.randn(width, dtype=torch.float64))
        if "table" in f:
            self.table = nn.Embedding(5, width)

    def _others(self, width: int) -> None:
        f = self.features
        if "twice" in f:
            self.again = nn.Linear(width, width)
        if "twin" in f:
            self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
            self.right.weight = self.left.weight
        if "experts" in f:
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        if "branch" in f:
            self.branch = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, width))
        if "absent" in f:
            self.absent = nn.Linear(width, width)
        if "full_tensor" in f:
            self.past = nn.Linear(width, width)
        if "unused" in f:
            self.unused = nn.Linear(width, width)
        if "nested" in f:
            self.inner = nn.Sequential(nn.Sequential(nn.Linear(width, width)), nn.Tanh())
        if "dropped_output" in f:
            self.ignored = nn.Linear(width, width)

    def _modules_of_kinds(self, width: int) -> None:
        f = self.features
        if "in_place_input" in f:
            self.into = nn.Linear(width, width)
        if "in_place_own" in f:
            self.onto = nn.Linear(width, width)
        if "in_place_module" in f:
            self.writes = Into(width)
        for form in ("weight", "view", "transposed"):
            if f"returns_{form}" in f:
                setattr(self, f"gives_{form}", Weight(width, width, form))
        if "functional" in f:
            self.read = nn.Linear(width, width)
        if "custom" in f:
            self.custom = Custom(width)
        if "two_outputs" in f:
            self.split = Split(width)
        if "passing_module" in f:
            self.passing = Passing(width)
        if "weight_norm" in f:
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        if {"aux_tuple", "aux_dict", "aux_data"} & f:
            self.aux = nn.Linear(width, 1)

    def _frozen(self) -> None:
        f = self.features
        if "frozen_norm" in f:
            self.norm.requires_grad_(False)
        if "frozen_weight" in f:
            self.out_proj.requires_grad_(False)
        if "frozen_block" in f:
            self.requires_grad_(False)

    def forward(self, x: Tensor, use: int = -1) -> Any:
        f = self.features
        if "in_place_input" in f:
            x.add_(self.into(torch.tanh(x)) * 0.1)
        x = self._first(x)
        h = torch.tanh(self._q(self.norm(x)))
        if self.fail:
            raise PlannedError("inside a block")
        x = x + self.out_proj(self.attend(h))
        x = self._linear(x, use)
        x = self._reading(x, use)
        hidden = F.gelu(self.fc1(x)) if self.base != "bare" else torch.tanh(x)
        x = x + self.fc2(hidden) * 0.5
        if "late_matrix" in f:
            x = x + torch.sin(x) @ self.late
        if "view_output" in f:
            x = x.reshape(-1).view(x.shape)
        return self._answer(x)

    def _q(self, h: Tensor) -> Tensor:
        if self.base == "conv":
            return self.q(h.transpose(1, 2)).transpose(1, 2)
        h = self.q(h)
        for layer in getattr(self, "more", ()):
            h = torch.tanh(layer(h))
        return h

    def _first(self, x: Tensor) -> Tensor:
        f = self.features
        if "scale" in f:
            x = x * self.scale
        if "matrix" in f:
            x = x + torch.tanh(x) @ self.matrix
        if "one" in f:
            x = x * (1 + 0.1 * self.single)
        if "gate" in f:
            x = x * (1 + torch.tanh(self.gate))
        if "buffer" in f:
            x = x + 0.1 * self.shift
        if "in_place_module" in f:
            x = self.writes(x + 0.0)
        if "passing_module" in f:
            same, other = self.passing(x)
            x = same + 0.3 * torch.tanh(other)
        if "custom" in f:
            x = x + self.custom(x)
        if "table" in f:
            places = torch.arange(x.shape[1], device=x.device) % 5
            x = x + self.table(places)
        return x

    def _linear(self, x: Tensor, use: int) -> Tensor:
        f = self.features
        if "twice" in f:
            x = x + torch.tanh(self.again(torch.tanh(self.again(x))))
        if "twin" in f:
            x = x + torch.tanh(self.left(x)) * torch.sigmoid(self.right(x))
        if "experts" in f:
            for number, expert in enumerate(self.experts):
                if use >> number & 1:
                    x = x + torch.tanh(expert(x)) * 0.5
        if "branch" in f and use >> 3 & 1:
            x = x + self.branch(x)
        if "absent" in f and use == -1:
            x = x + self.absent(x)
        if "nested" in f:
            x = x + self.inner(x)
        if "dropped_output" in f:
            self.ignored(x)
        if "in_place_own" in f:
            x = x + 1.0
            x.add_(torch.tanh(self.onto(torch.sigmoid(x))))
        if "two_outputs" in f:
            one, other = self.split(x)
            x = x + (one if use >> 4 & 1 else one * torch.sigmoid(other))
        if "weight_norm" in f:
            x = x + torch.tanh(self.normed(x))
        return x

    def _reading(self, x: Tensor, use: int) -> Tensor:
        f = self.features
        if "returns_weight" in f:
            x = x + torch.tanh(x) @ self.gives_weight()
        if "returns_view" in f:
            x = x + self.gives_view(1)
        if "returns_transposed" in f:
            x = x + torch.tanh(x) @ self.gives_transposed()
        if "functional" in f:
            x = x + torch.tanh(F.linear(x, self.read.weight, self.read.bias))
        if "list" in f:
            for matrix in self.some:
                x = x + torch.tanh(x @ matrix)
        if "dict_of_parameters" in f:
            x = x + torch.tanh(x @ self.named["a"])
        if "detached" in f:
            x = x + torch.tanh(x.detach())
        if "full_tensor" in f:  # past the module, and by the module on some ranks
            named = dict(self.past.named_parameters())
            x = x + torch.tanh(x @ whole(named["weight"]) + whole(named["bias"]))
            if use >> 1 & 1:
                x = x + 0.3 * self.past(x)
        return x

    def _answer(self, x: Tensor) -> Any:
        f = self.features
        if "aux_tuple" in f:
            return x, self.aux(x).square().mean()
        if "aux_dict" in f:
            return {"x": x, "aux": self.aux(x).square().mean()}
        if "aux_data" in f:
            return Answer(self.aux(x).square().mean(), x)
        return x


def whole(parameter: Tensor) -> Tensor:
    """The parameter as a plain tensor, whose gradient is summed over ranks."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def opened(output: Any) -> tuple[Tensor, Tensor | None]:
    """A block's hidden states and its auxiliary loss."""
    if isinstance(output, tuple):
        return output
    if isinstance(output, dict):
        return output["x"], output["aux"]
    if isinstance(output, Answer):
        assert output.logits is not None
        return output.logits, output.loss
    return output, None


class Drawn(nn.Module):
    """Embedding, blocks, norm, head and the parts that ``features`` add outside the blocks.

    Attributes:
        middle: hidden states after each block, of the last forward.
        fail: where to raise: ``("forward" | "block" | "backward", index)``.
    """

    def __init__(
        self,
        width: int,
        vocabulary: int,
        blocks: Sequence[Sequence[str]],
        features: Sequence[str],
        output: str,
    ) -> None:
        super().__init__()
        self.features, self.output = frozenset(features), output
        self.middle: list[Tensor] = []
        self.fail: tuple[str, int] | None = None
        f = self.features
        self.embed: nn.Module = (
            nn.EmbeddingBag(vocabulary, width, mode="sum")
            if "bag" in f
            else nn.Embedding(vocabulary, width)
        )
        made = [Block(width, base, own) for base, *own in blocks]
        if "shared_weight_of_blocks" in f and len(made) > 1:
            for block in (made[0], made[-1]):
                block.again = nn.Linear(width, width)
                block.features = block.features | {"twice"}
            made[-1].again.weight = made[0].again.weight
        if "same_block_twice" in f:
            made.append(made[0])
        self.layers = nn.Sequential(*made) if "sequential" in f else nn.ModuleList(made)
        self.norm = nn.Identity() if "no_norm" in f else nn.RMSNorm(width)
        self.head: nn.Module | None = None
        if "tied_functional" not in f:
            self.head = nn.Linear(width, vocabulary, bias="head_bias" in f)
            if "tied" in f:
                self.head.weight = self.embed.weight
        self._beside(width, vocabulary)
        if "frozen_embedding" in f:
            self.embed.requires_grad_(False)
        if "frozen_head" in f and self.head is not None:
            self.head.requires_grad_(False)

    def _beside(self, width: int, vocabulary: int) -> None:
        f = self.features
        if "positions_table" in f:
            self.places = nn.Embedding(7, width)
        if "positions_own" in f:
            self.own_places = nn.Parameter(torch.randn(7, width) * 0.2)
        if "positions_module" in f:
            self.made_places = Weight(7, width, "view")
        if "prompt" in f:
            self.prompt = Weight(3, width, "weight")
        if "root_matrix" in f:
            self.root_matrix = nn.Parameter(torch.randn(width, width) * 0.3)
        if "root_scalar" in f:
            self.root_scalar = nn.Parameter(torch.tensor(0.7))
        if "adapter" in f or "adapter_idle" in f:
            self.adapter = nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width))
        if "two_heads" in f:
            self.second = nn.Linear(width, 3)
        if "root_list" in f:
            self.some = nn.ParameterList(torch.randn(width, width) * 0.2 for _ in range(2))
        if "counter" in f:
            self.register_buffer("passes", torch.zeros((), dtype=torch.float64))
        if "expert_beside" in f:
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor, use: int = -1) -> Any:
        x = self._embedded(ids, use)
        extra = x.new_zeros(())
        self.middle = []
        for index, layer in self._order():
            if self.fail == ("forward", index):
                raise PlannedError("between blocks")
            if self.fail == ("block", index):
                layer.fail = True
            try:
                x, aux = opened(layer(x, use))
            finally:
                layer.fail = False
            if self.fail == ("backward", index) and x.requires_grad:
                x.register_hook(_raise)
            if aux is not None:
                extra = extra + aux
            self.middle.append(x)
        return self._finished(x, extra, labels, use)

    def _order(self) -> list[tuple[int, Any]]:
        f = self.features
        blocks = list(enumerate(self.layers))
        if "reversed" in f:
            blocks.reverse()
        if "skipped" in f:
            blocks = blocks[:1] + blocks[2:]
        return blocks * 2 if "run_twice" in f else blocks

    def _embedded(self, ids: Tensor, use: int) -> Tensor:
        f = self.features
        if "bag" in f:
            x = self.embed(ids.flatten()[:, None]).view(*ids.shape, -1)
        else:
            x = self.embed(ids)
        length = ids.shape[1]
        if "positions_table" in f:
            x = x + self.places(torch.arange(length, device=ids.device))
        if "positions_own" in f:
            x = x + self.own_places[:length]
        if "positions_module" in f:
            x = x + self.made_places(length)
        if "prompt" in f:
            x = torch.cat([self.prompt().expand(len(ids), -1, -1), x], 1)
        if "counter" in f:
            self.passes += 1
            x = x * (1 + 0.01 * self.passes)
        if "adapter" in f or ("adapter_idle" in f and use >> 5 & 1):
            x = x + torch.tanh(self.adapter(x))
        return x * 1.0

    def _finished(self, x: Tensor, extra: Tensor, labels: Tensor, use: int) -> Any:
        f = self.features
        if "prompt" in f:
            x = x[:, 3:]
        if "root_matrix" in f:
            x = x + torch.tanh(x) @ self.root_matrix
        if "root_scalar" in f:
            x = x * self.root_scalar
        for matrix in self.some if "root_list" in f else ():
            x = x + torch.tanh(x @ matrix)
        for number, expert in enumerate(self.experts if "expert_beside" in f else ()):
            if use >> number & 1:
                x = x + expert(x)
        x = self.norm(x)
        if "two_heads" in f:
            extra = extra + self.second(x).square().mean()
        if "full_tensor_of_any" in f:
            named = [p for p in self.parameters() if p.ndim]
            extra = extra + whole(named[len(named) // 2]).square().mean()
        logits = F.linear(x, self.embed.weight) if self.head is None else self.head(x)
        if self.output == "logits":
            return logits
        loss = token_losses(logits, labels) + extra
        if self.output == "tuple":
            return loss, logits, None
        if self.output == "dict":
            return {"loss": loss, "more": [logits]}
        return Answer(loss, logits) if self.output == "dataclass" else loss


def loss_of(output: Any, labels: Tensor, kind: str) -> Tensor:
    """The scalar loss that a loop computes from a model's output."""
    if kind == "logits":
        return token_losses(output, labels)
    if kind == "tuple":
        return output[0]
    if kind == "dict":
        return output["loss"]
    return output.loss if kind == "dataclass" else output


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _raise(gradient: Tensor) -> None:
    raise PlannedError("in backward")
