"""Commands for a shell, each forked from the tests' server (:mod:`tests.support.command`)."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.command import TORCHRUN, begin

WORDS = {"internsp": ("-m", "internsp"), "python": (), "torchrun": TORCHRUN}
_CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    told = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(told).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(told)
    status = int(server.recv(9))
sys.exit(status if status >= 0 else 128 - status)
"""


@contextmanager
def commands() -> Iterator[Path]:
    """A folder for ``PATH`` with ``internsp``, ``python`` and ``torchrun``.

    A command with one of these names is forked from the server with the caller's arguments, folder,
    environment and streams; the shell gets its exit status.
    """
    with (
        tempfile.TemporaryDirectory(prefix="shell-") as folder,
        socket.socket(socket.AF_UNIX) as door,
    ):
        door.bind(f"{folder}/door")
        door.listen()
        threading.Thread(target=_answer, args=(door,), daemon=True).start()
        names = Path(folder, "names")
        names.mkdir()
        for name in WORDS:
            client = _CLIENT.format(python=sys.executable, address=f"{folder}/door")
            (names / name).write_text(client)
            (names / name).chmod(0o755)
        try:
            yield names
        finally:
            door.shutdown(socket.SHUT_RDWR)


def _answer(door: socket.socket) -> None:
    while True:
        try:
            asks, _ = door.accept()
        except OSError:  # the connection was closed
            return
        threading.Thread(target=_perform, args=(asks,), daemon=True).start()


def _perform(asks: socket.socket) -> None:
    with asks, asks.makefile("rb") as rest:
        length, handles, _, _ = socket.recv_fds(asks, 4, 3)
        (name, *words), cwd, environment = json.loads(rest.read(int.from_bytes(length, "big")))
        words = [*WORDS[Path(name).name], *words]
        running = begin(words, Path(cwd), handles[1], handles[2], environment, terminal=handles[0])
        for handle in handles:
            os.close(handle)
        running.join()
        asks.sendall(str(running.exitcode).encode())
