"""The picture: a bar for every variant, and a timeline of one step of each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.bench.bounds import MBIT

PHASES = {"forward": "#dbe9f6", "backward": "#c6dbef", "optimizer": "#e5e5e5"}
LEGEND = (
    "seconds of one step on rank 0. Blue: forward, backward; red: the computing thread waits; "
    "green: link in use\nbelow, for internsp, from launch to end: gathers blue, reductions orange"
)
WAIT, GATHER, REDUCE, LINK = "#cb3a2a", "#3182bd", "#e6812f", "#2f7d4f"


def draw(summary: dict[str, Any], path: Path) -> None:
    """Write the picture; the file name's extension sets the format."""
    names = [v for v in summary["options"]["variants"] if v in summary["variants"]]
    rows = [summary["variants"][name] for name in names]
    profiled = [row for row in rows if row["profile"]]
    heights = [0.32 * len(rows) + 0.6]
    heights += [1.12 if row["profile"]["events"] else 0.62 for row in profiled]
    figure = Figure(figsize=(11, sum(heights) + 1.6), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    _bars(figure.add_subplot(grid[0]), rows, summary)
    longest = max((row["profile"]["marks"][-1][1] for row in profiled), default=1.0)
    for index, row in enumerate(profiled):
        axes = figure.add_subplot(grid[index + 1])
        _timeline(axes, row, summary["rate_mbit"])
        axes.set_xlim(0, longest * 1.02)
        if index + 1 < len(profiled):
            axes.set_xticklabels([])
        else:
            axes.set_xlabel(LEGEND, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _bars(axes: Axes, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    places = list(range(len(rows)))
    medians = [row["median"] for row in rows]
    errors = [
        [m - row["low"] for m, row in zip(medians, rows, strict=True)],
        [row["high"] - m for m, row in zip(medians, rows, strict=True)],
    ]
    ours = [row["label"].startswith("internsp") for row in rows]
    colors = [GATHER if own else "#9a9a9a" for own in ours]
    axes.barh(places, medians, xerr=errors, color=colors, height=0.7, ecolor="#333333")
    for place, row in zip(places, rows, strict=True):
        figures = f"  {row['median']:.2f} s, {row['over_ideal']:.2f}"
        axes.text(row["high"], place, figures, va="center", fontsize=8)
    axes.axvline(summary["compute"], color="#555555", linestyle=":", linewidth=1)
    axes.axvline(summary["ideal"], color=WAIT, linestyle="--", linewidth=1)
    axes.set_yticks(places, [row["label"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    rate = summary["rate_mbit"]
    where = summary["link"] if rate is None else f"{rate:.0f} Mbit/s"
    axes.set_title(
        f"{summary['options']['ranks']} ranks, {where}: median step and its multiple of ideal "
        "(dashed; dotted: compute only)",
        fontsize=9,
    )


def _timeline(axes: Axes, row: dict[str, Any], rate_mbit: float | None) -> None:
    profile = row["profile"]
    marks = profile["marks"]
    for (name, start), (_, end) in itertools.pairwise(marks):
        axes.broken_barh([(start, end - start)], (0, 1), color=PHASES[name])
    waits = [(a, b - a) for a, b in profile["waits"]]
    axes.broken_barh(waits, (0.55, 0.45), color=WAIT)
    _link(axes, profile["link"], rate_mbit)
    lanes: dict[str, float] = {"AG": -0.5, "RS": -1.0}
    for kind, _, _, _, start, end, _ in profile["events"]:
        if kind in lanes:
            color = GATHER if kind == "AG" else REDUCE
            axes.broken_barh([(start, end - start)], (lanes[kind] + 0.05, 0.4), color=color,
                             alpha=0.45, linewidth=0)
    axes.set_ylim(-1.05 if profile["events"] else 0, 1)
    axes.set_yticks([0.5], [row["label"]], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)


def thinned(samples: Sequence[Sequence[float]], seconds: float = 0.01) -> list[Sequence[float]]:
    """Samples at least ``seconds`` apart: finer ones show single bursts of the sender."""
    kept: list[Sequence[float]] = []
    for sample in samples:
        if not kept or sample[0] >= kept[-1][0] + seconds:
            kept.append(sample)
    return kept


def _link(axes: Axes, samples: Sequence[Sequence[float]], rate_mbit: float | None) -> None:
    """The lower half: bytes sent between samples, as a share of the rate (else of the peak)."""
    samples = thinned(samples)
    if len(samples) < 2:
        return
    middle = [(a[0] + b[0]) / 2 for a, b in itertools.pairwise(samples)]
    rates = [
        (b[1] - a[1]) / (b[0] - a[0]) / MBIT for a, b in itertools.pairwise(samples)
    ]
    top = rate_mbit or max([*rates, 1e-9])
    axes.fill_between(middle, [min(r / top, 1.0) * 0.5 for r in rates], color=LINK, step="mid")
