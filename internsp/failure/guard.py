"""A watchdog that ends a wait which can never complete, because another rank failed (WP-10).

A rank that makes no progress publishes a report in the store: at once if one of its passes failed;
from a watchdog thread if it waits for longer than usual. The thread compares reports twice a
second: that of the rank that failed first, which the store names, and those of :data:`MOST_READ`
others, in turn, so that a check costs the store as much with ten thousand ranks as with 64. Once it
is certain that this rank can never go on
(:mod:`internsp.failure.rank_report`), the thread closes the connections of this rank's process
groups (NCCL: aborts the groups), so that the collective that the rank waits for raises.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from internsp.base.accelerator import HOST, backends_of
from internsp.failure.comm_context import CommContext
from internsp.failure.rank_report import RankReport, RankState, WaitedCollective, find_fatal_cause
from internsp.mesh import ParallelMesh

T = TypeVar("T")
_LOG = logging.getLogger("internsp.failure")
CHECK_SECONDS = 0.5
MOST_READ = 64
"""Reports of other ranks that a rank reads in one check."""
_REFUSAL_CHECKS = 4  # a refusal counts once it has stood for so many checks: its rank may go on
_UNUSED_TAG = 0x7FFFFFFF  # no message is sent with this tag


class FailureGuard:
    """Publishes this rank's reports, and decides by the other ranks' reports whether to give up.

    Args:
        name: prefix of the keys in the store: the same on all ranks of the stage, and unique to
            this guard.
        on_fatal_cause: called on the thread with the fatal cause, before the groups are aborted;
            returns the cause that all ranks report.
        torchs: groups in which torch's own layers communicate.
        beside: the other ranks of these, with the name of each one's guard.

    Attributes:
        fatal_cause: text that says why this rank can never go on; empty while it may.
        epoch: number of times that the ranks have recovered together.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        comm_context: CommContext,
        store: dist.Store,
        name: str,
        on_fatal_cause: Callable[[str], str],
        torchs: Iterable[dist.ProcessGroup] = (),
        beside: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.fatal_cause = ""
        self.epoch = 0
        self._comm_context, self._store, self._name = comm_context, store, name
        self._rank, self._tensor_rank = mesh.rank, mesh.tensor_rank
        self._names = dict.fromkeys([name, *beside.values()])
        self._ranks, self._beside, self._pairs = [*mesh.stage_ranks, *beside], beside, mesh.pairs
        self._groups = {group.group_name: group for group in (*mesh.stage_groups, *torchs)}
        self._on_fatal_cause = on_fatal_cause
        self._refusals = self._beat = self._turn = 0
        self._made: set[str] = set()  # keys of reports that are in the store
        self._own_report: RankReport | None = None  # failed, refused or lost; else None
        self._store_wait: tuple[str, tuple[int, ...], str, int] | None = None
        self._met: dict[str, int] = {}  # calls that have ended on this rank, by kind
        self._last_wait: object = None  # what this rank waited for at the last check
        self._wait_published = False  # by the thread, as its report of this rank
        self._first_beats: dict[int, int] = {}  # of others in the store, since this rank waits
        self._refusals_seen: dict[int, tuple[int, int]] = {}  # by rank: (beat, number of checks)
        self._lock = threading.Lock()  # for this rank's own report
        self._stop: Callable[[], Any] | None = None
        self._write_report(None)

    # called by the rank's main thread

    def begin_pass(self) -> None:
        """Start the thread at the first pass; withdraw the report of an earlier refusal."""
        if self._stop is None and len(self._ranks) > 1:
            name = "internsp-failure-guard"
            self._stop = call_every(CHECK_SECONDS, self, FailureGuard.check, name)
        if self._own_report is not None and self._own_report.state is RankState.REFUSED:
            self._set_own_report(None)

    def report_failed(self, cause: str, recovering: bool = False) -> None:
        """Publish that a pass failed: this rank launches nothing until all ranks have failed.

        Args:
            recovering: this rank waits in :meth:`StageRecovery.reach_consensus` already.
        """
        if self._own_report is None or self._own_report.state is not RankState.LOST:
            state = RankState.RECOVERING if recovering else RankState.FAILED
            self._set_own_report(self._report(state, cause))

    def report_refused(self, cause: str) -> None:
        """Publish that a call between passes raised; the program may catch that and go on."""
        if self._own_report is None or self._own_report.state is RankState.REFUSED:
            self._refusals += 1
            self._set_own_report(self._report(RankState.REFUSED, cause))

    def report_lost(self, cause: str) -> None:
        """Publish that this rank's process groups are aborted."""
        if self._own_report is None or self._own_report.state is not RankState.LOST:
            self._set_own_report(self._report(RankState.LOST, cause))
            from internsp.failure.flight_recorder import unfinished  # few runs need it

            if says := unfinished():
                _LOG.warning("rank %d, torch's flight recorder: %s", self._rank, says)

    def reset(self) -> None:
        """Begin the next epoch: all ranks have failed at the same point, and go on."""
        self.epoch += 1
        self._set_own_report(None)

    def close(self) -> None:
        """Stop the thread, and refer to the groups no more: the mesh was closed."""
        if self._stop is not None:
            self._stop()
        self._groups = {}

    @contextlib.contextmanager
    def waits_in_store(
        self, what: str, ranks: Sequence[int], call: str, number: int
    ) -> Iterator[None]:
        """Context in which this rank waits, by the store, until ``ranks`` have reached ``what``.

        Args:
            call, number: see :class:`RankReport`; the same on all ``ranks``.
        """
        self._store_wait = what, tuple(ranks), call, number
        try:
            yield
            self._met[call] = number + 1
        finally:
            self._store_wait = None

    def abort_collectives(self) -> None:
        """Make every wait in this rank's groups raise now, on this rank and on the others."""
        for group in self._groups.values():
            abort_collectives(group)

    # called on the thread

    def check(self) -> None:
        """Publish a report if this rank waits, and give up if the others' reports require it."""
        if self.fatal_cause:
            return
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # the store's process is gone
            mine, unchanged = self._current_report()
            if mine is None:
                return
            if unchanged or self._wait_published:
                self._tell_wait(mine if unchanged else None)
            signals = [self._signal_key(mine.epoch, name) for name in self._names]
            told = [self._store.get(key).decode() for key in signals if self._store.check([key])]
            failed = [int(rank) for rank in told if rank]
            if unchanged or failed:
                self._check_others(mine, failed)

    def _current_report(self) -> tuple[RankReport | None, bool]:
        """A report of what this rank does now, and whether it did the same at the last check.

        No report where the rank has published one by itself, or recovers during this call.
        """
        if self._own_report is not None and self._own_report.state is not RankState.REFUSED:
            return None, False
        epoch, waiting, store_wait = self.epoch, self._comm_context.waiting, self._store_wait
        wait_now: object = waiting if waiting is not None else store_wait
        unchanged = wait_now is not None and wait_now is self._last_wait
        if not unchanged:
            self._first_beats.clear()
        self._last_wait = wait_now
        if waiting is not None:
            launch, unit, weight, phase = waiting
            wait = WaitedCollective(*launch)
            if not wait.groups:
                wait = WaitedCollective(tuple(self._groups.keys() - self._comm_context.groups))
            what = " ".join(filter(None, (f"{weight or unit}", f"({phase})" if phase else "")))
            mine = self._report(RankState.IN_COLLECTIVE, what, wait=wait)
        elif store_wait is not None:
            what, ranks, call, number = store_wait
            mine = self._report(RankState.IN_STORE, what, ranks=ranks, call=call, number=number)
        else:
            mine = self._report(RankState.IN_COLLECTIVE, "")
        return (mine if epoch == self.epoch == mine.epoch else None), unchanged

    def _check_others(self, mine: RankReport, failed: Sequence[int]) -> None:
        """Give up if this rank can never go on.

        Args:
            failed: the rank that has failed first, if any.
        """
        others = [other for other in self._read_reports(failed) if self._still_holds(other)]
        why = find_fatal_cause(mine, others)
        if not why:
            return
        with self._lock:
            if self._own_report is not None and self._own_report.state is not RankState.REFUSED:
                return  # this rank has failed by itself meanwhile
        self.fatal_cause = why = self._on_fatal_cause(why)
        if self._beside:  # a wait in torch's own layers raises torch's words
            _LOG.warning("rank %d cannot go on: %s", self._rank, why)
        self.report_lost(why)
        self.abort_collectives()

    def _still_holds(self, other: RankReport) -> bool:
        """Whether a report of a rank that may have gone on meanwhile is still true."""
        if other.state is RankState.IN_STORE:  # true if its beat grew since this rank waits
            if self._met.get(other.call, 0) > other.number:
                return False  # published late, by a thread that was not scheduled: all have come
            return self._first_beats.setdefault(other.rank, other.beat) != other.beat
        if other.state is RankState.REFUSED:
            beat, checks = self._refusals_seen.get(other.rank, (0, 0))
            self._refusals_seen[other.rank] = other.beat, checks + 1 if beat == other.beat else 0
            return self._refusals_seen[other.rank][1] >= _REFUSAL_CHECKS
        return True

    def _read_reports(self, failed: Sequence[int]) -> list[RankReport]:
        """Those of ``failed`` and of the next ranks in turn."""
        others = [rank for rank in self._ranks if rank != self._rank]
        first, self._turn = self._turn, (self._turn + MOST_READ) % max(len(others), 1)
        turn = [*others[first:], *others[:first]][:MOST_READ]
        named = [rank for rank in failed if rank in others]  # another tensor rank's may not be
        keys = [self._key(rank) for rank in dict.fromkeys([*named, *turn])]
        new = [key for key in keys if key not in self._made]
        if new and not self._store.check(new):  # some rank has not made its guard yet
            return []
        self._made.update(new)
        texts = [found.decode() for found in self._store.multi_get(keys)]
        return [RankReport.loads(text) for text in texts if text]

    def _tell_wait(self, mine: RankReport | None) -> None:
        """Publish that this rank waits; ``None``: it does not any more."""
        with self._lock:
            self._wait_published = mine is not None
            if self._own_report is None:
                self._write_report(mine)

    # called on both threads

    def _set_own_report(self, report: RankReport | None) -> None:
        with self._lock, contextlib.suppress(RuntimeError, ValueError, OSError):
            self._own_report = report
            self._write_report(report)
            mine, none = str(self._rank), ""
            # Names the first rank whose report stands.
            key = self._signal_key(self.epoch, self._name)
            self._store.compare_set(key, *((mine, none) if report is None else (none, mine)))

    def _write_report(self, report: RankReport | None) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the store's process may be gone
            self._store.set(self._key(self._rank), "" if report is None else report.dumps())

    def _key(self, rank: int) -> str:
        return f"{self._beside.get(rank, self._name)}/at/{rank}"

    def _signal_key(self, epoch: int, name: str) -> str:
        return f"{name}/failing/{epoch}"

    def _report(self, state: RankState, what: str, **more: Any) -> RankReport:
        self._beat += 1
        comm = self._comm_context
        return RankReport(
            self._rank, state, self.epoch, tuple(comm.counts), self.sequence_numbers(), what,
            self._refusals, recent_tags=tuple(map(tuple, comm.recent_tags)), beat=self._beat,
            tensor_rank=self._tensor_rank, **more,
        )  # fmt: skip

    def sequence_numbers(self) -> dict[str, int]:
        """Collectives launched in each group, by group name, as torch's groups count them."""
        groups: Any = self._groups  # torch's own annotations lack the method
        found: dict[str, int] = {}
        for name, group in groups.items():
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                # Messages between pairs are among them on gloo, unequally many on each rank.
                found[name] = group._get_sequence_number_for_group() - self._pairs[name]
        return found


def abort_collectives(group: dist.ProcessGroup) -> None:
    """Make every wait in ``group`` raise now, on this rank and on the others."""
    with contextlib.suppress(RuntimeError, ValueError):
        close_connections(group)
        if "nccl" in backends_of(group).values():
            dist.distributed_c10d._abort_process_group(group)


def call_every(
    seconds: float, owner: T, call: Callable[[T], None], name: str
) -> Callable[[], Any]:
    """Call ``call(owner)`` every ``seconds`` on a daemon thread, which ends with ``owner`` or with
    the process; returns its stop."""
    stop, reference = threading.Event(), weakref.ref(owner)

    def run() -> None:
        while not stop.wait(seconds):
            alive = reference()
            if alive is None:
                return
            call(alive)
            del alive

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return weakref.finalize(owner, _stop_thread, thread, stop)


def _stop_thread(thread: threading.Thread, stop: threading.Event) -> None:
    """Stop the thread, also when the interpreter exits: a thread in a call of torch would crash."""
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=2.0)


def close_connections(group: dist.ProcessGroup, peers: Iterable[int] | None = None) -> None:
    """Close this rank's connections to ``peers`` of ``group`` now (gloo; other backends: nothing).

    Every wait in these connections raises, on this rank (in other threads) and on the peers
    (WP-10). Neither destroying nor aborting a gloo group does that, but a receive that times out
    does.

    Args:
        peers: ranks in the group; ``None``: all others.
    """
    if backends_of(group).get(HOST) != "gloo":
        return
    for peer in range(group.size()) if peers is None else peers:
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):  # always raises: no rank sends with this tag
                group.recv([torch.zeros(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
