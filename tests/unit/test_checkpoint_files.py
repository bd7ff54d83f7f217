"""Files of a checkpoint are read without executing anything, and refused by name."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from internsp.errors import ConfigError
from internsp.train.checkpoint_files import METADATA, Reader, Writer, check_metadata
from internsp.train.manifest import FileRecord, Manifest


def save(folder: Path, state: dict[str, torch.Tensor]) -> Manifest:
    """A checkpoint of this process, and its manifest."""
    writer = Writer(folder)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(dict(state), storage_writer=writer, planner=planner, no_dist=True)
    return Manifest(
        step=1, run="one", world_size=1, config={}, data={}, loss_scaler=None, values={},
        tensors=writer.tensors, files=writer.written,
    )  # fmt: skip


def load(folder: Path, manifest: Manifest, state: dict[str, torch.Tensor]) -> None:
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    reader = Reader(folder, manifest)
    dcp.load(dict(state), storage_reader=reader, planner=planner, no_dist=True)


STATE = {
    "model.w": torch.arange(12, dtype=torch.float64).view(3, 4),
    "turned": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "flags": torch.tensor([1, 0, 1], dtype=torch.uint8),
    "none": torch.zeros(0, 3),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_come_back_and_torch_reads_the_same_files(tmp_path: Path) -> None:
    manifest = save(tmp_path, STATE)
    check_metadata(tmp_path / METADATA)
    for file in tmp_path.iterdir():
        assert manifest.files[file.name].nbytes == file.stat().st_size
    found = {name: torch.zeros_like(value) for name, value in STATE.items()}
    load(tmp_path, manifest, found)
    again = {name: torch.zeros_like(value) for name, value in STATE.items()}
    dcp.load(again, checkpoint_id=tmp_path, no_dist=True)
    for name, value in STATE.items():
        assert torch.equal(found[name], value)
        assert torch.equal(again[name], value)
    assert str(tmp_path).encode() not in (tmp_path / METADATA).read_bytes()


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def memoized(module: bytes, name: bytes) -> bytes:
    """Names that a pickle takes from its memo, with other strings between."""
    strings = b"".join(b"\x8c" + bytes([len(s)]) + s + b"\x94" for s in (module, name, b"torch"))
    return b"\x80\x04" + strings + b"h\x00h\x01\x93."


HOSTILE = {
    "system": (pickle.dumps(Call(os.system, "true")), "posix system"),
    "old protocol": (pickle.dumps(Call(os.system, "true"), protocol=0), "posix system"),
    "eval": (pickle.dumps({"a": Call(eval, "1")}), "builtins eval"),
    "getattr": (pickle.dumps(Call(getattr, "a", "b")), "builtins getattr"),
    "another of torch": (pickle.dumps(Call(torch.load, "x")), "torch.serialization load"),
    "memo": (memoized(b"os", b"system"), "os system"),
    "dotted": (memoized(b"torch", b"os.system"), "torch os.system"),
    "name not a string": (b"\x80\x04\x8c\x02osK\x01\x93.", "os None"),
    "extension": (b"\x80\x02\x82\x01.", "EXT1"),
    "persistent": (b"Pxyz\n.", "PERSID"),
    "instance": (b"(S'true'\nios\nsystem\n.", "os system"),
}


@pytest.mark.parametrize(("data", "name"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_table_that_names_other_things_is_refused_by_name(
    tmp_path: Path, data: bytes, name: str
) -> None:
    path = tmp_path / METADATA
    path.write_bytes(data)
    with pytest.raises(ConfigError) as refused:
        check_metadata(path)
    assert str(refused.value).startswith(f"{path} names '{name}', which no checkpoint does")


@pytest.mark.parametrize("data", [b"", b"text", b"\x80\x04", b"\xff" * 9, b"\x8a\xff\xff"])
def test_a_table_that_is_no_pickle_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / METADATA).write_bytes(data)
    with pytest.raises(ConfigError, match="is not a pickle"):
        check_metadata(tmp_path / METADATA)


def _saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def _compressed() -> bytes:
    """A tensor whose records are compressed, which could grow without bounds."""
    packed = io.BytesIO()
    source = zipfile.ZipFile(io.BytesIO(_saved(torch.zeros(3, 4, dtype=torch.float64))))
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    return packed.getvalue() + bytes(2000)  # no shorter than its tensor


FOREIGN = {
    "an object": (_saved(Call(os.system, "touch executed")), "what is no tensor"),
    "an old format": (
        _saved(STATE["model.w"], _use_new_zipfile_serialization=False), "what is no tensor",
    ),
    "a dictionary": (_saved({"a": STATE["model.w"]}), "another tensor"),
    "another dtype": (_saved(STATE["model.w"].float()), "another tensor"),
    "another shape": (_saved(STATE["model.w"].t().contiguous()), "another tensor"),
    "sparse": (_saved(STATE["model.w"].to_sparse()), "another tensor"),
    "compressed": (_compressed(), "another tensor"),
    "noise": (bytes(range(256)) * 8, "what is no tensor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("data", "words"), FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_not_the_tensor_of_the_manifest_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"w": STATE["model.w"]}
    manifest = save(tmp_path / "point", state)
    file = tmp_path / "point" / "__0_0.distcp"
    file.write_bytes(data)
    (chunk,) = manifest.tensors["w"].chunks
    tensor = manifest.tensors["w"].model_copy(
        update={"chunks": [chunk.model_copy(update={"length": len(data)})]}
    )
    record = FileRecord(nbytes=len(data), sha256="0" * 64)
    hostile = manifest.model_copy(
        update={"tensors": {"w": tensor}, "files": {file.name: record}}
    )
    with pytest.raises(CheckpointException) as failed:
        load(tmp_path / "point", hostile, {"w": torch.zeros(3, 4, dtype=torch.float64)})
    assert f"{file} holds {words}" in str(failed.value)
    assert not Path("executed").exists()
