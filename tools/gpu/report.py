"""Tables of ``tools/bench_gpu.py``: for the terminal and for a page."""

from __future__ import annotations

from typing import Any

from tools.bench.report import Page, Table

GIB = 2**30
EMULATED = (
    "EMULATED link: collectives are copies on this one device, held back to the stated bandwidth. "
    "No byte leaves it, and no second device takes part."
)


def page(summary: dict[str, Any]) -> Page:
    """The device, and one table for each part that ran."""
    makers = {"overhead": _overhead, "link": _link, "streams": _streams, "runs": _runs}
    tables = [make(summary) for part, make in makers.items() if part in summary]
    return Page([f"device: {summary['device']}; torch {summary['torch']}"], tables)


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
    return Table([head, *rows], "One rank: what the machinery costs", remarks)


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
    return Table([head, *rows], "An emulated link", remarks)


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
    rows = [["setting", "against one plain process"]]
    rows += [[row["name"], row["reason"] or "the same training"] for row in summary["streams"]]
    remark = "Random delays before and after every transfer, and NaN in whatever has not arrived."
    return Table(rows, "Streams at odds", [remark])


def _runs(summary: dict[str, Any]) -> Table:
    rows = []
    for row in summary["runs"]:
        predicted, peak, planned = row["predicted"], row["peak"], row["planned"]
        rows.append(
            [
                row["name"],
                f"{row['tokens']:,}",
                _ms(row),
                "-" if predicted is None else f"{1e3 * predicted:.1f}",
                "-" if predicted is None else f"{predicted / row['median'] - 1:+.0%}",
                "-" if peak is None else f"{peak / GIB:.2f}",
                f"{planned / GIB:.2f}",
                "-" if peak is None else f"{planned / peak - 1:+.0%}",
            ]
        )
    head = ["run", "tokens", "step ms (quartiles)", "predicted", "off", "peak GiB", "predicted",
            "off"]  # fmt: skip
    remark = (
        "`internsp train` on one device, AdamW with fp32 masters, sequences without a document's "
        "end; predicted: what `internsp plan --device` says, of which no constant was fitted here."
    )
    return Table([head, *rows], "Whole runs beside their plan", [remark])


def _ms(found: dict[str, Any]) -> str:
    return " ".join(
        [f"{1e3 * found['median']:.2f}", f"({1e3 * found['low']:.2f} .. {1e3 * found['high']:.2f})"]
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _share(rate: float, peak: float) -> str:
    return "-" if not peak else f"{rate / peak:.1%}"
