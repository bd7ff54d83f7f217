"""What saving does on the disk, and the process that does it beside a rank's training.

Every rank has such a process. It shares a piece of memory with its rank, which holds a whole
safetensors file, and takes orders: write that file durably, give a copy of it to a process that
outlives the rank (:mod:`internsp.train.keeper`), make the folder a checkpoint, throw it away. It
ends when its rank does, and what it wrote then and was not made a checkpoint goes with it.

Nothing here imports internsp or torch: the process starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import re
import select
import shutil
import signal
import socket
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
LATEST = "latest"
PARTIAL = ".partial"
# "replaced" is what a save over the same step moves aside, for the moment between two renames.
STEP = re.compile(r"step-([0-9]+)(\.replaced)?")
_AT_ONCE = 1 << 24  # bytes: digested while they are in the processor's cache, then written
_NETWORK_SECONDS = 60.0
_ANSWER_SECONDS = 600.0  # of a keeper that reads a copy, which may be large, to its end
_PATIENCE = 1.0  # seconds between two looks whether the rank still lives


def steps_in(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of what looks like a checkpoint, by number, the newest first."""
    found = []
    if checkpoints.is_dir():
        for path in checkpoints.iterdir():
            match = STEP.fullmatch(path.name)
            if match and len(match[1]) < 16 and path.is_dir():
                found.append((int(match[1]), match[2] is None, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def write_part(folder: Path, name: str, data: memoryview) -> dict[str, Any]:
    """Write ``data`` as a new file of ``folder``, which is made if need be. Durable on return."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with (folder / name).open("xb", buffering=0) as file:
        for start in range(0, len(data), _AT_ONCE):
            piece = data[start : start + _AT_ONCE]
            digest.update(piece)
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    sync(folder)
    return {"nbytes": len(data), "sha256": digest.hexdigest()}


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write ``manifest.json`` with a digest of itself; durable on return."""
    text = json.dumps({"sha256": digest_of(content), "content": content}, allow_nan=False)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def digest_of(content: Any) -> str:
    """sha256 of JSON, whatever its spaces and the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def commit(partial: Path, final: Path) -> None:
    """Make the folder ``partial`` the checkpoint ``final`` and the latest one, durably.

    At any moment one whole checkpoint of this step, the old or the new one, is found by
    :func:`steps_in`.
    """
    sync(partial)
    for above in (final.parent.parent, final.parent.parent.parent):
        with contextlib.suppress(OSError):  # another user's: it was there before the run
            sync(above)  # or what was made for this run may have no name after a power failure
    replaced = final.with_name(final.name + ".replaced")
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)
    point_latest(final)
    if replaced.exists():
        shutil.rmtree(replaced)


def point_latest(final: Path) -> None:
    """Have the link ``latest`` beside the checkpoint ``final`` lead to it, durably."""
    link = final.with_name(LATEST)
    fresh = final.with_name(LATEST + PARTIAL)
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(final.name)
    except OSError:  # a file system without links: the newest is found by its number all the same
        return
    fresh.rename(link)
    sync(final.parent)


def thin_out(checkpoints: Path, keep_last: int, keep_every: int) -> list[str]:
    """Remove old checkpoints: all but the newest ``keep_last`` and every ``keep_every``-th step.

    A removed one is no checkpoint from the first moment on, after a power failure too.

    Args:
        keep_last: 0 keeps all.
        keep_every: 0 keeps none besides.

    Returns:
        Names of what was removed.
    """
    removed = []
    for step, path in steps_in(checkpoints)[keep_last:] if keep_last else []:
        if not (keep_every and step % keep_every == 0):
            path.rename(path.with_name(path.name + PARTIAL))
            removed.append(path.name)
    if removed:
        sync(checkpoints)  # before anything of them goes
    for name in removed:
        shutil.rmtree(checkpoints / (name + PARTIAL))
    return removed


def discard_partial(checkpoints: Path) -> None:
    """Remove what runs that ended left half written: no run goes on with it."""
    for left in checkpoints.glob(f"*{PARTIAL}"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def sync(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def not_finite(data: memoryview, unseen: Container[str] = ()) -> list[str]:
    """Names of the tensors of a safetensors file that have values which are not finite.

    Args:
        unseen: names of tensors, without the ranges behind them, of which it does not matter.
    """
    import numpy as np

    length = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + length]))
    found = []
    for name, entry in header.items():
        kind = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}.get(
            entry.get("dtype")
        )
        if kind is None or name.partition("[")[0] in unseen:
            continue
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data, dtype=kind, count=(end - begin) // np.dtype(kind).itemsize,
                               offset=8 + length + begin)  # fmt: skip
        step = _AT_ONCE // values.itemsize  # or the verdicts would need as much memory again
        for start in range(0, len(values), step):
            some = values[start : start + step]
            # Of bfloat16, all bits of the exponent.
            bad = (some & 0x7F80) == 0x7F80 if kind is np.uint16 else ~np.isfinite(some)
            if bad.any():
                found.append(name)
                break
    return found


class Keeper:
    """A connection to a process of :mod:`internsp.train.keeper`.

    Args:
        address: ``{"name": ...}`` on this machine, ``{"host": ..., "port": ..., "key": ...}``.

    Raises:
        OSError: it is not there (here and in every call).
    """

    def __init__(self, address: dict[str, Any]) -> None:
        if "name" in address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect("\0" + address["name"])
            said = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if int.from_bytes(said[4:8], sys.byteorder) != os.getuid():
                self._socket.close()
                raise PermissionError(errno.EPERM, f"{address['name']} is another user's")
        else:
            place = address["host"], address["port"]
            self._socket = socket.create_connection(place, timeout=_NETWORK_SECONDS)
        self._socket.settimeout(_ANSWER_SECONDS)
        self._file = self._socket.makefile("rwb")
        if "key" in address:
            self._file.write(address["key"].encode() + b"\n")

    def ask(self, what: str, data: memoryview | bytes = b"", **details: Any) -> dict[str, Any]:
        """Have it do one of its orders; ``data`` follows the order."""
        self._file.write(json.dumps({"do": what, **details}).encode() + b"\n")
        self._file.write(data)
        self._file.flush()
        line = self._file.readline()
        if not line:
            raise ConnectionResetError("the process that keeps copies has ended the connection")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OSError(answer["errno"], answer["error"])
        return answer

    def read_into(self, memory: Any, digest: str, begin: int) -> int:
        """Fill ``memory`` with a copy's bytes from ``begin`` on; returns how many there were."""
        nbytes: int = self.ask("get", digest=digest, begin=begin, length=len(memory))["nbytes"]
        at = 0
        with memoryview(memory) as view:
            while at < nbytes and (more := self._file.readinto(view[at:nbytes])):
                at += more
        return at

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._socket.close()


def put_copy(data: memoryview, digest: str, copy: dict[str, Any]) -> str | None:
    """Give a keeper a copy of ``data``.

    Args:
        copy: whose it is and what else is to be kept, and the keeper's address.

    Returns:
        Why there is none, or ``None``.
    """
    try:
        keeper = Keeper(copy["address"])
        try:
            keeper.ask(
                "put", data, owner=copy["owner"], digest=digest, nbytes=len(data),
                keep=copy["keep"],
            )  # fmt: skip
        finally:
            keeper.close()
    except OSError as error:
        return f"{error.strerror or error}"
    return None


class _Orders:
    """What the process does, an order each."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._tensors: dict[str, Any] = {}
        self._open: dict[Path, Path] = {}  # files of folders that are no checkpoint yet

    def write(
        self,
        folder: str,
        name: str,
        nbytes: int,
        unseen: list[str],
        copy: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Look at the values and write the file; then a keeper may get a copy."""
        data = self._memory[:nbytes]
        self._open[Path(folder)] = Path(folder) / name
        broken = not_finite(data, set(unseen))
        written = write_part(Path(folder), name, data)
        why = None if copy is None else put_copy(data, written["sha256"], copy)
        return {"broken": broken, "no copy": why, **written}

    def remember(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Where every tensor lies: the manifest's table, the same for every checkpoint."""
        self._tensors = tensors
        return {}

    def settled(self, folder: str) -> dict[str, Any]:
        """The folder is a checkpoint, or gone."""
        self._open.pop(Path(folder), None)
        return {}

    def commit(
        self, folder: str, final: str, content: dict[str, Any], keep_last: int, keep_every: int
    ) -> dict[str, Any]:
        """Make the folder a checkpoint; then old ones go."""
        write_manifest(Path(folder), {**content, "tensors": self._tensors})
        commit(Path(folder), Path(final))
        self.settled(folder)
        return {"removed": thin_out(Path(final).parent, keep_last, keep_every)}

    def end(self) -> None:
        """The rank has ended: what is no checkpoint leaves no trace."""
        for folder, file in self._open.items():
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
                folder.rmdir()  # by the last of the ranks' processes


def _lines(parent: int) -> Iterator[bytes]:
    """Orders, until the rank has ended (another of its children may hold the pipe open)."""
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], _PATIENCE)
        if not ready:
            if os.getppid() != parent:
                return
            continue
        more = os.read(0, 1 << 20)
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        yield from lines


def main(handle: int, nbytes: int, parent: int) -> None:
    """The process: answers each line of JSON on its input with one on its output."""
    # A stop is the rank's to take: it says whether what is being written is finished.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    orders = _Orders(memoryview(mmap.mmap(handle, nbytes, prot=mmap.PROT_READ)))
    try:
        for line in _lines(parent):
            order = json.loads(line)
            try:
                answer = getattr(orders, order.pop("do"))(**order)
            except OSError as error:
                answer = {"error": f"OSError: {error}", "errno": error.errno}
            except Exception as error:  # noqa: BLE001 - the rank reports it
                answer = {"error": f"{type(error).__name__}: {error}", "errno": None}
            print(json.dumps(answer), flush=True)
    except BrokenPipeError:  # the rank has ended while it was answered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        orders.end()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
