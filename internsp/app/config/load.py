"""The configuration of a run: all sections, and reading them from a TOML file and overrides.

All mistakes in the file and the overrides are found before any is reported. Nothing here imports
torch, so that ``internsp --help`` and reports of mistakes are fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo

from internsp.app.config.checks import combinations, machine
from internsp.app.config.errors import (
    Problem,
    listed_once,
    nearest_key,
    nearest_section,
    not_a_section,
    read_toml,
)
from internsp.app.config.sections import (
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    ReportConfig,
    SequenceSection,
    TrainConfig,
)
from internsp.config.model import ModelConfig
from internsp.config.sections import (
    ActivationCheckpointConfig,
    Section,
    WeightParallelConfig,
)
from internsp.config.words import (
    Schema,
    choices_of,
    in_words,
    listed,
    mistakes,
    schemas,
    table_class,
)
from internsp.errors import ConfigError

_MOST_UNKNOWN = 30  # number of unknown names for which the nearest valid name is searched


class Config(Section):
    """All sections. Invalid combinations raise at construction; :meth:`check` adds the mesh."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    weight_parallel: WeightParallelConfig = WeightParallelConfig()
    sequence: SequenceSection = SequenceSection()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> Config:
        mistakes = [str(problem) for problem in combinations(self)]
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    def degrees(self) -> dict[str, Any]:
        """Arguments for ``MeshShape`` and ``ParallelMesh.create``."""
        parallel, sequence = self.parallel, self.sequence
        found = parallel.model_dump(exclude={"device", "timeout_seconds", "optimizer_ranks"})
        # Models of transformers split only heads.
        heads = parallel.sequence if self.model.family == "hf" else max(self.model.heads, 1)
        rings = (n for n in range(1, parallel.sequence + 1) if parallel.sequence % n == 0)
        ring = sequence.ring or next(n for n in rings if parallel.sequence // n <= heads)
        own = {"zero": parallel.optimizer_ranks, "ring": ring, "near": sequence.fast_links}
        return {**found, **own}

    def check(self, world_size: int) -> list[str]:
        """All mistakes that depend on ``world_size`` ranks and on the file system, one a line."""
        return [str(problem) for problem in machine(self, world_size)]

    def to_toml(self) -> str:
        """The full configuration as TOML; :func:`load_config` of it gives an equal one."""
        dumped = self.model_dump()
        for values in dumped.values():
            values.update({k: "none" for k, v in values.items() if v is None})
            for key, tables in values.items():  # [[optimizer.groups]]: unset keys are left out
                if isinstance(tables, list | tuple) and all(isinstance(t, dict) for t in tables):
                    values[key] = [
                        {k: v for k, v in table.items() if v is not None} for table in tables
                    ]
        return tomli_w.dumps(dumped)


@cache
def sections() -> Mapping[str, type[Section]]:
    """Names and classes of the sections, in the order of the file."""
    return {name: _section_class(field) for name, field in Config.model_fields.items()}


def _section_class(field: FieldInfo) -> type[Section]:
    assert isinstance(field.annotation, type), "every field of Config is a section"
    return field.annotation


def load_config(
    path: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
) -> Config:
    """Read a TOML file, apply ``overrides`` and check everything together.

    Args:
        path: the file; sections and keys that it leaves out have their defaults.
        overrides: ``{"train": {"steps": 10}}`` or ``{"train.steps": 10}``; texts are converted
            to the key's type, as on the command line.
        world_size: number of ranks to check degrees against; ``None``: ``launch.processes``.

    Raises:
        ConfigError: lists all mistakes in the file and the overrides, one a line.
    """
    config, problems = read_config(path, overrides, world_size=world_size)
    if config is None:
        raise ConfigError(report(path, problems))
    return config


def report(path: str | Path | Mapping[str, Any], problems: list[Problem]) -> str:
    """A heading that counts the mistakes, then one mistake a line."""
    path = "the configuration" if isinstance(path, Mapping) else path
    return listed(str(path), problems)


def read_config(
    path: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
) -> tuple[Config | None, list[Problem]]:
    """Like :func:`load_config`, but returns mistakes; the config is ``None`` if there are any."""
    problems: list[Problem] = []
    values: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    data = path if isinstance(path, Mapping) else read_toml(Path(path), problems)
    for section, key, value in _known_keys(data or {}, problems, ""):
        values[section][key] = value
    for section, key, value in _known_keys(_nested(overrides or {}), problems, "--"):
        right, mistakes = _valid_values(section, {key: value}, "--")
        values[section].pop(key, None)
        values[section].update(right)
        problems += mistakes
    made: dict[str, Any] = {}
    for name, cls in sections().items():
        right, mistakes = _valid_values(name, values[name], "")
        made[name] = cls(**right)
        problems += mistakes
    # Combinations are checked only if all their keys are valid, or one mistake would show as two.
    wrong = {key for problem in problems for key in problem.keys}
    draft = Config.model_construct(None, **made)
    size = draft.launch.processes if world_size is None else world_size
    checks = [*combinations(draft), *machine(draft, size)] if data is not None else []
    problems += [problem for problem in checks if wrong.isdisjoint(problem.keys)]
    return (None, listed_once(problems)) if problems else (Config(**made), [])


def _nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``{"train.steps": 1}`` as ``{"train": {"steps": 1}}``; nested entries stay as they are."""
    result: dict[str, Any] = {}
    for name, value in overrides.items():
        # As on the command line, where --weight-parallel.overlap is --weight_parallel.overlap.
        section, dot, key = name.replace("-", "_").partition(".")
        if dot:
            result.setdefault(section, {})[key] = value
        elif isinstance(value, Mapping):
            result.setdefault(section, {}).update(value)
        else:
            result[section] = value
    return result


def _known_keys(
    data: Mapping[str, Any], problems: list[Problem], prefix: str
) -> Iterator[tuple[str, str, Any]]:
    """Yield (section, key, value) of the known keys; add unknown ones to ``problems``."""
    names = {name: tuple(cls.model_fields) for name, cls in sections().items()}
    for written, content in data.items():
        if len(problems) > _MOST_UNKNOWN:
            problems.append(Problem((), "and more; no further names are looked at"))
            return
        if not isinstance(content, Mapping):
            problems.append(not_a_section(written, names, prefix))
            continue
        section = written
        if written not in names:
            # Keys below a misspelled section are still read as keys of the nearest section.
            section, problem = nearest_section(written, tuple(content), names, prefix)
            problems.append(problem)
            if prefix:  # the problem of an option already names section and key
                continue
        for key, value in content.items() if section else ():
            if key in names[section]:
                yield section, key, value
            elif len(problems) > _MOST_UNKNOWN:
                break
            else:
                problems.append(nearest_key(section, key, names, prefix))


def _valid_values(
    name: str, values: Mapping[str, Any], prefix: str
) -> tuple[dict[str, Any], list[Problem]]:
    """The valid values of a section, converted to their types, and problems of the others."""
    if not values:
        return {}, []
    cls = sections()[name]
    # Overrides are often texts, which are converted to the key's type; a file has types already.
    texts = prefix and all(isinstance(value, (str, tuple)) for value in values.values())
    try:
        made = cls.model_validate(values, strict=False if texts else None)
        return {key: getattr(made, key) for key in values}, []
    except ValidationError as error:
        wrong = [
            Problem((f"{name}.{key}",), text, prefix) for key, text in mistakes(cls, values, error)
        ]
        broken = {problem.keys[0].rpartition(".")[2] for problem in wrong}
        right = {key: value for key, value in values.items() if key not in broken}
        return right, wrong


def documented() -> str:
    """A TOML file of every key with its default, each below a comment that describes it.

    A test checks that ``configs/documented.toml`` is this text.
    """
    lines = ["# Every key with its default. A config names only what differs."]
    for name, cls in sections().items():
        lines += ["", f"# {cls.__doc__}", f"[{name}]"]
        for key, schema in schemas(cls).items():
            choices = " | ".join(choices_of(schema))
            aside = f"  # {choices}" if choices else ""
            lines += [f"# {schema['description']}", f"{key} = {in_words(schema['default'])}{aside}"]
            if (table := table_class(cls, key)) is not None:
                lines += [f"# [[{name}.{key}]]", *map(_in_table, schemas(table).items())]
    return "\n".join(lines) + "\n"


def _in_table(item: tuple[str, Schema]) -> str:
    """A comment line for a key of a table."""
    key, schema = item
    choices = " | ".join(choices_of(schema))
    return f"#   {key}: {schema['description']}{f' ({choices})' if choices else ''}"
