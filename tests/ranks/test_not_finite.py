"""Gradients that are not finite on one rank: all ranks skip the step and report the cause."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from internsp.optim.slices import Slices
from tests.support.ranks import run_ranks
from tests.support.zero import Case, Setup, batch, setup, share, whole

BAD = math.nan, math.inf, -math.inf
CASES = [
    Case(weight=2, dtype=torch.float32),
    Case(weight=1, dtype=torch.bfloat16, max_grad_norm=None, tied=True),
    Case(weight=2, optimizer="sgd", max_grad_norm=None, config={"accumulation": "full"}),
    Case(weight=1, zero=1, optimizer="sgd"),
]


def state(s: Setup) -> dict[str, Tensor]:
    """Parameters and all optimizer state of this rank, master weights included."""
    found = whole(s.model)
    for key, entry in s.optimizer.local_state_dict()["state"].items():
        for kind, value in entry.items():
            parts = value.parts if isinstance(value, Slices) else {(): value}
            found |= {f"{key} {kind} {at}": part.clone() for at, part in parts.items()}
    return found


def skipping(rank: int, world: int) -> list[dict[str, Any]]:
    """Rank 1's loss is not finite in steps 1 to 3 of 6; a second model skips those steps."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("internsp.optim").addHandler(handler)
    found = []
    for case in CASES:
        s, twin = setup(case), setup(case)
        lines.clear()
        told = []
        for step in range(6):
            before = state(s)
            ids, labels = (share(t, rank) for t in batch(step, world))
            bad = BAD[step - 1] if rank == 1 and 1 <= step <= 3 else 1.0
            (s.model(ids, labels) * bad).backward()
            s.optimizer.step()
            after = state(s)
            told.append(
                {
                    "skipped": s.optimizer.skipped,
                    "in a row": s.optimizer.skipped_in_a_row,
                    "finite": math.isfinite(s.optimizer.grad_norm),
                    "moved": any(not torch.equal(before[n], after[n]) for n in before),
                    "why": s.optimizer.not_finite,
                }
            )
            if not 1 <= step <= 3:
                twin.model(ids, labels).backward()
                twin.optimizer.step()
        mine, theirs = state(s), state(twin)
        names = {n for n, p in s.model.named_parameters() if not n.startswith("side.")}
        found.append(
            {
                "told": {key: [t[key] for t in told] for key in told[0]},
                "as if never seen": all(torch.equal(mine[n], theirs[n]) for n in theirs),
                "names": names,
                "total": s.optimizer.skipped_steps,
                "lines": list(lines),
            }
        )
    return found


@pytest.mark.unmeasured
def test_a_step_with_a_gradient_that_is_not_finite_on_one_rank_never_happened() -> None:
    for rank, found in enumerate(run_ranks(skipping, 2)):
        for run in found:
            told = run["told"]
            assert told["skipped"] == [False, True, True, True, False, False]
            assert told["in a row"] == [0, 1, 2, 3, 0, 0]
            assert told["finite"] == [True, False, False, False, True, True]
            assert told["moved"] == [True, False, False, False, True, True]
            assert run["as if never seen"]
            assert run["total"] == 3
            for why in told["why"][1:4]:
                assert set(why.parameters) == run["names"]
                assert why.ranks == (1,)
            assert [why is None for why in told["why"]] == [not s for s in told["skipped"]]
            assert len(run["lines"]) == (3 if rank == 0 else 0), "rank 0 alone logs, once a step"
            assert all("skipped" in line and "on rank 1" in line for line in run["lines"])


def inside(rank: int, world: int) -> list[Any]:
    """Rank 2's gradient becomes NaN in backward of the first block; parts of it are counted."""
    s = setup(Case(weight=2, dtype=torch.float32))
    ids, labels = (share(t, rank) for t in batch(0, world))

    def spoil(module: Any, args: Any, output: Tensor) -> None:
        if rank == 2:
            output.register_hook(lambda gradient: gradient * math.nan)

    hook = s.model.layers[0].register_forward_hook(spoil)
    s.model(ids, labels).backward()
    hook.remove()
    s.optimizer.finish_reductions()
    s.model(ids, labels).backward()
    s.optimizer.step()
    found = [s.optimizer.not_finite]
    # After it is discarded it has no effect.
    hook = s.model.layers[0].register_forward_hook(spoil)
    s.model(ids, labels).backward()
    hook.remove()
    s.model.zero_grad()
    s.model(ids, labels).backward()
    s.optimizer.step()
    # If skipping is off, the step is taken as in torch.
    taken = setup(Case(weight=2, dtype=torch.float32, options={"skip_not_finite": False}))
    (taken.model(ids, labels) * (math.nan if rank == 3 else 1)).backward()
    taken.optimizer.step()
    norm = taken.optimizer.grad_norm
    spoiled = [n for n, p in whole(taken.model).items() if not p.isfinite().all()]
    return [*found, s.optimizer.skipped, taken.optimizer.skipped, norm, spoiled]


@pytest.mark.thorough(2)
def test_parameters_and_ranks_are_named_exactly() -> None:
    for why, skipped, taken, norm, spoiled in run_ranks(inside, 4):
        assert {n.rpartition(".")[0].removeprefix("layers.0.") for n in why.parameters} == {
            "embed", "norm", "q", "wo", "w1", "w2"
        }  # fmt: skip
        assert not any(n.startswith(("layers.1", "head", "side")) for n in why.parameters)
        assert why.ranks == (2,)
        assert not skipped
        assert not taken
        assert math.isnan(norm)
        assert "layers.1.q.weight" in spoiled


@pytest.mark.parametrize("names", [1, 9])
def test_a_message_names_a_few_parameters_and_counts_the_rest(names: int) -> None:
    from internsp.optim.finite import NotFinite

    text = str(NotFinite(tuple(f"p{i}" for i in range(names)), (0, 3)))
    assert text.startswith("not finite on ranks 0, 3: p0")
    assert ("and 3 more parameters" in text) == (names == 9)
