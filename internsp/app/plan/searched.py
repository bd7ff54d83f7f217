"""What ``internsp plan --search`` prints, and the configuration that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from internsp.app.config import Config
from internsp.app.plan.answer import bound_of, changed, exposed, human_seconds
from internsp.app.plan.classes import table
from internsp.app.plan.devices import Device
from internsp.app.plan.longest import MemoryBudget
from internsp.app.plan.replayed import replayed
from internsp.app.plan.search import TIE, Found, Layout, Searched, Space, chosen, neighbors, search
from internsp.app.plan.seconds import StepSeconds
from internsp.app.process import terminal
from internsp.base.sizes import human
from internsp.errors import ConfigError
from internsp.mesh import MeshShape


@dataclass(frozen=True)
class Row:
    """A printed layout: what was found, its configuration, and its replayed seconds."""

    found: Found
    config: Config
    seconds: StepSeconds


def print_search(
    config: Config, ranks: int, device: Device, console: Console | None = None,
    write: Path | None = None,
) -> None:
    """Print the ten best layouts of ``config`` on ``ranks`` devices, and what decides.

    Args:
        write: file for the configuration of the best.

    Raises:
        ConfigError: no layout fits; or the file cannot be written.
    """  # fmt: skip
    console = console or terminal.console()
    result, rows, needed = _searched(config, ranks, device)
    best = rows[0]
    console.print(
        f"{result.possible:,} layouts of {ranks:,} x {device.name}; {result.evaluated:,} were "
        f"evaluated, until no other could be among the first {len(result.best)}",
        markup=False,
    )
    cells = []
    for row in rows:
        memory = human(needed) if row is best else f"about {human(round(row.found.nbytes))}"
        tie = "=" if row.seconds.total <= (1 + TIE) * best.seconds.total else ""
        rate = f"{row.seconds.rate(row.found.load):,.0f}"
        share = f"{exposed(row.seconds):.0%}"
        taken = human_seconds(row.seconds.total)
        cells.append((row.found.layout.label(), taken, tie, rate, memory, share))
    columns = ("<layout", "a step", "tie", "tokens/s/device", "memory a rank", "in the open")
    console.print(table("Layouts, the best first", columns, cells))
    for line in _reasons(config, ranks, device, rows):
        console.print(line, markup=False)
    if write is not None:
        _write(write, best.config)
        console.print(f"the best is in {write}", markup=False)


def _searched(
    config: Config, ranks: int, device: Device
) -> tuple[Searched, list[Row], int]:
    """The best ten of which a run takes the first, and the bytes that it needs.

    Where the closed form is too low for all ten, they are left out and the search goes on.
    """
    without: set[Layout] = set()
    while True:
        result = search(config, ranks, device, without=without)
        rows = _accepted(config, ranks, device, result.best)
        for number, row in enumerate(rows):
            needed = _needed(row.config, ranks)
            if needed <= device.memory:
                return result, rows[number:], needed
        without |= {one.layout for one in result.best}


def _needed(config: Config, ranks: int) -> int:
    """Bytes that the fullest rank needs, by the plan of its objects."""
    budget = MemoryBudget(config, ranks)
    return max(
        sum(nbytes for _, nbytes in budget.at(config.data.sequence_length, rank)[0])
        for rank in range(len(budget.ranks))
    )


def _accepted(
    config: Config, ranks: int, device: Device, found: tuple[Found, ...]
) -> list[Row]:
    """Those that a run would not refuse, the chosen one first, then by replayed seconds."""
    rows = []
    for one in found:
        other = changed(config, {**one.layout.settings(), "launch.processes": ranks})
        if other is not None and not other.check(ranks):
            shape = MeshShape(ranks, **other.degrees())
            rows.append(Row(one, other, replayed(other, shape, device)))
    if not rows:
        return []
    rows.sort(key=lambda row: row.seconds.total)
    first = chosen([row.found for row in rows])
    rows.sort(key=lambda row: row.found is not first)
    return rows


def _reasons(config: Config, ranks: int, device: Device, rows: list[Row]) -> Iterator[str]:
    """Why the first is first, what bounds it, and what another degree would cost."""
    best = rows[0]
    name, share = bound_of(best.seconds)
    yield f"{share:.0%} of the best is bound by {name}"
    if len(rows) > 1:
        other = rows[1]
        parts = {*best.seconds.parts, *other.seconds.parts}
        more = {
            part: other.seconds.parts.get(part, 0.0) - best.seconds.parts.get(part, 0.0)
            for part in parts
        }
        most = max(more, key=lambda part: more[part])
        if other.seconds.total <= (1 + TIE) * best.seconds.total:
            yield (
                f"it ties with the second within the model's error of {TIE:.0%}, and has "
                f"{best.found.layout.axes} axes against {other.found.layout.axes}"
            )
        if more[most] > 0:
            yield f"the second spends {human_seconds(more[most])} more on {most}"
    told = []
    for label, found in neighbors(Space(config, ranks, device), best.found.layout):
        if found is None:
            told.append(f"{label}: impossible or too large")
        else:
            cost = found.seconds.total / best.found.seconds.total - 1
            told.append(f"{label}: {cost:+.1%}")
    if told:
        yield f"another degree: {'; '.join(told)}"


def _write(path: Path, config: Config) -> None:
    """Write ``config`` for ``internsp train``, on whatever device is there."""
    parallel = config.parallel.model_copy(update={"device": "auto"})
    text = config.model_copy(update={"parallel": parallel}).to_toml()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path}: {error.strerror}") from error
