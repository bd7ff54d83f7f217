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
from internsp.app.plan.compute import fed
from internsp.app.plan.configured import on_machines, workload_of
from internsp.app.plan.devices import device_named, on_device
from internsp.app.plan.least import LeastBytes, Stages
from internsp.app.plan.links import Group
from internsp.app.plan.longest import MemoryBudget
from internsp.app.plan.observe import Observations
from internsp.app.plan.replayed import messages, replayed
from internsp.app.plan.search import (
    CHECKPOINTS,
    SCHEDULES,
    Layout,
    Node,
    Space,
    Variant,
    chosen,
    neighbors,
    search,
)
from internsp.app.plan.searched import print_search
from internsp.app.plan.seconds import Computed, idle_in_a_v, step_seconds
from internsp.app.plan.step import make_plan
from internsp.app.plan.weight_seconds import dense_messages
from internsp.errors import ConfigError
from internsp.mesh import MeshShape
from internsp.pipeline.schedules import schedule_kind, schedule_order
from internsp.pipeline.simulate import check_order
from tests.support.few import some

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
        replace(family, checkpoint=again, weight=weight, expert_weight=size)
        for family in space.families()
        for again, weight, size in product(CHECKPOINTS, *space.sizes(family))
    ]


def variants(layout: Layout, space: Space | None = None) -> list[Layout]:
    """The layout, its optimizer with less traffic or in host memory, and tiles if it has any."""
    few = [replace(layout, optimizer_ranks=1)]
    own = few if layout.whole else []
    found = [layout, *own, replace(layout, offload=True)]
    if space is not None and space._can_tile(layout):
        found += [replace(each, tiled=True) for each in (layout, found[-1])]
    return found


SMALL = {"hidden_size": 1024, "layers": 6, "heads": 8, "intermediate_size": 2816}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("ranks", [1, 6, 8])
@pytest.mark.parametrize("memory", [4, 80])
def test_pruning_finds_the_same_ten(
    ranks: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(model=SMALL, train={"global_batch": 48})
    device = replace(H100, memory=memory * 2**30)
    pruned = search(given, ranks, device)
    monkeypatch.setattr(Space, "bound", lambda *_: 0.0)  # every layout is evaluated
    whole = search(given, ranks, device)
    assert [f.seconds.total for f in pruned.best] == [f.seconds.total for f in whole.best]
    assert pruned.evaluated <= whole.evaluated == whole.possible


@pytest.mark.parametrize("links", [H100.near, 1e10], ids=["fast", "slow"])
def test_the_bound_is_never_above_the_seconds(links: float) -> None:
    device = replace(H100, near=links, far=H100.far if links == H100.near else links)
    space = Space(config(model=SMALL, train={"global_batch": 48}), 8, device)
    roots = space.roots()[0]
    for layout in random.Random(1).sample(every_layout(space), 150):
        bounds = _bounds(space, roots, layout)
        for one in variants(layout, space):
            seconds = step_seconds(space.load(one), device).total
            assert max(bounds) <= seconds * (1 + 1e-9), one


def _bounds(space: Space, roots: list[Node], layout: Layout) -> list[float]:
    """Those of the nodes that a search opens before it comes to ``layout``."""
    own = {"checkpoint", "weight", "expert_weight"}
    family = {name: value for name, value in vars(layout).items() if name not in own}
    node = next(one for one in roots if vars(one.any_of).items() >= family.items())
    bounds = [node.bound]
    for name in ("checkpoint", "weight", "expert_weight"):
        same = getattr(layout, name)
        node = next(one for one in space.parts(node) if getattr(one.any_of, name) == same)
        bounds.append(node.bound)
    assert node.any_of == layout
    return bounds


def test_a_layouts_workload_is_that_of_its_configuration() -> None:
    given = config(model=SMALL, train={"global_batch": 48})
    space = Space(given, 8, H100)
    for layout in random.Random(1).sample(every_layout(space), 60):
        for one in variants(layout, space):
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
    roots = space.roots()[0]
    for layout in random.Random(0).sample(layouts, 120):
        bounds = _bounds(space, roots, layout)
        for one in variants(layout, space):
            other = changed(given, one.settings())
            assert other is not None, one
            assert other.check(8) == [], one
            assert workload_of(other, MeshShape(8, **other.degrees())) == space.load(one), one
            seconds = step_seconds(space.load(one), device).total
            assert max(bounds) <= seconds * (1 + 1e-9), one
    found = search(given, 8, device, 1)
    assert found.possible == len(layouts)
    assert found.evaluated < 0.1 * found.possible
    known = found.space.observations  # measured steps, and calls of torch's functions for sizes
    assert len(known._known) <= (14 if model["family"] == "deepseek" else 8)
    assert 200 < len(known._outputs._known) <= 450, "those of all steps"
    moved = replace(found.best[0].layout, expert=4)
    assert any(label.startswith("expert ") for label, _ in neighbors(space, moved))


@pytest.mark.parametrize("degrees", [
    {"weight": 8, "expert": 8, "expert_weight": 1}, {"weight": 8, "expert": 1, "expert_weight": 2},
    {"weight": 1, "expert": 4, "expert_weight": 1},
], ids=str)  # fmt: skip
def test_seconds_of_experts_are_near_those_of_the_replay(degrees: dict[str, int]) -> None:
    model = {**MIXED[0], "hidden_size": 2048, "experts": 16, "top_k": 4, "heads": 16}
    given = config(model={**model, "intermediate_size": 1024, "kv_heads": 4}, parallel=degrees)
    plan = make_plan(given, 8)
    load = workload_of(given, plan.shape)
    played = replayed(given, 8, H100).total
    assert step_seconds(load, H100).total == pytest.approx(played, rel=0.02)
    sent = messages(load, H100, plan.chunk)["AG"]
    for weight in (one for unit in plan.chunk.units for one in unit.weights):
        among = degrees["expert_weight" if weight.expert else "weight"]
        alone = Group(among, 1, H100).gather(weight.unsharded_bytes)
        assert sent[weight.name] == alone, weight.name


@pytest.mark.parametrize(("ranks", "heads"), [(4, 2), (12, 8)])
def test_what_is_found_is_planned_without_a_mistake_and_fits(ranks: int, heads: int) -> None:
    given = config(model={**SMALL, "heads": heads, "kv_heads": heads}, train={"global_batch": 12})
    space = Space(given, ranks, H100)
    some = random.Random(0).sample(every_layout(space), 40)
    best = search(given, ranks, H100, 2).best
    for layout in [*some, *(one.layout for one in best)]:
        other = changed(given, layout.settings())
        assert other is not None, layout
        assert other.check(ranks) == [], layout
        assert workload_of(other, MeshShape(ranks, **other.degrees())) == space.load(layout)
    for one in best:
        assert one.config == changed(given, {**one.layout.settings(), "launch.processes": ranks})
        needed = MemoryBudget(one.config, ranks).most(given.data.sequence_length)
        assert needed == one.nbytes <= FREE * H100.memory


def test_more_memory_and_faster_links_are_never_a_worse_best() -> None:
    given = config(model=SMALL, train={"global_batch": 48})
    last = float("inf")
    for gib in (3, 80):
        now = search(given, 8, replace(H100, memory=gib * 2**30), 1).best[0].seconds.total
        assert now <= last
        last = now
    faster = replace(H100, near=2 * H100.near, far=2 * H100.far)
    assert search(given, 8, faster, 1).best[0].seconds.total <= last


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
        played = replayed(other, 64, H100).total
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


BOUNDED: dict[str, dict[str, Any]] = {
    "tied": {"vocab_size": 64000, "hidden_size": 1024, "layers": 9, "heads": 8,
             "tie_embeddings": True},
    "grouped": {**SMALL, "kv_heads": 2},
    "internlm2": {**SMALL, "family": "internlm2", "kv_heads": 4},
    **{str(model["family"]): {**model, "heads": 8, "experts": 8} for model in MIXED},
    "dense first": {**MIXED[1], "heads": 8, "experts": 8, "layers": 8, "dense_layers": 3},
}  # fmt: skip


@pytest.mark.parametrize("cases", [2, pytest.param(40, marks=pytest.mark.thorough(seconds=60))])
@pytest.mark.parametrize("name", some([*BOUNDED], 1))
def test_bytes_that_a_search_prunes_by_are_never_more_than_those_of_the_plan(
    name: str, cases: int
) -> None:
    given = config(model=BOUNDED[name], train={"global_batch": 64})
    space = Space(given, 16, H100)
    order = random.Random(f"{name} {cases}")
    for layout in order.sample(every_layout(space), cases):
        one = order.choice(variants(layout, space))
        other = changed(given, one.settings())
        assert other is not None
        other, load = on_machines(other, 16, H100), space.load(one)
        over, few = load.degrees.sharded, max(1, load.degrees.expert_shards)
        asked = other.weight_parallel.reduce
        assert space.least._near(over, few) == (0 if asked == "auto" else asked), one
        budget = MemoryBudget(other, 16, observations=space.observations)
        for rank, chunks in enumerate(budget.plan.ranks):
            own = [chunk.blocks for chunk in chunks.chunks]
            assert own == space.least._split(Stages.of_load(load))[rank], one
        assert 0 < space.least.of(load) <= budget.most(4096), one
    # What was measured for other layouts gives the same bytes as what is measured for this one.
    alone = MemoryBudget(other, 16)
    assert [budget.at(4096, rank) for rank in range(len(alone.ranks))] == [
        alone.at(4096, rank) for rank in range(len(alone.ranks))
    ]


@pytest.mark.parametrize(("at", "mode", "number"), [
    (2, "half", 16), pytest.param(1, "full", 8, marks=pytest.mark.thorough(2)),
])  # fmt: skip
def test_the_bound_is_near_a_plan_that_measures_no_more_than_it_has_to(
    at: int, mode: str, number: int
) -> None:
    """A search plans each layout that its bound lets through: a second or more for each."""
    given = config(train={"global_batch": 64})
    space = Space(given, 8, H100)
    layout = Layout(8, SCHEDULES[at], 1, 1, 1, 0, number, mode, False)
    other = changed(given, layout.settings())
    assert other is not None
    counted = Observations()
    budget = MemoryBudget(other, 8, observations=counted)
    over = budget.most(4096, 2**20)
    few, whole = len(counted._known), budget.most(4096)
    assert few < len(counted._known), "the first rank that is too full is enough"
    assert 2**20 < over <= whole
    assert space.least.of(space.load(layout)) > 0.94 * whole
    assert not any("_simulated" in vars(rank) for rank in budget.plan.ranks), "no bytes need it"


def test_the_bound_has_what_offloaded_blocks_leave_and_what_a_block_computed_again_takes() -> None:
    space = Space(config(train={"global_batch": 64}), 8, H100)
    layout = Layout(1, SCHEDULES[0], 1, 1, 8, 0, 2, "full", True)
    found = space.planned(Variant(layout, step_seconds(space.load(layout), H100)))
    assert found is not None
    assert 0.96 * found.nbytes < space.least.of(found.load) <= found.nbytes


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: str(one[0]))
def test_seconds_of_a_schedules_closed_form_are_near_those_of_the_replay(
    schedule: tuple[str, int],
) -> None:
    for number, mode in ((4, "none"), (16, "none"), (8, "selective")):
        given = config(
            model={"layers": 16}, parallel={"weight": 4, "pipeline": 4},
            pipeline={"schedule": schedule[0], "chunks": schedule[1]},
            train={"micro_batches": number, "global_batch": 16 * number},
            activation_checkpoint={"mode": mode},
        )  # fmt: skip
        shape = MeshShape(16, **given.degrees())
        played = replayed(given, 16, H100).total
        closed = step_seconds(workload_of(given, shape), H100).total
        assert closed == pytest.approx(played, rel=0.015), (number, mode)
    # On ranks without others beside them, slower links lengthen the messages between stages alone.
    load = workload_of(given, MeshShape(4, pipeline=4))
    devices = replace(H100, near=H100.near / 8), H100
    slow, fast = (Group(2, 1, one).pass_on(load.tokens * load.model.hidden * 2) for one in devices)
    more = step_seconds(load, devices[0]).total - step_seconds(load, devices[1]).total
    assert more == pytest.approx(2 * 3 * schedule[1] * (slow - fast))


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
    for near in (0, 8, "auto", "backend"):
        given = config(
            model={"layers": 8}, parallel={"weight": 32},
            weight_parallel={"reduce": near},
        )  # fmt: skip
        chunk = make_plan(on_machines(given, 32, H100), 32).chunk
        load = workload_of(given, MeshShape(32, **given.degrees()))
        own = [weight.name for weight in chunk.blocks[0].weights]
        times = 2 if near in (8, "auto") else 1  # its two messages are alike there
        played = times * sum(messages(load, H100, chunk)["RS"][name] for name in own)
        found.append(dense_messages(load, H100).reduce)
        assert found[-1] == pytest.approx(played, rel=0.03), near
    nbytes = sum(weight.gradient_bytes for weight in chunk.blocks[0].weights)
    assert found[0] == pytest.approx(nbytes * 24 / 32 / (H100.far * H100.fitted.links), rel=0.03)
    assert found[1] < 0.5 * found[0]
    assert found[2] == found[1]
    ring = nbytes * 31 / 32 / (8 * H100.far * H100.fitted.links)  # over a machine's 8 adapters
    assert found[3] == pytest.approx(ring + len(own) * Group(32, 1, H100).latency, rel=0.1)


def test_what_cannot_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no layout of this step fits on 2 x h100-sxm"):
        search(config(), 2, replace(H100, memory=2**30))
    two = {"layers": 2}
    for ranks, batch in ((3, 3), (4, 4)):
        assert search(config(model=two, train={"global_batch": batch}), ranks, H100).best
    with pytest.raises(ConfigError, match="3 devices cannot share 4 sequences of 4096 tokens"):
        search(config(model=two, train={"global_batch": 4}), 3, H100)
    path = tmp_path / "small.toml"
    path.write_text("[model]\nlayers = 2\n")
    assert main(["plan", str(path), "--search"]) == 2
    assert main(["plan", str(path), "--write", str(path)]) == 2
    for number in ("0", "-1"):
        assert main(["plan", str(path), "--devices", number, "--parallel.weight", "2"]) == 2
        assert f"--devices {number}: give a number from 1 on" in capsys.readouterr().err


def test_tiles_are_taken_where_memory_is_short_and_cost_what_they_compute_again() -> None:
    given = config(
        model={**SMALL, "intermediate_size": 8192}, data={"sequence_length": 16384},
        train={"global_batch": 1},
    )  # fmt: skip
    space = Space(given, 1, H100)
    plain = Layout(1, SCHEDULES[0], 1, 1, 1, 0, 1, "none", False)
    best = search(given, 1, replace(H100, memory=5.65 * 2**30), 1).best[0]
    assert (best.layout.checkpoint, best.layout.tiled) == ("selective", True)
    assert best.config.activation_checkpoint.tiles == "auto"
    without = space.planned(Variant(replace(best.layout, tiled=False), best.seconds))
    assert without is not None
    assert best.nbytes < 5.08 * 2**30 < without.nbytes
    load = space.load(replace(plain, tiled=True))
    again, whole = step_seconds(load, H100), step_seconds(space.load(plain), H100)
    assert again.total - whole.total == pytest.approx(6 * fed(load, H100).total)
    assert not search(given, 1, H100, 1).best[0].layout.tiled, "memory has room for the faster one"


@pytest.mark.thorough(8)
def test_the_same_layouts_are_found_where_no_bound_of_bytes_leaves_any_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = config(model={**SMALL, "layers": 2}, train={"global_batch": 4})
    device = replace(H100, memory=1.6 * 2**30)
    pruned = search(given, 4, device, 2)
    for one in pruned.best:
        assert pruned.space.least.of(one.load) > 0.9 * one.nbytes
    monkeypatch.setattr(LeastBytes, "of", lambda self, load: 0.0)
    whole = search(given, 4, device, 2)
    assert [one.layout for one in pruned.best] == [one.layout for one in whole.best]
    assert pruned.planned < whole.planned / 2


@pytest.mark.thorough(8)
def test_where_memory_is_short_few_layouts_are_planned_that_do_not_fit() -> None:
    """Each takes half a second; bounds that leave out a component plan a hundred of them here."""
    path = Path(__file__).parents[2] / "configs" / "llama3_70b.toml"
    found = search(on_device(load_config(path), H100), 96, H100)
    assert found.planned <= len(found.best) + 2
    for one in found.best:
        assert 0.97 * one.nbytes < found.space.least.of(one.load) <= one.nbytes, one.layout.label()


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
