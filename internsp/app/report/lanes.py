"""The report's picture of one step, as SVG: lanes of each rank over a common time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup, escape

from internsp.app.report.charts import number, ticks
from internsp.app.report.timeline import LANES, Bar, Timeline, build_timeline
from internsp.base.sizes import human
from internsp.base.trace import Event

MAX_RANKS = 8
"""Number of ranks drawn; the tables next to the picture include all ranks."""

MAX_BARS = 4500
"""Number of bars drawn over all ranks: about 0.9 MB of text."""

_Ranked = Mapping[int, Mapping[str, Sequence[Bar]]]
_Key = tuple[str, str]
_IDLE: _Key = ("", "")

_WIDTH, _GUTTER, _RIGHT = 1120, 122, 14
_AXIS, _RANK_GAP, _LANE_GAP = 26, 24, 4
_ROW, _MAX_ROWS, _COMPUTE = 6, 7, 22
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
PHASES = ("forward", "recompute", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps seconds since a rank's origin to a horizontal position."""

    seconds: float

    def at(self, seconds: float) -> float:
        return _GUTTER + seconds / self.seconds * (_WIDTH - _GUTTER - _RIGHT)


def shared_origin(timelines: Mapping[int, Timeline]) -> float | None:
    """The earliest start, if the ranks' steps overlap in time, else ``None``.

    Processes of one machine share a clock, and the skew between them should be visible. Clocks of
    different machines are unrelated, so each rank is then drawn from its own start.
    """
    if not timelines:
        return None
    first_end = min(t.window[1] for t in timelines.values())
    last_start = max(t.window[0] for t in timelines.values())
    return min(t.window[0] for t in timelines.values()) if last_start < first_end else None


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
    origin = shared_origin(timelines)
    starts = {r: t.window[0] if origin is None else origin for r, t in timelines.items()}
    axis = _Axis(max(t.window[1] - starts[r] for r, t in timelines.items()))
    ranked: _Ranked = {
        rank: {name: [_moved(b, -starts[rank]) for b in t.lanes[name]] for name in LANES}
        for rank, t in timelines.items()
    }
    ranked, exact = _within_limits(ranked, axis)
    lanes = [name for name in LANES if any(found[name] for found in ranked.values())]
    body: list[str] = []
    top = float(_AXIS)
    for rank, found in ranked.items():
        body.append(f'<text class="rank" x="4" y="{top + 15:.0f}">rank {rank}</text>')
        top += _RANK_GAP
        for name in lanes:
            drawn, height = _lane(name, found[name], axis, top)
            body += drawn
            top += height + _LANE_GAP
        top += 4
    head = (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {top + _AXIS:.0f}" role="img" '
        'aria-label="timeline of one step, lanes by rank">'
    )
    svg = Markup("".join([head, *_grid(axis, top), *body, "</svg>"]))
    return Drawing(svg, len(ranked), exact)


def _moved(bar: Bar, seconds: float) -> Bar:
    return replace(bar, start=bar.start + seconds, end=bar.end + seconds)


def _within_limits(ranked: _Ranked, axis: _Axis) -> tuple[_Ranked, bool]:
    """Limit the picture to about ``MAX_BARS`` bars; also returns whether they are exact.

    First joins the bars of each unit that overlap, then drops ranks (down to two), and only then
    replaces bars by the cells of a grid, filled in proportion.
    """
    if _count(ranked) <= MAX_BARS:
        return ranked, True
    ranked = {
        rank: {name: _joined(bars) for name, bars in lanes.items()}
        for rank, lanes in ranked.items()
    }
    while _count(ranked) > MAX_BARS and len(ranked) > 2:
        ranked = dict(list(ranked.items())[: (len(ranked) + 1) // 2])
    if _count(ranked) <= MAX_BARS:
        return ranked, True
    cells = MAX_BARS // (len(ranked) * len(LANES))
    ranked = {
        rank: {name: _rastered(bars, axis.seconds / cells) for name, bars in lanes.items()}
        for rank, lanes in ranked.items()
    }
    return ranked, False


def _count(ranked: _Ranked) -> int:
    return sum(len(bars) for lanes in ranked.values() for bars in lanes.values())


def _joined(bars: Sequence[Bar]) -> Sequence[Bar]:
    """Join bars of the same kind, unit and phase that touch or overlap."""
    merged: list[Bar] = []
    latest: dict[tuple[str, str, str], int] = {}
    for bar in bars:
        key = (bar.kind, bar.phase, bar.unit)
        at = latest.get(key)
        if at is None or bar.start > merged[at].end:
            latest[key] = len(merged)
            merged.append(bar)
            continue
        old = merged[at]
        end, nbytes = max(old.end, bar.end), old.nbytes + bar.nbytes
        merged[at] = replace(old, end=end, nbytes=nbytes, weight="")
    return merged


def _rastered(bars: Sequence[Bar], cell: float) -> Sequence[Bar]:
    """Replace bars by at most one for each ``cell`` seconds; equal neighbors are joined.

    What a cell cannot show is carried to the next cells, so that over a few cells every kind and
    phase, and idle time, get space in proportion. Showing only the longest of each cell would hide
    many short waits, and joining waits over the compute between them would draw one long wait.
    """
    shares: dict[int, dict[_Key, float]] = {}
    units: dict[tuple[int, _Key], str] = {}
    for bar in bars:
        key = (bar.kind, bar.phase)
        for i in range(int(bar.start / cell), int(bar.end / cell) + 1):
            shared = min(bar.end, (i + 1) * cell) - max(bar.start, i * cell)
            sums = shares.setdefault(i, {})
            sums[key] = sums.get(key, 0.0) + max(0.0, shared)
            units.setdefault((i, key), bar.unit)
    carried: dict[_Key, float] = {}
    current: dict[_Key, str] = {}
    out: list[Bar] = []
    for i in range(max(shares, default=-1) + 1):
        sums = shares.get(i, {})
        total = max(cell, sum(sums.values()))
        for key, shared in [*sums.items(), (_IDLE, max(0.0, cell - sum(sums.values())))]:
            carried[key] = carried.get(key, 0.0) + shared * cell / total
            current[key] = units.get((i, key), "")
        key = max(carried, key=lambda k: carried[k])
        carried[key] -= cell
        last = out[-1] if out else None
        if key == _IDLE:
            continue
        if last and (last.kind, last.phase) == key and last.end >= i * cell:
            first = last.unit.split(" … ")[0]
            unit = first if current[key] == first else f"{first} … {current[key]}"
            out[-1] = replace(last, end=(i + 1) * cell, unit=unit)
        else:
            out.append(Bar(key[0], i * cell, (i + 1) * cell, unit=current[key], phase=key[1]))
    return out


def _grid(axis: _Axis, bottom: float) -> list[str]:
    parts = []
    for value in ticks(0.0, axis.seconds * 1e3, 10):
        x = axis.at(value / 1e3)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_AXIS - 6}" y2="{bottom:.0f}"/>'
        )
        for y in (_AXIS - 11, bottom + 14):
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{y:.0f}" text-anchor="middle">'
                f"{number(value)} ms</text>"
            )
    return parts


def _lane(name: str, bars: Sequence[Bar], axis: _Axis, top: float) -> tuple[list[str], float]:
    """The lane's SVG elements and its height; bars in flight together are stacked."""
    # One thread computes: its bars are never stacked, even if waits enclose each other.
    rows, count = ([0] * len(bars), 1) if name == "compute" else _stack(bars)
    tall = name in ("compute", "optimizer")
    if tall:
        height = float(_COMPUTE if name == "compute" else 14)
        row_height = height / max(1, count)
    else:
        row_height = float(_ROW)
        height = max(14.0, row_height * count)
    parts = [
        f'<text class="lane" x="{_GUTTER - 8}" y="{top + height / 2 + 4:.1f}" '
        f'text-anchor="end">{name}</text>',
        f'<rect class="track" x="{_GUTTER}" y="{top:.1f}" '
        f'width="{_WIDTH - _GUTTER - _RIGHT}" height="{height:.1f}"/>',
    ]
    thick = height if count <= 1 else row_height - 1
    for bar, row in zip(bars, rows, strict=True):
        x = axis.at(bar.start)
        width = max(_TINY, axis.at(bar.end) - x)
        y = top + row * row_height
        parts.append(
            f'<rect class="{_style(bar)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{thick:.1f}"><title>{escape(_description(bar))}</title></rect>'
        )
        if bar.kind == "COMPUTE" and bar.unit and width > 7 + 6.3 * len(bar.unit):
            parts.append(
                f'<text class="inbar" x="{x + width / 2:.1f}" y="{y + 15:.1f}" '
                f'text-anchor="middle">{escape(bar.unit)}</text>'
            )
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
    words = [f"{name} {what or bar.unit}".strip()]
    if bar.phase:
        words.append(bar.phase)
    words.append(f"{bar.start * 1e3:.2f} to {bar.end * 1e3:.2f} ms")
    words.append(f"{(bar.end - bar.start) * 1e3:.2f} ms")
    if bar.nbytes:
        words.append(human(bar.nbytes))
    return " · ".join(words)
