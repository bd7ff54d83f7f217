"""How ``internsp plan`` prints many ranks and long schedules: by classes, with ranges of numbers.

Few ranks and short schedules are printed one by one.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from internsp.config.errors import in_words
from internsp.config.sizes import human
from internsp.mesh.shape import MeshShape
from internsp.plan.chunk import Schedule
from internsp.plan.offloaded import with_sums
from internsp.plan.repeats import Item, folded_lines, ranges
from internsp.plan.rules import CONFIGURED, Rules
from internsp.terminal import FittingTable

FEW_RANKS = 16
FEW_STAGES = 4
FEW_LINES = 400
FEW_PASSES = 100
_SHOWN_GROUPS = 3  # of the groups of one kind, before the last one


def print_mesh(shape: MeshShape, console: Console) -> None:
    """Every rank's places, or of many ranks those of each pipeline stage and who shares a group."""
    if shape.world_size > FEW_RANKS:
        console.print(_stages_table(shape))
        console.print(_groups_table(shape))
        if shape.ring > 1:
            console.print(f"Sequence of {shape.sequence_axes}.")
        return
    rows, own = [], []
    for rank in range(shape.world_size):
        inside = rank % shape.stage_size
        replica, _, weight = shape.dense.place(inside)
        data, sequence = divmod(inside, shape.sequence)
        zero = replica % shape.zero_size
        places = shape.sequence_axes.place(sequence) if shape.ring > 1 else ()
        stage = rank // shape.stage_size
        rows.append((rank, stage, data, sequence, *places, replica, zero, weight))
        replica, expert, weight = shape.experts.place(inside)
        own.append((rank, replica, replica % shape.experts.zero, expert, weight))
    axes = ("ring", "heads") if shape.ring > 1 else ()
    columns = ("rank", "pipeline", "data", "sequence", *axes, "replica", "zero", "weight")
    console.print(table(f"Mesh of {shape.world_size} ranks", columns, rows))
    if shape.ring > 1:
        console.print(f"Sequence of {shape.sequence_axes}.")
    if shape.separate:
        around = ("rank", "replica", "zero", "expert", "expert weight")
        console.print(table("Experts on the same ranks", around, own))


def _stages_table(shape: MeshShape) -> Table:
    """Ranks of a stage do the same with other parts of the data and the weights."""
    places = (shape.data, shape.sequence, shape.replicas, shape.zero_size, shape.weight)
    inside = [ranges(range(size)) for size in places]
    rows = [
        (ranges(range(p * shape.stage_size, (p + 1) * shape.stage_size)), p, *inside)
        for p in range(min(shape.pipeline, FEW_RANKS))
    ]
    if shape.pipeline > FEW_RANKS:
        last = shape.world_size - shape.stage_size
        rows += [("...",), (ranges(range(last, shape.world_size)), shape.pipeline - 1, *inside)]
    columns = ("ranks", "pipeline", "data", "sequence", "replica", "zero", "weight")
    return table(f"Mesh of {shape.world_size} ranks, by pipeline stage", columns, rows)


def _groups_table(shape: MeshShape) -> Table:
    names = ["weight", "replica", "zero", "sequence", "data", "pipeline"]
    if shape.ring > 1:
        names[4:4] = ["heads", "ring"]
    if shape.separate:
        names += ["expert", "expert_weight", "expert_replica", "expert_zero"]
    rows = []
    for name in names:
        groups = shape.ranks(name)
        if len(groups[0]) == 1:
            continue
        shown = [ranges(group) for group in groups[:_SHOWN_GROUPS]]
        if len(groups) > _SHOWN_GROUPS:
            shown += ["..."] * (len(groups) > _SHOWN_GROUPS + 1) + [ranges(groups[-1])]
        rows.append((name.replace("_", " "), len(groups[0]), len(groups), "; ".join(shown)))
    return table("Ranks that share a group", ("<group", "ranks", "groups", "<members"), rows)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table for a person: columns are aligned right, those that begin with ``<`` left."""
    made = FittingTable(title=title, title_justify="left")
    for column in columns:
        made.add_column(column.removeprefix("<"), justify="left" if "<" in column else "right")
    for values in rows:
        made.add_row(*(str(value) for value in values))
    return made


def classes(figures: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Pipeline ranks by what is the same for them, in the order of the first of each.

    Each alone, where they are few.
    """
    found: dict[Hashable, list[int]] = {}
    for rank, figure in enumerate(figures):
        key = (rank, figure) if len(figures) <= FEW_STAGES else figure
        found.setdefault(key, []).append(rank)
    return found


def ranks_label(ranks: Sequence[int]) -> str:
    """``pipeline rank 3`` or ``pipeline ranks 3-6``."""
    return f"pipeline rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def memory_by_rank(rows: Mapping[str, Sequence[int]]) -> Table:
    """Components and their bytes on each pipeline rank; ranks of the same figures share a column.

    Args:
        rows: component -> bytes by pipeline rank.
    """
    columns = list(zip(*rows.values(), strict=True))
    same = classes(columns)
    title = "Memory of a rank, without activations"
    sums = [
        dict(with_sums(list(zip(rows, columns[ranks[0]], strict=True)))) for ranks in same.values()
    ]
    names = list(sums[0])
    values = [[human(nbytes) for nbytes in each.values()] for each in sums]
    if len(same) <= FEW_STAGES:
        heads = ("<component", *map(ranks_label, same.values()))
        return table(title, heads, zip(names, *values, strict=True))
    lines = ((ranges(ranks), *each) for ranks, each in zip(same.values(), values, strict=True))
    return table(title, ("<pipeline ranks", *names), lines)


def rules_lines(rules: Rules) -> list[str]:
    """What each rule of the plan sets, and what it has caught."""
    lines = []
    for number, caught in enumerate(rules.caught, 1):
        said = caught.rule.model_dump(exclude={"match"}).items()
        sets = ", ".join(f"{key} = {in_words(value)}" for key, value in said)
        where = "" if caught.origin == CONFIGURED else f" ({caught.origin})"
        lines.append(f"  {number}. {', '.join(caught.rule.match)}{where}: {sets}")
        names = ", ".join(folded_names(caught.outermost()))
        amount = f"{caught.parameters} parameters, {human(caught.nbytes)}"
        lines.append(f"     has caught {names} ({amount})")
    return lines


def folded_names(names: Iterable[str]) -> list[str]:
    """``layers.0``, ``layers.1``, ``head`` as ``layers.{0-1}``, ``head``."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = _numbered(name)
        numbers.setdefault((before, after), []).extend([] if number is None else [number])
    return [
        f"{before}{{{ranges(sorted(found))}}}{after}" if len(found) > 1 else
        f"{before}{found[0] if found else ''}{after}"
        for (before, after), found in numbers.items()
    ]


def schedule_lines(schedule: Schedule) -> list[str]:
    """Every action of a step on a line; of many, what repeats from block to block once."""
    if len(schedule.actions) <= FEW_LINES:
        return [_action(a.kind, a.phase, a.weight, a.nbytes) for a in schedule.actions]
    items: list[Item] = []
    text: dict[Hashable, str] = {}
    for action in schedule.actions:
        before, number, after = _numbered(action.weight)
        key = (action.kind, action.phase, before, after, action.nbytes)
        name = f"{_plain(before)}{{}}{_plain(after)}" if number is not None else _plain(before)
        text[key] = _action(action.kind, action.phase, name, action.nbytes)
        items.append(Item(key, number))
    return folded_lines(items, text)


def _numbered(name: str) -> tuple[str, int | None, str]:
    """``layers.12.wq`` as ``("layers.", 12, ".wq")``: the block's number is the first one."""
    found = re.search(r"(?<![0-9A-Za-z_])\d{1,9}(?![0-9A-Za-z_])", name)
    if found is None:
        return name, None, ""
    return name[: found.start()], int(found.group()), name[found.end() :]


def _plain(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _action(kind: str, phase: str, name: str, nbytes: int) -> str:
    amount = f"  {human(nbytes)}" if nbytes else ""
    return f"{kind:<5} {phase:<9} {name}{amount}"
