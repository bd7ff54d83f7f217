"""Weights into a parallel model, without any rank that holds the whole of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from internsp.errors import ConfigError, LayoutError, MissingDependencyError
from internsp.whole import Buffer, Entry, Part

Rows = tuple[str, int, int]
"""Of a stored tensor its name, the first row and the one behind the last."""


@torch.no_grad()
def load_weights(
    model: nn.Module,
    source: str | Path | Mapping[str, Tensor] | None,
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    joined: Mapping[str, Sequence[Rows]] | None = None,
) -> tuple[list[str], list[str]]:
    """Fill parameters and persistent buffers of a model after ``parallelize``. Collective; blocks.

    From a folder every rank reads its own rows of each weight and nothing else; from the first rank
    of the stage one whole tensor at a time is scattered. Values are converted to the dtype of the
    parameter; a 16-bit one of a ``ZeroOptimizer`` gets its master unrounded.

    Args:
        source: a folder of ``safetensors`` (with ``*.safetensors.index.json`` or without), one such
            file, or, on the first rank, a mapping of whole tensors, read one by one (on other
            ranks: ``None``).
        strict: refuse parameters without values, and values without a parameter.
        rename: from a name in the model to that in ``source``; one to one. Of a tied weight one of
            its names is enough.
        joined: of a folder: tensors that are to be put together, by the name that they then have in
            ``source``: rows ``(name, start, stop)`` of stored tensors, one below the other. All
            rows of a stored tensor are to be used.

    Returns:
        Names of the model without values; names of ``source`` that were not used (of a mapping,
        known on the first rank alone).

    Raises:
        ConfigError: no such folder, or one whose files are damaged; missing or superfluous names;
            two names for one.
        LayoutError: a value of another shape.
        CollectiveError: another rank refused.
    """
    path = Path(source) if isinstance(source, str | Path) else None
    part = Part(model, True, f"load_weights({'a folder' if path else 'from the first rank'})")
    with _refusal() as refused:
        if path is None and part.first != (source is not None):
            raise ConfigError(
                f"rank {part.mesh.rank} of load_weights was given "
                f"{'nothing' if source is None else 'values'}: give a mapping to the first rank of "
                "a stage and None to the others, or a folder to all"
            )
        files = _Files(path, joined or {}) if path is not None else None
        names = list(files.place if files is not None else source or ())  # type: ignore[arg-type]
        wanted = _matched(part, names, rename or (lambda name: name))
        missing = [entry.name for entry in _all(part) if entry.name not in wanted]
        unused = [name for name in names if name not in set(wanted.values())]
        known = path is not None or part.first
        if strict and known and (missing or unused):
            raise ConfigError(_strictly(missing, unused))
        if files is not None:
            _check_shapes(part, files, wanted)
    part.come_to_rest(refused=refused[0] if refused else None)
    if files is not None:
        with files, part.collective():
            _read_own(part, files, wanted)
    else:
        missing = _scatter(part, source or {}, wanted)  # type: ignore[arg-type]
    for communicator in part.communicators:
        communicator.invalidate()
    return missing, unused


def stored_values(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of a folder of ``safetensors``, whole."""
    files = _Files(path)
    with files:
        return {name: files.read(name, ()) for name in names}


def stored_shapes(path: Path) -> dict[str, list[int]]:
    """Names and shapes of a folder of ``safetensors``, from the files' headers alone.

    Raises:
        ConfigError: it has none, its index names a file that is not there, or one is damaged.
    """
    files = _Files(path)
    with files:
        return {name: files.shape(name) for name in files.place}


@contextmanager
def _refusal() -> Iterator[list[Exception]]:
    """What is raised inside is kept: the other ranks are to know of it first."""
    found: list[Exception] = []
    try:
        yield found
    except Exception as error:  # noqa: BLE001 - raised by Part.come_to_rest
        found.append(error)


def _matched(part: Part, names: list[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Of each entry that has a value its name in the source."""
    there, taken, found = set(names), dict[str, str](), dict[str, str]()
    for entry in _all(part):
        for name in entry.names:
            given = rename(name)
            if given in there:
                if taken.setdefault(given, entry.name) != entry.name:
                    raise ConfigError(f"{given} is meant for {taken[given]} and for {entry.name}")
                found.setdefault(entry.name, given)
    for entry in part.entries:  # of a weight that other stages have, too: by the model's name
        if entry.member.tied and entry.name not in found:
            given = rename(entry.name.removesuffix(entry.member.name) + entry.member.tied)
            if given in there:
                found[entry.name] = given
    for buffer in part.buffers:
        if not buffer.persistent:
            found.setdefault(buffer.name, "")
    return found


def _strictly(missing: list[str], unused: list[str]) -> str:
    def listed(names: list[str]) -> str:
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    parts = []
    if missing:
        parts.append(f"there are no values for {listed(missing)}")
    if unused:
        parts.append(f"the model has no place for {listed(unused)}")
    return f"load_weights: {'; '.join(parts)}. Map names with rename=, or set strict=False"


class _Files:
    """The safetensors files of a folder, opened as they are needed.

    Attributes:
        place: the file of each tensor; of one that is joined, of its first rows.
    """

    def __init__(self, path: Path, joined: Mapping[str, Sequence[Rows]] | None = None) -> None:
        self._open: dict[Path, Any] = {}
        self._joined = joined or {}
        self._stored: dict[str, Path] = {}
        if not path.exists():
            raise ConfigError(f"load_weights: there is no {path}")
        indexes = sorted(path.glob("*.safetensors.index.json")) if path.is_dir() else []
        if len(indexes) > 1:
            raise ConfigError(f"load_weights: {path} has several indexes: give one folder for each")
        if indexes:
            self._stored = _indexed(indexes[0])
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
            away = {name for name, own in self._stored.items() if own == file} - set(held)
            if away:
                raise ConfigError(f"load_weights: {file} has no {min(away)}, which the index says")
        used = self._used()
        self.place = {name: file for name, file in self._stored.items() if name not in used}
        self.place |= {n: self._stored[pieces[0][0]] for n, pieces in self._joined.items()}

    def _used(self) -> set[str]:
        """Stored tensors that are joined; each of their rows once, and alike in the others."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for name, pieces in self._joined.items():
            for stored, start, stop in pieces:
                if stored not in self._stored:
                    raise ConfigError(f"load_weights: {name} is made of {stored}, which is missing")
                ranges.setdefault(stored, []).append((start, stop))
                if self._own_shape(stored)[1:] != self._own_shape(pieces[0][0])[1:]:
                    raise LayoutError(
                        f"{stored} has the shape {self._own_shape(stored)}, {pieces[0][0]}, with "
                        f"which it makes {name}, has {self._own_shape(pieces[0][0])}"
                    )
        for stored, found in ranges.items():
            rows = self._own_shape(stored)[0]
            ends = [stop for _, stop in sorted(found)]
            if [0, *ends] != [*(start for start, _ in sorted(found)), rows]:
                raise LayoutError(
                    f"{stored} in {self._stored[stored]} has {rows} rows, of which {ends[-1]} are "
                    "to be used"
                )
        return set(ranges)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for opened in self._open.values():
            opened.__exit__(None, None, None)
        self._open.clear()

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                from safetensors import SafetensorError, safe_open
            except ImportError as error:
                raise MissingDependencyError(
                    "load_weights reads safetensors: pip install 'internsp[weights]'"
                ) from error
            try:
                self._open[path] = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"load_weights: {path} cannot be read: {error}") from error
        return self._open[path]

    def _own_shape(self, name: str) -> list[int]:
        found: list[int] = self._slice(name).get_shape()
        return found

    def _slice(self, name: str) -> Any:
        return self._file(self._stored[name]).get_slice(name)

    def shape(self, name: str) -> list[int]:
        """Read from the file's header."""
        if name not in self._joined:
            return self._own_shape(name)
        pieces = self._joined[name]
        rows = sum(stop - start for _, start, stop in pieces)
        return [rows, *self._own_shape(pieces[0][0])[1:]]

    def read(self, name: str, rows: tuple[slice, ...]) -> Tensor:
        """A part of one tensor, from the disk to memory of its own."""
        if name in self._joined:
            return self._read_joined(name, rows)
        whole: Tensor = (
            self._slice(name)[rows] if rows else self._file(self._stored[name]).get_tensor(name)
        )
        return whole

    def _read_joined(self, name: str, rows: tuple[slice, ...]) -> Tensor:
        wanted, *others = rows or (slice(0, self.shape(name)[0]),)
        found, at = [], 0
        for stored, start, stop in self._joined[name]:
            first, last = max(wanted.start - at, 0), min(wanted.stop - at, stop - start)
            if first < last:
                found.append(self._slice(stored)[(slice(start + first, start + last), *others)])
            at += stop - start
        return torch.cat(found)


def _indexed(index: Path) -> dict[str, Path]:
    """Of each tensor its file, by an index, which may name files of its own folder alone."""
    try:
        table = json.loads(index.read_text())["weight_map"]
        found = {str(name): index.parent / str(file) for name, file in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"load_weights: {index} is no index of safetensors") from error
    for file in found.values():
        if file.parent != index.parent or file.name in ("", ".", ".."):
            raise ConfigError(f"load_weights: {index} names {file}, outside of its folder")
    return found


def _check_shapes(part: Part, files: _Files, wanted: dict[str, str]) -> None:
    for entry in _all(part):
        name = wanted.get(entry.name)
        if name and files.shape(name) != list(_shape(entry)):
            raise _misshapen(part, entry, files.shape(name), f"{name} in {files.place[name]}")


def _all(part: Part) -> list[Entry | Buffer]:
    return [*part.entries, *part.buffers]


def _shape(entry: Entry | Buffer) -> torch.Size:
    return entry.member.parameter.shape if isinstance(entry, Entry) else entry.value.shape


def _misshapen(part: Part, entry: Entry | Buffer, found: Any, where: str) -> LayoutError:
    return LayoutError(
        f"{entry.name} on rank {part.mesh.rank} has the shape {list(_shape(entry))}, {where} has "
        f"{list(found)}"
    )


def _read_own(part: Part, files: _Files, wanted: dict[str, str]) -> None:
    for _, entries in part.units():
        for entry in entries:
            if name := wanted.get(entry.name):
                parameter: Any = entry.member.parameter
                sizes, starts = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                pairs = zip(starts, sizes, strict=True)
                rows = tuple(slice(start, start + size) for start, size in pairs)
                local = parameter._local_tensor
                own = files.read(name, rows) if local.numel() else torch.empty_like(local)
                part.masters.write(entry.member, own.to(local.device), exact=True)
        part.masters.forget()
    for buffer in part.buffers:
        if name := wanted.get(buffer.name):
            _fill(part, buffer, files.read(name, ()))


def _scatter(part: Part, source: Mapping[str, Tensor], wanted: dict[str, str]) -> list[str]:
    """One tensor after the other, from the first rank. Returns the entries without values."""
    meeting, topic = part.communicators[0].meeting, "whole parameters"
    said = meeting.meet(topic, json.dumps(sorted(wanted)) if part.first else "[]")
    given = set(json.loads(said[min(said)]))
    dense = part.mesh.param_mesh
    missing = []
    for entry in _all(part):
        if isinstance(entry, Buffer) and not entry.persistent:
            continue
        if entry.name not in given:
            missing.append(entry.name)
            continue
        whole = torch.empty(0)
        with _refusal() as refused:
            if part.first:
                whole = source[wanted[entry.name]].detach()
                if whole.shape != _shape(entry):
                    raise _misshapen(part, entry, whole.shape, "the value of this name")
        part.agree(f"{entry.name} of {part.what}", refused[0] if refused else None)
        form: Any = {"dtype": _dtype(part, entry), "device": part.mesh.device}
        sent = whole.to(**form) if part.first else torch.empty(_shape(entry), **form)
        del whole
        with part.collective():
            if isinstance(entry, Entry):
                parameter: Any = entry.member.parameter
                mesh, places = parameter.device_mesh, parameter.placements
                own = distribute_tensor(sent, mesh, places)._local_tensor
                part.masters.write(entry.member, own, exact=True)
                part.masters.forget()
            else:
                every = distribute_tensor(sent, dense, [Replicate()] * dense.ndim)
                _fill(part, entry, every._local_tensor)
        del sent
    return missing


def _dtype(part: Part, entry: Entry | Buffer) -> torch.dtype:
    return part.masters.dtype(entry.member) if isinstance(entry, Entry) else entry.value.dtype


def _fill(part: Part, buffer: Buffer, value: Tensor) -> None:
    if not buffer.value.is_meta:
        buffer.value.copy_(value)
        return
    made = value.to(part.mesh.device, buffer.value.dtype, copy=True)
    for module, name in buffer.places:
        module._buffers[name] = made
    buffer.value = made
