"""Rows of JSONL and parquet files, one at a time; a mistake in one names the file and the row."""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from internsp.errors import ConfigError, MissingDependencyError

SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"),
    "parquet": (".parquet",),
}
_BATCH_ROWS = 1024  # of a parquet file, in memory at once


def required(package: str, wanted_by: str) -> Any:
    """The optional ``package``, imported.

    Raises:
        MissingDependencyError: it is not installed; gives the install line, of the package itself.
    """
    name = package.partition(".")[0]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"{wanted_by} needs the package {name!r}: pip install {name}"
        ) from error


def row_texts(path: Path, source: str, text_field: str) -> Iterator[str]:
    """The texts ``text_field`` of a file's rows, in order.

    Args:
        source: ``"jsonl"`` (one JSON object a line, or one list of objects; ``.gz`` is unpacked) or
            ``"parquet"``.

    Raises:
        ConfigError: the file cannot be read, is cut, wrongly encoded or of another kind, or a row
            has no such text; names the file and the row, from 1.
        MissingDependencyError: parquet without ``pyarrow``.
    """
    rows = _json_rows(path) if source == "jsonl" else _parquet_rows(path, text_field)
    try:
        for number, row in rows:
            yield _text(path, number, row, text_field)
    except (OSError, EOFError, zlib.error) as error:  # of the file, or of what it was packed with
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"data.paths: {path} cannot be read to its end: {reason}") from error


def _text(path: Path, number: int, row: Any, text_field: str) -> str:
    if not isinstance(row, dict):
        raise ConfigError(
            f"data.paths: {path}, row {number}: not an object with named values, but "
            f"{type(row).__name__}"
        )
    text = row.get(text_field)
    if not isinstance(text, str):
        held = "nothing" if text is None else type(text).__name__
        other = f"{held} there" if text_field in row else f"it has {sorted(map(str, row))[:20]}"
        raise ConfigError(
            f"data.text_field: {path}, row {number} has no text {text_field!r}; {other}"
        )
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
    """One line, or (``number`` is ``None``) the whole file."""
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


def _parquet_rows(path: Path, text_field: str) -> Iterator[tuple[int, Any]]:
    parquet = required("pyarrow.parquet", f"{path}, a parquet file,")
    wrong = required("pyarrow", "parquet").ArrowException
    number = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = list(file.schema_arrow.names)
            if text_field not in names:
                raise ConfigError(
                    f"data.text_field: {path} has no column {text_field!r}; it has {names[:20]}"
                )
            for batch in file.iter_batches(_BATCH_ROWS, columns=[text_field]):
                for value in batch.column(text_field):
                    number += 1
                    yield number, {text_field: value.as_py()}
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.paths: {path}, row {number}: the text is not UTF-8 ({error.reason})"
        ) from error
    except (wrong, OSError) as error:
        if getattr(error, "errno", None):  # of the system; pyarrow's own have none
            raise
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"data.paths: {path}, after row {number}: not a whole parquet file: {told}"
        ) from error
