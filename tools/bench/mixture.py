"""One rank of ``tools.bench_experts``: the same mixture, trained in four ways."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single

import internsp

WAYS = ("gathered", "exchanged", "fsdp2", "plain exchange")
EXPERTS, TOP_K, WIDTH, HIDDEN, LAYERS = 16, 2, 256, 64, 3


class Block(nn.Module):
    """A product and a mixture of experts, each beside what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wo = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = internsp.MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, WIDTH]`` -> the same shape."""
        x = x + torch.tanh(self.wo(self.norm(x)))
        made: Tensor = x + self.moe(x)
        return made


class Mixture(nn.Module):
    """Blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, WIDTH]`` -> a scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Worker:
    """One rank: has each way's model, and times its steps."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.models = {way: self._model(way) for way in WAYS}

    def _model(self, way: str) -> nn.Module:
        torch.manual_seed(0)
        model: Any = Mixture()
        if way in ("gathered", "exchanged"):
            owners = {"expert": 2, "expert_weight": 1} if way == "exchanged" else {}
            mesh = internsp.ParallelMesh.create(2, device_type="cpu", **owners)  # type: ignore[arg-type]
            internsp.parallelize(model, mesh)
            return model
        ignored = set()
        if way == "plain exchange":
            for layer in model.layers:
                layer.moe.experts.dispatch = PlainExchange(layer.moe.experts, self.rank)
                ignored |= set(layer.moe.experts.parameters())
        mesh_of_all = init_device_mesh("cpu", (2,))
        for layer in [*model.layers, model]:
            fully_shard(layer, mesh=mesh_of_all, ignored_params=ignored)
        return model

    def step(self, way: str, tokens: int) -> tuple[float, float]:
        """Seconds and summed loss of a forward and backward."""
        model = self.models[way]
        x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(self.rank))
        dist.barrier()
        begin = time.perf_counter()
        loss = model(x)
        loss.backward()
        dist.barrier()
        seconds = time.perf_counter() - begin
        model.zero_grad()
        return seconds, float(loss)


class PlainExchange:
    """Experts of this rank, to which each pair of a token and an expert is sent by itself."""

    def __init__(self, experts: Any, rank: int) -> None:
        self.each, self.rank = EXPERTS // 2, rank
        experts.num_experts = self.each
        for name, parameter in list(experts.named_parameters()):
            part = parameter.detach()[rank * self.each : (rank + 1) * self.each].clone()
            setattr(experts, name, nn.Parameter(part))

    def __call__(
        self, compute: Any, hidden: Any, index: Any, weights: Any, meanwhile: Any = lambda: None
    ) -> tuple[Any, Any]:
        """See :class:`internsp.experts.dispatch.Dispatch`."""
        flat = index.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat // self.each, minlength=2)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        send, receive = counts.tolist(), theirs.tolist()
        numbers = torch.empty(sum(receive), dtype=flat.dtype)
        dist.all_to_all_single(numbers, flat[order], receive, send)
        rows = hidden.new_empty(sum(receive), WIDTH)
        rows = all_to_all_single(rows, hidden[order // TOP_K], receive, send)
        local = (numbers - self.rank * self.each)[:, None]
        made = compute(rows, local, torch.ones(len(rows), 1))
        back = hidden.new_empty(len(flat), WIDTH)
        back = all_to_all_single(back, made, send, receive)
        each = torch.empty_like(back).index_copy(0, order, back).view(len(hidden), TOP_K, WIDTH)
        return (each * weights[:, :, None]).sum(1), meanwhile()
