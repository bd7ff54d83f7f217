"""Tensors and values of all ranks in a folder of their own, in a checkpoint's form; at once.

For other programs' loops, whose checkpoint is a folder that this one lies in
(:mod:`internsp.clients.trainer`). ``internsp train`` has more to say of a checkpoint, and writes it
beside training (:mod:`internsp.train.saver`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from internsp.errors import ConfigError
from internsp.train import manifest
from internsp.train.agreement import from_first, on_every_rank, plain_errors
from internsp.train.checkpoint import check_fits, check_whole
from internsp.train.checkpoint_files import FilePlan, Reader
from internsp.train.disk import MANIFEST, sync, write_manifest, write_part
from internsp.train.manifest import State


def save_state(folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Write ``folder`` anew. Collective; blocks until all of it is durable.

    Args:
        tensors: this rank's, as ``torch.distributed.checkpoint`` takes them.
        values: this rank's, of JSON's types (and infinities); of one name one rank's is kept.

    Raises:
        ConfigError: on every rank: a value that JSON has not.
        InternspError, OSError: on every rank: some rank could not write.
    """
    with plain_errors(f"no state can be saved in {folder}"):
        plan = FilePlan.make(tensors)
    from_first(lambda: shutil.rmtree(folder, ignore_errors=True))

    def write() -> tuple[str, dict[str, Any], dict[str, Any]]:
        own = {name: as_json(value, name) for name, value in values.items()}
        memory = torch.empty(plan.nbytes, dtype=torch.uint8)
        plan.fill(memory, tensors)
        return plan.file, write_part(folder, plan.file, memory.numpy().data), own

    found = on_every_rank(write)

    def finish() -> None:
        content = State(
            values={name: value for _, _, own in found for name, value in own.items()},
            tensors=plan.tensors,
            files={name: manifest.FileRecord(**record) for name, record, _ in found},
        )
        write_manifest(folder, content.model_dump(mode="json"))
        sync(folder)

    from_first(finish)


def load_state(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fill ``tensors``, which may be other ranges than were saved; the values. Collective; blocks.

    Those of random states (``random.``) that the folder has not are left as they are.

    Raises:
        ConfigError: on every rank, before anything is overwritten: it is not what was saved, or of
            other tensors; the message names the file or the tensor.
    """
    content = from_first(lambda: manifest.read(folder, State))
    check_whole(folder, content)
    wanted = {
        name: value
        for name, value in tensors.items()
        if name in content.tensors or not name.startswith("random.")
    }
    on_every_rank(lambda: check_fits(content, wanted, folder))
    with plain_errors(f"{folder / MANIFEST} could not be followed"):
        dcp.load(
            dict(wanted),
            storage_reader=Reader(folder, content),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
        )
    return {name: _of_json(value) for name, value in content.values.items()}


def as_json(value: Any, name: str) -> Any:
    """``value`` in JSON's types.

    Raises:
        ConfigError: it has others.
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
