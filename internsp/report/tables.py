"""The report's tables and bars as HTML text: communication, waits, mesh, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from internsp.report.lanes import size
from internsp.report.timeline import (
    COMMUNICATION,
    CommunicationRow,
    StepTimes,
    communication,
    step_times,
    where_waited,
)
from internsp.trace import Event

COORDINATES = ("pipeline", "weight", "replica", "sequence", "data", "zero")
"""Keys of a rank's row that the mesh tables know, beside "rank"."""

_WORST = 3
_MAX_BLOCKS = 512
_MAX_GRID = 64
_HEADS = ("collectives", "payload", "in flight", "hidden", "exposed", "worst rank")


def communication_table(events: Mapping[int, Sequence[Event]]) -> str:
    """Hidden and exposed time by kind and phase: means over the ranks, in milliseconds."""
    traces = [trace for _, trace in sorted(events.items()) if trace]
    if not traces:
        return '<p class="empty">No step was traced.</p>'
    whole = [communication(trace) for trace in traces]
    parts = [communication(trace, by=("phase",)) for trace in traces]
    lines = []
    for kind in COMMUNICATION:
        rows = [row for rank in whole for row in rank if row.kind == kind]
        if not rows:
            continue
        lines.append(_communication_line(COMMUNICATION[kind], "", rows, len(traces)))
        phases = dict.fromkeys(r.phase for rank in parts for r in rank if r.kind == kind)
        for phase in phases if len(phases) > 1 else ():
            rows = [r for rank in parts for r in rank if (r.kind, r.phase) == (kind, phase)]
            lines.append(_communication_line("", phase or "-", rows, len(traces)))
    lines.append(_total_line([step_times(trace) for trace in traces]))
    head = "".join(f"<th>{name}</th>" for name in _HEADS)
    return (
        '<div class="scroll"><table class="communication"><thead><tr>'
        f'<th></th><th class="name">phase</th>{head}<th></th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _communication_line(name: str, phase: str, rows: Sequence[CommunicationRow], ranks: int) -> str:
    """A rank without such communication counts as zero in the means."""
    exposed = sum(r.exposed for r in rows) / ranks
    hidden = sum(r.hidden for r in rows) / ranks
    cells = [
        f"<td>{escape(name)}</td>",
        f'<td class="name">{escape(phase) or "all"}</td>',
        f"<td>{sum(r.count for r in rows) / ranks:g}</td>",
        f"<td>{size(sum(r.nbytes for r in rows) / ranks)}</td>",
        *_times(exposed, hidden, max(r.exposed for r in rows)),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _total_line(times: Sequence[StepTimes]) -> str:
    exposed = sum(t.exposed for t in times) / len(times)
    hidden = sum(t.hidden for t in times) / len(times)
    cells = "".join(_times(exposed, hidden, max(t.exposed for t in times)))
    return f'<tr class="total"><td>together</td><td></td><td></td><td></td>{cells}</tr>'


def _times(exposed: float, hidden: float, worst: float) -> list[str]:
    share = hidden / (hidden + exposed) if hidden + exposed > 0 else 0.0
    bar = (
        f'<span class="split" title="{share:.0%} hidden"><i class="hid" style="width:{share:.1%}">'
        f'</i><i class="wait" style="flex:1"></i></span>'
        if hidden + exposed > 0
        else ""
    )
    values = (exposed + hidden, hidden, exposed, worst)
    return [*(f"<td>{value * 1e3:.2f}</td>" for value in values), f"<td>{bar}</td>"]


def waits_table(events: Mapping[int, Sequence[Event]]) -> str:
    """Where the computing thread waited: milliseconds by phase and kind, with the worst blocks.

    Means over the ranks. Every block is listed in a part that can be opened.
    """
    traces = [trace for trace in events.values() if trace]
    places: dict[tuple[str, str], dict[str, float]] = {}
    for trace in traces:
        for row in where_waited(trace):
            units = places.setdefault((row.phase, row.kind), {})
            units[row.unit] = units.get(row.unit, 0.0) + row.seconds * 1e3 / len(traces)
    total = sum(sum(units.values()) for units in places.values())
    if total <= 0:
        return '<p class="empty">Nothing waited.</p>'
    lines = []
    for (phase, kind), units in sorted(places.items(), key=lambda item: -sum(item[1].values())):
        worst = sorted(units.items(), key=lambda item: -item[1])[:_WORST]
        told = ", ".join(f"{escape(unit or '-')} {value:.2f}" for unit, value in worst)
        lines.append(
            f"<tr><td>{escape(phase or '-')}</td>"
            f'<td class="name">{escape(COMMUNICATION.get(kind, "-"))}</td>'
            f"<td>{sum(units.values()):.2f}</td><td>{sum(units.values()) / total:.0%}</td>"
            f'<td class="name">{told}</td></tr>'
        )
    return (
        '<div class="scroll"><table class="waits"><thead><tr><th>phase</th><th class="name">for'
        '</th><th>ms</th><th>share</th><th class="name">most in block (ms)</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{_blocks_table(places)}"
    )


def _blocks_table(places: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    phases = list(dict.fromkeys(phase for phase, _ in places))
    units = sorted({u for found in places.values() for u in found}, key=_natural)[:_MAX_BLOCKS]
    lines = []
    for unit in units:
        cells = [
            sum(found.get(unit, 0.0) for (p, _), found in places.items() if p == phase)
            for phase in phases
        ]
        values = "".join(f"<td>{value:.2f}</td>" for value in [*cells, sum(cells)])
        lines.append(f"<tr><td>{escape(unit or '-')}</td>{values}</tr>")
    head = "".join(f"<th>{escape(name or '-')}</th>" for name in ["block", *phases, "together"])
    return (
        "<details><summary>by block, in ms</summary>"
        f'<div class="scroll"><table class="blocks"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``layers.2`` before ``layers.10``."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", name)]


def mesh_html(mesh: Mapping[str, int], ranks: Sequence[Mapping[str, int]]) -> str:
    """Degrees, the two factorings of the ranks as grids, and every rank's coordinates."""
    chips = "".join(f"<li>{escape(name)} <b>{value}</b></li>" for name, value in mesh.items())
    parts = [f'<ul class="chips">{chips}</ul>']
    stages = sorted({row.get("pipeline", 0) for row in ranks})
    if len(ranks) <= _MAX_GRID:
        for stage in stages:
            rows = [row for row in ranks if row.get("pipeline", 0) == stage]
            title = f"stage {stage}: " if len(stages) > 1 else ""
            grids = _grid(rows, "replica", "weight", title) + _grid(rows, "data", "sequence", title)
            parts.append(f'<div class="groups">{grids}</div>')
    columns = [name for name in COORDINATES if any(name in row for row in ranks)]
    head = "".join(f"<th>{name}</th>" for name in ("rank", *columns))
    body = "".join(
        "<tr>" + "".join(f"<td>{row.get(name, '')}</td>" for name in ("rank", *columns)) + "</tr>"
        for row in ranks
    )
    opened = " open" if len(ranks) <= 8 else ""
    parts.append(
        f"<details{opened}><summary>coordinates of each rank</summary>"
        f'<div class="scroll"><table class="mesh"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details>"
    )
    return "".join(parts)


def _grid(ranks: Sequence[Mapping[str, int]], down: str, across: str, title: str) -> str:
    """Ranks by two coordinates; a line of the grid is one group of the ``across`` axis."""
    if not all(down in row and across in row for row in ranks):
        return ""
    lines = sorted({row[down] for row in ranks})
    columns = sorted({row[across] for row in ranks})
    body = []
    for line in lines:
        cells = []
        for column in columns:
            here = [str(r["rank"]) for r in ranks if (r[down], r[across]) == (line, column)]
            cells.append(f"<td><span>{', '.join(here)}</span></td>" if here else "<td></td>")
        body.append(f"<tr><th>{down} {line}</th>{''.join(cells)}</tr>")
    head = "".join(f"<th>{across} {column}</th>" for column in columns)
    style = "ranks seq" if across == "sequence" else "ranks"
    return (
        f'<div class="scroll"><h3>{title}{across} groups (one a line)</h3><table class="{style}">'
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def memory_html(memory: Sequence[tuple[str, int]]) -> str:
    """A bar for each component, in the given order, and their sum."""
    if not memory:
        return '<p class="empty">Memory was not counted.</p>'
    greatest = max(max(nbytes for _, nbytes in memory), 1)
    lines = [
        f'<span>{escape(name)}</span><span class="bar"><i style="width:{nbytes / greatest:.2%}">'
        f'</i></span><span class="value">{size(nbytes)}</span>'
        for name, nbytes in memory
    ]
    total = size(sum(nbytes for _, nbytes in memory))
    lines.append(f'<span class="sum">sum</span><span></span><span class="value sum">{total}</span>')
    return f'<div class="bars">{"".join(lines)}</div>'
