"""Which tokens are sequence ``n``: a function of its number, the documents and the seed alone.

:class:`Rows` cuts one text into sequences of one length, packed end to end or one padded document
each. Numbers continue over the epochs, and each epoch has another order. :class:`Mixture` says
which of several texts each sequence comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from internsp.app.data.tokenizer import Tokens
from internsp.app.data.tokens import TokenStore

BLOCK = 1024
"""Sequences in which :class:`Mixture` gives every text its share, rounded."""
_GOLDEN = (5**0.5 - 1) / 2
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


class Documents:
    """Parts of documents, one after another, in an order of their own.

    Args:
        stores: the stored tokens, read as if they were concatenated.
        begins, lengths: ``[n]``, start of each document in ``stores``, and its number of tokens.
        marked: whether tokens encode if they count (:func:`internsp.app.data.chat.marked`).

    Attributes:
        starts: ``[n + 1]``, start of each document in this order, and the end of the last.
    """

    def __init__(
        self, stores: Sequence[TokenStore], begins: Integers, lengths: Integers, marked: bool
    ) -> None:
        self.stores, self.begins, self.marked = stores, begins, marked
        self.starts: Integers = np.append(0, np.cumsum(lengths, dtype=np.int64))

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self.starts[-1])

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
            if begin < len(store.ids):
                return store.ids[begin : begin + count]
            begin -= len(store.ids)
        raise AssertionError("no document lies behind the last store")

    def unmarked(self, stored: Tokens) -> tuple[Integers, list[tuple[int, int]]]:
        """Decode stored tokens to ids and the ranges of ids that do not count."""
        values = stored.astype(np.int64)
        if not self.marked:
            return values, []
        out = (values & 1 == 0).astype(np.int8)
        edges = np.flatnonzero(np.diff(out, prepend=0, append=0)).tolist()
        return values >> 1, list(zip(edges[::2], edges[1::2], strict=True))


class Rows:
    """Sequences of one length, cut from documents, in an order of each epoch.

    Packed, documents lie end to end and are cut every ``length`` tokens, in each epoch at others;
    the place of a sequence is its first token. Padded, a sequence is one document, or a piece of a
    longer one, whose number is its place. A piece of one token is left out: it predicts nothing.

    Args:
        padding: fills sequences up; ``None``: they are packed.

    Attributes:
        per_epoch: number of sequences in one epoch.
        available: number of sequences that :meth:`even` chooses from.
    """

    def __init__(
        self, documents: Documents, length: int, seed: int, padding: int | None = None
    ) -> None:
        self.documents, self.length, self.seed, self.padding = documents, length, seed, padding
        self.order = lru_cache(maxsize=2)(self._order)
        if padding is None:
            self.available = len(documents) // length
            # One fewer than fit: the cuts of each epoch start at another offset.
            self.per_epoch = max(1, self.available - 1)
            return
        # A remainder of one token gives no sequence.
        pieces = (np.diff(documents.starts) + length - 2) // length
        self._firsts = np.append(0, np.cumsum(pieces, dtype=np.int64))
        self.per_epoch = self.available = int(self._firsts[-1])

    def row(self, number: int) -> Row:
        """Sequence ``number`` of the endless order."""
        return self.cut(self._place(number))

    def even(self, number: int, total: int) -> Row:
        """Sequence ``number`` of ``total`` that are evenly spaced over all documents."""
        at = number * self.available // total
        return self.cut(at * self.length if self.padding is None else at)

    def cut(self, place: int) -> Row:
        """The sequence at a place."""
        begin, count = self._range(place)
        found, ignored = self.documents.unmarked(self.documents.read(begin, count))
        if self.padding is None:
            return Row(found, [0, *(self._starts(begin) - begin).tolist()], ignored)
        ids = np.full(self.length, self.padding, np.int64)
        ids[:count] = found
        if count < self.length:
            ignored.append((count, self.length))
        return Row(ids, None, ignored)

    def counted(self, number: int) -> int:
        """Number of its tokens that the loss counts; reads tokens only if they encode it."""
        place = self._place(number)
        if self.documents.marked:
            return counted(self.cut(place))
        begin, count = self._range(place)
        return count - 1 - (len(self._starts(begin)) if self.padding is None else 0)

    def position_of(self, number: int) -> tuple[int, int]:
        """Where it begins: its document, and the token within the document."""
        begin, _ = self._range(self._place(number))
        document = self.documents.document_at(begin)
        return document, begin - int(self.documents.starts[document])

    def _place(self, number: int) -> int:
        epoch, at = divmod(number, self.per_epoch)
        return int(self.order(epoch)[at])

    def _range(self, place: int) -> tuple[int, int]:
        """The first token, in the order of the documents, and the number of tokens."""
        if self.padding is None:
            return place, self.length
        document = int(np.searchsorted(self._firsts, place, side="right")) - 1
        starts = self.documents.starts
        begin = int(starts[document]) + (place - int(self._firsts[document])) * self.length
        return begin, min(self.length, int(starts[document + 1]) - begin)

    def _starts(self, begin: int) -> Integers:
        """The documents that start within the packed sequence from token ``begin`` on."""
        documents = self.documents
        first = documents.document_at(begin) + 1
        last = int(np.searchsorted(documents.starts, begin + self.length, side="left"))
        return documents.starts[first:last]

    def _order(self, epoch: int) -> Integers:
        """``[per_epoch]``, the places of an epoch: disjoint, shuffled, packed all shifted by one
        offset."""
        rng = np.random.default_rng([self.seed, 1, epoch])
        if self.padding is not None:
            return rng.permutation(self.per_epoch).astype(np.int64)
        room = len(self.documents) - self.per_epoch * self.length
        offset = int(rng.integers(0, min(room, self.length - 1) + 1))
        begins: Integers = rng.permutation(self.per_epoch).astype(np.int64)
        return begins * self.length + offset


class Mixture:
    """Which of several texts each sequence comes from.

    Numbers are grouped in blocks. In each block every text gets its share, rounded down or up
    (systematic sampling: evenly spaced points fall into the texts' intervals), in an order shuffled
    by the seed. From block to block the points are shifted by the golden ratio, so that rounding
    averages out: after any number of blocks each text has its share within a few sequences.

    Args:
        weights: one for each text; only their ratios matter.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        shares = np.asarray(weights, np.float64) / sum(weights)
        self.edges = np.concatenate([np.cumsum(shares)[:-1], np.ones(1)])
        self.shares, self._seed = shares, seed
        self._first = float(np.random.default_rng([seed, 2]).random())
        self._drawn = lru_cache(maxsize=4)(self._block)
        self._before = lru_cache(maxsize=4)(self.before)

    def locate(self, number: int) -> tuple[int, int]:
        """The text of sequence ``number``, and the sequence's number within that text."""
        block, at = divmod(number, BLOCK)
        texts, within = self._drawn(block)
        text = int(texts[at])
        return text, int(self._before(block)[text]) + int(within[at])

    def taken(self, number: int) -> list[int]:
        """How many of the first ``number`` sequences come from each text."""
        block, rest = divmod(number, BLOCK)
        texts, _ = self._drawn(block)
        of_block = np.bincount(texts[:rest], minlength=len(self.shares))
        counts: list[int] = (self._before(block) + of_block).tolist()
        return counts

    def even(self, number: int, total: int) -> tuple[int, int, int]:
        """For sequence ``number`` of ``total``: its text, its number within that text, and how many
        of the ``total`` come from that text."""
        # How many of ``total`` evenly spaced points fall into each text's interval.
        ends = np.ceil(self.edges * total - 0.5).astype(np.int64).clip(0, total)
        ends[-1] = total
        counts = np.diff(ends, prepend=0)
        text = int(np.searchsorted(ends, number, side="right"))
        return text, number - int(ends[text] - counts[text]), int(counts[text])

    def before(self, block: int) -> Integers:
        """Number of sequences of each text in the blocks before ``block``."""
        return self._counts(np.arange(block, dtype=np.float64))

    def _counts(self, blocks: NDArray[np.float64]) -> Integers:
        """``[texts]``, number of sequences of each text in these blocks together."""
        shift = np.modf(self._first + blocks * _GOLDEN)[0]
        # Points k + shift, k = 0, 1, ..., that are below the edge of each text but the last.
        below = (np.ceil(edge * BLOCK - shift).clip(0, BLOCK).sum() for edge in self.edges[:-1])
        return np.diff([*map(int, below), BLOCK * len(blocks)], prepend=0)

    def _block(self, block: int) -> tuple[Integers, Integers]:
        """The text of each sequence of a block, and how many of that text come before it."""
        counts = self._counts(np.asarray([float(block)]))
        texts = np.repeat(np.arange(len(counts)), counts)
        texts = np.random.default_rng([self._seed, 3, block]).permutation(texts)
        within = np.empty(BLOCK, np.int64)
        for text, count in enumerate(counts):
            within[texts == text] = np.arange(count)
        return texts, within
