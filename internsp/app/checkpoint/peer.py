"""``checkpoint.peer``: copies of each rank's file in the memory of another machine, or of this one.

On each machine of an elastic launcher runs a keeper process that outlives the ranks
(:mod:`internsp.app.checkpoint.keeper`); the ranks' writer processes send it what they write. With
several machines, the copies of a machine's ranks are kept on the next machine. Only the disk
decides what is a checkpoint: a copy is read in place of a file whose digest in the manifest it has.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from internsp.app.checkpoint import keeper
from internsp.app.checkpoint.disk import KeeperConnection
from internsp.app.checkpoint.manifest import FileRecord, State
from internsp.errors import ConfigError, InternspError
from internsp.failure.objects import Objects

_START_SECONDS = 20.0


def mistake() -> str | None:
    """Why copies cannot be kept in this process's environment; ``None`` if they can."""
    if not sys.platform.startswith("linux"):
        return "checkpoint.peer = true needs Linux; set it to false"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return (
            "checkpoint.peer = true keeps copies for ranks that torchrun starts again, and no "
            "other launcher does: start with torchrun --max-restarts, or set it to false"
        )
    return None


class PeerCopies:
    """The copies that keepers hold for this run, and the keeper that gets this rank's copies.

    Attributes:
        keep: digests of the files of the newest valid checkpoint; their copies are kept until there
            is a newer one.
    """

    def __init__(self) -> None:
        """Start this machine's keeper, if it does not run yet, and find all others. Collective.

        Raises:
            ConfigError: on every rank: see :func:`mistake`.
            InternspError: on every rank: some rank could not reach a keeper.
        """
        self.keep: list[str] = []
        self._connections: dict[str, KeeperConnection] = {}
        self._first = os.environ.get("LOCAL_RANK", "0") == "0"
        machine = int(os.environ.get("GROUP_RANK", "0"))
        found = Objects().on_every(lambda: (machine, self._own()))
        keepers = {at: own for at, own in found if own is not None}
        order = sorted(keepers)
        after = order[(order.index(machine) + 1) % len(order)]
        self._here = {"name": keepers[machine]["name"]}
        self._address = self._here if after == machine else keepers[after]["address"]
        # Address of each copy, on this machine if it has one.
        self._addresses: dict[str, dict[str, Any]] = {}
        for at in sorted(order, key=lambda at: at != machine):
            place = self._here if at == machine else keepers[at]["address"]
            for digest in keepers[at]["held"]:
                self._addresses.setdefault(digest, place)

    def _own(self) -> dict[str, Any] | None:
        """On a machine's first rank, the name, address and copies of its keeper; else ``None``."""
        if why := mistake():
            raise ConfigError(why)
        if not self._first:
            return None
        name = _started_keeper()
        own = self._request({"name": name}, "held")
        found: dict[str, Any] = {"name": name, "held": own["digests"], "address": {"name": name}}
        if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            found["address"] = {"host": _host(), **self._request({"name": name}, "listen")}
        return found

    def destination(self, rank: int) -> dict[str, Any]:
        """What this rank's writer process needs to send a copy (``disk.put_copy``)."""
        return {"address": self._address, "owner": rank, "keep": self.keep}

    def has(self, record: FileRecord) -> bool:
        """Whether some keeper has an intact copy of a file; the keeper reads it to check.

        A damaged copy is no longer used by this rank.
        """
        if record.sha256 not in self._addresses:
            return False
        try:
            details = {"digest": record.sha256, "nbytes": record.nbytes}
            if self._request(self._addresses[record.sha256], "check", **details)["intact"]:
                return True
        except OSError:
            pass  # the keeper has ended: the file is read instead
        del self._addresses[record.sha256]
        return False

    def open(self, record: FileRecord) -> CopiedFile | None:
        """Open the copy of a file, to be read in its place; ``None`` if there is none."""
        place = self._addresses.get(record.sha256)
        return None if place is None else CopiedFile(self._connected(place), record)

    def drop_damaged(self, content: State, lost: Iterable[str]) -> list[str]:
        """Stop using copies that some rank found damaged; names of the files that have a copy."""
        for digest in lost:
            self._addresses.pop(digest, None)
        return [name for name, record in content.files.items() if record.sha256 in self._addresses]

    def retain(self, content: State | None) -> None:
        """Keep the copies of a checkpoint's files and drop all others. Collective.

        Called when a run starts, after everything was read; ``None``: no checkpoint.
        """
        self.keep = [] if content is None else [r.sha256 for r in content.files.values()]
        Objects().on_every(
            lambda: self._first and self._request(self._here, "retain", digests=self.keep)
        )
        for connection in self._connections.values():
            connection.close()
        self._connections, self._addresses = {}, {}

    def _connected(self, address: dict[str, Any]) -> KeeperConnection:
        key = str(address)
        if key not in self._connections:
            self._connections[key] = KeeperConnection(address)
        return self._connections[key]

    def _request(self, address: dict[str, Any], what: str, **details: Any) -> dict[str, Any]:
        try:
            return self._connected(address).request(what, **details)
        except OSError:
            if connection := self._connections.pop(str(address), None):
                connection.close()
            raise


class CopiedFile:
    """A copy that is read like a file."""

    def __init__(self, connection: KeeperConnection, record: FileRecord) -> None:
        self._connection, self._record, self._at = connection, record, 0

    def __enter__(self) -> CopiedFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seek(self, at: int) -> None:
        """Set the position of the next read."""
        self._at = at

    def readinto(self, memory: bytearray) -> int:
        """Fill ``memory`` from the current position on, like a file."""
        count = self._connection.read_into(memory, self._record.sha256, self._at)
        self._at += count
        return count


def _started_keeper() -> str:
    """Start this machine's keeper unless it runs; returns its name once it answers."""
    launcher = _launcher()
    name = keeper.name_of(launcher)
    process = None
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            KeeperConnection({"name": name}).close()
            return name
        except ConnectionRefusedError:
            if process is None or process.poll() is not None:
                # It inherits no open pipe, by whose closing the launcher notices this rank's end.
                words = [sys.executable, "-I", keeper.__file__, str(launcher), name]
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
                )  # fmt: skip
            time.sleep(0.02)
    raise InternspError(f"checkpoint.peer: the process that keeps copies ({name}) does not answer")


def _launcher() -> int:
    """Process id of torchrun's agent: the nearest ancestor without this run's environment."""
    run = f"TORCHELASTIC_RUN_ID={os.environ['TORCHELASTIC_RUN_ID']}".encode()
    above = os.getppid()
    while above > 1:
        place = Path(f"/proc/{above}")
        if run not in (place / "environ").read_bytes().split(b"\0"):
            return above
        above = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    raise InternspError("checkpoint.peer: no ancestor of this rank's process is torchrun's agent")


def _host() -> str:
    """This machine's address in the network that reaches MASTER_ADDR."""
    place = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "1"))
    family, kind, protocol, _, address = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        found: str = probe.getsockname()[0]
    return found
