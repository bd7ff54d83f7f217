"""Line charts for the report, as SVG without a library or a script, colored by the page's style.

Of many steps, a chart keeps the smallest and the largest value in each of a few hundred buckets, so
that a spike of one step stays visible. Values that are not finite interrupt the line and are marked
at the bottom of the chart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 34
_BUCKETS = 250
_HOVERS = 120


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


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within [low, high], about ``count`` of them, at steps of 1, 2 or 5."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """A short label: ``12.5k``, ``3e-4``, ``0.25``."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.4g}{unit}"
    if size and size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps data to positions in the drawing; ``log``: logarithmic vertical axis."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool

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
        return Markup('<p class="empty">No finite value of {} to draw.</p>').format(label)
    scale = _scale(series, finite, zero)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}"'
    parts = [f'<svg class="chart" {box}>', *_axes(scale)]
    for one in series:
        parts += _line(one, scale)
    parts += _broken(series, scale)
    parts += _hovers(series, scale)
    return Markup("".join([*parts, "</svg>"]))


def _scale(series: Sequence[Series], finite: list[Point], zero: bool) -> _Scale:
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
    return _Scale((x0, x1), (bottom, high + margin), log)


def _axes(scale: _Scale) -> list[str]:
    parts = []
    if scale.log:
        low, high = math.ceil(scale.y[0]), math.floor(scale.y[1])
        powers = range(low, high + 1, 1 + (high - low) // 6)
        values = [10.0**p for p in powers] or [10 ** scale.y[0], 10 ** scale.y[1]]
    else:
        values = ticks(*scale.y)
    for value in values:
        _, y = scale.at((scale.x[0], value))
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">'
            f"{number(value)}</text>"
        )
    floor = HEIGHT - _BOTTOM
    for value in ticks(*scale.x, 6):
        if value != round(value):
            continue
        x, _ = scale.at((value, 1.0))
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}"/>'
            f'<text class="tick" x="{x:.1f}" y="{floor + 17}" text-anchor="middle">'
            f"{number(value)}</text>"
        )
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>'
    )
    parts.append(
        f'<text class="unit" x="{WIDTH - _RIGHT}" y="{HEIGHT - 3}" text-anchor="end">step</text>'
    )
    return parts


def _line(series: Series, scale: _Scale) -> list[str]:
    strokes = [(series.points, series.style)]
    if series.noisy and not series.dots and len(series.points) > 60:
        strokes = [(series.points, f"{series.style} faint"), (smooth(series.points), series.style)]
    parts = [_path(downsample(points), scale, style) for points, style in strokes]
    if series.dots or len(series.points) <= 12:
        parts += _dots(series.points, scale, series.style)
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
    return f'<path class="line {style}" d="{"".join(commands)}"/>'


def _dots(points: Sequence[Point], scale: _Scale, style: str) -> list[str]:
    places = [scale.at(p) for p in points if drawable(p[1])]
    return [f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]


def _broken(series: Sequence[Series], scale: _Scale) -> list[str]:
    """Small marks at the bottom of the chart where a value was NaN or infinite."""
    steps = sorted({p[0] for s in series for p in s.points if not drawable(p[1])})
    places = sorted({round(scale.at((step, 1.0))[0], 1) for step in steps[:5000]})
    y = HEIGHT - _BOTTOM
    return [
        f'<path class="bad" d="M{x - 3:.1f},{y}l3,-6l3,6z"/>'
        for x in places[:: len(places) // 200 + 1]
    ]


def _hovers(series: Sequence[Series], scale: _Scale) -> list[str]:
    """Invisible strips that show the values under the pointer."""
    steps = sorted({p[0] for s in series for p in s.points})
    values = [(s.name, dict(s.points)) for s in series]
    stride = -(-len(steps) // _HOVERS)
    chosen = steps[::stride]
    if chosen[-1] != steps[-1]:
        chosen.append(steps[-1])
    places = [scale.at((step, 1.0))[0] for step in chosen]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(places)), WIDTH - _RIGHT]
    parts = []
    for step, (left, right) in zip(chosen, pairwise(edges), strict=True):
        shown = [f"{name} {number(known[step])}" for name, known in values if step in known]
        parts.append(
            f'<rect class="hover" x="{left:.1f}" y="{_TOP}" width="{max(0.5, right - left):.1f}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}"><title>step {step:g}: {escape(", ".join(shown))}'
            "</title></rect>"
        )
    return parts
