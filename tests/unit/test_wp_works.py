"""Watched work handles: reported in order, errors kept for the waiter, no thread left behind."""

from __future__ import annotations

import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from internsp.base import completion
from internsp.base.completion import CompletionThread
from internsp.wp.collectives import Transport, WorkHandles


class Gate:
    """A work handle that completes when it is opened."""

    def __init__(self, error: Exception | None = None) -> None:
        self.opened = threading.Event()
        self.waits = 0
        self._error = error

    def wait(self) -> None:
        self.waits += 1
        assert self.opened.wait(10)
        if self._error is not None:
            raise self._error


def watchers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "internsp-completion"]


def none_left() -> bool:
    deadline = time.monotonic() + 10
    while watchers() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not watchers()


def test_ends_are_told_in_turn_without_anybody_waiting_and_the_thread_ends() -> None:
    watcher, told = CompletionThread(), []
    gates = [Gate(), Gate()]
    start = time.perf_counter()
    watched = [
        watcher.watch(gate, lambda end, i=i: told.append((i, end)))  # type: ignore[misc]
        for i, gate in enumerate(gates)
    ]
    assert len(watchers()) == 1, "one thread for both"
    assert told == []
    for gate in reversed(gates):
        gate.opened.set()
    assert none_left()
    assert [i for i, _ in told] == [0, 1]
    assert start < told[0][1] <= told[1][1] < time.perf_counter()
    for work in watched:
        work.wait()
        work.wait()
    assert [gate.waits for gate in gates] == [1, 1], "each work is waited for once"
    third = watcher.watch(gates[0], lambda end: told.append((2, end)))
    third.wait()
    assert told[-1][0] == 2, "a watcher that has ended begins anew"
    assert none_left()


def test_once_a_work_is_waited_for_the_thread_that_lingers_keeps_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(completion, "LINGER", 1.0)
    gate, kept = Gate(), Gate()
    work, end = weakref.ref(gate), weakref.ref(kept)
    watched = CompletionThread().watch(gate, lambda _, kept=kept: None)  # type: ignore[misc]
    gate.opened.set()
    watched.wait()
    del gate, kept
    assert watchers(), "it waits for more"
    assert work() is end() is None
    assert none_left()


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_failure_reaches_who_waits_and_those_behind_it_go_on(kind: type[Exception]) -> None:
    watcher, told = CompletionThread(), []
    bad, good = Gate(kind("peer is gone")), Gate()
    works = [watcher.watch(gate, told.append) for gate in (bad, good)]
    bad.opened.set()
    good.opened.set()
    assert none_left()
    assert len(told) == 1, "the one behind it has ended; a failure has no end to tell"
    with pytest.raises(kind, match="peer is gone"):
        WorkHandles(works).wait()
    works[1].wait()


@pytest.mark.parametrize(
    ("gloo", "blocking", "messages"),
    [(False, False, ["coalesced"]), (True, False, ["3"]), (True, True, ["1", "2"])],
)
def test_gathers_of_one_launch_are_one_message_unless_gloo_would_read_device_memory(
    gloo: bool, blocking: bool, messages: list[str]
) -> None:
    sent: list[str] = []
    transport: Any = object.__new__(Transport)
    transport._gloo, transport.blocking_waits = gloo, blocking
    transport.size, transport._gather_options = 2, None
    transport.group = SimpleNamespace(
        allgather_into_tensor_coalesced=lambda outputs, shards, options: sent.append("coalesced")
    )
    transport.all_gather = lambda output, shard: sent.append(str(len(shard)))
    shards = [torch.zeros(1), torch.zeros(2)]
    transport.all_gathers([torch.zeros(2), torch.zeros(4)], shards)
    assert sent == messages
