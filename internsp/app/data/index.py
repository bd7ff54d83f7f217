"""The tokens of each path: in memory, or in an index file that is made once and then reused.

An index is next to its path as the hidden file ``.NAME.KEY.index``, which reading a folder skips.
``KEY`` is a digest of the tokenizer and of the columns it was made with. The index is valid while
the names, sizes, modification times and a sample of the bytes of the files are unchanged.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from internsp.app.config import DataConfig, DocumentsConfig
from internsp.app.data import chat, store
from internsp.app.data.store import Header, TokenArray, TokenFile, TokenStore
from internsp.app.data.text import check_paths, files_of, read_pieces
from internsp.app.data.tokenizer import Tokenizer, Tokens, smallest_dtype
from internsp.base.sizes import human
from internsp.errors import ConfigError, InternspError

AUTO_BYTES = 64 << 20
"""Size of a path's files from which it is indexed with ``data.index = "auto"``."""

_YIELD_TOKENS = 1 << 20
_LONGEST_NAME = 150  # bytes: file systems allow 255, of which an index needs some for its key

Indices = Mapping[tuple[str, str], tuple[Path, Header]]
"""The file and header of each index, by path (as configured) and key."""


def parts_of(data: DataConfig) -> tuple[DocumentsConfig, ...]:
    """The tables that list documents: those of a mixture, or ``[data]`` itself."""
    return data.mixture or (data,)


def encoded(
    given: DocumentsConfig, tokenizer: Tokenizer, path: str | None = None
) -> Iterator[tuple[Tokens, store.End | None]]:
    """Tokens of the documents of ``path``, or of a source without paths."""
    paths = None if path is None else (path,)
    if given.format == "text":
        pieces = tokenizer.encode_pieces(read_pieces(given, paths))
        return store.documents(pieces, tokenizer.end_of_document)
    # A conversation ends as its template defines, without an end of document.
    return store.documents(chat.conversations(given, tokenizer, paths), None)


def dtype_of(given: DocumentsConfig, tokenizer: Tokenizer) -> Any:
    """Dtype of stored tokens: ids, or ids marked by :func:`chat.marked`."""
    return smallest_dtype(tokenizer.vocab_size * (1 if given.format == "text" else 2))


def prepare(
    data: DataConfig, tokenizer: Tokenizer
) -> Generator[int, None, tuple[Indices, list[str]]]:
    """Make the indices that are needed and missing; yields the tokens so far, now and then.

    Returns:
        All indices, and messages for the user about them.

    Raises:
        ConfigError: a path is missing or cannot be read, or its index cannot be written.
        MachineError: there is no disk space for an index, or another resource lacks.
    """
    found: dict[tuple[str, str], tuple[Path, Header]] = {}
    notes: list[str] = []
    for given in (*parts_of(data), *data.evaluation):
        if given.source == "stdlib":
            continue
        check_paths(given)
        key = _key(given, tokenizer)
        for path in given.paths:
            if (path, key) not in found and _needs_index(data, given, Path(path)):
                found[path, key] = yield from _index(data, given, tokenizer, path, key, notes)
    return found, notes


def _needs_index(data: DataConfig, given: DocumentsConfig, path: Path) -> bool:
    if data.index != "auto":
        return data.index == "always"
    total = 0
    for file in files_of(given, path):
        with suppress(OSError):  # reported when it is read
            total += file.stat().st_size
        if total >= AUTO_BYTES:
            return True
    return False


def _index(
    data: DataConfig,
    given: DocumentsConfig,
    tokenizer: Tokenizer,
    name: str,
    key: str,
    notes: list[str],
) -> Generator[int, None, tuple[Path, Header]]:
    path = Path(name)
    target = index_path(data, path, key)
    made_from = store.identity(path.parent, files_of(given, path))
    reason = _why_rebuild(target, key, made_from)
    start = time.monotonic()
    if reason is not None:
        reported = 0
        writing = store.write_index(
            target, encoded(given, tokenizer, name), key, made_from, dtype_of(given, tokenizer)
        )
        header = None
        while header is None:
            try:
                tokens = next(writing)
            except StopIteration as end:
                header = end.value
                break
            if tokens - reported >= _YIELD_TOKENS:
                reported = tokens
                yield tokens
        if store.identity(path.parent, files_of(given, path)) != made_from:
            target.unlink(missing_ok=True)
            raise ConfigError(f"data.paths: {path} was changed while its index was made")
    opened = TokenFile(target)
    how = "reused" if reason is None else f"made in {time.monotonic() - start:.1f} s ({reason})"
    notes.append(
        f"index {target}: {human(opened.nbytes)}, {opened.tokens:,} tokens in "
        f"{opened.documents:,} documents, {how}"
    )
    return target, opened.header


def index_path(data: DataConfig, path: Path, key: str) -> Path:
    """Path of an index. In ``data.index_dir`` its name has a digest of the indexed path."""
    full = Path(os.path.abspath(path))
    written = str(full).encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(written, digest_size=6).hexdigest()
    name = full.name if len(os.fsencode(full.name)) <= _LONGEST_NAME else digest
    if data.index_dir is None:
        return full.parent / f".{name}.{key}.index"
    return Path(data.index_dir) / f"{name}.{digest}.{key}.index"


def _key(given: DocumentsConfig, tokenizer: Tokenizer) -> str:
    parts = [given.source, given.format, *chat.columns(given).values(), tokenizer.fingerprint()]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def _why_rebuild(target: Path, key: str, made_from: str) -> str | None:
    """Why an existing index cannot be used; ``None`` if it can."""
    try:
        header = TokenFile(target).header
    except FileNotFoundError:
        return "there was none"
    except (ValueError, OSError) as error:
        return f"the old one could not be read: {error}"
    if (header.key, header.identity) != (key, made_from):
        return "the data have changed"
    return None


def open_stores(
    given: DocumentsConfig, tokenizer: Tokenizer, indices: Indices
) -> list[TokenStore]:
    """The tokens of each path, in order.

    Raises:
        InternspError: an index that rank 0 made cannot be seen here.
    """
    if given.source == "stdlib":
        return [TokenArray(encoded(given, tokenizer), dtype_of(given, tokenizer))]
    check_paths(given)
    key = _key(given, tokenizer)
    found: list[TokenStore] = []
    for path in given.paths:
        if (path, key) not in indices:
            read = encoded(given, tokenizer, path)
            found.append(TokenArray(read, dtype_of(given, tokenizer)))
            continue
        target, header = indices[path, key]
        try:
            file = TokenFile(target)
        except (ValueError, OSError) as error:
            raise InternspError(
                f"data.index_dir: the index {target}, which rank 0 has made or found, cannot be "
                f"read here: {error}; give a folder that all ranks see"
            ) from error
        if file.header != header:
            raise InternspError(
                f"data.index_dir: the index {target} differs from that of rank 0: give a folder "
                "that all ranks see"
            )
        found.append(file)
    return found
