"""Seconds of a planned step: the closed form, the replay of the schedule, and what is printed."""

from __future__ import annotations

import io
import math
import random
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from internsp.app.config import Config
from internsp.app.plan import answer
from internsp.app.plan import replayed as replaying
from internsp.app.plan.answer import changed
from internsp.app.plan.block_seconds import block_seconds
from internsp.app.plan.compute import STREAMED, passes, product
from internsp.app.plan.configured import on_machines, workload_of
from internsp.app.plan.devices import Device, device_named, devices, on_device
from internsp.app.plan.links import FAR_HOP, Group, beside
from internsp.app.plan.replayed import GRADIENT, Computing, StepReplay, messages, replay, replayed
from internsp.app.plan.screen import print_plan
from internsp.app.plan.seconds import (
    Computed,
    Part,
    StepSeconds,
    ends,
    paces,
    stage_blocks,
    step_seconds,
)
from internsp.app.plan.step import Plan, make_plan
from internsp.app.plan.weight_seconds import WeightMessages, exposed_replicas
from internsp.app.plan.workload import Degrees, Habits, ModelShape, Recompute, Workload
from internsp.errors import ConfigError
from internsp.experts.rule import expected_owners
from internsp.mesh import MeshShape
from internsp.schedule.simulate import simulate
from tools.planner import others

LLAMA = {
    "vocab_size": 32000, "hidden_size": 2048, "layers": 8, "heads": 16, "intermediate_size": 5632,
}  # fmt: skip


def config(**sections: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": LLAMA, "data": {"sequence_length": 4096}, "parallel": {"weight": 8},
        "train": {"global_batch": 16, "dtype": "bfloat16"},
        "activation_checkpoint": {"mode": "full"},
    }  # fmt: skip
    for name, given in sections.items():
        values[name] = {**values.get(name, {}), **given}
    return on_device(Config.model_validate(values), device_named("h100-sxm"))


MIXED = {"family": "mixtral", "experts": 16, "top_k": 4, "intermediate_size": 1024, "heads": 16}


def test_seconds_of_experts_are_those_of_near_or_far_links_as_ranks_are_placed() -> None:
    device, found = device_named("h100-sxm"), []  # eight near ranks
    for near in ("expert_weight", "expert"):
        given = config(model=MIXED, parallel={
            "weight": 16, "expert": 8, "expert_weight": 2, "fast_links": near,
        })  # fmt: skip
        plan = make_plan(given, 16)
        load = workload_of(given, plan.shape)
        sent = messages(load, device, plan.chunk)["AG"]["layers.0.feed_forward.experts.down"]
        found.append((step_seconds(load, device).parts[Part.EXPERTS], sent))
    (far_tokens, near_weight), (near_tokens, far_weight) = found
    assert near_tokens < far_tokens / 2, "owners of one machine"
    assert near_weight < far_weight / 2, "shards of one machine"
    own = expected_owners(16, 4, 8)
    sends_each = replace(load, habits=replace(load.habits, once_an_owner=False))
    each = block_seconds(sends_each, device).experts[0] / block_seconds(load, device).experts[0]
    assert each == pytest.approx(4 / own, rel=0.01), "a token travels once to an owner"


def seconds_of(given: Config, ranks: int = 16) -> tuple[StepSeconds, StepSeconds, Plan]:
    """The closed form's seconds, the replay's, and the plan."""
    device = device_named("h100-sxm")
    given = on_machines(given, ranks, device)
    plan = make_plan(given, ranks)
    closed = step_seconds(workload_of(given, plan.shape), device)
    return closed, StepReplay(plan).on(device), plan


CASES: list[dict[str, dict[str, Any]]] = [
    {},
    {"parallel": {"weight": 16}},
    {"activation_checkpoint": {"mode": "none"}},
    {"activation_checkpoint": {"mode": "selective"}},
    {"train": {"global_batch": 64, "micro_batches": 4}},
    {"parallel": {"weight": 16, "sequence": 4}},
    {"weight_parallel": {"prefetch_depth": 2}},
]


@pytest.mark.parametrize("sections", CASES, ids=str)
def test_the_replay_has_the_actions_that_the_plan_prints(
    sections: dict[str, dict[str, Any]],
) -> None:
    given = config(**sections)
    plan = make_plan(given, 16)
    actions = simulate(plan.chunk, given.train.micro_batches, by=Computing).actions
    assert [a for a in actions if a.kind != GRADIENT] == plan.ranks[0].schedule.actions
    units = [*plan.chunk.blocks, *([plan.chunk.head] if plan.chunk.head else [])]
    own = [w.name for unit in units for w in unit.weights if w.trainable]
    gradients = [a.weight for a in actions if a.kind == GRADIENT]
    assert sorted(gradients) == sorted(own * given.train.micro_batches)


@pytest.mark.parametrize("sections", CASES, ids=str)
def test_the_closed_form_is_near_the_replay(sections: dict[str, dict[str, Any]]) -> None:
    closed, played, _ = seconds_of(config(**sections))
    # A small model, whose first gather in each micro-batch is much of the step.
    assert closed.total == pytest.approx(played.total, rel=0.025)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("micro_batches", [1, 5])
def test_a_few_micro_batches_stand_for_all(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"global_batch": 16 * micro_batches, "micro_batches": micro_batches}
    _, whole, plan = seconds_of(config(train=train, model={"layers": 12}))
    monkeypatch.setattr(replaying, "_FEW", 0)
    few = StepReplay(plan).on(device_named("h100-sxm"))
    assert few.total == pytest.approx(whole.total, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)]
)
def test_the_closed_form_of_a_pipeline_is_near_the_replay(schedule: str, chunks: int) -> None:
    given = config(
        parallel={"pipeline": 4, "weight": 4}, pipeline={"schedule": schedule, "chunks": chunks},
        train={"global_batch": 64, "micro_batches": 16},
    )  # fmt: skip
    shape, device = MeshShape(16, **given.degrees()), device_named("h100-sxm")
    load = workload_of(given, shape)
    closed = step_seconds(load, device)
    plan = make_plan(given, 16)
    parts = {one.stage: len(one.blocks) for rank in plan.ranks for one in rank.chunks}
    assert stage_blocks(load) == tuple(parts[stage] for stage in sorted(parts))
    # The first of four stages has three of eight blocks. The closed form has the order of 1F1B, in
    # which it computes forwards while it waits; GPipe is not searched.
    near = 0.05 if schedule == "GPipe" else 0.015
    assert replayed(given, 16, device).total == pytest.approx(closed.total, rel=near)
    assert closed.parts[Part.BUBBLE] > 0


def test_a_split_backward_idles_less_than_1f1b() -> None:
    idle = []
    for schedule, chunks in (("1F1B", 1), ("ZBVZeroBubble", 2)):
        given = config(
            parallel={"pipeline": 4, "weight": 4}, train={"global_batch": 64, "micro_batches": 16},
            pipeline={"schedule": schedule, "chunks": chunks},
        )  # fmt: skip
        idle.append(replayed(given, 16, device_named("h100-sxm")).parts[Part.BUBBLE])
    assert idle[1] < 0.7 * idle[0]


def test_a_block_waits_for_its_gather_and_computes_slower_beside_the_next_ones() -> None:
    """Two blocks, worked out by hand: one message of 1 s a block, and 3 s of computation."""
    given = config(model={"layers": 2}, activation_checkpoint={"mode": "none"})
    plan = make_plan(given, 16)
    chunk = plan.chunk
    actions = [a for a in simulate(chunk, by=Computing).actions if a.phase == "forward"]
    blocks = {unit.name: [w.name for w in unit.weights] for unit in chunk.blocks}
    units = {name: {"forward": (3.0, 0.0)} for name in blocks}
    gathers = {names[0]: 1.0 for names in blocks.values()}
    clocks = replay(chunk, actions, units, {"AG": gathers, "RS": {}, "EX": {}}, 1.0)
    # The first gather is in the open; the second starts at the first block's trigger and takes half
    # of a second of its computation.
    assert clocks.waited["AG"] == pytest.approx(1.0)
    assert clocks.slowed["AG"] == pytest.approx(0.5)
    assert clocks.now == pytest.approx(1.0 + 3.0 + 0.5 + 3.0)


def test_computation_beside_a_message_advances_at_a_lower_rate() -> None:
    assert beside(10.0, 4.0, 1.0) == pytest.approx(12.0)
    assert beside(1.0, 4.0, 1.0) == pytest.approx(4.0)
    assert beside(10.0, 0.0, 1.0) == pytest.approx(10.0)


def test_a_group_with_one_rank_a_domain_drives_one_adapter_and_one_with_all_drives_all() -> None:
    device = device_named("a100-80")
    nbytes = 1e9
    apart, together = Group(16, 8, device), Group(16, 1, device)
    rate = device.far * device.fitted.links
    assert apart.gather(nbytes) == pytest.approx(nbytes * 15 / 16 / rate, rel=0.01)
    assert 8 * device.far < device.near  # of a ring's parts all but one pass each of its links
    assert together.gather(nbytes) == pytest.approx(nbytes * 15 / 16 / (8 * rate), rel=0.02)
    assert Group(1, 1, device).gather(nbytes) == Group(1, 1, device).exchange(nbytes) == 0


def test_a_product_fills_waves_of_tiles_and_then_writes_its_result() -> None:
    device = device_named("a100-80")
    units, rate = device.multiprocessors, device.bandwidth * STREAMED
    peak = device.peak["bf16"] * device.fitted.products
    inner = 8192

    def seconds(tiles: float, depth: float = inner) -> float:
        return product(device, 256, 128 * tiles, depth, "bf16")

    writes = 256 * 128 * units * 2 / rate
    wave = 2 * 256 * 128 * units * inner / peak + 2e-6
    assert seconds(units) == pytest.approx(wave + writes)
    assert seconds(2 * units) == pytest.approx(2 * (wave + writes))
    # The last wave is idle but for a few tiles: half of its time others fill.
    assert 1.02 * wave < seconds(units + 1) - writes < 1.5 * wave
    assert seconds(10 * units + 2) == pytest.approx(10.5 * wave + 10 * writes, rel=0.01)
    # A quarter of a wave of tiles is cut into four parts each of the inner dimension.
    assert seconds(units // 4, 64 * inner) == pytest.approx(64 * wave / 4, rel=0.03)
    # With hardly any inner dimension it takes what its bytes take, and the waves' beginnings.
    assert seconds(100 * units, 1) == pytest.approx(100 * (writes + 2e-6), rel=0.1)


def test_owners_of_whole_parameters_send_each_its_own_and_nothing_runs_beside() -> None:
    device, model = device_named("a100-80"), ModelShape(4, 512, 2048, True, 8, 8, 64, 1000)
    assert model.tensors == 4 * 7 + 3
    load = Workload(model, Degrees(64, kind="zero1", replicas=64), 256, 1, 1)
    whole = replace(load, habits=Habits(owners=True))
    cut, owned = (WeightMessages.of(one, device) for one in (load, whole))
    group = Group(64, 1, device)
    assert owned.returned == pytest.approx(cut.returned + 30 * group.latency)
    few = replace(whole, degrees=replace(whole.degrees, optimizer=8))
    within = Group(8, 1, device)
    nbytes = 2 * (model.layers * model.dense_parameters + 2 * model.embedding)
    assert WeightMessages.of(few, device).returned == pytest.approx(
        within.gather(nbytes) + 7 * within.latency
    )
    gradients = group.all_reduce(2 * nbytes)  # in 32 bits
    assert owned.reduced == WeightMessages.of(few, device).reduced == pytest.approx(gradients)
    assert exposed_replicas(whole, owned, 10.0, 10.0, 0.0) == pytest.approx(owned.returned)
    assert exposed_replicas(load, cut, 10.0, 10.0, 0.0) == 0


@pytest.mark.parametrize("parts", [True, False])
def test_sums_of_gradients_of_cut_columns_run_beside_products(parts: bool) -> None:
    """By hand: of parts of sequences six messages a backward, else two all-reduces, four."""
    device = device_named("h100-sxm")
    model = ModelShape(1, 8192, 28672, True, 64, 64, 128, 32000)
    plain = Habits(tensor_sequence=parts)
    load = Workload(model, Degrees(4, tensor=4), 4096, 4, 1, habits=plain)
    beside_it = replace(load, habits=replace(plain, tensor_async=True))
    one = Group(4, 1, device).gather(load.tokens * 8192 * 2)
    alone = others.block_seconds(load, device)
    assert alone.tensor == pytest.approx((4 * one, (6 if parts else 4) * one))
    found = others.block_seconds(beside_it, device)
    assert found.hidden_tensor == pytest.approx((0, 4 * one))
    assert found.tensor == pytest.approx((4 * one, (2 if parts else 0) * one))
    # Over links a hundred times slower the products are over before the messages, and only they
    # can hide any: as much as they take beside them.
    far = replace(device, near=device.near / 100)
    late, slow = others.block_seconds(beside_it, far), 1 + device.fitted.slowdown
    assert sum(late.tensor) + sum(late.hidden_tensor) == pytest.approx(
        sum(others.block_seconds(load, far).tensor)
    )
    assert late.hidden_tensor[1] < late.backward.products * slow * (1 if parts else 0.5)


def draw(order: random.Random) -> Workload:
    heads, head = order.choice([4, 8, 16, 32, 64]), order.choice([64, 128])
    wide = heads * head
    experts = order.choice([(0, 0, 0), (0, 0, 0), (8, 2, wide)])
    model = ModelShape(
        order.choice([2, 4, 12, 24, 32, 80]), wide, order.choice([4, 3]) * wide,
        order.random() < 0.7, heads, order.choice([heads, heads // 4]), head,
        order.choice([257, 32000, 128256]), order.random() < 0.3, *experts,
    )  # fmt: skip

    def power(most: int) -> int:
        return 2 ** order.randint(0, most)

    tensor, stages, context, weight, copies = power(3), power(3), power(3), power(5), power(4)
    degrees = Degrees(
        tensor * stages * context * weight * copies, weight=weight, tensor=tensor,
        pipeline=stages, interleave=order.choice([1, 2]) if stages > 1 else 1, context=context,
        ring=order.choice([n for n in (1, 2, 4, 8) if context % n == 0]), replicas=copies,
        kind=order.choice(["zero3", "zero2", "zero1", "none"]),
        expert=min(weight, order.choice([1, 8])) if experts[0] else 1,
    )  # fmt: skip
    habits = Habits(
        order.choice(["eager", "kernels", "compiled"]),
        order.choice(["flash1", "flash2", "flash3", "unfused"]),
        owners=copies == 4, overlaps=order.random() < 0.8, tensor_overlap=order.random() < 0.5,
        tensor_async=order.random() < 0.5, tensor_sequence=order.random() < 0.5,
        keeps_gathers=order.random() < 0.3, collectives=order.choice([1, 7]),
        launches=order.choice([0.0, 0.0004]),
    )  # fmt: skip
    again = order.choice([Recompute(), Recompute(1, 1, 1), Recompute(0.5, 0, 0.5)])
    return Workload(
        model, degrees, order.choice([512, 2048, 8192, 65536]), order.choice([1, 2, 8]),
        order.choice([1, 2, 8, 64]), "bf16", again, habits,
        frozenset(order.choice([(), ("optimizer",), ("activations",)])),
    )  # fmt: skip


@pytest.mark.parametrize(
    "cases", [2_000, pytest.param(10_000, marks=pytest.mark.thorough(seconds=15))]
)
def test_seconds_of_any_step_are_finite_and_better_devices_are_never_slower(cases: int) -> None:
    order = random.Random(cases)
    known: list[Device] = list(devices().values())
    for _ in range(cases):
        load, device = draw(order), order.choice(known)
        found = others.step_seconds(load, device)
        assert all(math.isfinite(one) and one > 0 for one in found.parts.values()), load
        most = found.total * (1 + 1e-9)
        faster = replace(device, near=2 * device.near, far=2 * device.far)
        assert others.step_seconds(load, faster).total <= most
        better = replace(device, bandwidth=1.5 * device.bandwidth)
        assert others.step_seconds(load, better).total <= most, load
        twice = others.step_seconds(replace(load, micro_batches=2 * load.micro_batches), device)
        assert twice.compute >= 2 * found.compute * (1 - 1e-9)
        if load.degrees.devices == 1:
            assert found.messages == 0


def test_one_device_sends_nothing() -> None:
    given = config(parallel={"weight": 1})
    load = workload_of(given, MeshShape(1, **given.degrees()))
    found = step_seconds(load, device_named("a100-80"))
    assert found.messages == 0
    assert not {Part.GATHERS, Part.REDUCTIONS} & set(found.parts)


def screen_of(given: Config, ranks: int, device: Device | None) -> list[str]:
    out = io.StringIO()
    print_plan(given, ranks, Console(file=out, width=200), device=device)
    return out.getvalue().splitlines()


def test_the_first_screen_answers_in_the_order_of_the_questions() -> None:
    lines = screen_of(config(), 16, device_named("h100-sxm"))
    assert "parameters in 8 blocks" in lines[0]
    assert lines[1].startswith("fits: a rank needs ")
    assert lines[1].endswith("and h100-sxm has 79.2 GiB")
    assert lines[3].startswith("a step takes about ")
    assert "tokens/s a device" in lines[3]
    assert "MFU" in lines[3]
    assert "is bound by " in lines[4]
    assert " would save " in lines[5]
    assert any("Seconds of a step (predicted)" in line for line in lines)


def test_the_change_that_is_said_to_help_is_written_as_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = {"weight_parallel.compile": True, "weight_parallel.gather_before": "qkv"}
    monkeypatch.setattr(answer, "changes", lambda _: [both])
    monkeypatch.setattr(answer, "_WORTH", -1.0)
    found = answer.best_change(config(), MeshShape(16, **config().degrees()), device_named("h200"))
    assert found is not None
    assert found[0] == 'weight_parallel.compile = true, weight_parallel.gather_before = "qkv"'


@pytest.mark.thorough(1)
def test_the_change_that_is_said_to_help_is_taken_and_saves_as_much() -> None:
    given, device = config(), device_named("h100-sxm")
    line = screen_of(given, 16, device)[5]
    keys, _, share = line.partition(" would save ")
    name, _, value = keys.partition(" = ")
    other = changed(given, tomllib.loads(f"'{name}' = {value}"))
    assert other is not None
    shape, then = MeshShape(16, **given.degrees()), MeshShape(16, **other.degrees())
    before = step_seconds(workload_of(given, shape), device).total
    after = step_seconds(workload_of(other, then), device).total
    assert f"{1 - after / before:.0%}" == share


def test_a_step_that_leaves_less_than_a_tenth_free_is_warned_of() -> None:
    given = config()
    device = device_named("h100-sxm")
    needed = screen_of(given, 16, device)[1]
    assert "slower" not in needed
    small = replace(device, memory=1.05 * bytes_printed(needed))
    assert "steps become slower where less than 10% stays free" in screen_of(given, 16, small)[1]
    assert screen_of(given, 16, replace(device, memory=2**30))[1].startswith("does NOT fit")


def bytes_printed(line: str) -> float:
    return float(line.split(" GiB")[0].rsplit(" ", 1)[1]) * 2**30


def test_a_device_of_ones_own_is_read_and_mistakes_in_it_are_told(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    mine_text = (
        '[mine]\nsource = "measured"\npeak = { bf16 = 100 }\nmemory_gib = 40\n'
        "bandwidth_GBps = 1000\nmultiprocessors = 80\nnear_GBps = 50\nnear_ranks = 4\n"
        "far_Gbps = 100\nattention = { flash2 = [40, 30, 50, 40] }\nfitted = { like = 'a100-80' }\n"
    )
    path.write_text(mine_text)
    mine = device_named("mine", path)
    assert (mine.peak["bf16"], mine.near_ranks) == (1e14, 4)
    assert mine.fitted == device_named("a100-80").fitted
    wide = Config.model_validate({"train": {"dtype": "float64"}})
    with pytest.raises(ConfigError, match="--device mine: it has no peak of fp64; set train"):
        on_device(wide, mine)
    for key, value in ("host_GBps", "0"), ("far_Gbps", "-1"), ("hop_us", "nan"):
        kept = [line for line in mine_text.splitlines() if not line.startswith(key)]
        path.write_text("\n".join([*kept, f"{key} = {value}"]))
        with pytest.raises(ConfigError, match=f"mine: {key} = .* is not above 0"):
            device_named("mine", path)
    lacking = "[mine]\npeak = { bf16 = 100 }\n", r"\[mine\] has no 'fitted'"
    strange = mine_text.replace("a100-80", "tpu"), "mine: fitted.like = 'tpu' is no device"
    for text, wrong in lacking, strange, ("mine = 1", ""):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"{wrong}.*; write each device as in devices\.toml"):
            device_named("mine", path)
    with pytest.raises(ConfigError, match="--device tpu: unknown; there are a100-40"):
        device_named("tpu")
    with pytest.raises(ConfigError, match="--device-file"):
        device_named("a100-80", tmp_path / "none.toml")


def test_the_host_launches_the_ends_as_a_block_and_a_loss_of_more_passes_takes_longer() -> None:
    model = ModelShape(2, 64, 256, False, 4, 4, 16, 257)
    device, quick = device_named("a100-80"), Habits(launches=0.0)
    load = Workload(model, Degrees(1), 128, 1, 1, habits=quick)
    assert sum(ends(load, device)) < 1e-4
    slow = replace(load, habits=replace(quick, launches=0.001))
    assert sum(ends(slow, device)) == pytest.approx(0.0026)
    wide = replace(load, model=replace(model, vocab=128256), sequence=8192)
    longer = replace(wide, habits=replace(quick, loss=(38, 14)))  # of 30 bytes in eager mode
    more = 22 * 8192 * 128256 / (device.bandwidth * STREAMED)
    assert sum(ends(longer, device)) - sum(ends(wide, device)) == pytest.approx(more)


def test_tensor_ranks_send_rows_of_embedding_and_head_and_numbers_of_the_loss() -> None:
    model = ModelShape(4, 4096, 16384, False, 32, 32, 128, 51200)
    device = device_named("h100-sxm")
    whole = Workload(model, Degrees(4, tensor=4), 4096, 1, 8, habits=Habits())
    group = Group(4, 1, device)
    one, loss = group.gather(4096 * 4096 * 2), 3 * group.all_reduce(4096 * 4)
    quick = replace(device, near=1e18, far=1e18)
    told = {True: ((2, 1), (1, 0)), False: ((2, 0), (0, 0))}  # parts of sequences: stages: forward
    for parts, expected in told.items():
        for stages, (forward, backward) in zip((1, 2), expected, strict=True):
            degrees = Degrees(4 * stages, tensor=4, pipeline=stages)
            load = replace(whole, degrees=degrees, habits=Habits(tensor_sequence=parts))
            both = others.ends(load, device), others.ends(load, quick)
            sent = tuple(a - b for a, b in zip(*both, strict=True))
            idle = Group(4, 1, quick).latency
            assert sent[0] == pytest.approx(forward * (one - idle) + loss - 6 * idle)
            assert sent[1] == pytest.approx(backward * (one - idle))
    alone = replace(whole, degrees=Degrees(1))
    assert others.ends(alone, device) == others.ends(alone, quick)


def test_messages_of_traced_parts_come_after_launches_and_leave_the_near_domain() -> None:
    model = ModelShape(4, 64, 256, False, 4, 4, 16, 256)
    device = device_named("a100-80")
    plain = Habits(launches=0.01, tensor_sequence=False)
    load = Workload(model, Degrees(4, tensor=2, pipeline=2), 128, 1, 3, habits=plain)
    block = others.block_seconds(load, device)
    assert paces(load, block) == pytest.approx((0.01, 0.016))
    traced = replace(load, habits=replace(plain, traced=True, launches_behind=0.45))
    assert paces(traced, block) == pytest.approx((0.01 + block.tensor[0], 0.0045 + block.tensor[1]))
    on_host = paces(load, replace(block, on_host=True))  # which computes when it has launched
    assert on_host == pytest.approx((0.01 + block.at(0), 0.016 + block.at(1)))
    assert block_seconds(load, device_named("cpu")).on_host
    assert not block.on_host
    assert sum(others.ends(traced, device)) == pytest.approx(0.0145)
    passed = Computed.of(traced, device, block, others.ends(traced, device)).passed
    one_way = 128 * 64 * 2 / (device.far * device.fitted.links) + FAR_HOP  # not its half
    assert passed == pytest.approx(2 * one_way * (1 + 3))


def test_more_passes_move_their_bytes_and_tensor_ranks_divide_some() -> None:
    model = ModelShape(4, 64, 256, False, 4, 4, 16, 256)
    device = device_named("a100-80")
    plain = Habits(tensor_sequence=False)
    load = Workload(model, Degrees(2, tensor=2), 128, 1, 1, habits=plain)
    more = replace(load, habits=replace(plain, passes=(12, 24), cut_passes=(4, 30)))
    found = (b - a for a, b in zip(passes(load, device), passes(more, device), strict=True))
    each = 128 * 64 / (device.bandwidth * STREAMED)
    assert list(found) == pytest.approx([each * (12 + 2), each * (24 + 15)])


def test_sums_of_experts_copies_have_their_own_ranks_and_come_once_a_step() -> None:
    """By hand: after the last backward only; experts of eight owners have 2 copies, others 4."""
    device = device_named("h100-sxm")
    seconds = []
    for number in (1, 4):
        given = config(
            model={**MIXED, "layers": 4}, parallel={"weight": 4, "expert": 8, "expert_weight": 1},
            train={"global_batch": 16 * number, "micro_batches": number},
        )  # fmt: skip
        plan = make_plan(given, 16)
        load = workload_of(given, plan.shape)
        sent = messages(load, device, plan.chunk)["EX"]
        parcels = [one for one in plan.chunk.parcels if one.name == "layers.2"]
        own = {bool(one.weights[0].expert): one.nbytes for one in parcels}
        experts, others = Group(2, 8, device), Group(4, 4, device)
        both = experts.all_reduce(own[True], True) + others.all_reduce(own[False], True)
        assert sent["layers.2"] == pytest.approx(both / 2)
        assert WeightMessages.of(load, device).copies == pytest.approx(both, rel=0.01)
        seconds.append(step_seconds(load, device).parts[Part.REDUCTIONS])
    assert seconds[1] < 2 * seconds[0], "not in each of four micro-batches"
