"""Work in a thread that holds up no end of the program."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work()`` in a thread; what it raises is raised where the result is taken."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - see above
            done.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return done
