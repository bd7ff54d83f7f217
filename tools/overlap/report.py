"""Tables: for the terminal and for a file of ``docs/dev/results``."""

from __future__ import annotations

from typing import Any

from tools.bench.report import Page, Table
from tools.overlap.idle import sentence

HEAD = (
    "variant",
    "step s",
    "quartiles",
    "step / ideal",
    "over compute s",
    "waited s",
    "other cpu s",
    "sent MB",
    "sent / least",
    "unsharded MB",
    "peak MB",
)
LEGEND = """\
step: forward, backward, SGD, over all ranks. over compute: step less compute only. waited: the
computing thread, in Work.wait. other cpu: processor time of all other threads of a rank, gloo's
among them. sent: by each rank's interface, headers included, over the least payload of that
variant's own memory rule. unsharded: peak of unsharded weights. peak: resident memory of a rank
above what the process had before the variant was built. MB are 10^6 bytes."""


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value / scale:.{digits}f}"


def table(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of text, the header first, in the requested order."""
    rows: list[tuple[str, ...]] = [HEAD]
    order = [v for v in summary["options"]["variants"] if v in summary["variants"]]
    for name in order:
        r = summary["variants"][name]
        rows.append(
            (
                r["label"],
                _number(r["median"], 3),
                f"{r['low']:.3f} .. {r['high']:.3f}",
                _number(r["over_ideal"], 2),
                _number(r["exposed"], 3),
                _number(r["waited"], 3),
                _number(r["other_cpu"], 3),
                _number(r["sent"], 1, 1e6),
                _number(r["over_least"], 3),
                _number(r["unsharded_bytes"], 1, 1e6),
                _number(r["peak_bytes"], 0, 1e6),
            )
        )
    return rows


def facts(summary: dict[str, Any]) -> list[str]:
    """The conditions of the measurement, one sentence per line."""
    o, m = summary["options"], summary["machine"]
    ranks = o["ranks"]
    several = o.get("micro_batches", 1)
    micro = f"{several} micro-batches of " if several > 1 else ""
    lines = [
        f"{m['processor']}, bf16 products by {m['instructions']}, {m['cores']} cores, "
        f"Linux {m['kernel']}, Python {m['python']}, torch {m['torch']}",
        f"{ranks} ranks with one computing thread each; {summary['link']}",
        f"{o['layers']} Llama blocks, width {o['hidden']}, {o['heads']} heads, bf16, "
        f"{micro}{o['batch']} x {o['sequence']} tokens a rank, "
        f"{summary['weight_bytes'] / 1e6:.1f} MB of weights",
    ]
    if o["sequence_ranks"] > 1:
        lines.append(
            f"every sequence sharded over {o['sequence_ranks']} ranks: attention sends "
            f"{summary['exchanged_bytes'] / 1e6:.1f} MB a rank over the same link, which ideal "
            "counts and the schedules' bounds do not; compute only attends within its own part"
        )
    if summary["rate_mbit"] is None:
        lines.append("NO RATE LIMIT: ideal is compute alone; bytes on the interface are unknown")
    else:
        lines.append(
            f"rate {summary['rate_mbit']:.0f} Mbit/s, of payload "
            f"{summary['link_payload_mbit']:.0f} reached by one-MiB exchanges; least bytes a rank "
            f"{summary['least_bytes'] / 1e6:.1f} MB; ideal communication / compute "
            f"{summary['ratio']:.2f}"
        )
    lines.append(
        f"compute {summary['compute']:.3f} s, ideal {summary['ideal']:.3f} s; {o['rounds']} rounds "
        f"of {o['steps']} timed steps after {o['warm_up']}; {summary['seconds'] / 60:.1f} minutes"
    )
    return lines


def remarks(summary: dict[str, Any]) -> list[str]:
    """Bounds and exposed times of our variants; reasons for missing ones."""
    lines: list[str] = []
    for name, row in summary["variants"].items():
        if row.get("bound") is not None:
            lines.append(
                f"{row['label']}: its schedule alone takes {row['bound']:.3f} s on this link; the "
                f"step is {row['over_bound']:.2f} times that"
            )
        if row.get("payload_seen") is not None:
            extra = row.get("replica_bytes")
            between = f" with {extra} between replicas" if extra else ""
            same = "exactly" if row["payload_seen"] == row["payload"] else "NOT"
            lines.append(
                f"{row['label']}: payload sent in a step {row['payload_seen']} bytes, {same} the "
                f"schedule's {row['payload']}{between}; slots {row['slot_bytes'] / 1e6:.1f} MB"
            )
        shared = summary["options"]["sequence_ranks"] > 1
        if (name == "ours" or shared) and row.get("exposures"):
            most = ", ".join(f"{u} {p} {s * 1e3:.0f} ms" for u, p, s in row["exposures"][:6])
            lines.append(f"{row['label']}: waited in one step, by block and phase: {most}")
        if name != "compute" and row.get("idle"):
            lines.append(sentence(row["label"], row["idle"]))
    labels = {n: r["label"] for n, r in summary["variants"].items()}
    for what in ("skipped", "failed"):
        for name, reason in summary[what].items():
            lines.append(f"{labels.get(name, name)} {what}: {reason}")
    return lines


def page(summary: dict[str, Any], legend: bool = False) -> Page:
    """The complete report."""
    below = (*LEGEND.splitlines(), "") if legend else ()
    return Page(facts(summary), [Table(table(summary), remarks=(*below, *remarks(summary)))])
