"""The configuration of a run: all sections, and reading them from a TOML file and overrides.

All mistakes in the file and the overrides are found before any is reported. Nothing here imports
torch, so that ``internsp --help`` and reports of mistakes are fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError, model_validator

from internsp.app.config.checks import combinations, machine
from internsp.app.config.errors import (
    Problem,
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
from internsp.config.hf_folder import sizes
from internsp.config.keys import FROM_FILE
from internsp.config.model import ModelConfig
from internsp.config.sections import (
    ActivationCheckpointConfig,
    Section,
    WeightParallelConfig,
)
from internsp.config.words import keys_of, listed, mistakes
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
        others = {"device", "timeout_seconds", "optimizer_ranks", "fast_links"}
        found = parallel.model_dump(exclude=others)
        # Models of transformers split only heads.
        heads = parallel.sequence if self.model.family == "hf" else max(self.model.heads, 1)
        rings = (n for n in range(1, parallel.sequence + 1) if parallel.sequence % n == 0)
        ring = sequence.ring or next(n for n in rings if parallel.sequence // n <= heads)
        if found["expert"] == "auto":  # see app.plan.experts: until chosen, weights travel
            found["expert"] = 1
        own = {"zero": parallel.optimizer_ranks, "ring": ring, "near": sequence.fast_links}
        return {**found, **own, "near_experts": parallel.fast_links}

    def replaced(self, values: Mapping[str, Any]) -> Config:
        """This configuration with other values at ``section.key``; they are not checked."""
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, _, key = name.partition(".")
            changed.setdefault(section, {})[key] = value
        made = {name: getattr(self, name).model_copy(update=own) for name, own in changed.items()}
        return self.model_copy(update=made)

    def check(self, world_size: int) -> list[str]:
        """All mistakes that depend on ``world_size`` ranks and on the file system, one a line."""
        return [str(problem) for problem in machine(self, world_size)]

    def to_toml(self) -> str:
        """The full configuration as TOML; :func:`load_config` of it gives an equal one."""
        dumped, model = self.model_dump(), self.model
        of_folder = sizes(model.path, model.family)[0] if model.path else {}
        for name, values in dumped.items():
            cls = sections()[name]
            told = of_folder if name == "model" else {}
            for key in cls.model_fields.keys() - keys_of(cls):  # a file may not have these
                if values[key] == told.get(key, cls.model_fields[key].get_default()):
                    del values[key]
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
    return {name: type(field.get_default()) for name, field in Config.model_fields.items()}


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
        what = "the configuration" if isinstance(path, Mapping) else str(path)
        raise ConfigError(listed(what, problems))
    return config


def read_config(
    path: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
) -> tuple[Config | None, list[Problem]]:
    """Like :func:`load_config`, but returns mistakes; the config is ``None`` if there are any."""
    problems: list[Problem] = []
    values: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    program = isinstance(path, Mapping)
    data = path if isinstance(path, Mapping) else read_toml(Path(path), problems)
    for section, content in _known_sections(data or {}, problems, ""):
        values[section] |= content
    for section, content in _known_sections(_nested(overrides or {}), problems, "--"):
        for key, value in content.items():
            values[section].pop(key, None)
            values[section] |= _valid_values(section, {key: value}, problems, "--", program)
    made: dict[str, Any] = {}
    for name, cls in sections().items():
        made[name] = cls(**_valid_values(name, values[name], problems, "", program))
    # Combinations are checked only if all their keys are valid, or one mistake would show as two.
    wrong = {key for problem in problems for key in problem.keys}
    draft = Config.model_construct(None, **made)
    size = draft.launch.processes if world_size is None else world_size
    checks = [*combinations(draft), *machine(draft, size)] if data is not None else []
    problems += [problem for problem in checks if wrong.isdisjoint(problem.keys)]
    return (None, problems) if problems else (Config(**made), [])


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


def _known_sections(
    data: Mapping[str, Any], problems: list[Problem], prefix: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the sections that are known, or nearly; add the others to ``problems``."""
    for written, content in data.items():
        if len(problems) > _MOST_UNKNOWN:
            problems.append(Problem((), "and more; no further names are looked at"))
            return
        section = written
        if not isinstance(content, Mapping):
            problems.append(not_a_section(written, _names(), prefix))
            continue
        if written not in sections():
            # Keys below a misspelled section are still read as keys of the nearest section.
            section, problem = nearest_section(written, tuple(content), _names(), prefix)
            problems.append(problem)
        if section and not (prefix and section != written):  # an option's problem names its key
            yield section, content


@cache
def _names() -> Mapping[str, tuple[str, ...]]:
    return {name: tuple(keys_of(cls)) for name, cls in sections().items()}


def _valid_values(
    name: str, values: Mapping[str, Any], problems: list[Problem], prefix: str, program: bool
) -> dict[str, Any]:
    """The valid values of a section, converted to their types; adds to ``problems``.

    Args:
        program: the values are those of a program, which may give more keys than a file.
    """
    if not values:
        return {}
    cls = sections()[name]
    # Overrides are often texts, which are converted to the key's type; a file has types already.
    texts = prefix and all(isinstance(value, (str, tuple)) for value in values.values())
    strict, context = (False if texts else None), (None if program else FROM_FILE)
    try:
        made = cls.model_validate(values, strict=strict, context=context)
    except ValidationError as error:
        unknown = partial(nearest_key, _names(), prefix)
        found = list(mistakes(cls, values, error, unknown))
        problems += [Problem((f"{name}.{key}",), text, prefix) for key, text in found]
        wrong = {key for key, _ in found}
        return {key: value for key, value in values.items() if key not in wrong}
    return {key: getattr(made, key) for key in values}
