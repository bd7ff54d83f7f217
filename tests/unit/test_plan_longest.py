"""``internsp plan --longest``: memory of activations, and the longest sequence that fits."""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import internsp
from internsp.app.config import Config
from internsp.app.plan import live
from internsp.app.plan.activations import ActivationModel, exchange_rows
from internsp.app.plan.in_flight import BUFFERS
from internsp.app.plan.live import Outputs
from internsp.app.plan.longest import MemoryBudget, print_longest
from internsp.app.plan.observe import ModelPart, Observations
from internsp.app.plan.offloaded import AT_STEP, HOSTED, STEPPING
from internsp.app.process.stop import StopRequest
from internsp.app.train.step import StepRunner
from internsp.base.host import ACTIVATIONS, OPTIMIZER, pinned_bytes
from internsp.errors import ConfigError
from internsp.mesh import MeshShape
from tests.support.alive import Alive
from tests.support.few import some
from tests.support.sections import mesh_sections

MIB = 1 << 20


def config(again: dict[str, Any] | None = None, **changes: dict[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "vocab_size": 272, "hidden_size": 64, "layers": 5, "heads": 4,
            "intermediate_size": 192,
        },
        "data": {"sequence_length": 512},
        "train": {"global_batch": 1, "micro_batches": 1},
        "activation_checkpoint": again or {},
    }  # fmt: skip
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


def whole(settings: Config, ranks: int = 1) -> ActivationModel:
    """That of a step without a pipeline."""
    (model,) = MemoryBudget(settings, ranks).activations.models.values()
    return model


@pytest.mark.parametrize(
    "again",
    [
        {"mode": "none"}, {"mode": "full"}, {"mode": "full", "fraction": 0.6, "tiles": 2},
        {"mode": "selective", "offload": "all"},
        # Each of their settings is in one of those above.
        *(pytest.param(again, marks=pytest.mark.thorough(5)) for again in (
            {"mode": "none", "tiles": 4}, {"mode": "selective"}, {"mode": "full", "offload": 4},
        )),
    ],
    ids=["kept", "full", "some in tiles", "all offload", "kept, tiles", "selective", "offload"],
)  # fmt: skip
def test_a_long_step_of_all_blocks_takes_what_a_line_through_short_ones_of_few_says(
    again: dict[str, Any],
) -> None:
    settings, length = config(again), 4096
    planned = whole(settings).at(length)
    mode, layers = settings.activation_checkpoint, settings.model.layers
    recomputing = len(mode.selected(layers))
    tiles = mode.tiles if isinstance(mode.tiles, int) else 1
    offload = mode.offload if recomputing else None
    step = Observations().of(settings, 1, length, tiles, layers, recomputing, offload or None)
    peak = planned.kept + planned.working
    assert planned.kept == pytest.approx(step.kept, rel=0.01)
    if 0 < recomputing < layers:  # kept activations are freed before the last recompute
        assert step.peak <= peak * 1.01
    else:
        assert peak == pytest.approx(step.peak, rel=0.01)
    assert planned.host == pytest.approx(sum(step.host), rel=0.01)


@pytest.mark.parametrize(
    "again",
    [
        pytest.param({"mode": "full"}, marks=pytest.mark.thorough(4)),
        {"mode": "full", "fraction": 0.6, "tiles": 2, "offload": 2},
    ],
    ids=["full", "some in tiles, offload"],
)  # fmt: skip
def test_models_of_transformers_are_planned_by_their_own_code(
    again: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    transformers.LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=8192,
    ).save_pretrained(tmp_path)
    model = {"family": "hf", "path": str(tmp_path)}
    settings = config(again, model=model, train={"loss_chunk": 256})
    settings = Config.model_validate({**settings.model_dump(exclude_unset=True), "model": model})
    mode, length = settings.activation_checkpoint, 4096
    planned = whole(settings).at(length)
    recomputing = len(mode.selected(5))
    tiles = mode.tiles if isinstance(mode.tiles, int) else 1
    step = Observations().of(settings, 1, length, tiles, 5, recomputing, mode.offload or None)
    assert planned.kept == pytest.approx(step.kept, rel=0.01)
    assert step.peak <= (planned.kept + planned.working) * 1.01
    assert planned.host == pytest.approx(sum(step.host), rel=0.01)


@pytest.mark.thorough(3)
def test_the_longest_sequence_fits_and_one_token_a_rank_more_does_not() -> None:
    budget = MemoryBudget(config({"mode": "full"}, parallel={"sequence": 2}), 2)
    memory = 64 * MIB
    found = budget.longest(memory)
    assert found.length > 1000
    assert found.length % 2 == 0
    fits, more = (
        sum(n for _, n in budget.at(length)[0]) for length in (found.length, found.length + 2)
    )
    assert fits <= memory < more
    assert sum(n for _, n in found.memory) == fits
    assert found.bound in dict(found.memory)
    assert budget.longest(2 * memory).length > 1.8 * found.length
    assert budget.longest(1000).length == 0


def test_host_memory_bounds_what_is_offloaded() -> None:
    budget = MemoryBudget(config({"mode": "full", "offload": "all"}), 1)
    free = budget.longest(64 * MIB)
    bound = budget.longest(64 * MIB, 2 * MIB)
    assert 0 < bound.length < free.length
    assert sum(n for _, n in bound.host) <= 2 * MIB < sum(n for _, n in free.host)
    assert bound.bound == bound.host[-1][0]


@pytest.mark.parametrize(("stages", "dense", "again", "split"), [
    (2, 1, {"mode": "none"}, {}), (1, 2, {"mode": "full", "fraction": 0.5}, {}),
    (2, 6, {"mode": "selective"}, {}),
    (2, 10, {"mode": "none"}, {"pipeline": {"schedule": "ZBVZeroBubble", "chunks": 2}}),
], ids=str)  # fmt: skip
def test_each_chunk_is_measured_with_its_own_kinds_of_block(
    stages: int, dense: int, again: dict[str, Any], split: dict[str, dict[str, Any]]
) -> None:
    model = {
        "family": "deepseek", "layers": 12, "experts": 4, "intermediate_size": 768, "top_k": 2,
        "dense_layers": dense,
    }  # fmt: skip
    given = config(
        again, model=model, train={"global_batch": 8, "micro_batches": 8},
        parallel={"pipeline": stages}, **split,
    )  # fmt: skip
    budget = MemoryBudget(given, stages)
    assert budget.plan.kinds == (0,) * dense + (dense,) * (12 - dense)
    measured = {
        chunk.blocks: budget.activations.models[chunk.stage]
        for rank in budget.plan.ranks for chunk in rank.chunks
    }  # fmt: skip
    for chunk, own in measured.items():
        part = replace(own.model_part, kinds=tuple(chunk))  # these very blocks
        step = Observations().of(given, 1, 512, 1, len(chunk), own.recomputing, None, part)
        planned = own.at(512)
        assert planned.kept == step.kept, chunk
        assert planned.between_parts == step.between_parts, chunk
        assert own.model_part.split == (bool(split) and chunk.start > 0 and chunk.stop <= dense)
        one_kind = len(set(own.kinds)) == 1 and own.recomputing in (0, len(chunk))
        if one_kind and not own.model_part.split:  # whose peak is at its last block
            assert planned.kept + planned.working == step.peak, chunk


@pytest.mark.thorough(3)
@pytest.mark.parametrize("ring", some([1, 2], 1))
def test_exchanges_and_a_ring_are_counted_as_they_run(ring: int) -> None:
    """All blocks at once, with each operator's allocations; and a row with the total."""
    around = mesh_sections(sequence=2, ring=ring)
    settings = config({"mode": "selective"}, **around)
    shape, local = MeshShape(2, **settings.degrees()), 3000
    planned = whole(settings, 2).at(2 * local)
    step = Observations().of(settings, 1, local, 1, 5, 5, None, ModelPart(shape))
    assert planned.kept + planned.working + sum(planned.exchanges.values()) == pytest.approx(
        step.peak, rel=0.01
    )
    names = {name for name, _ in exchange_rows(planned.exchanges)}
    full = whole(config({"mode": "full"}, **around), 2)
    names |= {name for name, _ in exchange_rows(full.at(2 * local).exchanges)}
    assert ("exchanges of heads" in names) == (ring == 1)
    assert ("keys and values around a ring" in names) == (ring == 2)


@pytest.mark.thorough(1)
def test_an_exchange_that_is_kept_longer_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deliberate mistake: send buffers are not freed after the message has arrived."""
    settings = config({"mode": "full"}, parallel={"sequence": 2})
    place = ModelPart(MeshShape(2, **settings.degrees()))

    def peak() -> int:
        return Observations().of(settings, 1, 1024, 1, 2, 2, None, place).peak

    before, held = peak(), []
    exchange = importlib.import_module("internsp.sp.exchange")  # a function has the same name
    pack = exchange._pack
    monkeypatch.setattr(exchange, "_pack", lambda *given: held.append(pack(*given)) or held[-1])
    assert peak() > before + 1024 * 64 * 4


def test_activations_and_the_optimizers_step_are_not_there_at_the_same_time() -> None:
    offload = {"offload": ["weights", "optimizer", "gradients"]}
    budget = MemoryBudget(config({"mode": "full"}, weight_parallel=offload), 1)
    (own,) = budget.ranks
    ((_, stepping),) = own.stepping
    short, long = (dict(budget.at(length)[0]) for length in (2, 1 << 20))
    assert short[STEPPING] == stepping
    assert STEPPING not in long
    assert long["activations that are kept"] > stepping
    assert {n: short[n] for n in dict(own.fixed)} == dict(own.fixed)


@pytest.mark.parametrize(
    ("mode", "length", "micro_batches"),
    [("none", 64, 1), *some([
        ("none", 512, 1), ("full", 2048, 1), ("selective", 2048, 1), ("none", 64, 2),
        ("full", 512, 2),
    ], 2)],
)  # fmt: skip
def test_memory_of_steps_is_that_of_what_lives_when_gradients_are_summed(
    mode: str, length: int, micro_batches: int, tmp_path: Path
) -> None:
    """Sums of one micro-batch are made while its activations are freed."""
    settings = config(
        {"mode": mode}, model={"hidden_size": 256, "intermediate_size": 768, "heads": 8},
        data={"sequence_length": length}, checkpoint={"save": False}, parallel={"device": "cpu"},
        train={"global_batch": micro_batches, "micro_batches": micro_batches, "steps": 3},
    )  # fmt: skip
    gc.collect()
    with Alive([]) as alive, internsp.Trainer(settings, output=tmp_path / "run") as trainer:
        runner = StepRunner(trainer._session)
        for step in range(3):
            gc.collect()
            alive.most = alive.now
            runner.step(step, StopRequest())
    planned = sum(nbytes for _, nbytes in MemoryBudget(settings, 1).at(length)[0])
    few = 1024  # flags and scalars, which nothing counts
    assert alive.most - few <= planned < 1.07 * alive.most


@pytest.mark.parametrize(("weight", "size"), [(1, 2), (2, 4)])
def test_a_weight_group_of_one_keeps_autograds_own_gradients(weight: int, size: int) -> None:
    """Of 16 bits, until they are packed for the step; a sum over ranks is in fp32."""
    train = {"global_batch": 2, "micro_batches": 1, "dtype": "bfloat16"}
    plain = {"coalesce_bytes": 0}
    given = config(train=train, parallel={"weight": weight}, weight_parallel=plain)
    budget = MemoryBudget(given, weight)
    elements = dict(budget.ranks[0].fixed)["weight shards"] // 2
    assert budget.all == pytest.approx(size * elements, rel=0.02)


def test_a_step_works_in_its_own_part_of_a_bucket() -> None:
    """An owner of all packs a bucket; one of half compares half of it with masters."""
    train = {"global_batch": 2, "micro_batches": 1, "dtype": "bfloat16"}
    given = config(train=train, parallel={"weight": 1})
    alone, half = (dict(MemoryBudget(given, ranks).ranks[0].stepping) for ranks in (1, 2))
    assert half[AT_STEP] == pytest.approx(alone[AT_STEP] / 2, rel=0.01)
    wide = config(train={**train, "dtype": "float32"}, parallel={"weight": 1})
    assert not MemoryBudget(wide, 2).ranks[0].stepping, "no masters, and buffers of exchanges"


def test_what_is_printed_names_the_bound_and_mistakes_their_remedy() -> None:
    output = io.StringIO()
    console = Console(file=output, width=100, highlight=False)
    print_longest(config({"mode": "full"}), 1, "64 MiB", None, console)
    text = output.getvalue()
    for part in ("Longest sequence for 64 MiB a rank: ", "bound by: ", "activations that", "sum"):
        assert part in text
    with pytest.raises(ConfigError, match=r"no sequence fits; one of 1 tokens takes"):
        print_longest(config(), 1, "1 KiB", None, console)
    with pytest.raises(ConfigError, match=r"--longest: '64' is no size"):
        print_longest(config(), 1, "64", None, console)
    staged = config(parallel={"pipeline": 2}, train={"global_batch": 2, "micro_batches": 2})
    print_longest(staged, 2, "64 MiB", None, console)
    text = output.getvalue().split("Longest")[-1]
    for part in (", on pipeline rank 0", BUFFERS, "in flight", "Memory of pipeline rank 0"):
        assert part in text


def staged(schedule: str, chunks: int, again: dict[str, Any], **changes: dict[str, Any]) -> Config:
    pipeline = {"schedule": schedule, "chunks": chunks}
    return config(
        again, parallel={"pipeline": 2}, pipeline=pipeline, model={"layers": 6},
        train={"global_batch": 4, "micro_batches": 4}, **changes,
    )  # fmt: skip


def test_a_block_of_several_units_is_one_that_recomputes() -> None:
    units = {"rules": [{"match": "layers.*.feed_forward", "unit": "each"}], "gather_before": "qkv"}
    given = staged("1F1B", 1, {"mode": "full", "fraction": 0.5}, weight_parallel=units)
    models = MemoryBudget(given, 2).activations.models
    assert {stage: own.recomputing for stage, own in models.items()} == {0: 3, 1: 0}


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    "again", some([{"mode": "none"}, {"mode": "full"}], 1), ids=["none", "full"]
)
def test_as_many_micro_batches_are_in_flight_as_the_schedule_says(again: dict[str, Any]) -> None:
    kept: dict[str, list[int]] = {}
    for schedule in ("1F1B", "GPipe"):
        budget = MemoryBudget(staged(schedule, 1, again), 2)
        for rank in range(2):
            rows = dict(budget.at(4096, rank)[0])
            (name,) = (name for name in rows if name.startswith("activations that are kept"))
            kept.setdefault(schedule, []).append(int(name.split()[-3]))
    assert kept == {"1F1B": [2, 1], "GPipe": [4, 4]}


@pytest.mark.thorough(2)
def test_the_longest_of_a_pipeline_fits_every_rank_and_a_token_more_does_not_fit_one() -> None:
    budget = MemoryBudget(staged("1F1B", 1, {"mode": "full"}), 2)
    found = budget.longest(48 * MIB)
    assert found.length > 1000

    def sums(length: int) -> list[int]:
        return [sum(n for _, n in budget.at(length, rank)[0]) for rank in range(2)]

    assert max(sums(found.length)) <= 48 * MIB < max(sums(found.length + 1))
    assert sums(found.length + 1)[found.rank] > 48 * MIB
    assert found.bound in dict(found.memory)


def test_a_pool_on_the_host_is_shared_by_the_micro_batches_in_flight() -> None:
    free, bound, none = (
        MemoryBudget(staged("GPipe", 1, {"mode": "full", **offload}), 2).at(4096)
        for offload in ({"offload": "all"}, {"offload": "3 MiB"}, {})
    )
    host = [dict(rows).get("host: activations (exact)", 0) for _, rows in (free, bound, none)]
    assert host == [4 * 2 * MIB, 3 * MIB, 0]  # four micro-batches, two of three blocks, 1 MiB each
    here = [sum(n for _, n in rows) for rows, _ in (free, bound, none)]
    assert here[0] < here[1] < here[2]


CHILD = """
import json, resource, sys, torch
torch.set_num_threads(1)
from model_zoo import build
from internsp.config.model import ModelConfig
from internsp.modules.recompute import checkpoint_block

length, enough, few, settings = json.loads(sys.argv[1])

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))

def step(length):
    ids = torch.zeros(1, length, dtype=torch.int64)
    loss, _ = model(ids, labels=ids)
    loss.backward()

model = build(ModelConfig(**settings), dtype=torch.float32)
for block in model.layers:
    checkpoint_block(block)
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
step(length)  # what libraries allocate once; MKL's buffers grow with the largest product
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the highest VmRSS is now's
own, before = status("VmData"), status("VmRSS")
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (own + enough, hard))
step(length)
print(json.dumps(status("VmHWM") - before), flush=True)
resource.setrlimit(resource.RLIMIT_DATA, (own + few, hard))
step(length)
"""


@pytest.mark.slow(20)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_a_process_takes_what_is_planned_and_dies_with_a_fifth_less() -> None:
    settings = config({"mode": "full"}, model={"hidden_size": 256, "intermediate_size": 768})
    length = 2048
    found = whole(settings).at(length)
    planned = found.kept + found.working
    names = ("vocab_size", "hidden_size", "layers", "heads", "intermediate_size")
    model = {name: getattr(settings.model, name) for name in names}
    told = json.dumps([length, int(planned * 1.1), int(planned * 0.8), model])
    # Large pieces are returned to the system when they are freed, as the plan assumes.
    around = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, told], env=around, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert child.stdout, child.stderr
    assert int(child.stdout) == pytest.approx(planned, rel=0.05)
    assert child.returncode != 0
    assert "allocate memory" in child.stderr


@pytest.mark.parametrize("ring", [1, 2])
def test_no_scores_are_in_memory(ring: int) -> None:
    """On the meta device, on which a step is measured, torch itself would hold them."""
    place = ModelPart(MeshShape(ring, sequence=ring, ring=ring))
    few, more = (Observations().of(config(), 1, n, 1, 2, 0, None, place).peak for n in (1024, 2048))
    assert few < more < 2.05 * few


@pytest.mark.thorough(1)
def test_dropout_keeps_a_byte_an_element_twice_a_block() -> None:
    plain, dropped = config(), config(model={"dropout": 0.1})
    steps = [Observations().of(settings, 1, 512, 1, 2, 0, None) for settings in (plain, dropped)]
    assert steps[1].kept - steps[0].kept == 2 * 2 * 512 * plain.model.hidden_size


def on(device: str, layers: int = 5, **changes: dict[str, Any]) -> Config:
    """A model whose loss takes most memory of a short step, and whose blocks that of a long one."""
    return config(
        {"mode": "full", "offload": "all", "tiles": "auto"},
        model={"vocab_size": 8192, "hidden_size": 64, "layers": layers, "heads": 4, "kv_heads": 2},
        train={"global_batch": 1, "micro_batches": 1, "dtype": "bfloat16", "loss_chunk": 512},
        parallel={"device": device, **changes.pop("parallel", {})},
        **changes,
    )


@pytest.mark.thorough(18)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_blocks_take_over_from_the_loss_is_found_without_a_step_of_that_length(
    device: str,
) -> None:
    length = 1 << 16  # twice as long as the longest step that is planned by
    settings = on(device, layers=2)
    model = whole(settings)
    planned = model.at(length)
    step = Observations().of(settings, 1, length, length // model._tile, 2, 2, "all")
    short = Observations().of(settings, 1, 4096, 4096 // model._tile, 2, 2, "all")
    assert short.phases[0] > short.phases[-1]
    assert step.phases[0] < step.phases[-1] == step.peak
    assert planned.kept + planned.working == pytest.approx(step.peak, rel=0.01)


@pytest.mark.thorough(2)
def test_on_cuda_norms_keep_their_input_and_flash_attention_has_its_own_sums() -> None:
    host, device = (Observations().of(on(kind), 1, 8192, 8, 2, 2, 1) for kind in ("cpu", "cuda"))
    unit = 8192 * 64 * 2
    # The last norm: two copies in fp32 are four units, and its input, kept in their place, is one.
    assert 2.99 * unit < host.kept - device.kept < 3.01 * unit
    q, k = torch.empty(1, 4, 1000, 100), torch.empty(1, 2, 1000, 100, dtype=torch.bfloat16)
    (sums,) = live.kernel_memory(on("cuda")).values()
    wide = 4 * (1000 + 128) * 4 * (128 + 1)  # heads of 100 are rounded to 128
    assert sums(q, q, k, k) == wide + 2 * 1000 * 4 * 100 * 2
    assert sums(q, q, q, q) == wide


def test_a_run_in_full_precision_has_no_flash_attention() -> None:
    assert live.kernel_memory(config()) == {}


def test_pinned_memory_is_counted_as_torch_takes_it() -> None:
    assert [pinned_bytes(n) for n in (0, 1, 3, 1024, 1025)] == [0, 1, 4, 1024, 2048]
    away = {"weight_parallel": {"offload": ["optimizer"]}}
    length = 3000
    host, device = (
        dict(MemoryBudget(on(kind, **away), 1).at(length)[1]) for kind in ("cpu", "cuda")
    )
    name = HOSTED[ACTIVATIONS]
    assert host[name] == 4 * length * 64 * 2
    assert device[name] == 4 * pinned_bytes(length * 64 * 2)
    # A size holds as many blocks as it has room for before pinned memory rounds them up.
    three = {"activation_checkpoint": {"offload": f"{3 * length * 64 * 2} B"}}
    limited = dict(MemoryBudget(on("cuda", **three), 1).at(length)[1])
    assert limited[name] == 3 * pinned_bytes(length * 64 * 2)
    name = HOSTED[OPTIMIZER]
    assert host[name] < device[name] < 2 * host[name]


def test_what_is_remembered_is_what_each_measurement_would_give() -> None:
    """Each case differs from the first in one argument, and is measured by itself as well."""
    plain, known = config({"mode": "full"}), Observations()
    around = config({"mode": "full"}, parallel={"sequence": 2})
    chunk = ModelPart(MeshShape(2, pipeline=2), False, True)
    shared = ModelPart(MeshShape(2, sequence=2))
    half = config({"mode": "full"}, train={"dtype": "bfloat16"})
    cases: list[tuple[Any, ...]] = [
        (plain, 1, 512, 1, 2, 2, None), (plain, 2, 512, 1, 2, 2, None),
        (plain, 1, 1024, 1, 2, 2, None), (plain, 1, 512, 2, 2, 2, None),
        (plain, 1, 512, 1, 3, 2, None), (plain, 1, 512, 1, 2, 0, None),
        (plain, 1, 512, 1, 2, 2, "all"), (plain, 1, 512, 1, 2, 2, None, chunk),
        (around, 1, 512, 1, 2, 2, None, shared), (half, 1, 512, 1, 2, 2, None),
        (config({"mode": "selective"}), 1, 512, 1, 2, 2, None),
    ]  # fmt: skip
    each = [Observations() for _ in cases]
    alone = [own.of(*case) for case, own in zip(cases, each, strict=True)]
    assert len({str(one) for one in alone}) == len(cases)
    for _ in range(2):
        assert [known.of(*case) for case in cases] == alone
    assert known.of(*cases[0], backward=False) == Observations().of(*cases[0], backward=False)
    # Of torch's functions for sizes, a case calls those alone that no other called before it.
    assert 0 < len(known._outputs._known) < 0.6 * sum(len(own._outputs._known) for own in each)


def test_a_remembered_output_is_the_operators_own() -> None:
    outputs, aten = Outputs(), torch.ops.aten
    x = torch.empty(2, 3, device="meta")
    for given in (x, torch.empty(3, 2, device="meta").t(), x.double(), x):
        for _ in range(2):
            made = outputs.of(aten.neg.default, (given,), {})
            assert (made.stride(), made.dtype) == (given.stride(), given.dtype)
            assert made.untyped_storage()._cdata != given.untyped_storage()._cdata
            assert outputs.of(aten.neg_.default, (given,), {}) is given
            view = outputs.of(aten.t.default, (given,), {})
            assert view.untyped_storage()._cdata == given.untyped_storage()._cdata
