"""``internsp plan --longest``: memory of activations, and the longest sequence that fits."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from internsp.config import Config
from internsp.errors import ConfigError
from internsp.mesh import MeshShape
from internsp.plan.activations import ActivationModel, _observe
from internsp.plan.longest import Budget, print_longest
from internsp.plan.offloaded import STEPPING

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


@pytest.mark.parametrize(
    "again",
    [
        {"mode": "none"}, {"mode": "none", "tiles": 4}, {"mode": "full"},
        {"mode": "full", "fraction": 0.6, "tiles": 2}, {"mode": "selective"},
        {"mode": "full", "offload": 4}, {"mode": "selective", "offload": "all"},
    ],
    ids=["kept", "kept, tiles", "full", "some in tiles", "selective", "offload", "all offload"],
)  # fmt: skip
def test_a_long_step_of_all_blocks_takes_what_a_line_through_short_ones_of_few_says(
    again: dict[str, Any],
) -> None:
    settings, length = config(again), 4096
    planned = ActivationModel(settings, MeshShape(1)).at(length)
    mode, layers = settings.activation_checkpoint, settings.model.layers
    recomputing = len(mode.selected(layers))
    tiles = mode.tiles if isinstance(mode.tiles, int) else 1
    offload = mode.offload if recomputing else None
    step = _observe(settings, 1, length, tiles, layers, recomputing, offload or None)
    peak = planned.kept + planned.working
    assert planned.kept == pytest.approx(step.kept, rel=0.01)
    if 0 < recomputing < layers:  # what others keep is gone before the last recompute
        assert step.peak <= peak * 1.01
    else:
        assert peak == pytest.approx(step.peak, rel=0.01)
    assert planned.host == pytest.approx(step.host, rel=0.01)


@pytest.mark.parametrize(
    "again", [{"mode": "full"}, {"mode": "full", "fraction": 0.6, "tiles": 2, "offload": 2}],
    ids=["full", "some in tiles, offload"],
)  # fmt: skip
def test_models_of_transformers_are_planned_by_their_own_code(
    again: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    transformers.LlamaConfig(
        vocab_size=272, hidden_size=64, num_hidden_layers=5, num_attention_heads=4,
        intermediate_size=192, max_position_embeddings=8192,
    ).save_pretrained(tmp_path)
    model = {"family": "hf", "path": str(tmp_path)}
    settings = config(again, model=model, train={"loss_chunk": 256})
    settings = Config.model_validate({**settings.model_dump(exclude_unset=True), "model": model})
    mode, length = settings.activation_checkpoint, 4096
    planned = ActivationModel(settings, MeshShape(1)).at(length)
    recomputing = len(mode.selected(5))
    tiles = mode.tiles if isinstance(mode.tiles, int) else 1
    step = _observe(settings, 1, length, tiles, 5, recomputing, mode.offload or None)
    assert planned.kept == pytest.approx(step.kept, rel=0.01)
    assert step.peak <= (planned.kept + planned.working) * 1.01
    assert planned.host == pytest.approx(step.host, rel=0.01)


def test_the_longest_sequence_fits_and_one_token_a_rank_more_does_not() -> None:
    budget = Budget(config({"mode": "full"}, parallel={"sequence": 2}), 2)
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
    budget = Budget(config({"mode": "full", "offload": "all"}), 1)
    free = budget.longest(64 * MIB)
    bound = budget.longest(64 * MIB, 2 * MIB)
    assert 0 < bound.length < free.length
    assert sum(n for _, n in bound.host) <= 2 * MIB < sum(n for _, n in free.host)
    assert bound.bound == bound.host[-1][0]


def test_what_goes_around_a_ring_is_counted_beside_attention_of_one_rank() -> None:
    name = "keys and values around a ring (at most)"
    settings = config({"mode": "full"}, parallel={"sequence": 2, "ring": 2})
    budget = Budget(settings, 2)
    found = {length: dict(budget.at(length)[0])[name] for length in (1024, 4096)}
    # fp32: sums for q, k and v, and of another part's; that part, and gradients that come home.
    assert found == {length: length // 2 * 64 * 4 * (1 + 4 + 4) for length in found}
    assert name not in dict(Budget(config(parallel={"sequence": 2, "ring": 1}), 2).at(1024)[0])


def test_activations_and_the_optimizers_step_are_not_there_at_the_same_time() -> None:
    offload = {"offload": ["weights", "optimizer", "gradients"]}
    budget = Budget(config({"mode": "full"}, weight_parallel=offload), 1)
    ((_, stepping),) = budget.stepping
    short, long = (dict(budget.at(length)[0]) for length in (2, 1 << 20))
    assert short[STEPPING] == stepping
    assert STEPPING not in long
    assert long["activations that are kept"] > stepping
    assert {n: b for n, b in short.items() if n != STEPPING} == dict(budget.fixed)


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
    pipeline = config(parallel={"pipeline": 2}, train={"global_batch": 2, "micro_batches": 2})
    with pytest.raises(ConfigError, match=r"planned without a pipeline"):
        print_longest(pipeline, 2, "1 GiB", None, console)


CHILD = """
import json, resource, sys, torch
torch.set_num_threads(1)
from model_zoo import build
from internsp.config import ModelConfig
from internsp.layers.recompute import checkpoint_block

length, limit, settings = json.loads(sys.argv[1])

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
step(64)  # what libraries allocate once
if limit:
    most = status("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
before = status("VmRSS")
step(length)
print(json.dumps(status("VmHWM") - before))
"""


@pytest.mark.slow(20)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_a_process_takes_what_is_planned_and_dies_with_a_fifth_less() -> None:
    settings = config({"mode": "full"}, model={"hidden_size": 256, "intermediate_size": 768})
    length = 6144
    found = ActivationModel(settings, MeshShape(1)).at(length)
    planned = found.kept + found.working

    def child(limit: int) -> subprocess.CompletedProcess[str]:
        names = ("vocab_size", "hidden_size", "layers", "heads", "intermediate_size")
        model = {name: getattr(settings.model, name) for name in names}
        told = json.dumps([length, limit, model])
        # Large pieces go back to the system when they are freed, as the plan takes it.
        around = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-c", CHILD, told], env=around, capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip

    free = child(0)
    assert free.returncode == 0, free.stderr
    assert int(free.stdout) == pytest.approx(planned, rel=0.05)
    assert child(int(planned * 1.1)).returncode == 0
    refused = child(int(planned * 0.8))
    assert refused.returncode != 0
    assert "allocate memory" in refused.stderr


def test_dropout_keeps_a_byte_an_element_twice_a_block() -> None:
    plain, dropped = config(), config(model={"dropout": 0.1})
    steps = [_observe(settings, 1, 512, 1, 2, 0, None) for settings in (plain, dropped)]
    assert steps[1].kept - steps[0].kept == 2 * 2 * 512 * plain.model.hidden_size
