"""Checkpoints as folders: found by number, and set aside where a run goes on from an earlier one.

How they come to be is told by :mod:`internsp.train.disk`. Nothing here imports torch or knows what
a checkpoint holds.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from internsp.errors import ConfigError
from internsp.train.disk import LATEST, MANIFEST, PARTIAL, STEP, point_latest, steps_in, sync


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return checkpoints / f"step-{step:06d}"


def partial_of(final: Path, attempt: str) -> Path:
    """Where a checkpoint is written before it is one: by one attempt, of one run, alone."""
    return final.with_name(f"{final.name}.{attempt}{PARTIAL}")


def candidates(path: Path) -> tuple[list[Path], bool]:
    """Folders to resume from, the newest first, and whether ``path`` names the one.

    ``path`` is a checkpoint's folder, or a folder of checkpoints, or a run's.

    Raises:
        ConfigError: there is none.
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
    kept = steps_in(checkpoints)
    if kept:
        point_latest(kept[0][1])
    else:
        (checkpoints / LATEST).unlink(missing_ok=True)
    sync(checkpoints)
    return sorted(path.name for path in later), aside
