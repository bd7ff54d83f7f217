"""Tokenizers: bytes, a file of ``tokenizers``, or a folder of ``transformers``.

Text is tokenized in pieces, so that a document may be larger than memory: documents of up to
``PIECE_BYTES`` are one piece, larger ones are split after line breaks.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from internsp.errors import ConfigError, MissingDependencyError

Tokens = NDArray[Any]

PIECE_BYTES = 4 << 20
"""Largest piece; longer documents are tokenized in several pieces."""

_END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
_ENCODE_AT_ONCE = 256  # documents passed together to the tokenizer, which has threads of its own
_ENCODE_BYTES = 4 << 20  # limit for the bytes of these documents
# Files from which transformers reads a tokenizer, in its folders.
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges*", "*.model",
    "*.tiktoken", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


class Piece(NamedTuple):
    """A piece of a document's text, whether it is the document's last piece, and its file."""

    text: bytes
    ends: bool
    file: str = ""


class ByteTokenizer:
    """Each byte is its own id; 256 ends a document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without an end of document."""
        return list(text.encode())

    def encode_pieces(self, pieces: Iterable[Piece]) -> Iterator[tuple[Tokens, bool]]:
        """Ids of each piece, in order, in :func:`smallest_dtype`, and whether its document ends."""
        return (
            (np.frombuffer(piece.text, dtype=np.uint8).astype(np.uint16), piece.ends)
            for piece in pieces
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; ends of documents are left out, broken characters replaced."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def fingerprint(self) -> str:
        """Digest of everything that determines the ids."""
        return "bytes"


class LibraryTokenizer:
    """A file of ``tokenizers``, or a folder of ``transformers``, which may have a chat template.

    Both encode many texts at once, in threads of their own. Errors of the library, also its panics,
    are :class:`ConfigError`.

    Args:
        path: the file or folder.
        own: the library's object.
        ids: id of each token; may have gaps.
        end: the id that ends a document; ``None``: one more id after its last.
    """

    def __init__(self, path: str, own: Any, ids: Mapping[str, int], end: int | None) -> None:
        self.path, self.own, self.is_folder = path, own, os.path.isdir(path)
        size = max(ids.values(), default=-1) + 1
        self.end_of_document = size if end is None else end
        self.vocab_size = max(size, self.end_of_document + 1)

    def _ids(self, texts: list[str]) -> Iterable[Sequence[int]]:
        """Ids of each text, without the tokenizer's own begin and end tokens."""
        if not self.is_folder:
            return (one.ids for one in self.own.encode_batch(texts, add_special_tokens=False))
        ids: list[list[int]] = self.own(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return ids

    def encode(self, text: str) -> list[int]:
        """See :class:`ByteTokenizer`."""
        (ids,) = self._ids([text])
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        shown = [int(i) for i in ids if i != self.end_of_document]
        text: str = self.own.decode(shown, skip_special_tokens=True)
        return text

    def encode_pieces(self, pieces: Iterable[Piece]) -> Iterator[tuple[Tokens, bool]]:
        """Ids of each piece.

        Raises:
            ConfigError: a piece is not UTF-8, or the tokenizer cannot encode it.
        """
        chunk: list[Piece] = []
        size = 0
        for piece in pieces:
            chunk.append(piece)
            size += len(piece.text)
            if len(chunk) == _ENCODE_AT_ONCE or size >= _ENCODE_BYTES:
                yield from self._encode_chunk(chunk)
                chunk, size = [], 0
        if chunk:
            yield from self._encode_chunk(chunk)

    def _encode_chunk(self, chunk: list[Piece]) -> Iterator[tuple[Tokens, bool]]:
        texts = []
        for piece in chunk:
            try:
                texts.append(piece.text.decode())
            except UnicodeDecodeError as error:
                text, at = piece.text, error.start
                before = text[max(0, at - 40) : at].decode(errors="replace")
                raise ConfigError(
                    f"data.paths: byte {text[at]:#x} of {piece.file} after {before!r} is not "
                    f"UTF-8, which {self.path!r} encodes: save that text as UTF-8, or leave "
                    "data.tokenizer out, which trains on bytes"
                ) from error
        with _tokenizer_errors(self.path, "cannot encode the text"):
            found = self._ids(texts)
        dtype = smallest_dtype(self.vocab_size)
        for piece, ids in zip(chunk, found, strict=True):
            yield np.asarray(ids, dtype=dtype), piece.ends

    def fingerprint(self) -> str:
        """Digest of the file, or of the files from which transformers reads a tokenizer."""
        path = Path(self.path)
        if not self.is_folder:
            return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        digest = hashlib.blake2b(digest_size=16)
        for file in tokenizer_files(path):
            digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()


Tokenizer = ByteTokenizer | LibraryTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Load ``"bytes"``, a file of ``tokenizers`` or a folder of ``transformers``.

    A document ends with a usual end token of a file (``<|endoftext|>``, ``</s>``, ...), or with a
    folder's end of sequence. Code in a folder is not executed.

    Raises:
        MissingDependencyError: the library is not installed.
        ConfigError: there is no such file, or it holds no tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    if os.path.isdir(name):
        library = required("transformers", f"data.tokenizer = {name!r}, a folder,")
        with _tokenizer_errors(name, "is not a tokenizer's folder"):
            own = library.AutoTokenizer.from_pretrained(
                name, local_files_only=True, trust_remote_code=False
            )
            return LibraryTokenizer(name, own, own.get_vocab(), own.eos_token_id)
    library = required("tokenizers", f"data.tokenizer = {name!r}")
    with _tokenizer_errors(name, "is not a tokenizer"):
        own = library.Tokenizer.from_file(name)
        known = (own.token_to_id(name) for name in _END_OF_DOCUMENT_NAMES)
        end = next((i for i in known if i is not None), None)
        return LibraryTokenizer(name, own, own.get_vocab(with_added_tokens=True), end)


BYTES_END = "<|endoftext|>"
"""The name of id 256 in :func:`byte_tokenizer_files`."""


def byte_tokenizer_files() -> dict[str, str]:
    """:class:`ByteTokenizer` as files for ``transformers.AutoTokenizer``, by name.

    A BPE without merges over GPT-2's names of the 256 bytes. A text that contains
    :data:`BYTES_END` is bytes like any other (``split_special_tokens``).
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]  # named by their own character
    others = [byte for byte in range(256) if byte not in printed]
    names = {byte: chr(byte) for byte in printed}
    names |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    end = {
        "id": 256, "content": BYTES_END, "special": True, "normalized": False,
        "single_word": False, "lstrip": False, "rstrip": False,
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end],
        "normalizer": None, "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None, "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": [],
        },
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": BYTES_END,
        "split_special_tokens": True, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder from which transformers reads a tokenizer."""
    found = {file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)}
    return sorted(file for file in found if file.is_file())


def smallest_dtype(vocab_size: int) -> Any:
    """The smallest dtype of a ``.bin`` file that holds every id below ``vocab_size``."""
    for dtype in (np.uint8, np.uint16):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    return np.int32  # a .bin file has no uint32


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


@contextmanager
def _tokenizer_errors(path: str, what: str) -> Iterator[None]:
    """Convert errors of ``tokenizers``, also its panics, which are no subclass of ``Exception``."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ConfigError(f"data.tokenizer: {path!r} {what}: {error}") from error
        raise
