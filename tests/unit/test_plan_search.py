"""The search for the best layout: the same ten as without pruning, none that a run refuses."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from internsp.app.cli.command import main
from internsp.app.config import Config, load_config
from internsp.app.plan.answer import FREE, changed
from internsp.app.plan.bytes import step_bytes
from internsp.app.plan.configured import workload_of
from internsp.app.plan.devices import device_named, on_device
from internsp.app.plan.layout import SCHEDULES, Layout
from internsp.app.plan.links import Group
from internsp.app.plan.longest import MemoryBudget
from internsp.app.plan.replayed import messages, replayed
from internsp.app.plan.search import Family, Space, chosen, neighbors, search
from internsp.app.plan.searched import print_search
from internsp.app.plan.seconds import Computed, idle_in_a_v, step_seconds
from internsp.app.plan.step import Plan, make_plan
from internsp.app.plan.weight_seconds import dense_messages
from internsp.errors import ConfigError
from internsp.mesh import MeshShape
from internsp.pipeline.schedules import schedule_kind, schedule_order
from internsp.pipeline.simulate import check_order

H100 = device_named("h100-sxm")


def config(**sections: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": {
            "vocab_size": 32000, "hidden_size": 4096, "layers": 32, "heads": 32,
            "intermediate_size": 11008,
        },
        "data": {"sequence_length": 4096}, "train": {"global_batch": 64, "dtype": "bfloat16"},
    }  # fmt: skip
    for name, given in sections.items():
        values[name] = {**values.get(name, {}), **given}
    return on_device(Config.model_validate(values), H100)


def every_layout(space: Space) -> list[Layout]:
    """Of all families, over all numbers of ranks that may share a weight or an expert."""
    return [
        replace(family, weight=weight, expert_weight=size)
        for family in space.families()
        for weight, size in product(*space.sizes(family))
    ]


SMALL = {"hidden_size": 1024, "layers": 6, "heads": 8, "intermediate_size": 2816}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("ranks", [1, 6, 8])
@pytest.mark.parametrize("memory", [4, 80])
def test_pruning_finds_the_same_ten(ranks: int, memory: int) -> None:
    given = config(model=SMALL, train={"global_batch": 48})
    device = replace(H100, memory=memory * 2**30)
    pruned, whole = (search(given, ranks, device, prune=prune) for prune in (True, False))
    assert [f.seconds.total for f in pruned.best] == [f.seconds.total for f in whole.best]
    assert pruned.evaluated <= whole.evaluated == whole.possible


def test_the_bound_is_never_above_the_seconds() -> None:
    space = Space(config(model=SMALL, train={"global_batch": 48}), 8, H100)
    layouts = random.Random(0).sample(every_layout(space), 300)
    for layout in layouts:
        for one in space.variants(layout):
            seconds = step_seconds(space.load(one), H100).total
            for bound in _bounds(space, one):
                assert bound <= seconds * (1 + 1e-9), one
            assert Family(space).seconds(one).total == pytest.approx(seconds, rel=1e-12), one


def _bounds(space: Space, layout: Layout) -> list[float]:
    """Those of the nodes that a search opens before it comes to ``layout``."""
    any_weight = replace(
        layout, weight=1, expert_weight=min(1, layout.expert), optimizer_ranks=0, offload=False
    )
    any_checkpoint = replace(any_weight, checkpoint="none")
    any_size = Family(space).least(replace(any_weight, weight=layout.weight))
    return [space.bound(any_checkpoint), space.bound(any_weight), any_size]


def test_a_layouts_workload_is_that_of_its_configuration() -> None:
    given = config(model=SMALL, train={"global_batch": 48})
    space = Space(given, 8, H100)
    for layout in random.Random(1).sample(every_layout(space), 60):
        for one in space.variants(layout):
            other = changed(given, one.settings())
            if other is not None and not other.check(8):
                load = workload_of(other, MeshShape(8, **other.degrees()))
                assert load == space.load(one), one


MIXED = [
    {"family": "mixtral", "hidden_size": 512, "layers": 4, "intermediate_size": 256, "top_k": 2},
    {"family": "deepseek", "hidden_size": 512, "layers": 4, "intermediate_size": 768, "top_k": 2},
]


@pytest.mark.parametrize("model", MIXED, ids=lambda model: str(model["family"]))
def test_experts_are_divided_and_sharded_in_every_way_that_a_run_takes(
    model: dict[str, Any],
) -> None:
    given = config(model={**model, "heads": 8, "experts": 8}, train={"global_batch": 16})
    device = replace(H100, near_ranks=2)  # whose neighbors are near matters
    space = Space(given, 8, device)
    layouts = every_layout(space)
    ways = {(one.expert, one.expert_weight) for one in layouts}
    assert ways == {(e, w) for e in (1, 2, 4, 8) for w in (1, 2, 4, 8) if e * w <= 8}
    for layout in random.Random(0).sample(layouts, 120):
        for one in space.variants(layout):
            other = changed(given, one.settings())
            assert other is not None, one
            assert other.check(8) == [], one
            assert workload_of(other, MeshShape(8, **other.degrees())) == space.load(one), one
            seconds = step_seconds(space.load(one), device).total
            assert Family(space).seconds(one).total == pytest.approx(seconds, rel=1e-12), one
            for bound in _bounds(space, one):
                assert bound <= seconds * (1 + 1e-9), one
    found = search(given, 8, device)
    assert found.possible == len(layouts)
    assert found.evaluated < 0.1 * found.possible
    told = [label for label, _ in neighbors(space, found.best[0].layout)]
    assert any(label.startswith("expert ") for label in told)


@pytest.mark.parametrize("degrees", [
    {"weight": 8, "expert": 8, "expert_weight": 1}, {"weight": 8, "expert": 1, "expert_weight": 2},
    {"weight": 1, "expert": 4, "expert_weight": 1},
], ids=str)  # fmt: skip
def test_experts_bytes_and_seconds_are_near_those_of_the_plan(degrees: dict[str, int]) -> None:
    model = {**MIXED[0], "hidden_size": 2048, "experts": 16, "top_k": 4, "heads": 16}
    given = config(model={**model, "intermediate_size": 1024, "kv_heads": 4}, parallel=degrees)
    budget = MemoryBudget(given, 8)
    load = workload_of(given, budget.plan.shape)
    planned = dict(budget.at(4096)[0])
    ours = step_bytes(load)
    assert ours.weights == pytest.approx(planned["weight shards"], rel=0.01)
    assert ours.optimizer == pytest.approx(planned["optimizer state"], rel=0.01)
    assert ours.activations == pytest.approx(planned["activations that are kept"], rel=0.13)
    played = replayed(given, budget.plan.shape, H100).total
    assert step_seconds(load, H100).total == pytest.approx(played, rel=0.02)
    assert isinstance(budget.plan, Plan)
    sent = messages(load, H100, budget.plan.chunk)["AG"]
    for weight in (one for unit in budget.plan.chunk.units for one in unit.weights):
        among = degrees["expert_weight" if weight.expert else "weight"]
        alone = Group(among, 1, H100).gather(weight.unsharded_bytes)
        assert sent[weight.name] == alone, weight.name


@pytest.mark.parametrize("ranks", [4, 12])
@pytest.mark.parametrize("heads", [2, 8])
def test_what_is_found_is_planned_without_a_mistake_and_fits(ranks: int, heads: int) -> None:
    given = config(model={**SMALL, "heads": heads, "kv_heads": heads}, train={"global_batch": 12})
    space = Space(given, ranks, H100)
    some = random.Random(0).sample(every_layout(space), 40)
    for layout in [*some, *(one.layout for one in search(given, ranks, H100).best)]:
        other = changed(given, layout.settings())
        assert other is not None, layout
        assert other.check(ranks) == [], layout
        assert workload_of(other, MeshShape(ranks, **other.degrees())) == space.load(layout)
    for one in search(given, ranks, H100).best:
        other = changed(given, one.layout.settings())
        assert other is not None
        if one.layout.pipeline == 1:
            make_plan(other, ranks)
        assert step_bytes(one.load).total == one.nbytes <= FREE * H100.memory


def test_more_memory_and_faster_links_are_never_a_worse_best() -> None:
    given = config(model=SMALL, train={"global_batch": 48})
    last = float("inf")
    for gib in (3, 4, 6, 12, 80):
        now = search(given, 8, replace(H100, memory=gib * 2**30)).best[0].seconds.total
        assert now <= last
        last = now
    better = search(given, 8, H100.with_links(2 * H100.near, 2 * H100.far)).best[0].seconds.total
    assert better <= last


@pytest.mark.thorough(1)
def test_among_ties_the_fewest_axes_win() -> None:
    found = search(config(), 64, H100).best
    first = chosen(found)
    assert first.seconds.total <= 1.05 * found[0].seconds.total
    ties = [one for one in found if one.seconds.total <= 1.05 * found[0].seconds.total]
    assert first.layout.axes == min(one.layout.axes for one in ties)


@pytest.mark.thorough(1)
def test_neighbors_are_one_step_away_and_cost_what_they_take() -> None:
    space = Space(config(), 64, H100)
    best = search(config(), 64, H100).best[0]
    told = dict(neighbors(space, best.layout))
    weight = best.layout.weight
    assert f"weight {2 * weight}" in told
    near = told[f"weight {2 * weight}"]
    assert near is not None
    assert near.layout.weight == 2 * weight
    assert near.seconds.total == step_seconds(space.load(near.layout), H100).total


@pytest.mark.thorough(1)
def test_the_closed_form_of_the_ten_is_within_a_hundredth_of_the_replay() -> None:
    given = config()
    for one in search(given, 64, H100).best:
        other = changed(given, one.layout.settings())
        assert other is not None
        played = replayed(other, MeshShape(64, **other.degrees()), H100).total
        assert one.seconds.total == pytest.approx(played, rel=0.01), one.layout.label()


@pytest.mark.thorough(2)
def test_the_screen_has_reasons_and_writes_a_configuration_that_is_taken(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "best.toml"
    print_search(config(), 64, H100, Console(file=out, width=200), path)
    text = out.getvalue()
    assert "layouts of 64 x h100-sxm" in text
    assert text.count("micro-batch") >= 10
    for part in ("is bound by", "another degree: weight", "tokens/s/device", "in the open"):
        assert part in text, part
    written = load_config(path, world_size=64)
    assert written.parallel.device == "auto"
    assert written.check(64) == []
    assert f"weight {written.parallel.weight}" in text


@pytest.mark.parametrize("sections", [
    {}, {"activation_checkpoint": {"mode": "selective"}},
    {"activation_checkpoint": {"mode": "full", "fraction": 0.5}},
    {"parallel": {"weight": 2, "sequence": 4}},
    {"parallel": {"sequence": 4}, "activation_checkpoint": {"mode": "selective"}},
], ids=str)  # fmt: skip
def test_bytes_of_the_closed_form_are_near_those_of_the_plan(
    sections: dict[str, dict[str, Any]],
) -> None:
    given = config(model={"layers": 8}, parallel={"weight": 8}, **{
        name: part for name, part in sections.items() if name != "parallel"
    })  # fmt: skip
    given = changed(given, {
        f"parallel.{key}": value for key, value in sections.get("parallel", {}).items()
    }) or given  # fmt: skip
    budget = MemoryBudget(given, 8)
    planned = dict(budget.at(4096)[0])
    ours = step_bytes(workload_of(given, budget.plan.shape))
    assert ours.total == pytest.approx(sum(planned.values()), rel=0.02)
    assert ours.activations == pytest.approx(planned["activations that are kept"], rel=0.02)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: str(one[0]))
def test_bytes_and_seconds_of_a_schedules_closed_form_are_near_those_of_the_plan(
    schedule: tuple[str, int],
) -> None:
    for number, mode in ((4, "none"), (16, "none"), (8, "selective")):
        given = config(
            model={"layers": 16}, parallel={"weight": 4, "pipeline": 4},
            pipeline={"schedule": schedule[0], "chunks": schedule[1]},
            train={"micro_batches": number, "global_batch": 16 * number},
            activation_checkpoint={"mode": mode},
        )  # fmt: skip
        budget = MemoryBudget(given, 16)
        load = workload_of(given, budget.plan.shape)
        needed = max(sum(n for _, n in budget.at(4096, rank)[0]) for rank in range(4))
        assert step_bytes(load).total == pytest.approx(needed, rel=0.08), (number, mode)
        played = replayed(given, budget.plan.shape, H100).total
        assert step_seconds(load, H100).total == pytest.approx(played, rel=0.015), (number, mode)


def test_the_first_rank_of_a_v_has_the_head_too_and_a_chunk_of_fewer_blocks() -> None:
    given = config(
        model={"layers": 6}, parallel={"weight": 1, "pipeline": 2},
        pipeline={"schedule": "ZBVZeroBubble", "chunks": 2},
        train={"micro_batches": 4, "global_batch": 64}, activation_checkpoint={"mode": "full"},
    )  # fmt: skip
    budget = MemoryBudget(given, 8)
    planned = dict(budget.at(4096, 0)[0])
    ours = step_bytes(workload_of(given, budget.plan.shape))
    assert ours.weights == pytest.approx(planned["weight shards"], rel=0.01)
    assert ours.optimizer == pytest.approx(planned["optimizer state"], rel=0.01)
    sums = ("gradient sums", "sums on their way to the optimizer (at most)")
    assert ours.gradients == pytest.approx(sum(planned[name] for name in sums), rel=0.01)
    assert ours.total == pytest.approx(sum(planned.values()), rel=0.05)


@pytest.mark.parametrize(("stages", "number"), [(4, 4), (4, 5), (4, 16), (8, 10), (8, 16)])
@pytest.mark.parametrize(("inputs", "weights"), [(1.0, 1.0), (1.2, 0.8), (2.0, 0.5), (3.0, 1.0)])
def test_idle_time_of_a_v_is_that_of_torchs_order(
    stages: int, number: int, inputs: float, weights: float
) -> None:
    kind = schedule_kind("ZBVZeroBubble")
    seconds = {"F": 1.0, "B": inputs + weights, "I": inputs, "W": weights}
    timed = check_order(
        schedule_order(kind, stages, 2, number), partial(kind.rank_of, ranks=stages, chunks=2),
        2 * stages, lambda action: seconds[action.kind],
    )  # fmt: skip
    idle = max(one.end for one in timed) - 2 * number * (1.0 + inputs + weights)
    space = Space(config(model=SMALL, train={"global_batch": 64}), 8, H100)
    degrees = replace(space.base.degrees, pipeline=stages, interleave=2, v_shaped=True)
    load = replace(space.base, degrees=degrees, micro_batches=number)
    one = Computed({}, 2.0, 1.0, inputs + weights, 0.0, 0.0, 2 * weights)
    assert idle_in_a_v(load, one, 0.0, 0.0) == pytest.approx(idle)


def test_messages_of_sums_within_a_machine_first_take_what_they_take_in_the_replay() -> None:
    found = []
    for near in (0, 8):
        given = config(
            model={"layers": 8}, parallel={"weight": 32},
            weight_parallel={"reduce_near_ranks": near},
        )  # fmt: skip
        chunk = make_plan(given, 32).chunk
        load = workload_of(given, MeshShape(32, **given.degrees()))
        own = [weight.name for weight in chunk.blocks[0].weights]
        times = 2 if near else 1  # its two messages are alike there
        played = times * sum(messages(load, H100, chunk)["RS"][name] for name in own)
        found.append(dense_messages(load, H100).reduce)
        assert found[-1] == pytest.approx(played, rel=0.03), near
    assert found[0] != pytest.approx(found[1], rel=0.03)


def test_what_cannot_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no layout of this step fits on 2 x h100-sxm"):
        search(config(), 2, replace(H100, memory=2**30))
    path = tmp_path / "small.toml"
    path.write_text("[model]\nlayers = 2\n")
    assert main(["plan", str(path), "--search"]) == 2
    assert main(["plan", str(path), "--write", str(path)]) == 2
    for number in ("0", "-1"):
        assert main(["plan", str(path), "--devices", number, "--parallel.weight", "2"]) == 2
        assert f"--devices {number}: give a number from 1 on" in capsys.readouterr().err


def test_where_the_closed_form_is_too_low_the_search_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that it finds first need more by their plan; with the optimizer's state away they fit."""
    tiny = {"hidden_size": 256, "layers": 2, "heads": 4, "intermediate_size": 704}
    given = config(model=tiny, train={"global_batch": 1}, data={"sequence_length": 512})
    device = replace(H100, memory=500 * 2**20)
    low = partial(replace, unsharded=0.0, optimizer=0.0, working=0.0)
    monkeypatch.setattr("internsp.app.plan.search.step_bytes", lambda load: low(step_bytes(load)))
    for one in search(given, 1, device).best:
        other = changed(given, one.layout.settings())
        assert other is not None
        assert sum(n for _, n in MemoryBudget(other, 1).at(512)[0]) > device.memory
    out = io.StringIO()
    print_search(given, 1, device, Console(file=out, width=200))
    assert "checkpoint none, offloaded" in out.getvalue()


def test_the_command_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, best = tmp_path / "small.toml", tmp_path / "best.toml"
    path.write_text(
        "[model]\nlayers = 4\n[parallel]\nweight = 2\n[launch]\nprocesses = 2\n"
        "[train]\nglobal_batch = 8\n"
    )
    asked = ["--search", "--device", "a100-80", "--devices", "8", "--write", str(best)]
    assert main(["plan", str(path), *asked]) == 0
    assert "layouts of 8 x a100-80" in capsys.readouterr().out
    assert load_config(best, world_size=8).launch.processes == 8
