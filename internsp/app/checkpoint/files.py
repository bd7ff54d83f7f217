"""Writing and reading the tensors of a checkpoint, with the planners of torch's checkpointing.

``torch.distributed.checkpoint`` plans which rank writes which part of each tensor, without gaps or
duplicates, and which ranges each rank reads. Each rank writes one safetensors file; the manifest
records where every tensor is. No pickle is written or read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from internsp.app.checkpoint.manifest import Chunk, State, TensorRecord
from internsp.errors import ConfigError, InternspError
from internsp.optim.slices import Slices

SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors, by their names in the manifest."""


@dataclass(frozen=True)
class _Entry:
    """A chunk of a tensor and its byte range in the file."""

    index: MetadataIndex
    chunk: Chunk
    dtype: torch.dtype


@dataclass(frozen=True)
class FilePlan:
    """What this rank writes of a state; the same at every save.

    Attributes:
        file: name of the file.
        nbytes: size of the file, and of the host memory in which it is put together.
        tensors: on rank 0, the records of all tensors; empty on other ranks.
    """

    file: str
    nbytes: int
    header: bytes
    entries: list[_Entry]
    tensors: dict[str, TensorRecord]

    @classmethod
    def make(cls, state: Mapping[str, Any], distributed: bool = True) -> FilePlan:
        """Plan with all ranks, each with its own ``state`` (tensors by name). Collective.

        Raises:
            CheckpointException: the ranks' parts overlap, or leave gaps.
        """
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        planned = _PlanningWriter()
        dcp.save(dict(state), storage_writer=planned, planner=planner, no_dist=not distributed)
        assert planned.plan is not None, "dcp.save has called write_data"
        return planned.plan

    @torch.no_grad()
    def fill(self, memory: Tensor, state: Mapping[str, Any]) -> None:
        """Write the file's content into ``memory`` (uint8); blocks until all values are copied."""
        memory[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for entry in self.entries:
            if entry.index.fqn not in state:
                raise InternspError(f"{entry.index.fqn} is no longer in the model")
            value = state[entry.index.fqn]
            source = value._local_tensor if isinstance(value, DTensor) else value
            if isinstance(value, Slices):
                source = value.__get_tensor_shard__(entry.index)
            part = memory[entry.chunk.begin : entry.chunk.begin + entry.chunk.length]
            part.view(entry.dtype).view(entry.chunk.sizes).copy_(source)


class _PlanningWriter(StorageWriter):
    """A storage writer that takes the plan from ``dcp.save`` and writes nothing."""

    def __init__(self) -> None:
        self.plan: FilePlan | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Always false: there is no location to write to."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: no state is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no file is opened."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank its own file."""
        for rank, plan in enumerate(plans):
            object.__setattr__(plan, "storage_data", f"rank-{rank:05d}.safetensors")
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Compute the layout of this rank's file."""
        self.plan = _file_plan(cast(str, plan.storage_data), plan)
        results = [
            WriteResult(entry.index, entry.chunk.length, entry.chunk) for entry in self.plan.entries
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Record on rank 0 where every tensor is."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        assert self.plan is not None, "dcp.save has called write_data"
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), "only tensors are given to save"
            self.plan.tensors[name] = TensorRecord(
                dtype=cast(Any, _name(entry.properties.dtype)),
                shape=tuple(entry.size),
                chunks=[places[MetadataIndex(name, chunk.offsets)] for chunk in entry.chunks],
            )


def _file_plan(file: str, plan: SavePlan) -> FilePlan:
    """Lay out a safetensors file: length and JSON table, then the tensors without gaps."""
    items = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, "only tensors are given to save"
        assert data.chunk is not None, "torch gives every tensor its place"
        items.append((item.index, data.chunk, data.size, data.properties.dtype))
    items.sort(key=lambda item: -item[3].itemsize)  # so that every tensor is aligned to its dtype
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, places = 0, []
    for index, chunk, full_size, dtype in items:
        length = math.prod(chunk.sizes) * dtype.itemsize
        places.append((end, length))
        name = index.fqn
        if chunk.sizes != full_size:
            pairs = zip(chunk.offsets, chunk.sizes, strict=True)
            name += f"[{', '.join(f'{start}:{start + size}' for start, size in pairs)}]"
        table[name] = {
            "dtype": SAFETENSORS[_name(dtype)],
            "shape": list(chunk.sizes),
            "data_offsets": [end, end + length],
        }
        end += length
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    entries = [
        _Entry(
            MetadataIndex(index.fqn, chunk.offsets),
            Chunk(
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
                file=file,
                begin=len(header) + begin,
                length=length,
            ),
            dtype,
        )
        for (index, chunk, _, dtype), (begin, length) in zip(items, places, strict=True)
    ]
    return FilePlan(file, len(header) + end, header, entries, {})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Reader(StorageReader):
    """Reads tensors of a folder by its manifest.

    Args:
        path: the checkpoint's folder.
        manifest: the manifest of that folder.
    """

    def __init__(self, path: Path, manifest: State) -> None:
        self.path = path
        self.manifest = manifest
        self.places = {
            MetadataIndex(name, torch.Size(chunk.offsets)): (getattr(torch, record.dtype), chunk)
            for name, record in manifest.tensors.items()
            for chunk in record.chunks
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Always false: the folder is given, not found by an id."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: no state is kept between loads."""

    def read_metadata(self, *args: Any) -> Metadata:
        """Metadata of all tensors, from the manifest."""
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, record.dtype)),
                torch.Size(record.shape),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in record.chunks
                ],
            )
            for name, record in self.manifest.tensors.items()
        }
        return Metadata(cast(Any, tensors), storage_data={}, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # type: ignore[override]
        """Do nothing: the manifest already has the location of every chunk."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the ranges of ``plan`` into its tensors. Blocks.

        Raises:
            ConfigError: a file is shorter than the manifest records.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.places[item.storage_index][1].file, []).append(item)
        for name, items in by_file.items():
            with (self.path / name).open("rb") as file:
                for item in sorted(items, key=lambda i: self.places[i.storage_index][1].begin):
                    assert item.type is LoadItemType.TENSOR, "the manifest has nothing else"
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read(file, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: Any, item: ReadItem) -> Tensor:
        """Read the range that ``item`` names; rows outside it are not read from the file."""
        dtype, chunk = self.places[item.storage_index]
        start, length, sizes = chunk.begin, chunk.length, list(chunk.sizes)
        inside = list(zip(item.storage_offsets, item.lengths, strict=True))
        if inside and sizes[0]:
            row = length // sizes[0]
            first, sizes[0] = inside[0]
            start, length = start + first * row, sizes[0] * row
            inside[0] = (0, sizes[0])
        file.seek(start)
        data = bytearray(length)
        if file.readinto(data) != length:
            raise ConfigError(f"{self.path / chunk.file} ends before its byte {start + length}")
        values = torch.frombuffer(data, dtype=dtype) if length else torch.empty(0, dtype=dtype)
        values = values.view(sizes)
        for dim, (begin, size) in enumerate(inside):
            values = values.narrow(dim, begin, size)
        return values
