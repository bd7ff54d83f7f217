"""Reads documents as pieces of text, in a fixed order.

Sources are the standard library of the running Python, text files or folders, rows of JSONL and
parquet files, and rows of folders that the package ``datasets`` has saved. All are read as streams:
the memory needed does not grow with the size of a file. An error names the file and the row.
"""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from internsp.app.config import DocumentsConfig
from internsp.app.data.tokenizer import PIECE_BYTES, Piece, required
from internsp.errors import ConfigError

STDLIB_BYTES = 32_000_000
"""Limit for the bytes read of the standard library: a run starts at once with any Python."""

# Tests are unusual code; the rest is not written by hand, or not part of the library.
_NOT_LIBRARY = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip
_SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"),
    "parquet": (".parquet",),
    "tokens": (".bin",),
}
_BATCH_ROWS = 256  # rows of a parquet file or a saved dataset in memory at once


def paths_of(given: DocumentsConfig) -> list[Path]:
    """What a source reads one by one: its paths, or the folder of the standard library; for a
    folder of tokens, the files in it.

    Raises:
        ConfigError: none of the paths has a file of the source's type.
    """
    if given.source == "stdlib":
        return [Path(sysconfig.get_path("stdlib"))]
    paths = [Path(path) for path in given.paths]
    if not any(next(files_of(given, path), None) for path in paths) and given.source in _SUFFIXES:
        suffixes = " or ".join(_SUFFIXES[given.source])
        raise ConfigError(f"data.paths: no {suffixes} file in {list(given.paths)}")
    if given.source == "tokens":
        return [file for path in paths for file in files_of(given, path)]
    return paths


def files_of(given: DocumentsConfig, path: Path) -> Iterator[Path]:
    """The source's files at ``path``: the file itself, or all files below the folder in sorted
    order, without hidden ones."""
    if not path.is_dir():
        yield path
        return
    suffixes = _SUFFIXES.get(given.source, ("",))
    yield from (file for file in _files_below(path) if file.name.endswith(suffixes))


def read_pieces(given: DocumentsConfig, path: Path) -> Iterator[Piece]:
    """The text of one of :func:`paths_of`'s; empty documents are left out.

    Raises:
        ConfigError: a file cannot be read, or a row has no text in ``text_field``.
        MissingDependencyError: an optional package is needed; gives the install command.
    """
    if given.source == "stdlib":
        library = sysconfig.get_path("stdlib")
        yield from (Piece(text, True, library) for text in stdlib_documents() if text.strip())
    elif given.source == "text":
        for file in files_of(given, path):
            yield from _file_pieces(file, leave_out_binary=path.is_dir())
    else:
        for where, value in read_rows(given, path):
            text = _encoded(where, given.text_field, value)
            if text.strip():
                yield Piece(text, True)


def stdlib_documents(limit: int = STDLIB_BYTES) -> Iterator[bytes]:
    """The standard library's ``*.py`` files, sorted by path, up to ``limit`` bytes in total.

    Tests, installed packages and generated files (encodings, pydoc topics) are left out.
    """
    left = limit
    for path in _files_below(Path(sysconfig.get_path("stdlib")), skip=_NOT_LIBRARY):
        if path.suffix == ".py":
            data = path.read_bytes()[:left]
            left -= len(data)
            yield data
            if left <= 0:
                return


def _files_below(root: Path, skip: Iterable[str] = ()) -> Iterator[Path]:
    """Files and links to files, in sorted order, without pipes, sockets and devices."""
    left_out = {"__pycache__", *skip}

    def closed(error: OSError) -> None:
        raise ConfigError(
            f"data.paths: the folder {error.filename} cannot be read: {error.strerror}"
        ) from error

    for folder, folders, files in os.walk(root, onerror=closed):
        # Changed in place: os.walk then visits only these folders, in this order.
        folders[:] = sorted(n for n in folders if n not in left_out and not n.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            # A broken link is a mistake, reported when it is read.
            if not name.startswith(".") and (path.is_file() or not os.path.exists(path)):
                yield path


def _file_pieces(path: Path, leave_out_binary: bool) -> Iterator[Piece]:
    """A text file as one document; binary files can be left out: a NUL byte in the first piece."""
    try:
        with path.open("rb") as file:
            pieces = (piece._replace(file=str(path)) for piece in _cut(file.read))
            first = next(pieces)
            blank = first.ends and not first.text.strip()
            if not blank and not (leave_out_binary and b"\0" in first.text):
                yield first
                yield from pieces
    except OSError as error:
        raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror}") from error


def _cut(read: Callable[[int], bytes]) -> Iterator[Piece]:
    """Split a large file into pieces, after a line break if possible, else between characters."""
    left = b""
    while True:
        text = left + read(PIECE_BYTES - len(left))
        if len(text) < PIECE_BYTES:
            yield Piece(text, True)
            return
        at = text.rfind(b"\n") + 1
        if not at:  # no line ends: the last position that is not inside a UTF-8 character
            decoder = getincrementaldecoder("utf-8")(errors="replace")
            decoder.decode(text[-4:])  # a character has at most four bytes
            at = len(text) - len(decoder.getstate()[0])
        yield Piece(text[:at], False)
        left = text[at:]


def read_rows(given: DocumentsConfig, path: Path) -> Iterator[tuple[str, Any]]:
    """(file and row for errors, value) of the column that ``given`` names, in order.

    Raises:
        ConfigError: a file cannot be read, is cut, wrongly encoded or of another type, or has no
            such column.
        MissingDependencyError: an optional package is needed; gives the install command.
    """
    key = "text_field" if given.format == "text" else "messages_field"
    read = _json_rows if given.source == "jsonl" else _column
    # A saved dataset is a folder; of other sources every file below a folder is read.
    for file in [path] if given.source == "datasets" else files_of(given, path):
        try:
            for number, value in read(file, key, getattr(given, key)):
                yield f"{file}, row {number}", value
        except (OSError, EOFError, zlib.error) as error:  # zlib: a damaged .gz file
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ConfigError(f"data.paths: {file} cannot be read to its end: {reason}") from error


def _encoded(where: str, field: str, value: Any) -> bytes:
    """The text of a row as UTF-8."""
    if not isinstance(value, str):
        held = "nothing" if value is None else type(value).__name__
        raise ConfigError(f"data.text_field: {where} has no text {field!r}; {held} there")
    try:
        return value.encode()
    except UnicodeEncodeError as error:  # half a character
        raise ConfigError(f"data.paths: {where}: {error}") from error


def _json_rows(path: Path, key: str, field: str) -> Iterator[tuple[int, Any]]:
    """One object a line, or one list of objects in the whole file; ``.gz`` is unpacked."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            data = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if number == 1 and data.lstrip()[:1] == b"[":
                rows = _parsed(str(path), data + file.read())
                yield from ((n, _named(path, n, row, key, field)) for n, row in enumerate(rows, 1))
                return
            if data.strip():
                row = _parsed(f"{path}, row {number}", data)
                yield number, _named(path, number, row, key, field)


def _named(path: Path, number: int, row: Any, key: str, field: str) -> Any:
    if not isinstance(row, dict):
        raise ConfigError(
            f"data.paths: {path}, row {number}: not an object with named values, but "
            f"{type(row).__name__}"
        )
    if field not in row:
        names = sorted(map(str, row))[:20]
        raise ConfigError(f"data.{key}: {path}, row {number} has no {field!r}; it has {names}")
    return row[field]


def _parsed(where: str, data: bytes) -> Any:
    """Parse one line of JSON, or the whole file."""
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"data.paths: {where} is not JSON in UTF-8: {error} (cut off, or another kind of file?)"
        ) from error


def _column(path: Path, key: str, field: str) -> Iterator[tuple[int, Any]]:
    """The column ``field`` of a parquet file, or of a folder that ``datasets`` has saved."""
    saved, number = path.is_dir(), 0
    wanted_by = f"{path}, a saved dataset," if saved else f"{path}, a parquet file,"
    library = required("datasets" if saved else "pyarrow.parquet", wanted_by)
    arrow = required("pyarrow", wanted_by)
    try:
        names, batches = (_saved if saved else _parquet)(library, path)
        if field not in names:
            raise ConfigError(f"data.{key}: {path} has no column {field!r}; it has {names[:20]}")
        for batch in batches(field):
            yield from enumerate(batch[field], number + 1)
            number += len(batch[field])
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None):  # of the operating system; pyarrow's own have none
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"data.paths: {path}, after row {number}: cannot be read, or not to its end: {reason}"
        ) from error


Columns = tuple[list[str], Callable[[str], Iterable[dict[str, Any]]]]
"""Names of all columns, and a function that reads one of them in batches."""


def _parquet(parquet: Any, path: Path) -> Columns:
    file = parquet.ParquetFile(path, page_checksum_verification=True)  # closed with its last batch

    def batches(field: str) -> Iterator[dict[str, Any]]:
        with file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=[field]):
                yield batch.to_pydict()

    return list(file.schema_arrow.names), batches


def _saved(datasets: Any, path: Path) -> Columns:
    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, dict):
        first = path / next(iter(saved))
        raise ConfigError(f"data.paths: {path} has splits {sorted(saved)}: name one, as {first}")
    rows = saved.with_format(None)
    return rows.column_names, lambda field: rows.select_columns(field).iter(_BATCH_ROWS)
