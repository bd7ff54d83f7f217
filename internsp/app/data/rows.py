"""Rows of JSONL and parquet files, read as a stream; an error names the file and the row."""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from internsp.errors import ConfigError, MissingDependencyError

SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"),
    "parquet": (".parquet",),
}
_BATCH_ROWS = 256  # rows of a parquet file in memory at once


def required(package: str, wanted_by: str) -> Any:
    """Import the optional ``package``.

    Raises:
        MissingDependencyError: it is not installed; gives the install command.
    """
    name = package.partition(".")[0]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"{wanted_by} needs the package {name!r}: pip install {name}"
        ) from error


def file_rows(
    path: Path, source: str, fields: Mapping[str, str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """A file's rows in order: (number from 1, columns by name).

    Args:
        source: ``"jsonl"`` (one JSON object a line, or one list of objects; ``.gz`` is unpacked) or
            ``"parquet"``. Everything but a list of objects is read as a stream.
        fields: name of each column that is needed, by the key of ``[data]`` that sets it.

    Raises:
        ConfigError: the file cannot be read, is truncated, wrongly encoded or of another type, or a
            row lacks one of these columns; names the file and the row, from 1.
        MissingDependencyError: parquet without ``pyarrow``.
    """
    rows = _json_rows(path) if source == "jsonl" else _parquet_rows(path, fields)
    try:
        for number, row in rows:
            if not isinstance(row, dict):
                raise ConfigError(
                    f"data.paths: {path}, row {number}: not an object with named values, but "
                    f"{type(row).__name__}"
                )
            yield number, row
    except (OSError, EOFError, zlib.error) as error:  # zlib: a damaged .gz file
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"data.paths: {path} cannot be read to its end: {reason}") from error


def row_texts(path: Path, source: str, text_field: str) -> Iterator[str]:
    """The column ``text_field`` of a file's rows, in order; see :func:`file_rows`."""
    for number, row in file_rows(path, source, {"text_field": text_field}):
        yield text_of(path, number, row, "text_field", text_field)


def text_of(path: Path, number: int, row: Mapping[str, Any], key: str, field: str) -> str:
    """The text in column ``field`` of a row; ``data.key`` names the column.

    Raises:
        ConfigError: it has no text there; names the file, the row and the key.
    """
    text = row.get(field)
    if not isinstance(text, str):
        held = "nothing" if text is None else type(text).__name__
        other = f"{held} there" if field in row else f"it has {sorted(map(str, row))[:20]}"
        raise ConfigError(f"data.{key}: {path}, row {number} has no text {field!r}; {other}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"data.paths: {path}, row {number}: half a character (\\u{ord(text[error.start]):x}) "
            "in the text, which is not Unicode"
        ) from error
    return text


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with closing(_opened(path)) as file:
        for number, line in enumerate(file, 1):
            data = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if number == 1 and data.lstrip()[:1] == b"[":
                yield from enumerate(_parsed(path, None, data + file.read()), 1)
                return
            if data.strip():
                yield number, _parsed(path, number, data)


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _parsed(path: Path, number: int | None, data: bytes) -> Any:
    """Parse one line of JSON, or (``number`` is ``None``) the whole file."""
    where = f"data.paths: {path}" if number is None else f"data.paths: {path}, row {number}"
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: byte {error.start + 1} is not UTF-8 ({error.reason}): save it as UTF-8"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where}: lists or objects nested too deeply") from error
    except ValueError as error:
        raise ConfigError(
            f"{where} is not JSON: {error} (cut off, or another kind of file?)"
        ) from error


def _parquet_rows(path: Path, fields: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    parquet = required("pyarrow.parquet", f"{path}, a parquet file,")
    wrong = required("pyarrow", "parquet").ArrowException
    number = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = list(file.schema_arrow.names)
            for key, field in fields.items():
                if field not in names:
                    raise ConfigError(
                        f"data.{key}: {path} has no column {field!r}; it has {names[:20]}"
                    )
            wanted = list(fields.values())
            for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                for values in zip(*(batch.column(field) for field in wanted), strict=True):
                    number += 1
                    read = (value.as_py() for value in values)
                    yield number, dict(zip(wanted, read, strict=True))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.paths: {path}, row {number}: the text is not UTF-8 ({error.reason})"
        ) from error
    except (wrong, OSError) as error:
        if getattr(error, "errno", None):  # of the operating system; pyarrow's own have none
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"data.paths: {path}, after row {number}: not a complete parquet file: {reason}"
        ) from error
