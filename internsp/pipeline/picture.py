"""A schedule as SVG text: a row for each rank, time to the right, gathers and reductions marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from internsp.pipeline.simulate import TimedAction

COLORS = {"F": "#4c78a8", "B": "#e07b39", "I": "#f2a65a", "W": "#59a14f"}
NAMES = {
    "F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients",
}  # fmt: skip
LABEL = "stage:micro-batch, ▲ gathers, ▼ reductions launched"
UNIT, ROW, LEFT, TOP = 28, 46, 100, 26

Launched = Mapping[tuple[int, str, int], tuple[int, int]]
"""(stage, kind, micro-batch) -> numbers of gathers and reductions that the action launched."""


def draw(timed: Sequence[TimedAction], launched: Launched, title: str) -> str:
    """One step as SVG.

    Args:
        timed: from :func:`internsp.pipeline.simulate.check_order`: a forward, an input backward
            and a weight backward take one unit of time each.
        launched: what each action launched; triangles up are gathers, down are reductions.
    """
    ranks = 1 + max(t.rank for t in timed)
    width = LEFT + UNIT * max(t.end for t in timed) + 10
    height = TOP + ROW * ranks + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
        f'width="{width:g}" height="{height}" style="min-width:{width:g}px;'
        f'max-width:{1.5 * width:g}px">',
        f"<title>{escape(title)}</title>",
        _text(4, 15, title, 13),
    ]
    parts += [_text(4, TOP + ROW * rank + 17, f"pipeline rank {rank}", 11) for rank in range(ranks)]
    parts += [_box(t, launched.get(_key(t), (0, 0))) for t in timed]
    parts.append(_legend(height - 28, sorted({t.action.kind for t in timed})))
    return "\n".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, size: int, fill: str = "currentColor") -> str:
    """An SVG text element. CSS of the page around the picture would override attributes, so that it
    has a style instead."""
    centered = ";text-anchor:middle" if fill != "currentColor" else ""
    style = f"font:{size}px sans-serif;fill:{fill}{centered}"
    return f'<text x="{x:g}" y="{y:g}" style="{style}">{escape(text)}</text>'


def _key(timed: TimedAction) -> tuple[int, str, int]:
    return timed.action.stage, timed.action.kind, timed.action.micro_batch


def _box(timed: TimedAction, launched: tuple[int, int]) -> str:
    action, (gathers, reductions) = timed.action, launched
    x, y = LEFT + UNIT * timed.start, TOP + ROW * timed.rank
    wide = UNIT * (timed.end - timed.start) - 1
    title = (
        f"stage {action.stage}, micro-batch {action.micro_batch}, {NAMES[action.kind]}: "
        f"{gathers} gathers, {reductions} reductions"
    )
    marks = []
    if gathers:
        marks.append(_text(x + 3, y + 33, f"▲{gathers}", 8))
    if reductions:
        marks.append(_text(x + 3, y + (42 if gathers else 33), f"▼{reductions}", 8))
    label = _text(x + wide / 2, y + 16, f"{action.stage}:{action.micro_batch}", 10, "#fff")
    return (
        f'<g><title>{title}</title><rect x="{x:g}" y="{y}" width="{wide:g}" height="24" rx="2" '
        f'fill="{COLORS[action.kind]}"/>{label}{"".join(marks)}</g>'
    )


def _legend(y: float, kinds: Sequence[str]) -> str:
    x, parts = LEFT, []
    for kind in kinds:
        parts.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLORS[kind]}"/>'
            f"{_text(x + 14, y, NAMES[kind], 11)}"
        )
        x += 115
    return "".join([*parts, _text(LEFT, y + 16, LABEL, 11)])
