"""The ``internsp`` command: ``train`` and ``plan``; the others are in
:mod:`internsp.app.cli.plain`.

tyro parses the options, which are made from the sections of :mod:`internsp.app.config`, as text.
The configuration then converts and checks them together with the file, so that all mistakes are
reported at once. torch is not imported before the command line is known to be right.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import tyro

from internsp.app.cli import plain
from internsp.app.cli.plain import printing
from internsp.app.config import Config, read_config, sections
from internsp.app.config.errors import Problem
from internsp.app.process.environment import launched
from internsp.app.process.terminal import write_lines
from internsp.base.names import nearest
from internsp.base.version import __version__
from internsp.config.words import help_of, in_words, keys_of, listed, metavar, table_class
from internsp.errors import ConfigError, InternspError, MachineError

USAGE_ERROR = 2

File = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG.toml")]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Print whether a step fits, its bytes and its memory; runs nothing."""

    config: File
    """The configuration; internsp init --config documented writes one of every key."""
    picture: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """SVG file for a picture of a pipeline's schedule."""
    schedule: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File for the mesh by rank and every action of the step."""
    longest: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None
    """Memory of a rank ("80 GiB"): print the longest sequence that fits, and its settings."""
    host_memory: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None
    """With --longest: host memory of a rank (none: as much as is needed)."""
    device: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Predict seconds on this device: a100-80, h100-sxm, h200, b200, gb200, cpu and others."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Plan for so many devices (default: launch.processes, or the launcher's ranks)."""
    device_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """TOML file of more devices, in the form of internsp's own."""
    search: bool = False
    """Search the layout that takes least seconds on --devices of --device."""
    write: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """With --search: file for the best configuration. With --calibrate: file for the device."""
    calibrate: Annotated[
        tuple[Path, ...] | None, tyro.conf.arg(metavar="DIR...", help_behavior_hint="")
    ] = None
    """Fit --device to the steps that these runs measured, and write it to a file."""


@dataclasses.dataclass(frozen=True)
class _Train:
    """Train a model: joins torchrun's ranks, or starts launch.processes local ones."""

    config: File
    """The configuration; internsp init --config documented writes one of every key."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder for the run's files (default: runs/<train.name>)."""
    resume: Annotated[str | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    """Checkpoint to resume from, auto or never; the same as --checkpoint.resume."""


_COMMANDS = {"train": _Train, "plan": _Plan}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 2 for mistakes of usage or configuration.

    Args:
        argv: arguments without the program's name; ``None``: those of this process.

    Raises:
        SystemExit: from ``--help`` (0) and from a command line that tyro cannot parse (2).
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except InternspError as error:
        lines = [f"internsp: {error}", *getattr(error, "__notes__", ())]
        write_lines("\n".join(lines), sys.stderr)
        return error.exit_status


def _run(words: list[str]) -> int:
    if words and words[0] in plain.COMMANDS:
        plain.perform(words[0], words[1:])
        return 0
    _require_known(words)
    try:
        with printing():
            if words[:1] == ["--version"]:
                print(f"internsp {__version__}")
                return 0
            command, unknown = _parse(words)
    except (ImportError, OSError) as error:  # tyro's, which writes a shell's completion script
        raise MachineError(f"{words[0]}: {error}") from error
    given = {name: getattr(command, name) for name in sections()}
    if getattr(command, "resume", None) is not None:
        given["checkpoint"] = {**given["checkpoint"], "resume": command.resume}
    around = launched(os.environ, joins=isinstance(command, _Train))
    os.environ.update(around.variables)
    devices = getattr(command, "devices", None)
    if devices is not None and devices < 1:  # the degrees of no configuration divide it
        raise ConfigError(f"--devices {devices}: give a number from 1 on")
    size = devices or around.world_size
    searched = getattr(command, "search", False)  # not the file's degrees
    config, problems = read_config(
        command.config, _with_unknown(given, unknown), world_size=None if searched else size
    )
    problems = [*around.problems, *problems, *_stray(command, unknown)]
    if config is None or problems:
        if around.rank:  # one process of a run tells them
            return USAGE_ERROR
        raise ConfigError(listed(str(command.config), problems))
    if isinstance(command, _Train):
        return _train(config, command.output or Path("runs") / config.train.name, around.rank)
    with printing():
        _plan(command, config, size or config.launch.processes)
    return 0


def _check_options(command: _Plan) -> None:
    """Options of a question that is not asked, or two questions, are no slip to pass over."""
    asked = {
        "--calibrate": command.calibrate, "--search": command.search or None,
        "--longest": command.longest,
    }  # fmt: skip
    given = [option for option, value in asked.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: each has an answer of its own; give one")
    there = {*given, "--device"} if command.device else {*given}
    for option, value, *of in (
        ("--write", command.write, "--search", "--calibrate"),
        ("--host-memory", command.host_memory, "--longest"),
        ("--device-file", command.device_file, "--device"),
    ):
        if value is not None and there.isdisjoint(of):
            raise ConfigError(f"{option}: it belongs to {' or '.join(of)}; give that, too")
    for option, path in (("--picture", command.picture), ("--schedule", command.schedule)):
        if path is not None and given:
            raise ConfigError(f"{option}: {given[0]} prints no schedule; leave one of them out")


def _plan(command: _Plan, config: Config, size: int) -> None:
    """Print the plan for ``size`` ranks, or what its options find."""
    _check_options(command)
    known: list[Any] = []
    if command.device is not None:
        from internsp.app.plan.devices import device_named, on_device

        device = device_named(command.device, command.device_file)
        config, known = on_device(config, device), [device]
    if command.calibrate is not None:
        from internsp.app.plan.calibrate import print_calibration

        if not known or not command.calibrate:
            raise ConfigError("--calibrate: give folders of runs, and --device NAME to be fitted")
        print_calibration(config, size, known[0], command.calibrate, command.write)
    elif command.search:
        from internsp.app.plan.searched import print_search

        if not known:
            raise ConfigError("--search: give --device NAME, on which seconds are compared")
        print_search(config, size, known[0], write=command.write)
    elif command.longest is not None:
        from internsp.app.plan.longest import print_longest

        print_longest(config, size, command.longest, command.host_memory)
    else:
        from internsp.app.plan.screen import print_plan

        print_plan(config, size, None, command.picture, command.schedule, *known)


def _train(config: Config, output: Path, rank: int | None) -> int:
    from internsp.app.launch.preflight import check_before_start, check_joined

    if rank is None:
        check_before_start(config, output)
        from internsp.app.launch.launch import start
        from internsp.app.train.run import train

        return start(train, config, output)
    import torch
    from torch.distributed.elastic.multiprocessing.errors import record

    from internsp.app.process.environment import computing_threads
    from internsp.app.process.lifetime import end_with_launcher, stopped_ranks
    from internsp.app.process.stop import StopRequest, status_of

    end_with_launcher()
    check_joined(config, output, rank)
    from internsp.app.train.run import train

    torch.set_num_threads(computing_threads())
    with StopRequest() as stop:
        try:
            record(train)(config, output, stop=stop)
        except Exception as error:
            for number in stopped_ranks(os.getppid()):  # torchrun sees only the rank that waited
                message = f"rank {number} is stopped (SIGSTOP or a debugger)"
                print(f"internsp: {message}", file=sys.stderr)
            if getattr(error, "exit_status", 1) != USAGE_ERROR:
                if where := _where(output, rank):
                    print(where, file=sys.stderr)
            raise
    return status_of(stop.number)


def _where(output: Path, rank: int) -> str:
    """For a failing rank of torchrun: where it was, and which other ranks ended before it.

    Empty if the run had not begun. Other ranks are listed only if all ranks are on this machine.
    """
    from internsp.app.launch.launch import advice
    from internsp.app.process.lifetime import ended
    from internsp.app.process.rank_log import last_seen, log_path

    size, local = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    processes = {rank: os.getpid()}
    for other in range(int(size)) if size == local else ():
        seen = last_seen(log_path(output, other))
        if other != rank and seen is not None and ended(seen.process):
            processes = {other: seen.process, **processes}
    again = "torchrun does so by itself (--max-restarts), or by the same command"
    text = advice(output, processes, again)
    return f"internsp:\n{text}" if text else ""


def _require_known(words: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` if there is no such command."""
    if not words or words[0].startswith("-") or words[0] in _COMMANDS:
        return
    *others, last = known = [*_COMMANDS, *plain.COMMANDS]
    near = nearest(words[0], known)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(others)} and {last}"
    raise ConfigError(f"unknown command {words[0]}; {hint}")


def _parse(words: list[str]) -> tuple[Any, list[str]]:
    """Parse the command with its options; also returns the words that tyro does not know."""
    plain.plain_help()
    train, plan = (
        tyro.conf.subcommand(name, prefix_name=False, constructor=_with_sections(command))
        for name, command in _COMMANDS.items()
    )
    shown: Any = Annotated[_Train, train] | Annotated[_Plan, plan]  # type: ignore[arg-type]
    for name, other in plain.COMMANDS.items():  # for --help: perform() parses them
        shown |= Annotated[other, tyro.conf.subcommand(name, prefix_name=False)]
    return tyro.cli(
        shown,
        prog="internsp",
        description="Train transformers with Intern sequence parallelism.",
        args=words,
        return_unknown_args=True,
        use_underscores=True,
    )


def _with_sections(command: type) -> Any:
    """``command`` with one more field for each section: a dict of the given options, as text."""
    fields: list[Any] = [
        (name, _options(name), dataclasses.field(default_factory=dict)) for name in sections()
    ]
    made = dataclasses.make_dataclass(command.__name__, fields, bases=(command,), frozen=True)
    made.__doc__ = command.__doc__
    return made


def _options(section: str) -> Any:
    keys: dict[str, Any] = {}
    cls = sections()[section]
    for key, field in keys_of(cls).items():
        if table_class(cls, key) is not None:  # tables can be given only in a file
            continue
        default = in_words(field.get_default()).replace('"', "")
        form = metavar(field.annotation)
        shown = tyro.conf.arg(
            help=help_of(field), metavar=form, help_behavior_hint=f"(default: {default})"
        )
        kind: Any = tuple[str, ...] if " " in form else str
        keys[key] = Annotated[kind, shown]
    return TypedDict(section, keys, total=False)  # type: ignore[operator]


def _with_unknown(given: dict[str, Any], unknown: Sequence[str]) -> dict[str, Any]:
    """Add misspelled options as unknown keys, which the configuration reports with the rest."""
    result = {name: dict(values) for name, values in given.items()}
    for word in unknown:
        section, dot, key = _name(word).partition(".")
        if word.startswith("--") and dot:
            result.setdefault(section, {})[key] = ""
    return result


def _stray(command: Any, unknown: Sequence[str]) -> list[Problem]:
    """Problems of words that are neither an option nor the value of a misspelled one."""
    problems = []
    own = [f.name for f in dataclasses.fields(command) if f.name not in (*sections(), "config")]
    full = {key: f"{name}.{key}" for name, cls in sections().items() for key in cls.model_fields}
    for before, word in zip(["", *unknown], unknown, strict=False):
        name = _name(word)
        if word.startswith("--") and "." not in name:
            near = nearest(name, [*own, *full])
            hint = f"; did you mean --{full.get(near, near)}?" if near else ""
            if name in ("output", "resume"):
                hint = " of plan, which writes and reads no run"
            problems.append(Problem((name,), f"unknown option{hint}", "--"))
        elif not word.startswith("--") and (not before.startswith("--") or "=" in before):
            problems.append(Problem((), f"unexpected argument: {word}"))
    return problems


def _name(word: str) -> str:
    return word.removeprefix("--").partition("=")[0].replace("-", "_")
