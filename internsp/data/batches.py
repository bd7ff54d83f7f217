"""Token batches whose order depends on the seed alone, never on the mesh or the batch.

Documents are cut into a training and a held-out part, each written end to end with an
end-of-document token between, and rows of ``sequence_length`` tokens are cut from that stream. A
batch is a function of how many rows were taken before it: that number is all there is to save, and
a rank may ask for any rows of the global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from internsp.config import Config, DataConfig
from internsp.data.text import Tokenizer, load_tokenizer, read_documents, smallest_dtype
from internsp.errors import ConfigError

Tokens = NDArray[Any]


class Batch(NamedTuple):
    """Rows of tokens.

    ``ids`` is ``[rows, sequence_length]`` int64. ``boundaries`` gives for each row where documents
    start, 0 first (a row may begin inside a document); ``None`` when ``data.pack`` is off, where a
    row counts as one document.
    """

    ids: Tensor
    boundaries: list[list[int]] | None


@dataclass(frozen=True)
class TokenStream:
    """Documents end to end: ``tokens`` (1-D, small unsigned ints) and where documents start."""

    tokens: Tokens
    starts: NDArray[np.int64]

    @classmethod
    def join(cls, documents: Sequence[Tokens], vocab_size: int) -> TokenStream:
        """Concatenate; an empty sequence gives an empty stream."""
        dtype = smallest_dtype(vocab_size)
        if not documents:
            return cls(np.zeros(0, dtype), np.zeros(0, np.int64))
        lengths = np.array([len(d) for d in documents], dtype=np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]])
        return cls(np.concatenate(documents).astype(dtype, copy=False), starts)

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, begins: Sequence[int], length: int, pack: bool) -> Batch:
        """Rows ``tokens[b : b + length]``, with the documents' starts within each when packed."""
        ids = np.empty((len(begins), length), dtype=np.int64)
        boundaries: list[list[int]] = []
        for row, begin in enumerate(begins):
            ids[row] = self.tokens[begin : begin + length]
            first = int(np.searchsorted(self.starts, begin, side="right"))
            last = int(np.searchsorted(self.starts, begin + length, side="left"))
            boundaries.append([0, *(self.starts[first:last] - begin).tolist()])
        return Batch(torch.from_numpy(ids), boundaries if pack else None)


@dataclass
class DataSource:
    """Batches of a :class:`~internsp.config.DataConfig`; the same on every rank and every mesh."""

    train: TokenStream
    held_out: TokenStream
    tokenizer: Tokenizer
    global_batch: int
    sequence_length: int
    pack: bool
    seed: int

    def __post_init__(self) -> None:
        # One row fewer than fits: the cuts of each pass over the data start at another offset.
        self.rows_per_epoch = max(1, len(self.train) // self.sequence_length - 1)
        self._epoch = lru_cache(maxsize=2)(self._plan_epoch)

    @classmethod
    def create(cls, config: DataConfig, *, global_batch: int, seed: int = 0) -> DataSource:
        """Read and tokenize everything (stdlib: well under two seconds) and split it.

        Raises:
            ConfigError: paths are missing, there is no text, or too little of it for one sequence.
            MissingDependencyError: an optional package is needed; gives the install line.
        """
        tokenizer = load_tokenizer(config.tokenizer)
        read = list(tokenizer.encode_documents(read_documents(config)))
        # A tokenizer may find no token in a text: such a document has nothing to learn.
        documents = [document for document in read if len(document)]
        if not documents:
            where = "the standard library" if config.source == "stdlib" else list(config.paths)
            why = f": data.tokenizer finds no token in {len(read)} documents" if read else ""
            raise ConfigError(f"data: there is no text in {where}{why}")
        train, held_out = split_documents(documents, config.held_out, tokenizer.end_of_document)
        order = np.random.default_rng([seed, 0]).permutation(len(train))
        source = cls(
            TokenStream.join([train[i] for i in order], tokenizer.vocab_size),
            TokenStream.join(held_out, tokenizer.vocab_size),
            tokenizer,
            global_batch=global_batch,
            sequence_length=config.sequence_length,
            pack=config.pack,
            seed=seed,
        )
        source._check(config)
        return source

    def _check(self, config: DataConfig) -> None:
        length = self.sequence_length
        for part, stream in (("training", self.train), ("held-out", self.held_out)):
            wanted = part == "training" or config.held_out > 0
            if wanted and len(stream) < length:
                remedy = "" if part == "training" else ", raise data.held_out (0: no evaluation)"
                raise ConfigError(
                    f"data.sequence_length: a sequence takes {length} tokens but the {part} text "
                    f"has {len(stream)}: lower it, give more text{remedy}"
                )

    @property
    def vocab_size(self) -> int:
        """The least ``model.vocab_size`` that holds every id."""
        return self.tokenizer.vocab_size

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all tokens: equal on two machines, or in a resumed run, if the data are."""
        digest = hashlib.blake2b(digest_size=16)
        for stream in (self.train, self.held_out):
            digest.update(np.ascontiguousarray(stream.tokens).data)
            digest.update(np.ascontiguousarray(stream.starts).data)
        return digest.hexdigest()

    def train_batch(self, taken: int, rows: slice | None = None) -> Batch:
        """The global batch after ``taken`` rows were taken, or the rows ``rows`` of it."""
        if taken < 0:
            raise ValueError(f"rows count from 0, not {taken}")
        wanted = range(self.global_batch)[rows if rows is not None else slice(None)]
        begins = [self._begin(taken + row) for row in wanted]
        return self.train.cut(begins, self.sequence_length, self.pack)

    def place_of(self, row: int) -> tuple[int, int]:
        """Where row ``row`` of the order begins: its document, and the token within that."""
        begin = self._begin(row)
        document = int(np.searchsorted(self.train.starts, begin, side="right")) - 1
        return document, begin - int(self.train.starts[document])

    def _begin(self, row: int) -> int:
        epoch, place = divmod(row, self.rows_per_epoch)
        return int(self._epoch(epoch)[place])

    def held_out_batches(self, batches: int, rows: slice | None = None) -> Iterator[Batch]:
        """``batches`` global batches, or the rows ``rows`` of each.

        The rows lie evenly over the held-out text and are the same at every call; they repeat when
        the text has fewer. Nothing when ``data.held_out`` is 0.
        """
        size = self.global_batch
        available = len(self.held_out) // self.sequence_length
        if available == 0:
            return
        total = batches * size
        for index in range(batches):
            wanted = range(index * size, (index + 1) * size)[rows or slice(None)]
            begins = [row * available // total * self.sequence_length for row in wanted]
            yield self.held_out.cut(begins, self.sequence_length, self.pack)

    def _plan_epoch(self, epoch: int) -> NDArray[np.int64]:
        """Where the rows of pass ``epoch`` begin: disjoint, shuffled, shifted by one offset."""
        rng = np.random.default_rng([self.seed, 1, epoch])
        room = len(self.train) - self.rows_per_epoch * self.sequence_length
        offset = int(rng.integers(0, min(room, self.sequence_length - 1) + 1))
        begins: NDArray[np.int64] = rng.permutation(self.rows_per_epoch).astype(np.int64)
        return begins * self.sequence_length + offset


def split_documents(
    documents: Sequence[Tokens], held_out: float, end_of_document: int
) -> tuple[list[Tokens], list[Tokens]]:
    """Training and held-out documents, an end of document after each.

    Documents are ranked by a digest of their tokens and the first ``held_out`` of them held out, so
    that the part depends neither on the seed nor on file names, and copies of a document mostly
    stay together. With fewer than ``1 / held_out`` documents the last ``held_out`` of each is held
    out instead.
    """
    end = np.array([end_of_document], dtype=smallest_dtype(end_of_document + 1))
    if 0 < held_out * len(documents) < 1:
        return _split_tails(documents, held_out, end)
    count = round(held_out * len(documents))
    ranked = sorted(range(len(documents)), key=lambda i: (_digest(documents[i]), i))
    chosen = set(ranked[:count])
    train = [np.concatenate([d, end]) for i, d in enumerate(documents) if i not in chosen]
    return train, [np.concatenate([documents[i], end]) for i in ranked[:count]]


def _split_tails(
    documents: Sequence[Tokens], held_out: float, end: Tokens
) -> tuple[list[Tokens], list[Tokens]]:
    train: list[Tokens] = []
    held: list[Tokens] = []
    for document in documents:
        cut = max(1, len(document) - round(held_out * len(document)))
        if cut == len(document):
            train.append(np.concatenate([document, end]))
        else:
            train.append(document[:cut])  # goes on: no end of document here
            held.append(np.concatenate([document[cut:], end]))
    return train, held


def _digest(document: Tokens) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(document).data, digest_size=16).digest()


def vocabulary_mistake(config: Config, tokenizer: Tokenizer | DataSource) -> ConfigError:
    """The error of a model that has fewer ids than the tokenizer."""
    return ConfigError(
        f"model.vocab_size: {config.model.vocab_size} is less than the {tokenizer.vocab_size} ids "
        f"of data.tokenizer = {config.data.tokenizer!r}"
    )


def rows_of(
    global_batch: int, *, micro_batches: int, micro_batch: int, data: int, data_rank: int
) -> slice:
    """Rows of the global batch that data rank ``data_rank`` computes in one micro-batch.

    Raises:
        ConfigError: ``global_batch`` does not divide over micro-batches and data ranks.
    """
    each, rest = divmod(global_batch, micro_batches * data)
    if rest or not each:
        raise ConfigError(
            f"train.global_batch {global_batch} does not divide by train.micro_batches "
            f"{micro_batches} x {data} data ranks"
        )
    first = (micro_batch * data + data_rank) * each
    return slice(first, first + each)
