"""The Python blocks of documents run unchanged, on ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import internsp
from internsp.model_zoo import build
from tests.support.models import Tiny
from tests.support.ranks import ranks

DOCS = Path(__file__).parents[2] / "docs" / "howto"


def blocks(name: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    assert found, f"{name} has no Python"
    return found


@ranks(2)
def test_the_examples_of_whole_parameters_run(tmp_path: Path) -> None:
    sizes = {"layers": 2, "hidden_size": 16, "heads": 2, "vocab_size": 260, "intermediate_size": 24}
    config = internsp.Config(model=sizes).model
    model = build(config, dtype=torch.bfloat16)
    mesh = internsp.ParallelMesh.create(weight=2, device_type="cpu")
    settings = internsp.WeightParallelConfig(min_shard_elements=64)
    communicator = internsp.parallelize(model, mesh, settings)
    optimizer = internsp.ZeroOptimizer(communicator, torch.optim.AdamW, lr=1e-3)
    variables: dict[str, Any] = {
        "torch": torch, "internsp": internsp, "folder": tmp_path, "mesh": mesh, "model": model,
        "optimizer": optimizer, "Model": lambda: build(config, device="meta"),
    }  # fmt: skip
    for number, block in enumerate(blocks("load_and_export.md")):
        exec(compile(block, f"load_and_export.md, block {number}", "exec"), variables)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(variables["shapes"]) == (sorted(names) if mesh.rank == 0 else [])


@ranks(4)
def test_the_programs_of_a_loop_of_ones_own_make_its_mesh_and_unfreeze_a_head() -> None:
    variables: dict[str, Any] = {}
    of_mesh, of_head = blocks("shard_my_model.md")
    exec(compile(of_mesh, "shard_my_model.md, the mesh", "exec"), variables)
    mesh = variables["mesh"]
    assert (mesh.weight, mesh.replicas) == (2, 2)
    variables["model"] = model = Tiny(layers=2)
    model.head.requires_grad_(False)
    communicator = internsp.parallelize(model, mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained}]
    optimizer = internsp.ZeroOptimizer(communicator, torch.optim.AdamW, param_groups=groups)
    variables["optimizer"] = optimizer
    exec(compile(of_head, "shard_my_model.md, unfreezing", "exec"), variables)
    before = model.head.weight.full_tensor()
    ids = torch.zeros(2, 5, dtype=torch.long)
    model(ids, ids).backward()
    optimizer.step()
    assert not torch.equal(model.head.weight.full_tensor(), before)
