"""Drawings of the report as SVG, without a library or a script, colored by the page's style.

:func:`line_chart` draws values over steps. Of many steps it keeps the smallest and the largest
value in each of a few hundred buckets, so that a spike of one step stays visible; values that are
not finite interrupt the line and are marked at the bottom. :func:`draw_timeline` draws one step:
lanes of each rank over a common time axis.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from markupsafe import Markup, escape

from internsp.app.report.timeline import LANES, Bar, Timeline, build_timeline
from internsp.base.sizes import human
from internsp.base.trace import Event

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 34
_BUCKETS = 250
_HOVERS = 120


def _element(name: str, content: str = "", /, **attributes: object) -> str:
    """An element; ``class_`` and ``text_anchor`` are written as XML does, content as it is."""
    written = ""
    for key, value in attributes.items():
        text = value if isinstance(value, str) else f"{value:.1f}"
        written += f' {key.rstrip("_").replace("_", "-")}="{text}"'
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


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
    sums, counts = [0.0], [0]
    for _, y in points:
        sums.append(sums[-1] + (y if drawable(y) else 0.0))
        counts.append(counts[-1] + drawable(y))
    out = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i)
        low, high = i - reach, min(i + reach + 1, len(points))
        known = counts[high] - counts[low]
        out.append((x, (sums[high] - sums[low]) / known if known else math.nan))
    return out


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps data to positions in the drawing; ``log``: logarithmic vertical axis."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool

    @classmethod
    def of(cls, series: Sequence[Series], finite: list[Point], zero: bool) -> _Scale:
        steps = [p[0] for s in series for p in s.points]
        x0, x1 = min(steps), max(steps)
        if x0 == x1:
            x0, x1 = x0 - 1, x1 + 1
        values = [p[1] for p in finite]
        low, high = min(values), max(values)
        log = not zero and low > 0 and high / low > 100
        if log:
            low, high = math.log10(low), math.log10(high)
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        bottom = 0.0 if zero and low >= 0 else low - margin
        return cls((x0, x1), (bottom, high + margin), log)

    def at(self, point: Point) -> Point:
        (x0, x1), (y0, y1) = self.x, self.y
        value = math.log10(point[1]) if self.log else point[1]
        across = _LEFT + (point[0] - x0) / (x1 - x0) * (WIDTH - _LEFT - _RIGHT)
        down = HEIGHT - _BOTTOM - (value - y0) / (y1 - y0) * (HEIGHT - _TOP - _BOTTOM)
        return across, down


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
    scale = _Scale.of(series, finite, zero)
    parts = _axes(scale)
    for one in series:
        parts += _line(one, scale)
    parts += [*_broken(series, scale), *_hovers(series, scale)]
    return Markup(
        _element(
            "svg", "".join(parts), class_="chart", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img",
            aria_label=escape(label),
        )
    )  # fmt: skip


def _axes(scale: _Scale) -> list[str]:
    right, floor = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    values = ticks(*scale.y)
    if scale.log:
        low, high = math.ceil(scale.y[0]), math.floor(scale.y[1])
        powers = range(low, high + 1, 1 + (high - low) // 6)
        values = [10.0**p for p in powers] or [10 ** scale.y[0], 10 ** scale.y[1]]
    parts = []
    for value in values:
        _, y = scale.at((scale.x[0], value))
        label = {"class_": "tick", "x": _LEFT - 7, "y": y + 4, "text_anchor": "end"}
        parts.append(_element("line", class_="grid", x1=_LEFT, x2=right, y1=y, y2=y))
        parts.append(_element("text", number(value), **label))
    for value in ticks(*scale.x, 6):
        if value != round(value):
            continue
        x, _ = scale.at((value, 1.0))
        label = {"class_": "tick", "x": x, "y": floor + 17, "text_anchor": "middle"}
        parts.append(_element("line", class_="axis", x1=x, x2=x, y1=floor, y2=floor + 4))
        parts.append(_element("text", number(value), **label))
    unit = {"class_": "unit", "x": right, "y": HEIGHT - 3, "text_anchor": "end"}
    axis = _element("line", class_="axis", x1=_LEFT, x2=right, y1=floor, y2=floor)
    return [*parts, axis, _element("text", "step", **unit)]


def _line(series: Series, scale: _Scale) -> list[str]:
    strokes = [(series.points, series.style)]
    if series.noisy and not series.dots and len(series.points) > 60:
        strokes = [(series.points, f"{series.style} faint"), (smooth(series.points), series.style)]
    parts = [_path(downsample(points), scale, style) for points, style in strokes]
    if series.dots or len(series.points) <= 12:
        places = [scale.at(p) for p in series.points if drawable(p[1])]
        style = f"dot {series.style}"
        parts += [_element("circle", class_=style, cx=x, cy=y, r="3") for x, y in places]
    return parts


def _path(points: Sequence[Point], scale: _Scale, style: str) -> str:
    commands, pen = [], "M"
    for point in points:
        if not drawable(point[1]):
            pen = "M"
            continue
        x, y = scale.at(point)
        # A point between two gaps is a line of length zero, whose round cap shows as a dot.
        commands.append(f"{pen}{x:.1f},{y:.1f}" + ("h0" if pen == "M" else ""))
        pen = "L"
    return _element("path", class_=f"line {style}", d="".join(commands))


def _broken(series: Sequence[Series], scale: _Scale) -> list[str]:
    """Small marks at the bottom of the chart where a value was NaN or infinite."""
    steps = sorted({p[0] for s in series for p in s.points if not drawable(p[1])})
    places = sorted({round(scale.at((step, 1.0))[0], 1) for step in steps[:5000]})
    y = HEIGHT - _BOTTOM
    return [
        _element("path", class_="bad", d=f"M{x - 3:.1f},{y}l3,-6l3,6z")
        for x in places[:: len(places) // 200 + 1]
    ]


def _hovers(series: Sequence[Series], scale: _Scale) -> list[str]:
    """Invisible strips that show the values under the pointer."""
    steps = sorted({p[0] for s in series for p in s.points})
    values = [(s.name, dict(s.points)) for s in series]
    chosen = steps[:: -(-len(steps) // _HOVERS)]
    if chosen[-1] != steps[-1]:
        chosen.append(steps[-1])
    places = [scale.at((step, 1.0))[0] for step in chosen]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(places)), WIDTH - _RIGHT]
    parts = []
    for step, (left, right) in zip(chosen, pairwise(edges), strict=True):
        shown = [f"{name} {number(known[step])}" for name, known in values if step in known]
        title = _element("title", escape(f"step {step:g}: {', '.join(shown)}"))
        width = max(0.5, right - left)
        box = {"x": left, "y": _TOP, "width": width, "height": HEIGHT - _TOP - _BOTTOM}
        parts.append(_element("rect", title, class_="hover", **box))
    return parts


# The lanes of one step.

MAX_RANKS = 8
"""Number of ranks drawn; the tables next to the picture include all ranks."""

MAX_BARS = 4500
"""Number of bars drawn over all ranks: about 0.9 MB of text."""

PHASES = ("forward", "recompute", "backward", "optimizer")

_Ranked = Mapping[int, Mapping[str, Sequence[Bar]]]
_GOLDEN = (5**0.5 - 1) / 2

_STEP_WIDTH, _GUTTER, _EDGE = 1120, 122, 30
_AXIS, _RANK_GAP, _LANE_GAP = 26, 24, 4
_ROW, _MAX_ROWS = 6, 7
_TALL = {"compute": 22.0, "optimizer": 14.0}  # lanes of a fixed height
_TINY = 0.4

_NAMES = {
    "AG": "gather",
    "RS": "reduce-scatter",
    "EX": "exchange between replicas",
    "A2A": "all-to-all",
    "RING": "keys and values",
    "WAIT": "waiting",
    "COMPUTE": "compute",
    "STEP": "optimizer step",
    "PUBLISH": "parameter all-gather",
    "MATRIX": "matrices to or from their owners",
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
    """Draw one step.

    Args:
        events: rank -> its events of the step.
    """
    ranks = [rank for rank in sorted(events) if events[rank]][:MAX_RANKS]
    timelines = {rank: build_timeline(events[rank]) for rank in ranks}
    if not any(t.window[1] > t.window[0] for t in timelines.values()):
        return Drawing(Markup(), 0)
    origin = _shared_origin(timelines)
    starts = {r: t.window[0] if origin is None else origin for r, t in timelines.items()}
    seconds = max(t.window[1] - starts[r] for r, t in timelines.items())
    ranked: _Ranked = {
        rank: {
            name: [replace(b, start=b.start - starts[rank], end=b.end - starts[rank]) for b in bars]
            for name, bars in t.lanes.items()
        }
        for rank, t in timelines.items()
    }
    ranked, exact = _within_limits(ranked, seconds)
    lanes = [name for name in LANES if any(found[name] for found in ranked.values())]
    body: list[str] = []
    top = float(_AXIS)
    for rank, found in ranked.items():
        body.append(_element("text", f"rank {rank}", class_="rank", x=4, y=top + 15))
        top += _RANK_GAP
        for name in lanes:
            drawn, height = _lane(name, found[name], seconds, top)
            body += drawn
            top += height + _LANE_GAP
        top += 4
    svg = _element(
        "svg", "".join([*_grid(seconds, top), *body]), class_="timeline", role="img",
        viewBox=f"0 0 {_STEP_WIDTH} {top + _AXIS:.0f}",
        aria_label="timeline of one step, lanes by rank",
    )  # fmt: skip
    return Drawing(Markup(svg), len(ranked), exact)


def _shared_origin(timelines: Mapping[int, Timeline]) -> float | None:
    """The earliest start, if the ranks' steps overlap in time, else ``None``.

    Processes of one machine share a clock, and the skew between them should be visible. Clocks of
    different machines are unrelated, so each rank is then drawn from its own start.
    """
    first_end = min(t.window[1] for t in timelines.values())
    last_start = max(t.window[0] for t in timelines.values())
    return min(t.window[0] for t in timelines.values()) if last_start < first_end else None


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


def _grid(seconds: float, bottom: float) -> list[str]:
    parts = []
    for value in ticks(0.0, seconds * 1e3, 10):
        x = _across(value / 1e3, seconds)
        parts.append(_element("line", class_="grid", x1=x, x2=x, y1=_AXIS - 6, y2=bottom))
        for y in (_AXIS - 11, bottom + 14):
            label = {"class_": "tick", "x": x, "y": y, "text_anchor": "middle"}
            parts.append(_element("text", f"{number(value)} ms", **label))
    return parts


def _lane(name: str, bars: Sequence[Bar], seconds: float, top: float) -> tuple[list[str], float]:
    """The lane's SVG elements and its height; bars in flight together are stacked."""
    # One thread computes: its bars are never stacked, even if waits enclose each other.
    rows, count = ([0] * len(bars), 1) if name == "compute" else _stack(bars)
    height = _TALL.get(name, max(14.0, float(_ROW * count)))
    row_height = height / max(1, count) if name in _TALL else float(_ROW)
    thick = height if count <= 1 else row_height - 1
    label = {"class_": "lane", "x": _GUTTER - 8, "y": top + height / 2 + 4, "text_anchor": "end"}
    track = {"x": _GUTTER, "y": top, "width": _STEP_WIDTH - _GUTTER - _EDGE, "height": height}
    parts = [_element("text", name, **label), _element("rect", class_="track", **track)]
    for bar, row in zip(bars, rows, strict=True):
        x, y = _across(bar.start, seconds), top + row * row_height
        width = max(_TINY, _across(bar.end, seconds) - x)
        box = {"x": x, "y": y, "width": width, "height": thick}
        title = _element("title", escape(_description(bar)))
        parts.append(_element("rect", title, class_=_style(bar), **box))
        if bar.kind == "COMPUTE" and bar.unit and width > 7 + 6.3 * len(bar.unit):
            inside = {"class_": "inbar", "x": x + width / 2, "y": y + 15, "text_anchor": "middle"}
            parts.append(_element("text", escape(bar.unit), **inside))
    return parts, height


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
    return f"b {bar.phase}" if bar.phase in PHASES else "b other"


def _description(bar: Bar) -> str:
    name = _NAMES.get(bar.kind, bar.kind)
    # A weight's name usually begins with its unit's.
    what = bar.weight if bar.weight.startswith(bar.unit) else f"{bar.unit} {bar.weight}"
    words = [f"{name} {what or bar.unit}".strip(), *([bar.phase] if bar.phase else [])]
    words.append(f"{bar.start * 1e3:.2f} to {bar.end * 1e3:.2f} ms")
    words.append(f"{(bar.end - bar.start) * 1e3:.2f} ms")
    return " · ".join([*words, *([human(bar.nbytes)] if bar.nbytes else [])])
