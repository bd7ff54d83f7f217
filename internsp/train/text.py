"""Where text comes from and how it becomes token ids: documents as bytes, tokenizers over them.

Sources are the running Python's own standard library, text files or folders, and JSONL or parquet
files (through ``datasets``). A tokenizer is bytes, or a ``tokenizers`` file.
"""

from __future__ import annotations

import importlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from internsp.config import DataConfig
from internsp.errors import ConfigError, MissingDependencyError

STDLIB_BYTES = 32_000_000
"""At most so much of the standard library is read: a run starts at once on any Python."""

# Tests are other people's corner cases; the rest is not written by hand or not of the library.
_NOT_LIBRARY = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip
_END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
_INSTALL_DATA = "pip install 'internsp[data]'"
_ENCODE_AT_ONCE = 256  # documents handed to the tokenizer's own threads together


class Tokenizer(Protocol):
    """Text to ids and back; ``end_of_document`` is the id put after each document."""

    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without an end of document."""
        ...

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """Ids of each document, in order, in the smallest unsigned dtype that holds them."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; ends of documents are left out, broken characters replaced."""
        ...


class ByteTokenizer:
    """Each byte is its own id, 256 ends a document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of ``text``."""
        return list(text.encode())

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """One ``uint16`` array a document (256 does not fit a byte)."""
        return (np.frombuffer(data, dtype=np.uint8).astype(np.uint16) for data in documents)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids below 256."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class FileTokenizer:
    """A ``tokenizers`` JSON file. The end of a document is the file's own token where it has a
    usual one (``<|endoftext|>``, ``</s>``, ...), else one more id after the file's last.

    Raises:
        MissingDependencyError: ``tokenizers`` is not installed.
        ConfigError: the file is missing or is not a tokenizer.
    """

    def __init__(self, path: str) -> None:
        tokenizers = _required("tokenizers", f"data.tokenizer = {path!r}")
        if not Path(path).is_file():
            raise ConfigError(f"data.tokenizer: there is no file {path!r}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # noqa: BLE001 - the package raises bare Exception
            raise ConfigError(f"data.tokenizer: {path!r} is not a tokenizer: {error}") from error
        size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        known = (self._tokenizer.token_to_id(name) for name in _END_OF_DOCUMENT_NAMES)
        self.end_of_document: int = next((i for i in known if i is not None), size)
        self.vocab_size: int = max(size, self.end_of_document + 1)
        self._dtype = smallest_dtype(self.vocab_size)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` without the file's own begin and end tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """One array a document; bytes that are not UTF-8 are replaced."""
        chunk: list[str] = []
        for data in documents:
            chunk.append(data.decode(errors="replace"))
            if len(chunk) == _ENCODE_AT_ONCE:
                yield from self._encode_chunk(chunk)
                chunk = []
        yield from self._encode_chunk(chunk)

    def _encode_chunk(self, chunk: list[str]) -> Iterator[NDArray[Any]]:
        for encoding in self._tokenizer.encode_batch(chunk, add_special_tokens=False):
            yield np.asarray(encoding.ids, dtype=self._dtype)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        inside = [int(i) for i in ids if i != self.end_of_document]
        text: str = self._tokenizer.decode(inside, skip_special_tokens=True)
        return text


def load_tokenizer(name: str) -> Tokenizer:
    """``"bytes"`` or the path of a ``tokenizers`` file; raises as :class:`FileTokenizer` does."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)


def smallest_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned integer that holds every id below ``vocab_size``."""
    for dtype in (np.uint8, np.uint16):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    return np.uint32


def read_documents(config: DataConfig) -> Iterator[bytes]:
    """The documents of ``config.source`` in a fixed order, empty ones left out.

    Raises:
        ConfigError: paths are missing (all are listed), or rows have no such ``text_field``.
        MissingDependencyError: JSONL or parquet without ``datasets``.
    """
    if config.source == "stdlib":
        found = stdlib_documents()
    else:
        _check_paths(config)
        paths = [Path(path) for path in config.paths]
        found = text_documents(paths) if config.source == "text" else _row_documents(config)
    return (data for data in found if data.strip())


def stdlib_documents(limit: int = STDLIB_BYTES) -> Iterator[bytes]:
    """The standard library's ``*.py`` files, sorted by path, until ``limit`` bytes are read.

    Left out are tests, installed packages, and what is generated (encodings, pydoc topics).
    """
    root = Path(sysconfig.get_path("stdlib"))
    left = limit
    for path in _files_below(root, skip=_NOT_LIBRARY):
        if path.suffix == ".py":
            data = path.read_bytes()[:left]
            left -= len(data)
            yield data
            if left <= 0:
                return


def text_documents(paths: Sequence[Path]) -> Iterator[bytes]:
    """Each file is a document. Of a folder, all files below it in sorted order, except hidden ones
    and those that hold a NUL byte (they are not text).
    """
    for path in paths:
        if path.is_dir():
            for file in _files_below(path):
                data = file.read_bytes()
                if b"\0" not in data:
                    yield data
        else:
            yield path.read_bytes()


def _files_below(root: Path, skip: Iterable[str] = ()) -> Iterator[Path]:
    left_out = {"__pycache__", *skip}
    for folder, folders, files in os.walk(root):
        # In place: os.walk then neither enters the others nor changes the order.
        folders[:] = sorted(n for n in folders if n not in left_out and not n.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _check_paths(config: DataConfig) -> None:
    if not config.paths:
        raise ConfigError(f"data.paths: source {config.source!r} needs at least one path")
    missing = [path for path in config.paths if not Path(path).exists()]
    if missing:
        raise ConfigError(
            "\n".join(f"data.paths: there is no file or folder {path!r}" for path in missing)
        )


def _row_documents(config: DataConfig) -> Iterator[bytes]:
    """Rows of JSONL or parquet files, streamed: no copy lands in a cache folder."""
    datasets = _required("datasets", f"data.source = {config.source!r}")
    builder, suffixes = {
        "jsonl": ("json", (".jsonl", ".json", ".jsonl.gz", ".json.gz")),
        "parquet": ("parquet", (".parquet",)),
    }[config.source]
    files: list[str] = []
    for path in map(Path, config.paths):
        if path.is_dir():
            files += [str(f) for f in _files_below(path) if f.name.endswith(suffixes)]
        else:
            files.append(str(path))
    if not files:
        raise ConfigError(f"data.paths: no {' or '.join(suffixes)} file in {list(config.paths)}")
    rows = datasets.load_dataset(builder, data_files=files, split="train", streaming=True)
    for row in rows:
        text = row.get(config.text_field)
        if not isinstance(text, str):
            raise ConfigError(
                f"data.text_field: a row has no text {config.text_field!r}; it has {sorted(row)}"
            )
        yield text.encode()


def _required(package: str, wanted_by: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"{wanted_by} needs the package {package!r}: {_INSTALL_DATA}"
        ) from error
