"""A backend that treats a device's messages as NCCL does, which refuses ranks that share a device.

A message follows what its stream has queued when it is launched, does not block the host, and has
arrived for a stream that has waited for it; what it is to fill is NaN until then. Gloo carries it
between host memories. The library takes its ways for a device's own backend, also on the CPU,
where all of this runs without streams.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Send = Callable[[Any, list[Tensor], list[Tensor]], Any]
"""Starts a message of gloo: its group, what is filled and what is sent, in host memory."""
TIMEOUT = timedelta(seconds=30)
_LINKS: weakref.WeakKeyDictionary[dist.ProcessGroup, Link] = weakref.WeakKeyDictionary()
_IN_FLIGHT: set[Message] = set()
"""Messages that were not waited for: C++ holds them without their Python part."""


class Link:
    """One group's connections for a device's messages, and the thread that starts them in order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.stream = torch.Stream(device) if device.type != "cpu" else None
        store = dist.PrefixStore("as_nccl", group.get_group_store())
        connect = partial(dist.ProcessGroupGloo, store, group.rank(), group.size(), TIMEOUT)
        self.queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=_start_in_order, args=(self.queue, connect), daemon=True).start()

    def after(self, other: torch.Stream | None) -> None:
        """Let the link's stream wait for another one."""
        if self.stream is not None and other is not None:
            self.stream.wait_stream(other)

    def on(self) -> contextlib.AbstractContextManager[Any]:
        """The link's stream as the current one."""
        return self.stream or contextlib.nullcontext()


def _start_in_order(messages: queue.SimpleQueue[Message], connect: Callable[[], Any]) -> None:
    group = None
    while True:
        message = messages.get()
        try:
            group = group or connect()
            message.start(group)
        except BaseException as error:  # noqa: BLE001 - raised by the wait
            message.error = error
        message.started.set()
        del message


class Message(dist.Work):  # type: ignore[misc]
    """A message between launch and wait.

    Args:
        outputs, inputs: on the device; ``outputs`` may be ``inputs``.
        change: of each output in host memory, before it is copied to the device.
    """

    def __init__(
        self, link: Link, outputs: Sequence[Tensor], inputs: Sequence[Tensor], send: Send,
        change: Callable[[Tensor], Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.started, self.error = threading.Event(), None
        self._link, self._send, self._change = link, send, change
        self._outputs, self._inputs = [*outputs], [*inputs]
        self._lock, self._work = threading.Lock(), None
        device = (self._outputs or self._inputs)[0].device
        self._here = None if device.type == "cpu" else torch.accelerator.current_stream()
        link.after(self._here)
        same = outputs is inputs
        with link.on(), torch.inference_mode(False), torch.no_grad():
            self._sent = [_in_host(each).copy_(each, non_blocking=True) for each in inputs]
            self._got = self._sent if same else [_in_host(each) for each in outputs]
            self._copied = link.stream and link.stream.record_event()
        memory = {each.untyped_storage().data_ptr() for each in inputs}
        with link.on(), torch.inference_mode():  # they may be tensors of that mode
            for each in outputs:
                if same or each.untyped_storage().data_ptr() not in memory:
                    _poison(each)
        self._arrived: Any = None
        self._ended = False
        _IN_FLIGHT.add(self)
        link.queue.put(self)

    def start(self, group: Any) -> None:
        """Called by the link's thread."""
        if self._copied:
            self._copied.synchronize()
        self._work = self._send(group, self._got, self._sent)

    def is_completed(self) -> bool:
        """Whether the message is in host memory."""
        return self.started.is_set() and (self._work is None or self._work.is_completed())

    def wait(self, timeout: timedelta = TIMEOUT) -> bool:
        """Let the current stream wait for it; blocks until it is in host memory."""
        self.started.wait()
        with self._lock:
            if not self._ended:
                self._ended = True
                _IN_FLIGHT.discard(self)
                if self.error is None:
                    self._finish()
        if self.error is not None:
            raise RuntimeError(str(self.error))
        if self._arrived is not None:
            torch.accelerator.current_stream().wait_event(self._arrived)
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """What has arrived, for DistributedDataParallel; blocks as :meth:`wait` does."""
        found: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        outputs = self._outputs
        self.wait()
        found.set_result(outputs)
        return found

    def _finish(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self.error = error
            return
        with self._link.on(), torch.inference_mode():
            for output, got in zip(self._outputs, self._got, strict=True):
                if self._change is not None:
                    self._change(got)
                output.data.copy_(got, non_blocking=True)
        self._arrived = self._link.stream and self._link.stream.record_event()
        self._outputs = self._inputs = []


def _in_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.data.fill_(math.nan)
    elif tensor.dtype is not torch.bool:
        tensor.data.fill_(torch.iinfo(tensor.dtype).max // 2)


class _Several:
    """Works of gloo as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _launch(
    group: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], send: Send,
    change: Callable[[Tensor], Any] | None = None,
) -> Any:  # fmt: skip
    group = dist.ProcessGroup.unbox(group)
    link = _LINKS.get(group)
    if link is None:
        _LINKS[group] = link = Link(group, (*outputs, *inputs)[0].device)
    return Message(link, outputs, inputs, send, change).boxed()


def _added(op: Any, size: int) -> tuple[Any, Callable[[Tensor], Any] | None]:
    """gloo's operation, and what makes its sum a mean."""
    kind = dist.ReduceOp.RedOpType(op.op())
    if kind == dist.ReduceOp.AVG:
        return dist.ReduceOp.SUM, lambda total: total.div_(size)
    return kind, None


def _size(group: Any) -> int:
    size: int = dist.ProcessGroup.unbox(group).size()
    return size


def _split(tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [each for part in tensors for each in part]


def _all_gather(output: Any, input: Any, group: Any, *_: Any) -> Any:
    return output, _launch(group, [output], [input], lambda g, o, i: _gathered(g, o[0], i[0]))


def _gathered(group: Any, output: Tensor, input: Tensor) -> Any:
    if input.itemsize == 1:  # gloo knows no numbers of eight bits
        output, input = output.view(torch.uint8), input.view(torch.uint8)
    parts = [*output.view(group.size(), *input.shape).unbind()]
    return group.allgather([parts], [input])


def _all_gathers(outputs: Any, inputs: Any, group: Any, *_: Any) -> Any:
    def send(on: Any, got: list[Tensor], sent: list[Tensor]) -> Any:
        return _Several([_gathered(on, g, s) for g, s in zip(got, sent, strict=True)])

    return _launch(group, outputs, inputs, send)


def _all_gather_lists(outputs: Any, inputs: Any, group: Any, *_: Any) -> Any:
    work = _launch(group, _split(outputs), inputs, lambda g, o, i: g.allgather([o], i))
    return outputs, work


def _reduced(group: Any, output: Tensor, input: Tensor, op: Any) -> Any:
    """One part of the sum of all: not every version of gloo has a reduce-scatter."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([input], options).wait()
    output.copy_(input.view(group.size(), -1)[group.rank()].view_as(output))
    return _Several([])


def _reduce_scatter(output: Any, input: Any, group: Any, op: Any, *_: Any) -> Any:
    add, mean = _added(op, _size(group))
    send = lambda g, o, i: _reduced(g, o[0], i[0], add)  # noqa: E731
    return output, _launch(group, [output], [input], send, mean)


def _reduce_scatters(outputs: Any, inputs: Any, group: Any, op: Any, *_: Any) -> Any:
    add, mean = _added(op, _size(group))

    def send(on: Any, got: list[Tensor], sent: list[Tensor]) -> Any:
        return _Several([_reduced(on, g, s, add) for g, s in zip(got, sent, strict=True)])

    return _launch(group, outputs, inputs, send, mean)


def _all_reduce(tensors: Any, group: Any, op: Any, *_: Any) -> Any:
    return tensors, _all_reduces(tensors, group, op)


def _all_reduces(tensors: Any, group: Any, op: Any, *_: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp, mean = _added(op, _size(group))

    def send(on: Any, got: list[Tensor], sent: list[Tensor]) -> Any:
        return _Several([on.allreduce([each], options) for each in got])

    return _launch(group, tensors, tensors, send, mean)


def _broadcast(tensors: Any, group: Any, root: int, *_: Any) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return tensors, _launch(group, tensors, tensors, lambda g, o, i: g.broadcast(o, options))


def _all_to_all(
    output: Any, input: Any, group: Any, received: Sequence[int], sent: Sequence[int], *_: Any
) -> Any:
    counts = [*received], [*sent]
    return _launch(
        group, [output], [input], lambda g, o, i: g.alltoall_base(o[0], i[0], *counts)
    )  # fmt: skip


def _send(tensors: Any, group: Any, peer: int, tag: int) -> Any:
    return _launch(group, [], tensors, lambda g, _, sent: g.send(sent, peer, tag))


def _receive(tensors: Any, group: Any, peer: int, tag: int) -> Any:
    return _launch(group, tensors, [], lambda g, got, _: g.recv(got, peer, tag))


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_allgather_base_": _all_gather,
    "allgather_": _all_gather_lists,
    "allgather_into_tensor_coalesced_": _all_gathers,
    "_reduce_scatter_base_": _reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _reduce_scatters,
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduces,
    "broadcast_": _broadcast,
    "alltoall_base_": _all_to_all,
    "send": _send,
    "recv_": _receive,
}
_KEPT: list[torch.library.Library] = []


def install(device_type: str) -> str:
    """Put these in the place of torch's operators for tensors of ``device_type``; for good.

    Returns:
        The backend with which the process group is to be made.
    """
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():  # that they are overridden
        warnings.simplefilter("ignore")
        for name, function in _OPERATORS.items():
            library.impl(name, function, device_type.upper(), allow_override=True)
    _KEPT.append(library)
    dist.Backend.register_backend("as_nccl", dist.ProcessGroupGloo, devices=[device_type])
    return "as_nccl" if device_type == "cpu" else f"cpu:gloo,{device_type}:as_nccl"
