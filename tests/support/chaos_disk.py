"""Simulates a disk after a crash: records the file operations of a save and replays some of them.

If a process is killed, all operations up to that moment are on disk. If the machine loses power,
less is: of a file the data that was flushed (fsync), and any part of the rest, or zeros; of a
folder the entries that it had when it was flushed, and some of the later changes, in order but
independently for each folder. This is all that POSIX promises; most file systems keep more.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.chaos_files import Files

Operation = tuple[str, tuple[Any, ...]]


class Recorder(Files):
    """Records every operation of this process below ``folder``, inside :meth:`recording`.

    Attributes:
        done: operations by name, with paths relative to ``folder``.
    """

    def __init__(self, folder: Path, faults: list[dict[str, Any]], log: Path) -> None:
        super().__init__(faults, str(log), str(folder))
        self.done: list[Operation] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which operations are counted and recorded."""
        import builtins
        import io

        kept = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}
        opened = io.open
        self.install()
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(os, name, value)
            io.open = builtins.open = opened

    def around(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Perform an operation, and record it if it did not fail."""
        operation = self._named(call, args, options)
        result = super().around(call, *args, **options)
        self.done.append(operation)
        return result

    def _named(
        self, call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Operation:
        name = call.__name__
        if name == "write":
            data = args[0].encode() if isinstance(args[0], str) else bytes(args[0])
            return name, (self._inside(call.__self__.name), data)  # type: ignore[attr-defined]
        if name == "fsync":
            return name, (self._inside(os.readlink(f"/proc/self/fd/{args[0]}")),)
        if name == "symlink":
            return name, (os.fspath(args[0]), self._inside(args[1]))
        where = options.get("dir_fd")
        above = "" if where is None else os.readlink(f"/proc/self/fd/{where}")
        paths = args[: 2 if name in ("rename", "replace") else 1]
        return name, tuple(self._inside(os.path.join(above, path)) for path in paths)

    def _inside(self, path: Any) -> str:
        return os.path.relpath(os.path.realpath(os.path.dirname(path)), self._folder) + (
            "/" + os.path.basename(path)
        )


@dataclass(eq=False)
class File:
    """A file: its contents as a process reads them, and the part that was flushed."""

    data: bytes = b""
    flushed: bytes = b""


@dataclass(eq=False)
class Link:
    """A symbolic link."""

    target: str


@dataclass(eq=False)
class Folder:
    """A folder: its entries, the flushed entries, and the changes since the flush.

    Attributes:
        changes: for each change the names that it removes and the entries that it adds, in order.
    """

    names: dict[str, Any] = field(default_factory=dict)
    flushed: dict[str, Any] = field(default_factory=dict)
    changes: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)

    def change(self, gone: list[str], new: dict[str, Any]) -> None:
        """One atomic change: all of it is visible or nothing."""
        self.changes.append((gone, new))
        _change(self.names, gone, new)


def _change(names: dict[str, Any], gone: list[str], new: dict[str, Any]) -> None:
    for name in gone:
        names.pop(name, None)
    names.update(new)


def played(operations: list[Operation]) -> Folder:
    """The disk after ``operations`` on an empty folder."""
    root = Folder()
    for name, args in operations:
        _play(root, name, args)
    return root


def _play(root: Folder, name: str, args: tuple[Any, ...]) -> None:
    if name == "symlink":
        above, last = _find(root, args[1])
        above.change([], {last: Link(args[0])})
        return
    above, last = _find(root, args[0])
    if name == "mkdir":
        above.change([], {last: Folder()})
    elif name == "open":
        if last not in above.names:
            above.change([], {last: File()})
        else:  # replace the contents
            above.names[last].data = b""
    elif name == "write":
        above.names[last].data += args[1]
    elif name in ("unlink", "rmdir"):
        above.change([last], {})
    elif name in ("rename", "replace"):
        below, other = _find(root, args[1])
        assert below is above, "no save moves anything between folders"
        above.change([last], {other: above.names[last]})
    elif name == "fsync":
        node = above.names[last] if last != "." else above
        if isinstance(node, File):
            node.flushed = node.data
        else:
            node.flushed, node.changes = dict(node.names), []
    else:
        raise AssertionError(f"{name} is not known")


def _find(root: Folder, path: str) -> tuple[Folder, str]:
    *above, last = [part for part in path.split("/") if part != "."] or ["."]
    if not above and last == "..":  # of the root itself
        return root, "."
    node = root
    for part in above:
        if part == "..":  # the root by its own name
            return root, "."
        node = node.names[part]
    return node, last


def write_out(node: Folder, path: Path, power: random.Random | None) -> None:
    """Turn ``path`` into what a process finds after the crash; ``power``: power was lost."""
    path.mkdir()
    names = dict(node.names)
    if power is not None:
        names = dict(node.flushed)
        for gone, new in node.changes[: power.randint(0, len(node.changes))]:
            _change(names, gone, new)
    for name, child in names.items():
        if isinstance(child, Link):
            (path / name).symlink_to(child.target)
        elif isinstance(child, Folder):
            write_out(child, path / name, power)
        else:
            (path / name).write_bytes(_left(child, power))


def _left(file: File, power: random.Random | None) -> bytes:
    if power is None:
        return file.data
    if file.data == file.flushed:
        return file.flushed
    kept = file.data[: power.randint(len(file.flushed), max(len(file.data), len(file.flushed)))]
    return power.choice([file.flushed, kept, kept[: len(file.flushed)].ljust(len(kept), b"\0")])
