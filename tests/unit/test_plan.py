"""``internsp plan``: figures checked by hand, and the printed text."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from internsp.app.config import Config, sections
from internsp.app.config.tiles import tile_count
from internsp.app.models.factory import build_model
from internsp.app.plan import screen
from internsp.app.plan.devices import device_named
from internsp.app.plan.longest import MemoryBudget
from internsp.app.plan.rank import RankPlan
from internsp.app.plan.screen import block_lines, listing, print_plan
from internsp.app.plan.step import make_plan
from internsp.base.sizes import human
from internsp.errors import ConfigError, StructureError
from tests.support.sections import mesh_sections


def config(**changes: dict[str, object]) -> Config:
    sections: dict[str, dict[str, object]] = {
        "model": {
            "vocab_size": 272, "hidden_size": 16, "layers": 4, "heads": 2, "intermediate_size": 48,
        },
        "data": {"sequence_length": 32},
        "parallel": {"weight": 2, "sequence": 2},
        "weight_parallel": {"min_shard_elements": 64},
    }  # fmt: skip
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


def alone(settings: Config, ranks: int) -> RankPlan:
    """The step of a rank without a pipeline."""
    (rank,) = make_plan(settings, ranks).ranks
    return rank


BLOCK = (4 * 16 * 16 + 3 * 16 * 48) * 4  # bytes of a block's unsharded weights in fp32
TABLE = 272 * 16 * 4


def test_bytes_of_collectives_follow_the_law_of_reused_boundaries() -> None:
    schedule = alone(config(), 2).schedule
    layers = 4
    # Each block is gathered twice except the last two, which are still in their slots; embedding
    # and head once. A rank receives half of every weight.
    assert schedule.nbytes("AG") == ((2 * layers - 2) * BLOCK + 2 * TABLE) // 2
    assert schedule.nbytes("RS") == (layers * BLOCK + 2 * TABLE) // 2
    assert schedule.count("AG") == (2 * layers - 2) * 7 + 2


def test_micro_batches_reuse_the_blocks_that_are_still_in_their_slots() -> None:
    once = alone(config(), 2).schedule
    thrice = alone(config(train={"micro_batches": 3, "global_batch": 6}), 2).schedule
    # Blocks 0 and 1, the embedding and the head are still there when a micro-batch begins.
    again = (2 * 4 - 4) * BLOCK // 2
    assert thrice.nbytes("AG") == once.nbytes("AG") + 2 * again
    assert thrice.nbytes("RS") == 3 * once.nbytes("RS")


def test_memory_is_counted_by_component() -> None:
    memory = alone(config(), 2).memory
    assert memory["unsharded weights (slots, exact)"] == 2 * BLOCK + 2 * TABLE
    assert memory["weight shards"] == (4 * BLOCK + 2 * TABLE) // 2
    small = 9 * 16 * 4
    assert memory["replicated parameters"] == small
    assert memory["gradient sums"] == memory["weight shards"] + small
    assert memory["optimizer state"] == 2 * (memory["weight shards"] + small)
    half = alone(config(train={"dtype": "bfloat16"}), 2).memory
    assert half["unsharded weights (slots, exact)"] == BLOCK + TABLE
    assert half["optimizer state"] == 3 * memory["optimizer state"] // 2  # and fp32 masters


def test_full_accumulation_costs_every_whole_gradient_and_reduces_once() -> None:
    def plan(accumulation: str, micro_batches: int, dtype: str = "float32") -> RankPlan:
        train = {"micro_batches": micro_batches, "global_batch": 6, "dtype": dtype}
        return alone(config(train=train, weight_parallel={
            "min_shard_elements": 64, "accumulation": accumulation,
        }), 2)  # fmt: skip

    name = "unsharded gradient sums (full accumulation)"
    once, full = plan("full", 1), plan("full", 3)
    assert full.schedule.nbytes("RS") == once.schedule.nbytes("RS")
    assert full.schedule.count("RS") == once.schedule.count("RS")
    assert full.schedule.nbytes("AG") == plan("sharded", 3).schedule.nbytes("AG")
    assert plan("sharded", 3).schedule.nbytes("RS") == 3 * once.schedule.nbytes("RS")
    whole = 4 * BLOCK + 2 * TABLE
    assert full.memory[name] == plan("full", 3, "bfloat16").memory[name] == whole
    assert once.memory[name] == plan("sharded", 3).memory[name] == 0


def test_zero_cuts_the_optimizer_state_over_the_replicas() -> None:
    whole = alone(config(), 2).memory["optimizer state"]
    assert alone(config(), 8).memory["optimizer state"] == whole // 4
    part = config(parallel={"weight": 2, "sequence": 2, "optimizer_ranks": 2})
    assert alone(part, 8).memory["optimizer state"] == whole // 2


def test_experts_are_planned_over_their_own_groups() -> None:
    """Here the feed-forward layers are experts: sharded over 4 ranks, all others over 2."""
    changes: dict[str, dict[str, object]] = {
        "parallel": {"weight": 2, "sequence": 2, "expert_weight": 4},
        "weight_parallel": {"min_shard_elements": 64, "expert_parameters": ["feed_forward"]},
    }
    plan = alone(config(**changes), 8)
    dense, experts = 4 * 16 * 16 * 4, 3 * 16 * 48 * 4  # bytes of a block
    assert plan.schedule.nbytes("AG") == 6 * (dense // 2 + experts * 3 // 4) + 2 * TABLE // 2
    assert plan.schedule.nbytes("RS") == 4 * (dense // 2 + experts * 3 // 4) + 2 * TABLE // 2
    memory = plan.memory
    shards = (4 * dense + 2 * TABLE) // 2, 4 * experts // 4
    small = 9 * 16 * 4
    assert memory["weight shards"] == sum(shards)
    assert memory["unsharded weights (slots, exact)"] == 2 * BLOCK + 2 * TABLE
    # Four replicas of a dense shard, two of an expert's; adamw has two moments.
    assert memory["optimizer state"] == 2 * ((shards[0] + small) // 4 + shards[1] // 2)
    two_largest = TABLE + max(BLOCK, TABLE)
    assert memory["reductions in flight (at most)"] == 2 * two_largest
    text = everything(config(**changes), 8)
    assert "on 8 ranks: data 4, sequence 2, weight 2, zero 4, expert weight 4" in text
    assert "of it experts, over 4 ranks" in text
    rows = [line for line in text.splitlines() if line.strip("│ ").startswith("6 ")]
    places = [" ".join(row.replace("│", " ").split()) for row in rows]
    assert places == ["6 0 3 0 3 3 0", "6 1 1 0 2"]


@pytest.mark.parametrize("pipeline", [1, 2], ids=["no pipeline", "a pipeline"])
def test_an_axis_for_experts_and_a_model_without_any_is_refused(pipeline: int) -> None:
    experts = {"expert_weight": 4, "pipeline": pipeline}
    wrong = config(parallel=experts, train={"micro_batches": 2})
    with pytest.raises(StructureError, match=r"candidates: .*layers\.\*\.feed_forward\.w1"):
        print_plan(wrong, 4 * pipeline, Console(file=io.StringIO()))


def test_impossible_degrees_are_all_told_before_anything_is_built() -> None:
    with pytest.raises(ConfigError) as refused:
        alone(config(parallel={"weight": 3, "sequence": 5}), 8)
    assert "weight" in str(refused.value)
    assert "sequence" in str(refused.value)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_plan_needs_no_file_of_the_data_nor_the_checkpoint(pipeline: int) -> None:
    """As a run's page, which is made when these may be gone."""
    gone = config(
        data={"source": "text", "paths": ["gone.txt"]}, checkpoint={"resume": "gone"},
        parallel={"pipeline": pipeline}, train={"micro_batches": 2},
    )  # fmt: skip
    assert len(gone.check(4 * pipeline)) == 2
    assert make_plan(gone, 4 * pipeline).parameters


def everything(settings: Config, world: int) -> str:
    """What the command prints, and what it writes with ``--schedule``."""
    out = io.StringIO()
    print_plan(settings, world, Console(file=out, width=200, soft_wrap=True))
    return out.getvalue() + listing(make_plan(settings, world))


def test_the_screen_says_whether_it_fits_and_the_file_has_every_action(tmp_path: Path) -> None:
    out, file = io.StringIO(), tmp_path / "schedule.txt"
    settings = config()
    print_plan(settings, 4, Console(file=out, width=120, soft_wrap=True), schedule=file)
    screen, text = out.getvalue(), file.read_text()
    assert len(screen.splitlines()) < 50
    plan = alone(settings, 4)
    count = sum(p.numel() for p in build_model(settings).parameters())
    assert screen.startswith(f"{count:,} parameters in 4 blocks, on 4 ranks: data 2, sequence 2")
    needed = sum(size for _, size in MemoryBudget(settings, 4).at(32)[0])
    assert needed > sum(plan.memory.values()), "activations are in it"
    assert f"fits: a rank needs {human(needed)}, and this machine has " in screen
    assert str(file) in screen
    assert "Mesh of 4 ranks" in text
    for action in plan.schedule.actions:
        assert action.weight in text
    assert f"({len(plan.schedule.actions)} actions a rank)" in text
    assert text.count("\n  AG ") == plan.schedule.count("AG")


@pytest.mark.parametrize("pipeline", [1, 2], ids=["no pipeline", "a pipeline"])
def test_it_says_how_gradients_are_summed_between_machines_and_the_other_way(pipeline: int) -> None:
    device, texts = device_named("h100-sxm"), {}
    for asked in ("auto", 0, 8, "backend"):
        settings = config(
            model={"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192},
            parallel={"weight": 32 // pipeline, "sequence": 1, "pipeline": pipeline},
            weight_parallel={"reduce": asked},
            train={"micro_batches": pipeline, "global_batch": 32},
        )  # fmt: skip
        out = io.StringIO()
        print_plan(settings, 32, Console(file=out, width=300), device=device)
        texts[asked] = out.getvalue()
    assert texts["auto"] == texts[8]
    line = next(line for line in texts[8].splitlines() if "from other machines" in line)
    other = next(line for line in texts[0].splitlines() if "from other machines" in line)
    third = next(line for line in texts["backend"].splitlines() if "from other machines" in line)
    size, key = 32 // pipeline, "weight_parallel.reduce"
    found = r"in two levels (.*); at once (.*) \(.* = 0\), in a ring over all adapters (.*) \(.*\)"
    levels, at_once, ring = re.findall(found, line)[0]
    assert f"at once {at_once}; in two levels {levels} ({key} = 8), in a ring" in other
    assert line.endswith(f'({key} = "backend")')
    assert f"in a ring over all adapters {ring}; in two levels {levels} ({key} = 8), at" in third
    block, table = 4 * (4 * 64 * 64 + 3 * 64 * 192), 4 * 512 * 64
    whole = (4 * block + 2 * table) // pipeline
    assert levels == human((size // 8 - 1) * whole // size)
    assert at_once == human((size - 8) * whole // size)
    assert ring == human((size - 1) * whole // size // 8)
    out = io.StringIO()
    print_plan(config(train={"global_batch": 32}), 32, Console(file=out, width=300), device=device)
    assert "from other machines" not in out.getvalue()  # a weight group of two is on one


@pytest.mark.parametrize("near", ["heads", "ring"])
@pytest.mark.parametrize("pipeline", [1, 2], ids=["no pipeline", "a pipeline"])
def test_who_is_near_is_printed_and_what_each_kind_of_ranks_sends(near: str, pipeline: int) -> None:
    axes = mesh_sections(sequence=4, ring=2, fast_links=near, pipeline=pipeline)
    settings = config(**axes, train={"global_batch": 4, "micro_batches": 2})
    text = everything(settings, 4 * pipeline)
    assert f"Sequence of 4 ranks = heads 2 x ring 2, the ranks of the {near} near." in text
    rows = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    second = "1 0 0 1 0 1" if near == "heads" else "1 0 0 1 1 0"  # its ring rank, that of heads
    assert any(row.startswith(second) for row in rows)
    blocks = [4]
    if pipeline > 1:
        planned = make_plan(settings, 4 * pipeline).ranks
        blocks = [sum(len(chunk.blocks) for chunk in rank.chunks) for rank in planned]
    # Four rows' quarter of 32 positions, two heads of q, k, v and out, half of it to the other.
    heads = 2 * (4 * 8) * (4 * 2 * 8) * 4 // 2
    # Of a zigzag of two the second's 16 positions go to the first in forward and in backward, and
    # as many gradients home: of one key/value head.
    ring = 3 * (4 * 16) * (2 * 8) * 4
    where = {"heads": "far", "ring": "far", near: "near"}
    for name, kind, nbytes in (
        ("heads", "all-to-alls of heads, {} ranks", heads),
        ("ring", "keys and values around a ring, {} ranks (busiest rank sends)", ring),
    ):
        told = [row for row in rows if kind.format(where[name]) in row]
        for row, number in zip(told, blocks, strict=True):
            assert human(number * nbytes) in row


WAYS: dict[str, tuple[dict[str, dict[str, object]], str]] = {
    "linear projections": ({}, "heads in parts; on the first rank:"),
    "fused": ({"model": {"family": "internlm2"}}, "in parts (the fused projection as a whole)"),
    "switched off": (
        {"sequence": {"exchange_in_parts": False}}, "exchange_in_parts = false"
    ),
    "on a device": ({"parallel": {"device": "cuda"}}, "on the host only, not on cuda"),
    "compiled": (
        {"weight_parallel": {"compile": True, "gather_before": "qkv"}},
        "as a whole, in all-to-alls: bl",
    ),
    "split backward": (
        {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "ZBVZeroBubble", "chunks": 2},
         "train": {"global_batch": 4, "micro_batches": 4}},
        "stages whose backward is in two parts: as a whole",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_it_says_how_each_blocks_attention_exchanges_heads(name: str) -> None:
    changes, told = WAYS[name]
    parallel = {"sequence": 2, "device": "cpu"} | changes.get("parallel", {})
    settings = config(**{**changes, "parallel": parallel})
    text = everything(settings, 2 * settings.parallel.pipeline)
    assert told in text
    ordered = (
        "output gradient: RECEIVE out from 1, COMPUTE out for 1, SEND out to 1, PREPOST out, OWN"
    )
    in_parts = name in ("linear projections", "fused", "split backward")
    assert (ordered in text) == in_parts


@pytest.mark.thorough(1)
def test_no_exchange_is_told_of_where_every_rank_has_all_heads() -> None:
    assert "exchanges heads" not in everything(config(parallel={"sequence": 1}), 2)


def test_the_way_of_a_blocks_weights_is_that_of_the_schedule() -> None:
    plan = alone(config(weight_parallel={"min_shard_elements": 64, "coalesce_bytes": 0}), 2)
    first, *lines = block_lines(plan.chunks[0].plan, plan.schedule)
    assert first == "The weights of layers.1 in a step:"
    told = [" ".join(line.split()) for line in lines]
    block = human(BLOCK // 2)
    assert told[0] == f"forward weight gather while layers.0 runs, {block} in 7 collectives"
    assert f"backward weight gather while layers.3 runs, {block} in 7 collectives" in told
    assert f"backward gradient reduction, {block} in 7 collectives" in told
    assert told.index("forward use") < told.index("backward use")


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("granularity", ["block", "module"])
def test_the_lines_of_a_blocks_weights_add_up_to_what_it_gathers(
    granularity: str, micro_batches: int
) -> None:
    weights = {"min_shard_elements": 64, "coalesce_bytes": 0, "granularity": granularity}
    train = {"micro_batches": micro_batches, "global_batch": 6}
    plan = alone(config(weight_parallel=weights, train=train), 2)
    _, *lines = block_lines(plan.chunks[0].plan, plan.schedule)
    told = [re.findall(r"(\d+) collectives", line)[0] for line in lines if "weight gather" in line]
    own = {weight.name for weight in plan.chunks[0].plan.blocks[1].weights}
    gathers = [a for a in plan.schedule.actions if a.kind == "AG" and a.weight in own]
    assert sum(map(int, told)) == len(gathers)


def test_on_the_host_what_is_offloaded_needs_the_same_memory() -> None:
    again = {"mode": "full", "offload": "all"}
    ranks = {"parallel": {"device": "cpu"}, "launch": {"processes": 4}}
    settings = config(activation_checkpoint=again, **ranks)
    here, there = MemoryBudget(settings, 4).at(32)
    assert there
    needed = sum(size for _, size in (*here, *there))
    told = everything(settings, 4)
    assert f"fits: a rank needs {human(needed)}, and this machine has " in told
    assert " for each of 4 ranks" in told
    on_a_device = everything(config(activation_checkpoint=again, parallel={"device": "cuda"}), 4)
    assert re.search(r"a rank needs .* of its device; and .* of host memory", on_a_device)


def test_what_makes_a_step_smaller_are_keys_of_the_configuration() -> None:
    known = {f"{name}.{key}" for name, cls in sections().items() for key in cls.model_fields}
    named = re.findall(r"\b[a-z_]+\.[a-z_]+\b", " ".join(screen.LEVERS.values()))
    assert len(named) >= 9
    assert set(named) <= known


@pytest.mark.thorough(1)
def test_a_step_that_does_not_fit_says_so_and_what_takes_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(screen, "_memory_here", lambda settings: 1000)
    text = everything(config(), 4)
    assert "does NOT fit: a rank needs " in text
    assert re.search(r"\d+% of it are .*\. Less: ", text)


def test_a_step_of_so_many_tokens_is_planned_for_some_and_sums_over_several() -> None:
    train = {"batch_tokens": 32768, "micro_batches": 1}
    out = io.StringIO()
    print_plan(config(train=train), 4, Console(file=out, width=120, soft_wrap=True))
    assert "as many micro-batches as 32,768 tokens need (train.batch_tokens)" in out.getvalue()
    full = {"accumulation": "full"}
    for tokens, summed in ((32768, True), (0, False)):
        settings = config(train=train | {"batch_tokens": tokens}, weight_parallel=full)
        memory = alone(settings, 4).memory
        assert (memory["unsharded gradient sums (full accumulation)"] > 0) == summed


@pytest.mark.thorough(1)
def test_kept_blocks_save_the_gathers_and_cost_the_memory_that_the_plan_prints() -> None:
    two = config(weight_parallel={"min_shard_elements": 64, "keep_unsharded": 2})
    plan, usual = alone(two, 2), alone(config(), 2)
    assert plan.chunks[0].plan.policy.kept == {0, 2}
    # Blocks 1 and 3 move and have two slots: all four are unsharded when backward begins.
    assert plan.schedule.nbytes("AG") == usual.schedule.nbytes("AG") - 2 * BLOCK // 2
    whole = "unsharded weights (slots, exact)"
    assert plan.memory[whole] == usual.memory[whole] + 2 * BLOCK
    out = io.StringIO()
    print_plan(two, 4, Console(file=out, width=160))
    assert (
        f"2 blocks stay unsharded (layers.0, layers.2): {human(2 * BLOCK)} more unsharded weights, "
        "and no gather of them in backward"
    ) in out.getvalue()
    by_memory = {"min_shard_elements": 64, "keep_unsharded": f"{2 * BLOCK - 1} B"}
    assert alone(config(weight_parallel=by_memory), 2).chunks[0].plan.policy.kept == {1}


def test_quantizing_changes_what_gathers_carry_and_takes_the_memory_that_is_stated() -> None:
    large = {"min_shard_elements": 64, "coalesce_bytes": 0}
    usual = alone(config(weight_parallel=large), 2)
    exact = {"match": ["**.attention"], "quantize": "none"}  # others: w1, w2, w3, 16 x 48
    options = {**large, "quantize": "int8", "rules": [exact]}
    plan = alone(config(weight_parallel=options), 2)
    shard = 3 * (128 + 4) + 4  # half of 768 elements, a scale for 128, to a multiple of 16 bytes
    times = 2 * 4 - 2
    saved = times * 3 * (384 * 4 - shard)
    assert plan.schedule.nbytes("AG") == usual.schedule.nbytes("AG") - saved
    assert plan.schedule.nbytes("RS") == usual.schedule.nbytes("RS")
    assert plan.schedule.lines() == usual.schedule.lines()
    memory = plan.memory
    # Two blocks' gathers are in flight at once at most, each sent (1) and received (2), and
    # 3 x 128 elements of scratch with two times 3 for the scales, in fp32.
    assert memory.pop("quantized shards in flight (exact)") == 6 * 3 * shard + (384 + 6) * 4
    assert memory == usual.memory


def test_bytes_read_well() -> None:
    assert [human(n) for n in (0, 9_999, 10_240, 5 * 2**20, 3 * 2**40, 5_000 * 2**40)] == [
        "0 B", "9999 B", "10.0 KiB", "5.0 MiB", "3.0 TiB", "5000.0 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "pattern", "told"),
    [
        ("blocks", "layer.*", "weight_parallel.blocks: 'layer.*' matches no"),
        ("gather_before_modules", "attention.woo", "did you mean 'attention.wo'?"),
        ("expert_parameters", "expert",
         "weight_parallel.expert_parameters: 'expert' matches no parameter"),
    ],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_pattern_that_matches_nothing_is_refused_before_anything_runs(
    stages: int, key: str, pattern: str, told: str
) -> None:
    settings = config(
        weight_parallel={"min_shard_elements": 64, key: [pattern]},
        parallel={"pipeline": stages},
        train={"micro_batches": 2, "global_batch": 4},
    )
    with pytest.raises(StructureError) as raised:
        print_plan(settings, 2 * stages, Console(file=io.StringIO()))
    assert told in str(raised.value)


def test_a_pipelines_blocks_are_all_of_the_models_layers() -> None:
    def planned(*blocks: str) -> None:
        settings = config(
            weight_parallel={"blocks": blocks},
            parallel={"pipeline": 2},
            train={"micro_batches": 2, "global_batch": 4},
        )
        print_plan(settings, 4, Console(file=io.StringIO()))

    planned("layers.*")
    planned("layers.{0-1}", "layers.{2-3}")
    with pytest.raises(StructureError, match=r"leaves out some of layers\.0 to layers\.3"):
        planned("layers.{0-2}")


@pytest.mark.parametrize(("length", "tiles"), [(32, 1), (4094, 1), (4096, 2), (1 << 17, 64)])
def test_the_plan_tiles_sequences_from_a_length_on(length: int, tiles: int) -> None:
    chosen = config(data={"sequence_length": length}, activation_checkpoint={"tiles": "auto"})
    assert tile_count(chosen.model_copy(update={"train": chosen.train.model_copy(
        update={"global_batch": 1})}), 1) == tiles  # fmt: skip
    given = config(data={"sequence_length": length}, activation_checkpoint={"tiles": 3})
    assert tile_count(given, 1) == 3
