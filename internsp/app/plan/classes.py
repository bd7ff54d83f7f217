"""Tables and lines of ``internsp plan``: of many ranks, equal ones are one, with their numbers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from internsp.app.plan.offloaded import with_sums
from internsp.base.sizes import human
from internsp.config.words import in_words
from internsp.mesh.shape import MeshShape
from internsp.structure.rules import FROM_CONFIG, Rules

FEW_RANKS = 16
FEW_STAGES = 4
_SHOWN_GROUPS = 3  # of the groups of one kind, before the last one


def print_mesh(shape: MeshShape, console: Console) -> None:
    """Print every rank's coordinates in the mesh; of many ranks, the groups that they share."""
    if shape.ring > 1:
        console.print(f"Sequence of {shape.sequence_axes}.")
    if shape.world_size > FEW_RANKS:
        console.print(_groups_table(shape))
        return
    rows, own = [], []
    for rank in range(shape.world_size):
        inside = rank % shape.stage_size
        replica, _, weight = shape.dense.coordinates(inside)
        data, sequence = divmod(inside, shape.sequence)
        zero = replica % shape.zero_size
        coordinates = shape.sequence_axes.place(sequence) if shape.ring > 1 else ()
        stage = rank // shape.stage_size
        rows.append((rank, stage, data, sequence, *coordinates, replica, zero, weight))
        replica, expert, weight = shape.experts.coordinates(inside)
        own.append((rank, replica, replica % shape.experts.zero, expert, weight))
    axes = ("ring", "heads") if shape.ring > 1 else ()
    columns = ("rank", "pipeline", "data", "sequence", *axes, "replica", "zero", "weight")
    console.print(table(f"Mesh of {shape.world_size} ranks", columns, rows))
    if shape.separate:
        around = ("rank", "replica", "zero", "expert", "expert weight")
        console.print(table("Experts on the same ranks", around, own))


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
    """A table to print: columns are aligned right, or left if their names begin with ``<``.

    In a narrow terminal what is too long for its column goes on in the next line.
    """
    result = Table(title=title, title_justify="left")
    for column in columns:
        result.add_column(
            column.removeprefix("<"),
            justify="left" if "<" in column else "right",
            overflow="fold",
        )
    for values in rows:
        result.add_row(*(str(value) for value in values))
    return result


def equal_ranks(figures: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Group pipeline ranks with equal ``figures``, in the order of each group's first rank.

    Up to :data:`FEW_STAGES` ranks are not grouped.
    """
    found: dict[Hashable, list[int]] = {}
    for rank, figure in enumerate(figures):
        key = (rank, figure) if len(figures) <= FEW_STAGES else figure
        found.setdefault(key, []).append(rank)
    return found


def memory_by_rank(rows: Mapping[str, Sequence[int]], title: str) -> Table:
    """Table of components and their bytes on each pipeline rank; equal ranks share a column.

    Args:
        rows: component -> bytes by pipeline rank.
    """
    columns = list(zip(*rows.values(), strict=True))
    same = equal_ranks(columns)
    sums = [
        dict(with_sums(list(zip(rows, columns[ranks[0]], strict=True)))) for ranks in same.values()
    ]
    names = list(sums[0])
    values = [[human(nbytes) for nbytes in each.values()] for each in sums]
    if len(same) <= FEW_STAGES:
        heads = [f"pipeline rank{'s' * (len(own) > 1)} {ranges(own)}" for own in same.values()]
        return table(title, ("<component", *heads), zip(names, *values, strict=True))
    lines = ((ranges(ranks), *each) for ranks, each in zip(same.values(), values, strict=True))
    return table(title, ("<pipeline ranks", *names), lines)


def rules_lines(rules: Rules) -> list[str]:
    """Lines that say what each rule of the plan sets, and what it matches."""
    lines = []
    for number, matched_rule in enumerate(rules.matched, 1):
        options = matched_rule.rule.model_dump(exclude={"match"}).items()
        sets = ", ".join(f"{key} = {in_words(value)}" for key, value in options)
        where = "" if matched_rule.origin == FROM_CONFIG else f" ({matched_rule.origin})"
        lines.append(f"  {number}. {', '.join(matched_rule.rule.match)}{where}: {sets}")
        names = ", ".join(folded_names(matched_rule.outermost()))
        amount = f"{matched_rule.parameters} parameters, {human(matched_rule.nbytes)}"
        lines.append(f"     matches {names} ({amount})")
    return lines


def folded_names(names: Iterable[str]) -> list[str]:
    """``layers.0``, ``layers.1``, ``head`` as ``layers.{0-1}``, ``head``."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = _split_number(name)
        numbers.setdefault((before, after), []).extend([] if number is None else [number])
    return [
        f"{before}{{{ranges(sorted(found))}}}{after}" if len(found) > 1 else
        f"{before}{found[0] if found else ''}{after}"
        for (before, after), found in numbers.items()
    ]


def action_line(kind: str, phase: str, name: str, nbytes: int) -> str:
    """One action of a schedule."""
    amount = f"  {human(nbytes)}" if nbytes else ""
    return f"{kind:<5} {phase:<9} {name}{amount}"


def ranges(numbers: Sequence[int]) -> str:
    """``0-7, 16-23`` or ``0-56 by 8``; in the given order, up or down."""
    parts: list[str] = []
    at = 0
    while at < len(numbers):
        end = at + 1
        step = numbers[end] - numbers[at] if end < len(numbers) else 0
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step != 0:
            end += 1
        count = end - at
        if count >= 3 or (count == 2 and abs(step) == 1):
            by = "" if abs(step) == 1 else f" by {abs(step)}"
            parts.append(f"{numbers[at]}-{numbers[end - 1]}{by}")
            at = end
        else:
            parts.append(str(numbers[at]))
            at += 1
    return ", ".join(parts)


def _split_number(name: str) -> tuple[str, int | None, str]:
    """Split ``layers.12.wq`` into ``("layers.", 12, ".wq")``: the first number is the block's."""
    found = re.search(r"(?<![0-9A-Za-z_])\d{1,9}(?![0-9A-Za-z_])", name)
    if found is None:
        return name, None, ""
    return name[: found.start()], int(found.group()), name[found.end() :]
