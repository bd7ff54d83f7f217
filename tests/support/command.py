"""Runs Python programs as a user would, but forked from the tests' server to save start-up time.

The server has already imported what a command or a program needs, which takes three seconds of
CPU time. The forked process is still a separate process, with its own folder, environment, standard
streams, exit status and children. Python children that it starts (the fork server of a run, the
ranks of torchrun) are forked in the same way and are its real children.

``tests/unit/test_wheel.py``, ``tests/unit/test_cli.py``, ``tests/ranks/test_orphans.py`` and other
tests of processes or imports start a new Python interpreter instead.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import process, reduction, util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.support.ranks import start_server

TORCHRUN = ("-m", "torch.distributed.run")


def internsp(
    *words: str, cwd: Path, environment: Mapping[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run ``internsp WORDS`` to its end; other arguments as in :func:`python`."""
    return python("-m", "internsp", *words, cwd=cwd, environment=environment, check=check)


def python(
    *words: str,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` to its end, with empty standard input.

    Args:
        words: ``-m`` and a module, or a program's file; then their arguments.
        environment: all environment variables; None: those of this process.
        check: assert that the exit status is 0.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        running = begin(words, cwd, output.fileno(), errors.fileno(), environment)
        running.join(timeout)
        late = running.exitcode is None
        if late:
            running.kill()
            running.join()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
        assert not late, f"{' '.join(words)} took more than {timeout} s\n{texts}"
        status = running.exitcode or 0
    done = subprocess.CompletedProcess(words, status, *texts)
    assert status == 0 or not check, done.stdout + done.stderr
    return done


def begin(
    words: Sequence[str],
    cwd: Path,
    output: int,
    errors: int,
    environment: Mapping[str, str] | None = None,
    terminal: int | None = None,
    session: bool = False,
) -> process.BaseProcess:
    """Start ``python WORDS``.

    Args:
        output: an open file for its standard output, which the caller closes; ``errors`` likewise.
        terminal: the file for its standard input; None: empty input.
        session: start it as the leader of a new session and process group.
    """
    start_server()
    handles = [None if handle is None else _Handle(handle) for handle in (terminal, output, errors)]
    around = dict(os.environ if environment is None else environment)
    started = multiprocessing.get_context("forkserver").Process(
        target=_live, args=(list(words), str(cwd), around, handles, session), name=" ".join(words)
    )
    started.start()
    return started


class _Handle:
    """The number of an open file; the receiving process gets its own number for it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(sent: Any) -> _Handle:
    return _Handle(sent.detach())


def _live(
    words: list[str],
    cwd: str,
    environment: dict[str, str],
    handles: list[_Handle | None],
    session: bool,
) -> None:
    """The forked process, from its first line to its exit status."""
    if session:
        os.setsid()
    for number, handle in enumerate(handles):
        if handle is not None:
            os.dup2(handle.number, number)
            os.close(handle.number)
    if handles[0] is not None:
        sys.stdin = os.fdopen(0, closefd=False)
    # Detach from the parent process: a separate folder for sockets, no parent recorded.
    process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    util.spawnv_passfds = _server  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = _child  # type: ignore[attr-defined]
    _run(words, cwd, environment)


def _run(words: Sequence[str], cwd: str, environment: Mapping[str, str]) -> NoReturn:
    """Do what Python does with its command line; raises SystemExit at the end."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    process.ORIGINAL_DIR = cwd  # from where multiprocessing finds a program's file
    tempfile.tempdir = None  # drop the server's cached value
    encoding = environment.get("PYTHONIOENCODING")
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering, encoding=encoding, errors=how, closefd=False)
        for number, buffering, how in ((1, -1, "strict"), (2, 1, "backslashreplace"))
    )
    words = [word for word in words if word != "-u"]
    if tuple(words[:2]) == TORCHRUN:
        _name_callers()
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
    sys.exit(0)


def _name_callers() -> None:
    """Replaces how torchrun's agent finds the name of the function that notes an event."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = caller


def caller(depth: int = 2) -> str:
    """The function that called the one that called this one.

    torch's own calls ``inspect.stack`` twice, which looks through all loaded modules for each of
    some frames. A server's forks have thousands: that was most of what an agent cost.
    """
    return sys._getframe(depth).f_code.co_name


_spawn: Callable[..., int] = util.spawnv_passfds  # type: ignore[attr-defined]
_execute: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _server(path: Any, words: Sequence[Any], handles: Sequence[int]) -> int:
    """Replaces the start of a fork server: its modules are already loaded here."""
    code = words[-1]
    if "multiprocessing.forkserver" not in code:
        return _spawn(path, words, handles)

    def serve() -> None:
        sys.modules["__main__"] = ModuleType("__main__")
        exec(code, {})

    return _fork(serve, handles)


def _child(self: Any, args: Any, *given: Any) -> None:
    """Replaces how Popen starts Python; starts any other program unchanged."""
    words = [args] if isinstance(args, str) else [os.fspath(word) for word in args]
    rest = words[2:] if words[1:2] == ["-u"] else words[1:]
    if words[0] != sys.executable or not rest or (rest[0][0] == "-" and rest[0] != "-m"):
        return _execute(self, args, *given)
    _, _, _, kept, cwd, environment, _, _, _, *handles, _, _, _, _, _, session, _ = given
    theirs = [handles[0], handles[3], handles[5]]  # the child's end of each stream

    def live() -> None:
        if session:
            os.setsid()
        for number, handle in enumerate(theirs):
            if handle != -1:
                os.dup2(handle, number)
        _run(rest, cwd or os.getcwd(), os.environ if environment is None else environment)

    self.pid = _fork(live, [*kept, *theirs])
    self._child_created = True
    self._close_pipe_fds(*handles)
    return None


def _fork(live: Callable[[], object], handles: Sequence[int]) -> int:
    if child := os.fork():
        return child
    status: Any = 1
    try:
        _forget_as_exec_would(handles)
        live()
        status = 0
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1 if status else 0)


def _forget_as_exec_would(kept: Sequence[int]) -> None:
    """Remove inherited signal handlers, file handles and child processes."""
    process._children = set()  # type: ignore[attr-defined]
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    util._run_after_forkers()  # type: ignore[attr-defined]
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            python = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, python)
    # Replaced, not closed: the object that owns it closes it when it is collected, and by then the
    # number might belong to another file.
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        handle = int(name)
        with suppress(OSError):  # the handle that listed the folder
            if handle > 2 and handle not in kept and not os.get_inheritable(handle):
                os.dup2(nothing, handle, inheritable=False)
