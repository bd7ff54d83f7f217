"""Optimizers of unsharded matrices: experts, user classes, messages, failures, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.config import WeightParallelConfig
from internsp.errors import ConfigError, StructureError
from internsp.optim import ZeroOptimizer
from internsp.parallel.parallelize import parallelize
from tests.support.experts import Case as Mixed
from tests.support.experts import Pair
from tests.support.few import some
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks, run_ranks
from tests.support.zero import MUON, Case, alone, batch, little, setup, share, train, whole

STEPS = 4


class OwnMuon(torch.optim.Muon):
    """Not torch's own: its state stays on one rank, and values and gradients are sent."""


class Lamb(torch.optim.Optimizer):
    """A step scaled by the parameter's norm, and state that is no tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    scale = group["lr"] / state["step"] * p.norm() / p.grad.norm()
                    p.data -= scale * p.grad


def stacked(rank: int, world: int, cases: list[Mixed], cls: Any) -> list[float]:
    """Muon for each of the experts' matrices, and for the dense ones; AdamW for the others."""
    found = []
    for case in cases:
        pair = Pair(case)
        chosen = ("up", "down", "wo", "each")

        def by_muon(name: str, parameter: Tensor, chosen: tuple[str, ...] = chosen) -> bool:
            return parameter.dim() > 1 and any(part in name for part in chosen)

        ours = dict(pair.ours.named_parameters())
        matrices = [p for n, p in ours.items() if by_muon(n, p)]
        rest = [p for n, p in ours.items() if not by_muon(n, p)]
        optimizer = ZeroOptimizer(
            pair.communicator, torch.optim.AdamW, lr=1e-2,
            param_groups=[{"params": rest}, {"params": matrices, "optimizer": cls, **MUON}],
        )  # fmt: skip
        plain = dict(pair.plain.named_parameters())
        adam = torch.optim.AdamW([p for n, p in plain.items() if not by_muon(n, p)], lr=1e-2)
        muons = {
            n: [torch.optim.Muon([part], **MUON) for part in (p.data if p.dim() == 3 else [p.data])]
            for n, p in plain.items()
            if by_muon(n, p)
        }
        for step in range(STEPS):
            pair.backward(step)
            optimizer.step()
            adam.step()
            for name, own in muons.items():
                gradient = plain[name].grad
                assert gradient is not None
                parts = gradient if gradient.dim() == 3 else [gradient]
                for muon, part in zip(own, parts, strict=True):
                    muon.param_groups[0]["params"][0].grad = part
                    muon.step()
            pair.plain.zero_grad()
        found.append(pair.furthest_parameter())
    return found


@pytest.mark.parametrize(
    ("cls", "cases"),
    some([
        (torch.optim.Muon, [Mixed(weight=2), Mixed(weight=4, expert_weight=1)]),
        (OwnMuon, [Mixed(weight=2, expert_weight=2, expert=2), Mixed(weight=4, number=3)]),
    ], 1),
)
def test_experts_in_one_parameter_are_stepped_matrix_by_matrix(
    cls: Any, cases: list[Mixed]
) -> None:
    for found in run_ranks(stacked, 4, cases, cls):
        assert max(found) < 1e-10, found


def declared(rank: int, world: int) -> list[tuple[float, int]]:
    """A user-defined class, and a subclass of Muon, whose state is kept by owning ranks."""
    found = []
    for weight, zero in ((2, None), (2, 1), (4, None)):
        model, reference = little(), little()
        mesh = mesh_of(weight, zero=zero)
        communicator = parallelize(model, mesh, WeightParallelConfig(min_shard_elements=20))
        ours = ZeroOptimizer(communicator, Lamb, lr=0.02, whole_matrix=True)
        theirs = Lamb(reference.parameters(), lr=0.02)
        unused = ours.state_dict()
        for step in range(STEPS):
            ids, labels = batch(step, world)
            model(share(ids, rank), share(labels, rank)).backward()
            reference(ids, labels).backward()
            ours.step()
            theirs.step()
            theirs.zero_grad()
        now = whole(model)
        apart = max((now[n] - p).abs().max().item() for n, p in reference.named_parameters())
        taken = ours.state_dict()["state"]
        found.append((apart, max(entry["step"] for entry in taken.values())))
        ours.load_state_dict(ours.state_dict())
        again = ours.state_dict()["state"]
        assert all(again[i]["step"] == entry["step"] for i, entry in taken.items())
        ours.load_state_dict(unused)
        assert all(entry["step"] == 0 for entry in ours.state_dict()["state"].values())
    return found


def test_a_class_that_is_declared_to_need_whole_matrices_has_them() -> None:
    for found in run_ranks(declared, 4):
        assert all(apart < 1e-10 and taken == STEPS for apart, taken in found), found


class Damped(torch.optim.SGD):
    """Its first step takes the gradient whole, later ones half of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.9, dampening=0.5)


@ranks(2)
def test_slices_of_matrices_go_on_and_those_that_no_step_had_used_begin_anew() -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))
    ours = ZeroOptimizer(twin.communicator, Damped, whole_matrix=True)
    saved = ours.local_state_dict()
    for step in range(2):
        theirs = Damped(twin.plain.parameters())
        twin.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        twin.check_parameters(f"a first step, {step}")
        after_one = ours.local_state_dict()
        ours.load_local_state_dict(saved)
    ours.load_local_state_dict(after_one)
    twin.backward()
    for optimizer in (ours, theirs):
        optimizer.step()
    twin.check_parameters("a second step")


FROZEN = "layers.0.q.weight"


def traveling(rank: int, world: int, optimizer: str) -> tuple[list[Any], int, int]:
    case = Case(weight=2, optimizer=optimizer, steps=2, trace=True)
    s = setup(case, blocks=6)  # several rounds
    train(s, case, rank, world)
    trace, counters = s.communicator.state.trace, s.communicator.state.collectives.counters
    trace.events.clear()
    s.model.get_parameter(FROZEN).requires_grad_(False)
    train(s, Case(**{**case.__dict__, "steps": 1}), rank, world, start=2)
    events = [e for e in trace.events if e.kind in ("MATRIX", "PUBLISH")]
    spans = [(e.start, e.end) for e in events if e.kind == "MATRIX"]
    # By each rank once, whether a matrix arrives there or not (the owner of the frozen one).
    waits = [e.unit for e in trace.events if e.kind == "WAIT" and e.unit.startswith("matrices")]
    assert sorted(waits) == sorted(e.unit for e in events if e.kind == "MATRIX")
    most = max(sum(a <= start < b for a, b in spans) for start, _ in spans)
    ids, labels = batch(3, world)
    s.model(share(ids, rank), share(labels, rank)).backward()
    s.optimizer.finish_reductions()
    before = counters.gathered_bytes
    published = sum((b.axis.zero - 1) * b.owned.nbytes for b in s.optimizer._buckets)
    s.optimizer.step()
    order = [(e.kind, e.unit, e.weight) for e in events]
    return order, most, counters.gathered_bytes - before - published


@pytest.mark.parametrize(
    ("optimizer", "each"), some([("muon", 2 + 2), ("adafactor", 2 * 8 + 8)], 1)
)
def test_matrices_travel_in_one_order_few_at_a_time_and_in_the_bytes_that_are_said(
    optimizer: str, each: int
) -> None:
    found = run_ranks(traveling, 4, optimizer)
    assert all(order == found[0][0] for order, _, _ in found)
    assert all(most <= 3 for _, most, _ in found)
    model = little(blocks=6)
    used = {n: p for n, p in model.named_parameters() if "side" not in n and n != FROZEN}
    small = {n: p.numel() for n, p in used.items() if p.numel() < 20}
    large = sum(p.numel() for p in used.values()) - sum(small.values())
    if optimizer == "muon":
        large -= sum(used[n].numel() for n in ("embed.weight", "head.weight"))
        small = {}
    # Each of four ranks has a quarter of a large matrix, each of two replicas a half of a small
    # one, which both weight ranks step.
    wanted = each * (large * 3 // 4 + 2 * sum(small.values()) // 2)
    assert abs(sum(moved for _, _, moved in found) - wanted) <= 0.05 * wanted


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
@ranks(2)
def test_a_step_that_is_skipped_leaves_parameters_and_momentum(rank: int, optimizer: str) -> None:
    case = Case(weight=2, optimizer=optimizer, steps=2)
    s = setup(case)
    train(s, case, rank, 2)
    before, state = whole(s.model), _state(s.optimizer)
    ids, labels = batch(7, 2)
    (s.model(share(ids, rank), share(labels, rank)) * (float("inf") if rank else 1.0)).backward()
    s.optimizer.step()
    assert s.optimizer.skipped
    now, after = whole(s.model), _state(s.optimizer)
    assert all(torch.equal(before[n], now[n]) for n in before)
    assert all(torch.equal(state[n], after[n]) for n in state)
    reference, _ = alone(case, 2)
    assert all((before[n] - p).abs().max() < 1e-10 for n, p in reference.named_parameters())


def _state(optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    return {
        f"{index} {kind}": torch.as_tensor(getattr(value, "_local_tensor", value)).clone()
        for index, entry in optimizer.state_dict()["state"].items()
        for kind, value in entry.items()
    }


class Failing(OwnMuon):
    """One rank's step fails."""

    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Failing.fails:
            raise ZeroDivisionError("no inverse")
        super().step(closure)


def failing(rank: int, world: int) -> str:
    model = little()
    mesh = mesh_of(2, timeout=8)
    communicator = parallelize(model, mesh, WeightParallelConfig(min_shard_elements=20))
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "layers" in n]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    groups = [{"params": rest}, {"params": matrices, "optimizer": Failing, **MUON}]
    optimizer = ZeroOptimizer(communicator, torch.optim.AdamW, lr=1e-2, param_groups=groups)
    Failing.fails = rank == 1
    rows, labels = batch(0, world)
    model(share(rows, rank), share(labels, rank)).backward()
    try:
        optimizer.step()
        whole(model)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_owner_whose_step_fails_leaves_no_rank_waiting() -> None:
    waiting, failed = run_ranks(failing, 2, timeout=60)
    assert failed == "ZeroDivisionError: no inverse"
    assert waiting.startswith("CollectiveError"), waiting


@ranks(2)
def test_what_cannot_be_stepped_whole_is_refused_by_name(rank: int) -> None:
    mesh = mesh_of(2)

    def made(cls: Any, model: Any = None, **config: Any) -> Any:
        model = little() if model is None else model
        config = {"min_shard_elements": 20, **config}
        communicator = parallelize(model, mesh, WeightParallelConfig(**config))
        matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "layers" in n]
        ids = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in ids]
        groups = [{"params": rest}, {"params": matrices, "optimizer": cls}]
        return lambda: ZeroOptimizer(
            communicator, torch.optim.AdamW, lr=1e-2, param_groups=groups
        )

    offload = {"offload": ["weights", "optimizer"]}
    raises(ConfigError, made(torch.optim.Muon, **offload), "layers.0.q.weight", "host memory")
    columns = {"rules": [{"match": "**.experts.up.weight", "shard_dim": 1}]}
    pair = Pair(Mixed(weight=2, config=columns))
    ups = [p for n, p in pair.ours.named_parameters() if "up" in n]
    rest = [p for n, p in pair.ours.named_parameters() if "up" not in n]
    groups = [{"params": rest}, {"params": ups, "optimizer": torch.optim.Muon}]
    raises(
        ConfigError,
        lambda: ZeroOptimizer(pair.communicator, torch.optim.AdamW, param_groups=groups),
        "experts.up.weight", "sharded on dimension 1", "shard_dim = 0",
    )  # fmt: skip
    owners = Pair(Mixed(weight=1, expert_weight=1, expert=2))
    raises(
        ConfigError,
        lambda: ZeroOptimizer(owners.communicator, torch.optim.Adafactor, lr=1e-2),
        "experts", "Adafactor", "parallel.expert",
    )  # fmt: skip


@ranks(2)
def test_a_plain_loop_is_told_that_shards_are_not_stepped_whole(rank: int) -> None:
    """Muon would give different values on each mesh, and Adafactor fails within torch."""
    for weight, cls in ((2, torch.optim.Muon), (2, torch.optim.Adafactor), (1, torch.optim.Muon)):
        model = little()
        parallelize(model, mesh_of(weight), WeightParallelConfig(min_shard_elements=20))
        matrices = [p for p in model.parameters() if p.dim() == 2]
        optimizer = cls(matrices, lr=1e-2)
        ids, labels = batch(0, 2)
        model(share(ids, rank), share(labels, rank)).backward()
        if weight == 2:
            named = f"internsp.ZeroOptimizer(communicator, {cls.__name__}"
            raises(StructureError, optimizer.step, "sharded over ranks", named)
            continue
        optimizer.step()  # each rank has unsharded matrices
        reference = little()
        reference(ids, labels).backward()
        torch.optim.Muon([p for p in reference.parameters() if p.dim() == 2], lr=1e-2).step()
        now = whole(model)
        assert all((now[n] - p).abs().max() < 1e-10 for n, p in reference.named_parameters())


class Counted(torch.optim.Optimizer):
    """Counts its steps under a name of its own, in state that is no tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.sub_(mean / (1 - 0.9 ** state["count"]), alpha=group["lr"])


class CountedByNorm(Counted):
    """Not elementwise: it begins by dividing the gradient by its norm."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.grad = p.grad / (p.grad.norm() + 1e-3)
        super().step()


class Scaled(nn.Module):
    """An embedding of which the last rows are not used at first, and a scale of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(12, 4), nn.ModuleList([Scale()])

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](self.embed(ids)).square().sum()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out_proj, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * self.out_proj(x))


@pytest.mark.parametrize("cls", [Counted, CountedByNorm])
@ranks(2)
def test_a_count_of_its_own_and_moments_without_dimensions_are_loaded(cls: Any) -> None:
    twin = Twin(Scaled, mesh_of(2), min_shard_elements=8)
    whole_matrix = cls is CountedByNorm
    ours = ZeroOptimizer(twin.communicator, cls, lr=0.01, whole_matrix=whole_matrix)
    theirs = cls(twin.plain.parameters(), lr=0.01)
    for step in range(5):
        used = 5 if step < 3 else 12  # rank 1 has rows 6 to 11
        ids = torch.arange(used)
        twin.plain(ids).backward()
        (twin.ours(ids) / 2).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        twin.check_parameters(f"step {step}")
        if step == 2:
            ours.load_state_dict(ours.state_dict())
