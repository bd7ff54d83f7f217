"""Folders of checkpoints: names, the newest first, and moving abandoned ones aside.

Creating and committing them is in :mod:`internsp.app.checkpoint.disk`. Nothing here imports torch.

A run writes ``latest`` as a link to its newest checkpoint. A tool that copies the run may have made
it a folder (it followed the link) or a text file (it knows no links): both serve as well.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from internsp.app.checkpoint import manifest
from internsp.app.checkpoint.disk import LATEST, PARTIAL, STEP, point_latest, steps_in, sync
from internsp.app.checkpoint.manifest import MANIFEST, Manifest
from internsp.errors import ConfigError

_LONGEST_NAME = 1000  # bytes of a text file latest that are read


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
        ConfigError: there is no checkpoint, or ``latest`` names none beside it.
    """
    if path.name == LATEST and (path.is_symlink() or path.is_file()):
        return [_named_by(path)], True
    if (path / MANIFEST).exists() or (path / ".metadata").exists() or STEP.fullmatch(path.name):
        return [path], True
    for folder in (path, path / "checkpoints"):
        found = [found for _, found in steps_in(folder)]
        if copied := copied_latest(folder):
            step = step_of(copied)
            later = [number for number, _ in steps_in(folder) if number >= step]
            found.insert(len(later), copied)
        if found:
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


def has_checkpoint(checkpoints: Path) -> bool:
    """Whether the folder holds a checkpoint, whole or not."""
    return bool(steps_in(checkpoints)) or copied_latest(checkpoints) is not None


def copied_latest(checkpoints: Path) -> Path | None:
    """``latest``, if it is a folder with a manifest of its own: a copy of a checkpoint."""
    latest = checkpoints / LATEST
    return latest if not latest.is_symlink() and (latest / MANIFEST).is_file() else None


def step_of(checkpoint: Path) -> int:
    """The step that the manifest of a checkpoint gives; -1 if it cannot be read."""
    try:
        return manifest.read(checkpoint).step
    except ConfigError:
        return -1


def _named_by(latest: Path) -> Path:
    """The checkpoint beside the link or text file ``latest`` that it names."""
    try:
        if latest.is_symlink():
            target = os.readlink(latest)
            inside = (latest.parent / target).resolve().parent == latest.parent.resolve()
            name = Path(target).name if inside else ""
        else:
            with latest.open("rb") as file:
                name = target = file.read(_LONGEST_NAME).decode(errors="replace").strip()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        name = target = f"({error})"
    if STEP.fullmatch(name) and (latest.parent / name).is_dir():
        return latest.parent / name
    raise ConfigError(
        f"{latest} names {target!r}, which is no checkpoint beside it: give "
        f"{latest.parent}, of which the newest whole checkpoint is used, or one step-* in it"
    )


def settle_latest(checkpoints: Path, used: Path) -> str:
    """Let ``latest`` be a link again where it is the copy of a checkpoint, before a run goes on.

    The copy becomes the checkpoint of its step if the run has loaded it, since that is missing or
    is not whole; else it is kept under another name.

    Args:
        used: the checkpoint that the run has loaded.

    Returns:
        A message for the user; empty if nothing was done.
    """
    latest = checkpoints / LATEST
    if latest.is_symlink() or not latest.is_dir():
        return ""
    if used.samefile(latest):
        target = folder_of(checkpoints, step_of(latest))
        if target.exists():
            target.rename(_free(checkpoints, f"{target.name}-damaged"))
    else:
        target = _free(checkpoints, f"{LATEST}-copied")
    latest.rename(target)
    sync(checkpoints)
    if steps := steps_in(checkpoints):
        point_latest(steps[0][1])
    return f"{latest} was a folder, not a link: it is {target.name} now"


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
    else:
        (checkpoints / LATEST).unlink(missing_ok=True)
    sync(checkpoints)
    return sorted(path.name for path in later), aside
