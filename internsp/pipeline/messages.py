"""Messages between stages, watched for those that will never come (WP-10; gloo on the host).

A rank that fails says how many messages it has sent to each other rank and taken from it. One that
waits goes on as far as the others' messages let it, and stops waiting for a message that is beyond
that number: so all ranks of a stage stop at the same point of the schedule, whatever their timing,
and soon, since no rank waits for the groups' timeout.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from internsp.failure.lookout import sever

_LOOK_SECONDS = 0.1


class Messages:
    """One rank's messages of one step.

    Args:
        store: where ranks that fail leave their numbers.
        rank: of the default process group.
        beside: called at each look: what else may be waited for in vain.
    """

    def __init__(self, store: dist.Store, rank: int, beside: Callable[[], None]) -> None:
        self._store, self._rank, self._beside = store, rank, beside
        self._inferring: tuple[dist.ProcessGroup, set[int]] | None = None
        self._key = ""
        self._numbers: dict[str, Counter[int]] = {"isend": Counter(), "irecv": Counter()}
        self._open: set[_Message] = set()  # gloo goes on with what is kept alive only
        self._waiting: _Message | None = None
        self._seen: _Message | None = None  # what was waited for when last looked at
        self._looking = False

    def begin(self, key: str) -> None:
        """A step begins; ``key`` is the same on all ranks, and another after a failed step."""
        self._key = key
        self._open.clear()
        for numbers in self._numbers.values():
            numbers.clear()
        if not self._looking:
            self._looking = True
            given = (weakref.ref(self), threading.Event())
            threading.Thread(
                target=_look_on, args=given, name="internsp-messages", daemon=True
            ).start()

    def watch(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """The same operations; :meth:`look` notices what is waited for."""
        for op in ops:
            op.op = _Watched(self, op)
        return ops

    def give_up(self) -> None:
        """This rank sends and takes no more in this step."""
        numbers = {kind: dict(found) for kind, found in self._numbers.items()}
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            self._store.set(f"{self._key}/{self._rank}", json.dumps(numbers))

    @contextlib.contextmanager
    def inferring(self, group: dist.ProcessGroup, peers: set[int]) -> Iterator[None]:
        """Inside, torch exchanges shapes with ``peers`` of ``group``, past :meth:`watch`."""
        self._inferring = group, peers
        try:
            yield
        finally:
            self._inferring = None

    def look(self) -> None:
        """Give up what is waited for, if its peer has failed before it."""
        with contextlib.suppress(RuntimeError):
            self._beside()
            self._look_at_inference()
        self._look_at_messages()

    def _look_at_inference(self) -> None:
        if self._inferring is None:
            return
        group, peers = self._inferring
        for peer in list(peers):
            rank = dist.get_global_rank(group, peer)
            if rank != self._rank and self._store.check([f"{self._key}/{rank}"]):
                peers.discard(peer)
                sever(group, [peer])

    def _look_at_messages(self) -> None:
        message, before = self._waiting, self._seen
        self._seen = message
        if message is None or message is not before:
            return
        with contextlib.suppress(RuntimeError):
            key = f"{self._key}/{message.peer}"
            if not self._store.check([key]):
                return
            theirs = json.loads(self._store.get(key))["irecv" if message.sends else "isend"]
            if message.number > theirs.get(str(self._rank), 0):
                sever(message.group, [message.group_peer])

    def launched(self, kind: str, op: _Watched, work: Any) -> _Message:
        """Count a message."""
        self._numbers[kind][op.peer] += 1
        message = _Message(self, kind == "isend", self._numbers[kind][op.peer], op, work)
        self._open.add(message)
        return message

    def wait(self, message: _Message) -> None:
        """Wait for it, watched."""
        self._waiting = message
        try:
            message.work.wait()
        finally:
            self._waiting = None
            self._open.discard(message)


class _Message:
    """A work between stages: the ``number``-th to ``peer`` in this step, or from it."""

    def __init__(
        self, messages: Messages, sends: bool, number: int, op: _Watched, work: Any
    ) -> None:
        self._messages = messages
        self.sends, self.number, self.work = sends, number, work
        self.peer, self.group, self.group_peer = op.peer, op.group, op.group_peer

    def wait(self) -> None:
        """As a work's."""
        self._messages.wait(self)


class _Watched:
    """In the place of a message's function. It does not know its operation, which would be a cycle
    of references and hold what is sent until the next collection."""

    def __init__(self, messages: Messages, op: dist.P2POp) -> None:
        self._messages, self._send_or_take = messages, op.op
        self.peer, self.group, self.group_peer = op.peer, op.group, op.group_peer
        self._tag = op.tag
        self.__name__ = op.op.__name__

    def __call__(self, tensor: Any, **_: Any) -> _Message:
        peer = {"group_dst" if self.__name__ == "isend" else "group_src": self.group_peer}
        work = self._send_or_take(tensor, group=self.group, tag=self._tag, **peer)
        return self._messages.launched(self.__name__, self, work)


def _look_on(reference: weakref.ref[Messages], pause: threading.Event) -> None:
    """On a thread of its own, while the messages' owner lives."""
    while not pause.wait(_LOOK_SECONDS):
        messages = reference()
        if messages is None:
            return
        messages.look()
        del messages
