"""Where text comes from and how it becomes token ids: documents as bytes, tokenizers over them.

Sources are the running Python's own standard library, text files or folders, and JSONL or parquet
files (:mod:`internsp.data.rows`). A tokenizer is bytes, or a ``tokenizers`` file.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from internsp.config import DataConfig
from internsp.data.rows import SUFFIXES, required, row_texts
from internsp.errors import ConfigError

STDLIB_BYTES = 32_000_000
"""At most so much of the standard library is read: a run starts at once on any Python."""

# Tests are other people's corner cases; the rest is not written by hand or not of the library.
_NOT_LIBRARY = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip
_END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
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
        tokenizers = required("tokenizers", f"data.tokenizer = {path!r}")
        if not os.path.isfile(path):
            raise ConfigError(f"data.tokenizer: there is no file {path!r}")
        with _tokenizer_errors(path, "is not a tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        self._path = path
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
        with _tokenizer_errors(self._path, "cannot encode the text"):
            encodings = self._tokenizer.encode_batch(chunk, add_special_tokens=False)
        for encoding in encodings:
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
        MissingDependencyError: parquet without ``pyarrow``.
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

    Raises:
        ConfigError: a file cannot be read.
    """
    for path in paths:
        if path.is_dir():
            for file in _files_below(path):
                data = _content(file)
                if b"\0" not in data:
                    yield data
        else:
            yield _content(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror}") from error


def _files_below(root: Path, skip: Iterable[str] = ()) -> Iterator[Path]:
    """Files, and links to files, in sorted order; pipes, sockets and devices are no text."""
    left_out = {"__pycache__", *skip}

    def closed(error: OSError) -> None:
        raise ConfigError(
            f"data.paths: the folder {error.filename} cannot be read: {error.strerror}"
        ) from error

    for folder, folders, files in os.walk(root, onerror=closed):
        # In place: os.walk then neither enters the others nor changes the order.
        folders[:] = sorted(n for n in folders if n not in left_out and not n.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            # A link that leads nowhere is a mistake, told when it is read.
            if not name.startswith(".") and (path.is_file() or not os.path.exists(path)):
                yield path


def _check_paths(config: DataConfig) -> None:
    if not config.paths:
        raise ConfigError(f"data.paths: source {config.source!r} needs at least one path")
    missing = [path for path in config.paths if not os.path.exists(path)]
    if missing:
        raise ConfigError(
            "\n".join(f"data.paths: there is no file or folder {path!r}" for path in missing)
        )


def row_files(config: DataConfig) -> list[Path]:
    """The JSONL or parquet files of ``config``, those of its folders too.

    Raises:
        ConfigError: there is none.
    """
    suffixes = SUFFIXES[config.source]
    files: list[Path] = []
    for path in map(Path, config.paths):
        if path.is_dir():
            files += [f for f in _files_below(path) if f.name.endswith(suffixes)]
        else:
            files.append(path)
    if not files:
        raise ConfigError(f"data.paths: no {' or '.join(suffixes)} file in {list(config.paths)}")
    return files


def _row_documents(config: DataConfig) -> Iterator[bytes]:
    for file in row_files(config):
        for text in row_texts(file, config.source, config.text_field):
            yield text.encode()


@contextmanager
def _tokenizer_errors(path: str, what: str) -> Iterator[None]:
    """Errors of ``tokenizers``: bare exceptions, and panics, which are no ``Exception``."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ConfigError(f"data.tokenizer: {path!r} {what}: {error}") from error
        raise
