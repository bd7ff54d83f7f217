"""Tokens of documents, stored end to end: in memory, or on disk as ``.bin`` and ``.idx`` files.

The files are those of Megatron: ``NAME.bin`` has the tokens, ``NAME.idx`` their dtype and where
documents end. A user's own pair is read where it lies (``source = "tokens"``). Of other sources
the tokens of a large path are made once, in the hidden folder ``.NAME.KEY.FILES.tokens`` beside
the path, which reading a folder skips. ``KEY`` is a digest of the tokenizer and of the column,
``FILES`` one of the files' names, sizes and modification times: a folder that is there is valid.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import secrets
import shutil
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from internsp.app.config import DataConfig, DocumentsConfig
from internsp.app.data.chat import conversations
from internsp.app.data.documents import files_of, paths_of, read_pieces
from internsp.app.data.tokenizer import Tokenizer, Tokens, smallest_dtype
from internsp.base.sizes import human
from internsp.errors import MACHINE_ERRNOS, ConfigError, InternspError, MachineError

CACHED_BYTES = 64 << 20
"""Size of a path's files from which its tokens are kept on disk also without data.cache_dir."""

_HEAD = struct.Struct("<9sQBQQ")  # of an .idx file: magic, version, dtype, sequences, documents
_MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_RECORD = np.dtype([("tokens", "<u8"), ("digest", ">u8", 2)])
_AT_ONCE = 1 << 20  # tokens, or documents, that are read at once
_LEFT_SECONDS = 3600  # what a writer that was killed has left: a living one writes more often
_LONGEST_NAME = 150  # bytes: file systems allow 255, of which digests need some

Read = Iterable[tuple[Tokens, bytes | None]]
"""Pieces of documents' tokens; the last piece of each comes with a digest of the document."""
Cached = Mapping[tuple[str, str], Path]
"""The folder of tokens of each path (as configured) and key that has one."""


@dataclass(frozen=True)
class TokenStore:
    """Documents stored end to end.

    Attributes:
        ids: all tokens.
        sequences: number of tokens of each sequence; a document is one sequence or several.
        documents: ``[n + 1]``, first sequence of each document, and the end of the last.
        digests: ``[n, 2]``, digest of each document's tokens without its end.
    """

    ids: Tokens
    sequences: NDArray[np.int32]
    documents: NDArray[np.int64]
    digests: NDArray[np.uint64]

    @classmethod
    def in_memory(cls, read: Read, dtype: Any) -> TokenStore:
        """All tokens of ``read``."""
        pieces: list[Tokens] = [np.zeros(0, dtype)]
        ends = _ends(read, lambda piece: pieces.append(piece.astype(dtype, copy=False)))
        return cls(np.concatenate(pieces), *ends)

    @classmethod
    def mapped(cls, pair: Path, digests: Path | None = None) -> TokenStore:
        """Map ``pair``, a ``.bin`` file with its ``.idx`` beside it; without digests if there are
        none yet.

        Raises:
            ValueError: a file was cut, or has another layout.
            OSError: a file cannot be read.
        """
        index, size = pair.with_suffix(".idx"), pair.stat().st_size
        with index.open("rb") as file:
            head, length = file.read(_HEAD.size), os.fstat(file.fileno()).st_size
        magic, version, code, count, ends = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
        if magic != _MAGIC or version != 1 or code not in _DTYPES:
            raise ValueError(f"{index} is no index of tokens as Megatron writes it")
        if length != _HEAD.size + 12 * count + 8 * ends:
            raise ValueError(f"{index} was cut, or is of another kind: it has {length} bytes")
        sequences = _map(index, "<i4", count, _HEAD.size)
        documents = _map(index, "<i8", ends, _HEAD.size + 12 * count)
        dtype, tokens = np.dtype(_DTYPES[code]), int(sequences.sum(dtype=np.int64))
        if size != tokens * dtype.itemsize:
            raise ValueError(
                f"{pair} was cut, or is another file: it has {size} bytes, and its .idx lists "
                f"{tokens} tokens of {dtype.itemsize}"
            )
        in_order = ends and documents[0] == 0 and bool((documents[1:] >= documents[:-1]).all())
        if not in_order or documents[-1] != count or (count and sequences.min() < 0):
            raise ValueError(f"{index} lists documents that are not its sequences")
        numbers = 0 if digests is None else digests.stat().st_size // 8
        found = _map(digests or pair, ">u8", numbers).reshape(-1, 2)
        made = cls(_map(pair, dtype, tokens), sequences, documents, found)
        if digests is not None and len(found) != len(made.lengths()):
            raise ValueError(f"{digests} was cut")
        return made

    def lengths(self) -> NDArray[np.int64]:
        """``[n]``, number of tokens of each document, with its end; empty ones are left out."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sequences, dtype=np.int64)])
        found = np.diff(ends[self.documents])
        return found[found > 0]

    def digest(self) -> str:
        """Digest of all documents, in order."""
        content, lengths = hashlib.blake2b(digest_size=16), self.lengths()
        for at in range(0, len(lengths), _AT_ONCE):
            part = slice(at, at + _AT_ONCE)
            records = np.empty(len(lengths[part]), _RECORD)
            records["tokens"], records["digest"] = lengths[part], self.digests[part]
            content.update(records.data)
        return content.hexdigest()


def _map(path: Path, dtype: Any, count: int, offset: int = 0) -> NDArray[Any]:
    if not count:  # nothing can be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", offset, (count,)))


def _ends(read: Read, keep: Callable[[Tokens], Any]) -> tuple[Any, Any, Any]:
    """Pass all tokens to ``keep``; returns the sequences, documents and digests of a
    :class:`TokenStore`. A piece is a sequence."""
    sequences, documents, digests = array("i"), array("q", [0]), bytearray()
    for piece, digest in read:
        keep(piece)
        sequences.append(len(piece))
        if digest is not None:
            documents.append(len(sequences))
            digests += digest
    found = np.frombuffer(digests, ">u8").reshape(-1, 2)
    return np.asarray(sequences), np.asarray(documents), found


def documents(encoded: Iterable[tuple[Tokens, bool]], end_of_document: int | None) -> Read:
    """Add digests and ends to the documents that ``encoded`` gives in pieces.

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
            yield last, digest.digest()
        digest, count = hashlib.blake2b(digest_size=16), 0


def _documents_of_pair(path: Path, tokenizer: Tokenizer) -> Read:
    """The documents of a user's own pair, with the digests that their texts would have."""
    try:
        store = TokenStore.mapped(path)
    except (ValueError, OSError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        raise ConfigError(f"data.paths: {reason}; give a .bin file with its .idx") from error
    dtype, end = smallest_dtype(tokenizer.vocab_size), tokenizer.end_of_document
    lengths = store.lengths()
    for stop, count in zip(map(int, np.cumsum(lengths)), map(int, lengths), strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for at in range(stop - count, stop, _AT_ONCE):
            given, last = store.ids[at : min(at + _AT_ONCE, stop)], at + _AT_ONCE >= stop
            if given.min() < 0 or given.max() >= tokenizer.vocab_size:
                raise ConfigError(
                    f"data.paths: {path} has tokens from {given.min()} to {given.max()}, but "
                    f"data.tokenizer has the ids below {tokenizer.vocab_size}: give the tokenizer "
                    "that made the tokens"
                )
            piece = given.astype(dtype)
            digest.update((piece[:-1] if last and piece[-1] == end else piece).data)
            yield piece, digest.digest() if last else None


def encoded(given: DocumentsConfig, tokenizer: Tokenizer, path: Path) -> Read:
    """Tokens of the documents of ``path``, one of :func:`paths_of`'s."""
    if given.source == "tokens":
        return _documents_of_pair(path, tokenizer)
    if given.format == "chat":  # ends as its template says, without an end of document
        return documents(conversations(given, tokenizer, path), None)
    pieces = tokenizer.encode_pieces(read_pieces(given, path))
    return documents(pieces, tokenizer.end_of_document)


def _dtype_of(given: DocumentsConfig, tokenizer: Tokenizer) -> Any:
    """Dtype of stored tokens: ids, or ids marked by :func:`internsp.app.data.chat.marked`."""
    return smallest_dtype(tokenizer.vocab_size * (2 if given.format == "chat" else 1))


def _key(given: DocumentsConfig, tokenizer: Tokenizer) -> str:
    column = {"text": given.text_field, "chat": given.messages_field}[given.format]
    parts = [given.source, given.format, column, tokenizer.fingerprint()]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def state_of(given: DocumentsConfig, path: Path) -> tuple[str, int]:
    """Digest of the names, sizes and modification times of a path's files, and their bytes."""
    digest, total = hashlib.blake2b(digest_size=6), 0
    index = [path.with_suffix(".idx")] if given.source == "tokens" else []
    for file in [*files_of(given, path), *index]:
        try:
            status = file.stat()
        except OSError as error:
            raise ConfigError(f"data.paths: {file} cannot be read: {error.strerror}") from error
        total += status.st_size
        name = file.relative_to(path.parent)
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest(), total


def prepare(
    data: DataConfig, tokenizer: Tokenizer, watched: Callable[[Read], Read] = iter
) -> tuple[Cached, list[str]]:
    """Make the tokens on disk that are missing.

    Args:
        watched: gives on the pieces that it is given; for what must happen between two of them.

    Returns:
        All folders of tokens, and messages for the user about them.

    Raises:
        ConfigError: a path is missing or cannot be read, or its tokens cannot be written.
        MachineError: there is no disk space for them, or another resource lacks.
    """
    found: dict[tuple[str, str], Path] = {}
    notes: list[str] = []
    for given in (*(data.mixture or (data,)), *data.evaluation):
        key = _key(given, tokenizer)
        for path in paths_of(given):
            if given.source == "stdlib" or (str(path), key) in found:
                continue
            state, size = state_of(given, path)
            if size >= CACHED_BYTES or data.cache_dir is not None:
                folder = _folder(data, path, f"{key}.{state}")
                found[str(path), key] = folder
                read = watched(encoded(given, tokenizer, path))
                notes.append(_made(given, path, folder, read, _dtype_of(given, tokenizer)))
    return found, notes


def _folder(data: DataConfig, path: Path, key: str) -> Path:
    """Folder of a path's tokens. In ``data.cache_dir`` its name has a digest of the path."""
    full = Path(os.path.abspath(path))
    digest = hashlib.blake2b(os.fsencode(full), digest_size=6).hexdigest()
    name = full.name if len(os.fsencode(full.name)) <= _LONGEST_NAME else digest
    if data.cache_dir is None:
        return full.parent / f".{name}.{key}.tokens"
    return Path(data.cache_dir) / f"{name}.{digest}.{key}.tokens"


def _made(given: DocumentsConfig, path: Path, folder: Path, read: Read, dtype: Any) -> str:
    """Make a folder of tokens if there is none; returns what was done, for the user."""
    begin, how = time.monotonic(), "reused"
    try:
        store = _opened(given, path, folder)
    except (ValueError, OSError):  # there is none, or it was cut
        try:
            if folder.exists():
                cut = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.partial")
                with suppress(FileNotFoundError):  # another run did this
                    folder.rename(cut)
                shutil.rmtree(cut, ignore_errors=True)
            _write(given, path, folder, read, dtype)
        except OSError as error:
            kind = MachineError if error.errno in MACHINE_ERRNOS else ConfigError
            raise kind(
                f"data.cache_dir: the tokens of {path} cannot be written to {folder}: "
                f"{error.strerror}; give another folder by data.cache_dir"
            ) from error
        store, how = _opened(given, path, folder), f"made in {time.monotonic() - begin:.1f} s"
    _remove_left(folder, made=how != "reused")
    size = human(store.ids.nbytes + store.digests.nbytes)
    counts = f"{len(store.ids):,} tokens in {len(store.digests):,} documents"
    return f"tokens of {path} in {folder}: {size}, {counts}, {how}"


def _write(given: DocumentsConfig, path: Path, folder: Path, read: Read, dtype: Any) -> None:
    """Write a folder of tokens beside its place and rename it: it is there whole or not at all."""
    partial = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        if given.source == "tokens":  # the tokens stay where they are
            _, _, digests = _ends(read, len)
        else:
            digests = _write_pair(partial, read, np.dtype(dtype))
        with _durable(partial / "digests") as file:
            file.write(digests.data)
        if f".{state_of(given, path)[0]}." not in folder.name:
            raise ConfigError(f"data.paths: {path} was changed while its tokens were made")
        partial.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another run has made the same
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_pair(folder: Path, read: Read, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Write ``tokens.bin`` and ``tokens.idx``; returns the digests."""
    with _durable(folder / "tokens.bin") as file:
        sequences, documents, digests = _ends(
            read, lambda piece: file.write(np.ascontiguousarray(piece, dtype).data)
        )
    code = next(code for code, name in _DTYPES.items() if np.dtype(name) == dtype)
    begins = (np.cumsum(sequences, dtype=np.int64) - sequences) * dtype.itemsize
    with _durable(folder / "tokens.idx") as file:
        file.write(_HEAD.pack(_MAGIC, 1, code, len(sequences), len(documents)))
        for values in (sequences, begins, documents):
            file.write(values.data)
    return digests


@contextmanager
def _durable(path: Path) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _remove_left(folder: Path, made: bool) -> None:
    """Remove what writers that were killed have left, and if a folder was made now, also those of
    the same path and key with its files as they were before."""
    base = glob.escape(folder.name.rsplit(".", 2)[0])
    for other in folder.parent.glob(f"{base}.*.tokens*"):
        unused = made and other.suffix == ".tokens" and other != folder
        with suppress(OSError):  # removed by another run meanwhile
            if other.suffix == ".partial":
                written = max(file.stat().st_mtime for file in [other, *other.iterdir()])
                unused = time.time() - written > _LEFT_SECONDS
        if unused:
            shutil.rmtree(other, ignore_errors=True)


def _opened(given: DocumentsConfig, path: Path, folder: Path) -> TokenStore:
    pair = path if given.source == "tokens" else folder / "tokens.bin"
    return TokenStore.mapped(pair, folder / "digests")


def open_stores(given: DocumentsConfig, tokenizer: Tokenizer, cached: Cached) -> list[TokenStore]:
    """The tokens of each path, in order; those without a folder are made in memory.

    Raises:
        InternspError: a folder that rank 0 made cannot be read here.
    """
    key = _key(given, tokenizer)
    found: list[TokenStore] = []
    for path in paths_of(given):
        folder = cached.get((str(path), key))
        if folder is None:
            read = encoded(given, tokenizer, path)
            found.append(TokenStore.in_memory(read, _dtype_of(given, tokenizer)))
            continue
        try:
            found.append(_opened(given, path, folder))
        except (ValueError, OSError) as error:
            raise InternspError(
                f"data.cache_dir: the tokens in {folder}, which rank 0 has made or found, cannot "
                f"be read here: {error}; give a folder that all ranks see"
            ) from error
    return found
