"""Injects faults into one rank of a training run, at counted points.

A point is the n-th launch of a kind of collective (``AG``, ``RS``, ``EX``, ``PUBLISH`` of
:class:`internsp.wp.collectives.Collectives`; ``DIST``: one that torch.distributed launches), the
k-th optimizer step (``step``), or the n-th operation on the run's folder by the rank (``file``) or
by its thread that writes checkpoints (``writer``). ``before`` or ``after`` the point the rank
is killed (SIGKILL), stopped (SIGSTOP), raises, waits, exits silently, finds the disk full, or gets
a signal. ``cut`` takes the network link down, if the campaign runs in its own network namespace.

A launcher starts :func:`run` instead of ``train``; the list of faults is read from a file next to
the run's folder. The library contains no code for any of this.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from internsp.app.config import Config
from internsp.app.process.stop import StopRequest
from internsp.app.train.run import train
from internsp.app.train.step import StepRunner
from internsp.wp.collectives import Collectives
from tests.support import chaos_files
from tests.support.chaos_files import Counter, files_of, started, tell

COLLECTIVES = ("AG", "RS", "EX", "PUBLISH")
_DIST = ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "gather_object")
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def plan_of(output: Path) -> Path:
    """The file with the faults of a run in ``output``."""
    return output.with_name(output.name + ".plan")


def log_of(output: Path) -> Path:
    """The log of a run in ``output``: faults that happened, rows that it took, process ids."""
    return output.with_name(output.name + ".log")


def lines_of(output: Path) -> list[dict[str, Any]]:
    """The entries that a run in ``output`` has logged so far."""
    log = log_of(output)
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def run(config: Config, output: Path, stop: StopRequest) -> None:
    """Run one rank, with the faults that its plan lists."""
    rank = int(os.environ["RANK"])
    given = json.loads(plan_of(output).read_text())
    faults = [fault for fault in given["faults"] if fault["rank"] == rank]
    log = str(log_of(output))
    plan = {"rank": rank, "faults": faults, "log": log, "folder": str(output)}
    tell(log, process="rank", rank=rank, started=started(os.getpid()))
    for name in given.get("mistakes", ()):
        MISTAKES[name]()
    files = {point: files_of(plan, point) for point in ("file", "writer")}
    counters = {kind: _counter(kind, plan) for kind in (*COLLECTIVES, "DIST")}
    _collectives(counters)
    _distributed(counters["DIST"])
    _steps(plan)
    for counter in files.values():
        counter.install()
    train(config, output, stop=stop)
    for point, counter in {**counters, **files}.items():
        tell(log, count=counter.count, point=point, rank=rank)


def _counter(point: str, plan: dict[str, Any]) -> Counter:
    return Counter([fault for fault in plan["faults"] if fault["point"] == point], plan["log"])


def _collectives(counters: dict[str, Counter]) -> None:
    launch = Collectives.launch

    def counted(self: Any, send: Any, tensors: Any, kind: str, *args: Any, **options: Any) -> Any:
        return counters[kind].around(launch, self, send, tensors, kind, *args, **options)

    Collectives.launch = counted  # type: ignore[method-assign]


def _distributed(counter: Counter) -> None:
    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: counter.around(call, *args, **options)

    for name in _DIST:
        setattr(dist, name, counted(getattr(dist, name)))


def _steps(plan: dict[str, Any]) -> None:
    """Log the rows of each optimizer step before the step trains on any of them."""
    step = StepRunner.step
    faults = [fault for fault in plan["faults"] if fault["point"] == "step"]

    def counted(self: Any, number: int, *args: Any, **rest: Any) -> Any:
        tell(plan["log"], step=number + 1, taken=self.sequences, rank=plan["rank"])
        for when in ("before", "after"):
            for fault in faults:
                if (fault["n"], fault["when"]) == (number + 1, when):
                    if fault["kind"] == "cut":
                        tell(plan["log"], fault=fault["id"])
                        link(False)
                    else:
                        chaos_files.do(fault, plan["log"])
            if when == "before":
                result = step(self, number, *args, **rest)
        return result

    StepRunner.step = counted  # type: ignore[method-assign]


def link(up: bool) -> None:
    """Take the loopback device of this process's network namespace up or down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(handle, _SIOCGIFFLAGS, request))
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


# Deliberate mistakes in the library, which a campaign must detect.


def _repeats_a_batch() -> None:
    """A resumed run trains on the rows of one step a second time."""
    from internsp.app.train import run as module

    load = module.checkpoint.load

    def wrong(session: Any, path: Path) -> Any:
        found = load(session, path)
        data = found.content.data
        earlier = data.sequences - session.config.train.global_batch
        data = data.model_copy(update={"sequences": earlier})
        return found._replace(content=found.content.model_copy(update={"data": data}))

    module.checkpoint.load = wrong


def _forgets_moments() -> None:
    """A resumed run loads optimizer state that differs from what was saved."""
    from internsp.app.checkpoint import checkpoint

    optimizer_state = checkpoint._optimizer_state

    def wrong(optimizer: Any, tensors: Any, values: Any) -> Any:
        state = optimizer_state(optimizer, tensors, values)
        for entry in state["state"].values():
            for kind in entry:
                if kind == "exp_avg_sq":
                    entry[kind] = entry[kind] * 0
        return state

    checkpoint._optimizer_state = wrong  # type: ignore[assignment]


def _believes_files() -> None:
    """Digests of checkpoint files are not compared."""
    from internsp.app.checkpoint import manifest

    manifest.check_files = lambda *_: None  # type: ignore[assignment]


MISTAKES: dict[str, Callable[[], None]] = {
    "repeats a batch": _repeats_a_batch,
    "forgets moments": _forgets_moments,
    "believes files": _believes_files,
}
