"""The tensors of a checkpoint: one safetensors file a rank, planned by torch's checkpointing.

The planners of ``torch.distributed.checkpoint`` decide which rank writes which part of each tensor,
without gaps or duplicates, and which ranges each rank reads. The manifest records where every part
lies. Nothing here is a pickle. torch's own ``HuggingFaceStorageWriter`` is not used: it keeps one
part of a tensor per file and drops the others without an error, and a rank's slice of optimizer
state is up to three.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

from internsp.app.checkpoint.manifest import DTYPES, Chunk, State, TensorRecord
from internsp.errors import ConfigError, InternspError
from internsp.optim.slices import Slices

_AT_ONCE = 1 << 22  # elements that are checked at once: the masks take memory, too


def header_of(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[bytes, list[int]]:
    """Header of a safetensors file that holds tensors without gaps, and where each begins.

    Args:
        tensors: (name, dtype as in the manifest, shape).

    Returns:
        The header, and byte offsets in the file: of each tensor, and of the file's end.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for name, dtype, shape in tensors:
        word, nbytes = DTYPES[dtype]
        ends.append(ends[-1] + math.prod(shape) * nbytes)
        table[name] = {"dtype": word, "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + end for end in ends]


@dataclass(frozen=True)
class FilePlan:
    """What this rank writes of a state; the same at every save.

    Attributes:
        file: name of the file.
        nbytes: size of the file, and of the host memory in which it is put together.
        parts: each part of a tensor: its index, place in the file, and dtype.
        tensors: on rank 0, the records of all tensors; empty on other ranks.
    """

    file: str
    nbytes: int
    header: bytes
    parts: list[tuple[MetadataIndex, Chunk, torch.dtype]]
    tensors: dict[str, TensorRecord]

    @classmethod
    def make(cls, state: Mapping[str, Tensor]) -> FilePlan:
        """Plan with all ranks, each with its own ``state`` (tensors by name). Collective.

        Raises:
            InternspError: on every rank: the ranks' parts overlap, or leave gaps.
        """
        ranks = _DistWrapper(None, use_dist=dist.is_initialized(), coordinator_rank=0)
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(state), is_coordinator=True)
        tensors: dict[str, TensorRecord] = {}

        def decide(plans: list[SavePlan]) -> list[FilePlan]:
            plans, metadata = planner.create_global_plan(plans)
            made = [cls._of(f"rank-{r:05d}.safetensors", plan) for r, plan in enumerate(plans)]
            places = {index: chunk for one in made for index, chunk, _ in one.parts}
            for name, entry in metadata.state_dict_metadata.items():
                assert isinstance(entry, TensorStorageMetadata), "only tensors are given to save"
                tensors[name] = TensorRecord(
                    dtype=_name(entry.properties.dtype),
                    shape=tuple(entry.size),
                    chunks=[places[MetadataIndex(name, chunk.offsets)] for chunk in entry.chunks],
                )
            return made

        try:
            own = ranks.reduce_scatter("plan", planner.create_local_plan, decide)
        except CheckpointException as error:
            rank, (why, _) = min(error.failures.items())
            text = f"rank {rank}: {type(why).__name__}: {why}"
            raise InternspError(f"what the ranks would save does not fit together: {text}") from why
        return cls(own.file, own.nbytes, own.header, own.parts, tensors)

    @classmethod
    def _of(cls, file: str, plan: SavePlan) -> FilePlan:
        """Lay out a file: its header, then the tensors, each aligned to its dtype."""
        items = []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None, "only tensors are given to save"
            assert data.chunk is not None, "torch gives every tensor its place"
            items.append((item.index.fqn, data.chunk, data.size, data.properties.dtype))
        items.sort(key=lambda item: -item[3].itemsize)
        header, ends = header_of(
            (_part_name(name, chunk, size), _name(dtype), chunk.sizes)
            for name, chunk, size, dtype in items
        )
        parts = [
            (
                MetadataIndex(name, chunk.offsets),
                Chunk(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), file=file,
                      begin=begin, length=end - begin),
                dtype,
            )
            for (name, chunk, _, dtype), begin, end in zip(items, ends, ends[1:], strict=False)
        ]  # fmt: skip
        return cls(file, ends[-1], header, parts, {})

    @torch.no_grad()
    def fill(self, memory: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write the file's content into ``memory`` (uint8); blocks until all values are copied."""
        memory[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for index, chunk, dtype in self.parts:
            if index.fqn not in state:
                raise InternspError(f"{index.fqn} is no longer in the model")
            value = state[index.fqn]
            source = value._local_tensor if isinstance(value, DTensor) else value
            if isinstance(value, Slices):
                source = value.__get_tensor_shard__(index)
            _view(memory, chunk, dtype).copy_(source)

    def not_finite(self, memory: Tensor, unseen: Iterable[str]) -> list[str]:
        """Names of the tensors in ``memory`` that have a value which is not finite.

        Args:
            unseen: names of tensors that are not checked.
        """
        ignored, found = set(unseen), dict[str, None]()
        for index, chunk, dtype in self.parts:
            if dtype.is_floating_point and index.fqn not in ignored:
                pieces = _view(memory, chunk, dtype).reshape(-1).split(_AT_ONCE)
                if not all(bool(piece.isfinite().all()) for piece in pieces):
                    found[index.fqn] = None
        return list(found)


def _part_name(name: str, chunk: ChunkStorageMetadata, size: torch.Size) -> str:
    if chunk.sizes == size:
        return name
    pairs = zip(chunk.offsets, chunk.sizes, strict=True)
    return f"{name}[{', '.join(f'{start}:{start + size}' for start, size in pairs)}]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _view(data: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    return data[chunk.begin : chunk.begin + chunk.length].view(dtype).view(chunk.sizes)


class Reader:
    """Reads tensors of a folder by its manifest; files are mapped, and read where they are used.

    Raises:
        ConfigError: (in every method) a file is missing, or shorter than the manifest records.
    """

    def __init__(self, folder: Path, content: State) -> None:
        self._folder, self._content = folder, content
        self._mapped: dict[str, Tensor] = {}
        records = content.tensors
        stored = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, record.dtype)),
                torch.Size(record.shape),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in record.chunks
                ],
            )
            for name, record in records.items()
        }
        self._metadata = Metadata({**stored})
        self._places = {
            MetadataIndex(name, torch.Size(chunk.offsets)): (chunk, record.dtype)
            for name, record in records.items()
            for chunk in record.chunks
        }

    def into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill ``tensors``: of each the part that this rank has, whatever parts were written."""
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=False)
        for item in planner.create_local_plan().items:
            values = self._part(*self._places[item.storage_index])
            for dim, (begin, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                values = values.narrow(dim, begin, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(values)
            planner.commit_tensor(item, target)

    def whole(self, name: str) -> Tensor:
        """A full tensor, from all its parts."""
        record = self._content.tensors[name]
        full = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        self.into({name: full})
        return full

    def _part(self, chunk: Chunk, dtype: str) -> Tensor:
        path, nbytes = self._folder / chunk.file, self._content.files[chunk.file].nbytes
        if chunk.file not in self._mapped:
            try:
                # Private: writing to it would change no file.
                found = torch.from_file(str(path), False, nbytes, dtype=torch.uint8)
            except RuntimeError as error:
                raise ConfigError(f"{path} cannot be read to its byte {nbytes}: {error}") from None
            self._mapped[chunk.file] = found
        return _view(self._mapped[chunk.file], chunk, getattr(torch, dtype))
