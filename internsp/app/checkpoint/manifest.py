"""``manifest.json`` of a checkpoint: its step and configuration, its tensors, a digest per file.

The manifest is written last (:mod:`internsp.app.checkpoint.disk`) and read first. Its content is
not trusted: nothing is executed, and every name, size and range is checked before a file is opened
or memory is allocated because of it. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from internsp.errors import ConfigError

MANIFEST = "manifest.json"
FORMAT = 2
MAX_BYTES = 1 << 30
"""Largest manifest that is read; one of a million tensors takes a quarter of this."""

# One part of a path, never "." or "..": a checkpoint reads nothing outside its folder.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 60)]
Dims = Annotated[tuple[Count, ...], Field(strict=False, max_length=16)]
DTYPES = {
    "float64": ("F64", 8), "int64": ("I64", 8), "float32": ("F32", 4), "int32": ("I32", 4),
    "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
"""Names of dtypes in safetensors, and bytes of an element, by their names here."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FileRecord(_Record):
    """A file: its length in bytes, and the sha256 of the content that was written."""

    nbytes: Count
    sha256: Digest


class Chunk(_Record):
    """An index range of a tensor in every dimension, and the byte range of a file that holds it."""

    offsets: Dims
    sizes: Dims
    file: FileName
    begin: Count
    length: Count


class TensorRecord(_Record):
    """A full tensor: its chunks cover it without gap or overlap."""

    dtype: Annotated[str, Field(pattern=rf"^({'|'.join(DTYPES)})$")]
    shape: Dims
    chunks: Annotated[list[Chunk], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_chunks(self) -> TensorRecord:
        for chunk in self.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(self.shape):
                raise ValueError("a chunk has other dimensions than its tensor")
            ends = zip(chunk.offsets, chunk.sizes, self.shape, strict=True)
            if any(offset + size > full for offset, size, full in ends):
                raise ValueError("a chunk lies outside its tensor")
            if chunk.length != math.prod(chunk.sizes) * DTYPES[self.dtype][1]:
                raise ValueError("a chunk has another number of bytes than its elements take")
            if chunk.begin % DTYPES[self.dtype][1]:
                raise ValueError("a chunk begins inside an element")
        if sum(math.prod(c.sizes) for c in self.chunks) != math.prod(self.shape):
            raise ValueError("the chunks do not cover the tensor")
        ordered = sorted(self.chunks, key=lambda c: c.offsets)
        for i, one in enumerate(ordered):
            for other in ordered[i + 1 :]:
                if one.offsets and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                    break  # no later chunk can overlap either: they are sorted by offset
                if _overlap(one, other):
                    raise ValueError("two chunks overlap")
        return self


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + size_b and b < a + size_a
        for a, size_a, b, size_b in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )


class Position(_Record):
    """Position of a run in its training text.

    Attributes:
        fingerprint: digest of all documents, and of how they are mixed.
        sequences: rows used so far, in the order that the seed gives; the next run starts at this
            row, on any mesh and with any batch size.
        tokens: tokens of those rows that the loss counted.
        document, token: start of that row: the document in the order of the training text, and the
            token within the document.
    """

    fingerprint: str
    sequences: Count
    tokens: Count
    document: Count
    token: Count


class State(_Record):
    """Tensors and values, and the files that hold them.

    Attributes:
        format: version of the folder's format; this version of internsp reads only 2.
        values: values that are not tensors, by name.
        tensors, files: records by name.
    """

    format: Literal[2] = 2
    values: dict[str, JsonValue]
    tensors: dict[str, TensorRecord]
    files: dict[FileName, FileRecord]

    @model_validator(mode="after")
    def _check_files(self) -> State:
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                record = self.files.get(chunk.file)
                if record is None or chunk.begin + chunk.length > record.nbytes:
                    raise ValueError(f"{name} lies outside {chunk.file}")
        return self


class Manifest(State):
    """A checkpoint.

    Attributes:
        step: finished optimizer steps.
        run: id of the run that wrote it.
        mesh: degrees of the mesh, and its number of ranks.
        config: the run's configuration, by section.
        data: the run's position in its text.
        loss_scaler: loss scale and counters, if there is a loss scaler.
    """

    step: Annotated[int, Field(ge=0, lt=1 << 50)]
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    mesh: dict[str, Annotated[int, Field(ge=1, lt=1 << 30)]]
    config: dict[str, dict[str, JsonValue]]
    data: Position
    loss_scaler: dict[str, float] | None

    @model_validator(mode="after")
    def _check_mesh(self) -> Manifest:
        if "world" not in self.mesh:
            raise ValueError("mesh has no world, the number of ranks")
        return self


def canonical(content: Any) -> str:
    """JSON content as text that is the same whatever the order of keys; its sha256 is its digest.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(content: str) -> str:
    """sha256 of what :func:`canonical` gives."""
    return hashlib.sha256(content.encode()).hexdigest()


def write_manifest(folder: Path, content: dict[str, Any] | str) -> None:
    """Write ``manifest.json``: ``content`` (or its canonical text) with its digest; durable."""
    text = content if isinstance(content, str) else canonical(content)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(f'{{"sha256":"{digest_of(text)}","content":{text}}}')
        file.flush()
        os.fsync(file.fileno())


Kind = TypeVar("Kind", bound=State)


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint's folder; raises as :func:`read_as`."""
    return read_as(folder, Manifest)


def read_as(folder: Path, kind: type[Kind]) -> Kind:
    """Read the manifest of a folder that holds a state.

    Raises:
        ConfigError: the manifest is missing, damaged or no manifest; the message names the file.
    """
    path = folder / MANIFEST
    try:
        if (size := _size_of(path)) > MAX_BYTES:
            raise ConfigError(f"{path} has {size} bytes, more than any manifest has")
        document = json.loads(path.read_bytes())
        content = document["content"]
        if digest_of(canonical(content)) != document["sha256"]:
            raise ConfigError(f"{path} is damaged: its digest does not match")
        written = content.get("format")
        if isinstance(written, int) and written != FORMAT:
            raise ConfigError(
                f"{path} is of format {written}, this version of internsp reads {FORMAT}"
            )
        return kind.model_validate(content)
    except ConfigError:  # a ConfigError is a ValueError, too, and so is a ValidationError
        raise
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path} is not a manifest: {where}: {first['msg']}") from None
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: saving did not end, or an earlier version wrote the checkpoint"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: it is no manifest") from error


def check_files(folder: Path, manifest: State, names: Iterable[str]) -> None:
    """Check that the files ``names`` are as they were written; reads each to its end.

    Raises:
        ConfigError: one is missing or damaged; the message names it.
    """
    for name in names:
        path, record = folder / name, manifest.files[name]
        try:
            if (size := _size_of(path)) != record.nbytes:
                raise ConfigError(f"{path} has {size} bytes, {record.nbytes} were written")
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                    raise ConfigError(f"{path} is damaged: its sha256 does not match")
        except FileNotFoundError:
            raise ConfigError(f"{path} is missing") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _size_of(path: Path) -> int:
    """Size of a file, which reading cannot follow elsewhere or wait for."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is not a regular file")
    return status.st_size
