"""Load weights into a parallel model; no rank ever holds the full model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from internsp.errors import ConfigError, LayoutError, MissingDependencyError
from internsp.values.part import Entry, ModelPart

Rows = tuple[str, int, int]
"""Rows of a stored tensor: its name, the first row, and the row after the last."""
Joined = Sequence[Rows] | Sequence[Sequence[Rows]]
"""A tensor made of stored rows, or a stack of such matrices, each transposed."""


@torch.no_grad()
def load_weights(
    model: nn.Module,
    source: str | Path | Mapping[str, Tensor] | None,
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    joined: Mapping[str, Joined] | None = None,
) -> tuple[list[str], list[str]]:
    """Load parameters and persistent buffers of a model after ``parallelize``. Collective; blocks.

    From a folder every rank reads only its own rows of each weight. From the first rank of the
    stage one full tensor at a time is scattered. Values are converted to the dtype of the
    parameter; the master of a 16-bit parameter of a ``ZeroOptimizer`` gets them unrounded.

    Args:
        source: a folder of ``safetensors`` (with ``*.safetensors.index.json`` or without), one such
            file, or, on the first rank, a mapping of full tensors, read one by one (on other
            ranks: ``None``).
        strict: refuse parameters without values, and values without a parameter.
        rename: maps a name in the model to its name in ``source``; one to one. For a tied weight
            one of its names is enough.
        joined: for a folder, tensors to concatenate, by the name of the result in ``source``: rows
            ``(name, start, stop)`` of stored tensors, concatenated on dimension 0. All rows of a
            stored tensor must be used. A list of such lists is a stack ``[n, in, out]`` of
            matrices, each stored as ``[out, in]``: grouped experts of separately stored ones.

    Returns:
        Names in the model without values; names in ``source`` that were not used (for a mapping,
        known on the first rank only).

    Raises:
        ConfigError: there is no such folder, or a file is damaged; names are missing or
            superfluous; two parameters have one name in ``source``.
        LayoutError: a value has another shape.
        CollectiveError: another rank refused.
    """
    path = Path(source) if isinstance(source, str | Path) else None
    part = ModelPart(model, True, f"load_weights({'a folder' if path else 'from the first rank'})")
    with _catch_error() as caught:
        if path is None and part.on_first_rank != (source is not None):
            raise ConfigError(
                f"rank {part.mesh.rank} of load_weights was given "
                f"{'nothing' if source is None else 'values'}: give a mapping to the first rank of "
                "a stage and None to the others, or a folder to all"
            )
        files = _Files(path, joined or {}) if path is not None else None
        names = list(files.file_of if files is not None else source or ())  # type: ignore[arg-type]
        wanted = _match_names(part, names, rename or (lambda name: name))
        missing = [entry.name for entry in part.entries if entry.name not in wanted]
        unused = [name for name in names if name not in set(wanted.values())]
        known = path is not None or part.on_first_rank
        if strict and known and (missing or unused):
            raise ConfigError(_describe_names(missing, unused))
        if files is not None:
            _check_shapes(part, files, wanted)
    part.synchronize(own_error=caught[0] if caught else None)
    if files is not None:
        with part.collective_section():
            for _, entries in part.units():
                for entry in entries:
                    if name := wanted.get(entry.name):
                        part.write(entry, _read_own(files, name, entry), exact=True)
                part.free()
    else:
        missing = _scatter(part, source or {}, wanted)  # type: ignore[arg-type]
    for communicator in part.communicators:
        communicator.invalidate()
    return missing, unused


def stored_values(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Full tensors of a folder of ``safetensors``."""
    files = _Files(path)
    return {name: files.read(name, ()) for name in names}


def stored_shapes(path: Path) -> dict[str, list[int]]:
    """Names and shapes of the tensors in a folder of ``safetensors``; reads only the headers.

    Raises:
        ConfigError: there are no such files, the index names a missing file, or a file is damaged.
    """
    files = _Files(path)
    return {name: files.shape(name) for name in files.file_of}


@contextmanager
def _catch_error() -> Iterator[list[Exception]]:
    """Context that keeps an exception instead of raising it: other ranks are to get it first."""
    found: list[Exception] = []
    try:
        yield found
    except Exception as error:  # noqa: BLE001 - raised by ModelPart.synchronize
        found.append(error)


def _match_names(part: ModelPart, names: list[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Names in the source by name in the model, for each entry that has a value."""
    available, used, found = set(names), dict[str, str](), dict[str, str]()
    for entry in part.entries:
        for name in entry.names:
            given = rename(name)
            if given in available:
                if used.setdefault(given, entry.name) != entry.name:
                    raise ConfigError(f"{given} is meant for {used[given]} and for {entry.name}")
                found.setdefault(entry.name, given)
    # A tied weight of a pipeline may be found by its name in the model.
    for entry in part.parameters:
        if entry.member.tied and entry.name not in found:
            given = rename(entry.name.removesuffix(entry.member.name) + entry.member.tied)
            if given in available:
                found[entry.name] = given
    for buffer in part.buffers:
        if not buffer.persistent:
            found.setdefault(buffer.name, "")
    return found


def _describe_names(missing: list[str], unused: list[str]) -> str:
    def listed(names: list[str]) -> str:
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    parts = []
    if missing:
        parts.append(f"there are no values for {listed(missing)}")
    if unused:
        parts.append(f"the model has no place for {listed(unused)}")
    return f"load_weights: {'; '.join(parts)}. Map names with rename=, or set strict=False"


class _Files:
    """The safetensors files of a folder, opened when first needed, closed with this object.

    Attributes:
        file_of: the file of each tensor; for a joined tensor the file of its first rows.
    """

    def __init__(self, path: Path, joined: Mapping[str, Joined] | None = None) -> None:
        self._open: dict[Path, Any] = {}
        self._joined: dict[str, Sequence[Sequence[Rows]]] = {}
        self._stacks = set()
        parts: Any
        for name, parts in (joined or {}).items():
            flat = isinstance(parts[0][0], str)
            self._joined[name] = [parts] if flat else parts
            self._stacks |= set() if flat else {name}
        self._stored: dict[str, Path] = {}
        if not path.exists():
            raise ConfigError(f"load_weights: there is no {path}")
        indexes = sorted(path.glob("*.safetensors.index.json")) if path.is_dir() else []
        if len(indexes) > 1:
            raise ConfigError(f"load_weights: {path} has several indexes: give one folder for each")
        if indexes:
            self._stored = _read_index(indexes[0])
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"load_weights: {path} has no *.safetensors")
        for file in dict.fromkeys(self._stored.values()) if indexes else files:
            if not file.exists():
                raise ConfigError(f"load_weights: {file}, which the index names, is not there")
            held = self._file(file).keys()
            for name in held:
                if not indexes and name in self._stored:
                    raise ConfigError(f"load_weights: {name} is in {self._stored[name]} and {file}")
                self._stored.setdefault(name, file)
            absent = {name for name, own in self._stored.items() if own == file} - set(held)
            if absent:
                text = f"has no {min(absent)}, which the index says"
                raise ConfigError(f"load_weights: {file} {text}")
        used = self._check_joined()
        self.file_of = {name: file for name, file in self._stored.items() if name not in used}
        self.file_of |= {n: self._stored[parts[0][0][0]] for n, parts in self._joined.items()}

    def _check_joined(self) -> set[str]:
        """Names of stored tensors that are joined.

        Requires that each of their rows is used once, and that tensors which are joined to one
        have the same shape except in dimension 0.
        """
        ranges: dict[str, list[tuple[int, int]]] = {}
        for name, parts in self._joined.items():
            first = parts[0][0][0]
            for stored, start, stop in chain.from_iterable(parts):
                if stored not in self._stored:
                    raise ConfigError(f"load_weights: {name} is made of {stored}, which is missing")
                ranges.setdefault(stored, []).append((start, stop))
                if self._stored_shape(stored)[1:] != self._stored_shape(first)[1:]:
                    raise LayoutError(
                        f"{stored} has the shape {self._stored_shape(stored)}, {first}, with "
                        f"which it makes {name}, has {self._stored_shape(first)}"
                    )
            if len(heights := {_height(rows) for rows in parts}) > 1:
                sizes = " and ".join(map(str, sorted(heights)))
                raise LayoutError(f"{name} is a stack of matrices of {sizes} rows: they must agree")
        for stored, found in ranges.items():
            rows = self._stored_shape(stored)[0]
            ends = [stop for _, stop in sorted(found)]
            if [0, *ends] != [*(start for start, _ in sorted(found)), rows]:
                raise LayoutError(
                    f"{stored} in {self._stored[stored]} has {rows} rows, of which {ends[-1]} are "
                    "to be used"
                )
        return set(ranges)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                from safetensors import SafetensorError, safe_open
            except ImportError as error:
                raise MissingDependencyError(
                    "load_weights reads safetensors: pip install 'internsp[weights]'"
                ) from error
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"load_weights: {path} cannot be read: {error}") from error
        return self._open[path]

    def _stored_shape(self, name: str) -> list[int]:
        found: list[int] = self._slice(name).get_shape()
        return found

    def _slice(self, name: str) -> Any:
        return self._file(self._stored[name]).get_slice(name)

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor, read from the file's header."""
        if name not in self._joined:
            return self._stored_shape(name)
        parts = self._joined[name]
        rows, others = _height(parts[0]), self._stored_shape(parts[0][0][0])[1:]
        return [len(parts), *others, rows] if name in self._stacks else [rows, *others]

    def read(self, name: str, rows: tuple[slice, ...]) -> Tensor:
        """Read the part ``rows`` of one tensor, all of it if empty."""
        if name in self._joined:
            box = rows or tuple(slice(0, size) for size in self.shape(name))
            if name not in self._stacks:
                return self._read_rows(self._joined[name][0], box)
            each, *turned = box
            matrices = (self._read_rows(part, turned[::-1]) for part in self._joined[name][each])
            return torch.stack([matrix.t() for matrix in matrices])
        values: Tensor = (
            self._slice(name)[rows] if rows else self._file(self._stored[name]).get_tensor(name)
        )
        return values

    def _read_rows(self, parts: Sequence[Rows], box: Sequence[slice]) -> Tensor:
        wanted, *others = box
        found, at = [], 0
        for stored, start, stop in parts:
            first, last = max(wanted.start - at, 0), min(wanted.stop - at, stop - start)
            if first < last:
                found.append(self._slice(stored)[(slice(start + first, start + last), *others)])
            at += stop - start
        return torch.cat(found)


def _height(parts: Sequence[Rows]) -> int:
    return sum(stop - start for _, start, stop in parts)


def _read_index(index: Path) -> dict[str, Path]:
    """The file of each tensor, from an index, which may only name files in its own folder."""
    try:
        table = json.loads(index.read_text())["weight_map"]
        found = {str(name): index.parent / str(file) for name, file in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"load_weights: {index} is no index of safetensors") from error
    for file in found.values():
        if file.parent != index.parent or file.name in ("", ".", ".."):
            raise ConfigError(f"load_weights: {index} names {file}, outside of its folder")
    return found


def _check_shapes(part: ModelPart, files: _Files, wanted: dict[str, str]) -> None:
    for entry in part.entries:
        name = wanted.get(entry.name)
        if name and files.shape(name) != list(entry.value.shape):
            raise _shape_error(part, entry, files.shape(name), f"{name} in {files.file_of[name]}")


def _shape_error(part: ModelPart, entry: Entry[Any], found: Any, where: str) -> LayoutError:
    return LayoutError(
        f"{entry.name} on rank {part.mesh.rank} has the shape {list(entry.value.shape)}, {where} "
        f"has {list(found)}"
    )


def _read_own(files: _Files, name: str, entry: Entry[Any]) -> Tensor:
    """This rank's rows of a parameter; all of a buffer."""
    value: Any = entry.value
    if entry.member is None:
        return files.read(name, ())
    local: Tensor = value._local_tensor
    sizes, starts = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    rows = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    return files.read(name, rows) if local.numel() else torch.empty_like(local)


def _scatter(part: ModelPart, source: Mapping[str, Tensor], wanted: dict[str, str]) -> list[str]:
    """Scatter one tensor after another from the first rank; returns names without values."""
    by_rank = part.exchange(sorted(wanted) if part.on_first_rank else [])
    given = set(by_rank[min(by_rank)])
    missing = []
    for entry in part.entries:
        if not entry.persistent:
            continue
        if entry.name not in given:
            missing.append(entry.name)
            continue
        full = None
        with _catch_error() as caught:
            if part.on_first_rank:
                full = source[wanted[entry.name]].detach()
                if full.shape != entry.value.shape:
                    raise _shape_error(part, entry, full.shape, "the value of this name")
        part.require_same(f"{entry.name} of {part.call}", caught[0] if caught else None)
        with part.collective_section():
            part.write(entry, part.scatter(entry, full, part.dtype(entry)), exact=True)
            part.free()
    return missing
