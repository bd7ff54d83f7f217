"""Folders of checkpoints: names, the newest first, and moving abandoned ones aside.

Creating and committing them is in :mod:`internsp.app.checkpoint.disk`. Nothing here imports torch
or reads the content of a checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from internsp.app.checkpoint.disk import (
    LATEST,
    MANIFEST,
    PARTIAL,
    STEP,
    point_latest,
    steps_in,
    sync,
)
from internsp.errors import ConfigError


def folder_of(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint of ``step``."""
    return checkpoints / f"step-{step:06d}"


def partial_of(final: Path, attempt: str) -> Path:
    """Folder in which one attempt of one run writes a checkpoint before it is committed."""
    return final.with_name(f"{final.name}.{attempt}{PARTIAL}")


def candidates(path: Path) -> tuple[list[Path], bool]:
    """Folders to resume from, the newest first, and whether ``path`` itself is the checkpoint.

    ``path`` is the folder of a checkpoint, of checkpoints, or of a run.

    Raises:
        ConfigError: there is no checkpoint.
    """
    if (path / MANIFEST).exists() or (path / ".metadata").exists() or STEP.fullmatch(path.name):
        return [path], True
    for folder in (path, path / "checkpoints"):
        if steps := steps_in(folder):
            return [found for _, found in steps], False
    raise ConfigError(
        f"checkpoint.resume: no checkpoint at {path} (looked for step-*/{MANIFEST} there and in "
        "its folder checkpoints)"
    )


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
    number = 1
    while (aside := checkpoints / f"abandoned-{number}").exists():
        number += 1
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
    else:
        (checkpoints / LATEST).unlink(missing_ok=True)
    sync(checkpoints)
    return sorted(path.name for path in later), aside
