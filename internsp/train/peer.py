"""``checkpoint.peer``: copies of each rank's file in the memory of another machine, or of this one.

Each machine of an elastic launcher has a process that outlives the ranks
(:mod:`internsp.train.keeper`); the ranks' own processes send it what they write. The copies of a
machine's ranks lie on the next machine, where there are several. What is a checkpoint, the disk
says: its manifest has the digests, and a copy is taken for a file whose digest it has.
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

from internsp.errors import ConfigError, InternspError
from internsp.train import keeper
from internsp.train.agreement import on_every_rank
from internsp.train.disk import Keeper
from internsp.train.manifest import FileRecord, State

_START_SECONDS = 20.0


def mistake() -> str | None:
    """Why there can be no copies here."""
    if not sys.platform.startswith("linux"):
        return "checkpoint.peer = true needs Linux; set it to false"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return (
            "checkpoint.peer = true keeps copies for ranks that torchrun starts again, and no "
            "other launcher does: start with torchrun --max-restarts, or set it to false"
        )
    return None


class Copies:
    """What keepers have for this run, and where this rank's copies go. Made on all ranks.

    Attributes:
        keep: digests of the newest valid checkpoint: copies of its files stay until there is
            another one.
    """

    def __init__(self) -> None:
        """Start this machine's keeper, where it is not there yet, and find all others. Collective.

        Raises:
            ConfigError: on every rank: see :func:`mistake`.
            InternspError: on every rank: some rank finds no keeper.
        """
        self.keep: list[str] = []
        self._connections: dict[str, Keeper] = {}
        self._first = os.environ.get("LOCAL_RANK", "0") == "0"
        machine = int(os.environ.get("GROUP_RANK", "0"))
        found = on_every_rank(lambda: (machine, self._own()))
        homes = {at: own for at, own in found if own is not None}
        order = sorted(homes)
        after = order[(order.index(machine) + 1) % len(order)]
        self._here = {"name": homes[machine]["name"]}
        self._address = self._here if after == machine else homes[after]["address"]
        # Of each copy where it is; this machine's own comes first.
        self._places: dict[str, dict[str, Any]] = {}
        for at in sorted(order, key=lambda at: at != machine):
            place = self._here if at == machine else homes[at]["address"]
            for digest in homes[at]["held"]:
                self._places.setdefault(digest, place)

    def _own(self) -> dict[str, Any] | None:
        """Of the first rank of a machine its keeper's name, address, and copies."""
        if why := mistake():
            raise ConfigError(why)
        if not self._first:
            return None
        name = _started()
        own = self._ask({"name": name}, "held")
        found: dict[str, Any] = {"name": name, "held": own["digests"], "address": {"name": name}}
        if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            found["address"] = {"host": _host(), **self._ask({"name": name}, "listen")}
        return found

    def order(self, rank: int) -> dict[str, Any]:
        """What a rank's own process must know to send a copy (``disk.put_copy``)."""
        return {"address": self._address, "owner": rank, "keep": self.keep}

    def has(self, record: FileRecord) -> bool:
        """Whether some keeper has a copy of a file, and it is whole. Reads it, there.

        What is not whole is forgotten, on this rank.
        """
        if record.sha256 not in self._places:
            return False
        try:
            asked = {"digest": record.sha256, "nbytes": record.nbytes}
            if self._ask(self._places[record.sha256], "check", **asked)["whole"]:
                return True
        except OSError:
            pass  # it has ended: there are the files
        del self._places[record.sha256]
        return False

    def open(self, record: FileRecord) -> CopiedFile | None:
        """A copy of a file, to be read instead of it."""
        place = self._places.get(record.sha256)
        return None if place is None else CopiedFile(self._connected(place), record)

    def agree(self, content: State, lost: Iterable[str]) -> list[str]:
        """Forget the copies that some rank found damaged; the names of files that are left."""
        for digest in lost:
            self._places.pop(digest, None)
        return [name for name, record in content.files.items() if record.sha256 in self._places]

    def settle(self, content: State | None) -> None:
        """Keep copies of a checkpoint's files and no others, as a run goes on from it, or begins.

        Reading is over. Collective.
        """
        self.keep = [] if content is None else [r.sha256 for r in content.files.values()]
        on_every_rank(
            lambda: self._first and self._ask(self._here, "retain", digests=self.keep)
        )
        for connection in self._connections.values():
            connection.close()
        self._connections, self._places = {}, {}

    def _connected(self, address: dict[str, Any]) -> Keeper:
        key = str(address)
        if key not in self._connections:
            self._connections[key] = Keeper(address)
        return self._connections[key]

    def _ask(self, address: dict[str, Any], what: str, **details: Any) -> dict[str, Any]:
        try:
            return self._connected(address).ask(what, **details)
        except OSError:
            if connection := self._connections.pop(str(address), None):
                connection.close()
            raise


class CopiedFile:
    """A copy, read as a file."""

    def __init__(self, connection: Keeper, record: FileRecord) -> None:
        self._connection, self._record, self._at = connection, record, 0

    def __enter__(self) -> CopiedFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seek(self, at: int) -> None:
        """Where the next read begins."""
        self._at = at

    def readinto(self, memory: bytearray) -> int:
        """As of a file."""
        count = self._connection.read_into(memory, self._record.sha256, self._at)
        self._at += count
        return count


def _started() -> str:
    """The name of this machine's keeper, which answers."""
    launcher = _launcher()
    name = keeper.name_of(launcher)
    process = None
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            Keeper({"name": name}).close()
            return name
        except ConnectionRefusedError:
            if process is None or process.poll() is not None:
                # Nothing of ours is inherited: who waits for this rank's end must see it.
                words = [sys.executable, "-I", keeper.__file__, str(launcher), name]
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
                )  # fmt: skip
            time.sleep(0.02)
    raise InternspError(f"checkpoint.peer: the process that keeps copies ({name}) does not answer")


def _launcher() -> int:
    """The agent of torchrun: the nearest process above that it has not told to join the run."""
    run = f"TORCHELASTIC_RUN_ID={os.environ['TORCHELASTIC_RUN_ID']}".encode()
    above = os.getppid()
    while above > 1:
        place = Path(f"/proc/{above}")
        if run not in (place / "environ").read_bytes().split(b"\0"):
            return above
        above = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    raise InternspError("checkpoint.peer: no process above this rank is torchrun's agent")


def _host() -> str:
    """This machine's address, as those see it that reach MASTER_ADDR."""
    place = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "1"))
    family, kind, protocol, _, address = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        found: str = probe.getsockname()[0]
    return found
