"""Disk operations of a save, and the writer process that does them while its rank trains.

Every rank has one writer process. The process shares a block of memory with its rank, in which the
rank puts a whole safetensors file, and runs commands from it: write this file durably, commit the
folder as a checkpoint, delete old checkpoints. The process ends when its rank ends; a file that it
wrote and that is part of no checkpoint by then is removed.

Nothing here imports internsp or torch, so that the process starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import select
import shutil
import signal
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
LATEST = "latest"
PARTIAL = ".partial"
# A save over the same step renames the old folder to "replaced" for a moment, between two renames.
STEP = re.compile(r"step-([0-9]+)(\.replaced)?")
_AT_ONCE = 1 << 24  # bytes that are digested, still in the processor's cache, and then written
_PATIENCE = 1.0  # seconds between checks whether the rank still runs


def steps_in(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all folders named like a checkpoint, the newest first."""
    found = []
    if checkpoints.is_dir():
        for path in checkpoints.iterdir():
            match = STEP.fullmatch(path.name)
            if match and len(match[1]) < 16 and path.is_dir():
                found.append((int(match[1]), match[2] is None, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def write_part(folder: Path, name: str, data: memoryview) -> dict[str, Any]:
    """Write ``data`` as a new file in ``folder``, created if missing; durable on return."""
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
    """Write ``manifest.json`` with its own digest; durable on return."""
    text = json.dumps({"sha256": digest_of(content), "content": content}, allow_nan=False)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def digest_of(content: Any) -> str:
    """sha256 of JSON content; whitespace and the order of keys do not matter."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def commit(partial: Path, final: Path) -> None:
    """Durably make the folder ``partial`` the checkpoint ``final``, and the latest one.

    At any moment :func:`steps_in` finds one complete checkpoint of this step, the old or the new.
    """
    sync(partial)
    for above in (final.parent.parent, final.parent.parent.parent):
        with contextlib.suppress(OSError):  # a folder of another user, older than the run
            sync(above)  # else folders made for this run may have no name after a power failure
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
    """Let the link ``latest`` beside the checkpoint ``final`` point to it, durably."""
    link = final.with_name(LATEST)
    fresh = final.with_name(LATEST + PARTIAL)
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(final.name)
    except OSError:  # no links in this file system: the newest is still found by its number
        return
    try:
        fresh.rename(link)
    except IsADirectoryError:  # a tool that followed the link has made it a folder meanwhile
        fresh.unlink()
        return
    sync(final.parent)


def thin_out(checkpoints: Path, keep_last: int, keep_every: int) -> list[str]:
    """Remove old checkpoints: all but the newest ``keep_last`` and every ``keep_every``-th step.

    Each is renamed first: it stops being a checkpoint at once, also after a power failure.

    Args:
        keep_last: 0 keeps all.
        keep_every: 0 keeps no further checkpoints.

    Returns:
        Names of the removed checkpoints.
    """
    removed = []
    for step, path in steps_in(checkpoints)[keep_last:] if keep_last else []:
        if not (keep_every and step % keep_every == 0):
            path.rename(path.with_name(path.name + PARTIAL))
            removed.append(path.name)
    if removed:
        sync(checkpoints)  # before any of their files is removed
    for name in removed:
        shutil.rmtree(checkpoints / (name + PARTIAL))
    return removed


def discard_partial(checkpoints: Path) -> None:
    """Remove unfinished checkpoints of runs that have ended; no run resumes from them."""
    for left in checkpoints.glob(f"*{PARTIAL}"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def sync(folder: Path) -> None:
    """Make the names of files in ``folder`` durable (``fsync``)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def not_finite(data: memoryview, unseen: Container[str] = ()) -> list[str]:
    """Names of the tensors in a safetensors file that have a value which is not finite.

    Args:
        unseen: names of tensors (without index ranges) that are not checked.
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
        step = _AT_ONCE // values.itemsize  # in parts: the masks would take as much memory again
        for start in range(0, len(values), step):
            some = values[start : start + step]
            # bfloat16 is not finite if all bits of its exponent are set.
            bad = (some & 0x7F80) == 0x7F80 if kind is np.uint16 else ~np.isfinite(some)
            if bad.any():
                found.append(name)
                break
    return found


class _Commands:
    """The commands that the writer process runs, one method each."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._tensors: dict[str, Any] = {}
        self._open: dict[Path, Path] = {}  # uncommitted folder -> this rank's file in it

    def write(self, folder: str, name: str, nbytes: int, unseen: list[str]) -> dict[str, Any]:
        """Check the values and write the file."""
        data = self._memory[:nbytes]
        self._open[Path(folder)] = Path(folder) / name
        broken = not_finite(data, set(unseen))
        written = write_part(Path(folder), name, data)
        return {"broken": broken, **written}

    def set_tensors(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Set the manifest's table of tensors, which is the same for every checkpoint."""
        self._tensors = tensors
        return {}

    def close_folder(self, folder: str) -> dict[str, Any]:
        """Forget a folder: it is a checkpoint now, or was removed."""
        self._open.pop(Path(folder), None)
        return {}

    def commit(
        self, folder: str, final: str, content: dict[str, Any], keep_last: int, keep_every: int
    ) -> dict[str, Any]:
        """Make the folder a checkpoint, then remove old checkpoints."""
        write_manifest(Path(folder), {**content, "tensors": self._tensors})
        commit(Path(folder), Path(final))
        self.close_folder(folder)
        return {"removed": thin_out(Path(final).parent, keep_last, keep_every)}

    def end(self) -> None:
        """Remove this rank's files in folders that are not checkpoints: the rank has ended."""
        for folder, file in self._open.items():
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
                folder.rmdir()  # succeeds for the last of the ranks' processes


def _lines(parent: int) -> Iterator[bytes]:
    """Lines from the rank until it has ended (another of its children may keep the pipe open)."""
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
    """Main function of the process: answer each line of JSON on stdin with one on stdout."""
    # The rank handles these signals: it decides whether the current write is finished.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    orders = _Commands(memoryview(mmap.mmap(handle, nbytes, prot=mmap.PROT_READ)))
    try:
        for line in _lines(parent):
            order = json.loads(line)
            try:
                answer = getattr(orders, order.pop("do"))(**order)
            except OSError as error:
                answer = {"error": f"OSError: {error}", "errno": error.errno}
            except Exception as error:  # noqa: BLE001 - sent to the rank, which reports it
                answer = {"error": f"{type(error).__name__}: {error}", "errno": None}
            print(json.dumps(answer), flush=True)
    except BrokenPipeError:  # the rank ended before it read the answer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        orders.end()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
