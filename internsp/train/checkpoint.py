"""Checkpoints of a run: model, optimizer, random states as tensors, the rest as JSON.

Tensors go through ``torch.distributed.checkpoint`` (:mod:`internsp.train.checkpoint_files`), each
by its global index ranges, so that any mesh goes on with what any mesh saved; what else a run must
know stands in ``manifest.json``. How one is written: :mod:`internsp.train.saver`. It is read after
every digest was found right, and nothing in it is executed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from internsp import accelerator
from internsp.config import resume as resume_rules
from internsp.errors import ConfigError
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from internsp.train import checkpoint_folder, manifest
from internsp.train.agreement import from_first, on_every_rank, plain_errors
from internsp.train.checkpoint_files import Reader
from internsp.train.disk import MANIFEST
from internsp.train.finite import require_finite
from internsp.train.manifest import Manifest, Position, State
from internsp.train.peer import Copies
from internsp.train.session import Session

OWN, _RANK = "buffers.", ", rank "
OWN_BYTES = 2**20
"""Of a buffer of which every rank's own values are saved, at most."""


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on from.

    Attributes:
        step: finished steps.
        sequences: rows of the training text that they took.
        tokens: those of them that the loss has counted.
        path: the checkpoint's folder.
        run: id of the run that wrote it.
        notes: what the user should read: settings taken over, damaged checkpoints passed over.
    """

    step: int
    sequences: int
    tokens: int
    path: Path
    run: str
    notes: list[str]


def manifest_of(
    session: Session,
    step: int,
    sequences: int,
    tokens: int,
    run: str,
    scaler: dict[str, float] | None,
) -> dict[str, Any]:
    """What a checkpoint says of itself, as JSON, but for what it holds. On rank 0, also later.

    Args:
        scaler: the loss scale and its counters (:func:`scale_of`) after ``step`` steps.
    """
    return Manifest(
        step=step,
        run=run,
        mesh=session.mesh.shape.degrees(),
        config=session.config.model_dump(mode="json"),
        data=_position(session, sequences, tokens),
        loss_scaler=scaler,
        values={},
        tensors={},
        files={},
    ).model_dump(mode="json")


def scale_of(session: Session) -> dict[str, float] | None:
    """The loss scale and its counters, as they are now; ``None`` where nothing is scaled."""
    scaler = session.optimizer.loss_scaler
    return None if scaler is None else scaler.state_dict()


def _position(session: Session, sequences: int, tokens: int) -> Position:
    document, token = session.source.place_of(sequences)
    return Position(
        fingerprint=session.source.fingerprint,
        sequences=sequences,
        tokens=tokens,
        document=document,
        token=token,
    )


def load(session: Session, path: Path, copies: Copies | None = None) -> Resumed:
    """Restore a checkpoint of any mesh. Collective; blocks.

    Args:
        path: a checkpoint's folder, or a run's, of which the newest whole checkpoint is taken.
        copies: in memory, of files, which are not read then.

    Raises:
        ConfigError: on every rank, before anything is overwritten: no whole checkpoint is there, a
            setting differs that must not, or the text has changed.
        NotFiniteError: on every rank: its weights are not finite.
    """
    chosen, content, notes = _newest_whole(path, copies)
    try:
        refused, taken = resume_rules.compare(
            content.config, session.config, content.mesh["world"], session.mesh.world_size
        )
    except ConfigError as error:
        raise ConfigError(f"{chosen / MANIFEST}: {error}") from None
    if refused:
        lines = [f"checkpoint.resume: {chosen} was trained with other settings:", *refused]
        remedy = "Set them as they were, or start afresh without --resume."
        raise ConfigError("\n  ".join(lines) + f"\n{remedy}")
    here = _position(session, content.data.sequences, content.data.tokens)
    if content.data.fingerprint != here.fingerprint:
        raise ConfigError(
            f"checkpoint.resume: {chosen} was trained on other text (or another mixture) "
            "than [data] gives now; the order of the data would not continue"
        )
    if content.data != here:  # another version of what shuffles
        raise ConfigError(
            f"checkpoint.resume: {chosen} goes on at token {content.data.token} of document "
            f"{content.data.document}, but after {here.sequences} sequences this machine's order "
            f"comes to token {here.token} of document {here.document}: use the version of numpy "
            "that the run began with"
        )
    tensors, _ = state_of(session)
    tensors = _detached(tensors)
    # Copies of tied weights are read by themselves: they have the first stage's names.
    tied = session.pipeline is not None and len(session.pipeline.tied) > 0
    numbers = range(len(session.modules) if tied else 0)
    repeated = [_detached(_part(session, number, counted=False)) for number in numbers]
    same_ranks = content.mesh["world"] == session.mesh.world_size
    if not same_ranks:
        tensors = {k: v for k, v in tensors.items() if not k.startswith("random.")}
    left = {k: k for k in tensors if k.startswith(OWN)}
    if content.mesh == session.mesh.shape.degrees():  # each rank is again what it was
        left = {name: _shared_name(name) for name in left}
    tensors = {k: v for k, v in tensors.items() if k not in left.values()}
    on_every_rank(lambda: check_fits(content, tensors, chosen))
    with plain_errors(f"checkpoint {chosen} could not be read"):
        for part in (tensors, *repeated):
            dcp.load(
                dict(part),
                storage_reader=Reader(chosen, content, None if copies is None else copies.open),
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
            )
    on_every_rank(lambda: _take(session, tensors, repeated, content, chosen))
    if copies is not None:
        copies.settle(content)
    if not same_ranks:
        seed = derived_seed(session.config.train.seed, content.step, session.mesh.rank)
        torch.manual_seed(seed)  # of the accelerator, too
        notes.append(
            f"{content.mesh['world']} ranks saved, {session.mesh.world_size} go on: random states "
            "are derived anew from train.seed, the step and the rank"
        )
    require_finite(session, f"{chosen} is not resumed from; give the path of an earlier checkpoint")
    notes += taken
    train = session.config.train
    if train.tokens and content.data.tokens >= train.tokens:
        notes.append(
            f"{chosen} has counted {content.data.tokens} tokens: train.tokens = {train.tokens} "
            "leaves none to do"
        )
    elif not train.tokens and content.step >= train.steps:
        notes.append(
            f"{chosen} has finished {content.step} steps: train.steps = {train.steps} leaves none "
            "to do"
        )
    data = content.data
    return Resumed(content.step, data.sequences, data.tokens, chosen, content.run, notes)


def _detached(values: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return {k: v.detach() if isinstance(v, Parameter) else v for k, v in tensors.items()}


def _newest_whole(path: Path, copies: Copies | None) -> tuple[Path, Manifest, list[str]]:
    """The newest whole checkpoint, and what the user should read of it. Collective."""
    folders, named = from_first(lambda: checkpoint_folder.candidates(path))
    skipped: list[str] = []
    for folder in folders:
        try:
            content = from_first(lambda folder=folder: manifest.read(folder))  # type: ignore[misc]
            return folder, content, skipped + check_whole(folder, content, copies)
        except ConfigError as error:
            if named:
                raise ConfigError(f"checkpoint.resume: {error}") from None
            skipped.append(f"checkpoint {folder.name} was passed over: {error}")
    remedy = "give the path of another, or checkpoint.resume = \"never\" to start afresh"
    raise ConfigError(
        "\n  ".join([f"checkpoint.resume: no whole checkpoint at {path}: {remedy}", *skipped])
    )


def check_whole(folder: Path, content: State, copies: Copies | None = None) -> list[str]:
    """Every file is as it was written, or has a copy that is. Collective.

    Each rank looks at a share of them.

    Returns:
        What the user should read: files of which copies are read.

    Raises:
        ConfigError: on every rank: a file is missing or damaged.
    """
    names = sorted(content.files)
    own = names[dist.get_rank() :: dist.get_world_size()]

    def look() -> tuple[list[str], list[str]]:
        read = [n for n in own if copies is None or not copies.has(content.files[n])]
        return manifest.damage(folder, content, read), [content.files[n].sha256 for n in read]

    found = on_every_rank(look)
    damaged = [line for lines, _ in found for line in lines]
    if damaged:
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        raise ConfigError(damaged[0] + more)
    if copies is None:
        return []
    kept = copies.agree(content, [digest for _, digests in found for digest in digests])
    gone = [name for name in kept if not (folder / name).is_file()]
    said = f"; not there any more: {', '.join(gone)}" if gone else ""
    many = f"{len(kept)} of {len(names)} files of {folder} are read from copies in memory{said}"
    return [many] if kept else []


def check_fits(content: State, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Another model has other tensors: say so before anything is overwritten."""
    for name, value in tensors.items():
        stored = content.tensors.get(name)
        if stored is None:
            raise ConfigError(f"checkpoint.resume: {path} has no {name}; resume with its own model")
        if stored.shape != tuple(value.shape) or f"torch.{stored.dtype}" != str(value.dtype):
            raise ConfigError(
                f"checkpoint.resume: {name} in {path} is {stored.dtype}{list(stored.shape)}, here "
                f"it is {str(value.dtype).removeprefix('torch.')}{list(value.shape)}; resume with "
                "its own model"
            )


def derived_seed(seed: int, step: int, rank: int) -> int:
    """The random seed of a rank that goes on where another number of ranks has stopped."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _take(
    session: Session,
    tensors: dict[str, Tensor],
    copies: Sequence[dict[str, Tensor]],
    content: Manifest,
    path: Path,
) -> None:
    """Hand what was read to its owners. Settings stay as the configuration says now."""
    try:
        for name, value in tensors.items():
            if name.startswith("random."):
                set_random(name, value)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"checkpoint.resume: {path} has no random state: {error}") from None
    for number, optimizer in enumerate(session.optimizers):
        own = {**tensors, **(copies[number] if copies else {})}
        state = _optimizer_state(optimizer, own, content.values)
        optimizer.load_local_state_dict(state)
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
        raise ConfigError(f"checkpoint.resume: {path / MANIFEST} has no loss scale")


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


def state_of(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's live tensors, and its few other values, by names that fit all ranks.

    What several places hold is there once: of a tied weight the first name, and the first stage.
    """
    found: dict[str, Any] = {}
    for number in range(len(session.modules)):
        found |= _part(session, number, counted=True)
    found |= _own_buffers(found, session.mesh.rank)
    found |= {f"random.{name}": value for name, value in random_states(session.mesh).items()}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in found.items() if name not in tensors}


def _part(session: Session, number: int, counted: bool) -> dict[str, Any]:
    """One module's values and its optimizer's.

    Args:
        counted: all but copies of what is another stage's; else these alone, by its names.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in session.modules[number].state_dict(keep_vars=True).items():
        member = getattr(value, "_member", None)
        if id(value) not in seen and (member is None or member.counted) == counted:
            seen.add(id(value))
            found[f"model.{member.tied if member is not None and member.tied else name}"] = value
    members = session.communicators[number].replicated.everyone()
    copies = {member.tied for member in members if not member.counted}
    for name, entry in session.optimizers[number].local_state_dict()["state"].items():
        if (name not in copies) == counted:
            found |= {state_key(name, kind): value for kind, value in entry.items()}
    return found


def _own_buffers(found: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """Buffers again, under names of this rank alone: the tokens of an expert, statistics.

    They may differ between ranks; under the shared name only one rank's is saved.
    """
    return {
        f"{OWN}{name.removeprefix('model.')}{_RANK}{rank}": value
        for name, value in found.items()
        if name.startswith("model.")
        and isinstance(value, Tensor)
        and not isinstance(value, Parameter | DTensor)
        and value.nbytes <= OWN_BYTES
    }


def _shared_name(name: str) -> str:
    """The name of all ranks for a name that :func:`_own_buffers` has made."""
    return f"model.{name.removeprefix(OWN).rpartition(_RANK)[0]}"


def state_key(parameter: str, kind: str) -> str:
    """The name in a checkpoint of a kind of optimizer state."""
    return f"optimizer.{parameter}.{kind}"


def parameter_of(name: str) -> str:
    """The parameter that a tensor of a checkpoint is, or is state of."""
    section, _, rest = name.partition(".")
    return rest.rpartition(".")[0] if section == "optimizer" else rest


def _optimizer_state(
    optimizer: ZeroOptimizer, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> dict[str, Any]:
    """An optimizer's own dictionary, with what was read; settings are today's."""
    state = optimizer.local_state_dict()
    state.pop("loss_scaler", None)
    for name, entry in state["state"].items():
        for kind in entry:
            key = state_key(name, kind)
            entry[kind] = tensors[key] if key in tensors else values.get(key, entry[kind])
    return state


def random_states(mesh: ParallelMesh) -> dict[str, Tensor]:
    """This rank's random states."""
    states = {f"cpu, rank {mesh.rank}": torch.get_rng_state()}
    if accelerator.has_streams(mesh.device):
        device = mesh.device
        states[f"{device.type}, rank {mesh.rank}"] = accelerator.random_state(device)
    return states


def set_random(name: str, value: Tensor) -> None:
    """Go on from what :func:`random_states` gave, by its name there."""
    kind = name.removeprefix("random.").partition(",")[0]
    if kind == accelerator.HOST:
        torch.set_rng_state(value)
    else:
        accelerator.set_random_state(torch.device(kind), value)
