"""Runs a test on several ranks: real processes, a gloo group, failures with full tracebacks.

The processes come from a fork server that has already loaded torch, so that a group of two starts
in a fraction of a second. Use :func:`ranks` as the decorator of a test whose body runs on every
rank, and :func:`run_ranks` in a test that compares the ranks' results or runs several groups.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.support.on_device import use_device
from tests.support.pool import BODIES, SIZES, Kept, Member, Start, started

# What each rank would otherwise import itself (about a second of CPU time).
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "torch._inductor.config",  # imported by use_deterministic_algorithms, 0.7 s
    "torch._dynamo.repro.after_dynamo",  # these three by the first compiled code, 0.4 s
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "numpy",
    "pydantic",
    "pytest",
    "hypothesis",
    "internsp.app.train.run",
    "internsp.sp.gloo.fused",  # otherwise imported by each rank that cuts sequences, 0.2 s
    "internsp.model_zoo",
    "tools.overlap.rank",  # needed by its variants: FSDP2
    "transformers.trainer",  # this and the next where they are installed: 1.3 s
    "transformers.models.llama.modeling_llama",
    "coverage",  # otherwise imported by each measured rank
    "tests.support.on_device",
    "tests.support.pool",  # before coverage changes what starts a process, see _Unmeasured
    __name__,
    "tests.support.frozen",  # must be last
]
GROUP_TIMEOUT_SECONDS = 30.0
STACK_SIGNAL = signal.SIGUSR2  # SIGUSR1 is used by training runs


class RankError(AssertionError):
    """Raised in the test's process: a rank raised, died, or did not finish."""


KEPT = Kept()


def ranks(
    number: int | None = None, timeout: float = 120.0, fresh: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test's body on each of ``number`` ranks, as :func:`run_ranks` does.

    Fixtures and parameters reach every rank, and so must pickle. The body may also take ``rank``
    and ``world_size``.

    Args:
        number: None: use ``world_size``, which is then one of the test's parameters.
        fresh: in processes of its own, see :func:`run_ranks`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        of_body = inspect.signature(body)
        ours = {"rank"} if number is None else {"rank", "world_size"}

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True  # pytest shows the rank's traceback instead
            world_size = arguments["world_size"] if number is None else number
            run_ranks(_run_body, world_size, test, arguments, timeout=timeout, fresh=fresh)

        # pytest reads the signature to find the fixtures and parameters to pass.
        theirs = [p for p in of_body.parameters.values() if p.name not in ours]
        test.__signature__ = of_body.replace(parameters=theirs)  # type: ignore[attr-defined]
        return pytest.mark.ranks(test)

    return decorate


def _run_body(rank: int, world_size: int, test: Any, arguments: dict[str, Any]) -> None:
    """The body of ``test``; it pickles as its module-level name, the decorated function."""
    body = test.__wrapped__
    known = arguments | {"rank": rank, "world_size": world_size}
    result = body(**{name: known[name] for name in inspect.signature(body).parameters})
    assert result is None, f"the body of a test checks its values itself: it returned {result!r}"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    fresh: bool = False,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on each rank and return its values by rank.

    ``fn`` must live at module level; what it takes and returns must pickle. Each process has an
    initialized gloo group (30 s timeout), one torch thread, seed 0 and deterministic algorithms
    (which also fill ``torch.empty`` with NaN).

    Args:
        fresh: in new processes, which end with ``fn``. Without, in processes that stay and have run
            other tests (``tests/support/pool.py``).

    Raises:
        RankError: a rank raised (the message is the traceback of the earliest failure and one line
            for each other rank), a rank died, or ``timeout`` seconds passed (the ranks still alive
            and their stacks). The other ranks are killed at once.
    """
    start_server()
    stays = world_size in SIZES and not fresh
    members = KEPT.members.get(world_size, []) if stays else []
    if not members:
        # In this process, because a file store is polled: creating a mesh took twice as long.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with _for_server():  # started again here if it has ended meanwhile
            members = started(world_size, _serve, store.port)
        if stays:
            KEPT.members[world_size], KEPT.stores[world_size] = members, store
    body = args[0].__qualname__ if fn is _run_body else fn.__qualname__
    left: set[str] = {"it was to run in new processes"}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for member in members:
                member.bodies.append(body)
                member.connection.send((fn, args, folder, len(member.bodies)))
            left = _wait(members, Path(folder), time.monotonic() + timeout, timeout)
            return [_outcome(Path(folder), rank)["value"] for rank in range(world_size)]
        except BaseException:
            _kill(members)
            raise
        finally:
            if not stays:
                _end(members)
            elif any(left) or len(members[0].bodies) >= BODIES:
                KEPT.drop(world_size)


def start_server() -> None:
    """Start the fork server once, with torch loaded and without coverage in the server itself.

    Coverage's multiprocessing support measures rank 0 and starts in it; a server that is measured
    too would pass a second tracer on to it.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    with _for_server():
        forkserver.ensure_running()


@contextlib.contextmanager
def _environment(without: tuple[str, ...], **values: str) -> Iterator[None]:
    before = dict(os.environ)
    try:
        for name in without:
            os.environ.pop(name, None)
        os.environ.update(values)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


_for_server = functools.partial(
    _environment,
    without=("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"),
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1",
    GLOO_SOCKET_IFNAME="lo",
)  # fmt: skip
"""The environment in which the fork server starts, and that its forks have."""


def _wait(members: list[Member], folder: Path, deadline: float, timeout: float) -> set[str]:
    """What the bodies have left behind, once each has a value; raise at the first failure."""
    running = {member.connection: rank for rank, member in enumerate(members)}
    left: set[str] = set()
    while running:
        ready = connection.wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            busy = sorted(r for r in running.values() if not _outcome(folder, r))
            alive = busy or sorted(running.values())
            stacks = _stacks(members, alive, folder)
            raise RankError(
                f"ranks {alive} of {len(members)} were still alive after {timeout:g} s; "
                f"all are killed now\n{stacks}{_before(members)}"
            )
        bad = False
        for each in ready:
            rank = running.pop(each)  # type: ignore[arg-type]
            with suppress(EOFError, ConnectionError):
                left.add(each.recv())  # type: ignore[union-attr]
            bad = "value" not in _outcome(folder, rank) or bad
        if bad:  # the other ranks' stacks explain a rank that waited in vain
            for rank in set(range(len(members))) - set(running.values()):
                if not _outcome(folder, rank):
                    members[rank].process.join(5)  # its exit status is told
            failure = _failure(members, folder)
            alive = sorted(r for r in running.values() if not _outcome(folder, r))
            stacks = _stacks(members, alive, folder)
            raise RankError(f"{failure}\n{stacks}{_before(members)}".rstrip())
    return left


def _before(members: list[Member]) -> str:
    """The bodies that ran in the same processes before."""
    before = members[0].bodies[:-1]
    return f"\nin the same processes before: {', '.join(before)}" if before else ""


def _outcome(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"outcome{rank}"
    if not path.exists():
        return {}
    outcome: dict[str, Any] = pickle.loads(path.read_bytes())
    return outcome


def _failure(members: list[Member], folder: Path) -> str:
    """The earliest failure in full; later failures are mostly consequences (a missing peer)."""
    raised: list[tuple[float, int, str, str]] = []
    died: list[int] = []
    for rank, member in enumerate(members):
        outcome = _outcome(folder, rank)
        if "error" in outcome:
            raised.append((outcome["time"], rank, outcome["error"], outcome["line"]))
        elif not outcome and member.process.exitcode is not None:
            died.append(rank)
    raised.sort()
    lines = []
    for rank in died:
        dump = (folder / f"stack{rank}").read_text().strip()
        lines.append(
            f"rank {rank} died with exit code {members[rank].process.exitcode}\n{dump}".rstrip()
        )
    if raised:
        _, rank, error, _ = raised[0]
        lines.append(f"rank {rank} of {len(members)} failed:\n{error}")
        lines += [f"later, rank {other}: {line}" for _, other, _, line in raised[1:]]
    return "\n".join(lines)


def _stacks(members: list[Member], alive: list[int], folder: Path) -> str:
    """Request the Python stacks of the ranks that hang, by a signal."""
    for rank in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(members[rank].process.pid or 0, STACK_SIGNAL)
    time.sleep(0.3 if alive else 0.0)
    parts = []
    for rank in alive:
        path = folder / f"stack{rank}"
        parts.append(f"rank {rank}:\n{path.read_text() if path.exists() else '(not started)'}")
    return "\n".join(parts)


def _kill(members: list[Member]) -> None:
    for member in members:
        if member.process.exitcode is None:
            member.process.kill()
    _end(members)


def _end(members: list[Member]) -> None:
    for member in members:
        member.end()
    for member in members:
        member.process.join()


def _wait_for_peers(folder: Path, world_size: int) -> None:
    """Exit together: a rank that exits early closes connections that its peers may be using.

    Not a barrier of the group, which would fail after an error; if a peer fails, this wait ends
    too, because the parent then kills all ranks.
    """
    while not all((folder / f"outcome{rank}").exists() for rank in range(world_size)):
        time.sleep(0.002)


class _OneTransport(dist.ProcessGroupGloo):
    """A gloo group whose connections are served by one thread of the process.

    Gloo starts such a thread for each group, and each wakes up a hundred times a second: with ten
    groups per rank and a dozen ranks this takes a tenth of two cores. It also polls without a pause
    while another thread holds a connection's lock; where ranks outnumber cores, that one waits for
    the core on which it polls. With the lowest priority it gives way: a fifth less for a parity
    test of four ranks on two cores.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_transport()], timeout
        super().__init__(store, rank, size, options)


@functools.cache
def _transport() -> Any:
    before, name = _threads(), os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    device = dist.ProcessGroupGloo.create_device(interface=name)
    for thread in _threads() - before:
        os.setpriority(os.PRIO_PROCESS, thread, 19)
    return device


def _threads() -> set[int]:
    """Of this process, as Linux numbers them; elsewhere none."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()


def _serve(rank: int, world_size: int, port: int, tasks: Connection) -> None:
    """A rank's process: run bodies until there is no more, or one has failed."""
    timeout = timedelta(seconds=GROUP_TIMEOUT_SECONDS)
    distributed_c10d.ProcessGroupGloo = _OneTransport  # type: ignore[misc]
    start: Start | None = None
    while True:
        try:
            task = tasks.recv()
        except EOFError:  # the test's process has ended
            return
        if task is None:
            break
        fn, args, folder, number = task
        home = Path(folder)
        with (home / f"stack{rank}").open("w") as stacks:
            faulthandler.enable(stacks)
            faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
            try:
                if start is None:
                    backend = use_device()
                    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
                    dist.init_process_group(
                        backend, store=store, rank=rank, world_size=world_size, timeout=timeout
                    )
                    start = Start()
                start.set(number)
                outcome: dict[str, Any] = {"value": fn(rank, world_size, *args)}
                data = pickle.dumps(outcome)
            except BaseException as error:
                line = "".join(traceback.format_exception_only(error)).strip().splitlines()
                outcome = {
                    "error": traceback.format_exc(),
                    "line": line[-1] if line else repr(error),
                    "time": time.monotonic(),
                }
                data = pickle.dumps(outcome)
            # Renamed when complete: the parent may read it at any moment.
            (home / f"partial{rank}").write_bytes(data)
            (home / f"partial{rank}").rename(home / f"outcome{rank}")
            if "value" not in outcome:
                tasks.send("it failed")
                break
            _wait_for_peers(home, world_size)
            del fn, args, task
            faulthandler.unregister(STACK_SIGNAL)
            faulthandler.disable()
        assert start is not None
        tasks.send(start.left())
    if dist.is_initialized() and start is not None and not start.left():
        dist.destroy_process_group()
