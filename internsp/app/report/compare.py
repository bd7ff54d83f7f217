"""Comparison of runs: final figures of each, and the settings that differ."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from internsp.app.config import HELD_OUT
from internsp.app.report.metrics import StepMetrics, read_metrics
from internsp.app.report.page import evaluated, median
from internsp.base.sizes import human
from internsp.config.former import translated
from internsp.errors import ConfigError


@dataclass(frozen=True)
class Run:
    """A run, read from its folder.

    Attributes:
        name: name of the folder, with as much of the path as is needed to be unique.
    """

    path: Path
    name: str
    metrics: list[StepMetrics]
    config_toml: str

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings by ``"section.key"``, those of earlier releases by today's names.

        Raises:
            ConfigError: ``config_toml`` is no configuration.
        """
        try:
            content, gone = translated(tomllib.loads(self.config_toml))
            return {f"{s}.{k}": v for s, keys in content.items() for k, v in keys.items()} | gone
        except (tomllib.TOMLDecodeError, AttributeError) as error:
            raise ConfigError(f"{self.path / 'config.toml'} is damaged: {error}") from None


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the folders of runs.

    Raises:
        ConfigError: a path is not the folder of a run, or is given twice.
    """
    found: list[Run] = []
    full = [Path(os.path.abspath(path)) for path in paths]
    for path, own in zip(paths, full, strict=True):
        if full.count(own) > 1:
            raise ConfigError(f"{path} is given twice")
        if not (path / "metrics.jsonl").is_file():
            raise ConfigError(f"{path} is not the folder of a run: it has no metrics.jsonl")
        config = path / "config.toml"
        text = config.read_text("utf-8", "replace") if config.is_file() else ""
        same = [other for other in full if other.name == own.name]
        name = own.name if len(same) == 1 else str(path)
        found.append(Run(path, name, read_metrics(path / "metrics.jsonl"), text))
    return found


def table(runs: Sequence[Run]) -> list[list[str]]:
    """Table of the runs' figures: a heading, then a row for each run."""
    # The held-out text is always the first.
    texts = list(dict.fromkeys([HELD_OUT, *(n for run in runs for n in evaluated(run.metrics))]))
    rows = [[
        "run", "steps", "loss", *texts, "tokens/s", "step", "waits", "MFU", "peak memory",
    ]]  # fmt: skip
    for run in runs:
        m = run.metrics
        losses = evaluated(m)
        rows.append([
            run.name,
            str(len(m)),
            f"{m[-1].loss:.4f}" if m else "-",
            *(f"{losses[name][-1][1]:.4f}" if name in losses else "-" for name in texts),
            median(m, "tokens_per_second", "{:,.0f}") or "-",
            median(m, "step_seconds", "{:,.0f} ms", 1e3) or "-",
            median(m, "exposed_step_share", "{:.1%}") or "-",
            median(m, "mfu", "{:.1%}") or "-",
            human(max(row.peak_memory_bytes for row in m)) if m else "-",
        ])  # fmt: skip
    return rows


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """Table of the settings that differ between runs: a heading, then a row for each key."""
    keys = sorted({key for run in runs for key in run.settings})
    rows = [["setting", *(run.name for run in runs)]]
    for key in keys:
        values = [str(run.settings.get(key, "-")) for run in runs]
        if len(set(values)) > 1 and key != "train.name":
            rows.append([key, *values])
    return rows
