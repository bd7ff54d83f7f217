"""A picture of a schedule: ranks down, time across, gathers and reductions marked. SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from internsp.pipeline.plan import Timed

COLOURS = {"F": "#4c78a8", "B": "#e07b39", "I": "#f2a65a", "W": "#59a14f"}
NAMES = {
    "F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients",
}  # fmt: skip
UNIT, ROW, LEFT, TOP = 26, 46, 70, 26

Launched = Mapping[tuple[int, str, int], tuple[int, int]]
"""(stage, kind, micro-batch) -> gathers and reductions launched in it."""


def draw(timed: Sequence[Timed], launched: Launched, title: str) -> str:
    """One step as SVG.

    Args:
        timed: from :func:`internsp.pipeline.plan.check`: a forward, an input and a weight part take
            one unit of time each.
        launched: what each computation launched; triangles up are gathers, down are reductions.
    """
    ranks = 1 + max(t.rank for t in timed)
    width = LEFT + UNIT * max(t.end for t in timed) + 10
    height = TOP + ROW * ranks + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
        f'width="{width:g}" height="{height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<text x="4" y="15" font-size="13" fill="currentColor">{escape(title)}</text>',
    ]
    parts += [
        f'<text x="4" y="{TOP + ROW * rank + 17}" fill="currentColor">rank {rank}</text>'
        for rank in range(ranks)
    ]
    parts += [_box(t, launched.get(_key(t), (0, 0))) for t in timed]
    parts.append(_legend(height - 14, sorted({t.step.kind for t in timed})))
    return "\n".join([*parts, "</svg>"])


def _key(timed: Timed) -> tuple[int, str, int]:
    return timed.step.stage, timed.step.kind, timed.step.micro_batch


def _box(timed: Timed, launched: tuple[int, int]) -> str:
    step, (gathers, reductions) = timed.step, launched
    x, y = LEFT + UNIT * timed.start, TOP + ROW * timed.rank
    wide = UNIT * (timed.end - timed.start) - 1
    told = (
        f"stage {step.stage}, micro-batch {step.micro_batch}, {NAMES[step.kind]}: "
        f"{gathers} gathers, {reductions} reductions"
    )
    marks = []
    if gathers:
        marks.append(_mark(x + 3, y + 26, gathers, "▲"))
    if reductions:
        marks.append(_mark(x + 3, y + (37 if gathers else 26), reductions, "▼"))
    return (
        f'<g><title>{told}</title><rect x="{x:g}" y="{y}" width="{wide:g}" height="24" rx="2" '
        f'fill="{COLOURS[step.kind]}"/><text x="{x + wide / 2:g}" y="{y + 16}" fill="#fff" '
        f'text-anchor="middle">{step.stage}:{step.micro_batch}</text>{"".join(marks)}</g>'
    )


def _mark(x: float, y: float, count: int, sign: str) -> str:
    text = f"{sign}{count}"
    return f'<text x="{x:g}" y="{y + 8:g}" font-size="8" fill="currentColor">{text}</text>'


def _legend(y: float, kinds: Sequence[str]) -> str:
    x, parts = LEFT, []
    for kind in kinds:
        parts.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[kind]}"/>'
            f'<text x="{x + 14}" y="{y}" fill="currentColor">{NAMES[kind]}</text>'
        )
        x += 115
    parts.append(
        f'<text x="{x}" y="{y}" fill="currentColor">stage:micro-batch, ▲ gathers, ▼ reductions'
        "</text>"
    )
    return "".join(parts)
