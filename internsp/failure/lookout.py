"""Frees a rank from a wait that cannot end: another one failed alone, or is elsewhere (WP-10).

A rank that stands still says so in the store: where a pass of it has failed, at once; where it
waits for longer than usual, from a thread of its own, which looks twice a second whether others
have said such a thing too. Once it is certain that this rank can never go on
(:mod:`internsp.failure.standstill`), its groups are severed, so that whatever it waits for raises.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from internsp.failure.ledger import Ledger
from internsp.failure.standstill import Kind, Report, Wait, hopeless
from internsp.mesh import ParallelMesh

LOOK_SECONDS = 0.5
_PATIENCE = 4  # looks for which a rank that refused something may come back
_NO_TAG = 0x7FFFFFFF  # of no message


class Lookout:
    """One rank's reports about itself, and what those of the others mean for it.

    Args:
        name: the same on all ranks of the stage, and of no other lookout.
        given_up: called on the thread, with the cause, before the groups are severed; returns the
            cause by which all ranks call it.

    Attributes:
        doom: why this rank can never go on, in words; empty while it may.
        epoch: how often the ranks have recovered together.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        ledger: Ledger,
        store: dist.Store,
        name: str,
        given_up: Callable[[str], str],
    ) -> None:
        self.doom = ""
        self.epoch = 0
        self._ledger, self._store, self._name = ledger, store, name
        self._rank = mesh.rank
        self._ranks = mesh.stage_ranks
        self._groups = {group.group_name: group for group in mesh.stage_groups}
        self._given_up = given_up
        self._refusals = self._beat = 0
        self._said: Report | None = None  # failed, refused or lost; else None
        self._meeting: tuple[str, tuple[int, ...]] | None = None
        self._stood: object = None  # what was waited for at the last look
        self._published = False  # by the thread: this rank waits
        self._first_beats: dict[int, int] = {}  # of others in a meeting, since this rank waits
        self._refused: dict[int, tuple[int, int]] = {}  # by rank: which refusal, for how many looks
        self._lock = threading.Lock()  # of what this rank has said
        self._stop: Callable[[], Any] | None = None
        self._set(None)

    # said by the rank itself

    def begin(self) -> None:
        """A pass begins: watch from now on. What was refused before is over."""
        if self._stop is None and len(self._ranks) > 1:
            self._stop = _start(self)
        if self._said is not None and self._said.kind is Kind.REFUSED:
            self._say(None)

    def failed(self, cause: str, agrees: bool = False) -> None:
        """A pass has failed here: nothing is launched before the others fail alike."""
        if self._said is None or self._said.kind is not Kind.LOST:
            self._say(self._report(Kind.AGREES if agrees else Kind.FAILED, cause))

    def refused(self, cause: str) -> None:
        """Something raised at rest; the program may go on."""
        if self._said is None or self._said.kind is Kind.REFUSED:
            self._refusals += 1
            self._say(self._report(Kind.REFUSED, cause))

    def lost(self, cause: str) -> None:
        """This rank's groups are gone."""
        if self._said is None or self._said.kind is not Kind.LOST:
            self._say(self._report(Kind.LOST, cause))

    def together(self) -> None:
        """All ranks have failed alike, and go on."""
        self.epoch += 1
        self._say(None)

    @contextlib.contextmanager
    def meets(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """Inside, this rank waits until ``ranks`` have come to ``what``."""
        self._meeting = what, tuple(ranks)
        try:
            yield
        finally:
            self._meeting = None

    def sever(self) -> None:
        """Let whatever waits in this rank's groups fail now, here and on the other ranks."""
        for group in self._groups.values():
            end(group)

    # on the thread

    def look(self) -> None:
        """Compare with the others' reports; give up where nothing else is left."""
        if self.doom:
            return
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # the store went with its rank
            mine, stands = self._where()
            if mine is None:
                return
            if stands:
                self._publish(mine)
            elif self._published:
                self._withdraw()
            if stands or self._store.check([self._signal(mine.epoch)]):
                self._judge(mine)

    def _where(self) -> tuple[Report | None, bool]:
        """Where this rank is, and whether it has stood there since the last look."""
        if self._said is not None and self._said.kind is not Kind.REFUSED:
            return None, False
        epoch, waiting, meeting = self.epoch, self._ledger.waiting, self._meeting
        standing: object = waiting if waiting is not None else meeting
        stands = standing is not None and standing is self._stood
        if not stands:
            self._first_beats.clear()
        self._stood = standing
        if waiting is not None:
            wait, unit, weight, phase = waiting
            if not wait.groups:
                wait = Wait(tuple(self._groups.keys() - self._ledger.groups))
            what = " ".join(filter(None, (f"{weight or unit}", f"({phase})" if phase else "")))
            mine = self._report(Kind.WAITS, what, wait=wait)
        elif meeting is not None:
            mine = self._report(Kind.MEETS, meeting[0], ranks=meeting[1])
        else:
            mine = self._report(Kind.WAITS, "")
        return (mine if epoch == self.epoch == mine.epoch else None), stands

    def _judge(self, mine: Report) -> None:
        why = hopeless(mine, [other for other in self._read() if self._settled(other)])
        if not why:
            return
        with self._lock:
            if self._said is not None and self._said.kind is not Kind.REFUSED:
                return  # it has failed by itself meanwhile
        self.doom = why = self._given_up(why)
        self.lost(why)
        self.sever()

    def _settled(self, other: Report) -> bool:
        """Whether what a report says still holds, where its rank may have gone on meanwhile."""
        if other.kind is Kind.MEETS:  # a later beat than the first that was seen from here
            return self._first_beats.setdefault(other.rank, other.beat) != other.beat
        if other.kind is Kind.REFUSED:
            beat, looks = self._refused.get(other.rank, (0, 0))
            self._refused[other.rank] = other.beat, looks + 1 if beat == other.beat else 0
            return self._refused[other.rank][1] >= _PATIENCE
        return True

    def _read(self) -> list[Report]:
        keys = [self._key(rank) for rank in self._ranks if rank != self._rank]
        if not self._store.check(keys):  # a rank still makes its own
            return []
        texts = [found.decode() for found in self._store.multi_get(keys)]
        return [Report.loads(text) for text in texts if text]

    def _publish(self, mine: Report) -> None:
        with self._lock:
            if self._said is None:
                self._published = True
                self._set(mine)

    def _withdraw(self) -> None:
        with self._lock:
            self._published = False
            if self._said is None:
                self._set(None)

    # both

    def _say(self, report: Report | None) -> None:
        with self._lock, contextlib.suppress(RuntimeError, ValueError, OSError):
            self._said = report
            self._set(report)
            if report is not None:
                self._store.set(self._signal(report.epoch), str(self._rank))

    def _set(self, report: Report | None) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone with its rank
            self._store.set(self._key(self._rank), "" if report is None else report.dumps())

    def _key(self, rank: int) -> str:
        return f"{self._name}/at/{rank}"

    def _signal(self, epoch: int) -> str:
        return f"{self._name}/failing/{epoch}"

    def _report(
        self, kind: Kind, what: str, wait: Wait | None = None, ranks: tuple[int, ...] = ()
    ) -> Report:
        self._beat += 1
        ledger = self._ledger
        return Report(
            self._rank, kind, self.epoch, tuple(ledger.counts), self.sequences(), what,
            self._refusals, wait, ranks, tuple(map(tuple, ledger.recent)), self._beat,
        )  # fmt: skip

    def sequences(self) -> dict[str, int]:
        """Collectives launched in each group, by its name; the groups' own count."""
        groups: Any = self._groups  # torch's own annotations lack the method
        return {name: group._get_sequence_number_for_group() for name, group in groups.items()}


def end(group: dist.ProcessGroup) -> None:
    """Let whatever waits in ``group`` fail now, on this rank and on the others."""
    with contextlib.suppress(RuntimeError, ValueError):
        if dist.get_backend(group) == "nccl":
            dist.distributed_c10d._abort_process_group(group)
        else:
            sever(group)


def _start(lookout: Lookout) -> Callable[[], Any]:
    """Start the thread; it ends with its lookout, or with the process, which it does not hold."""
    stop = threading.Event()
    thread = threading.Thread(
        target=_look_on, args=(weakref.ref(lookout), stop), name="internsp-lookout", daemon=True
    )
    thread.start()
    return weakref.finalize(lookout, _end_thread, thread, stop)


def _end_thread(thread: threading.Thread, stop: threading.Event) -> None:
    """Also at the interpreter's end, which a thread inside a call of torch's would not survive."""
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=2.0)


def _look_on(reference: weakref.ref[Lookout], stop: threading.Event) -> None:
    while not stop.wait(LOOK_SECONDS):
        lookout = reference()
        if lookout is None:
            return
        lookout.look()
        del lookout


def sever(group: dist.ProcessGroup, peers: Iterable[int] | None = None) -> None:
    """Close this rank's connections to ``peers`` of ``group``, at both ends, now (gloo; WP-10).

    A rank that waits in it gets an error, here (on other threads) and at the other ranks. Neither
    destroying a gloo group nor aborting it does that, but a receive that is given up does.

    Args:
        peers: ranks in the group; ``None``: all others.
    """
    if dist.get_backend(group) != "gloo":
        return
    for peer in range(group.size()) if peers is None else peers:
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):  # it always raises: no rank sends with this tag
                group.recv([torch.zeros(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))
