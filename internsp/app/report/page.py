"""``report.html``: one self-contained page about a run. No script, no font, nothing fetched.

The page is ``templates/report.html.j2`` with its style sheet; this module computes its figures.
Charts are plain SVG colored by the style sheet, so one file reads well in light and in dark mode,
and stays below about 1.5 MB however long the run was.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from pydantic import TypeAdapter, ValidationError

from internsp.app.config import HELD_OUT
from internsp.app.report.display import duration
from internsp.app.report.metrics import StepMetrics, read_metrics, write_whole
from internsp.app.report.svg import (
    PHASES,
    TEMPLATES,
    Series,
    draw_timeline,
    drawable,
    line_chart,
    number,
)
from internsp.app.report.timeline import COMMUNICATION, communication, mean_waits, step_times
from internsp.base.sizes import human
from internsp.base.trace import Event
from internsp.errors import ConfigError

_COLORS = ("s1", "s2", "s3", "s4")  # CSS classes for the lines of a chart
_OFF = 0.02  # share of a step from which a component's prediction is called wrong
_WORST = 3  # blocks that are told of those that waited for one thing
_TOGETHER = "together"
_EVENT = tuple(field.name for field in dataclasses.fields(Event))
Traces = Mapping[int, Sequence[Event]]

# Control characters, which HTML does not allow, and lone surrogates, which UTF-8 cannot encode.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of a run's page.

    Attributes:
        title: name of the run.
        config_toml: the resolved config.
        metrics: rows of the run by step; may be empty, long, or contain NaN.
        mesh: degree by name, as in ``{"world": 4, "weight": 2, "sequence": 2}``.
        memory: (component, bytes) of one rank.
        timeline: rank -> that rank's events of one step; empty if no step was traced.
        notes: sentences shown at the top (why a run stopped, what to change).
        schedule: picture of a pipeline's schedule, as SVG, which is not escaped.
        advice: sentences of :func:`internsp.app.report.advice.advise` about the traced step.
        predicted: (component, predicted, measured) seconds of the traced step.
        device: whose rates were predicted with.
    """

    title: str
    config_toml: str
    metrics: Sequence[StepMetrics]
    mesh: Mapping[str, int]
    memory: Sequence[tuple[str, int]]
    timeline: Traces
    notes: Sequence[str] = ()
    schedule: str = ""
    advice: Sequence[str] = ()
    predicted: Sequence[tuple[str, float, float]] = ()
    device: str = ""

    def save(self, path: Path) -> None:
        """Write the content, without configuration and metrics, as JSON for :func:`load_report`."""
        content = {name: getattr(self, name) for name in _kept()}
        content["timeline"] = {
            rank: [[getattr(event, name) for name in _EVENT] for event in events]
            for rank, events in self.timeline.items()
        }
        path.write_text(json.dumps(content), encoding="utf-8")

    def write(self, path: str | Path) -> Path:
        """Write the page as :func:`write_whole` does, and return its path."""
        return write_whole(self.render(), Path(path))

    def render(self) -> str:
        """The page as HTML text."""
        page = TEMPLATES.get_template("report.html.j2").render(
            run=self,
            lead=_lead(self.metrics, self.mesh),
            cards=_cards(self.metrics, self.timeline),
            charts=_charts(self.metrics),
            peak=max((m.peak_memory_bytes for m in self.metrics), default=0),
            step=draw_timeline(self.timeline),
            phases={**{name: name for name in PHASES}, "wait": "waiting (exposed)"},
            traced=sum(1 for trace in self.timeline.values() if trace),
            communication=list(communication_rows(self.timeline)),
            waits=waits_by_place(self.timeline),
            off=_most_off(self.predicted),
        )
        return _FORBIDDEN.sub("\ufffd", page)


def load_report(folder: Path) -> Report:
    """Load a run's report from its folder: configuration, metrics and ``report.json``.

    A run that was killed has no ``report.json``: its page has no timeline and no memory.

    Raises:
        ConfigError: it is not the folder of a run, or its ``report.json`` is damaged.
    """
    if not (folder / "metrics.jsonl").is_file() or not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: no metrics.jsonl or config.toml")
    text = (folder / "config.toml").read_text("utf-8", "replace")
    content: dict[str, Any] = {
        "title": folder.name, "mesh": {}, "memory": [], "timeline": {},
        "notes": ["The run has left no report.json: it was killed, or is still going on."],
    }  # fmt: skip
    path = folder / "report.json"
    if path.is_file():
        try:
            saved = json.loads(path.read_text())
            content = {name: saved[name] for name in _kept() if name in saved}  # some came later
            content["timeline"] = {
                rank: [dict(zip(_EVENT, event, strict=True)) for event in events]
                for rank, events in saved["timeline"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from None
    content |= {"config_toml": text, "metrics": read_metrics(folder / "metrics.jsonl")}
    try:
        return TypeAdapter(Report).validate_python(content)
    except ValidationError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None


def _kept() -> list[str]:
    """What ``report.json`` has of a report: the rest is in files of its own."""
    names = [field.name for field in dataclasses.fields(Report)]
    return [name for name in names if name not in ("config_toml", "metrics")]


def _most_off(rows: Sequence[tuple[str, float, float]]) -> str:
    """Which component's prediction differs most from what was measured."""
    if not rows:
        return ""
    name, ours, took = max(rows, key=lambda row: abs(row[1] - row[2]))
    share = abs(ours - took) / (sum(row[2] for row in rows) or 1)
    if share < _OFF:
        return f"No component is off by {_OFF:.0%} of the step."
    way = "too short" if ours < took else "too long"
    return f"Most wrong is {name}: predicted {way} by {share:.0%} of the step."


def _lead(metrics: Sequence[StepMetrics], mesh: Mapping[str, int]) -> str:
    if not metrics:
        return "No step was finished."
    seconds = sum(m.step_seconds for m in metrics)
    tokens = sum(m.tokens for m in metrics)
    degrees = ", ".join(f"{name} {value}" for name, value in mesh.items())
    steps = "1 step" if len(metrics) == 1 else f"{len(metrics):,} steps"
    return f"{steps}, {tokens:,} tokens, {duration(seconds)} of training · {degrees}"


def _cards(metrics: Sequence[StepMetrics], timeline: Traces) -> dict[str, str]:
    """The figures at the top, by name."""
    if not metrics:
        return {}
    traced = [step_times(trace) for trace in timeline.values() if trace]
    in_flight = sum(t.communication for t in traced)
    peak = max(m.peak_memory_bytes for m in metrics)
    shown = {
        "loss of the last step": _loss(metrics[-1].loss),
        **{f"{name} loss": _loss(points[-1][1]) for name, points in evaluated(metrics).items()},
        "tokens/s (median)": median(metrics, "tokens_per_second", "{:,.0f}") or "not finite",
        "step (median)": median(metrics, "step_seconds", "{:,.0f} ms", 1e3),
        "of a step waits for communication": median(metrics, "exposed_step_share", "{:.1%}"),
        "of a step rank 0 waits for other stages": median(metrics, "stage_wait_share", "{:.1%}"),
        "of communication hidden (traced step)": (
            f"{sum(t.hidden for t in traced) / in_flight:.0%}" if in_flight > 0 else ""
        ),
        "model TFLOP/s of a device (median)": median(metrics, "tflops", "{:,.3g}"),
        "MFU (median)": median(metrics, "mfu", "{:.1%}"),
        "peak memory": human(peak) if peak > 0 else "",
    }
    return {name: text for name, text in shown.items() if text}


def median(metrics: Sequence[StepMetrics], key: str, form: str, unit: float = 1.0) -> str:
    """The median of a figure over the steps in which it is finite; empty without any."""
    values = (getattr(m, key) for m in metrics)
    finite = [unit * v for v in values if v is not None and math.isfinite(v)]
    return form.format(statistics.median(finite)) if finite else ""


def evaluated(metrics: Sequence[StepMetrics]) -> dict[str, list[tuple[int, float]]]:
    """(step, loss) of each text that was evaluated, by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in metrics:
        for name, loss in row.evaluated.items():
            found.setdefault(name, []).append((row.step, loss))
    return found


def communication_rows(events: Traces) -> Iterator[dict[str, Any]]:
    """Hidden and exposed time by kind, and in total; nothing without a trace.

    Means over the ranks, in seconds: a rank without such communication counts as zero. ``worst`` is
    the exposed time of the rank where it is longest. The last row counts each moment once and has
    no payload.
    """
    found = []
    for trace in filter(None, events.values()):
        times = step_times(trace)
        found.append({**communication(trace), _TOGETHER: (0, 0, times.exposed, times.hidden)})
    for kind, name in {**COMMUNICATION, _TOGETHER: _TOGETHER}.items():
        rows = [each[kind] for each in found if kind in each]
        if kind == _TOGETHER or any(nbytes for _, nbytes, *_ in rows):  # in groups of one: nothing
            means = [sum(column) / len(found) for column in zip(*rows, strict=True)]
            yield {
                **dict(zip(("count", "nbytes", "exposed", "hidden"), means, strict=False)),
                "name": name,
                "worst": max((exposed for _, _, exposed, _ in rows), default=0.0),
                "total": kind == _TOGETHER,
            }


def waits_by_place(events: Traces) -> list[tuple[str, str, float, list[tuple[str, float]]]]:
    """Waits of the computing thread, longest first: the phase, what for, mean seconds, and the
    blocks that waited most."""
    places: dict[tuple[str, str], dict[str, float]] = {}
    for (kind, unit, phase), seconds in mean_waits(events).items():
        if seconds > 0:  # else no share of all could be told
            places.setdefault((phase, COMMUNICATION.get(kind, "")), {})[unit] = seconds
    rows = [
        (*place, sum(units.values()), sorted(units.items(), key=lambda item: -item[1])[:_WORST])
        for place, units in places.items()
    ]
    return sorted(rows, key=lambda row: -row[2])


@dataclass(frozen=True)
class Chart:
    """A drawing with title, legend and caption."""

    title: str
    drawing: Markup
    legend: Mapping[str, str] = field(default_factory=dict)
    caption: str = ""


class Curve(NamedTuple):
    """A figure of every step that has a chart.

    Attributes:
        name: of the line under the pointer; empty: the title.
    """

    key: str
    title: str
    name: str = ""
    style: str = "s3"
    zero: bool = True
    noisy: bool = True


_LOSS = "Loss (nats per token)"
CURVES = (
    Curve("tokens_per_second", "Throughput (tokens/s)", "tokens/s"),
    Curve("grad_norm", "Gradient norm, before clipping", "gradient norm", "s4", zero=False),
    Curve("expert_load", "Tokens of the busiest expert, over the mean"),
    Curve("router_entropy", "Router entropy (nats per token)"),
    Curve("dropped_tokens", "Choices of an expert that its capacity dropped"),
    Curve("lr", "Learning rate", "learning rate", "s2", noisy=False),
)


def _text_line(name: str, points: Sequence[tuple[int, float]], style: str) -> Series:
    """The line of an evaluated text."""
    return Series(name, points, style, dots=len(points) <= 60, noisy=False)


def _charts(metrics: Sequence[StepMetrics]) -> list[Chart]:
    if not metrics:
        return []
    loss, texts = [Series("loss", [(m.step, m.loss) for m in metrics])], evaluated(metrics)
    if HELD_OUT in texts:
        loss.append(_text_line(HELD_OUT, texts[HELD_OUT], "s2"))
    broken = sum(not drawable(m.loss) for m in metrics)
    found = [
        Chart(
            _LOSS,
            line_chart(loss, label=_LOSS),
            {"s1": "training", "s2": HELD_OUT} if HELD_OUT in texts else {},
            f"Steps without a finite loss: {broken:,}." if broken else "",
        )
    ]
    if texts.keys() - {HELD_OUT}:
        shown = dict(zip(_COLORS, texts, strict=False))
        lines = [_text_line(name, texts[name], style) for style, name in shown.items()]
        more, title = len(texts) - len(shown), "Evaluation (nats per token)"
        caption = f"{more} more have no line; the figures at the top have all." if more else ""
        found.append(Chart(title, line_chart(lines, label=title), shown, caption))
    for one in CURVES:
        points = [(m.step, v) for m in metrics if (v := getattr(m, one.key)) is not None]
        if points:  # else the run has not the figure
            line = Series(one.name or one.title, points, one.style, noisy=one.noisy)
            found.append(Chart(one.title, line_chart([line], label=one.title, zero=one.zero)))
    return found


def _loss(value: float) -> str:
    return f"{value:.4f}" if drawable(value) else number(value)
