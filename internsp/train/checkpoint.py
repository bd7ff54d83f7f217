"""Checkpoints of a run: model, optimizer, random states as tensors, the rest as JSON.

Tensors go through ``torch.distributed.checkpoint`` (:mod:`internsp.train.checkpoint_files`); what
else a run must know to go on stands in ``manifest.json``. A checkpoint is written aside and becomes
one by a rename, when every file of every rank is durable. It is read after every digest was found
right, and nothing in it is executed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from internsp import accelerator
from internsp.config import resume as resume_rules
from internsp.errors import ConfigError
from internsp.train import checkpoint_folder, manifest
from internsp.train.agreement import from_first, on_every_rank, plain_errors
from internsp.train.checkpoint_files import METADATA, Reader, Writer, check_metadata
from internsp.train.finite import require_finite
from internsp.train.manifest import Manifest
from internsp.train.session import Session

# Of an optimizer's dictionary: stands in the configuration, or in the manifest by itself.
_ELSEWHERE = ("param_groups", "mesh", "loss_scaler")


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on from.

    Attributes:
        step: finished steps.
        path: the checkpoint's folder.
        run: id of the run that wrote it.
        notes: what the user should read: settings taken over, damaged checkpoints passed over.
    """

    step: int
    path: Path
    run: str
    notes: list[str]


def save(session: Session, folder: Path, step: int, run: str) -> Path:
    """Write ``folder/step-N``. Collective; blocks until it is durable and valid on every rank.

    A failure leaves what was there before, whole.

    Returns:
        The checkpoint's folder.

    Raises:
        NotFiniteError: on all ranks, before anything is written: see ``finite.require_finite``.
        InternspError: some rank could not write; raised on every rank.
    """
    require_finite(session, f"no checkpoint of step {step} is written")
    final = checkpoint_folder.folder_of(folder, step)
    with plain_errors(f"checkpoint {final} was not saved"):
        aside = from_first(partial(checkpoint_folder.begin, final))
        try:
            _write(session, final, aside, step, run)
        except BaseException:
            if session.mesh.rank == 0:  # the disk may be full: give back what was taken
                shutil.rmtree(aside, ignore_errors=True)
            raise
    return final


def _write(session: Session, final: Path, aside: Path, step: int, run: str) -> None:
    tensors, values = _split(_state(session))
    writer = Writer(aside)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(dict(tensors), storage_writer=writer, planner=planner)
    found = on_every_rank(lambda: _durable(writer, aside, values))

    def commit() -> None:
        files = {name: record for written, _ in found for name, record in written.items()}
        kept = {name: value for _, own in found for name, value in own.items()}
        manifest.write(aside, _manifest(session, step, run, writer, files, kept))
        checkpoint_folder.commit(final)

    from_first(commit)


def _durable(writer: Writer, folder: Path, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    checkpoint_folder.sync(folder)  # each machine's own view of it
    return writer.written, values


def _manifest(
    session: Session, step: int, run: str, writer: Writer, files: Any, values: dict[str, Any]
) -> Manifest:
    scaler = session.optimizer.loss_scaler
    return Manifest(
        step=step,
        run=run,
        world_size=session.mesh.world_size,
        config=session.config.model_dump(mode="json"),
        data={
            "fingerprint": session.source.fingerprint,
            "sequences": step * session.config.train.global_batch,
        },
        loss_scaler=None if scaler is None else scaler.state_dict(),
        values=values,
        tensors=writer.tensors,
        files=files,
    )


def load(session: Session, path: Path) -> Resumed:
    """Restore a checkpoint of the same mesh. Collective; blocks.

    Args:
        path: a checkpoint's folder, or a run's, of which the newest whole checkpoint is taken.

    Raises:
        ConfigError: on every rank, before anything is overwritten: no whole checkpoint is there, a
            setting differs that must not, or the text has changed.
        NotFiniteError: on every rank: its weights are not finite.
    """
    chosen, content, notes = _newest_whole(path)
    try:
        refused, taken = resume_rules.compare(content.config, session.config, content.world_size)
    except ConfigError as error:
        raise ConfigError(f"{chosen / manifest.NAME}: {error}") from None
    if refused:
        lines = [f"checkpoint.resume: {chosen} was trained with other settings:", *refused]
        remedy = "Set them as they were, or start afresh without --resume."
        raise ConfigError("\n  ".join(lines) + f"\n{remedy}")
    if content.data.get("fingerprint") != session.source.fingerprint:
        raise ConfigError(
            f"checkpoint.resume: {chosen} was trained on other text than [data] gives now; the "
            "order of the data would not continue"
        )
    state = _state(session)
    tensors, _ = _split(state)
    on_every_rank(lambda: _check_fits(session, content, tensors, chosen))
    tensors = {name: value for name, value in tensors.items() if name in content.tensors}
    with plain_errors(f"checkpoint {chosen} could not be read"):
        dcp.load(
            dict(tensors),
            storage_reader=Reader(chosen, content),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
        )
    on_every_rank(lambda: _take(session, state, content, chosen))
    require_finite(session, f"{chosen} is not resumed from; give the path of an earlier checkpoint")
    notes += taken
    if content.step >= session.config.train.steps:
        notes.append(
            f"{chosen} has finished {content.step} steps: train.steps = "
            f"{session.config.train.steps} leaves none to do"
        )
    return Resumed(content.step, chosen, content.run, notes)


def _newest_whole(path: Path) -> tuple[Path, Manifest, list[str]]:
    """The newest whole checkpoint, and what was passed over. Collective."""
    folders, named = from_first(lambda: checkpoint_folder.candidates(path))
    skipped: list[str] = []
    for folder in folders:
        try:
            content = from_first(lambda folder=folder: manifest.read(folder))  # type: ignore[misc]
            _check_whole(folder, content)
            return folder, content, skipped
        except ConfigError as error:
            if named:
                raise ConfigError(f"checkpoint.resume: {error}") from None
            skipped.append(f"checkpoint {folder.name} was passed over: {error}")
    raise ConfigError("\n  ".join([f"checkpoint.resume: no whole checkpoint at {path}", *skipped]))


def _check_whole(folder: Path, content: Manifest) -> None:
    """Every file is as it was written; each rank reads a share of them. Collective."""
    names = sorted(content.files)
    own = names[dist.get_rank() :: dist.get_world_size()]
    found = on_every_rank(lambda: manifest.damage(folder, content, own))
    damaged = [line for lines in found for line in lines]
    if damaged:
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        raise ConfigError(damaged[0] + more)
    from_first(lambda: check_metadata(folder / METADATA))


def _check_fits(
    session: Session, content: Manifest, tensors: Mapping[str, Tensor], path: Path
) -> None:
    """Another mesh has other optimizer pieces: say so before anything is overwritten."""
    for name, value in tensors.items():
        stored = content.tensors.get(name)
        if stored is None:
            if name.startswith("random."):
                continue  # a rank that the run did not have: its own seed is as good
            raise ConfigError(
                f"checkpoint.resume: {path} has no {name}; resume on the same mesh and model as "
                f"it was saved with (now: {_place(session)})"
            )
        if stored.shape != tuple(value.shape) or f"torch.{stored.dtype}" != str(value.dtype):
            raise ConfigError(
                f"checkpoint.resume: {name} in {path} is {stored.dtype}{list(stored.shape)}, here "
                f"it is {str(value.dtype).removeprefix('torch.')}{list(value.shape)}; resume with "
                f"the same model and mesh as it was saved with (now: {_place(session)})"
            )


def _take(session: Session, state: dict[str, Any], content: Manifest, path: Path) -> None:
    """Hand what was read to its owners. Settings stay as the configuration says now."""
    _fill(state, content.values)
    try:
        for name, value in state["random"].items():
            if f"random.{name}" in content.tensors:
                _set_random(name, value)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"checkpoint.resume: {path} has no random state: {error}") from None
    for optimizer, part in zip(session.optimizers, _parts(session, state), strict=True):
        optimizer.load_local_state_dict(part)
    scaler = session.optimizer.loss_scaler
    if scaler is not None and content.loss_scaler is not None:
        _check_scale(content.loss_scaler, path)
        scaler.load_state_dict(content.loss_scaler)
    for optimizer, schedule in zip(session.optimizers, session.schedules, strict=True):
        _wind(optimizer, schedule, content.step)
    for communicator in session.communicators:
        communicator.invalidate()


def _check_scale(saved: dict[str, float], path: Path) -> None:
    if saved.keys() != {"scale", "good_steps", "skipped_steps"} or not saved["scale"] > 0:
        raise ConfigError(f"checkpoint.resume: {path / manifest.NAME} has no loss scale")


def _wind(
    optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LambdaLR, step: int
) -> None:
    """Set a schedule made from today's settings to where ``step`` finished steps leave it."""
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [base * factor(step) for base, factor in pairs]
    schedule.load_state_dict(
        {
            "lr_lambdas": [None] * len(rates),
            "last_epoch": step,
            "_step_count": step + 1,
            "_last_lr": rates,
        }
    )
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


# what a checkpoint holds


def _state(session: Session) -> dict[str, Any]:
    """Nested dictionaries of live tensors, and few other values, by names that fit all ranks."""
    model = {k: v for module in session.modules for k, v in module.state_dict().items()}
    parts = [optimizer.local_state_dict() for optimizer in session.optimizers]
    if session.pipeline is None:
        optimizers: dict[str, Any] = parts[0]
    else:
        stages = (f"stage {stage.stage_index}" for stage in session.pipeline.stages)
        optimizers = dict(zip(stages, parts, strict=True))
    return {"model": model, "optimizer": optimizers, "random": _random(session)}


def _parts(session: Session, state: dict[str, Any]) -> list[dict[str, Any]]:
    optimizers: dict[str, Any] = state["optimizer"]
    return [optimizers] if session.pipeline is None else list(optimizers.values())


def _random(session: Session) -> dict[str, Tensor]:
    """This rank's random states."""
    mesh = session.mesh
    states = {f"cpu, rank {mesh.rank}": torch.get_rng_state()}
    if accelerator.has_streams(mesh.device):
        device = mesh.device
        states[f"{device.type}, rank {mesh.rank}"] = accelerator.random_state(device)
    return states


def _set_random(name: str, value: Tensor) -> None:
    kind = name.partition(",")[0]
    if kind == accelerator.HOST:
        torch.set_rng_state(value)
    else:
        accelerator.set_random_state(torch.device(kind), value)


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the other values of nested dictionaries, by names joined with dots."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in _walk(state, ""):
        (tensors if isinstance(value, Tensor) else values)[name] = value
    return tensors, values


def _walk(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if key in _ELSEWHERE and prefix.startswith("optimizer."):
            continue
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _fill(state: dict[str, Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Put values that are no tensors back where :func:`_split` found them."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            _fill(value, values, f"{name}.")
        elif name in values and not isinstance(value, Tensor):
            state[key] = values[name]


def _place(session: Session) -> str:
    """The mesh, and the schedule, which says what part of a pipelined model is on which rank."""
    mesh = session.mesh.describe()
    if session.pipeline is None:
        return mesh
    chunks = len(session.pipeline.chunks)
    return f"{mesh}; {session.pipeline.kind.name}, {chunks} chunk{'s' * (chunks > 1)} a rank"
