"""Saves tensors and values of all ranks into one folder, in the format of a checkpoint. Blocks.

For the loops of other programs, whose checkpoint is a folder with this one inside
(:mod:`internsp.clients.trainer`). ``internsp train`` saves more and writes while training goes on
(:mod:`internsp.app.checkpoint.saver`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from internsp.app.checkpoint import manifest
from internsp.app.checkpoint.checkpoint import check_complete, check_fits
from internsp.app.checkpoint.disk import require_seen, sync, write_part
from internsp.app.checkpoint.files import FilePlan, Reader
from internsp.app.checkpoint.manifest import State, write_manifest
from internsp.errors import ConfigError
from internsp.failure.objects import Objects


def save_state(folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Write ``folder``, replacing an older one. Collective; blocks until everything is durable.

    Args:
        tensors: this rank's tensors, as ``torch.distributed.checkpoint`` takes them.
        values: this rank's values, of JSON's types (and infinities); of values with the same name
            on several ranks, one is kept.

    Raises:
        ConfigError: on every rank: a value has a type that JSON lacks.
        InternspError, OSError: on every rank: some rank could not write.
    """
    plan = FilePlan.make(tensors)
    Objects().on_first(lambda: shutil.rmtree(folder, ignore_errors=True))

    def write() -> tuple[str, dict[str, Any], dict[str, Any]]:
        own = {name: as_json(value, name) for name, value in values.items()}
        memory = torch.empty(plan.nbytes, dtype=torch.uint8)
        plan.fill(memory, tensors)
        return plan.file, write_part(folder, plan.file, memory.numpy().data), own

    found = Objects().on_every(write)

    def finish() -> None:
        require_seen(folder, (name for name, _, _ in found))
        content = State(
            values={name: value for _, _, own in found for name, value in own.items()},
            tensors=plan.tensors,
            files={name: manifest.FileRecord(**record) for name, record, _ in found},
        )
        write_manifest(folder, content.model_dump(mode="json"))
        sync(folder)

    Objects().on_first(finish)


def load_state(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Load a folder into ``tensors`` and return its values. Collective; blocks.

    The ranges of ``tensors`` may differ from those that were saved. Random states (``random.``)
    that the folder does not have are left unchanged.

    Raises:
        ConfigError: on every rank, before anything is overwritten: the folder is damaged, or has
            other tensors; the message names the file or the tensor.
    """
    content = Objects().on_first(lambda: manifest.read_as(folder, State))
    check_complete(folder, content)
    wanted = {
        name: value
        for name, value in tensors.items()
        if name in content.tensors or not name.startswith("random.")
    }
    Objects().on_every(lambda: check_fits(content, wanted, folder))
    Objects().on_every(lambda: Reader(folder, content).into(wanted))
    return {name: _of_json(value) for name, value in content.values.items()}


def as_json(value: Any, name: str) -> Any:
    """``value`` as JSON; infinities and NaN as ``{"float": ...}``.

    Raises:
        ConfigError: it has a type that JSON lacks.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [as_json(one, f"{name}[{i}]") for i, one in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: as_json(one, f"{name}.{key}") for key, one in value.items()}
    raise ConfigError(
        f"{name} is a {type(value).__name__}: only numbers, text, lists and dictionaries of them "
        "are saved beside tensors"
    )


def _of_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_of_json(one) for one in value]
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in ("inf", "-inf", "nan"):
            return float(value["float"])
        return {key: _of_json(one) for key, one in value.items()}
    return value
