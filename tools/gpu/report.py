"""Tables of ``tools/bench_gpu.py``: for the terminal and for a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
EMULATED = (
    "EMULATED link: collectives are copies on this one device, held back to the stated bandwidth. "
    "No byte leaves it, and no second device takes part."
)
Table = tuple[str, list[str], list[list[str]], list[str]]
"""Title, head, rows, remarks."""


def tables(summary: dict[str, Any]) -> list[Table]:
    """One table for each part that ran."""
    makers = {"overhead": _overhead, "link": _link, "streams": _streams, "ranks": _ranks}
    return [make(summary) for part, make in makers.items() if part in summary]


def _overhead(summary: dict[str, Any]) -> Table:
    rows, remarks = [], []
    for row in summary["overhead"]:
        compiled = "compiled" if row["compile"] else "eager"
        place = f"{row['sequence']}, {compiled}"
        if "skipped" in row:
            remarks.append(f"{place}: skipped, {row['skipped']}")
            continue
        for name, found in row["variants"].items():
            rate = found["flops_per_second"]
            rows.append(
                [
                    place,
                    name,
                    _ms(found),
                    f"{found['added']:+.1%}",
                    _share(rate, row["peak"]),
                    _share(rate, row["reached"]),
                    "-" if found["step_bytes"] is None else f"{found['step_bytes'] / GIB:.2f}",
                ]
            )
    head = ["sequence", "variant", "step ms (quartiles)", "added", "MFU", "of a matmul", "GiB"]
    remarks.append(
        "added: over the plain model's median step. MFU: of the data sheet's dense bf16 peak, "
        "where the device is known; of a matmul: of what a square product reaches here. GiB: what "
        "a step takes above what exists between steps. All losses agreed."
    )
    return "One rank: what the machinery costs", head, rows, remarks


def _link(summary: dict[str, Any]) -> Table:
    rows = [
        [
            f"{row['ratio']:g}",
            _ms(row),
            f"{1e3 * row['compute']:.2f}",
            f"{1e3 * row['communication']:.2f}",
            f"{row['over_ideal']:.3f}",
            f"{row['bound'] / row['ideal']:.3f}",
        ]
        for row in summary["link"]
    ]
    head = ["ratio", "step ms (quartiles)", "compute ms", "link busy ms", "step / max",
            "bound / max"]  # fmt: skip
    remarks = [
        EMULATED,
        "step / max: over the larger of compute alone and the link's busy time. bound / max: what "
        "the printed schedule takes when played on such a link: the first gather and the last "
        "reduction cannot be hidden.",
    ]
    memory = summary.get("memory")
    if memory is not None:
        remarks.append(_memory(memory))
    return "An emulated link", head, rows, remarks


def _memory(memory: dict[str, Any]) -> str:
    text = (
        f"Memory: slots {_mib(memory['slots'])}, reduction buffers {_mib(memory['buffers'])}, "
        f"{memory['late_allocations']} of these allocated after the second step; with shards and "
        f"data {_mib(memory['predicted'])} predicted"
    )
    if "held" not in memory:
        return text + " (only a GPU counts what is really held)."
    return (
        f"{text}, {_mib(memory['held'])} held ({memory['held'] / memory['predicted'] - 1:+.1%}). "
        f"Peak {_mib(memory['peak'])}, predicted {_mib(memory['predicted_peak'])} "
        f"({memory['peak'] / memory['predicted_peak'] - 1:+.1%})."
    )


def _streams(summary: dict[str, Any]) -> Table:
    rows = [[row["name"], row["reason"] or "the same training"] for row in summary["streams"]]
    return (
        "Streams at odds",
        ["setting", "against one plain process"],
        rows,
        ["Random delays before and after every transfer, and NaN in whatever has not arrived."],
    )


def _ranks(summary: dict[str, Any]) -> Table:
    found = summary["ranks"]
    rows = [[str(found["ranks"]), found["reason"] or "the same training"]]
    return "Several ranks on the one device, over gloo", ["ranks", "against one process"], rows, []


def text(summary: dict[str, Any]) -> str:
    """For the terminal."""
    out = [f"device: {summary['device']}; torch {summary['torch']}"]
    for title, head, rows, remarks in tables(summary):
        widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
        out += ["", title]
        for row in [head, *rows]:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            out.append("  " + "  ".join(cells).rstrip())
        out += [f"  {remark}" for remark in remarks]
    return "\n".join(out)


def markdown(summary: dict[str, Any], command: Sequence[str]) -> str:
    """For a page: command, device, tables, remarks."""
    out = ["```", shlex.join(command), "```", "", f"{summary['device']}; torch {summary['torch']}."]
    for title, head, rows, remarks in tables(summary):
        out += ["", f"### {title}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        out += [f"| {' | '.join(row)} |" for row in rows]
        out += ["", *(f"- {remark}" for remark in remarks)]
    return "\n".join(out) + "\n"


def put(path: Path, body: str) -> None:
    """Write ``body`` to ``path``, between its ``<!-- gpu -->`` marks if they are there."""
    begin, end = "<!-- gpu -->", "<!-- /gpu -->"
    old = path.read_text() if path.exists() else ""
    if begin in old and end in old:
        before, rest = old.split(begin, 1)
        body = f"{before}{begin}\n{body}{end}{rest.split(end, 1)[1]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(body)


def _ms(found: dict[str, Any]) -> str:
    return " ".join(
        [f"{1e3 * found['median']:.2f}", f"({1e3 * found['low']:.2f} .. {1e3 * found['high']:.2f})"]
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _share(rate: float, peak: float | None) -> str:
    return "-" if not peak else f"{rate / peak:.1%}"
