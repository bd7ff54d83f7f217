"""A small mixture of experts in fp64, on one process and with expert parallelism.

Each token goes to the expert with the largest router logit. Where ranks hold different experts,
tokens are exchanged by an all-to-all over the expert group, and returned by another.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.layers.linear import GroupedLinearWithCommExt
from internsp.parallel.parallelize import parallelize
from tests.support.compare import gaps, gradients, parameters
from tests.support.meshes import mesh_of

VOCABULARY, WIDTH, LENGTH, ROWS = 11, 6, 5, 2  # ROWS: per rank


class Exchange(torch.autograd.Function):
    """Send ``send[p]`` rows to each rank ``p`` of a group; backward returns them."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.args = receive, send, group
        output = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.apply(gradients[0], *ctx.args), None, None, None


class Grouped(nn.Module):
    """``number`` experts of two 3-D weights each, of which this rank holds ``number / ranks``."""

    def __init__(self, number: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.number, self.group = number, group
        self.ranks = self.expert_ranks = 1 if group is None else dist.get_world_size(group)
        own = number // self.ranks
        self.up = GroupedLinearWithCommExt(own, WIDTH, 2 * WIDTH)
        self.bias = Bias(own, 2 * WIDTH)
        self.down = GroupedLinearWithCommExt(own, 2 * WIDTH, WIDTH)

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """``[rows, WIDTH]`` and each row's expert -> ``[rows, WIDTH]``."""
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.number)
        if self.group is None or self.ranks == 1:
            done = self.own(rows[order], counts)
        else:
            done = self.elsewhere(rows[order], counts)
        return torch.empty_like(rows).index_copy(0, order, done)

    def own(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert through this rank's experts."""
        hidden = self.bias(self.up(rows, counts), counts)
        return self.down(F.gelu(hidden), counts)

    def elsewhere(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows sorted by expert to the ranks that hold the experts, and return the results."""
        assert self.group is not None
        table = counts.view(self.ranks, -1)
        theirs = torch.empty_like(table)  # [from rank, local expert]
        dist.all_to_all_single(theirs, table, group=self.group)
        send, receive = table.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = Exchange.apply(rows, send, receive, self.group)
        expert = torch.arange(theirs.shape[1]).repeat(self.ranks).repeat_interleave(theirs.view(-1))
        order = expert.argsort(stable=True)
        done = self.own(arrived[order], theirs.sum(0))
        back = torch.empty_like(done).index_copy(0, order, done)
        return Exchange.apply(back, receive, send, self.group)


class Bias(nn.Module):
    """One bias per expert: a small parameter that nevertheless differs between ranks."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(number, width))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return rows + self.weight.repeat_interleave(counts, 0)


class Listed(nn.Module):
    """Each expert is a separate module; without a token its parameters are unused."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number))

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """``[rows, WIDTH]`` and each row's expert -> ``[rows, WIDTH]``."""
        output = torch.zeros_like(rows)
        for index, expert in enumerate(self.each):
            mine = (chosen == index).nonzero().squeeze(1)
            if len(mine):
                output = output.index_add(0, mine, torch.tanh(expert(rows[mine])))
        return output


class Block(nn.Module):
    """Dense weights, then experts. ``wo`` is the prefetch trigger."""

    def __init__(self, number: int, group: dist.ProcessGroup | None, listed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wo = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, number, bias=False)
        self.experts = Listed(number) if listed else Grouped(number, group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.wo(self.norm(x)))
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(1)
        best, chosen = scores.max(1)
        return x + (self.experts(rows, chosen) * best[:, None]).view_as(x)


class Mixture(nn.Module):
    """``model(ids, labels)`` -> the sum of the token losses."""

    def __init__(
        self,
        number: int,
        group: dist.ProcessGroup | None = None,
        listed: bool = False,
        layers: int = 3,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(number, group, listed) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")


@dataclass
class Case:
    """How the ranks of one test share a mixture of experts."""

    weight: int = 1
    expert_weight: int | None = None
    expert: int = 1
    zero: int | None = None
    number: int = 4
    listed: bool = False
    micro_batches: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    timeout: int = 30


class Pair:
    """The model on one process (``plain``) and over a mesh (``ours``). Collective."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mesh = mesh_of(
            case.weight,
            zero=case.zero,
            timeout=case.timeout,
            expert_weight=case.expert_weight,
            expert=case.expert,
        )
        torch.manual_seed(3)
        self.plain = Mixture(case.number, listed=case.listed).double()
        self.ours = Mixture(case.number, self.mesh.expert_group, case.listed).double()
        with torch.no_grad():
            for name, parameter in self.ours.named_parameters():
                whole = self.plain.get_parameter(name)
                if parameter.shape != whole.shape:
                    whole = whole.chunk(self.mesh.expert)[self.mesh.expert_rank]
                parameter.copy_(whole)
        self.trace = Trace(enabled=True)
        self.communicator = parallelize(
            self.ours,
            self.mesh,
            WeightParallelConfig(
                **({"min_shard_elements": 30, "coalesce_bytes": 0} | case.config)
            ),
            activation_checkpoint=ActivationCheckpointConfig(**case.checkpoint),
            trace=self.trace,
        )
        self.communicator.state.pool.poison = True  # a slot is filled with NaN when it is reused

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """ids and labels ``[2, rows of all ranks, LENGTH]`` of one micro-batch."""
        generator = torch.Generator().manual_seed(step)
        shape = (2, ROWS * self.mesh.world_size, LENGTH)
        both = torch.randint(0, VOCABULARY, shape, generator=generator)
        return both[0], both[1]

    def backward(self, step: int, plain: bool = True, once: bool = False) -> float:
        """Run all micro-batches of one step on both models; returns the global loss of ours.

        Args:
            once: all-reduce over replicas after the last micro-batch only, and finish reductions in
                each micro-batch, as the plan of a pipeline does.
        """
        total = torch.zeros((), dtype=torch.float64)
        rank = self.mesh.rank
        with self.communicator.unchanged():
            for micro in range(self.case.micro_batches):
                ids, labels = self.batch(step * self.case.micro_batches + micro)
                if plain:
                    self.plain(ids, labels).backward()
                rows = slice(ROWS * rank, ROWS * (rank + 1))
                whole = self.case.config.get("accumulation") == "full"
                last = micro == self.case.micro_batches - 1
                sync = self.communicator.no_sync() if whole and not last else nullcontext()
                with sync, self.communicator.replica_sync(last) if once else nullcontext():
                    loss = self.ours(ids[rows], labels[rows])
                    loss.backward()
                if once:
                    self.communicator.state.finish_reductions()
                total += loss.detach()
        dist.all_reduce(total)
        return total.item()

    def whole(self) -> dict[str, Tensor]:
        """Every parameter of ours, unsharded and cloned. Collective."""
        return {
            n: p.full_tensor().detach().clone()  # type: ignore[operator]
            for n, p in self.ours.named_parameters()
        }

    def furthest_gradient(self) -> float:
        """The largest gap of this rank's gradients."""
        return max(gaps(gradients(self.ours), gradients(self.plain)).values())

    def furthest_parameter(self) -> float:
        """The largest gap of this rank's parameters."""
        return max(gaps(parameters(self.ours), parameters(self.plain)).values())
