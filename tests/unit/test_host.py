"""Host memory and a device with streams, by mocks: the order of streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from internsp.base import host
from internsp.base.host import HostLink, HostSum

KIND = torch.device("xpu", 0)  # a type that this build of torch has no devices of


class Stream:
    """Records what is queued on it, and on which stream all streams' work is queued now."""

    here: Any = None
    made: Any = None

    def __init__(self, device: torch.device) -> None:
        assert device == KIND
        self.log: list[Any] = []
        Stream.made.append(self)

    def __enter__(self) -> None:
        self._before, Stream.here = Stream.here, self

    def __exit__(self, *_: object) -> None:
        Stream.here = self._before

    def wait_stream(self, other: Stream) -> None:
        self.log.append(("behind", other))

    def wait_event(self, event: tuple[Stream, int]) -> None:
        self.log.append(("behind", *event))

    def record_event(self) -> Any:
        return self, len(self.log)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, list[bool]]:
    """The computing device; whether each host buffer is pinned."""
    Stream.made = []
    compute, pinned, empty = Stream(KIND), list[bool](), torch.empty
    monkeypatch.setattr(Stream, "here", compute)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream.here)
    monkeypatch.setattr(host, "_copy", lambda pairs: Stream.here.log.append(("copy", pairs)))

    def noted(*shape: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", noted)
    return compute, pinned


def test_host_memory_is_pinned_and_copies_run_on_streams_of_their_own(
    streams: tuple[Stream, list[bool]],
) -> None:
    compute, pinned = streams
    link = HostLink(KIND)
    _, inward, outward = Stream.made
    home = link.empty("weights", (2, 3), torch.float32)
    assert pinned == [True]
    assert link.allocated["weights"] == 24
    there = torch.ones(2, 3)
    copied = link.copy_to_device([(there, home)])
    assert inward.log == [("behind", compute), ("copy", [(there, home)])]
    assert compute.log == [], "nothing has waited"
    copied.wait()
    assert compute.log == [("behind", inward, 2)]
    link.copy_to_host([(home, there)])
    assert outward.log == [("behind", compute), ("copy", [(home, there)])]


def test_what_a_gather_sends_is_copied_in_its_own_stream_without_a_wait_of_the_computing_one(
    streams: tuple[Stream, list[bool]],
) -> None:
    compute, _ = streams
    link = HostLink(KIND)
    _, inward, _ = Stream.made
    with link.on_copy_stream():
        assert Stream.here is inward
        link.copy_to_device([(torch.ones(1), torch.ones(1))]).wait()
    assert [entry[0] for entry in inward.log] == ["behind", "copy", "behind"]
    assert inward.log[0] == ("behind", compute)
    assert inward.log[2] == ("behind", inward, 2), "in its own order"
    assert compute.log == []


def test_what_is_given_away_is_kept_until_the_computing_stream_stands_behind_its_copy(
    streams: tuple[Stream, list[bool]],
) -> None:
    compute, _ = streams
    link = HostLink(KIND)
    total = HostSum(link, 4, torch.float32)
    given: list[Any] = []
    first, second = torch.ones(4), torch.ones(4)
    total.add(first, given.append)
    total.add(second, given.append)
    _, _, outward = Stream.made
    assert [part is first for part in given] == [True], "the first, when the second leaves"
    assert compute.log == [("behind", outward, 2)], "and then only behind its copy"
    link.finish_copies_to_host()
    assert given[1] is second
    assert len(compute.log) == 2
    assert [entry[0] for entry in outward.log].count("copy") == 3, "the second is added there"
