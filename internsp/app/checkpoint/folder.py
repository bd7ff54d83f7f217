"""Folders of checkpoints: names, the newest first, and moving abandoned ones aside.

Creating and committing them is in :mod:`internsp.app.checkpoint.disk`. Nothing here imports torch.

A run writes ``latest`` as a link to its newest checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from internsp.app.checkpoint.disk import LATEST, PARTIAL, STEP, point_latest, steps_in, sync
from internsp.app.checkpoint.manifest import MANIFEST, Manifest
from internsp.errors import ConfigError


def folder_of(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint of ``step``."""
    return checkpoints / f"step-{step:06d}"


def partial_of(final: Path, attempt: str) -> Path:
    """Folder in which one attempt of one run writes a checkpoint before it is committed."""
    return final.with_name(f"{final.name}.{attempt}{PARTIAL}")


def candidates(path: Path) -> tuple[list[Path], bool]:
    """Folders to resume from, the newest first, and whether ``path`` itself is the checkpoint.

    ``path`` is the folder of a checkpoint, of checkpoints, or of a run; or ``latest``.

    Raises:
        ConfigError: there is no checkpoint.
    """
    if path.name == LATEST:
        path = Path(os.path.realpath(path))
    if (path / MANIFEST).exists() or (path / ".metadata").exists() or STEP.fullmatch(path.name):
        return [path], True
    for folder in (path, path / "checkpoints"):
        if found := [found for _, found in steps_in(folder)]:
            return found, False
    raise ConfigError(
        f"no checkpoint at {path} (looked for step-*/{MANIFEST} there and in its folder "
        "checkpoints)"
    )


def newest_whole(
    path: Path, found: tuple[list[Path], bool], read: Callable[[Path], Manifest]
) -> tuple[Path, Manifest, list[str]]:
    """The first folder that ``read`` does not refuse, its manifest, and notes on those before it.

    Args:
        found: what :func:`candidates` returns for ``path``.
        read: reads a manifest and checks the files that it lists.

    Raises:
        ConfigError: there is none.
    """
    folders, named = found
    skipped: list[str] = []
    for folder in folders:
        try:
            return folder, read(folder), skipped
        except ConfigError as error:
            if named:
                raise
            skipped.append(f"checkpoint {folder.name} was passed over: {error}")
    remedy = 'give the path of another, or checkpoint.resume = "never" to start afresh'
    raise ConfigError("\n  ".join([f"no complete checkpoint at {path}: {remedy}", *skipped]))


def _free(checkpoints: Path, name: str) -> Path:
    number = 1
    while (path := checkpoints / f"{name}-{number}").exists():
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
    aside = _free(checkpoints, "abandoned")
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
