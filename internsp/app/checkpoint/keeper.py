"""A process that keeps copies of checkpoint files in memory and outlives the ranks.

When a rank dies its memory is lost, and an elastic launcher then ends the other ranks, too; only
the launcher survives. So each machine has one keeper process, in a session of its own, which ends
when the launcher ends, for whatever reason. Its memory has no name, and its address is in no file
system, so nothing can be left behind.

A request is one line of JSON, and so is the answer; raw bytes may follow either of them
(:class:`internsp.app.checkpoint.disk.KeeperConnection` is the client). Copies are named by their
sha256. Nothing here imports internsp or torch. Linux only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import mmap
import os
import select
import signal
import socket
import socketserver
import struct
import sys
import threading
from pathlib import Path
from typing import Any

_MOST = 1 << 22  # largest length of a line, in bytes
_PEER = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


class Copies:
    """Copies of files by their sha256, each with the rank that owns it."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, mmap.mmap]] = {}
        self._lock = threading.Lock()
        self._key = ""
        self._network: _NetworkServer | None = None

    def put(
        self, stream: Any, owner: int, digest: str, nbytes: int, keep: list[str]
    ) -> dict[str, Any]:
        """Store the ``nbytes`` after the line; first drop the owner's copies not in ``keep``."""
        self._drop(lambda name, whose: whose == owner and name not in keep)
        memory = mmap.mmap(-1, max(nbytes, 1))
        with memoryview(memory) as view:
            at = 0
            while at < nbytes:
                more = stream.readinto(view[at:nbytes])
                if not more:
                    raise EOFError("the sender has ended")
                at += more
        with self._lock:
            self._held[digest] = owner, memory
        return {}

    def held(self) -> dict[str, Any]:
        """Digests of all copies."""
        with self._lock:
            return {"digests": list(self._held)}

    def check(self, digest: str, nbytes: int) -> dict[str, Any]:
        """Check whether the copy's content still has its sha256."""
        with memoryview(self._memory(digest)) as view:
            return {"intact": hashlib.sha256(view[:nbytes]).hexdigest() == digest}

    def get(self, digest: str, begin: int, length: int) -> tuple[dict[str, Any], memoryview]:
        """Read a byte range of a copy, which follows the answer."""
        view = memoryview(self._memory(digest))[begin : begin + length]
        return {"nbytes": len(view)}, view

    def retain(self, digests: list[str]) -> dict[str, Any]:
        """Drop all copies but these."""
        self._drop(lambda name, _: name not in digests)
        return {}

    def listen(self) -> dict[str, Any]:
        """Accept connections from other machines, too; returns the port and the required key."""
        with self._lock:
            if self._network is None:
                self._key = os.urandom(16).hex()
                self._network = _NetworkServer(self)
                threading.Thread(target=self._network.serve_forever, daemon=True).start()
        return {"port": self._network.server_address[1], "key": self._key}

    def admits(self, key: str) -> bool:
        """Whether a network connection with this key may send requests."""
        return hmac.compare_digest(self._key, key)

    def _memory(self, digest: str) -> mmap.mmap:
        with self._lock:
            return self._held[digest][1]

    def _drop(self, goes: Any) -> None:
        with self._lock:
            for name in [name for name, (owner, _) in self._held.items() if goes(name, owner)]:
                del self._held[name]  # memory is freed when its last reader has finished


_ORDERS = ("put", "held", "check", "get", "retain", "listen")


class _Handler(socketserver.StreamRequestHandler):
    """Serves one connection, one request after another."""

    server: _LocalServer | _NetworkServer

    def handle(self) -> None:
        """Answer requests until the other end closes the connection."""
        with contextlib.suppress(ConnectionError, EOFError):
            if not self._admitted():
                return
            while line := self.rfile.readline(_MOST):
                data: Any = b""
                try:
                    order = json.loads(line)
                    answer, data = self._do(order.pop("do"), order)
                except (OSError, MemoryError, ValueError, KeyError, TypeError) as error:
                    message = f"{type(error).__name__}: {error}"
                    answer = {"error": message, "errno": getattr(error, "errno", None)}
                self.wfile.write(json.dumps(answer).encode() + b"\n")
                self.wfile.write(data)
                if "error" in answer:  # the rest of the data to be stored may still follow
                    return

    def _admitted(self) -> bool:
        """On this machine, processes of the same user; over the network, those with the key."""
        if isinstance(self.server, _LocalServer):
            credentials = self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            return bool(_PEER.unpack(credentials)[1] == os.getuid())
        key = self.rfile.readline(_MOST).decode(errors="replace").strip()
        return self.server.copies.admits(key)

    def _do(self, what: str, order: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        if what not in _ORDERS:
            raise ValueError(f"there is no {what}")
        call = getattr(self.server.copies, what)
        found = call(self.rfile, **order) if what == "put" else call(**order)
        return found if isinstance(found, tuple) else (found, b"")


class _LocalServer(socketserver.ThreadingUnixStreamServer):
    def __init__(self, name: str) -> None:
        self.copies = Copies()
        super().__init__(f"\0{name}", _Handler)


class _NetworkServer(socketserver.ThreadingTCPServer):
    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        super().__init__(("", 0), _Handler)


def name_of(launcher: int) -> str:
    """Address of the keeper of a launcher; unique to that launcher process on this machine.

    Raises:
        OSError: there is no such launcher.
    """
    # The command's name may hold anything; the 20th word after it is the time of the start.
    began = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    return f"internsp-keeper-{os.getuid()}-{launcher}-{began}"


def main(launcher: int, name: str) -> None:
    """Main function. Ends with its launcher, or at once if the launcher already has a keeper."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for ranks, or for the launcher
    try:
        end = os.pidfd_open(launcher)
        if name_of(launcher) != name:
            return
        server = _LocalServer(name)
    except OSError:  # the launcher has ended, or another rank was faster
        return
    threading.Thread(target=server.serve_forever, daemon=True).start()
    select.select([end], [], [])
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
