"""The commands that train nothing: ``init``, ``generate``, ``export``, ``report``.

Their options are their own, and none of a configuration. Nothing here imports torch before the
command line is known to be right.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import tyro

from internsp.errors import ConfigError, InternspError, MachineError
from internsp.terminal import columns, draws, harmless, say

RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


@dataclasses.dataclass(frozen=True)
class Init:
    """Write a commented configuration to begin with."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The folder to write it into; it may exist."""
    config: Annotated[str, tyro.conf.arg(metavar="NAME")] = "demo"
    """demo (two processes), single (one), pipeline_demo (four), long_demo (long sequences over
    two), or documented (every key)."""

    def perform(self) -> list[str]:
        """Write the file; returns what to print.

        Raises:
            ConfigError: there is no such configuration, or a file of its name already.
            MachineError: the folder cannot be written.
        """
        known = {one.name.removesuffix(".toml"): one for one in _bundled()}
        if self.config not in known:
            raise ConfigError(f"--config: no {self.config}; there are {', '.join(sorted(known))}")
        path = self.folder / f"{self.config}.toml"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(known[self.config].read_text(encoding="utf-8"))
        except FileExistsError:
            raise ConfigError(f"{path} is there already: name another folder") from None
        except OSError as error:
            raise MachineError(f"{path}: {error.strerror}") from error
        return [f"wrote {path}", f"next: internsp train {path}"]


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a run's weights as a folder that transformers loads: safetensors, config, tokenizer."""

    run: RunFolder
    """A run's folder, of which the newest checkpoint is taken, or a checkpoint's."""
    to: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder to make."""

    def perform(self) -> list[str]:
        """Make the folder; returns what to print."""
        from internsp.train.export import export

        try:
            return export(self.run, self.to)
        except OSError as error:
            raise MachineError(f"--to: {error}") from error


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a text by what a run has learned, on one process, whatever mesh has trained it."""

    run: RunFolder
    """A run's folder, of which the newest checkpoint is taken, or a checkpoint's."""
    prompt: str = ""
    """The text to continue; empty: the beginning of a document."""
    tokens: int = 200
    """Tokens at most; a document may end before."""
    temperature: float = 0.8
    """0: always the most likely token; above 1: more surprising ones."""
    top_k: int | None = None
    """Draw among so many of the most likely tokens."""
    top_p: float | None = None
    """Draw among the most likely tokens that together have this probability, from 0 to 1."""
    seed: int = 0
    """Of the draw: the same seed gives the same text."""
    device: str | None = None
    """cpu, cuda, ...; none: as the run's configuration says."""

    def perform(self) -> list[str]:
        """Write the text as it comes.

        Raises:
            ConfigError: an option makes no sense, or there is no whole checkpoint.
        """
        wrong = {
            "tokens": self.tokens < 0,
            "temperature": not 0 <= self.temperature < float("inf"),
            "top_k": self.top_k is not None and self.top_k < 1,
            "top_p": self.top_p is not None and not 0 < self.top_p <= 1,
        }
        if mistakes := [name for name, found in wrong.items() if found]:
            told = [f"--{name}: {getattr(self, name)} is out of range" for name in mistakes]
            raise ConfigError("\n  ".join(told))
        from internsp.train.continuation import continuation

        continuation(
            self.run, self.prompt, self.tokens, _say, temperature=self.temperature,
            top_k=self.top_k, top_p=self.top_p, seed=self.seed, device=self.device,
        )  # fmt: skip
        return [""]


@dataclasses.dataclass(frozen=True)
class Report:
    """Write a run's page again from its files, or one that has several runs side by side."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN")]
    """Folders of runs; one alone gets its report.html anew."""
    to: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The page to write (of several runs; none: compare.html in the current folder)."""

    def perform(self) -> list[str]:
        """Write the page; returns a table and the page's path.

        Raises:
            ConfigError: what is given is not the folder of a run.
            MachineError: the page cannot be written.
        """
        from internsp.report.compare import differences, read_runs, table, write_comparison
        from internsp.report.page import kept

        if not self.runs:
            raise ConfigError("give the folder of a run, or several")
        runs = read_runs(self.runs)
        path = self.to
        try:
            if len(runs) == 1:
                path = path or self.runs[0] / "report.html"
                kept(self.runs[0]).write(path)
                return [*_columns(table(runs)), f"wrote {path}"]
            path = write_comparison(runs, path or Path("compare.html"))
        except OSError as error:
            raise MachineError(f"{path}: {error.strerror}") from error
        return [*_columns(table(runs)), "", *_columns(differences(runs)), f"wrote {path}"]


COMMANDS: dict[str, Any] = {
    "init": Init, "generate": Generate, "export": Export, "report": Report,
}  # fmt: skip


def perform(name: str, words: Sequence[str]) -> int:
    """Run the command ``name`` with its arguments; returns its exit status.

    Raises:
        SystemExit: from ``--help`` (0) and from a command line that has no sense (2).
    """
    plain_help()
    with readable_in_part():
        command = tyro.cli(
            COMMANDS[name], prog=f"internsp {name}", args=list(words), use_underscores=True
        )
    try:
        lines = command.perform()
        printed(lambda: say("\n".join(lines), sys.stdout))
    except InternspError as error:
        say(f"internsp: {error}", sys.stderr)
        return error.exit_status
    return 0


def plain_help() -> None:
    """Have tyro write no escape sequences where none are wanted: it looks at TERM alone."""
    options = getattr(tyro, "_experimental_options", {})  # so named in its own documents
    options["ansi_codes"] = draws(sys.stdout, os.environ)


@contextmanager
def readable_in_part() -> Iterator[None]:
    """Ends the command with status 0 where the reader of its output has gone (``| head``)."""
    try:
        try:
            yield
        finally:  # after a SystemExit, too: --help
            sys.stdout.flush()
    except BrokenPipeError:
        _silence()
        raise SystemExit(0) from None


def printed(write: Callable[[], None]) -> None:
    """Write to standard output, whose disk may be full and whose reader may go."""
    try:
        with readable_in_part():
            write()
    except OSError as error:
        _silence()
        raise MachineError(f"standard output: {error.strerror}") from error


def _silence() -> None:
    """What is still buffered goes nowhere, or Python would complain of it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their cells below each other; on a narrow terminal, a cell a line."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    if sum(widths) + 2 * len(widths) <= (columns(sys.stdout) or sys.maxsize):
        cells = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
        return ["  ".join(row).rstrip() for row in cells]
    names, *content = rows
    lines: list[str] = []
    for first, *others in content:
        lines += [first, *(f"  {n}: {c}" for n, c in zip(names[1:], others, strict=True))]
    return lines


def _say(text: str) -> None:
    """Write at once, without an end of line; to a terminal, nothing that it would obey."""
    shown = harmless(text) if sys.stdout.isatty() else text
    printed(lambda: print(shown, end=""))


def _bundled() -> list[Any]:
    """The configurations that come with the package."""
    folder = resources.files("internsp") / "bundled"
    return [one for one in folder.iterdir() if one.name.endswith(".toml")]
