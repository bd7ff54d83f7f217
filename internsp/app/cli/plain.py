"""The commands that do not train: ``init``, ``generate``, ``export``, ``report``.

They have their own options and read no configuration file. torch is not imported before the
command line is known to be right.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import tyro

from internsp.app.process.terminal import discard, printable, shows_escapes, write_lines
from internsp.errors import ConfigError, MachineError

RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


@dataclasses.dataclass(frozen=True)
class Init:
    """Write a commented configuration to begin with."""

    to: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The folder to write it into, which may exist, or a new file NAME.toml."""
    config: Annotated[str, tyro.conf.arg(metavar="NAME")] = "demo"
    """demo (two processes), single (one), pipeline_demo (four), moe_demo (experts over two),
    long_demo (long sequences over two), or documented (every key)."""

    def perform(self) -> list[str]:
        """Write the file; returns the lines to print.

        Raises:
            ConfigError: there is no such configuration, or a file of that name exists.
            OSError: the folder cannot be written.
        """
        folder = resources.files("internsp") / "bundled"
        found = (one for one in folder.iterdir() if one.name.endswith(".toml"))
        known = {one.name.removesuffix(".toml"): one for one in found}
        if self.config not in known:
            raise ConfigError(f"--config: no {self.config}; there are {', '.join(sorted(known))}")
        path = self.to if self.to.suffix == ".toml" else self.to / f"{self.config}.toml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(known[self.config].read_text(encoding="utf-8"))
        except FileExistsError:
            raise ConfigError(f"{path} is there already: name another folder or file") from None
        return [f"wrote {path}", f"next: internsp train {shlex.quote(str(path))}"]


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a run's weights as a folder that transformers loads: safetensors, config, tokenizer."""

    run: RunFolder
    """Folder of a run, whose newest checkpoint is used, or of a checkpoint."""
    to: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder to create."""

    def perform(self) -> list[str]:
        """Create the folder; returns the lines to print."""
        from internsp.app.checkpoint.export import export

        return export(self.run, self.to)


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a text with the model of a run, on one process, whatever mesh it was trained on."""

    run: RunFolder
    """Folder of a run, whose newest checkpoint is used, or of a checkpoint."""
    prompt: str = ""
    """The text to continue; empty: begin a document."""
    tokens: int = 200
    """Largest number of tokens; the document may end earlier."""
    temperature: float = 0.8
    """0: always the most likely token; above 1: more surprising ones."""
    top_k: int | None = None
    """Sample only from this many of the most likely tokens."""
    top_p: float | None = None
    """Sample only from the most likely tokens that together have this probability, 0 to 1."""
    seed: int = 0
    """Seed of sampling: the same seed gives the same text."""
    device: str | None = None
    """cpu, cuda, ...; none: the device of the run's configuration."""

    def perform(self) -> list[str]:
        """Generate; returns the text, without control characters for a terminal.

        Raises:
            ConfigError: an option is out of range, or there is no complete checkpoint.
        """
        wrong = {
            "tokens": self.tokens < 0,
            "temperature": self.temperature != 0 and not 1e-6 <= self.temperature < float("inf"),
            "top_k": self.top_k is not None and self.top_k < 1,
            "seed": abs(self.seed) >= 1 << 63,
            "top_p": self.top_p is not None and not 0 < self.top_p <= 1,
        }
        if mistakes := [name for name, found in wrong.items() if found]:
            lines = [f"--{name}: {getattr(self, name)} is out of range" for name in mistakes]
            raise ConfigError("\n  ".join(lines))
        from internsp.app.checkpoint.continuation import continuation

        text = continuation(
            self.run, self.prompt, self.tokens, temperature=self.temperature,
            top_k=self.top_k, top_p=self.top_p, seed=self.seed, device=self.device,
        )  # fmt: skip
        return [printable(text) if sys.stdout.isatty() else text]


@dataclasses.dataclass(frozen=True)
class Report:
    """Write a run's page again from its files, or print a comparison of several runs."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN")]
    """Folders of runs; of a single one, report.html is written again."""
    to: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The page to write (none: report.html in the folder of the run)."""

    def perform(self) -> list[str]:
        """Write the page, or compare; returns tables and the page's path as lines to print.

        Raises:
            ConfigError: a given folder is not the folder of a run.
            OSError: the page cannot be written.
        """
        from internsp.app.report.compare import differences, read_runs, table
        from internsp.app.report.page import load_report

        if not self.runs:
            raise ConfigError("give the folder of a run, or several")
        runs = read_runs(self.runs)
        if len(runs) > 1:
            if self.to is not None:
                raise ConfigError("--to: it is for the page of one run; leave it out")
            return [*_columns(table(runs)), "", *_columns(differences(runs))]
        path = self.to or self.runs[0] / "report.html"
        load_report(self.runs[0]).write(path)
        return [*_columns(table(runs)), f"wrote {path}"]


COMMANDS: dict[str, Any] = {
    "init": Init, "generate": Generate, "export": Export, "report": Report,
}  # fmt: skip


def perform(name: str, words: Sequence[str]) -> None:
    """Run the command ``name`` with its arguments.

    Raises:
        MachineError: a file cannot be read or written.
        SystemExit: from ``--help`` (0) and from a command line that tyro cannot parse (2).
    """
    plain_help()
    with printing():
        command = tyro.cli(
            COMMANDS[name], prog=f"internsp {name}", args=list(words), use_underscores=True
        )
    try:
        lines = command.perform()
    except OSError as error:
        raise MachineError(f"{name}: {error}") from error
    with printing():
        write_lines("\n".join(lines), sys.stdout)


def plain_help() -> None:
    """Have tyro write no escape sequences where none are wanted; it looks only at TERM."""
    options = getattr(tyro, "_experimental_options", {})  # so named in its own documents
    options["ansi_codes"] = shows_escapes(sys.stdout, os.environ)


@contextmanager
def printing() -> Iterator[None]:
    """A context that prints; ends the command with status 0 if nothing reads it (``| head``).

    Raises:
        MachineError: standard output takes no more (a full disk).
    """
    try:
        try:
            yield
        finally:  # after a SystemExit, too: --help
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)  # or Python would report the error again at its end
        raise SystemExit(0) from None
    except OSError as error:
        if error.filename is not None:  # of another file
            raise
        discard(sys.stdout)
        raise MachineError(f"standard output: {error.strerror}") from error


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows aligned in columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]
