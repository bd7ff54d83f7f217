"""Our own steps over a slow link (``tools.bench_overlap``), predicted from one preset's.

Presets run in turns, each round all of them, over the link whose rate the first round chose. The
first preset gives two constants: products from its step without messages, and from its step the
seconds of a processor that each byte of a collective takes. Three more are of the machine, not of a
preset: what the link carries, what a block takes that has nearly nothing to compute or to send, and
for how long a process computes before another one on its core does.

A processor that computes sends as well: a message is on its way for as long as the link or the
processor needs, and computation loses what the processor needs. Ranks beyond its cores share them:
an exchange that a rank waits for then comes after half a turn of another process.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from internsp.app.config import Config
from internsp.app.plan.devices import Device, Fitted, device_named
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
    "four, sequences over 4": Options(preset="four", sequence_ranks=4),
    "even, 4 blocks": Options(preset="even", layers=4),
    "light, width 256": Options(preset="light", hidden=256),
    "light, width 1024": Options(preset="light", hidden=1024),
    "tiny": Options(preset="tiny"),  # for tests; its figures mean nothing
}
EMPTY = Options(preset="light", hidden=32)  # of which a block takes what no width changes
CORES = os.cpu_count() or 1
_PAUSE = 3e-4  # seconds; shorter ones are interrupts
_EXCHANGES = 4  # that a block with parts of sequences waits for: heads there and back, twice
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

    def predicted(self, machine: Machine, messages: bool = True) -> StepSeconds:
        """The step on ``machine``, with plain SGD and without a head; or without messages."""
        replay, device = StepReplay(self.plan), machine.rank(self)
        part = share(self.plan.shape.world_size)
        launches = (machine.beside if messages else machine.alone) / part
        habits = replace(replay.load.habits, launches=launches / 3, launches_behind=2.0)
        load = replay.load = replace(replay.load, habits=habits)
        found = replay.on(device if messages else replace(device, near=1e18, far=1e18))
        parts = {name: value for name, value in found.parts.items() if name != Part.HEAD}
        parts[Part.OPTIMIZER] *= _SGD
        if messages and load.degrees.context > 1 and part < 1:
            often = _EXCHANGES * load.model.layers * load.micro_batches
            parts[Part.SEQUENCES] += often * machine.turn / 2
        return replace(found, parts=parts)


def share(ranks: int) -> float:
    """What a rank has of the cores that it would have alone."""
    return min(1.0, CORES / ranks)


def on_share(device: Device, part: float) -> Device:
    """``device`` where a rank has ``part`` of what it had; of its links too: gloo computes."""
    fitted = replace(device.fitted, products=device.fitted.products * part)
    shared = replace(device, fitted=fitted, bandwidth=device.bandwidth * part)
    return replace(shared, near=device.near * part, far=device.far * part)


@dataclass(frozen=True)
class Machine:
    """What the machine takes.

    Attributes:
        products: share of the peak of ``devices.toml``, of a rank with a core of its own.
        byte: seconds of a processor for a byte of a collective, whatever part of it is sent.
        alone, beside: seconds of a block that computes and sends nearly nothing, without and with
            its messages.
        turn: seconds that a process computes before another one on its core does.
    """

    products: float
    byte: float = 0.0
    alone: float = 0.0
    beside: float = 0.0
    turn: float = 0.0

    def rank(self, case: Case) -> Device:
        """A rank of the case: its share of the cores, and a link between all ranks."""
        ranks, rate = case.plan.shape.world_size, median(case.link) * MBIT
        part = share(ranks)
        taken = self.byte / part * rate * ranks / (ranks - 1)  # processor's seconds in a link's
        rate /= max(1.0, taken)
        lost = min(taken, 1 - 1e-6)  # of what is computed beside a message
        fitted = Fitted(self.products, 1.0, lost / (1 - lost))
        device = replace(device_named("cpu"), name="own", fitted=fitted, near_ranks=1)
        return replace(on_share(device, part), near=rate, far=rate)


_REPEATS = 8  # after which the constants of two cases have settled


def calibrated(case: Case, empty: Case, turn: float = 0.0) -> Machine:
    """The machine that gives this case's steps and those of the ``empty`` one."""
    found = Machine(1.0, turn=turn)
    for _ in range(_REPEATS):
        found = _fitted(found, "products", case, False, 50.0, 0.01)
        found = _fitted(found, "byte", case, True, 0.0, 1e-7)
        found = _fitted(found, "alone", empty, False, 0.0, 0.1)
        found = _fitted(found, "beside", empty, True, 0.0, 0.1)
    return found


def _fitted(
    machine: Machine, name: str, case: Case, messages: bool, quick: float, slow: float
) -> Machine:
    """``machine`` with the constant ``name`` that gives the case's step, or the nearer end."""
    measured = median(case.ours if messages else case.compute)
    for _ in range(40):
        middle = (quick + slow) / 2
        machine = replace(machine, **{name: middle})
        if case.predicted(machine, messages).total > measured:
            slow = middle
        else:
            quick = middle
    return machine


def turn_of_processes(seconds: float = 2.0) -> float:
    """Seconds that one of two processes on a core computes before the other one does."""
    with multiprocessing.get_context("spawn").Pool(2) as both:
        pauses = [each for found in both.map(_pauses, [seconds] * 2, 1) for each in found]
    return median(pauses) if pauses else 0.0


def _pauses(seconds: float) -> list[float]:
    """How long this process waited for its core, each time that it did."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found, last = [], time.perf_counter()
    end = last + seconds
    while last < end:
        now = time.perf_counter()
        if now - last > _PAUSE:
            found.append(now - last)
        last = now
    return found


def waits_of(step: StepSeconds) -> float:
    """Seconds in which a predicted step waits for messages."""
    parts = (step.parts.get(name, 0.0) for name in (Part.GATHERS, Part.REDUCTIONS, Part.SEQUENCES))
    return sum(parts) - sum(step.slowed.values())


def order_line(pairs: Sequence[tuple[float, float]]) -> str:
    """How far the order of (measured, predicted) seconds agrees."""
    tau = kendall(pairs)
    return "" if tau is None else f"\nKendall's tau of the steps: {tau:.2f}"


def table(cases: Sequence[Case], machine: Machine) -> Iterator[str]:
    """Measured beside predicted steps."""
    yield (
        f"fitted on {cases[0].name}: products {machine.products:.3g}, {machine.byte * 1e9:.3g} "
        "seconds a gigabyte of collectives; links: what the link carried; a block that computes "
        f"and sends nearly nothing: {machine.alone * 1e3:.3g} ms, {machine.beside * 1e3:.3g} with "
        f"its messages; a turn of a process: {machine.turn * 1e3:.3g} ms"
    )
    yield (
        "| preset | seconds | rounds from, to | predicted | error | exposed | predicted "
        "| waits of the trace | predicted |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    pairs = []
    for case in cases:
        step, alone = case.predicted(machine), case.predicted(machine, messages=False)
        measured, ours = median(case.ours), step.total
        exposed = measured - median(case.compute)
        pairs.append((measured, ours))
        yield (
            f"| {case.name} | {measured:.4g} | {min(case.ours):.4g}, {max(case.ours):.4g} | "
            f"{ours:.4g} | {100 * (ours / measured - 1):+.1f} % | {exposed:.3g} | "
            f"{ours - alone.total:.3g} | {median(case.traced):.3g} | {waits_of(step):.3g} |"
        )
    yield order_line(pairs)


def run(names: Sequence[str], rounds: int, network: str) -> Iterator[str]:
    """Measure ``names`` in turns, and predict all from the first."""
    cases, turn = [Case(name, CASES[name]) for name in names], turn_of_processes()
    empty = Case("empty", EMPTY)
    for _ in range(rounds):
        for case in (*cases, empty):
            case.run(network)
    yield from table(cases, calibrated(cases[0], empty, turn))
