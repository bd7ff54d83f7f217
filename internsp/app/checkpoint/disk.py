"""Folders of checkpoints: found, the newest first; written, thinned out, moved aside.

Files are durable before a rename makes their folder a checkpoint. A run writes ``latest`` as a link
to its newest one. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from internsp.app.checkpoint.manifest import MANIFEST, Manifest, write_manifest
from internsp.errors import ConfigError

LATEST = "latest"
PARTIAL = ".partial"
SEEN_SECONDS = 30.0
# A save over the same step renames the old folder to "replaced" for a moment, between two renames.
STEP = re.compile(r"step-([0-9]+)(\.replaced)?")
_AT_ONCE = 1 << 24  # bytes that are digested, still in the processor's cache, and then written


def folder_of(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint of ``step``."""
    return checkpoints / f"step-{step:06d}"


def partial_of(final: Path, attempt: str) -> Path:
    """Folder in which one attempt of one run writes a checkpoint before it is committed."""
    return final.with_name(f"{final.name}.{attempt}{PARTIAL}")


def steps_in(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all folders named like a checkpoint, the newest first."""
    found = []
    if checkpoints.is_dir():
        for path in checkpoints.iterdir():
            match = STEP.fullmatch(path.name)
            if match and len(match[1]) < 16 and path.is_dir():
                found.append((int(match[1]), match[2] is None, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def candidates(path: Path) -> list[Path]:
    """Folders to resume from, the newest first.

    ``path`` is the folder of a checkpoint, of checkpoints, or of a run; or ``latest``.

    Raises:
        ConfigError: there is no checkpoint.
    """
    if path.name == LATEST:
        path = Path(os.path.realpath(path))
    if (path / MANIFEST).exists() or (path / ".metadata").exists() or STEP.fullmatch(path.name):
        return [path]
    for folder in (path, path / "checkpoints"):
        if found := [found for _, found in steps_in(folder)]:
            return found
    raise ConfigError(
        f"no checkpoint at {path} (looked for step-*/{MANIFEST} there and in its folder "
        "checkpoints)"
    )


def newest_whole(
    path: Path, folders: Iterable[Path], read: Callable[[Path], Manifest]
) -> tuple[Path, Manifest, list[str]]:
    """The first folder that ``read`` does not refuse, its manifest, and notes on those before it.

    Args:
        folders: what :func:`candidates` returns for ``path``.
        read: reads a manifest and checks the files that it lists.

    Raises:
        ConfigError: there is none.
    """
    skipped: list[str] = []
    for folder in folders:
        try:
            return folder, read(folder), skipped
        except ConfigError as error:
            skipped.append(f"checkpoint {folder.name} was passed over: {error}")
    text = f"no complete checkpoint at {path}: give the path of another"
    raise ConfigError("\n  ".join([text, *skipped]))


def write_part(
    folder: Path, name: str, data: memoryview, given_up: threading.Event | None = None
) -> dict[str, Any]:
    """Write ``data`` as a new file in ``folder``, created if missing; durable on return.

    Args:
        given_up: once it is set, writing ends early.

    Raises:
        InterruptedError: ``given_up`` was set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with (folder / name).open("xb", buffering=0) as file:
        for start in range(0, len(data), _AT_ONCE):
            if given_up is not None and given_up.is_set():
                raise InterruptedError(f"writing {folder / name} was given up")
            piece = data[start : start + _AT_ONCE]
            digest.update(piece)
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    sync(folder)
    return {"nbytes": len(data), "sha256": digest.hexdigest()}


def require_seen(folder: Path, names: Iterable[str], seconds: float = SEEN_SECONDS) -> None:
    """Check on one rank that it sees what others have written into ``folder``: on disks of their
    own, a checkpoint would be committed of which most is elsewhere.

    Args:
        seconds: how long to wait; a file system over a network may show a new file late.

    Raises:
        ConfigError: it does not see them.
    """
    wanted, deadline = set(names), time.monotonic() + seconds
    while missing := wanted.difference(os.listdir(folder)):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"rank 0 does not see {min(missing)} in {folder}, which another rank has written: "
                "give all ranks one folder that they share (--output)"
            )
        time.sleep(0.05)


def publish(partial: Path, final: Path, content: str, keep_last: int, keep_every: int) -> None:
    """Make ``partial`` the checkpoint ``final`` with its manifest, then remove old ones."""
    write_manifest(partial, content)
    commit(partial, final)
    thin_out(final.parent, keep_last, keep_every)


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
        link.rename(f"{link}-copied-{secrets.token_hex(4)}")
        fresh.rename(link)
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


def unused(prefix: str) -> Path:
    """The first of the paths PREFIX1, PREFIX2, ... that does not exist."""
    number = 1
    while (path := Path(f"{prefix}{number}")).exists():
        number += 1
    return path


def abandon_later(checkpoints: Path, step: int) -> tuple[list[str], Path | None]:
    """Move checkpoints of steps after ``step``, and a copy of the metrics, into a new folder.

    For a run that resumes at ``step``: later checkpoints belong to a continuation that was
    abandoned, and the newest checkpoint must never be one of them.

    Returns:
        Names of the moved checkpoints and the folder they are in now; ``([], None)`` without any.
    """
    later = [path for number, path in steps_in(checkpoints) if number > step]
    if not later:
        return [], None
    aside = unused(f"{checkpoints}/abandoned-")
    aside.mkdir()
    metrics = checkpoints.parent / "metrics.jsonl"
    if metrics.exists():  # the resumed run removes the rows after this step from its own file
        shutil.copyfile(metrics, aside / metrics.name)
    for path in later:
        path.rename(aside / path.name)
    sync(aside)
    kept = steps_in(checkpoints)
    if kept:
        point_latest(kept[0][1])
    elif (checkpoints / LATEST).is_symlink():
        (checkpoints / LATEST).unlink()
    sync(checkpoints)
    return sorted(path.name for path in later), aside
