"""A process that keeps copies of checkpoints' files in memory, beyond the ranks that wrote them.

A rank that dies takes its memory with it, and an elastic launcher then ends the others, too: what
stays of a machine is the launcher. So there is one such process a machine, in a session of its own,
which ends when the launcher does, however that ends. Its memory has no name, and neither has its
address in any file system: nothing can stay behind.

It does what one line of JSON asks for and answers with one, before or behind which raw bytes may
stand (:class:`internsp.train.disk.Keeper` is the other end). Copies are named by their sha256.
Nothing here imports internsp or torch. Linux only.
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

_MOST = 1 << 22  # bytes of a line
_PEER = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


class Copies:
    """Files by their sha256; of each owner those that it wants kept, and one that comes."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, mmap.mmap]] = {}
        self._lock = threading.Lock()
        self._key = ""
        self._network: _Network | None = None

    def put(
        self, stream: Any, owner: int, digest: str, nbytes: int, keep: list[str]
    ) -> dict[str, Any]:
        """Take ``nbytes`` behind the line; before, the owner's copies go but for ``keep``."""
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
        """What there is."""
        with self._lock:
            return {"digests": list(self._held)}

    def check(self, digest: str, nbytes: int) -> dict[str, Any]:
        """Whether a copy is what its name says."""
        with memoryview(self._memory(digest)) as view:
            return {"whole": hashlib.sha256(view[:nbytes]).hexdigest() == digest}

    def get(self, digest: str, begin: int, length: int) -> tuple[dict[str, Any], memoryview]:
        """A range of a copy, which follows the answer."""
        view = memoryview(self._memory(digest))[begin : begin + length]
        return {"nbytes": len(view)}, view

    def retain(self, digests: list[str]) -> dict[str, Any]:
        """All other copies go."""
        self._drop(lambda name, _: name not in digests)
        return {}

    def listen(self) -> dict[str, Any]:
        """Be there for other machines, too; returns the port, and the key that they must show."""
        with self._lock:
            if self._network is None:
                self._key = os.urandom(16).hex()
                self._network = _Network(self)
                threading.Thread(target=self._network.serve_forever, daemon=True).start()
        return {"port": self._network.server_address[1], "key": self._key}

    def admits(self, key: str) -> bool:
        """Whether a connection over the network may ask for anything."""
        return hmac.compare_digest(self._key, key)

    def _memory(self, digest: str) -> mmap.mmap:
        with self._lock:
            return self._held[digest][1]

    def _drop(self, goes: Any) -> None:
        with self._lock:
            for name in [name for name, (owner, _) in self._held.items() if goes(name, owner)]:
                del self._held[name]  # its memory goes with the last who reads it


_ORDERS = ("put", "held", "check", "get", "retain", "listen")


class _Handler(socketserver.StreamRequestHandler):
    """One connection: requests, one after the other."""

    server: _Here | _Network

    def handle(self) -> None:
        """Answer until the other end has closed."""
        with contextlib.suppress(ConnectionError, EOFError):
            if not self._admitted():
                return
            while line := self.rfile.readline(_MOST):
                data: Any = b""
                try:
                    order = json.loads(line)
                    answer, data = self._do(order.pop("do"), order)
                except (OSError, MemoryError, ValueError, KeyError, TypeError) as error:
                    said = f"{type(error).__name__}: {error}"
                    answer = {"error": said, "errno": getattr(error, "errno", None)}
                self.wfile.write(json.dumps(answer).encode() + b"\n")
                self.wfile.write(data)
                if "error" in answer:  # what follows may be the rest of what was to be put
                    return

    def _admitted(self) -> bool:
        """On this machine the same user's processes; over the network those that know the key."""
        if isinstance(self.server, _Here):
            said = self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            return bool(_PEER.unpack(said)[1] == os.getuid())
        key = self.rfile.readline(_MOST).decode(errors="replace").strip()
        return self.server.copies.admits(key)

    def _do(self, what: str, order: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        if what not in _ORDERS:
            raise ValueError(f"there is no {what}")
        call = getattr(self.server.copies, what)
        found = call(self.rfile, **order) if what == "put" else call(**order)
        return found if isinstance(found, tuple) else (found, b"")


class _Here(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, name: str) -> None:
        self.copies = Copies()
        super().__init__(f"\0{name}", _Handler)


class _Network(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        super().__init__(("", 0), _Handler)


def name_of(launcher: int) -> str:
    """The address of a launcher's process, which no other launcher of this machine ever has.

    Raises:
        OSError: there is no such launcher.
    """
    # After the command's name, which may hold anything, the 20th word: when it began.
    began = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    return f"internsp-keeper-{os.getuid()}-{launcher}-{began}"


def main(launcher: int, name: str) -> None:
    """The process. Ends with its launcher, or at once where there is one already."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for ranks, or for the launcher
    try:
        end = os.pidfd_open(launcher)
        if name_of(launcher) != name:
            return
        server = _Here(name)
    except OSError:  # the launcher has ended, or another rank was faster
        return
    threading.Thread(target=server.serve_forever, daemon=True).start()
    select.select([end], [], [])
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
