"""The course of a run: sizes, reference, compute, rate, then rounds of all variants interleaved."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.bounds import MBIT, play, shares
from tools.bench.ranks import Refused, Session
from tools.bench.rounds import Agreement, Spread, order
from tools.overlap.idle import found
from tools.overlap.laws import ideal_seconds, least_bytes, own_least_bytes, rate_for, step_seconds
from tools.overlap.network import Link
from tools.overlap.options import Options, Spec

CALIBRATION_STEPS = 5
EXACT, ROUNDED = Agreement(), Agreement(first=1e-2, decrease=0.1)
Say = Callable[[str], None]
Answers = list[dict[str, Any]]


@dataclass
class Outcome:
    """All measurements, before any evaluation.

    Attributes:
        runs: replies of all ranks, by variant, one per round.
        skipped: reasons, by variant, of those that cannot run here.
        failed: reasons, by variant, of those that failed or trained something else.
    """

    options: Options
    label: str
    hello: dict[str, Any]
    reference: list[float]
    rate_mbit: float | None
    calibrated: float
    link_mbit: float | None
    runs: dict[str, list[Answers]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices of all blocks."""
        return sum(self.hello["numels"].values()) * int(self.hello["itemsize"])

    @property
    def exchanged(self) -> float:
        """Bytes each rank sends for the attention of sharded sequences in a step."""
        return float(self.hello.get("exchanged", 0.0))

    @property
    def least(self) -> float:
        """Bytes each rank must send in a step with two slots."""
        sizes = self.options.sizes()
        return least_bytes(
            self.weight_bytes, sizes.layers, sizes.ranks, micro_batches=sizes.micro_batches
        )


def run(options: Options, link: Link, session: Session, say: Say) -> Outcome:
    """Measure. Prints no time, because the losses have not been compared yet."""
    began = time.monotonic()
    outcome = prepare(options, link, session, say)
    needed = options.warm_up + options.steps + 1
    outcome.reference = session.ask("reference", steps=needed)[0]
    _rounds(outcome, link, session, say)
    outcome.seconds = time.monotonic() - began
    return outcome


def prepare(options: Options, link: Link, session: Session, say: Say) -> Outcome:
    """Sizes, compute, and the link at the resulting rate; nothing trained yet."""
    hello = session.ask("hello")[0]
    outcome = Outcome(options, link.label, hello, [], None, 0.0, None)
    outcome.skipped = dict(hello["reasons"])
    link.limit(None)
    answers = session.ask("run", variant="compute", warm_up=2, steps=CALIBRATION_STEPS, probe=False)
    outcome.calibrated = statistics.median(steps_of(answers))
    if link.limited:
        outcome.rate_mbit = options.rate_mbit or rate_for(
            options.ratio or 1.0, outcome.least, outcome.calibrated
        )
        link.limit(outcome.rate_mbit)
        outcome.link_mbit = _probe_link(session, outcome.rate_mbit)
        say(f"limit {outcome.rate_mbit:.0f} Mbit/s; payload reached {outcome.link_mbit:.0f}")
    return outcome


def _probe_link(session: Session, rate_mbit: float) -> float:
    nbytes = int(min(max(rate_mbit * MBIT * 0.5, 2 << 20), 128 << 20)) >> 20 << 20
    answers = session.ask("link", nbytes=nbytes, repeats=3)
    seconds = statistics.median(max(column) for column in zip(*answers, strict=True))
    return nbytes / seconds / MBIT


def _rounds(outcome: Outcome, link: Link, session: Session, say: Say) -> None:
    options = outcome.options
    names = [name for name in options.variants if name not in outcome.skipped]
    for index in range(options.rounds):
        for name in order(names, index):
            spec = Spec.parse(name)
            if name in outcome.failed:
                continue
            link.limit(None if spec.free else outcome.rate_mbit)
            try:
                answers = session.ask(
                    "run",
                    variant=name,
                    warm_up=options.warm_up,
                    steps=options.steps,
                    probe=index == 0,
                )
            except Refused as error:
                outcome.failed[name] = error.reason
                say(f"round {index + 1}: {spec.label}: {error.reason}\n{error.trace}")
                continue
            problem = check(spec, answers, outcome.reference, options.sequence_ranks)
            if problem is not None:
                outcome.failed[name] = f"trains something else: {problem}"
            outcome.runs.setdefault(name, []).append(answers)
            agree = "losses agree" if compared(spec, options.sequence_ranks) else "not compared"
            verdict = problem or agree
            say(f"round {index + 1} of {options.rounds}: {spec.label}: {verdict}")


def compared(spec: Spec, sequence_ranks: int) -> bool:
    """Whether the losses of a variant say that it trains the same.

    Compute alone attends only within its own shard of a sequence, which is a different loss.
    """
    return spec.family != "compute" or sequence_ranks == 1


def check(
    spec: Spec, answers: Answers, reference: Sequence[float], sequence_ranks: int = 1
) -> str | None:
    """Whether the ranks' losses sum to the reference's; without exchange only the first can."""
    if not compared(spec, sequence_ranks):
        return None
    losses = [sum(column) for column in zip(*(a["losses"] for a in answers), strict=True)]
    if spec.family == "compute":
        losses = losses[:1]
    return (ROUNDED if "quantize" in spec.arguments else EXACT).refuses(losses, reference)


def steps_of(answers: Answers) -> list[float]:
    """Seconds of each timed step of one run, over all ranks."""
    return step_seconds([a["start"] for a in answers], [a["ends"] for a in answers])


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Medians, ratios and bounds of every variant that trained the same as the reference."""
    compute_runs = outcome.runs.get("compute", [])
    if "compute" in outcome.failed or not compute_runs:
        reason = outcome.failed.get("compute", "it did not run")
        raise RuntimeError(f"compute only, which everything is compared with: {reason}")
    compute = statistics.median(s for answers in compute_runs for s in steps_of(answers))
    wanted = outcome.least + outcome.exchanged
    ideal = ideal_seconds(compute, wanted, outcome.rate_mbit)
    rows: dict[str, dict[str, Any]] = {}
    for name, runs in outcome.runs.items():
        if name in outcome.failed:
            continue
        spec = Spec.parse(name)
        rows[name] = _row(outcome, spec, runs, compute, compute if spec.free else ideal)
    ratio = None
    if outcome.rate_mbit is not None:
        ratio = outcome.least / (outcome.rate_mbit * MBIT) / compute
    return {
        "options": outcome.options.to_json(),
        "machine": machine(outcome.hello),
        "link": outcome.label,
        "rate_mbit": outcome.rate_mbit,
        "link_payload_mbit": outcome.link_mbit,
        "weight_bytes": outcome.weight_bytes,
        "least_bytes": outcome.least,
        "exchanged_bytes": outcome.exchanged,
        "compute": compute,
        "ratio": ratio,
        "ideal": ideal,
        "reference": outcome.reference,
        "skipped": outcome.skipped,
        "failed": outcome.failed,
        "seconds": outcome.seconds,
        "variants": rows,
    }


def _row(
    outcome: Outcome, spec: Spec, runs: list[Answers], compute: float, ideal: float
) -> dict[str, Any]:
    seconds = [s for answers in runs for s in steps_of(answers)]
    spread = Spread.of(seconds)
    unsharded = [a["unsharded_bytes"] for a in runs[0] if "unsharded_bytes" in a]
    flat = [a for answers in runs for a in answers]
    first, sizes = runs[0][0], outcome.options.sizes()
    # Our payload is that of the printed schedule; for the others a formula gives it.
    least = first.get("payload") or own_least_bytes(
        spec.family,
        spec.forms,
        outcome.weight_bytes,
        sizes.ranks,
        sizes.layers,
        sizes.micro_batches,
    )
    if least is not None:
        least += outcome.exchanged
    sent = None if first["sent"] is None else statistics.median(a["sent"] for a in flat)
    row = {
        "label": spec.label,
        "seconds": seconds,
        **asdict(spread),
        "ideal": ideal,
        "over_ideal": spread.median / ideal,
        "exposed": spread.median - compute,
        # DDP waits in C++, which this clock does not measure.
        "waited": None if spec.family == "ddp" else statistics.median(a["waited"] for a in flat),
        "other_cpu": statistics.median(a["other_cpu"] for a in flat),
        "sent": sent,
        "over_least": sent / least if sent is not None and least else None,
        "unsharded_bytes": max(unsharded, default=None),
        "peak_bytes": max(a["peak_bytes"] for a in flat),
        "phases": first["phases"],
        "profile": first.get("profile"),
        "idle": None,
    }
    profiles = [a["profile"] for a in runs[0] if "profile" in a]
    if profiles and outcome.rate_mbit is not None and not spec.free:
        row["idle"] = found(profiles, outcome.rate_mbit)
    if "schedule" in first:
        row.update(_ours(outcome, spec, first, spread.median))
    return row


def _ours(outcome: Outcome, spec: Spec, first: dict[str, Any], median: float) -> dict[str, Any]:
    events = (first.get("profile") or {}).get("events", [])
    traveled = sum(e[6] for e in events if e[0] in ("AG", "RS", "EX", "PUBLISH"))
    row: dict[str, Any] = {
        "slot_bytes": first["slot_bytes"],
        "payload": first["payload"],
        "replica_bytes": first.get("replica_bytes", 0),
        "payload_seen": traveled if events else None,
        "exposures": exposures(events),
    }
    rate = None if spec.free else outcome.rate_mbit
    if rate is not None and not row["replica_bytes"]:  # the schedule has no replicas
        bound = schedule_bound(outcome, first["schedule"], rate)
        row.update({"bound": bound, "over_bound": median / bound})
    return row


def schedule_bound(outcome: Outcome, schedule: list[Any], rate_mbit: float) -> float:
    """Duration of the printed schedule on this link with the measured compute times."""
    runs = outcome.runs["compute"]
    phases = {
        name: statistics.median(a["phases"][name] for answers in runs for a in answers)
        for name in ("forward", "backward", "optimizer")
    }
    passes = {k: phases[k] / outcome.options.micro_batches for k in ("forward", "backward")}
    each = shares(outcome.hello["numels"], passes)
    return play(schedule, each, rate_mbit) + phases["optimizer"]


def exposures(events: Sequence[Sequence[Any]]) -> list[tuple[str, str, float]]:
    """``(unit, phase, seconds)`` that the computing thread waited in one step, longest first."""
    sums: dict[tuple[str, str], float] = {}
    for kind, unit, _, phase, start, end, _ in events:
        if kind == "A2A_WAIT":
            phase = f"{phase} all-to-all"
        if kind in ("WAIT", "A2A_WAIT"):
            sums[(unit, phase)] = sums.get((unit, phase), 0.0) + end - start
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return [(unit, phase, seconds) for (unit, phase), seconds in ordered]


# Instruction sets for bf16 products, the fastest first: with the next one a step's compute takes
# several times as long. The names are those of ONEDNN_MAX_CPU_ISA, which sets the upper limit.
PRODUCTS = {
    "AVX512_CORE_AMX": "amx_bf16",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE": "avx512bw",
    "AVX2": "avx2",
}


def products_of(flags: Iterable[str], most: str | None) -> str:
    """The instruction set that bf16 products use, from the processor's flags.

    Args:
        most: the environment's ``ONEDNN_MAX_CPU_ISA``.
    """
    names, has = list(PRODUCTS), set(flags)
    if most in names:
        names = names[names.index(most) :]
    return next((name for name in names if PRODUCTS[name] in has), "no wide instructions")


def machine(hello: dict[str, Any]) -> dict[str, Any]:
    """The machine and versions of the measurement."""
    processor = platform.processor() or platform.machine()
    flags: list[str] = []
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text().splitlines()
        told = dict(reversed([line.split(":", 1) for line in lines if ":" in line]))
        of = {name.strip(): value.strip() for name, value in told.items()}
        processor, flags = of.get("model name", processor), of.get("flags", "").split()
    return {
        "processor": processor,
        "instructions": products_of(flags, os.environ.get("ONEDNN_MAX_CPU_ISA")),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": hello["torch"],
    }
