"""Drawings of the report as SVG, without a library or a script, colored by the page's style.

:func:`line_chart` draws values over steps. Of many steps it keeps the smallest and the largest
value in each of a few hundred buckets, so that a spike of one step stays visible; values that are
not finite interrupt the line. :func:`draw_timeline` draws one step:
lanes of each rank over a common time axis.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from internsp.app.report.timeline import COMMUNICATION, LANES, Bar, build_timeline, window_of
from internsp.base.sizes import UNITS, human
from internsp.base.trace import Event

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 34
_BUCKETS = 250
_HOVERS = 120
_MAX_TEXT = 100_000


def _bytes_as(nbytes: float, greatest: float) -> str:
    """Bytes in the unit of the greatest number of a table, so that a column can be compared."""
    unit = human(greatest).split()[1]
    return f"{nbytes / UNITS[unit]:.{0 if unit == 'B' else 1}f} {unit}"


# Of pages and of the drawings in them.
TEMPLATES = Environment(
    loader=PackageLoader("internsp.app.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
)
TEMPLATES.filters |= {
    "bounded": lambda text: text[:_MAX_TEXT] + ("\n…" if len(text) > _MAX_TEXT else ""),
    "ms": lambda seconds: f"{seconds * 1e3:.2f}",
    "px": "{:.1f}".format,
    "human": human,
    "bytes_as": _bytes_as,
}


def number(value: float) -> str:
    """A short label: ``12.5k``, ``3e-4``, ``0.25``."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (9999.5, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.4g}{unit}"
    if size and size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within [low, high], about ``count`` of them, at steps of 1, 2 or 5."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


# Charts of values over steps.


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart.

    Attributes:
        name: shown in the legend and on hover.
        points: (step, value), by step; values may be NaN or infinite.
        style: CSS class that gives the color.
        dots: mark every point (for few points, far apart).
        noisy: with more than 60 points, draw them faint below their moving average.
    """

    name: str
    points: Sequence[Point]
    style: str = "s1"
    dots: bool = False
    noisy: bool = True


def drawable(value: float) -> bool:
    """Whether a value can be drawn: finite, and not so large that ranges overflow."""
    return abs(value) < 1e100


def downsample(points: Sequence[Point], buckets: int = _BUCKETS) -> list[Point]:
    """Reduce points to about two a bucket: its smallest and largest finite value, in order of x.

    The first and the last point stay. A bucket without a finite value becomes one NaN.
    """
    if len(points) <= 2 * buckets:
        return list(points)
    out = [points[0]]
    inner = points[1:-1]
    for i in range(buckets):
        part = inner[i * len(inner) // buckets : (i + 1) * len(inner) // buckets]
        finite = [p for p in part if drawable(p[1])]
        if not finite:
            out.append((part[0][0], math.nan))
            continue
        low, high = min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])
        out += sorted({low, high})
    return [*out, points[-1]]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Moving average of the finite values; the window is a thirtieth of all points.

    Centered, so that a falling curve is not drawn late; narrower at the start, where losses fall
    fastest, and one-sided at the end.
    """
    half = max(1, len(points) // 60)
    sums = [0.0, *accumulate(y if drawable(y) else 0.0 for _, y in points)]
    counts = [0, *accumulate(drawable(y) for _, y in points)]
    out = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i)
        low, high = i - reach, min(i + reach + 1, len(points))
        known = counts[high] - counts[low]
        out.append((x, (sums[high] - sums[low]) / known if known else math.nan))
    return out


class _Scale:
    """Maps data to positions in the drawing; ``log``: logarithmic vertical axis."""

    def __init__(self, series: Sequence[Series], finite: list[Point], zero: bool) -> None:
        steps = [p[0] for s in series for p in s.points]
        x0, x1 = min(steps), max(steps)
        if x0 == x1:
            x0, x1 = x0 - 1, x1 + 1
        values = [p[1] for p in finite]
        low, high = min(values), max(values)
        self.log = not zero and low > 0 and high / low > 100
        if self.log:
            low, high = math.log10(low), math.log10(high)
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        bottom = 0.0 if zero and low >= 0 else low - margin
        self.x, self.y = (x0, x1), (bottom, high + margin)

    def at(self, point: Point) -> Point:
        (x0, x1), (y0, y1) = self.x, self.y
        value = math.log10(point[1]) if self.log else point[1]
        across = _LEFT + (point[0] - x0) / (x1 - x0) * (WIDTH - _LEFT - _RIGHT)
        down = HEIGHT - _BOTTOM - (value - y0) / (y1 - y0) * (HEIGHT - _TOP - _BOTTOM)
        return across, down

    def values(self) -> list[float]:
        """Values that are marked on the vertical axis."""
        if not self.log:
            return ticks(*self.y)
        low, high = math.ceil(self.y[0]), math.floor(self.y[1])
        powers = range(low, high + 1, 1 + (high - low) // 6)
        return [10.0**p for p in powers] or [10 ** self.y[0], 10 ** self.y[1]]


def line_chart(series: Sequence[Series], *, label: str, zero: bool = False) -> Markup:
    """An SVG chart of values over steps.

    The vertical axis is logarithmic if values span two decades or more and it does not start at 0.

    Args:
        series: lines; drawn in order.
        label: what the chart shows, for readers who cannot see it.
        zero: start the vertical axis at 0.
    """
    finite = [p for s in series for p in s.points if drawable(p[1])]
    if not finite:
        return Markup('<p class="empty">No finite value to draw.</p>')
    scale = _Scale(series, finite, zero)
    drawn = TEMPLATES.get_template("chart.svg.j2").render(
        width=WIDTH, height=HEIGHT, label=label, left=_LEFT, right=WIDTH - _RIGHT, top=_TOP,
        floor=HEIGHT - _BOTTOM,
        values=[(number(v), scale.at((scale.x[0], v))[1]) for v in scale.values()],
        steps=[(number(v), scale.at((v, 1.0))[0]) for v in ticks(*scale.x, 6) if v == round(v)],
        lines=[line for one in series for line in _lines(one, scale)],
        hovers=_hovers(series, scale),
    )  # fmt: skip
    return Markup(drawn)


def _lines(series: Series, scale: _Scale) -> Iterator[tuple[str, str, list[Point]]]:
    """The style of each line of a series, its path, and the places of its dots."""
    if series.noisy and not series.dots and len(series.points) > 60:
        yield f"{series.style} faint", _path(series.points, scale), []
        yield series.style, _path(smooth(series.points), scale), []
        return
    places = [scale.at(p) for p in series.points if drawable(p[1])]
    marked = series.dots or len(places) <= 12
    yield series.style, _path(series.points, scale), places if marked else []


def _path(points: Sequence[Point], scale: _Scale) -> str:
    commands, pen = [], "M"
    for point in downsample(points):
        if not drawable(point[1]):
            pen = "M"
            continue
        x, y = scale.at(point)
        # A point between two gaps is a line of length zero, whose round cap shows as a dot.
        commands.append(f"{pen}{x:.1f},{y:.1f}" + ("h0" if pen == "M" else ""))
        pen = "L"
    return "".join(commands)


def _hovers(series: Sequence[Series], scale: _Scale) -> Iterator[tuple[str, float, float]]:
    """Invisible strips that show the values under the pointer: a text, from where to where."""
    steps = sorted({p[0] for s in series for p in s.points})
    values = [(s.name, dict(s.points)) for s in series]
    chosen = steps[:: -(-len(steps) // _HOVERS)]
    if chosen[-1] != steps[-1]:
        chosen.append(steps[-1])
    places = [scale.at((step, 1.0))[0] for step in chosen]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(places)), WIDTH - _RIGHT]
    for step, (left, right) in zip(chosen, pairwise(edges), strict=True):
        shown = [f"{name} {number(known[step])}" for name, known in values if step in known]
        yield f"step {step:g}: {', '.join(shown)}", left, right


# The lanes of one step.

MAX_RANKS = 8
"""Number of ranks drawn; the tables next to the picture include all ranks."""

MAX_BARS = 4500
"""Number of bars drawn over all ranks: about 0.9 MB of text."""

PHASES = ("forward", "recompute", "backward", "optimizer")
# Of a pipeline's backward: in one pass, or of inputs first and of weights later.
_PARTS = {"full": "backward", "input": "backward", "weight": "backward light"}

_Ranked = Mapping[int, Mapping[str, Sequence[Bar]]]
_Lane = tuple[str, float, float, list[tuple[str, str, float, float, float, float, str]]]
"""A lane for the template: name, top, height, and of each bar style, title, box and text in it."""
_GOLDEN = (5**0.5 - 1) / 2

_STEP_WIDTH, _GUTTER, _EDGE = 1120, 122, 30
_AXIS, _RANK_GAP, _LANE_GAP = 26, 24, 4
_ROW, _MAX_ROWS = 6, 7
_TALL = {"compute": 22.0, "optimizer": 14.0}  # lanes of a fixed height
_TINY = 0.4

_NAMES = {
    **COMMUNICATION,
    "WAIT": "waiting",
    "COMPUTE": "compute",
    "STEP": "optimizer step",
    "FINISH": "finish",
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawn step.

    Attributes:
        svg: the SVG element; empty if nothing was traced.
        ranks: number of ranks in the picture.
        exact: whether every bar has its true position; if not, short bars are shown in proportion.
    """

    svg: Markup
    ranks: int
    exact: bool = True


def draw_timeline(events: Mapping[int, Sequence[Event]]) -> Drawing:
    """Draw one step, of which each rank has these events."""
    drawn = [rank for rank in sorted(events) if events[rank]][:MAX_RANKS]
    windows = {rank: window_of(events[rank]) for rank in drawn}
    if not any(end > start for start, end in windows.values()):
        return Drawing(Markup(), 0)
    # Processes of one machine share a clock, and the skew between them should be visible. Clocks of
    # different machines are unrelated, so each rank is then drawn from its own start.
    first, shared = min(windows.values())[0], max(windows.values())[0]
    if shared < min(end for _, end in windows.values()):
        windows = {rank: (first, end) for rank, (_, end) in windows.items()}
    seconds = max(end - start for start, end in windows.values())
    ranked: _Ranked = {
        rank: {
            name: [replace(b, start=b.start - start, end=b.end - start) for b in bars]
            for name, bars in build_timeline(events[rank]).items()
        }
        for rank, (start, _) in windows.items()
    }
    ranked, exact = _within_limits(ranked, seconds)
    names = [name for name in LANES if any(found[name] for found in ranked.values())]
    ranks, top = [], float(_AXIS)
    for rank, found in ranked.items():
        lanes: list[_Lane] = []
        ranks.append((f"rank {rank}", top, lanes))
        top += _RANK_GAP
        for name in names:
            lanes.append(_lane(name, found[name], seconds, top))
            top += lanes[-1][2] + _LANE_GAP
        top += 4
    marks = ticks(0.0, seconds * 1e3, 10)
    svg = TEMPLATES.get_template("step.svg.j2").render(
        width=_STEP_WIDTH, left=_GUTTER, right=_STEP_WIDTH - _EDGE, edge=_AXIS, bottom=top,
        times=[(number(ms), _across(ms / 1e3, seconds)) for ms in marks], ranks=ranks,
    )  # fmt: skip
    return Drawing(Markup(svg), len(ranked), exact)


def _within_limits(ranked: _Ranked, seconds: float) -> tuple[_Ranked, bool]:
    """Limit the picture to about ``MAX_BARS`` bars; also returns whether they are exact.

    First drops ranks (down to two), then replaces bars by the cells of a grid.
    """
    while _count(ranked) > MAX_BARS and len(ranked) > 2:
        ranked = dict(list(ranked.items())[: (len(ranked) + 1) // 2])
    if _count(ranked) <= MAX_BARS:
        return ranked, True
    cell = seconds * len(ranked) * len(LANES) / MAX_BARS
    return {
        r: {name: _sampled(bars, cell) for name, bars in d.items()} for r, d in ranked.items()
    }, False


def _count(ranked: _Ranked) -> int:
    return sum(len(bars) for lanes in ranked.values() for bars in lanes.values())


def _sampled(bars: Sequence[Bar], cell: float) -> Sequence[Bar]:
    """Replace bars by at most one for each ``cell`` seconds; equal neighbors are joined.

    A cell shows the bar at a point in it, so that every kind and phase, and idle time, get space in
    proportion. Showing the longest of each cell would hide many short waits, and joining waits over
    the compute between them would draw one long wait. The points follow the golden ratio: no
    period of a step falls together with theirs.
    """
    left, going, out = deque(bars), list[Bar](), list[Bar]()
    for i in range(int(max((bar.end for bar in bars), default=0.0) / cell) + 1):
        at = (i + i * _GOLDEN % 1) * cell
        while left and left[0].start <= at:
            going.append(left.popleft())
        while going and going[-1].end <= at:
            going.pop()
        if not going:
            continue
        found = going[-1]  # of several at once the one that began last
        last, begin, end = out[-1] if out else None, i * cell, (i + 1) * cell
        if last and (last.kind, last.phase, last.end) == (found.kind, found.phase, begin):
            first = last.unit.split(" … ")[0]
            unit = first if found.unit == first else f"{first} … {found.unit}"
            out[-1] = replace(last, end=end, unit=unit)
        else:
            out.append(Bar(found.kind, begin, end, unit=found.unit, phase=found.phase))
    return out


def _across(at: float, seconds: float) -> float:
    """Horizontal position of a time, of a step that takes ``seconds``."""
    return _GUTTER + at / seconds * (_STEP_WIDTH - _GUTTER - _EDGE)


def _lane(name: str, bars: Sequence[Bar], seconds: float, top: float) -> _Lane:
    """What the template draws of a lane: bars in flight together are stacked."""
    # One thread computes: its bars are never stacked, even if waits enclose each other.
    rows, count = ([0] * len(bars), 1) if name == "compute" else _stack(bars)
    height = _TALL.get(name, max(14.0, float(_ROW * count)))
    row_height = height / max(1, count) if name in _TALL else float(_ROW)
    thick = height if count <= 1 else row_height - 1
    drawn = []
    for bar, row in zip(bars, rows, strict=True):
        x, y = _across(bar.start, seconds), top + row * row_height
        width = max(_TINY, _across(bar.end, seconds) - x)
        fits = bar.kind == "COMPUTE" and width > 7 + 6.3 * len(bar.unit)
        inside = bar.unit if fits else ""
        drawn.append((_style(bar), _description(bar), x, y, width, thick, inside))
    return name, top, height, drawn


def _stack(bars: Sequence[Bar]) -> tuple[list[int], int]:
    """A row for each bar, so that bars of one row do not overlap, and the number of rows."""
    ends: list[float] = []
    rows = []
    for bar in bars:
        row = next((i for i, end in enumerate(ends) if end <= bar.start), -1)
        if row < 0 and len(ends) < _MAX_ROWS:
            ends.append(0.0)
            row = len(ends) - 1
        elif row < 0:
            row = min(range(len(ends)), key=lambda i: ends[i])
        ends[row] = max(ends[row], bar.end)
        rows.append(row)
    return rows, len(ends)


def _style(bar: Bar) -> str:
    if bar.kind == "WAIT":
        return "b wait"
    if bar.kind in ("STEP", "PUBLISH", "MATRIX", "FINISH"):
        return "b optimizer" if bar.kind == "STEP" else "b optimizer light"
    return f"b {bar.phase}" if bar.phase in PHASES else f"b {_PARTS.get(bar.phase, 'other')}"


def _description(bar: Bar) -> str:
    name = _NAMES.get(bar.kind, bar.kind)
    # A weight's name usually begins with its unit's.
    what = bar.weight if bar.weight.startswith(bar.unit) else f"{bar.unit} {bar.weight}"
    words = [f"{name} {what or bar.unit}".strip(), *([bar.phase] if bar.phase else [])]
    words.append(f"{bar.start * 1e3:.2f} to {bar.end * 1e3:.2f} ms")
    words.append(f"{(bar.end - bar.start) * 1e3:.2f} ms")
    return " · ".join([*words, *([human(bar.nbytes)] if bar.nbytes else [])])
