"""What ``internsp plan --search`` prints, and the configuration that it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from internsp.app.config import Config
from internsp.app.plan.answer import bound_of, exposed, write_text
from internsp.app.plan.classes import table
from internsp.app.plan.devices import Device
from internsp.app.plan.replayed import StepReplay
from internsp.app.plan.search import TIE, Found, Space, chosen, neighbors, search
from internsp.app.plan.seconds import StepSeconds
from internsp.app.process import terminal
from internsp.app.report.timeline import human_seconds
from internsp.base.sizes import human

Row = tuple[Found, StepSeconds]
"""A printed layout, and its replayed seconds."""


def print_search(
    config: Config,
    ranks: int,
    device: Device,
    console: Console | None = None,
    write: Path | None = None,
) -> None:
    """Print the ten best layouts of ``config`` on ``ranks`` devices, and what decides.

    Args:
        write: file for the configuration of the best.

    Raises:
        ConfigError: no layout fits; or the file cannot be written.
    """
    console = console or terminal.console()
    result = search(config, ranks, device)
    rows = _rows(device, result.best)
    best, seconds = rows[0]
    console.print(
        f"{result.possible:,} layouts of {ranks:,} x {device.name}; {result.evaluated:,} were "
        f"evaluated and {result.planned:,} planned, until no other could be among the first "
        f"{len(result.best)}",
        markup=False,
    )
    cells = [
        (
            found.layout.label(), human_seconds(taken.total),
            "=" if taken.total <= (1 + TIE) * seconds.total else "",
            f"{taken.rate(found.load):,.0f}", human(found.nbytes), f"{exposed(taken):.0%}",
        )
        for found, taken in rows
    ]  # fmt: skip
    columns = ("<layout", "a step", "tie", "tokens/s/device", "memory a rank", "in the open")
    console.print(table("Layouts, the best first", columns, cells))
    for line in _reasons(result.space, rows):
        console.print(line, markup=False)
    if write is not None:
        text = best.config.replaced({"parallel.device": "auto"}).to_toml()  # whatever is there
        write_text("--write", write, text)
        console.print(f"the best is in {write}", markup=False)


def _rows(device: Device, found: Sequence[Found]) -> list[Row]:
    """The chosen one first, then by replayed seconds."""
    rows = [(one, StepReplay(one.plan).on(device)) for one in found]
    rows.sort(key=lambda row: row[1].total)
    first = chosen([one for one, _ in rows])
    rows.sort(key=lambda row: row[0] is not first)
    return rows


def _reasons(space: Space, rows: list[Row]) -> Iterator[str]:
    """Why the first is first, what bounds it, and what another degree would cost."""
    best, seconds = rows[0]
    name, share = bound_of(seconds)
    yield f"{share:.0%} of the best is bound by {name}"
    if len(rows) > 1:
        second, other = rows[1]
        more = {
            part: other.parts.get(part, 0.0) - seconds.parts.get(part, 0.0)
            for part in {*seconds.parts, *other.parts}
        }
        most = max(more, key=lambda part: more[part])
        if other.total <= (1 + TIE) * seconds.total:
            yield (
                f"it ties with the second within the model's error of {TIE:.0%}, and has "
                f"{best.layout.axes} axes against {second.layout.axes}"
            )
        if more[most] > 0:
            yield f"the second spends {human_seconds(more[most])} more on {most}"
    told = []
    for label, found in neighbors(space, best.layout):
        if found is None:
            told.append(f"{label}: impossible or too large")
        else:
            cost = found.seconds.total / best.seconds.total - 1
            told.append(f"{label}: {cost:+.1%}")
    if told:
        yield f"another degree: {'; '.join(told)}"
