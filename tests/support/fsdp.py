"""One program for FSDP2, run with torch's ``fully_shard`` and with the library's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import internsp.fsdp as ours

Program = Callable[[Any, int], dict[str, Tensor]]
"""From a module with FSDP2's names, and the rank, to values by name."""
WORDS = 19  # no multiple of any number of ranks, as no size of the model is


class Attention(nn.Module):
    """One head, so that a block has a part to shard by itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        # Keys have no bias: its gradient is rounding alone, of which Adam makes steps.
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        return self.out(weights @ v)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Its scale is a parameter of the block itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(size), Attention(size)
        self.up, self.down = nn.Linear(size, 3 * size), nn.Linear(3 * size, size)
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Three blocks; with ``spare`` a layer that no forward uses."""

    def __init__(self, size: int = 13, blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.spare = nn.Linear(size, 3)
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """A mesh of CPUs: ``(ranks,)``, or ``(replicas, ranks)``."""
    names = ("replicas", "ranks")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def shard(
    fully_shard: Callable[..., Any], model: Model, units: str, mesh: DeviceMesh, **options: Any
) -> None:
    """Call ``fully_shard`` as a program does: on the parts that ``units`` names, then the root."""
    for block in model.blocks if units in ("blocks", "nested", "lists") else ():
        if units == "nested":
            fully_shard(block.attention, mesh=mesh, **options)
        fully_shard(block, mesh=mesh, **options)
    if units == "lists":
        fully_shard([model.norm, model.head], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def batch(step: int, micro: int, rank: int) -> Tensor:
    """Ids; ranks have other numbers of them."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, WORDS, (2, 5 + rank), generator=draw)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean cross entropy of the next words."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten())


def whole(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Each value as a full tensor; absent ones are left out."""
    return {
        name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for name, v in values.items()
        if v is not None
    }


def parts(values: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """This rank's part of each that has one. Both runs place them alike; plain experts of other
    owners have the same names."""
    found = {prefix + n: v.to_local().detach().clone() for n, v in values.items() if v is not None}
    return {name: value for name, value in found.items() if value.numel()}


def steps(
    model: Any, rank: int, number: int = 3, micro: int = 1, clip: float = 0.0
) -> dict[str, Tensor]:
    """Losses, norms, gradients and parameters of some steps of AdamW, by what they are."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found: dict[str, Tensor] = {}
    for step in range(number):
        for part in range(micro):
            model.set_requires_gradient_sync(part == micro - 1)
            loss = loss_of(model, batch(step, part, rank)) / micro
            loss.backward()
            found[f"loss {step}.{part}"] = loss.detach().clone()
        if clip:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), clip)
            found[f"norm {step}"] = norm.full_tensor()
        gradients = whole({n: p.grad for n, p in model.named_parameters()})
        found |= {f"gradient {step} {name}": value for name, value in gradients.items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | whole(dict(model.named_parameters()))


def require_same(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = 1e-12
) -> None:
    """Check that both have the same names and values (relative to the largest of each)."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        scale = max(value.abs().max().item(), 1e-3)
        gap = (found[name].double() - value.double()).abs().max().item() / scale
        assert gap <= tolerance, f"{name} differs by {gap:g} of its largest element"


def compare(*programs: Program, rank: int, tolerance: float = 1e-12) -> None:
    """Run each program with torch's names and with the library's, and compare what it returns."""
    for program in programs:
        results = []
        for names in (torchs, ours):
            torch.manual_seed(5)
            results.append(program(names, rank))
        try:
            require_same(results[1], results[0], tolerance)
        except AssertionError as error:
            raise AssertionError(f"{program.__name__}: {error}") from None
