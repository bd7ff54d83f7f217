"""A fake accelerator on the CPU: streams are vector clocks, and every access is compared.

Each stream knows, of every stream, up to which piece of work it stands behind it: ``wait_stream``,
events, launches of collectives and waits for them move these clocks, as torch and NCCL move a
device's streams. A dispatch mode notes which storages each operator reads and writes on the current
stream. Two accesses of a storage, one of them a write, without an order between them are a race; so
is memory that is freed while a stream may still use it, unless it was recorded for that stream
(the rule of ``record_stream``). The host computes in order, so that no run is needed in which a
race does harm: one run shows all.

Stricter than a device: a collective keeps no reference to its tensors. What cannot be seen: inside
of an operator that is written in Python and is not the library's, and autograd's own streams
(``backward`` is called on the stream of its forward).
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import internsp
from internsp.base import accelerator
from internsp.experts import exchange as tokens
from internsp.sp.exchange import OPERATORS as EXCHANGES
from internsp.sp.ring import OPERATORS as RINGS
from internsp.wp.contents import Contents

OPERATORS = (
    EXCHANGES
    | RINGS
    | {
        "internsp_experts::start": tokens._start_impl,
        "internsp_experts::finish": tokens._finish_impl,
    }
)
"""Of Python: what they do on streams is seen inside of them."""
ROOT = f"{Path(internsp.__file__).parent}/"


class Race(AssertionError):
    """Two uses of the same memory without an order."""


class Stream:
    """The part of ``torch.Stream`` that the library uses, as a vector clock."""

    def __init__(self, device: Any = None, name: str = "") -> None:
        self.name = name or f"side {len(_device().streams)}"
        self.clock: dict[Stream, int] = {}
        self._before: list[Stream] = []
        _device().streams.append(self)

    def tick(self) -> int:
        """One more piece of work is queued here, by the host."""
        self.join(_device().host)
        self.clock[self] = now = self.clock.get(self, 0) + 1
        return now

    def join(self, other: Stream | Event) -> None:
        """Work queued here from now on runs after all that ``other`` stands behind."""
        if other is not self:
            mine = self.clock
            for stream, time in other.clock.items():
                if mine.get(stream, 0) < time:
                    mine[stream] = time

    wait_stream = wait_event = join

    def behind(self, stream: Stream, time: int) -> bool:
        """Whether work queued here runs after that piece of work."""
        return self.clock.get(stream, 0) >= time

    def record_event(self) -> Event:
        """As torch's."""
        return Event(dict(self.clock))

    def __enter__(self) -> Stream:
        self._before.append(_device().here)
        _device().here = self
        return self

    def __exit__(self, *_: object) -> None:
        _device().here = self._before.pop()


@dataclass(eq=False)
class Event:
    """A point of a stream."""

    clock: dict[Stream, int]

    def synchronize(self) -> None:
        """The host waits."""
        _device().host.join(self)


@dataclass(eq=False, slots=True)
class Access:
    """A piece of work that used some bytes of a storage."""

    stream: Stream
    time: int
    start: int
    end: int
    writes: bool
    what: str

    def __str__(self) -> str:
        return f"{'written' if self.writes else 'read'} on {self.stream.name} ({self.what})"


@dataclass(eq=False)
class Memory:
    """One storage: who made it, and what has used it."""

    made_on: Stream
    host: bool = False
    accesses: list[Access] = field(default_factory=list)
    recorded: set[Stream] = field(default_factory=set)

    def conflicts(self, new: Access) -> list[Access]:
        """Earlier accesses that ``new`` is not ordered behind. Notes ``new``."""
        found, kept = [], []
        for old in self.accesses:
            if old.end <= new.start or new.end <= old.start or not (old.writes or new.writes):
                again = old.stream is new.stream and (old.start, old.end) == (new.start, new.end)
                if not again or old.writes or new.writes:
                    kept.append(old)
                continue
            if not new.stream.behind(old.stream, old.time):
                found.append(old)
            if not (new.writes and new.start <= old.start and old.end <= new.end):
                kept.append(old)
        self.accesses = [*kept, new]
        return found


@dataclass(eq=False)
class Sent:
    """A collective in flight. It keeps no reference to its tensors."""

    end: Event

    def wait(self, *_: Any) -> bool:
        """The current stream waits."""
        _device().here.join(self.end)
        return True


_current: Device | None = None


def _device() -> Device:
    assert _current is not None, "within `device()`"
    return _current


class Device(TorchDispatchMode):
    """Notes every access.

    Attributes:
        here: the current stream.
        host: the host's own clock; it reads and writes pinned memory.
        races: what was found, each once.
        accesses: number of accesses that were compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.races: dict[str, None] = {}
        self.accesses = 0
        self._memory: dict[int, Memory] = {}
        self._groups: dict[str, Stream] = {}
        self._given_back: dict[Stream, list[tuple[Access, str]]] = defaultdict(list)
        self._quiet = False

    def start(self) -> None:
        """Make the first streams."""
        self.host = Stream(name="host")
        self.here = Stream(name="main")

    def synchronize(self, *_: Any) -> None:
        """The host waits for all streams."""
        for stream in self.streams:
            self.host.join(stream)

    # accesses

    def memory(self, tensor: Tensor, stream: Stream | None = None) -> Memory:
        """Of the storage of ``tensor``; new if it is not known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._memory.get(key)
        if found is None:
            found = self._memory[key] = Memory(stream or self.here)
            self._allocated(found.made_on)
            weakref.finalize(storage, self._freed, key).atexit = False
        return found

    def access(self, tensor: Tensor, stream: Stream, writes: bool, what: str) -> None:
        """``stream`` reads or writes ``tensor`` with ``what``, the work that it has queued last."""
        self.accesses += 1
        memory = self.memory(tensor, stream)
        if not tensor.numel():
            return
        size, steps = tensor.itemsize, zip(tensor.shape, tensor.stride(), strict=True)
        start = tensor.storage_offset() * size
        end = start + (1 + sum((number - 1) * step for number, step in steps)) * size
        time = stream.clock.get(stream, 0)
        new = Access(stream, time, start, end, writes, f"{what} in {_where()}")
        for old in memory.conflicts(new):
            self.races[f"{old}, then {new} without an order"] = None

    def _freed(self, key: int) -> None:
        memory = self._memory.pop(key, None)
        if memory is not None:
            self.free(memory)

    def free(self, memory: Memory) -> None:
        """Its bytes go back to the allocator, for the next work of the stream that made them."""
        if memory.host:  # torch keeps pinned memory for its copies
            return
        # A recorded stream keeps the bytes until it has come here.
        safe = [memory.made_on, *memory.recorded]
        self._given_back[memory.made_on] += [
            (used, _where())
            for used in memory.accesses
            if used.stream not in memory.recorded
            and not any(stream.behind(used.stream, used.time) for stream in safe)
        ]

    def _allocated(self, stream: Stream) -> None:
        """``stream`` gets new memory: perhaps what was given back last."""
        for used, where in self._given_back.pop(stream, ()):
            if not stream.behind(used.stream, used.time):
                self.races[
                    f"{used}, freed by {where}, and used again on {stream.name} ({_where()})"
                ] = None

    # operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):  # torch asks for a result's shape
            return func(*args, **kwargs)
        if any(issubclass(kind, Tensor) and kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor's operator comes again with its local tensors
        if not self._quiet and func._schema.name in OPERATORS:  # to see what is inside
            with self:
                return OPERATORS[func._schema.name](*args, **kwargs)
        if self._quiet or func.namespace not in ("aten", "internsp", "prims"):
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if func.is_view or func._schema.name in _NO_ACCESS:
            result = func(*args, **kwargs)
            for tensor in _tensors(result):
                self.memory(tensor)
            return result
        known = {t.untyped_storage()._cdata for t in given}
        on_host = bool(given) and all(self.memory(tensor).host for tensor in given)
        stream, name = self.host if on_host else self.here, func._schema.name
        stream.tick()
        written = {t.untyped_storage()._cdata for t in _written(func, args, kwargs)}
        for tensor in given:
            self.access(tensor, stream, tensor.untyped_storage()._cdata in written, name)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                self.memory(tensor, stream).host |= on_host
                self.access(tensor, stream, True, name)
        if name in _READS or _blocks(func, args, given, self):
            self.host.join(stream)
        return result

    def collective(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A method of process groups, on a stream of its group."""

        def launch(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            stream = self._groups.get(group.group_name)
            if stream is None:
                stream = self._groups[group.group_name] = Stream(name=f"group {group.group_name}")
            stream.join(self.here)
            stream.tick()
            first, *rest = args
            both = name in ("allreduce", "broadcast")
            for tensor in _tensors(first):
                if both:
                    self.access(tensor, stream, False, name)
                self.access(tensor, stream, name != "send", name)
            for tensor in _tensors(rest):
                self.access(tensor, stream, False, name)
            before, self._quiet = self._quiet, True
            try:
                if name in ("alltoall_base", "all_to_all_single") and len(args) > 2 and args[2]:
                    if args[2] == args[3]:  # what others send is as this rank's own
                        first.data.copy_(rest[0])
                    else:
                        first.data.zero_()
                elif name == "recv":
                    for tensor in _tensors(first):
                        tensor.data.zero_()
                else:
                    real(group, *args, **kwargs)
            finally:
                self._quiet = before
            return Sent(stream.record_event())

        return launch


_READS = ("aten::_local_scalar_dense", "aten::item")  # the second inside of an operator
_PLAIN = (Tensor, torch.nn.Parameter)
_NO_ACCESS = (
    "aten::detach", "aten::alias", "aten::empty", "aten::empty_like", "aten::new_empty",
    "aten::empty_strided", "aten::new_empty_strided", "aten::set_", "aten::resize_",
    "aten::_unsafe_view", "aten::lift_fresh", "aten::sym_size", "aten::is_pinned",
)  # fmt: skip
_COLLECTIVES = (
    "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "allgather", "alltoall_base", "all_to_all_single", "allreduce",
    "broadcast", "send", "recv",
)  # fmt: skip


def _tensors(given: Any) -> list[Tensor]:
    """All tensors in lists, tuples and dictionaries. Torch's own walk takes most of the time."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, (list, tuple)):
        return []
    return [tensor for each in given for tensor in _tensors(each)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[index] if index < len(args) else kwargs.get(argument.name))


def _blocks(func: Any, args: tuple[Any, ...], given: list[Tensor], device: Device) -> bool:
    """Whether it is a copy from or to host memory for which the host waits."""
    if func._schema.name != "aten::copy_" or (len(args) > 2 and args[2]):
        return False
    return any(device.memory(tensor).host for tensor in given)


def _where() -> str:
    """The line of the library that is running, else of the program."""
    frame: Any = sys._getframe(1)
    first = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT):
            return f"{name.removeprefix(ROOT)}: {frame.f_code.co_name}"
        if not first and "site-packages" not in name and name != __file__:
            first = f"{Path(name).name}: {frame.f_code.co_name}"
        frame = frame.f_back
    return first


@contextmanager
def device() -> Iterator[Device]:
    """Inside, the library sees an accelerator with streams in the place of the CPU."""
    global _current
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        made = _current = Device()
        stack.callback(_leave)
        made.start()

        def pinned(tensor: Tensor) -> Tensor:
            copy = tensor.clone()
            made.memory(copy).host = True
            return copy

        empty, resize = torch.empty, torch.UntypedStorage.resize_

        def allocated(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            tensor = empty(*args, **kwargs)
            made.memory(tensor).host |= pin_memory
            return tensor

        def resized(storage: Any, nbytes: int) -> Any:
            memory = made._memory.get(storage._cdata)
            if memory is not None and nbytes == 0:
                made.free(memory)
            elif memory is not None:  # new memory
                made._allocated(made.here)
                memory.made_on, memory.accesses, memory.recorded = made.here, [], set()
            return resize(storage, nbytes)

        to_list = Tensor.tolist

        def listed(tensor: Tensor) -> Any:
            stream = made.host if made.memory(tensor).host else made.here
            stream.tick()
            made.access(tensor, stream, False, "tolist")
            made.host.join(stream)
            return to_list(tensor)

        def recorded(tensor: Tensor, stream: Any) -> None:
            made.memory(tensor).recorded.add(stream)

        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch, "empty", allocated)
        patch.setattr(torch.UntypedStorage, "resize_", resized)
        patch.setattr(Tensor, "record_stream", recorded)
        patch.setattr(Tensor, "pin_memory", pinned)
        patch.setattr(Tensor, "tolist", listed)
        patch.setattr(torch.accelerator, "current_stream", lambda *_: made.here)
        patch.setattr(torch.accelerator, "synchronize", made.synchronize)
        patch.setattr(torch.accelerator, "empty_host_cache", lambda: None, raising=False)
        here = accelerator.has_streams
        for module in [*sys.modules.values()]:
            if getattr(module, "has_streams", None) is here:
                patch.setattr(module, "has_streams", lambda device: device.type != "meta")
        patch.setattr(Contents, "check", lambda _: None)  # a device has none
        for name in _COLLECTIVES:
            real = getattr(dist.ProcessGroup, name, None)
            if real is not None:
                patch.setattr(dist.ProcessGroup, name, made.collective(real, name))
        stack.enter_context(made)
        yield made


def _leave() -> None:
    global _current
    _current = None
