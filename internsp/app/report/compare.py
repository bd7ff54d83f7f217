"""Comparison of runs: final figures of each, and the settings that differ."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from internsp.app.config import HELD_OUT
from internsp.app.report.page import Report, evaluated, load_report, median
from internsp.base.sizes import human
from internsp.config.former import translated
from internsp.errors import ConfigError


def read_runs(paths: Sequence[Path]) -> list[Report]:
    """The runs in these folders, titled by the folder's name, with as much of the path as is needed
    to be unique.

    Raises:
        ConfigError: a path is given twice or is no run's folder, or what it has is damaged.
    """
    found: list[Report] = []
    full = [Path(os.path.abspath(path)) for path in paths]
    for path, own in zip(paths, full, strict=True):
        if full.count(own) > 1:
            raise ConfigError(f"{path} is given twice")
        alone = sum(other.name == own.name for other in full) == 1
        found.append(replace(load_report(path), title=own.name if alone else str(path)))
    return found


def _settings(run: Report) -> dict[str, Any]:
    """Settings by ``"section.key"``, those of earlier releases by today's names.

    Raises:
        ConfigError: the run's ``config.toml`` is no configuration.
    """
    try:
        content, gone = translated(tomllib.loads(run.config_toml))
        return {f"{s}.{k}": v for s, keys in content.items() for k, v in keys.items()} | gone
    except (tomllib.TOMLDecodeError, AttributeError) as error:
        raise ConfigError(f"{run.title}/config.toml is damaged: {error}") from None


def table(runs: Sequence[Report]) -> list[list[str]]:
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
            run.title,
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


def differences(runs: Sequence[Report]) -> list[list[str]]:
    """Table of the settings that differ between runs: a heading, then a row for each key."""
    settings = [_settings(run) for run in runs]
    rows = [["setting", *(run.title for run in runs)]]
    for key in sorted({key for own in settings for key in own}):
        values = [str(own.get(key, "-")) for own in settings]
        if len(set(values)) > 1 and key != "train.name":
            rows.append([key, *values])
    return rows
