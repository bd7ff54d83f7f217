"""Sequences of one length, cut from documents: packed end to end, or one padded document each.

A sequence is a function of its number alone. Numbers continue over the epochs, and each epoch has
another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from internsp.app.data.store import TokenStore
from internsp.app.data.tokenizer import Tokens

Integers = NDArray[np.int64]


class Row(NamedTuple):
    """One sequence.

    Attributes:
        ids: ``[sequence_length]`` int64.
        starts: where documents start in it, 0 first; ``None``: it counts as one document.
        ignored: half-open ranges of tokens that are not predicted: prompts, padding.
    """

    ids: Integers
    starts: list[int] | None
    ignored: list[tuple[int, int]]


def counted(row: Row) -> int:
    """Number of tokens of a row that the loss counts: those that the token before them predicts."""
    wanted = np.ones(len(row.ids), bool)
    wanted[row.starts or [0]] = False
    for begin, end in row.ignored:
        wanted[begin:end] = False
    return int(wanted.sum())


@dataclass(frozen=True)
class Documents:
    """Parts of documents, one after another, in an order of their own.

    Attributes:
        stores: the stored tokens, read as if they were concatenated.
        begins: ``[n]``, start of each document in ``stores``.
        starts: ``[n + 1]``, start of each document in this order, and the end of the last.
        marked: whether tokens encode if they count (:func:`internsp.app.data.chat.marked`).
    """

    stores: tuple[TokenStore, ...]
    begins: Integers
    starts: Integers
    marked: bool = False

    @classmethod
    def create(
        cls, stores: Sequence[TokenStore], begins: Integers, lengths: Integers, marked: bool = False
    ) -> Documents:
        """Documents in the given order."""
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        return cls(tuple(stores), begins, starts, marked)

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self.starts[-1])

    @property
    def count(self) -> int:
        """Number of documents."""
        return len(self.begins)

    def document_at(self, token: int) -> int:
        """The document that holds token ``token``."""
        return int(np.searchsorted(self.starts, token, side="right")) - 1

    def read(self, begin: int, count: int) -> Tokens:
        """``count`` tokens from ``begin`` on, in this order."""
        pieces = []
        document = self.document_at(begin)
        end = begin + count
        while begin < end:
            stop = min(end, int(self.starts[document + 1]))
            within = begin - int(self.starts[document])
            pieces.append(self._stored(int(self.begins[document]) + within, stop - begin))
            begin, document = stop, document + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _stored(self, begin: int, count: int) -> Tokens:
        for store in self.stores:
            if begin < store.tokens:
                return store.read(begin, count)
            begin -= store.tokens
        raise AssertionError("no document lies behind the last store")

    def unmarked(self, stored: Tokens) -> tuple[Integers, list[tuple[int, int]]]:
        """Decode stored tokens to ids and the ranges of ids that do not count."""
        values = stored.astype(np.int64)
        if not self.marked:
            return values, []
        return values >> 1, _ranges_of(values & 1 == 0)


def _ranges_of(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


class Rows(Protocol):
    """Sequences of one length.

    Attributes:
        per_epoch: number of sequences in one epoch.
        available: number of sequences that :meth:`even` chooses from.
    """

    per_epoch: int
    available: int

    def row(self, number: int) -> Row:
        """Sequence ``number`` of the endless order."""
        ...

    def counted(self, number: int) -> int:
        """Number of its tokens that the loss counts; reads tokens only if they encode it."""
        ...

    def position_of(self, number: int) -> tuple[int, int]:
        """Where it begins: its document, and the token within the document."""
        ...

    def even(self, number: int, total: int) -> Row:
        """Sequence ``number`` of ``total`` that are evenly spaced over all documents."""
        ...


class PackedRows:
    """Documents end to end, cut every ``length`` tokens; each epoch has other cuts and order."""

    def __init__(self, documents: Documents, length: int, seed: int) -> None:
        self.documents, self.length, self.seed = documents, length, seed
        self.available = len(documents) // length
        # One fewer than fit: the cuts of each epoch start at another offset.
        self.per_epoch = max(1, self.available - 1)
        self.order = lru_cache(maxsize=2)(self._order)

    def row(self, number: int) -> Row:
        """See :class:`Rows`."""
        return self.cut(self.begin(number))

    def counted(self, number: int) -> int:
        """See :class:`Rows`."""
        begin = self.begin(number)
        if self.documents.marked:
            return counted(self.cut(begin))
        return self.length - 1 - len(self._starts(begin))

    def position_of(self, number: int) -> tuple[int, int]:
        """See :class:`Rows`."""
        begin = self.begin(number)
        document = self.documents.document_at(begin)
        return document, begin - int(self.documents.starts[document])

    def even(self, number: int, total: int) -> Row:
        """See :class:`Rows`."""
        return self.cut(number * self.available // total * self.length)

    def begin(self, number: int) -> int:
        """The first token of sequence ``number``."""
        epoch, place = divmod(number, self.per_epoch)
        return int(self.order(epoch)[place])

    def cut(self, begin: int) -> Row:
        """The sequence from token ``begin`` on."""
        ids, ignored = self.documents.unmarked(self.documents.read(begin, self.length))
        return Row(ids, [0, *(self._starts(begin) - begin).tolist()], ignored)

    def _starts(self, begin: int) -> Integers:
        """The documents that start within the sequence from token ``begin`` on."""
        documents = self.documents
        first = documents.document_at(begin) + 1
        last = int(np.searchsorted(documents.starts, begin + self.length, side="left"))
        return documents.starts[first:last]

    def _order(self, epoch: int) -> Integers:
        """Starts of the sequences of an epoch: disjoint, shuffled, all shifted by one offset."""
        rng = np.random.default_rng([self.seed, 1, epoch])
        room = len(self.documents) - self.per_epoch * self.length
        offset = int(rng.integers(0, min(room, self.length - 1) + 1))
        begins: Integers = rng.permutation(self.per_epoch).astype(np.int64)
        return begins * self.length + offset


class PaddedRows:
    """One document a sequence, padded to ``length`` with ``padding``; longer ones are split.

    A sequence that would have a single token is left out, since it predicts nothing.
    """

    def __init__(self, documents: Documents, length: int, seed: int, padding: int) -> None:
        self.documents, self.length, self.seed, self.padding = documents, length, seed, padding
        sizes = np.diff(documents.starts)
        pieces = (sizes + length - 2) // length  # a remainder of one token gives no sequence
        self._firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(pieces, dtype=np.int64)])
        self.per_epoch = self.available = int(self._firsts[-1])
        self.order = lru_cache(maxsize=2)(self._order)

    def row(self, number: int) -> Row:
        """See :class:`Rows`."""
        return self.piece(self._piece_of(number))

    def counted(self, number: int) -> int:
        """See :class:`Rows`."""
        piece = self._piece_of(number)
        if self.documents.marked:
            return counted(self.piece(piece))
        return self._token_range(piece)[1] - 1

    def position_of(self, number: int) -> tuple[int, int]:
        """See :class:`Rows`."""
        return self._locate(self._piece_of(number))

    def even(self, number: int, total: int) -> Row:
        """See :class:`Rows`."""
        return self.piece(number * self.available // total)

    def _piece_of(self, number: int) -> int:
        epoch, place = divmod(number, self.per_epoch)
        return int(self.order(epoch)[place])

    def _locate(self, piece: int) -> tuple[int, int]:
        document = int(np.searchsorted(self._firsts, piece, side="right")) - 1
        return document, (piece - int(self._firsts[document])) * self.length

    def piece(self, piece: int) -> Row:
        """Piece ``piece`` of the documents in their order, padded."""
        documents = self.documents
        begin, count = self._token_range(piece)
        found, ignored = documents.unmarked(documents.read(begin, count))
        ids = np.full(self.length, self.padding, np.int64)
        ids[:count] = found
        if count < self.length:
            ignored.append((count, self.length))
        return Row(ids, None, ignored)

    def _token_range(self, piece: int) -> tuple[int, int]:
        """Its first token, in the order of the documents, and its number of tokens."""
        document, within = self._locate(piece)
        starts = self.documents.starts
        begin = int(starts[document]) + within
        return begin, min(self.length, int(starts[document + 1]) - begin)

    def _order(self, epoch: int) -> Integers:
        rng = np.random.default_rng([self.seed, 1, epoch])
        order: Integers = rng.permutation(self.per_epoch).astype(np.int64)
        return order
