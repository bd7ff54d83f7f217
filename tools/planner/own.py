"""Our own steps over a slow link (``tools.bench_overlap``), predicted from one preset's.

Presets run in turns, each round all of them, over the link whose rate the first round chose. The
first preset gives two constants: products from its step without messages, and from its step the
seconds of a processor that each byte of a collective takes. What the link carries is measured. Of
the others nothing but the link's rate is known.

A processor that computes sends as well: a message is on its way for as long as the link or the
processor needs, and computation loses what the processor needs. Ranks beyond its cores share them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from internsp.app.config import Config
from internsp.app.plan.devices import Device, device_named
from internsp.app.plan.replayed import StepReplay
from internsp.app.plan.seconds import Part, StepSeconds
from internsp.app.plan.step import Plan, make_plan
from tools.bench.model import model_config
from tools.bench_overlap import measure
from tools.overlap.options import Options
from tools.planner.accuracy import kendall

OURS, MBIT = "ours", 1e6 / 8
CASES = {
    "light": Options(preset="light"),
    "even": Options(preset="even"),
    "heavy": Options(preset="heavy"),
    "four": Options(preset="four"),
    "even, 2 micro-batches": Options(preset="even", micro_batches=2),
    "four, sequences over 2": Options(preset="four", sequence_ranks=2),
    "light, width 256": Options(preset="light", hidden=256),
    "light, width 1024": Options(preset="light", hidden=1024),
    "tiny": Options(preset="tiny"),  # for tests; its figures mean nothing
}
CORES = os.cpu_count() or 1
_SGD = 12 / 100  # bytes of an element that plain SGD moves, in those of AdamW, unfused


@dataclass
class Case:
    """A preset's measured steps.

    Attributes:
        compute, ours: median seconds of each round, without and with messages.
        traced: seconds that a traced step waited for messages.
        link: Mbit/s that the link carried.
    """

    name: str
    options: Options
    compute: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    traced: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)

    def run(self, network: str) -> None:
        """One round."""
        given = replace(self.options, network=network, variants=("compute", OURS), rounds=1)
        found, _, _ = measure(given.resolve())
        if OURS not in found["variants"]:
            raise RuntimeError(f"{self.name}: {found['failed'] or found['skipped']}")
        row = found["variants"][OURS]
        self.compute.append(found["compute"])
        self.ours.append(row["median"])
        self.traced.append(sum(seconds for _, _, seconds in row.get("exposures", [])))
        rate = found["rate_mbit"]
        self.link.append(found["link_payload_mbit"] or rate or 0.0)
        if rate is not None:  # further rounds keep the link
            self.options = replace(self.options, rate_mbit=rate)

    @cached_property
    def plan(self) -> Plan:
        """The step: blocks without embedding and head, in 16 bits."""
        sizes = self.options.resolve().sizes()
        groups = sizes.ranks // sizes.sequence_ranks  # whose ranks share sequences
        values = {
            "model": model_config(sizes),
            "data": {"sequence_length": sizes.sequence},
            "parallel": {"weight": sizes.ranks, "sequence": sizes.sequence_ranks, "device": "cpu"},
            "train": {
                "global_batch": sizes.batch * groups * sizes.micro_batches,
                "micro_batches": sizes.micro_batches, "dtype": "bfloat16",
            },
        }
        config = Config.model_validate(values)
        plan = make_plan(config, sizes.ranks)
        (rank,) = plan.ranks
        bare = replace(rank.chunks[0], plan=replace(plan.chunk, embedding=None, head=None))
        return replace(plan, ranks=(replace(rank, chunks=(bare,)),))

    def predicted(self, device: Device) -> StepSeconds:
        """The step on ``device``, with plain SGD and without a head."""
        found = StepReplay(self.plan).on(device)
        parts = {name: value for name, value in found.parts.items() if name != Part.HEAD}
        parts[Part.OPTIMIZER] *= _SGD
        return replace(found, parts=parts)

    def alone(self, device: Device) -> float:
        """Seconds of the same step without messages."""
        return self.predicted(device.with_links(1e18, 1e18)).total


def share(ranks: int) -> float:
    """What a rank has of the cores that it would have alone."""
    return min(1.0, CORES / ranks)


def on_share(device: Device, part: float) -> Device:
    """``device`` where a rank has ``part`` of what it had."""
    fitted = replace(device.fitted, products=device.fitted.products * part)
    return replace(device, fitted=fitted, bandwidth=device.bandwidth * part)


def device_of(case: Case, fitted: Device, handling: float) -> Device:
    """A rank of the case: ``fitted`` on its share of the cores, and a link between all ranks.

    Args:
        handling: seconds of a processor a byte of a collective, whatever part of it is sent.
    """
    ranks, rate = case.plan.shape.world_size, median(case.link) * MBIT
    device = on_share(fitted, share(ranks))
    taken = handling / share(ranks) * rate * ranks / (ranks - 1)  # processor's seconds in a link's
    rate /= max(1.0, taken)
    lost = min(taken, 1 - 1e-6)  # of what is computed beside a message
    own = replace(device.fitted, links=1.0, slowdown=lost / (1 - lost))
    return replace(device, fitted=own, near_ranks=1).with_links(rate, rate)


def calibrated(case: Case) -> tuple[Device, float]:
    """The processor, and seconds a byte, that give this case's steps."""
    base = replace(device_named("cpu"), name="own")

    def at(products: float) -> Device:
        return replace(base, fitted=replace(base.fitted, products=products))

    def alone(products: float) -> float:
        return case.alone(device_of(case, at(products), 0.0))

    found = at(_root(lambda x: median(case.compute) - alone(x), 0.01, 50.0))
    handling = _root(
        lambda x: case.predicted(device_of(case, found, x)).total - median(case.ours), 0.0, 1e-7
    )
    rows = replace(found.fitted, rows=(case.name,))
    return replace(found, fitted=rows), handling


def _root(rises, low: float, high: float) -> float:  # type: ignore[no-untyped-def]
    """Where a rising function is 0, or the nearer end."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rises(middle) > 0 else (middle, high)
    return low


def waits_of(step: StepSeconds) -> float:
    """Seconds in which a predicted step waits for messages."""
    parts = (step.parts.get(name, 0.0) for name in (Part.GATHERS, Part.REDUCTIONS, Part.SEQUENCES))
    return sum(parts) - sum(step.slowed.values())


def order_line(pairs: Sequence[tuple[float, float]]) -> str:
    """How far the order of (measured, predicted) seconds agrees."""
    tau = kendall(pairs)
    return "" if tau is None else f"\nKendall's tau of the steps: {tau:.2f}"


def table(cases: Sequence[Case]) -> Iterator[str]:
    """Measured beside predicted steps; the first case gave the constants."""
    fitted, handling = calibrated(cases[0])
    yield (
        f"fitted on {cases[0].name}: products {fitted.fitted.products:.3g}, {handling * 1e9:.3g} "
        "seconds a gigabyte of collectives; links: what the link carried"
    )
    yield (
        "| preset | seconds | rounds from, to | predicted | error | exposed | predicted "
        "| waits of the trace | predicted |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    pairs = []
    for case in cases:
        device = device_of(case, fitted, handling)
        step = case.predicted(device)
        measured, ours = median(case.ours), step.total
        exposed = measured - median(case.compute)
        pairs.append((measured, ours))
        yield (
            f"| {case.name} | {measured:.4g} | {min(case.ours):.4g}, {max(case.ours):.4g} | "
            f"{ours:.4g} | {100 * (ours / measured - 1):+.1f} % | {exposed:.3g} | "
            f"{ours - case.alone(device):.3g} | {median(case.traced):.3g} | {waits_of(step):.3g} |"
        )
    yield order_line(pairs)


def run(names: Sequence[str], rounds: int, network: str) -> Iterator[str]:
    """Measure ``names`` in turns, and predict all from the first."""
    cases = [Case(name, CASES[name]) for name in names]
    for _ in range(rounds):
        for case in cases:
            case.run(network)
    yield from table(cases)
