"""WP-2 where data decide: parameters, uses, blocks and the head that only some ranks use."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.config import ActivationCheckpointConfig
from internsp.mesh import ParallelMesh
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, SOME, VOCABULARY, Tiny, Twin
from tests.support.ranks import ranks, run_ranks

FULL = ActivationCheckpointConfig(mode="full")
HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
MODULE = {"granularity": "module"}
CHOICES = 6  # what a token's id may select in a block


class Choosy(nn.Module):
    """A block whose weights are used as often as the ids select: never, once or twice.

    Each row's choice of ``CHOICES`` skips other weights; the last one skips the entire block.
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)  # unused ones at both ends of the order and inside
        self.q = nn.Linear(width, width)
        self.wo = nn.Linear(width, width, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.wide = nn.Linear(width, 2 * width + 1)
        self.w2 = nn.Linear(2 * width + 1, width)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        def only(*choices: int) -> Tensor | None:
            mask = torch.isin(choice, torch.tensor(choices))
            return mask[:, None, None] if mask.any() else None

        def add(x: Tensor, mask: Tensor | None, call: Any) -> Tensor:
            return x if mask is None else x + torch.where(mask, torch.tanh(call(x)), 0.0)

        x = add(x, only(0, 3), self.first)
        x = add(x, only(0, 1, 2, 3, 4), self.q)
        x = add(x, only(0, 1, 2), self.wo)
        x = add(x, only(1), self.experts[0])
        x = add(x, only(2), self.experts[1])
        x = add(x, only(1), self.experts[0])  # twice
        x = add(x, only(0, 1, 4), lambda y: self.w2(torch.tanh(self.wide(y))))
        x = add(x, only(4), lambda y: self.last(self.last(y)))
        return add(x, only(2, 3), self.last)


class Data(Tiny):
    """On some ranks all rows have a loss below the top blocks, which get no gradient."""

    def __init__(self, tied: bool = False, layers: int = 4) -> None:
        super().__init__(Choosy, layers=layers, tied=tied)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        early = x
        for number, layer in enumerate(self.layers):
            x = layer(x, (ids[:, 0] + number) % CHOICES)
            early = x if number == 1 else early
        assert labels is not None
        below = ids[:, 1] % 3 == 0  # the loss of these rows uses two blocks, and not the head
        if below.all():
            return early.square().sum()
        logits = self.head(self.norm(x))
        logits = torch.where(below[:, None, None], 0.0, logits)
        extra = torch.where(below[:, None, None], early.square(), 0.0).sum()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return torch.where(below[:, None], 0.0, losses.view(ids.shape)).sum() + extra


class Deep(Data):
    """The output of every block has a loss, through the same head."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        x = self.embed(ids)
        total = x.new_zeros(())
        for number, layer in enumerate(self.layers):
            x = layer(x, (ids[:, 0] + number) % CHOICES)
            logits = self.head(self.norm(x)).flatten(0, 1)
            total = total + F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return total


Case = tuple[dict[str, Any], ActivationCheckpointConfig | None]
TRIGGERS: tuple[Case, ...] = tuple(
    (MODULE | more, checkpoint)
    for more, checkpoint in (
        ({"gather_before": "out_proj"}, None), ({"gather_before": "qkv"}, HALF),
        ({"gather_before_modules": ["wide"]}, REENTRANT), ({"reductions_in_flight": 1}, FULL),
        ({"overlap": False}, None), ({"overlap": False, "prefetch_depth": 2}, HALF),
        ({"keep_unsharded": 1, "memory_pool": False}, None),
    )
)  # fmt: skip
OTHERS: tuple[Case, ...] = (
    ({"reductions_in_flight": 1}, None), ({"gather_before_modules": ["wide"]}, FULL),
    ({"gather_before_modules": ["wide"], "overlap": False}, HALF), (SOME, None), (ALL, HALF),
    (ROLLING, None), (ROLLING | {"overlap": False}, REENTRANT), (ROLLING | SOME, HALF),
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """Models in which data leave parameters unused.

    Args:
        forwards: the number of losses that are added for each backward.
    """

    cases: tuple[Case, ...]
    tied: bool = False
    layers: int = 4
    forwards: int = 1
    kind: type[Data] = Data


SEVERAL = TRIGGERS[1:2] + TRIGGERS[4:5] + OTHERS[:1] + OTHERS[2:3] + OTHERS[4:7]
DRAWN = {
    "every gather_before": (2, Drawn(TRIGGERS + OTHERS[:4])),
    "every other option, tied": (2, Drawn(TRIGGERS[:2] + OTHERS, True)),
    "replicas": (4, Drawn((TRIGGERS[0], TRIGGERS[4], OTHERS[1], OTHERS[5]), True)),
    "two forwards": (2, Drawn(SEVERAL, forwards=2)),
    "two forwards, two layers": (2, Drawn(OTHERS[:1] + OTHERS[4:6], layers=2, forwards=2)),
    "two forwards, one layer": (2, Drawn(OTHERS[:1] + OTHERS[4:6], layers=1, forwards=2)),
    **{
        f"three forwards, layers {layers}, tied": (
            2, Drawn(OTHERS[:1] + OTHERS[3:6], True, layers, forwards=3)
        )
        for layers in (4, 2, 1)
    },
    **{
        f"a head between blocks, tied {tied}": (
            2, Drawn(TRIGGERS[4:5] + OTHERS[:1] + OTHERS[4:6], tied, 3, kind=Deep)
        )
        for tied in (False, True)
    },
    **{
        f"a head between blocks, two forwards, tied {tied}": (
            2, Drawn(OTHERS[:1] + OTHERS[5:6], tied, 3, forwards=2, kind=Deep)
        )
        for tied in (False, True)
    },
}  # fmt: skip


FEW = (
    "replicas", "two forwards, one layer", "three forwards, layers 2, tied",
    "a head between blocks, tied False",
)  # fmt: skip
CHOSEN = [
    pytest.param(*drawn, id=name, marks=() if name in FEW else pytest.mark.thorough(5))
    for name, drawn in DRAWN.items()
]


def one_loss(
    twin: Twin, rank: int, world_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """One process's and this rank's batch, of new data: each rank selects one or two choices."""
    rows = torch.randint(0, CHOICES, (world_size, 2), generator=generator)
    rows[:, 1] = torch.where(rows[:, 1] % 2 == 0, rows[:, 0], rows[:, 1])
    ids = torch.randint(0, VOCABULARY, (world_size, 2, 3), generator=generator)
    ids[..., 0] = rows
    ids[..., 1] = ids[:, :1, 1]  # often that of all rows of a rank
    labels = (ids + 1) % VOCABULARY
    everyone = twin.plain(ids.flatten(0, 1), labels.flatten(0, 1))
    return everyone, twin.ours(ids[rank], labels[rank])


@pytest.mark.unmeasured
@pytest.mark.parametrize(("world_size", "drawn"), CHOSEN)
@ranks()
def test_weights_idle_on_some_ranks_are_right_with_every_order_of_gathers(
    rank: int, world_size: int, drawn: Drawn
) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    generator = torch.Generator().manual_seed(3)
    for config, checkpoint in drawn.cases:
        if drawn.layers == 1 and checkpoint == HALF:
            checkpoint = FULL  # half of one block is none
        twin = Twin(partial(drawn.kind, drawn.tied, drawn.layers), mesh, checkpoint, **config)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (twin.plain, twin.ours)]
        for step in range(3):
            losses = [one_loss(twin, rank, world_size, generator) for _ in range(drawn.forwards)]
            for total in map(sum, zip(*losses, strict=True)):
                total.backward()
            for a, b in zip(twin.plain.parameters(), twin.ours.parameters(), strict=True):
                if b.grad is None and a.grad is not None and not a.grad.any():
                    a.grad = None  # one process masks rows of ranks that skip them here
            what = f"{config}, {checkpoint}, step {step}"
            twin.check_step(optimizers, what)


def _keep(kept: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    kept.append(output)


@pytest.mark.thorough(1)
@ranks(2)
def test_ranks_need_not_take_their_loss_from_the_same_place_of_the_model(
    rank: int, world_size: int
) -> None:
    """Of two forwards in one backward, a rank computes one's loss from stored hidden states."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for config in ({"overlap": False}, {"overlap": False} | MODULE, {"overlap": False} | ROLLING):
        twin = Twin(Tiny, mesh, **config)
        kept: list[Tensor] = []
        for model in (twin.plain, twin.ours):
            model.layers[1].register_forward_hook(partial(_keep, kept))
        both = [twin.batch() for _ in range(2)]
        for model, everyone in ((twin.plain, range(world_size)), (twin.ours, [rank])):
            total = torch.zeros((), dtype=torch.float64)
            for number, (everybody, _) in enumerate(both):
                for one in everyone:
                    loss = model(*(part[2 * one : 2 * one + 2] for part in everybody))
                    total = total + (loss if (one, number) != (1, 0) else kept[-1].square().sum())
            total.backward()
        twin.check_gradients(f"{config}")


class Sometimes(Tiny):
    """Two weights outside the blocks, a large and a small one, which data may not use."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.large = nn.Linear(6, 6)
        self.small = nn.Linear(6, 2)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        loss = super().forward(ids, labels)
        if ids[0, 0] % 2:
            x = self.large(self.embed(ids))
            loss = loss + x.square().sum() + self.small(x).square().sum()
        return loss


def asked(rank: int, world_size: int) -> list[int]:
    """How often each backward made the host wait for every rank's flags."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Twin(Sometimes, mesh)
    small, found = twin.communicator.replicated, []
    read, count = small._everyones, [0]

    def counted() -> list[bool]:
        count[0] += 1
        return read()

    small._everyones = counted  # type: ignore[method-assign]
    for firsts, keep in (((1, 1), False), ((1, 0), False), ((0, 0), False), ((1, 1), True),
                         ((1, 0), True), ((0, 0), True)):  # fmt: skip
        if not keep:
            twin.zero_grad()
        count[0] = 0
        ids = torch.full((2, 1, 3), 2)
        ids[:, 0, 0] = torch.tensor(firsts)
        for part in ids:  # one process runs them one by one
            twin.plain(part, part).backward()
        twin.ours(ids[rank], ids[rank]).backward()
        twin.check_gradients(f"{firsts}, kept {keep}")
        found.append(count[0])
    return found


@pytest.mark.thorough(1)
def test_the_host_reads_other_ranks_flags_only_where_they_decide_between_none_and_a_sum() -> None:
    all_used, idle_on_one = run_ranks(asked, 2)
    assert all_used == [0, 0, 1, 0, 0, 0]
    assert idle_on_one == [0, 1, 1, 0, 0, 0]


@ranks(2)
def test_a_backward_that_comes_to_no_block_reduces_the_head_in_any_order_of_blocks() -> None:
    """Only parameters above the blocks are trained, so that backward reaches no block."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for config in ({}, {"unexpected_order": "gather"}, {"unexpected_order": "gather"} | MODULE):
        for tied in (False, True):
            twin = Twin(partial(Tiny, layers=2, tied=tied), mesh, **config)
            for model in (twin.plain, twin.ours):
                model.layers.requires_grad_(False)
                model.embed.requires_grad_(tied)
            for step in range(2):
                twin.backward()
                twin.check_gradients(f"{config}, tied {tied}, backward {step}")


class Optional(nn.Module):
    """A block with a weight that not all rows need."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.always, self.wo = nn.Linear(width, width), nn.Linear(width, width)
        self.sometimes = nn.Linear(width, width)

    def forward(self, x: Tensor, needed: bool) -> Tensor:
        y = torch.tanh(self.always(x))
        return x + self.wo(self.sometimes(y) if needed else y)


class Upwards(Tiny):
    """Blocks in reverse order; the rows of rank 0 use all their weights."""

    def __init__(self) -> None:
        super().__init__(Optional, layers=3)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for row in ids:
            x = self.embed(row)
            for layer in reversed(self.layers):
                x = layer(x, bool(row[0] == 0))
            total = total + self.head(self.norm(x)).square().sum()
        return total


@pytest.mark.thorough(1)
@pytest.mark.parametrize("config", [{"overlap": False}, {"overlap": False} | MODULE, {}])
@ranks(2)
def test_ranks_that_use_other_weights_ask_for_the_next_block_without_a_standstill(
    rank: int, config: dict[str, Any]
) -> None:
    """A reduction that one rank waits for at once, and the question which block comes next."""
    twin = Twin(Upwards, mesh_of(2), unexpected_order="gather", **config)
    ids = torch.tensor([[0, 1, 2], [1, 2, 0]])
    for step in range(2):
        twin.plain(ids).backward()
        twin.ours(ids[rank : rank + 1]).backward()
        twin.check_gradients(f"backward {step}")


class Beside(Tiny):
    """Weights on both sides of the blocks that only some rows use."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.before = nn.Linear(6, 6)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if ids[0, 0] % 2 == 0:
            return self.head(self.norm(self.blocks(x))).square().sum()
        x = self.before(torch.tanh(self.before(x)))
        return self.blocks(x).square().sum()


@pytest.mark.thorough(1)
@ranks(2)
def test_blocks_by_themselves_between_a_forward_and_its_backward_leave_the_rest_in_place(
    rank: int,
) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for config in ({}, {"overlap": False}, ROLLING, MODULE):
        twin = Twin(Beside, mesh, **config)
        ids = torch.full((2, 1, 3), 2)
        ids[:, 0, 0] = torch.tensor((1, 0))
        for part in ids:
            twin.plain(part).backward()
        loss = twin.ours(ids[rank])
        with torch.no_grad():
            twin.ours.blocks(torch.ones(1, 2, 6, dtype=torch.float64))  # type: ignore[operator]
        loss.backward()
        twin.check_gradients(f"{config}")


class Chooser(nn.Module):
    """A block whose first and last weight are frozen, and skipped by even ids."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out_proj, self.last = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        x = x + torch.tanh(self.first(x)) if odd else x
        x = x + torch.tanh(self.out_proj(x))
        return x + torch.tanh(self.last(x)) if odd else x


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6, bias=False)
        self.layers = nn.ModuleList(Chooser() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x, odd = self.embed(ids), bool(ids[0, 0] % 2)
        for layer in self.layers:
            x = layer(x, odd)
        return (self.last(x) if odd else x).square().mean()


def late(gathers: Any) -> None:
    """Make this rank late in receiving what the other one does not use."""
    launch = gathers.all_gather

    def all_gather(outputs: Any, shards: Any, unit: str, weights: Any, phase: str) -> Any:
        if "out_proj" not in weights[0]:
            time.sleep(0.05)
        return launch(outputs, shards, unit, weights, phase)

    gathers.all_gather = all_gather


@ranks(2)
def test_a_program_writes_at_once_what_another_rank_has_not_received_yet(
    rank: int, world_size: int
) -> None:
    """Rank 0 does not use some weights, and writes all of them as soon as its pass has ended."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for how in ("no_grad", "thrown", "no_sync", "unchanged"):
        twin = Twin(Choosing, mesh)
        for gathers in twin.communicator.state.gathers.values() if rank else ():
            late(gathers)
        ids, losses = torch.arange(3)[None] + rank, []
        for model in (twin.plain, twin.ours):
            context: Any = nullcontext()
            if model is twin.ours and how in ("unchanged", "no_sync"):
                context = getattr(twin.communicator, how)()
            with context, torch.set_grad_enabled(how in ("thrown", "no_sync")):
                loss = model(ids)
                if how == "no_sync":
                    loss.backward()
            for p in model.parameters():
                p.data.mul_(3.0)
            losses.append(loss.detach())
            model(ids).backward()
        close(losses[1], losses[0], f"loss, {how}")
        total = twin.plain.embed.weight.grad
        torch.distributed.all_reduce(total)
        close(twin.ours.embed.weight.grad.full_tensor(), total, f"gradient, {how}")
