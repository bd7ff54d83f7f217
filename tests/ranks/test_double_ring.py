"""A double ring, and the other forms of a ring, as configured: one process's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from internsp import model_zoo, parallelize
from internsp.app.plan.step import make_plan
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from internsp.config import SequenceConfig, WeightParallelConfig
from internsp.errors import ConfigError
from internsp.sp import DistributedAttention, SequenceLayout
from tests.support.compare import TOLERANCE
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.pairs import covering
from tests.support.parity import Case, run_case
from tests.support.ranks import ranks, run_ranks
from tests.support.routes import positions_of, received, returned, sent
from tests.support.runs import Changes, config, run_all

DOUBLE = {"ring_form": "double", "inner_ring": 2}
MODELS: dict[str, dict[str, Any]] = {
    "own": {"heads": 2},
    "grouped": {"heads": 4, "kv_heads": 2, "hidden_size": 16},
    "one": {"heads": 3, "kv_heads": 1},
}
OPTIONS: dict[str, list[Any]] = {
    "weight": [1, 2, 4],
    "heads": list(MODELS),
    "length": [16, 13, 3],
    "packed": [False, True],
    "silent_rank": [False, True],
    "checkpoint": ["none", "full", "selective"],
    "micro_batches": [1, 2],
}


def gaps(rank: int, world_size: int, given: list[Case]) -> list[tuple[float, float]]:
    return [run_case(case) for case in given]


def drawn() -> list[Case]:
    chosen = covering(OPTIONS, lambda c: not (c.get("packed") and c.get("length") == 3))
    given = [
        Case(
            weight=c["weight"], sequence=4, ring=4, length=c["length"], weights=DOUBLE,
            model=MODELS[c["heads"]], packed=c["packed"], checkpoint={"mode": c["checkpoint"]},
            micro_batches=c["micro_batches"], one_rank_without_tokens=c["silent_rank"],
        )
        for c in chosen
    ]  # fmt: skip
    for form in ("ring", "reverse", "direct"):
        given.append(Case(sequence=4, ring=4, weights={"ring_form": form}, length=13, packed=True))
    return given


@few("given", drawn(), 5)
def test_loss_and_every_gradient_equal_one_process(given: list[Case]) -> None:
    for found in run_ranks(gaps, 4, given, timeout=240):
        for case, (loss, gradient) in zip(given, found, strict=True):
            assert loss < TOLERANCE, case
            assert gradient < TOLERANCE, case


def parallel(**options: Any) -> Changes:
    return {"parallel": {"sequence": 4, "weight": 2}, "sequence": {"ring": 4, **options}}


@pytest.mark.thorough(2)
def test_a_run_of_the_trainer_equals_one_process(tmp_path: Path) -> None:
    alone = run_all(tmp_path / "alone", 1, {"": []})[""]
    (double,) = run_all(tmp_path / "four", 4, {"double": [parallel(**DOUBLE)]}).values()
    double.equals(alone, "double")


@ranks(4)
def test_blocks_go_round_both_rings_and_as_many_bytes_as_planned(rank: int) -> None:
    sizes = {"data": {"sequence_length": 32}, "train": {"global_batch": 2}}
    settings = config(parallel(**DOUBLE), {"sequence": {"balance": "zigzag"}}, sizes)
    session = Session.create(settings)
    attends = [
        module
        for part in session.modules
        for module in part.modules()
        if isinstance(module, DistributedAttention)
    ]
    assert attends
    session.trace.enabled = True
    ids = torch.randint(0, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    layout = SequenceLayout.create(ids, rank=rank, size=4, ring=4, balance="zigzag")
    StepRunner(session)._passes.train([layout], torch.tensor(layout.total_valid_tokens))
    for attend in attends:
        assert attend.ring is not None
        route = attend._ring(attend.ring, 32, layout).route
        assert route.form == "double"
        # The rank in the next inner ring, and the neighbor in this one, unlike a plain ring's.
        peers = {move.peer for step in route.steps for move in step.sends}
        assert peers == {(rank + 2) % 4, rank ^ 1}
        one = 2 * 2 * settings.model.kv_heads * settings.model.head_dim * 8  # of two rows
        came = sum(received(route))
        home = sum(positions_of(step.gradient_receive) for step in route.steps)
        events = [e for e in session.trace.events if e.kind == "RING" and e.unit == attend.unit]
        # Keys and values in forward and again in backward; their gradients are sent back.
        assert sum(e.nbytes for e in events) == one * (2 * came + home) > 0
        most = torch.tensor([sent(route), returned(route)])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        blocks = settings.model.layers
        (planned,) = make_plan(settings, 4).ranks
        nbytes = blocks * one * int(2 * most[0] + most[1])
        assert [row[1] for row in planned.traffic] == [nbytes]


@ranks(4)
def test_a_pipelines_stages_take_the_section_too() -> None:
    degrees = {"parallel": {"pipeline": 2, "sequence": 2}}
    micro_batches = {"train": {"micro_batches": 2}}
    own = {"sequence": {"ring": 2, "ring_form": "reverse", "head_output": "gather"}}
    for chunk in Session.create(config(degrees, micro_batches, own)).modules:
        found = [m for m in chunk.modules() if isinstance(m, DistributedAttention)]
        assert {attend.ring.form for attend in found if attend.ring} == {"reverse"}
        assert chunk.loss_options["output"] == "gather"


@ranks(2)
def test_a_mesh_without_such_rings_is_refused_on_every_rank(rank: int) -> None:
    model = model_zoo.build(Case().model_config(), dtype=torch.float64)
    wrong = WeightParallelConfig(gather_before="rolling", granularity="module")
    with pytest.raises(ConfigError) as refused:
        parallelize(model, mesh_of(1, 2), wrong, sequence=SequenceConfig(**DOUBLE))
    told = str(refused.value).splitlines()
    assert [line.partition(":")[0].strip() for line in told] == [
        "the configuration", "weight_parallel.gather_before", "sequence.ring_form"
    ]  # fmt: skip
    assert '"double" of a ring of one rank' in told[2]
    assert {type(p) for p in model.parameters()} == {nn.Parameter}, "the model is as it was"
    for sequence, text in (
        ({"ring_form": "double", "inner_ring": 3}, "3 does not split into smaller rings"),
        ({"inner_ring": 2}, r'inner_ring: 2 is of no effect with "auto"; set ring_form = "double"'),
    ):
        model = model_zoo.build(Case().model_config(), dtype=torch.float64)
        with pytest.raises(ConfigError, match=text):
            parallelize(model, mesh_of(1, 2, ring=2), sequence=SequenceConfig(**sequence))
