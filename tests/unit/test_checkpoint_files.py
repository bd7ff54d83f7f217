"""Tensors are written to a checkpoint's files and read back; no pickle is written or read."""

from __future__ import annotations

import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from internsp.app.checkpoint.disk import write_part
from internsp.app.checkpoint.files import FilePlan, Reader
from internsp.app.checkpoint.manifest import FileRecord, Manifest
from internsp.errors import ConfigError, InternspError, LayoutError
from internsp.optim.slices import Slices, boxes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {
    "model.w": torch.arange(12, dtype=torch.float64).view(3, 4),
    "turned": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "flags": torch.tensor([1, 0, 1], dtype=torch.uint8),
    "bools": torch.tensor([True, False, True]),
    "half": torch.tensor([1.5], dtype=torch.float16),
    "none": torch.zeros(0, 3),
}


def save(folder: Path, state: dict[str, torch.Tensor]) -> Manifest:
    """A checkpoint of this process, and its manifest."""
    plan = FilePlan.make(state)
    memory = torch.zeros(plan.nbytes, dtype=torch.uint8)
    plan.fill(memory, state)
    record = write_part(folder, plan.file, memoryview(memory.numpy()))
    return Manifest.model_validate(
        {
            "step": 1, "run": "one", "mesh": {"world": 1}, "config": {}, "loss_scaler": None,
            "data": {"fingerprint": "", "sequences": 0, "tokens": 0, "document": 0, "token": 0},
            "values": {},
            "tensors": {name: tensor.model_dump() for name, tensor in plan.tensors.items()},
            "files": {plan.file: FileRecord(**record).model_dump()},
        }
    )  # fmt: skip


def load(folder: Path, manifest: Manifest, state: dict[str, torch.Tensor]) -> None:
    Reader(folder, manifest).into(state)


def test_tensors_come_back_and_safetensors_reads_the_same_file(tmp_path: Path) -> None:
    manifest = save(tmp_path, STATE)
    (file,) = tmp_path.iterdir()
    assert manifest.files[file.name].nbytes == file.stat().st_size
    found = {name: torch.zeros_like(value) for name, value in STATE.items()}
    load(tmp_path, manifest, found)
    again = load_file(file)
    assert again.keys() == STATE.keys()
    for name, value in STATE.items():
        assert torch.equal(found[name], value)
        assert torch.equal(again[name], value)


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 4, 2), (2, 1, 3, 2), (5, 1)])
def test_every_range_of_elements_is_its_boxes_in_order_and_nothing_else(
    shape: tuple[int, ...],
) -> None:
    count = torch.Size(shape).numel()
    whole = torch.arange(count).view(shape)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            values = torch.arange(start, stop)
            found = []
            for offsets, sizes, place in boxes(shape, start, stop):
                part = values[place : place + torch.Size(sizes).numel()].view(sizes)
                box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                assert torch.equal(part, whole[box])
                found += part.flatten().tolist()
            assert found == values.tolist()


def test_slices_are_saved_box_by_box_and_read_by_any_other_cut(tmp_path: Path) -> None:
    values = torch.arange(20, dtype=torch.float32).view(4, 5)

    def cut(*places: int) -> list[Slices]:
        found = []
        for start, stop in pairwise(places):
            flat = values.flatten()[start:stop].clone()
            parts = {o: flat[p : p + torch.Size(s).numel()].view(s)
                     for o, s, p in boxes((4, 5), start, stop)}  # fmt: skip
            found.append(Slices(torch.Size((4, 5)), flat, parts))
        return found

    (everything,) = cut(0, 20)
    (inner,) = cut(3, 17)
    manifest = save(tmp_path, {"x": everything})
    with pytest.raises(InternspError, match="do not cover the tensor"):
        save(tmp_path / "gaps", {"x": inner})
    for slices in cut(0, 3, 4, 16, 20):
        wanted = {offsets: part.clone() for offsets, part in slices.parts.items()}
        for part in slices.parts.values():
            part.zero_()
        load(tmp_path, manifest, {"x": slices})
        assert all(torch.equal(slices.parts[offsets], part) for offsets, part in wanted.items())
    with pytest.raises(LayoutError, match="rank's slices of optimizer state"):
        everything.sum()


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def test_a_pickle_in_place_of_the_tensors_is_numbers_and_one_beside_them_is_nothing(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "executed"
    state = {"w": torch.zeros(64, dtype=torch.uint8)}
    folder = tmp_path / "point"
    manifest = save(folder, state)
    evil = pickle.dumps(Call(Path.touch, mark))
    (chunk,) = manifest.tensors["w"].chunks
    with (folder / chunk.file).open("r+b") as file:
        file.seek(chunk.begin)
        file.write(evil[:64])
    (folder / ".metadata").write_bytes(evil)
    load(folder, manifest, state)
    assert state["w"].numpy().tobytes()[: len(evil)] == evil[:64]
    assert not mark.exists()


def test_a_file_that_became_shorter_is_refused_by_name(tmp_path: Path) -> None:
    manifest = save(tmp_path, {"w": STATE["model.w"]})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=re.escape(f"{file} cannot be read to its byte")):
        load(tmp_path, manifest, {"w": torch.zeros(3, 4, dtype=torch.float64)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_is_found_by_name(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    state = {
        "fine": torch.tensor([largest, -largest, 0.0], dtype=dtype),
        **{f"x{v}": torch.tensor([1.0, float(v)], dtype=dtype) for v in ("nan", "inf", "-inf")},
        "numbers": torch.tensor([-1, 2**40]),
        "mask": torch.tensor([float("inf")], dtype=dtype),
    }
    plan = FilePlan.make(state)
    memory = torch.zeros(plan.nbytes, dtype=torch.uint8)
    plan.fill(memory, state)
    assert sorted(plan.not_finite(memory, ["mask"])) == ["x-inf", "xinf", "xnan"]
