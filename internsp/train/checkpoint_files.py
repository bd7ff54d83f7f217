"""How tensors of a checkpoint get into files and out again, through torch's checkpointing.

Written are the files that torch's own tools read, each digested on its way to the disk. Read are
the manifest, which says where every tensor lies, and the tensors themselves; no pickle is loaded
that could name anything to call.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from internsp.errors import ConfigError
from internsp.train.manifest import Chunk, FileRecord, Manifest, TensorRecord

METADATA = ".metadata"
"""torch's own table of contents, a pickle: written for its tools, never loaded here."""

# What torch's pickle of a table of tensors names.
_NAMES = {
    *((f"torch.distributed.checkpoint.metadata {name}") for name in (
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    "torch.distributed.checkpoint.filesystem _StorageInfo",
    "torch Size",
    "torch.serialization _get_layout",
    *(f"torch {kind}" for kind in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
        "bool",
    )),
}  # fmt: skip
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")


class _Digested(io.RawIOBase):
    """A file being written from its beginning to its end, and the digest of what went into it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.nbytes = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.failure = error  # torch.save raises another one, which does not say why
            raise
        self.digest.update(data)
        size = memoryview(data).nbytes
        self.nbytes += size
        return size

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return int(self._file.fileno())


class _Files(FileSystem):
    """Files by name with their digests, as far as this rank has written them."""

    def __init__(self) -> None:
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with Path(path).open(mode) as file:
            stream = _Digested(file)
            try:
                yield stream
            except Exception:
                if stream.failure is not None:
                    raise stream.failure from None
                raise
            digest = stream.digest.hexdigest()
            self.written[Path(path).name] = FileRecord(nbytes=stream.nbytes, sha256=digest)


class _TablePickler(pickle.Pickler):
    """Enumerations by class and value: some versions of Python call ``getattr`` by name instead."""

    def reducer_override(self, obj: Any) -> Any:
        return (type(obj), (obj.value,)) if isinstance(obj, Enum) else NotImplemented


class Writer(FileSystemWriter):
    """torch's writer of an empty folder; files are synced.

    Attributes:
        written: digests of this rank's files.
        tensors: on rank 0, once all ranks have written: where every tensor lies.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True)
        self.fs = _Files()
        self.tensors: dict[str, TensorRecord] = {}

    @property
    def written(self) -> dict[str, FileRecord]:
        """By name."""
        assert isinstance(self.fs, _Files), "set when made"
        return self.fs.written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On rank 0, when every rank has written: the table of contents, for torch's tools."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        metadata.version = "1.0.0"
        metadata.storage_data = places
        # Without the path, which is this machine's and another one after the rename.
        metadata.storage_meta = StorageMeta(save_id=self.save_id)
        with self.fs.create_stream(Path(self.path) / METADATA, "wb") as file:
            _TablePickler(file).dump(metadata)
            file.flush()
            os.fsync(file.fileno())
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), "only tensors are given to save"
            self.tensors[name] = TensorRecord(
                dtype=cast(Any, str(entry.properties.dtype).removeprefix("torch.")),
                shape=tuple(entry.size),
                chunks=[
                    Chunk(
                        offsets=tuple(chunk.offsets),
                        sizes=tuple(chunk.sizes),
                        file=place.relative_path,
                        begin=place.offset,
                        length=place.length,
                    )
                    for chunk in entry.chunks
                    for place in (places[MetadataIndex(name, chunk.offsets)],)
                ],
            )


class Reader(StorageReader):
    """Tensors of a folder, by its manifest; refuses everything else.

    Args:
        path: the checkpoint's folder.
        manifest: of that folder.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.places = {
            MetadataIndex(name, chunk.offsets): (record.dtype, chunk)
            for name, record in manifest.tensors.items()
            for chunk in record.chunks
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """The folder is given, not found by an id."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any) -> Metadata:
        """From the manifest, not from torch's pickle."""
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
        """Places are known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what ``plan`` asks for into its tensors. Blocks.

        Raises:
            ConfigError: a file holds something else than the tensor that the manifest names.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.places[item.storage_index][1].file, []).append(item)
        for name, items in by_file.items():
            with (self.path / name).open("rb") as file:
                for item in sorted(items, key=lambda i: self.places[i.storage_index][1].begin):
                    self._read(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: Any, item: ReadItem, planner: LoadPlanner) -> None:
        dtype, chunk = self.places[item.storage_index]
        if item.type is not LoadItemType.TENSOR:
            raise ConfigError(f"{self.path / chunk.file} holds other things than tensors")
        file.seek(chunk.begin)
        source = self._tensor(file.read(chunk.length), getattr(torch, dtype), chunk)
        for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, start, size)
        target = planner.resolve_tensor(item).detach()
        target.copy_(source)
        planner.commit_tensor(item, target)

    def _tensor(self, data: bytes, dtype: torch.dtype, chunk: Chunk) -> Tensor:
        try:
            # What does not begin as an archive would go to torch's readers of its older formats.
            if not data.startswith(b"PK\x03\x04"):
                raise zipfile.BadZipFile("no archive begins here")  # noqa: TRY301 - as the rest
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                # torch compresses nothing: a compressed record could grow without bounds.
                stored = all(i.compress_type == zipfile.ZIP_STORED for i in archive.infolist())
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - torch raises what it meets in the file
            line = str(error).strip().splitlines()[:1]
            raise ConfigError(
                f"{self.path / chunk.file} holds what is no tensor at byte {chunk.begin}: "
                f"{type(error).__name__}: {''.join(line)}"
            ) from None
        right = isinstance(value, Tensor) and value.dtype == dtype and value.layout is torch.strided
        if not (stored and right and value.shape == torch.Size(chunk.sizes)):
            raise ConfigError(
                f"{self.path / chunk.file} holds another tensor at byte {chunk.begin} than the "
                "manifest says"
            )
        return cast(Tensor, value)


def check_metadata(path: Path) -> None:
    """Refuse a table of contents that would execute something in the tools that load it.

    Raises:
        ConfigError: it names more than the classes of a table of tensors, or is no pickle.
    """
    if not path.exists():
        return
    try:
        found = _named(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # noqa: BLE001 - whatever a broken pickle makes of the scan
        raise ConfigError(f"{path} is not a pickle") from error
    foreign = sorted(found - _NAMES)
    if foreign:
        raise ConfigError(
            f"{path} names {foreign[0]!r}, which no checkpoint does: it would be executed by tools "
            "that load this file; do not load it, and do not trust this folder"
        )


def _named(data: bytes) -> set[str]:
    """``"module name"`` of everything that a pickle would look up. Executes nothing."""
    found: set[str] = set()
    memo: dict[int, Any] = {}
    stack: list[Any] = [None, None]  # the last things pushed, where they are strings
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo.get(int(argument)))
        elif name in _STRINGS:
            stack.append(argument)
        elif name in ("GLOBAL", "INST"):
            found.add(str(argument))
            stack.append(None)
        elif name == "STACK_GLOBAL":
            found.add(f"{stack[-2]} {stack[-1]}")
            stack.append(None)
        elif name in ("PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"):
            found.add(name)
        elif opcode.stack_after:
            stack.append(None)
        del stack[:-2]
    return found
