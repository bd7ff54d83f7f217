"""Reads text files as pieces of documents, in a fixed order.

Sources are the standard library of the running Python, text files or folders, and JSONL or parquet
files (:mod:`internsp.app.data.rows`). All are read as streams: the memory needed does not grow with
the size of a file.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from internsp.app.config import DocumentsConfig
from internsp.app.data.rows import SUFFIXES, row_texts
from internsp.app.data.tokenizer import PIECE_BYTES, Piece
from internsp.errors import ConfigError

STDLIB_BYTES = 32_000_000
"""Limit for the bytes read of the standard library: a run starts at once with any Python."""

# Tests are unusual code; the rest is not written by hand, or not part of the library.
_NOT_LIBRARY = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip


def read_pieces(given: DocumentsConfig, paths: Iterable[str] | None = None) -> Iterator[Piece]:
    """The text of the source's documents in a fixed order; empty documents are left out.

    Args:
        paths: the paths to read; ``None``: all of ``given.paths``.

    Raises:
        ConfigError: paths are missing (all are listed), a file cannot be read, or rows have no
            column ``text_field``.
        MissingDependencyError: parquet without ``pyarrow``.
    """
    if given.source == "stdlib":
        yield from (Piece(text, True) for text in stdlib_documents() if text.strip())
        return
    check_paths(given)
    for path in map(Path, given.paths if paths is None else paths):
        for file in files_of(given, path):
            if given.source == "text":
                yield from _file_pieces(file, leave_out_binary=path.is_dir())
            else:
                texts = row_texts(file, given.source, given.text_field)
                encoded = (text.encode() for text in texts)
                yield from (Piece(text, True) for text in encoded if text.strip())


def stdlib_documents(limit: int = STDLIB_BYTES) -> Iterator[bytes]:
    """The standard library's ``*.py`` files, sorted by path, up to ``limit`` bytes in total.

    Tests, installed packages and generated files (encodings, pydoc topics) are left out.
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


def files_of(given: DocumentsConfig, path: Path) -> Iterator[Path]:
    """The source's files at ``path``: the file itself, or all files below the folder in sorted
    order, without hidden ones."""
    if not path.is_dir():
        yield path
        return
    suffixes = SUFFIXES.get(given.source, ("",))
    yield from (file for file in _files_below(path) if file.name.endswith(suffixes))


def _file_pieces(path: Path, leave_out_binary: bool) -> Iterator[Piece]:
    """A text file as one document; binary files (with a NUL byte) can be left out."""
    try:
        with path.open("rb") as file:
            text = file.read(PIECE_BYTES)
            more = file.read(1)
            if not more:
                if text.strip() and not (leave_out_binary and b"\0" in text):
                    yield Piece(text, True)
                return
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(
                    f"data.paths: {path} is no regular file and has more than {PIECE_BYTES} bytes: "
                    "save it to a file"
                )
            # Larger than one piece: scan all of the file before any piece is yielded.
            blank, binary = _scan(file.read, text + more)
            if blank or (leave_out_binary and binary):
                return
            file.seek(0)
            yield from _cut(file.read)
    except OSError as error:
        raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror}") from error


def _scan(read: Callable[[int], bytes], text: bytes) -> tuple[bool, bool]:
    """Whether a file has only whitespace, and whether it has a NUL byte."""
    blank, binary = True, False
    while text:
        blank, binary = blank and not text.strip(), binary or b"\0" in text
        text = read(PIECE_BYTES)
    return blank, binary


def _cut(read: Callable[[int], bytes]) -> Iterator[Piece]:
    """Split a large file into pieces, after a line break if possible, else between characters."""
    left = b""
    while True:
        read_now = read(PIECE_BYTES - len(left))
        text = left + read_now
        if len(text) < PIECE_BYTES:
            yield Piece(text, True)
            return
        at = text.rfind(b"\n") + 1 or _between_characters(text)
        yield Piece(text[:at], False)
        left = text[at:]


def _between_characters(text: bytes) -> int:
    """The last position near the end that is not inside a UTF-8 character."""
    at = len(text)
    for back in range(1, 5):
        byte = text[at - back]
        if byte & 0xC0 == 0x80:  # a continuation byte
            continue
        length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return at if length <= back else at - back
    return at


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


def check_paths(given: DocumentsConfig) -> None:
    """Check that all paths exist, and that one of them has a file of the source's type.

    Raises:
        ConfigError: lists all missing paths, one a line.
    """
    if not given.paths:
        raise ConfigError(f"data.paths: source {given.source!r} needs at least one path")
    missing = [path for path in given.paths if not os.path.exists(path)]
    if missing:
        raise ConfigError(
            "\n".join(f"data.paths: there is no file or folder {path!r}" for path in missing)
        )
    if given.source == "text":
        return
    if not any(next(files_of(given, Path(path)), None) for path in given.paths):
        suffixes = " or ".join(SUFFIXES[given.source])
        raise ConfigError(f"data.paths: no {suffixes} file in {list(given.paths)}")
