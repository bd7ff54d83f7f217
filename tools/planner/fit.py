"""The three constants of each device, fitted to at most three rows of a source and device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from internsp.app.plan.devices import Device, Fitted
from internsp.app.plan.workload import Workload
from tools.planner.others import step_seconds
from tools.planner.rows import Row, device_of, workload_of
from tools.planner.software import COMPOSED

FEWEST = 10  # rows that a source needs of a device to be fitted on
FIRST = Fitted(0.7, 0.75, 0.4)
SPREAD = {"products": 0.15, "links": 0.15, "slowdown": 0.3}
"""Usual constants and their spread: three rows say little of a constant that they hardly depend on.
Large products reach 0.6 to 0.85 of a peak, collectives of nccl-tests 0.6 to 0.9 of a link."""
SCATTER = 0.05
_RANGES = {"products": (0.3, 1.0), "links": (0.3, 1.0), "slowdown": (0.0, 2.0)}


def chooses_form(group: str) -> bool:
    """Whether a group chose the model's form; the others only measured it."""
    return int(hashlib.sha1(group.encode()).hexdigest(), 16) % 2 == 0


def _traffic(row: Row) -> float:
    """Seconds of messages a second of computation, with constants that nothing was fitted to."""
    load, device = workload_of(row)[0], replace(device_of(row), fitted=FIRST)
    found = step_seconds(load, device)
    return found.messages / found.compute


def fitted_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows to fit on, by device, chosen without their measured seconds.

    In the order of messages a second of computation, those in the middle of each third of a source
    and device: few, usual and many messages, and no extremes. Rows with an assumed batch,
    fine-tuning (samples may be packed), experts or attention that is not stated are left out, and
    those that were composed of parts.
    """
    tables: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        dense = not row.text("experts") or row.text("experts") == "0"
        stated = row.text("attention") not in ("", "not stated")
        assumed = "batch assumed" in row.text("note") or "fine-tuning" in row.text("note")
        assumed |= row.text("source") in COMPOSED
        if row.usable and row.seconds and dense and stated and not assumed:
            tables.setdefault((row.text("source"), row.text("device")), []).append(row)
    found: dict[str, list[Row]] = {}
    for (_, device), own in tables.items():
        if len(own) >= FEWEST:
            own.sort(key=lambda row: (_traffic(row), row.id))
            chosen = [own[len(own) * part // 6] for part in (1, 3, 5)]
            found.setdefault(device, []).extend(chosen)
    return found


def fit(rows: Sequence[Row]) -> Fitted:
    """The likeliest constants; rows of one device. A coordinate at a time, in ever smaller steps.
    """
    cases = [(workload_of(row)[0], device_of(row), row.seconds or 1.0) for row in rows]
    now = FIRST
    best = _loss(cases, now)
    step = {"products": 0.08, "links": 0.1, "slowdown": 0.15}
    while max(step.values()) > 0.004:
        better = False
        for name in step:
            for sign in (-1, 1):
                low, high = _RANGES[name]
                value = min(max(getattr(now, name) + sign * step[name], low), high)
                tried = replace(now, **{name: value})
                loss = _loss(cases, tried)
                if loss < best - 1e-9:
                    now, best, better = tried, loss, True
        if not better:
            step = {name: size / 2 for name, size in step.items()}
    return replace(
        now,
        products=round(now.products, 3), links=round(now.links, 3),
        slowdown=round(now.slowdown, 3), rows=tuple(row.id for row in rows),
    )  # fmt: skip


def _loss(cases: Sequence[tuple[Workload, Device, float]], constants: Fitted) -> float:
    """Less the likelier: rows scatter by 5 %, with far outliers; constants are near usual ones."""
    found = 0.0
    for load, device, seconds in cases:
        ours = step_seconds(load, replace(device, fitted=constants)).total
        found += math.log1p((math.log(ours / seconds) / SCATTER) ** 2)
    for name, spread in SPREAD.items():
        found += ((getattr(constants, name) - getattr(FIRST, name)) / spread) ** 2
    return found


def fits(rows: Sequence[Row]) -> Iterator[tuple[str, Fitted]]:
    """(device, constants) of every device with rows."""
    for device, own in sorted(fitted_rows(rows).items()):
        yield device, fit(own)

