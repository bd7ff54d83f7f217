"""Which of several texts each sequence comes from: a function of its number, weights and seed.

Numbers are grouped in blocks. In each block every text gets its share, rounded down or up
(systematic sampling: evenly spaced points fall into the texts' intervals), in an order shuffled by
the seed. From block to block the points are shifted by the golden ratio, so that rounding averages
out: after any number of blocks each text has its share within a few sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
_GOLDEN = (5**0.5 - 1) / 2


class Mixture:
    """Assigns sequences to texts by weight.

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
        counts = self._evenly(total)
        ends = np.cumsum(counts)
        text = int(np.searchsorted(ends, number, side="right"))
        return text, number - int(ends[text] - counts[text]), int(counts[text])

    def _evenly(self, total: int) -> NDArray[np.int64]:
        """How many of ``total`` evenly spaced points fall into each text's interval."""
        below = np.ceil(self.edges * total - 0.5).astype(np.int64).clip(0, total)
        below[-1] = total
        return np.diff(below, prepend=0)

    def before(self, block: int) -> NDArray[np.int64]:
        """Number of sequences of each text in the blocks before ``block``."""
        shift = self._shift(np.arange(block, dtype=np.float64))
        total = np.zeros(len(self.shares), np.int64)
        low = np.zeros(block, np.int64)
        for text, edge in enumerate(self.edges):
            # Points k + shift, k = 0, 1, ..., that are below the edge.
            high = np.ceil(edge * BLOCK - shift).astype(np.int64)
            high = np.full_like(high, BLOCK) if text == len(self.edges) - 1 else high.clip(0, BLOCK)
            total[text] = int((high - low).sum())
            low = high
        return total

    def _shift(self, block: NDArray[np.float64]) -> NDArray[np.float64]:
        shifted: NDArray[np.float64] = np.modf(self._first + block * _GOLDEN)[0]
        return shifted

    def _block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The text of each sequence of a block, and how many of that text come before it."""
        shift = self._shift(np.asarray([float(block)]))[0]
        counts = np.diff([0, *self._below(shift)])
        texts = np.repeat(np.arange(len(counts)), counts)
        texts = np.random.default_rng([self._seed, 3, block]).permutation(texts)
        within = np.empty(BLOCK, np.int64)
        for text in range(len(counts)):
            own = texts == text
            within[own] = np.arange(int(own.sum()))
        return texts, within

    def _below(self, shift: float) -> list[int]:
        inner = [int(np.ceil(edge * BLOCK - shift)) for edge in self.edges[:-1]]
        return [*(min(max(n, 0), BLOCK) for n in inner), BLOCK]
