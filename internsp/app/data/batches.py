"""Token batches whose order depends only on the seed, not on the mesh or the batch size.

Documents are split into a training and a held-out part. Each part is cut into sequences of
``sequence_length`` tokens, and several texts are mixed (:mod:`internsp.app.data.order`). A batch is
a function of the number of sequences used before it, so this number is all that a checkpoint must
save, and a rank can read any rows of the global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from internsp.app.config import HELD_OUT, Config, DataConfig, DocumentsConfig
from internsp.app.config.sections import MixturePart
from internsp.app.data.order import Documents, Mixture, Row, Rows, counted
from internsp.app.data.tokenizer import Tokenizer, load_tokenizer
from internsp.app.data.tokens import Cached, TokenStore, open_stores, prepare
from internsp.base.background import in_background
from internsp.errors import ConfigError

FILLER = -1
"""Used in place of a row's number for a row from which nothing is learned."""
_COUNTED = 256  # number of sequences from which the mean tokens of a sequence are computed
_MOST_ROWS = 1 << 20  # limit for the rows of a step: more is a mistake, and takes seconds to count
_Made = TypeVar("_Made")


class Batch(NamedTuple):
    """Rows of tokens.

    ``ids`` is ``[rows, sequence_length]`` int64. ``boundaries`` lists for each row where documents
    start, 0 first (a row may begin inside a document); ``None`` if ``data.pack`` is off, so that
    each row counts as one document. ``ignored`` lists for each row half-open ranges of tokens that
    are not predicted: prompts and padding.
    """

    ids: Tensor
    boundaries: list[list[int]] | None
    ignored: list[list[tuple[int, int]]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Batch:
        """The batch of these rows, at least one."""
        starts = [row.starts for row in rows if row.starts is not None]
        ids = torch.from_numpy(np.stack([row.ids for row in rows]))
        return cls(ids, starts or None, [row.ignored for row in rows])


class Part:
    """One of the mixed texts, or the only text, whose documents are split and shuffled.

    Attributes:
        name: name in metrics.
        weight: its share, relative to the others' weights.
        train, held_out: its sequences.

    Raises:
        ConfigError: there is no text, or not enough for one sequence.
    """

    def __init__(
        self, given: DocumentsConfig, stores: list[TokenStore], data: DataConfig,
        tokenizer: Tokenizer, seed: int,
    ) -> None:  # fmt: skip
        self.name, self.weight = "", 1.0
        if isinstance(given, MixturePart):
            self.name, self.weight = given.called, given.weight
        lengths, marked = np.concatenate([s.lengths() for s in stores]), given.format != "text"
        if not len(lengths):
            where = list(given.paths) if given.paths else "the standard library"
            why = " in which the assistant says anything" * marked
            raise ConfigError(
                f"data: there is no text in {where}{why}, or data.tokenizer finds no token in it"
            )
        digests = None
        if round(data.held_out * len(lengths)):
            digests = np.concatenate([store.digests for store in stores])
        train, held = split(lengths, digests, data.held_out, 0 if marked else 1)
        order = np.random.default_rng([seed, 0]).permutation(len(train[0]))
        of = f" of {self.name!r}" if self.name else ""

        def rows(views: Views, what: str, remedy: str = "") -> Rows:
            found = Documents(stores, *views, marked)
            return _rows(found, data, seed, tokenizer, f"{what} text{of}", remedy)

        self.train, self.held_out = rows((train[0][order], train[1][order]), "training"), None
        if data.held_out:
            self.held_out = rows(held, "held-out", ", raise data.held_out (0: no evaluation)")


def _rows(
    found: Documents, data: DataConfig, seed: int, tokenizer: Tokenizer, what: str, remedy: str
) -> Rows:
    """Sequences of these documents, packed or padded as ``data`` sets; an error if there are none.

    Args:
        what, remedy: for the error.
    """
    rows = Rows(found, data.sequence_length, seed, None if data.pack else tokenizer.end_of_document)
    if rows.available:
        return rows
    least = f"{data.sequence_length} tokens" if data.pack else "two tokens of one document"
    lower = ", set it lower" * data.pack  # where documents are not packed it is two anyway
    raise ConfigError(
        f"data.sequence_length: a sequence takes {least} but the {what} has "
        f"{len(rows.documents)}: give more text{lower}{remedy}"
    )


def evaluations(data: DataConfig, tokenizer: Tokenizer, cached: Cached) -> dict[str, Rows]:
    """Sequences of the texts that are only evaluated on, by name, in the order of their documents.

    Raises:
        ConfigError: there is no text in one of them, or not enough for one sequence.
    """
    made = {}
    for given in data.evaluation:
        stores = open_stores(given, tokenizer, cached)
        lengths = np.concatenate([store.lengths() for store in stores])
        views = np.cumsum(lengths) - lengths, lengths
        found = Documents(stores, *views, given.format != "text")
        text, remedy = f"text {given.name!r} of data.evaluation", ", or leave its table out"
        made[given.name] = _rows(found, data, 0, tokenizer, text, remedy)
    return made


class DataSource:
    """Batches of a :class:`~internsp.app.config.DataConfig`; the same on every rank and every mesh.

    Args:
        tokenizer: the tokenizer of ``config``, if it is already loaded.
        prepared: the result of :func:`internsp.app.data.tokens.prepare`; ``None``: call it.

    Attributes:
        evaluations: sequences of the texts that are only evaluated on, by name.
        notes: messages for the user about tokens on disk.

    Raises:
        ConfigError: paths are missing, there is no text, or not enough for one sequence.
        MachineError: there is no disk space for the tokens of a large text.
        MissingDependencyError: an optional package is needed; gives the install command.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        global_batch: int,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
        prepared: tuple[Cached, list[str]] | None = None,
    ) -> None:
        self.tokenizer = tokenizer = tokenizer or load_tokenizer(config.tokenizer)
        cached, self.notes = prepared or prepare(config, tokenizer)
        self.global_batch, self.seed, self._held_out_share = global_batch, seed, config.held_out
        self.parts = [
            Part(given, open_stores(given, tokenizer, cached), config, tokenizer, seed)
            for given in config.mixture or (config,)
        ]
        self.evaluations = evaluations(config, tokenizer, cached)
        self._mixture = Mixture([part.weight for part in self.parts], seed)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all documents and of everything else that their order depends on: equal on two
        machines, or in a resumed run, if and only if the data are equal."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self.parts:
            stores = part.train.documents.stores
            digest.update(f"{part.weight!r} {len(stores)}".encode())
            for store in stores:
                digest.update(f"{store.digest()} {len(store.digests)}".encode())
        digest.update(f"{self.seed} {self._held_out_share!r}".encode())
        return digest.hexdigest()

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The rows with these numbers; :data:`FILLER`: a row from which nothing is learned."""
        return Batch.of([self._filler if n == FILLER else self.row(n) for n in numbers])

    @cached_property
    def _filler(self) -> Row:
        row = self.row(0)
        starts = None if row.starts is None else [0]
        return Row(np.zeros_like(row.ids), starts, [(0, len(row.ids))])

    def rows_with(self, tokens: int, taken: int) -> int:
        """Number of rows after ``taken`` that together have at least ``tokens`` counted tokens.

        Raises:
            ConfigError: a million rows have fewer.
        """
        found = 0
        for count in range(1, _MOST_ROWS + 1):
            rows, own = self._locate(taken + count - 1)
            found += rows.counted(own)
            if found >= tokens:
                return count
        raise ConfigError(
            f"train.batch_tokens: {_MOST_ROWS:,} sequences have {found:,} tokens that the loss "
            f"counts, less than {tokens:,}: lower it, or raise data.sequence_length"
        )

    def row(self, number: int) -> Row:
        """Row ``number`` in the order of the data."""
        rows, own = self._locate(number)
        return rows.row(own)

    def position_of(self, row: int) -> tuple[int, int]:
        """Where a row begins: its document, and the token within the document."""
        rows, own = self._locate(row)
        return rows.position_of(own)

    def _locate(self, number: int) -> tuple[Rows, int]:
        part, own = self._mixture.locate(number)
        return self.parts[part].train, own

    def epochs(self, taken: int) -> dict[str, float]:
        """Epochs of each text after ``taken`` rows, by name."""
        counts = self._mixture.taken(taken)
        return {
            part.name: count / part.train.per_epoch
            for part, count in zip(self.parts, counts, strict=True)
        }

    @cached_property
    def tokens_of_a_sequence(self) -> float:
        """Mean number of tokens per sequence that the loss counts, over the first 256."""
        return float(np.mean([counted(self.row(number)) for number in range(_COUNTED)]))

    @property
    def evaluated(self) -> list[str]:
        """Names of the texts that are evaluated: the held-out text, if there is one, and others."""
        held_out = all(part.held_out is not None for part in self.parts)
        return [HELD_OUT] * held_out + list(self.evaluations)

    def evaluation(self, name: str, batches: int, rows: slice | None = None) -> Iterator[Batch]:
        """``batches`` global batches of one of :attr:`evaluated`, or the rows ``rows`` of each.

        The rows are evenly spaced over the text and the same at every call; they repeat if the text
        has fewer. Of the held-out text, each text of a mixture has its share.
        """
        even = self._held_out if name == HELD_OUT else self.evaluations[name].even
        size = self.global_batch
        for first in range(0, batches * size, size):
            wanted = range(first, first + size)[rows or slice(None)]
            yield Batch.of([even(number, batches * size) for number in wanted])

    def _held_out(self, number: int, total: int) -> Row:
        text, own, of = self._mixture.even(number, total)
        held_out = self.parts[text].held_out
        assert held_out is not None, "a source without one does not list it"
        return held_out.even(own, of)


class Ahead(Generic[_Made]):
    """Makes what the next step reads in a thread, while the step before it computes.

    One result is made ahead, never more. A thread ends with its result, so that a run that ends,
    however it does, leaves none behind.

    Args:
        make: called with the number of rows used before; a function of this number alone.
    """

    def __init__(self, make: Callable[[int], _Made]) -> None:
        self._make = make
        self._begun: tuple[int, Future[_Made]] | None = None

    def begin(self, taken: int) -> None:
        """Start to make the result for ``taken``."""
        self._begun = taken, in_background(partial(self._make, taken), "next batch")

    def take(self, taken: int) -> _Made:
        """The result for ``taken``, made now if it was not begun; raises what ``make`` raised."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != taken:
            return self._make(taken)
        return begun[1].result()


Views = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Parts of documents: start of each in the stored tokens, and its number of tokens."""


def split(
    lengths: NDArray[np.int64], digests: NDArray[np.uint64] | None, held_out: float, end: int
) -> tuple[Views, Views]:
    """Split documents into parts to train on and parts to hold out.

    Documents are ranked by a digest of their tokens and the first ``held_out`` of them are held
    out. The split thus depends neither on the seed nor on file names, and copies of a document are
    mostly on the same side. One document at least is trained on. With fewer than ``1 / held_out``
    documents, the last ``held_out`` of each document is held out instead.

    Args:
        lengths: ``[n]``, tokens of each document with its end.
        digests: ``[n, 2]``; ``None`` if no document is held out entirely.
        end: tokens of a document's end, 0 or 1.
    """
    begins = np.cumsum(lengths) - lengths
    if 0 < held_out * len(lengths) < 1:
        content = lengths - end
        cut = np.maximum(1, content - np.round(held_out * content).astype(np.int64))
        tail = cut < content
        train = begins, np.where(tail, cut, lengths)  # a cut document has no end token
        return train, (begins[tail] + cut[tail], (lengths - cut)[tail])
    count = min(round(held_out * len(lengths)), len(lengths) - 1)
    held = np.zeros(len(lengths), bool)
    ranked = np.zeros(0, np.int64)
    if count:
        assert digests is not None, "the caller gives them where documents are held out"
        ranked = np.lexsort((digests[:, 1], digests[:, 0]))[:count]
        held[ranked] = True
    return (begins[~held], lengths[~held]), (begins[ranked], lengths[ranked])


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer of a run.

    Raises:
        ConfigError: the model's vocabulary is smaller; see also :func:`load_tokenizer`.
    """
    tokenizer, size = load_tokenizer(config.data.tokenizer), config.model.vocab_size
    if tokenizer.vocab_size > size:
        raise ConfigError(
            f"model.vocab_size: {size} is less than the {tokenizer.vocab_size} ids of "
            f"data.tokenizer = {config.data.tokenizer!r}"
        )
    return tokenizer
