"""Any device type, by torch's device-independent calls: a mock counts them, none is CUDA's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from internsp.app.config import Config
from internsp.app.launch.preflight import device_mistakes
from internsp.app.models.factory import device_type
from internsp.app.plan import screen
from internsp.app.train.step import peak_memory_bytes
from internsp.base import accelerator
from internsp.base.accelerator import LOCAL_RANKS, DeviceClock, device_clock
from internsp.errors import MachineError
from internsp.mesh import parallel_mesh
from internsp.wp.slots import MemoryPool

KIND = "xpu"  # a type that this build of torch has no devices of
SOURCES = Path(__file__).parents[2] / "internsp"
# Flash attention, apex, torch's allocation history, which exists for CUDA only, and the plan of
# what a run on CUDA keeps.
OF_CUDA_ALONE = {
    "sp/kernels.py",
    "sp/partial.py",
    "layers/norm.py",
    "app/process/modes.py",
    "app/plan/observe.py",
}


class StandIn:
    """A mock of ``torch.accelerator`` and of a device's module; records each call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.stream = object()
        self.current = 0
        self.count = 2

    def current_accelerator(self, check_available: bool = False) -> torch.device:
        assert check_available, "a build of torch for a device does not mean that one is here"
        return torch.device(KIND)

    def device_count(self) -> int:
        return self.count

    def set_device_index(self, index: int) -> None:
        self.calls.append(("set_device_index", index))

    def current_device_index(self) -> int:
        return self.current

    def current_stream(self, device: int) -> Any:
        self.calls.append(("current_stream", device))
        return self.stream

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(("synchronize", device.index))

    def max_memory_allocated(self, device: torch.device) -> int:
        return 1234 + (device.index or 0)

    # torch.get_device_module(device)

    def mem_get_info(self) -> tuple[int, int]:
        return 1000, 4000

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.full((4,), 7, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.calls.append(("set_rng_state", state.tolist(), device.type))


class Event:
    """A mock event; consecutive events are a second apart."""

    made = 0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert device.type == KIND
        assert enable_timing
        self.at = -1

    def record(self, stream: Any) -> None:
        Event.made += 1
        self.at = Event.made

    def synchronize(self) -> None:
        assert self.at > 0, "it was recorded"

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    for name in (
        "current_accelerator", "device_count", "set_device_index", "current_stream",
        "synchronize", "max_memory_allocated", "current_device_index",
    ):  # fmt: skip
        monkeypatch.setattr(torch.accelerator, name, getattr(made, name))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    monkeypatch.setenv("LOCAL_RANK", "1")
    return made


def test_a_rank_computes_on_whatever_torch_finds_and_makes_it_current(stand_in: StandIn) -> None:
    for wanted in (None, KIND):
        assert parallel_mesh.device_of(wanted) == torch.device(KIND, 1)
    assert stand_in.calls == [("set_device_index", 1)] * 2
    assert parallel_mesh.device_of("cpu") == torch.device("cpu")
    with pytest.raises(MachineError, match=r"'cuda': torch finds no CUDA device .* plugin"):
        parallel_mesh.device_of("cuda")
    assert len(stand_in.calls) == 2, "nothing was set for what is refused"
    assert device_type(Config()) == KIND


def test_the_memory_of_a_device_is_known_where_there_is_one(stand_in: StandIn) -> None:
    assert screen._memory_here(Config(parallel={"device": "auto"})) == 4000
    assert screen._memory_here(Config(parallel={"device": "cuda"})) is None


def test_a_device_that_the_program_has_chosen_stays(stand_in: StandIn) -> None:
    stand_in.count, stand_in.current = 4, 3
    assert parallel_mesh.device_of(None) == torch.device(KIND, 3)


@pytest.mark.parametrize("name", LOCAL_RANKS)
def test_each_launchers_number_is_that_of_the_device(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for each in LOCAL_RANKS:
        monkeypatch.delenv(each, raising=False)
    assert parallel_mesh.device_of(None) == torch.device(KIND, 0)
    monkeypatch.setenv(name, "1")
    assert parallel_mesh.device_of(None) == torch.device(KIND, 1)
    stand_in.count = 1  # a launcher shows each process a device of its own
    assert parallel_mesh.device_of(None) == torch.device(KIND, 0)
    stand_in.count = 2
    for wrong in ("2", "-1", "first"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(MachineError, match=rf"{name} = '{wrong}', and this machine has 2 devi"):
            parallel_mesh.device_of(None)


def test_a_run_that_asks_for_more_or_other_devices_is_refused(stand_in: StandIn) -> None:
    three = Config(launch={"processes": 3})
    (mistake,) = device_mistakes(three, {})
    assert "3 processes need a device each and this machine has 2" in str(mistake)
    (mistake,) = device_mistakes(Config(parallel={"device": "cuda"}), {})
    assert "torch finds no CUDA device" in str(mistake)
    assert list(device_mistakes(Config(launch={"processes": 2}), {})) == []


def test_streams_events_memory_and_random_state_are_the_devices_own(stand_in: StandIn) -> None:
    device = torch.device(KIND, 1)
    current = accelerator.current_stream(device)
    assert current is not None
    assert current() is stand_in.stream
    clock = device_clock(device)
    assert isinstance(clock, DeviceClock)
    first, second = clock.mark(), clock.mark()
    assert clock.seconds(second) - clock.seconds(first) == pytest.approx(1.0)
    assert clock.between(first, second) == pytest.approx(1.0)
    # Synchronized before the clock's base is recorded, which would otherwise wait for earlier work.
    sync, stream = ("synchronize", 1), ("current_stream", 1)
    assert stand_in.calls == [stream, sync, stream, sync, stream, stream]
    assert peak_memory_bytes(device) == 1235
    state = accelerator.random_state(device)
    accelerator.set_random_state(device, state)
    assert stand_in.calls[-1] == ("set_rng_state", [7] * 4, KIND)


def test_the_host_has_no_streams_and_asks_no_device_module(stand_in: StandIn) -> None:
    host = torch.device("cpu")
    assert accelerator.current_stream(host) is None
    assert device_clock(host) is None
    assert not MemoryPool([16], host).slots[0].streams.active
    assert peak_memory_bytes(host) > 1 << 20
    assert stand_in.calls == []


def of_cuda(source: str) -> Iterator[int]:
    """Lines that name CUDA in code: ``torch.cuda``, ``x.is_cuda``, ``device.type == "cuda"``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"):
            yield node.lineno
        if isinstance(node, ast.Compare):
            for part in (node.left, *node.comparators):
                if isinstance(part, ast.Constant) and part.value == "cuda":
                    yield node.lineno


def test_no_other_source_names_cuda() -> None:
    wrong = 'if device.type == "cuda":\n    torch.cuda.synchronize()\n    x.is_cuda\n'
    assert sorted(of_cuda(wrong)) == [1, 2, 3]
    found = {
        str(path.relative_to(SOURCES)): lines
        for path in SOURCES.rglob("*.py")
        if (lines := list(of_cuda(path.read_text())))
    }
    assert set(found) - OF_CUDA_ALONE - {"app/launch/preflight.py"} == set(), found
