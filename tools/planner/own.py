"""Our own steps over a slow link (``tools.bench_overlap``), predicted from one preset's.

Presets run in turns, each round all of them, over the link whose rate the first round chose. The
first preset gives the three constants: products from its step without messages, links from what the
link carries, and slowdown from its step. Of the others nothing but the link's rate is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from internsp.app.config import Config
from internsp.app.plan.configured import workload_of
from internsp.app.plan.devices import Device, device_named
from internsp.app.plan.seconds import HEAD, OPTIMIZER, StepSeconds, step_seconds
from internsp.app.plan.workload import Workload
from internsp.mesh import MeshShape
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
    "tiny": Options(preset="tiny"),  # for tests; its figures mean nothing
}
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

    def load(self) -> Workload:
        """The step: blocks without embedding and head, in 16 bits."""
        sizes = self.options.resolve().sizes()
        values = {
            "model": model_config(sizes),
            "data": {"sequence_length": sizes.sequence},
            "parallel": {"weight": sizes.ranks, "sequence": sizes.sequence_ranks, "device": "cpu"},
            "train": {
                "global_batch": sizes.batch * sizes.ranks * sizes.micro_batches,
                "micro_batches": sizes.micro_batches, "dtype": "bfloat16",
            },
        }
        config = Config.model_validate(values)
        found = workload_of(config, MeshShape(sizes.ranks, **config.degrees()))
        return replace(found, model=replace(found.model, vocab=0))


def predicted(load: Workload, device: Device) -> StepSeconds:
    """The step, with plain SGD and without a head."""
    found = step_seconds(load, device)
    parts = {name: value for name, value in found.parts.items() if name != HEAD}
    parts[OPTIMIZER] *= _SGD
    return replace(found, parts=parts)


def alone(load: Workload, device: Device) -> float:
    """Seconds of the same step without messages."""
    return predicted(load, device.with_links(1e18, 1e18)).total


def device_of(case: Case, fitted: Device) -> Device:
    """``fitted`` with the case's link between all ranks."""
    rate = median(case.link) * MBIT
    return replace(fitted, near_ranks=1).with_links(rate, rate) if rate else fitted


def calibrated(case: Case) -> Device:
    """The constants that give this case's steps."""
    base = replace(device_named("cpu"), name="own")
    load = case.load()

    def at(name: str, value: float) -> Device:
        fitted = replace(base.fitted, links=1.0, **{name: value})
        return device_of(case, replace(base, fitted=fitted))

    products = _root(lambda x: median(case.compute) - alone(load, at("products", x)), 0.01, 50.0)
    base = replace(base, fitted=replace(base.fitted, products=products))
    slowdown = _root(
        lambda x: predicted(load, at("slowdown", x)).total - median(case.ours), 0.0, 5.0
    )
    constants = replace(base.fitted, links=1.0, slowdown=slowdown, rows=(case.name,))
    return replace(base, fitted=constants)


def _root(rises, low: float, high: float) -> float:  # type: ignore[no-untyped-def]
    """Where a rising function is 0, or the nearer end."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rises(middle) > 0 else (middle, high)
    return low


def table(cases: Sequence[Case]) -> Iterator[str]:
    """Measured beside predicted steps; the first case gave the constants."""
    fitted = calibrated(cases[0])
    now = fitted.fitted
    yield (
        f"fitted on {cases[0].name}: products {now.products:.3g}, slowdown {now.slowdown:.3g}; "
        "links: what the link carried"
    )
    yield (
        "| preset | seconds | rounds from, to | predicted | error | exposed | of the trace "
        "| predicted |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    pairs = []
    for case in cases:
        load, device = case.load(), device_of(case, fitted)
        measured, ours = median(case.ours), predicted(load, device).total
        exposed = measured - median(case.compute)
        pairs.append((measured, ours))
        yield (
            f"| {case.name} | {measured:.4g} | {min(case.ours):.4g}, {max(case.ours):.4g} | "
            f"{ours:.4g} | {100 * (ours / measured - 1):+.1f} % | {exposed:.3g} | "
            f"{median(case.traced):.3g} | {ours - alone(load, device):.3g} |"
        )
    tau = kendall(pairs)
    if tau is not None:
        yield f"\nKendall's tau of the steps: {tau:.2f}"


def run(names: Sequence[str], rounds: int, network: str) -> Iterator[str]:
    """Measure ``names`` in turns, and predict all from the first."""
    cases = [Case(name, CASES[name]) for name in names]
    for _ in range(rounds):
        for case in cases:
            case.run(network)
    yield from table(cases)
