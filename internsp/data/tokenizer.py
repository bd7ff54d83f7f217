"""Tokenizers: text to ids and back. Bytes, a file of ``tokenizers``, a folder of ``transformers``.

Text comes in pieces, so that a document may be larger than memory: whole documents up to
``PIECE_BYTES``, of larger ones a piece of about that length, cut after a line.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from internsp.data.rows import required
from internsp.errors import ConfigError

Tokens = NDArray[Any]

PIECE_BYTES = 4 << 20
"""Longer documents are tokenized in pieces of at most so many bytes."""

_END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
_ENCODE_AT_ONCE = 256  # documents handed to the tokenizer's own threads together
_ENCODE_BYTES = 4 << 20  # or so many bytes of them
# What a tokenizer is read from, in transformers' folders.
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges*", "*.model",
    "*.tiktoken", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


class Piece(NamedTuple):
    """Text of a document, and whether the document ends with it."""

    text: bytes
    ends: bool


class Tokenizer(Protocol):
    """Text to ids and back; ``end_of_document`` is the id put after each document."""

    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without an end of document."""
        ...

    def encode_pieces(self, pieces: Iterable[Piece]) -> Iterator[tuple[Tokens, bool]]:
        """Ids of each piece, in order, in the smallest unsigned dtype that holds them."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; ends of documents are left out, broken characters replaced."""
        ...

    def fingerprint(self) -> str:
        """Digest of what decides the ids."""
        ...


class ByteTokenizer:
    """Each byte is its own id, 256 ends a document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of ``text``."""
        return list(text.encode())

    def encode_pieces(self, pieces: Iterable[Piece]) -> Iterator[tuple[Tokens, bool]]:
        """``uint16`` (256 does not fit a byte)."""
        return (
            (np.frombuffer(text, dtype=np.uint8).astype(np.uint16), ends) for text, ends in pieces
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids below 256."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def fingerprint(self) -> str:
        """A word."""
        return "bytes"


class _Batched:
    """Pieces are handed to the tokenizer's own threads together."""

    vocab_size: int

    def _ids(self, texts: list[str]) -> Iterable[Sequence[int]]:
        raise NotImplementedError

    def encode_pieces(self, pieces: Iterable[Piece]) -> Iterator[tuple[Tokens, bool]]:
        """Bytes that are not UTF-8 are replaced."""
        chunk: list[Piece] = []
        size = 0
        for piece in pieces:
            chunk.append(piece)
            size += len(piece.text)
            if len(chunk) == _ENCODE_AT_ONCE or size >= _ENCODE_BYTES:
                yield from self._encode_chunk(chunk)
                chunk, size = [], 0
        yield from self._encode_chunk(chunk)

    def _encode_chunk(self, chunk: list[Piece]) -> Iterator[tuple[Tokens, bool]]:
        if not chunk:
            return
        found = self._ids([piece.text.decode(errors="replace") for piece in chunk])
        dtype = smallest_dtype(self.vocab_size)
        for piece, ids in zip(chunk, found, strict=True):
            yield np.asarray(ids, dtype=dtype), piece.ends


class FileTokenizer(_Batched):
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
        self.vocab_size = max(size, self.end_of_document + 1)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` without the file's own begin and end tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _ids(self, texts: list[str]) -> Iterable[Sequence[int]]:
        with _tokenizer_errors(self._path, "cannot encode the text"):
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return (encoding.ids for encoding in encodings)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        inside = [int(i) for i in ids if i != self.end_of_document]
        text: str = self._tokenizer.decode(inside, skip_special_tokens=True)
        return text

    def fingerprint(self) -> str:
        """Digest of the file."""
        return hashlib.blake2b(Path(self._path).read_bytes(), digest_size=16).hexdigest()


class FolderTokenizer(_Batched):
    """A folder that ``transformers`` reads a tokenizer from; it may have a chat template. The end
    of a document is the tokenizer's own end of sequence, else one more id after its last. Code that
    comes with a folder is not run.

    Attributes:
        transformers: the tokenizer itself.

    Raises:
        MissingDependencyError: ``transformers`` is not installed.
        ConfigError: the folder holds no tokenizer.
    """

    def __init__(self, path: str) -> None:
        library = required("transformers", f"data.tokenizer = {path!r}, a folder,")
        with _tokenizer_errors(path, "is not a tokenizer's folder"):
            self.transformers = library.AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        self.path = path
        end, size = self.transformers.eos_token_id, len(self.transformers)
        self.end_of_document: int = size if end is None else int(end)
        self.vocab_size = max(size, self.end_of_document + 1)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` without the tokenizer's own begin and end tokens."""
        ids: list[int] = self.transformers.encode(text, add_special_tokens=False)
        return ids

    def _ids(self, texts: list[str]) -> Iterable[Sequence[int]]:
        with _tokenizer_errors(self.path, "cannot encode the text"):
            ids: list[list[int]] = self.transformers(
                texts, add_special_tokens=False, return_attention_mask=False, verbose=False
            )["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        inside = [int(i) for i in ids if i != self.end_of_document]
        text: str = self.transformers.decode(inside, skip_special_tokens=True)
        return text

    def fingerprint(self) -> str:
        """Digest of the files that transformers reads a tokenizer from."""
        digest = hashlib.blake2b(digest_size=16)
        folder = Path(self.path)
        for file in tokenizer_files(folder):
            digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder that transformers reads a tokenizer from."""
    found = {file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)}
    return sorted(file for file in found if file.is_file())


def load_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, the path of a ``tokenizers`` file, or of a folder; raises as these do."""
    if name == "bytes":
        return ByteTokenizer()
    return FolderTokenizer(name) if os.path.isdir(name) else FileTokenizer(name)


def smallest_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned integer that holds every id below ``vocab_size``."""
    for dtype in (np.uint8, np.uint16):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    return np.uint32


@contextmanager
def _tokenizer_errors(path: str, what: str) -> Iterator[None]:
    """Errors of ``tokenizers``: bare exceptions, and panics, which are no ``Exception``."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ConfigError(f"data.tokenizer: {path!r} {what}: {error}") from error
        raise
