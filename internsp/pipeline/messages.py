"""Messages between stages, and an end to waits for messages that will not come (WP-10; gloo).

A rank that fails stores how many messages it has sent to each other rank and received from it.
Other ranks go on as long as they get their messages, and stop waiting for a message whose number
exceeds the stored count. Thus all ranks of a stage stop at the same point of the schedule,
independent of timing, and soon, since no rank waits for the groups' timeout.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from internsp.failure.guard import call_every, close_connections

_CHECK_SECONDS = 0.1


class Messages:
    """One rank's messages of one step.

    Args:
        store: in which ranks that fail store their counts.
        rank: this rank in the default process group.
        also_check: called at each check, for waits other than for messages.
    """

    def __init__(self, store: dist.Store, rank: int, also_check: Callable[[], None]) -> None:
        self._store, self._rank, self._also_check = store, rank, also_check
        self._key = ""
        self._counts: dict[str, Counter[int]] = {"isend": Counter(), "irecv": Counter()}
        self._outstanding: set[_Message] = set()  # gloo drops a work that nothing references
        self._waiting: _Message | None = None
        self._last_checked: _Message | None = None  # waited for at the last check
        self._checking = False

    def begin_step(self, key: str) -> None:
        """Begin a step. ``key`` is the same on all ranks, and changes after a failed step."""
        self._key = key
        self._outstanding.clear()
        for counts in self._counts.values():
            counts.clear()
        if not self._checking:
            self._checking = True
            call_every(_CHECK_SECONDS, self, Messages.check, "internsp-messages")

    def track(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Return ``ops``, changed so that :meth:`check` can end a wait for one of them."""
        for op in ops:
            op.op = _TrackedOp(self, op)
        return ops

    def store_counts(self) -> None:
        """Store this rank's counts: it sends and receives no more messages in this step."""
        counts = {kind: dict(found) for kind, found in self._counts.items()}
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            self._store.set(f"{self._key}/{self._rank}", json.dumps(counts))

    def check(self) -> None:
        """Close the connection of a message that is waited for if its peer has failed before it."""
        with contextlib.suppress(RuntimeError):
            self._also_check()
        message, before = self._waiting, self._last_checked
        self._last_checked = message
        if message is None or message is not before:
            return
        with contextlib.suppress(RuntimeError):
            key = f"{self._key}/{message.peer}"
            if not self._store.check([key]):
                return
            theirs = json.loads(self._store.get(key))["irecv" if message.is_send else "isend"]
            if message.number > theirs.get(str(self._rank), 0):
                close_connections(message.group, [message.group_peer])

    def record_launch(self, kind: str, op: _TrackedOp, work: Any, tensor: Any) -> _Message:
        """Count a message of ``tensor`` that was launched, and wrap its work."""
        self._counts[kind][op.peer] += 1
        message = _Message(self, kind == "isend", self._counts[kind][op.peer], op, work, tensor)
        self._outstanding.add(message)
        return message

    def wait(self, message: _Message) -> None:
        """Wait for ``message``; :meth:`check` can end the wait."""
        self._waiting = message
        try:
            message.work.wait()
        finally:
            self._waiting = message.keep = None
            self._outstanding.discard(message)


class _Message:
    """A work handle: the ``number``-th message to ``peer`` in this step, or from it."""

    def __init__(
        self, messages: Messages, is_send: bool, number: int, op: _TrackedOp, work: Any, keep: Any
    ) -> None:
        self._messages = messages
        self.keep = keep  # until the wait: not every backend's work keeps its tensor
        self.is_send, self.number, self.work = is_send, number, work
        self.peer, self.group, self.group_peer = op.peer, op.group, op.group_peer

    def wait(self) -> None:
        """Wait like ``dist.Work.wait``."""
        self._messages.wait(self)


class _TrackedOp:
    """Replaces ``isend`` or ``irecv`` in a ``P2POp``.

    It has no reference to the operation: the cycle would keep the sent tensor alive until the next
    garbage collection.
    """

    def __init__(self, messages: Messages, op: dist.P2POp) -> None:
        self._messages, self._launch = messages, op.op
        self.peer, self.group, self.group_peer = op.peer, op.group, op.group_peer
        self._tag = op.tag
        self.__name__ = op.op.__name__

    def __call__(self, tensor: Any, **_: Any) -> _Message:
        peer = {"group_dst" if self.__name__ == "isend" else "group_src": self.group_peer}
        work = self._launch(tensor, group=self.group, tag=self._tag, **peer)
        return self._messages.record_launch(self.__name__, self, work, tensor)
