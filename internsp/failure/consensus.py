"""Ranks that agree by the store alone: between two passes, and after a failure (WP-10).

A collective that only some ranks call would hang or abort the process group; a wait in the store
ends with an error that names the call, and leaves the process groups usable. After an exception no
collective can be relied on at all. To set a run up, see :mod:`internsp.failure.objects`.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch.distributed as dist

from internsp.errors import CollectiveError, InternspError
from internsp.failure.guard import FailureGuard

STORE_GONE = (
    "The process that held the ranks' store has ended (rank 0's, where no launcher holds it)"
)


def default_store() -> dist.Store:
    """The store with which the default process group was made."""
    return dist.distributed_c10d._get_default_store()


class Consensus:
    """Some ranks that exchange texts by the store. Calls with different topics are independent.

    Args:
        name: prefix of the keys: the same on these ranks, and unique to this object.
        seconds: timeout of a wait.
        guard: ends a wait of :meth:`gather` that can never complete.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: Sequence[int],
        seconds: float,
        guard: FailureGuard | None = None,
    ) -> None:
        self._name, self._rank, self._ranks, self._seconds = name, rank, list(ranks), seconds
        self._guard = guard
        # Kept: the default group may be destroyed before this process ends.
        self._store = default_store()
        self._rounds: dict[str, int] = defaultdict(int)  # completed calls of gather, by topic

    # all ranks make the same call: between passes

    def gather(
        self, topic: str, text: str, counts: Callable[[str], bool] = lambda text: True
    ) -> dict[int, str]:
        """The ``text`` of every rank, by rank. Blocks until all ranks have called it.

        Args:
            text: it also names the call in errors.
            counts: whether the text of a rank is one to this call, and not an older
                :meth:`answer`.

        Raises:
            CollectiveError: some rank did not call it in time. No collective was launched, so that
                process groups stay usable, and this rank's text is withdrawn. Or some rank can
                never call it, because it waits elsewhere for this rank: then the process groups
                are aborted. Or the store is gone with the process that held it.
        """
        try:
            return self._gathered(topic, text, counts)
        except dist.DistError as error:  # torch's words name neither the call nor that process
            raise CollectiveError(
                f"rank {self._rank} reached {text}, which all ranks {self._ranks} must call "
                f"together. {STORE_GONE}: see its log. If it was only done before this rank, let "
                "the ranks end together: torch.distributed.barrier() as the last call"
            ) from error

    def _gathered(self, topic: str, text: str, counts: Callable[[str], bool]) -> dict[int, str]:
        assert self._guard is not None, "it watches waits between passes"
        store, call, number = self._store, f"{self._name}/{topic}", self._rounds[topic]
        found: dict[int, str] = {}
        with self._guard.waits_in_store(text, self._ranks, call, number):
            self.answer(topic, text)
            deadline, pause = time.monotonic() + self._seconds, 0.0002
            while True:
                for rank in self._ranks:
                    key = f"{call}/{number}/{rank}"
                    if rank not in found and store.check([key]):
                        given = store.get(key).decode()
                        if counts(given):
                            found[rank] = given
                missing = [rank for rank in self._ranks if rank not in found]
                if not missing:
                    break
                what = f"rank {self._rank} reached {text}"
                if self._guard.fatal_cause:
                    raise CollectiveError(
                        f"{what}, which all ranks {self._ranks} must call together, but ranks "
                        f"{missing} cannot come: {self._guard.fatal_cause}"
                    )
                if time.monotonic() > deadline:
                    store.delete_key(f"{call}/{number}/{self._rank}")
                    raise CollectiveError(
                        f"{what} and waited {self._seconds:g} s for ranks {missing}, which did not "
                        f"come: all ranks {self._ranks} must call it together"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        self._rounds[topic] = number + 1
        if number:  # all ranks have read this rank's text of the call before, as they are here
            with contextlib.suppress(dist.DistError):  # all have come: what is left over is gone
                store.delete_key(f"{call}/{number - 1}/{self._rank}")
        return {rank: found[rank] for rank in self._ranks}

    def answer(self, topic: str, text: str) -> None:
        """Leave ``text`` for ranks that make the next :meth:`gather` of ``topic``. Does not block.

        This rank may make that call, too; it then gives its text instead.
        """
        self._store.set(f"{self._name}/{topic}/{self._rounds[topic]}/{self._rank}", text)

    def same(
        self,
        topic: str,
        what: str,
        refused: Exception | None = None,
        kind: type[InternspError] = CollectiveError,
        remedy: str = "all ranks must make the same calls in the same order",
    ) -> None:
        """Check that all ranks make the same call, ``what``. Blocks until all ranks have come.

        Args:
            refused: the error for which this rank refuses the call; raised here once the other
                ranks know of it.

        Raises:
            kind: another rank made another call, or refused it.
            CollectiveError: see :meth:`gather`.
        """
        mine = what if refused is None else f"{what}, which it refused: {refused}"
        found = self.gather(topic, mine)
        if refused is not None:
            raise refused
        other = next((rank for rank, call in found.items() if call != what), None)
        if other is not None:
            raise kind(
                f"rank {self._rank} reached {what}, rank {other} reached {found[other]}: {remedy}"
            )

    # a rank has failed: the store may be gone with its process

    def first(self, topic: str, text: str, replaces: str = "") -> str:
        """Give ``text`` unless a rank has given one before; returns the text given first.

        Args:
            replaces: an earlier text of this rank, which ``text`` may replace.
        """
        with contextlib.suppress(RuntimeError, ValueError):
            key = f"{self._name}/{topic}"
            return self._store.compare_set(key, replaces, text).decode() or text
        return text

    def known(self, topic: str) -> str:
        """The text that a rank gave :meth:`first` to ``topic``; empty if none did.

        Raises:
            RuntimeError, ValueError: the store is gone.
        """
        key = f"{self._name}/{topic}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def verdict(
        self,
        topic: str,
        position: str | None,
        same: Callable[[Sequence[str]], bool] = lambda positions: len(set(positions)) == 1,
    ) -> bool:
        """Whether all ranks report the same ``position`` in time. Blocks.

        All ranks get the same verdict, the first that any rank writes: once a rank has given up, or
        its process has ended, no rank agrees.

        Args:
            position: where this rank is; ``None``: this rank refuses, and does not wait.
            same: whether the positions of all ranks, in their order, are the same.
        """
        store, key = self._store, f"{self._name}/{topic}"
        posted = [f"{key}/{rank}" for rank in self._ranks]
        ends = [f"{key}/verdict", f"{self._name}/gone"]
        deadline, agreed = time.monotonic() + self._seconds, False
        with contextlib.suppress(RuntimeError, ValueError):  # else a rank has ended: none agrees
            store.set(f"{key}/{self._rank}", "refused" if position is None else position)
            while position is not None and not any(store.check([end]) for end in ends):
                if time.monotonic() > deadline or store.check(posted):
                    break
                time.sleep(0.01)
            if position is not None and store.check(posted):
                agreed = same([store.get(one).decode() for one in posted])
            mine = "agreed" if agreed else "refused"
            return bool(store.compare_set(f"{key}/verdict", "", mine) == b"agreed")
        return False

    def refuse(self, topic: str) -> None:
        """Let no rank agree in the :meth:`verdict` of ``topic``. Does not block."""
        self.first(f"{topic}/verdict", "refused")

    def gone(self) -> None:
        """This rank's process ends: no :meth:`verdict` waits for it."""
        self.first("gone", str(self._rank))
