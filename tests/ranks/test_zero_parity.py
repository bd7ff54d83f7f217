"""Losses, norms and parameters under ZeroOptimizer equal those of torch on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.compare import TOLERANCE, gaps
from tests.support.few import some
from tests.support.ranks import run_ranks
from tests.support.zero import (
    CLASSES,
    SETTINGS,
    Case,
    Little,
    alone,
    batch,
    furthest,
    groups,
    little,
    setup,
    share,
    train,
    whole,
)

HIDDEN = {"rules": [{"match": "embed", "shard_dim": 1}]}
COLUMNS = {"rules": [{"match": "**.w?.weight", "shard_dim": 1}]}
FP64 = [
    (
        1,
        [
            Case(steps=5),
            Case(optimizer="sgd", micro_batches=3, steps=5, tied=True),
            Case(optimizer="muon", steps=5),
        ],
    ),
    (
        2,
        [
            Case(weight=2, micro_batches=3),
            Case(weight=1, optimizer="sgd", micro_batches=3, steps=6),
            Case(weight=1, zero=1, optimizer="rmsprop", config={"overlap": False}, steps=6),
            Case(weight=2, steps=5, tied=True, config=HIDDEN),
            Case(weight=1, optimizer="sgd", steps=5, tied=True, config={"accumulation": "full"}),
            Case(weight=2, optimizer="rmsprop", steps=5, tied=True, max_grad_norm=None),
            Case(weight=2, optimizer="muon", micro_batches=3, steps=6),
            Case(weight=1, optimizer="adafactor", tied=True, steps=6),
            Case(weight=1, zero=1, optimizer="muon", steps=5, config={"overlap": False}),
        ],
    ),
    (
        4,
        [
            Case(weight=2),
            Case(weight=1, zero=2, optimizer="sgd", micro_batches=3, steps=6),
            Case(weight=4, optimizer="sgd", steps=6),
            Case(weight=2, zero=1, config=HIDDEN, steps=6),
            Case(weight=2, steps=5, micro_batches=2, tied=True),
            Case(weight=1, zero=2, optimizer="sgd", steps=5, tied=True),
            Case(weight=4, optimizer="muon", tied=True, steps=6),  # 6 rows over 4 ranks
            Case(weight=2, optimizer="muon", steps=6),
            Case(weight=2, zero=1, optimizer="adafactor", micro_batches=2, steps=6),
            Case(weight=1, zero=2, optimizer="muon", steps=5),
            Case(weight=4, optimizer="adafactor", steps=5, config=COLUMNS),
        ],
    ),
]
FP32 = [
    (2, [Case(weight=2, steps=50, micro_batches=3, dtype=torch.float32)]),
    (
        4,
        [
            Case(weight=2, steps=50, optimizer="sgd", dtype=torch.float32),
            Case(weight=1, zero=2, steps=50, dtype=torch.float32),
        ],
    ),
]


Trained = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


def trained(rank: int, world: int, cases: list[Case]) -> list[Trained]:
    """(loss, norm) of each step, and the parameters, of each case."""
    found = []
    for case in cases:
        s = setup(case)
        found.append((train(s, case, rank, world), whole(s.model)))
    return found


def compare(world: int, cases: list[Case]) -> list[tuple[Case, float, float]]:
    """(case, largest difference of loss or norm, of parameters) of each rank and case."""
    ranks = run_ranks(trained, world, cases)
    found = []
    for i, case in enumerate(cases):
        model, theirs = alone(case, world)  # once for all ranks
        before = dict(little(case.dtype, tied=case.tied).named_parameters())
        for numbers, got in (rank[i] for rank in ranks):
            moved = {n for n, p in before.items() if not torch.equal(got[n], p)}
            assert moved == {n for n in before if not n.startswith("side.")}, case
            apart = gaps(got, dict(model.named_parameters()))
            found.append((case, furthest(theirs, numbers), max(apart.values())))
    return found


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(world, part, id=f"world {world}{which}", marks=marks)
        for world, cases in FP64
        for part, which, marks in (
            (cases[::2], "", ()), (cases[1::2], ", others", pytest.mark.thorough(6)),
        )
    ],
)
def test_up_to_twenty_steps_in_fp64_equal_one_process(world: int, cases: list[Case]) -> None:
    for case, numbers, parameters in compare(world, cases):
        assert numbers < 1e-10, case
        assert parameters < TOLERANCE, case


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        # In fewer steps: test_train.py, whole runs in fp32.
        pytest.param(*each, id=f"world {each[0]}", marks=pytest.mark.thorough(10)) for each in FP32
    ],
)
def test_fifty_steps_in_fp32_equal_one_process_within_1e_5(world: int, cases: list[Case]) -> None:
    for case, numbers, _ in compare(world, cases):
        assert numbers < 1e-5, case


def gradients(rank: int, world: int) -> dict[str, float]:
    """The largest error of an unsharded gradient that is read before the step."""
    found = {}
    for name in ("sum", "mean", "finished", "direct", "direct mean", "side", "tied"):
        config = {"reduction": "mean" if "mean" in name else "sum"}
        s = setup(Case(weight=2, config=config, tied=name == "tied"))
        reference = little(tied=name == "tied")
        for micro in range(2):
            ids, labels = batch(micro, world)
            ranks = (2, 3) if name == "side" else ()  # one replica's use is enough for all
            reference_loss = one_process_loss(reference, ids, labels, world, ranks)
            loss = s.model(share(ids, rank), share(labels, rank), side=rank in ranks)
            if "mean" in name:
                reference_loss, loss = reference_loss / ids.numel(), loss / ids[:2].numel()
            reference_loss.backward()
            loss.backward()
            if name == "finished":
                s.optimizer.finish_reductions()
        if "direct" in name:
            for model in (reference, s.model):
                terms = [(p * p).sum() for p in model.layers[0].parameters()]
                sum(terms[1:], terms[0]).backward()
        got = s.optimizer.gather_gradients()
        expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        found[name] = max(gaps(got, expected).values())
        # Reading changes nothing: the step uses the same gradient.
        norm = torch.nn.utils.get_total_norm(list(expected.values())).item()
        s.optimizer.step()
        found[f"norm after {name}"] = abs(s.optimizer.grad_norm - norm) / norm
    return found


def one_process_loss(
    model: Little, ids: torch.Tensor, labels: torch.Tensor, world: int, ranks: tuple[int, ...]
) -> torch.Tensor:
    """Only the rows of ``ranks`` use the branch."""
    if not ranks:
        return model(ids, labels)
    rows = [model(share(ids, r), share(labels, r), side=r in ranks) for r in range(world)]
    return sum(rows[1:], rows[0])


def test_whole_gradients_are_those_of_one_process_however_their_reductions_are_finished() -> None:
    for found in run_ranks(gradients, 4):
        assert max(found.values()) < 1e-12, found


def idle(rank: int, world: int, optimizer: str) -> tuple[float, bool, float]:
    """A weight that no rank uses must not decay; one used later starts at step one."""
    case = Case(weight=1 if optimizer == "adamw" else 2, steps=3, optimizer=optimizer)
    s = setup(case)
    before = whole(s.model)["side.weight"]
    train(s, case, rank, world)
    untouched = torch.equal(before, whole(s.model)["side.weight"])
    model = little()
    settings = {"lr": SETTINGS[optimizer]["lr"]}
    reference = CLASSES[optimizer](groups(model, SETTINGS[optimizer]["weight_decay"]), **settings)
    for step in range(5):
        ids, labels = batch(step, world)
        used = step >= 3
        model(ids, labels, side=used).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        reference.step()
        reference.zero_grad()
        if used:
            s.model(share(ids, rank), share(labels, rank), side=True).backward()
            s.optimizer.step()
    got = whole(s.model)
    apart = max((got[n] - p).abs().max().item() for n, p in model.named_parameters())
    return 0.0, untouched, apart


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_weight_that_no_rank_uses_is_left_alone_as_torch_leaves_it(optimizer: str) -> None:
    for _, untouched, apart in run_ranks(idle, 2, optimizer):
        assert untouched
        assert apart < 1e-10


def bits(rank: int, world: int, optimizer: str) -> list[dict[str, Any]]:
    results = []
    for overlap in (True, False):
        config = {"overlap": overlap}
        case = Case(2, steps=5, dtype=torch.float32, config=config, optimizer=optimizer)
        s = setup(case)
        numbers = train(s, case, rank, world)
        results.append({"numbers": numbers, "parameters": whole(s.model)})
    return results


@pytest.mark.parametrize("optimizer", some(["muon", "adamw"], 1))
def test_without_overlap_the_bits_are_the_same(optimizer: str) -> None:
    for overlapped, synchronous in run_ranks(bits, 4, optimizer):
        assert overlapped["numbers"] == synchronous["numbers"]
        for name, value in overlapped["parameters"].items():
            assert torch.equal(value, synchronous["parameters"][name]), name


def low_precision(rank: int, world: int) -> tuple[list[float], list[float], float, float]:
    """bf16 with an fp32 master compared with fp32, and steps smaller than bf16 can represent."""
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(weight=2, steps=40, dtype=dtype)
        losses.append([loss for loss, _ in train(setup(case), case, rank, world)])
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        # 0.02 of a bf16 step at a time: without a master weight nothing would ever change.
        case = Case(weight=2, optimizer="sgd", steps=60, dtype=dtype, options={"lr": 1e-4})
        s = setup(case)
        before = whole(s.model)
        train(s, case, rank, world)
        after = whole(s.model)
        change = torch.cat([(after[n].float() - before[n].float()).flatten() for n in after])
        moved.append(change.norm().item())
    return losses[0], losses[1], moved[0], moved[1]


@pytest.mark.thorough(10)
def test_bf16_with_an_fp32_master_stays_within_half_a_percent_of_fp32() -> None:
    for wide, narrow, moved_wide, moved_narrow in run_ranks(low_precision, 2):
        assert max(abs(a - b) / a for a, b in zip(wide, narrow, strict=True)) < 0.005
        assert wide[-1] < 0.99 * wide[0]
        assert abs(moved_narrow - moved_wide) < 0.15 * moved_wide
