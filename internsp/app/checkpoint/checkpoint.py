"""Checkpoints of a run: model, optimizer and random states as tensors, everything else as JSON.

Tensors are written and read by their global index ranges, as ``torch.distributed.checkpoint`` plans
it (:mod:`internsp.app.checkpoint.files`), so that a run on any mesh can resume from a checkpoint of
any other mesh. Everything else is in ``manifest.json``. Writing is in
:mod:`internsp.app.checkpoint.saver`. Before anything is loaded, the digest of every file is
checked; nothing in a checkpoint is executed.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from internsp.app.checkpoint import manifest
from internsp.app.checkpoint.disk import candidates, newest_whole
from internsp.app.checkpoint.files import Reader
from internsp.app.checkpoint.manifest import MANIFEST, Manifest, Position, State
from internsp.app.config import resume as resume_rules
from internsp.app.session.session import Session
from internsp.base import accelerator
from internsp.errors import ConfigError
from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer

OWN, _RANK = "buffers.", ", rank "
OWN_BYTES = 2**20
"""Largest buffer of which every rank's own values are saved."""


class Resumed(NamedTuple):
    """The checkpoint from which a run resumes.

    Attributes:
        path: its folder.
        notes: messages for the user: settings that changed, damaged checkpoints that were skipped.
    """

    path: Path
    content: Manifest
    notes: list[str]


def position_of(session: Session, sequences: int, tokens: int) -> Position:
    """Where in its text a run is that has used so many rows with so many counted tokens."""
    document, token = session.source.position_of(sequences)
    return Position(
        fingerprint=session.source.fingerprint,
        sequences=sequences,
        tokens=tokens,
        document=document,
        token=token,
    )


def load(session: Session, path: Path) -> Resumed:
    """Restore a checkpoint that was written on any mesh. Collective; blocks.

    Args:
        path: folder of a checkpoint, or of a run, whose newest complete checkpoint is loaded.

    Raises:
        ConfigError: on every rank, before anything is overwritten: there is no complete checkpoint,
            a setting differs that must not, or the text has changed.
    """
    try:
        chosen, content, notes = _newest_complete(path)
    except ConfigError as error:
        raise ConfigError(
            f'checkpoint.resume: {error}\nOr start afresh: checkpoint.resume = "never".'
        ) from None
    try:
        refused, taken = resume_rules.compare(
            content.config, session.config, content.mesh["world"], session.mesh.world_size
        )
    except ConfigError as error:
        raise ConfigError(f"{chosen / MANIFEST}: {error}") from None
    if refused:
        lines = [f"checkpoint.resume: {chosen} was trained with other settings:", *refused]
        remedy = 'Set them as they were, or start afresh with checkpoint.resume = "never".'
        raise ConfigError("\n  ".join(lines) + f"\n{remedy}")
    here = position_of(session, content.data.sequences, content.data.tokens)
    if content.data.fingerprint != here.fingerprint:
        raise ConfigError(
            f"checkpoint.resume: {chosen} was trained on other text (or another mixture) "
            "than [data] gives now, so that the order of the data would not continue: give it that "
            "text, or begin a run with its weights (internsp export, then model.path)"
        )
    if content.data != here:  # a numpy version that shuffles differently
        raise ConfigError(
            f"checkpoint.resume: {chosen} continues at token {content.data.token} of document "
            f"{content.data.document}, but on this machine sequence {here.sequences} begins at "
            f"token {here.token} of document {here.document}: use the version of numpy with which "
            "the run began"
        )
    tensors, values = state_of(session)
    tensors = _detached(tensors)
    _check_nothing_lost(content, tensors, chosen)
    # Tied weights that a later stage copies are loaded separately, under the first stage's names.
    tied = session.pipeline is not None and len(session.pipeline.tied) > 0
    numbers = range(len(session.modules) if tied else 0)
    repeated = [_detached(_module_state(session, number, counted=False)) for number in numbers]
    same_ranks = content.mesh["world"] == session.mesh.world_size
    if not same_ranks:
        tensors = {k: v for k, v in tensors.items() if not k.startswith("random.")}
    left = {k: k for k in tensors if k.startswith(OWN)}
    if content.mesh == session.mesh.shape.degrees():  # each rank has the same coordinates as then
        left = {name: _shared_name(name) for name in left}
    tensors = {k: v for k, v in tensors.items() if k not in left.values()}
    Objects().on_every(lambda: check_fits(content, tensors, chosen))
    Objects().on_every(lambda: _check_values(content, values, chosen))

    def read() -> None:
        reader = Reader(chosen, content)
        for part in (tensors, *repeated):
            reader.into(part)
        _restore(session, tensors, repeated, content)

    Objects().on_every(read)
    if not same_ranks:
        seed_random(session.config.train.seed, content.step, session.mesh.rank)
        notes.append(
            f"{content.mesh['world']} ranks saved, {session.mesh.world_size} go on: random states "
            "are derived anew from train.seed, the step and the rank"
        )
    return Resumed(chosen, content, [*notes, *taken])


def _detached(values: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return {k: v.detach() if isinstance(v, Parameter) else v for k, v in tensors.items()}


def _newest_complete(path: Path) -> tuple[Path, Manifest, list[str]]:
    """Find the newest complete checkpoint; also return messages for the user. Collective."""

    def read(folder: Path) -> Manifest:
        content = Objects().on_first(lambda: manifest.read(folder))
        check_complete(folder, content)
        return content

    found = Objects().on_first(lambda: candidates(path))
    return newest_whole(path, found, read)


def check_complete(folder: Path, content: State) -> None:
    """Check that every file is as it was written; each rank reads a part of them. Collective.

    Raises:
        ConfigError: on every rank: a file is missing or damaged.
    """
    own = sorted(content.files)[dist.get_rank() :: dist.get_world_size()]
    Objects().on_every(lambda: manifest.check_files(folder, content, own))


def check_fits(content: State, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise before anything is overwritten if the checkpoint has other tensors than the model."""
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


def _check_nothing_lost(content: Manifest, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise if the checkpoint has a weight that no rank's model has. Collective.

    A buffer, of which each rank saved its own value, too, may be one that is now computed.
    """
    buffers = {_shared_name(name) for name in content.tensors if name.startswith(OWN)}
    saved = sorted(n for n in content.tensors if n.startswith("model.") and n not in buffers)
    # As bits: other stages have most names, and there may be many ranks.
    lacking = sum(1 << at for at, name in enumerate(saved) if name not in tensors)
    nowhere = functools.reduce(operator.and_, Objects().on_every(lambda: lacking))
    if lost := [name for at, name in enumerate(saved) if nowhere >> at & 1]:
        raise ConfigError(
            f"checkpoint.resume: {path} has {lost[0]}, which this model does not have; resume with "
            "its own model"
        )


def _check_values(content: Manifest, values: Mapping[str, Any], path: Path) -> None:
    """Raise before anything is overwritten if a value of the optimizer is missing."""
    missing = [n for n in values if n.startswith("optimizer.") and n not in content.values]
    if missing:
        raise ConfigError(
            f"checkpoint.resume: {path} has no {missing[0]}, which this optimizer needs to go on: "
            "it was saved by another class of optimizer, or by an internsp that did not save what "
            "a class keeps in its param_groups; resume with its own class, or start afresh with "
            'checkpoint.resume = "never"'
        )


def seed_random(seed: int, step: int, rank: int) -> None:
    """Seed the random states of a rank that begins a run, or resumes one of other ranks."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))  # seeds the accelerator, too


def _restore(
    session: Session,
    tensors: dict[str, Tensor],
    copies: Sequence[dict[str, Tensor]],
    content: Manifest,
) -> None:
    """Load the tensors that were read into random states, optimizers and loss scaler.

    Optimizer settings stay as the current configuration sets them.
    """
    for name, value in tensors.items():
        if name.startswith("random."):
            set_random(name, value)
    for number, optimizer in enumerate(session.optimizers):
        own = {**tensors, **(copies[number] if copies else {})}
        state = _optimizer_state(optimizer, own, content.values)
        optimizer.load_local_state_dict(state)
    scaler = session.optimizer.loss_scaler
    if scaler is not None and content.loss_scaler is not None:
        scaler.load_state_dict(content.loss_scaler)
    for schedule in session.schedules:
        schedule.last_epoch = content.step - 1
        schedule._step_count = 2  # torch warns of a second one, as if the optimizer had no step yet
        schedule.step()
    for communicator in session.communicators:
        communicator.invalidate()


# What a checkpoint holds.


def state_of(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's tensors (not copies) and other values, by names that are the same on all ranks.

    A value that exists several times is listed once: a tied weight under its first name, in the
    first stage that has it.
    """
    found: dict[str, Any] = {}
    for number in range(len(session.modules)):
        found |= _module_state(session, number, counted=True)
    found |= _rank_buffers(found, session.mesh.rank)
    found |= {f"random.{name}": value for name, value in random_states(session.mesh).items()}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in found.items() if name not in tensors}


def _module_state(session: Session, number: int, counted: bool) -> dict[str, Any]:
    """State of one module and of its optimizer, by name.

    Args:
        counted: ``True`` for everything but copies of weights that belong to another stage;
            ``False`` for these copies alone, under the names that the other stage uses.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in session.modules[number].state_dict(keep_vars=True).items():
        member = getattr(value, "_member", None)
        if id(value) not in seen and (member is None or member.counted) == counted:
            seen.add(id(value))
            found[f"model.{member.tied if member is not None and member.tied else name}"] = value
    members = session.communicators[number].replicated.all_parameters()
    copies = {member.tied for member in members if not member.counted}
    optimizer = session.optimizers[number]
    kept = {
        name: {_in_group(key): value for key, value in entry.items()}
        for name, entry in optimizer.kept_in_groups().items()
    }
    for entries in (optimizer.local_state_dict()["state"], kept):
        for name, entry in entries.items():
            if (name not in copies) == counted:
                found |= {state_key(name, kind): value for kind, value in entry.items()}
    return found


def _rank_buffers(found: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """The buffers in ``found`` a second time, under names of this rank.

    Buffers may differ between ranks (tokens of an expert, statistics); under the shared name only
    one rank's value is saved.
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
    """The shared name of a buffer whose per-rank name :func:`_rank_buffers` made."""
    return f"model.{name.removeprefix(OWN).rpartition(_RANK)[0]}"


def state_key(parameter: str, kind: str) -> str:
    """Name in a checkpoint of one kind of optimizer state of a parameter."""
    return f"optimizer.{parameter}.{kind}"


def _in_group(key: str) -> str:
    """The kind of a state that an optimizer keeps in its group. It is saved for each parameter:
    groups may be others on another mesh, as stages of a pipeline have their own."""
    return f"group[{key}]"


def parameter_of(name: str) -> str:
    """The parameter that a checkpoint's tensor holds, or whose optimizer state it holds."""
    section, _, rest = name.partition(".")
    return rest.rpartition(".")[0] if section == "optimizer" else rest


def _optimizer_state(
    optimizer: ZeroOptimizer, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The optimizer's local state dict with the loaded state in it and the current settings.

    Raises:
        ConfigError: what the optimizer keeps in its groups differs within one group.
    """
    state = optimizer.local_state_dict()
    state.pop("loss_scaler", None)
    for name, entry in state["state"].items():
        for kind in entry:
            key = state_key(name, kind)
            entry[kind] = tensors[key] if key in tensors else values.get(key, entry[kind])
    groups, index_of = state["param_groups"], optimizer.group_of_name()
    taken: dict[tuple[int, str], tuple[str, Any]] = {}
    for name, entry in optimizer.kept_in_groups().items():
        for kept, current in entry.items():
            key, index = state_key(name, _in_group(kept)), index_of[name]
            value = tensors[key] if key in tensors else values[key]
            value = tuple(value) if isinstance(current, tuple) else value
            first, before = taken.setdefault((index, kept), (name, value))
            if before is not value and bool(torch.as_tensor(before != value).any()):
                raise ConfigError(
                    f"checkpoint.resume: {name} and {first} are in one group of the optimizer, but "
                    f"were saved with {kept} = {value} and {before} in its param_groups: form the "
                    "groups as they were (optimizer.groups)"
                )
            groups[index][kept] = value
    return state


def random_states(mesh: ParallelMesh) -> dict[str, Tensor]:
    """This rank's random states of the CPU and of the accelerator."""
    states = {f"cpu, rank {mesh.rank}": torch.get_rng_state()}
    if accelerator.has_streams(mesh.device):
        device = mesh.device
        states[f"{device.type}, rank {mesh.rank}"] = accelerator.random_state(device)
    return states


def set_random(name: str, value: Tensor) -> None:
    """Restore one of the states that :func:`random_states` returned, by its name there."""
    kind = name.removeprefix("random.").partition(",")[0]
    if kind == accelerator.HOST:
        torch.set_rng_state(value)
    else:
        accelerator.set_random_state(torch.device(kind), value)
