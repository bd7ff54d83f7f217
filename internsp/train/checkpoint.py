"""Checkpoints through ``torch.distributed.checkpoint``: model, optimizer and the step number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from internsp.errors import ConfigError
from internsp.train.finite import require_finite
from internsp.train.session import Session


class _Run(Stateful):
    """What a checkpoint holds beside model and optimizer."""

    def __init__(self, session: Session, step: int) -> None:
        self.session = session
        self.step = step
        self.fingerprint = session.source.fingerprint

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "mesh": self.session.mesh.describe(),
            "data": self.fingerprint,
            "schedule": self.session.schedules[0].state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.fingerprint = state["data"]
        for schedule in self.session.schedules:
            schedule.load_state_dict(state["schedule"])


class _Joined(Stateful):
    """Chunks of a model, or their optimizers, as one."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class _Model(_Joined):
    """A chunk's parameters have the names that they have in the whole model."""

    def state_dict(self) -> dict[str, Any]:
        return {k: v for part in self.parts.values() for k, v in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts.values():
            part.load_state_dict({name: state[name] for name in part.state_dict()})


def _state(session: Session, run: _Run) -> dict[str, Any]:
    if session.pipeline is None:
        model, optimizer = session.modules[0], session.optimizer
        return {"model": model, "optimizer": optimizer, "run": run}
    names = [f"stage {stage.stage_index}" for stage in session.pipeline.stages]
    return {
        "model": _Model(dict(zip(names, session.modules, strict=True))),
        "optimizer": _Joined(dict(zip(names, session.optimizers, strict=True))),
        "run": run,
    }


def save(session: Session, folder: Path, step: int) -> Path:
    """Write ``folder/step-N``. Collective; blocks until every rank has written.

    Returns:
        The checkpoint's folder.

    Raises:
        NotFiniteError: on all ranks, before anything is written: see ``finite.require_finite``.
    """
    require_finite(session, f"no checkpoint of step {step} is written")
    path = folder / f"step-{step:06d}"
    writer = dcp.FileSystemWriter(path, overwrite=True)  # a resumed run comes by here again
    dcp.save(_state(session, _Run(session, step)), storage_writer=writer)
    return path


def load(session: Session, path: Path) -> int:
    """Restore a checkpoint of the same mesh. Collective; blocks.

    Args:
        path: a checkpoint's folder, or a run's, of which the newest checkpoint is taken.

    Returns:
        The number of finished steps.

    Raises:
        ConfigError: no checkpoint is there, it is of another mesh, or the text has changed.
        NotFiniteError: its weights are not finite.
    """
    chosen = find(path)
    metadata = dcp.FileSystemReader(chosen).read_metadata()
    _check_mesh(session, metadata, chosen)
    run = _Run(session, 0)
    dcp.load(_state(session, run), checkpoint_id=chosen)
    for communicator in session.communicators:
        communicator.invalidate()
    require_finite(session, f"{chosen} is not resumed from; give the path of an earlier checkpoint")
    if run.fingerprint != session.source.fingerprint:
        raise ConfigError(
            f"checkpoint.resume: {chosen} was trained on other text than [data] gives now; the "
            "order of the data would not continue"
        )
    return run.step


def find(path: Path) -> Path:
    """The newest checkpoint at or below ``path``.

    Raises:
        ConfigError: there is none.
    """
    for folder in (path, path / "checkpoints"):
        if (folder / ".metadata").exists():
            return folder
        steps = sorted(p for p in folder.glob("step-*") if (p / ".metadata").exists())
        if steps:
            return steps[-1]
    raise ConfigError(
        f"checkpoint.resume: no checkpoint at {path} (looked for step-*/.metadata there and in "
        "its folder checkpoints)"
    )


def _check_mesh(session: Session, metadata: Any, path: Path) -> None:
    """Another mesh has other optimizer pieces: say so before anything is overwritten."""
    wanted = dcp.state_dict_saver._stateful_to_state_dict(_state(session, _Run(session, 0)))
    flat, _ = dcp._nested_dict.flatten_state_dict(wanted)
    for name, value in flat.items():
        stored = metadata.state_dict_metadata.get(name)
        if stored is None:
            raise ConfigError(
                f"checkpoint.resume: {path} has no {name}; resume on the same mesh and model as "
                f"it was saved with (now: {_place(session)})"
            )
        size = getattr(stored, "size", None)
        if isinstance(value, torch.Tensor) and size is not None and size != value.shape:
            raise ConfigError(
                f"checkpoint.resume: {name} in {path} has shape {list(size)}, here it has "
                f"{list(value.shape)}; resume with the same model and mesh as it was saved with "
                f"(now: {_place(session)})"
            )


def _place(session: Session) -> str:
    """The mesh, and the schedule, which says what part of a pipelined model is on which rank."""
    mesh = session.mesh.describe()
    if session.pipeline is None:
        return mesh
    chunks = len(session.pipeline.chunks)
    return f"{mesh}; {session.pipeline.kind.name}, {chunks} chunk{'s' * (chunks > 1)} a rank"
