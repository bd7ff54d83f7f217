"""A checkpoint of any mesh is loaded by any mesh, and saved again with the same bytes.

Also where other parameters are sharded than in the run that saved it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from internsp.app.checkpoint import checkpoint, manifest
from internsp.app.checkpoint.manifest import write_manifest
from internsp.app.config import Config
from internsp.app.process.stop import StopRequest
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from internsp.errors import ConfigError
from tests.support.ranks import ranks, run_ranks
from tests.support.saved import save

TEXT = Path(__file__).parents[1] / "data" / "text"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
Mesh = dict[str, Any]


def config(mesh: Mesh, **changes: dict[str, Any]) -> Config:
    """A tiny model whose rows divide by no number of ranks; ``changes`` by section."""
    mesh = dict(mesh)
    chunks, smallest = mesh.pop("chunks", 1), mesh.pop("min_shard_elements", 64)
    schedule = "Interleaved1F1B" if chunks > 1 else "1F1B"
    sections: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 20, "layers": 4, "heads": 5, "head_dim": 4, "vocab_size": 259,
                  "intermediate_size": 27, "norm_eps": 1e-2, "init_std": 0.05},
        "data": {"source": "text", "paths": [str(TEXT)], "sequence_length": 17, "held_out": 0},
        "parallel": mesh,
        "pipeline": {"chunks": chunks, "schedule": schedule},
        "weight_parallel": {"min_shard_elements": smallest},
        "optimizer": {"lr": 3e-3, "warmup_steps": 1},
        "train": {"steps": 8, "global_batch": 12, "micro_batches": 2},
    }  # fmt: skip
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


def whole(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint except the random states, assembled from its chunks."""
    content = manifest.read(path)
    found = {}
    for name, record in content.tensors.items():
        if name.startswith("random."):
            continue
        tensor = torch.zeros(record.shape, dtype=getattr(torch, record.dtype))
        for chunk in record.chunks:
            data = bytearray((path / chunk.file).read_bytes()[chunk.begin :][: chunk.length])
            if data:
                box = tuple(
                    slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True)
                )
                tensor[box] = torch.frombuffer(data, dtype=tensor.dtype).view(chunk.sizes)
        found[name] = tensor
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def first(rank: int, world: int, folder: str, settings: Config) -> None:
    """Three steps, so that moments differ everywhere."""
    session = Session.create(settings)
    with StopRequest() as stop:
        for step in range(3):
            StepRunner(session).step(step, stop)
    save(session, Path(folder), 3, "first", sequences=36)


def onward(rank: int, world: int, folder: str, hops: list[tuple[int, Config]]) -> None:
    """Load the checkpoint of the previous mesh, and save it again as the next step."""
    for number, settings in hops:
        session = Session.create(settings)
        resumed = checkpoint.load(session, Path(folder) / f"step-{number:06d}")
        assert resumed.content.data.sequences == 36
        save(session, Path(folder), number + 1, "onward", sequences=36)


CHAINS: dict[str, tuple[dict[str, Any], list[tuple[int, Mesh]]]] = {
    "fp32": ({}, [
        (4, {"weight": 2, "sequence": 2}),
        (4, {"weight": 4, "sequence": 1, "min_shard_elements": 500}),  # of 400 to 5,180
        (4, {"weight": 2, "pipeline": 2, "optimizer_ranks": 1}),
        (4, {"weight": 1, "pipeline": 2, "chunks": 2, "optimizer_ranks": 2}),
        (3, {"weight": 3, "min_shard_elements": 1_000_000}),  # all are replicated
        (1, {}),
        (2, {"weight": 1, "optimizer_ranks": 2, "sequence": 2}),
    ]),
    "bf16": ({"train": {"dtype": "bfloat16"}}, [
        (2, {"weight": 2}), (4, {"weight": 2, "pipeline": 2}),
        (3, {"weight": 1, "optimizer_ranks": 3}),
    ]),
    "muon": ({"optimizer": {"name": "muon"}, "train": {"dtype": "bfloat16"}}, [
        (2, {"weight": 2}), (4, {"weight": 2, "pipeline": 2, "min_shard_elements": 500}),
        (3, {"weight": 3}), (1, {}),
        (4, {"weight": 2, "optimizer_ranks": 2}),
    ]),
    # It keeps a count, weights of averages and a mode in its param_groups.
    "schedulefree": ({"optimizer": {"name": "schedulefree:AdamWScheduleFree"}}, [
        (2, {"weight": 2}), (4, {"weight": 1, "pipeline": 2, "optimizer_ranks": 2}), (1, {}),
    ]),
    "adafactor": ({"optimizer": {"name": "adafactor"}}, [
        (4, {"weight": 2, "sequence": 2, "optimizer_ranks": 2}), (2, {"weight": 1, "pipeline": 2}),
        (3, {"weight": 3}),
    ]),
}  # fmt: skip


@ranks(1)
def test_a_checkpoint_without_what_the_optimizer_keeps_in_its_groups_is_refused(
    tmp_path: Path,
) -> None:
    """As an internsp before this one has written it."""
    session = Session.create(config({}, optimizer={"name": "schedulefree:SGDScheduleFree"}))
    path = save(session, tmp_path, 1, "first")
    content = manifest.read(path).model_dump(mode="json")
    content["values"] = {n: v for n, v in content["values"].items() if not n.endswith("group[k]")}
    write_manifest(path, content)
    before = {n: p.full_tensor() for n, p in session.modules[0].named_parameters()}  # type: ignore[operator]
    with torch.no_grad():
        for parameter in session.modules[0].parameters():
            parameter.mul_(2.0)
    with pytest.raises(ConfigError, match=r"has no optimizer\..*group\[k\], which this optimizer"):
        checkpoint.load(session, path)
    for name, parameter in session.modules[0].named_parameters():
        assert torch.equal(parameter.full_tensor(), 2.0 * before[name]), "nothing was loaded"


@ranks(1)
def test_counts_of_two_groups_go_on_in_groups_as_they_were_and_in_no_other(tmp_path: Path) -> None:
    settings = {"name": "schedulefree:SGDScheduleFree"}
    two = config({}, optimizer={**settings, "groups": [{"match": "head", "lr": 0.1}]})
    path = save(Session.create(two), tmp_path, 1, "two")
    content = manifest.read(path).model_dump(mode="json")
    values = content["values"]
    values |= {n: 7 for n in values if n.endswith("group[k]") and "head" in n}
    write_manifest(path, content)
    with pytest.raises(ConfigError, match=r"saved with k = .*: form the groups as they were"):
        checkpoint.load(Session.create(config({}, optimizer=settings)), path)
    session = Session.create(two)
    checkpoint.load(session, path)
    assert sorted(group["k"] for group in session.optimizer.param_groups) == [0, 0, 7]


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("changes", "meshes"),
    [
        pytest.param(*chain, marks=pytest.mark.thorough(7) if name == "adafactor" else (), id=name)
        for name, chain in CHAINS.items()
    ],
)
def test_every_mesh_saves_the_same_bytes_of_what_another_has_saved(
    tmp_path: Path, changes: dict[str, Any], meshes: list[tuple[int, Mesh]]
) -> None:
    def settings(mesh: Mesh) -> Config:
        return config(mesh, **{k: dict(v) for k, v in changes.items()})

    (world, mesh), *rest = meshes
    run_ranks(first, world, str(tmp_path), settings(mesh))
    number = 3
    while rest:
        world = rest[0][0]
        hops = []
        while rest and rest[0][0] == world:
            hops.append((number, settings(rest.pop(0)[1])))
            number += 1
        run_ranks(onward, world, str(tmp_path), hops)
    expected = whole(tmp_path / "step-000003")
    kinds = {name.rpartition(".")[2] for name in expected if name.startswith("optimizer.")}
    adam = {"step", "exp_avg", "exp_avg_sq"}
    factors = {"step", "row_var", "col_var", "variance"}
    of = {
        "muon": adam | {"momentum_buffer"}, "adafactor": factors,
        "schedulefree:AdamWScheduleFree": {"z", "exp_avg_sq"},
    }  # fmt: skip
    wanted = {"used"} | of.get(changes.get("optimizer", {}).get("name", ""), adam)
    assert kinds == (wanted | {"master"} if "train" in changes else wanted)
    assert all(value.count_nonzero() for name, value in expected.items() if "." in name)
    values = manifest.read(tmp_path / "step-000003").values
    kept = {n.rpartition(".")[2]: v for n, v in values.items() if n.startswith("optimizer.")}
    if "schedulefree" in str(changes):
        assert kept.keys() == {
            f"group[{name}]" for name in ("k", "weight_sum", "lr_max", "train_mode", "scheduled_lr")
        }
        assert kept["group[k]"] == 3
        assert kept["group[weight_sum]"] > 0
    for step in range(4, number + 1):
        assert manifest.read(tmp_path / f"step-{step:06d}").values == values
        found = whole(tmp_path / f"step-{step:06d}")
        assert found.keys() == expected.keys()
        different = [name for name in expected if bits(expected[name]) != bits(found[name])]
        assert not different, (meshes[step - 3], different)
