"""Checkpoints as folders: found by number, made valid by one rename, set aside and never deleted.

Nothing here imports torch or knows what a checkpoint holds.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from internsp.errors import ConfigError
from internsp.train.manifest import NAME

# "replaced" is what a save over the same step moves aside, for the moment between two renames.
_STEP = re.compile(r"step-([0-9]+)(\.replaced)?")
_PARTIAL = ".partial"


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return checkpoints / f"step-{step:06d}"


def partial_of(final: Path) -> Path:
    """Where a checkpoint is written before it is one."""
    return final.with_name(final.name + _PARTIAL)


def steps_in(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of what looks like a checkpoint, by number, the newest first."""
    found = []
    if checkpoints.is_dir():
        for path in checkpoints.iterdir():
            match = _STEP.fullmatch(path.name)
            if match and len(match[1]) < 16 and path.is_dir():
                found.append((int(match[1]), match[2] is None, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def candidates(path: Path) -> tuple[list[Path], bool]:
    """Folders to resume from, the newest first, and whether ``path`` names the one.

    ``path`` is a checkpoint's folder, or a folder of checkpoints, or a run's.

    Raises:
        ConfigError: there is none.
    """
    if (path / NAME).exists() or (path / ".metadata").exists() or _STEP.fullmatch(path.name):
        return [path], True
    for folder in (path, path / "checkpoints"):
        if steps := steps_in(folder):
            return [found for _, found in steps], False
    raise ConfigError(
        f"checkpoint.resume: no checkpoint at {path} (looked for step-*/{NAME} there and in its "
        "folder checkpoints)"
    )


def begin(final: Path) -> Path:
    """An empty folder to write the checkpoint ``final`` into.

    What a killed run left half written is removed: no run goes on with it.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for left in final.parent.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(left)
    partial = partial_of(final)
    partial.mkdir()
    return partial


def commit(final: Path) -> None:
    """Make what lies in ``partial_of(final)`` the checkpoint ``final``, durably.

    At any moment one whole checkpoint of this step, the old or the new one, is found by
    :func:`steps_in`.
    """
    partial = partial_of(final)
    sync(partial)
    replaced = final.with_name(final.name + ".replaced")
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def abandon_later(checkpoints: Path, step: int) -> tuple[list[str], Path | None]:
    """Move checkpoints of later steps, and the rows of metrics beside them, into a folder aside.

    A run goes on from ``step``: theirs is another history, and "newest" must never be one of them.

    Returns:
        The names of what was moved and where it lies now; ``([], None)`` when there was none.
    """
    later = [path for number, path in steps_in(checkpoints) if number > step]
    if not later:
        return [], None
    number = 1
    while (aside := checkpoints / f"abandoned-{number}").exists():
        number += 1
    aside.mkdir()
    metrics = checkpoints.parent / "metrics.jsonl"
    if metrics.exists():  # the run that goes on drops its rows after this step
        shutil.copyfile(metrics, aside / metrics.name)
    for path in later:
        path.rename(aside / path.name)
    sync(aside)
    sync(checkpoints)
    return sorted(path.name for path in later), aside


def sync(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
