"""Tokenized documents stored end to end, in memory or in an index file; any range can be read.

An index is one file: tokens, then a record for each document (number of tokens, digest of them),
then a JSON header that records what it was made from. It is not mapped into memory: a rank reads
only the ranges that its sequences need.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from internsp.app.data.tokenizer import Tokens
from internsp.errors import MACHINE_ERRNOS, ConfigError, InternspError, MachineError

_MAGIC = b"internsp"
_FORMAT = 1
_TAIL = 16  # bytes: length of the JSON, magic
_RECORD = np.dtype([("tokens", "<u8"), ("digest", ">u8", 2)])
_SAMPLE = 64 << 10
_AT_ONCE = 1 << 20  # records read at once
_LEFT_SECONDS = 60.0  # a younger unlocked file may be of a writer that has not locked it yet


class End(NamedTuple):
    """End of a document: its number of tokens (with the end token) and a digest of its content."""

    tokens: int
    digest: bytes


class TokenStore(Protocol):
    """Documents stored end to end.

    Attributes:
        tokens: number of tokens of all documents.
        documents: number of documents.
        digest: digest of all documents, in order.
    """

    tokens: int
    documents: int
    digest: str

    def lengths(self) -> NDArray[np.int64]:
        """``[documents]``, number of tokens of each document, with its end."""
        ...

    def digests(self) -> NDArray[np.uint64]:
        """``[documents, 2]``, digest of each document's tokens."""
        ...

    def read(self, begin: int, count: int) -> Tokens:
        """``count`` tokens from ``begin`` on."""
        ...


def documents(
    encoded: Iterable[tuple[Tokens, bool]], end_of_document: int | None
) -> Iterator[tuple[Tokens, End | None]]:
    """Add the ends of documents to pieces of tokens; yields the last piece of each with an ``End``.

    Documents without a token are left out: nothing could be learned from them.

    Args:
        encoded: pieces of tokens, and whether the document ends with the piece.
        end_of_document: the id appended to each document; ``None``: none.
    """
    digest, count = hashlib.blake2b(digest_size=16), 0
    for piece, ends in encoded:
        digest.update(np.ascontiguousarray(piece).data)
        count += len(piece)
        if not ends:
            yield piece, None
            continue
        if count:
            last = piece
            if end_of_document is not None:
                last = np.append(piece, np.asarray(end_of_document, piece.dtype))
                count += 1
            yield last, End(count, digest.digest())
        digest, count = hashlib.blake2b(digest_size=16), 0


class TokenArray:
    """A :class:`TokenStore` in memory."""

    def __init__(self, read: Iterable[tuple[Tokens, End | None]], dtype: Any) -> None:
        pieces: list[Tokens] = [np.zeros(0, dtype)]
        ends: list[End] = []
        for piece, end in read:
            pieces.append(piece.astype(dtype, copy=False))
            if end is not None:
                ends.append(end)
        self._tokens = np.concatenate(pieces)
        self._lengths = np.array([end.tokens for end in ends], np.int64)
        joined = b"".join(end.digest for end in ends)
        self._digests = np.frombuffer(joined, ">u8").reshape(-1, 2).astype(np.uint64)
        self.tokens, self.documents = len(self._tokens), len(ends)
        content = hashlib.blake2b(digest_size=16)
        for end in ends:
            _add(content, end)
        self.digest = content.hexdigest()

    def lengths(self) -> NDArray[np.int64]:
        """See :class:`TokenStore`."""
        return self._lengths

    def digests(self) -> NDArray[np.uint64]:
        """See :class:`TokenStore`."""
        return self._digests

    def read(self, begin: int, count: int) -> Tokens:
        """See :class:`TokenStore`."""
        return self._tokens[begin : begin + count]


def _add(content: Any, end: End) -> None:
    content.update(end.tokens.to_bytes(8, "little") + end.digest)


@dataclass(frozen=True)
class Header:
    """The header of an index.

    Attributes:
        key: digest of how it was made: source, columns, tokenizer.
        identity: digest of the files that it was made from (:func:`identity`).
        dtype: dtype of the tokens.
        digest: digest of all documents.
        sample: digest of some of the index's own bytes, which shows whether it is intact.
    """

    key: str
    identity: str
    dtype: str
    tokens: int
    documents: int
    digest: str
    sample: str
    format: int = _FORMAT

    @property
    def nbytes(self) -> int:
        """Size of the file without the header."""
        return self.tokens * np.dtype(self.dtype).itemsize + self.documents * _RECORD.itemsize


class TokenFile:
    """A :class:`TokenStore` in an index file; reading continues unchanged if it is replaced.

    Raises:
        ValueError: the file is no intact index.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        self.header = self._header(size)
        self.nbytes = size
        self.tokens, self.documents = self.header.tokens, self.header.documents
        self.digest = self.header.digest
        self._dtype = np.dtype(self.header.dtype)

    def _header(self, size: int) -> Header:
        if size < _TAIL:
            raise ValueError("it is truncated")
        tail = self._bytes(size - _TAIL, _TAIL)
        length = int.from_bytes(tail[:8], "little")
        if tail[8:] != _MAGIC or length > size - _TAIL:
            raise ValueError("it is truncated, or not an index")
        try:
            fields = json.loads(self._bytes(size - _TAIL - length, length))
            header = Header(**fields)
            fits = header.format == _FORMAT and header.nbytes == size - _TAIL - length
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"its header is invalid: {error}") from None
        if not fits:
            raise ValueError("it has another length than its header says, or another format")
        if sample_of(self._file, header.nbytes) != header.sample:
            raise ValueError("it is damaged: the digest of a sample is another one")
        return header

    def _bytes(self, begin: int, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            part = os.pread(self._file.fileno(), count - len(found), begin + len(found))
            if not part:
                raise InternspError(f"{self.path} was cut while it was read: start the run again")
            found += part
        return bytes(found)

    def read(self, begin: int, count: int) -> Tokens:
        """See :class:`TokenStore`."""
        item = self._dtype.itemsize
        return np.frombuffer(self._bytes(begin * item, count * item), self._dtype)

    def lengths(self) -> NDArray[np.int64]:
        """See :class:`TokenStore`."""
        found = np.empty(self.documents, np.int64)
        for begin, part in self._records():
            found[begin : begin + len(part)] = part["tokens"]
        return found

    def digests(self) -> NDArray[np.uint64]:
        """See :class:`TokenStore`."""
        found = np.empty((self.documents, 2), np.uint64)
        for begin, part in self._records():
            found[begin : begin + len(part)] = part["digest"]
        return found

    def _records(self) -> Iterator[tuple[int, NDArray[Any]]]:
        at = self.tokens * self._dtype.itemsize
        for begin in range(0, self.documents, _AT_ONCE):
            count = min(_AT_ONCE, self.documents - begin)
            data = self._bytes(at + begin * _RECORD.itemsize, count * _RECORD.itemsize)
            yield begin, np.frombuffer(data, _RECORD)


def sample_of(file: IO[bytes], size: int) -> str:
    """Digest of the beginning, the middle and the end of a file's first ``size`` bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for begin in sorted({0, max(0, size // 2 - _SAMPLE // 2), max(0, size - _SAMPLE)}):
        file.seek(begin)
        digest.update(file.read(min(_SAMPLE, size - begin)))
    return digest.hexdigest()


def identity(root: Path, files: Iterable[Path]) -> str:
    """Digest of the names (relative to ``root``), sizes, modification times and samples of files.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                sample = sample_of(file, status.st_size)
        except OSError as error:
            raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror}") from error
        name = path.relative_to(root)
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0{sample}\0".encode())
    return digest.hexdigest()


def write_index(
    target: Path, read: Iterable[tuple[Tokens, End | None]], key: str, made_from: str, dtype: Any
) -> Generator[int, None, Header]:
    """Write an index to a temporary file and rename it, durably; yields the tokens so far.

    Raises:
        ConfigError: the folder cannot be written.
        MachineError: there is no disk space, or another resource lacks.
    """
    try:
        with _partial(target) as file, tempfile.TemporaryFile(dir=target.parent) as records:
            header = yield from _write(file, records, read, key, made_from, dtype)
            os.replace(file.name, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        kind = MachineError if error.errno in MACHINE_ERRNOS else ConfigError
        raise kind(
            f"data.index_dir: the index {target} cannot be written: {error.strerror}; give another "
            'folder by data.index_dir, or hold all tokens in memory by data.index = "never"'
        ) from error
    return header


def _write(
    file: IO[bytes],
    records: IO[bytes],
    read: Iterable[tuple[Tokens, End | None]],
    key: str,
    made_from: str,
    dtype: Any,
) -> Generator[int, None, Header]:
    content = hashlib.blake2b(digest_size=16)
    tokens = count = 0
    for piece, end in read:
        file.write(np.ascontiguousarray(piece, dtype).data)
        tokens += len(piece)
        if end is not None:
            _add(content, end)
            records.write(end.tokens.to_bytes(8, "little") + end.digest)
            count += 1
        yield tokens
    records.seek(0)
    shutil.copyfileobj(records, file)
    size = file.tell()
    file.flush()
    sample = sample_of(file, size)
    name = np.dtype(dtype).str
    header = Header(key, made_from, name, tokens, count, content.hexdigest(), sample)
    text = json.dumps(asdict(header)).encode() + b"\n"
    file.seek(size)
    file.write(text + len(text).to_bytes(8, "little") + _MAGIC)
    file.flush()
    os.fsync(file.fileno())
    return header


@contextlib.contextmanager
def _partial(target: Path) -> Iterator[IO[bytes]]:
    """A new file beside ``target``; files that ended writers left there are removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f"{glob.escape(target.name)}.*.partial"):
        with contextlib.suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer runs
            if time.time() - os.fstat(file.fileno()).st_mtime > _LEFT_SECONDS:
                left.unlink()
    path = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    with path.open("xb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
        finally:
            path.unlink(missing_ok=True)
