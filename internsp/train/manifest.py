"""``manifest.json`` of a checkpoint: what it is, what it holds, and a digest of each of its files.

It is written last (:mod:`internsp.train.disk`) and read first. Reading executes nothing and
believes nothing: every name, size and range is checked before anything is opened or allocated by
it. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from internsp.errors import ConfigError
from internsp.train.disk import MANIFEST, digest_of

FORMAT = 2
MAX_BYTES = 1 << 30
"""No manifest is larger: a million tensors take a quarter of it."""

# One part of a path, never "." or "..": a checkpoint reads nothing outside its folder.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 60)]
Extent = Annotated[tuple[Count, ...], Field(strict=False, max_length=16)]
_Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FileRecord(_Part):
    """A file: its length in bytes and the sha256 of what was written into it."""

    nbytes: Count
    sha256: Digest


class Chunk(_Part):
    """A box of a tensor, and the bytes of a file that hold it."""

    offsets: Extent
    sizes: Extent
    file: FileName
    begin: Count
    length: Count


class TensorRecord(_Part):
    """A tensor, whole: its chunks tile it without gap or overlap."""

    dtype: _Dtype
    shape: Extent
    chunks: Annotated[list[Chunk], Field(min_length=1)]

    @model_validator(mode="after")
    def _tiled(self) -> TensorRecord:
        for chunk in self.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(self.shape):
                raise ValueError("a chunk has other dimensions than its tensor")
            ends = zip(chunk.offsets, chunk.sizes, self.shape, strict=True)
            if any(offset + size > whole for offset, size, whole in ends):
                raise ValueError("a chunk lies outside its tensor")
            if chunk.length != math.prod(chunk.sizes) * _BYTES[self.dtype]:
                raise ValueError("a chunk has another number of bytes than its elements take")
        if sum(math.prod(c.sizes) for c in self.chunks) != math.prod(self.shape):
            raise ValueError("the chunks do not cover the tensor")
        ordered = sorted(self.chunks, key=lambda c: c.offsets)
        for i, one in enumerate(ordered):
            for other in ordered[i + 1 :]:
                if one.offsets and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                    break  # nor does any that follows reach back
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


class Position(_Part):
    """Where a run is in its text.

    Attributes:
        fingerprint: digest of all documents, and of how they are mixed.
        sequences: rows taken so far, in the order that the seed gives; the next run's first row is
            this one, whatever its mesh and batch.
        tokens: of those rows, those that the loss has counted.
        document, token: where that row begins: documents count in the order of the training text,
            tokens from the document's own first.
    """

    fingerprint: str
    sequences: Count
    tokens: Count
    document: Count
    token: Count


class State(_Part):
    """Tensors and values, and the files that hold them.

    Attributes:
        format: of the folder; this version reads 2 alone.
        values: what is no tensor, by name.
        tensors, files: by name.
    """

    format: Literal[2] = 2
    values: dict[str, JsonValue]
    tensors: dict[str, TensorRecord]
    files: dict[FileName, FileRecord]

    @model_validator(mode="after")
    def _inside(self) -> State:
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
        mesh: its degrees, and the ranks of all together.
        config: its configuration, by section.
        data: where the run is in its text.
        loss_scaler: scale and counters, where there is one.
    """

    step: Annotated[int, Field(ge=0, lt=1 << 50)]
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    mesh: dict[str, Annotated[int, Field(ge=1, lt=1 << 30)]]
    config: dict[str, dict[str, JsonValue]]
    data: Position
    loss_scaler: dict[str, float] | None


Kind = TypeVar("Kind", bound=State)


@overload
def read(folder: Path) -> Manifest: ...


@overload
def read(folder: Path, kind: type[Kind]) -> Kind: ...


def read(folder: Path, kind: type[State] = Manifest) -> State:
    """The manifest of a checkpoint's folder, or of another one that holds a state.

    Raises:
        ConfigError: there is none, it is damaged, or it is not one; the message names the file.
    """
    path = folder / MANIFEST
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a regular file")
        if status.st_size > MAX_BYTES:
            raise ConfigError(f"{path} has {status.st_size} bytes, which no manifest has")
        document = json.loads(path.read_bytes())
    except ConfigError:  # is a ValueError too
        raise
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: saving did not end, or an earlier version wrote the checkpoint"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: it is not JSON") from error
    if not isinstance(document, dict) or document.keys() != {"sha256", "content"}:
        raise ConfigError(f"{path} is not a manifest")
    try:
        whole = digest_of(document["content"]) == document["sha256"]
        written = document["content"].get("format") if whole else FORMAT
        if isinstance(written, int) and written != FORMAT:
            raise ConfigError(
                f"{path} is of format {written}, this version of internsp reads {FORMAT}"
            )
        if whole:
            return kind.model_validate(document["content"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path} is not a manifest: {where}: {first['msg']}") from None
    except ConfigError:  # is a ValueError too
        raise
    except (ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"{path} is not a manifest") from error
    raise ConfigError(f"{path} is damaged: its digest is another one")


def damage(folder: Path, manifest: State, names: Iterable[str]) -> list[str]:
    """What is wrong with the files ``names``, one a line; reads them whole."""
    found = []
    for name in names:
        path, record = folder / name, manifest.files[name]
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                found.append(f"{path} is not a regular file")
            elif status.st_size != record.nbytes:
                found.append(f"{path} has {status.st_size} bytes, {record.nbytes} were written")
            else:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                        found.append(f"{path} is damaged: its sha256 is another one")
        except FileNotFoundError:
            found.append(f"{path} is missing")
        except OSError as error:
            found.append(f"{path} cannot be read: {error.strerror}")
    return found
