"""Loss and every gradient equal one process within 1e-10, over covering sets of combinations.

In each set every possible pair of values of the options below occurs together at least once. Four
ranks meet all pairs of the smaller worlds, which run every value, and all pairs where thorough.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.compare import TOLERANCE
from tests.support.few import parted
from tests.support.pairs import Combination, all_pairs, covering, pairs_of
from tests.support.parity import Case, run_case
from tests.support.ranks import run_ranks

HEADS = {
    "own": {"heads": 2, "hidden_size": 12},
    "grouped": {"heads": 4, "kv_heads": 2, "hidden_size": 16},
    "one": {"heads": 3, "kv_heads": 1, "hidden_size": 12},
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "none": {},
    "half": {"mode": "full", "fraction": 0.5},
    "full": {"mode": "full"},
    "reentrant": {"mode": "full", "reentrant": True},
    "selective": {"mode": "selective"},
}
GATHERS: dict[str, dict[str, Any]] = {
    "block": {}, "module": {"granularity": "module"}, "rolling": {"gather_before": "rolling"},
}  # fmt: skip
COMMON: dict[str, list[Any]] = {
    "overlap": [True, False],
    "pool": [True, False],
    "checkpoint": list(CHECKPOINTS),
    "micro_batches": [1, 3],
    "heads": list(HEADS),
    "length": [12, 13],
    "packed": [False, True],
    "silent_rank": [False, True],
    "bias": [False, True],
    "tied": [False, True],
    "output": ["local", "gather", "vocabulary"],
    "family": ["llama", "internlm2"],
    "gathers": list(GATHERS),
    "kept": [0, 1, 3],
}


def options(world: int) -> dict[str, list[Any]]:
    degrees = [d for d in (1, 2, 4) if d <= world]
    return {"weight": degrees, "sequence": degrees, **COMMON}


def case_of(c: Combination) -> Case:
    model = {**HEADS[c["heads"]], "family": c["family"], "tie_embeddings": c["tied"]}
    return Case(
        weight=c["weight"],
        sequence=c["sequence"],
        length=c["length"],
        micro_batches=c["micro_batches"],
        model={**model, "bias": c["bias"], "qkv_bias": c["bias"]},
        weights={
            "overlap": c["overlap"],
            "memory_pool": c["pool"],
            "head_output": c["output"],
            "keep_unsharded": c["kept"],
            **GATHERS[c["gathers"]],
        },
        checkpoint=CHECKPOINTS[c["checkpoint"]],
        packed=c["packed"],
        one_rank_without_tokens=c["silent_rank"],
    )


def work(c: Combination) -> float:
    """Passes over the blocks, more with recomputation, in addition to what every case takes."""
    return 6 + c["micro_batches"] * (1.0 if c["checkpoint"] == "none" else 1.3)


def chosen(world: int) -> list[Combination]:
    return covering(options(world), seed=20, cost=work)  # of many the shortest set


def gaps(rank: int, world_size: int, cases: list[Case]) -> list[tuple[float, float]]:
    return [run_case(case) for case in cases]


SETS = [pytest.param(4, chosen(4), id="4")]
for world in (1, 2):
    values, others = parted(chosen(world))
    SETS.append(pytest.param(world, values, id=f"{world}"))
    SETS.append(pytest.param(world, others, id=f"{world}, others", marks=pytest.mark.thorough(8)))


@pytest.mark.slow(15)
@pytest.mark.parametrize(("world", "combinations"), SETS)
def test_loss_and_every_gradient_equal_one_process(
    world: int, combinations: list[Combination]
) -> None:
    cases = [case_of(c) for c in combinations]
    for found in run_ranks(gaps, world, cases, timeout=240):
        for case, (loss, gradient) in zip(cases, found, strict=True):
            assert loss < TOLERANCE, case
            assert gradient < TOLERANCE, case


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_sets_cover_all_pairs(world: int) -> None:
    wanted = all_pairs(options(world), lambda _: True)
    covered = set().union(*(pairs_of(c) for c in chosen(world)))
    assert wanted <= covered


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    choice=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in options(2).items()}),
    length=st.integers(2, 17),
    layers=st.integers(1, 5),
    intermediate=st.integers(1, 23),
    depth=st.integers(0, 3),
    trigger=st.sampled_from(["qkv", "attention", "out_proj", "mlp"]),
    pending=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@pytest.mark.unmeasured
def test_random_small_configurations_equal_one_process(
    choice: Combination,
    length: int,
    layers: int,
    intermediate: int,
    depth: int,
    trigger: str,
    pending: int,
    seed: int,
) -> None:
    case = case_of({**choice, "length": length, "packed": choice["packed"] and length > 5})
    case.model.update(layers=layers, intermediate_size=intermediate)
    case.weights.update(prefetch_depth=depth, reductions_in_flight=pending)
    case.weights.setdefault("gather_before", trigger)
    case = Case(**{**case.__dict__, "seed": seed})
    for found in run_ranks(gaps, 2, [case]):
        ((loss, gradient),) = found
        assert loss < TOLERANCE
        assert gradient < TOLERANCE
