"""The tables of the page on the planner's accuracy (docs/dev/results/planner.md), as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from internsp.app.plan.devices import devices
from tools.planner.accuracy import Accuracy, accuracy, choices, regret
from tools.planner.controls import CONTROLS, shuffled
from tools.planner.fit import chooses_form
from tools.planner.rows import Row
from tools.planner.score import Prediction, Predictor, predict, predictions
from tools.planner.software import COMPOSED

Chosen = Callable[[Row], bool]


def dense(row: Row) -> bool:
    """No experts."""
    return row.text("experts") in ("", "0")


def sharded(row: Row) -> bool:
    """Weights sharded over eight devices or more."""
    return dense(row) and row.text("shard_kind") in ("zero3", "zero2") and _devices(row) >= 8


def timed(row: Row) -> bool:
    """Dense, and measured as a step: no sum of traced parts."""
    return dense(row) and row.text("source") not in COMPOSED


def several_nodes(row: Row) -> bool:
    """vTrain's steps on several nodes."""
    return row.text("source") == "vtrain_multi"


def one_node(row: Row) -> bool:
    """vTrain's sums of parts that were traced on one node."""
    return row.text("source") == "vtrain_single"


def _devices(row: Row) -> int:
    return int(row.text("gpus") or 0) if row.text("gpus").isdigit() else 0


@dataclass(frozen=True)
class Bound:
    """A part of the rows, and the errors that it must keep.

    Attributes:
        mean, p90: at most, as shares; ``None``: not stated.
        tau: at least.
    """

    name: str
    chosen: Chosen
    mean: float | None = None
    p90: float | None = None
    tau: float | None = None

    def met(self, found: Accuracy) -> bool:
        """Whether ``found`` keeps it."""
        return (
            (self.mean is None or found.mean <= self.mean)
            and (self.p90 is None or found.p90 <= self.p90)
            and (self.tau is None or (found.tau is not None and found.tau >= self.tau))
        )


BOUNDS = (
    Bound("sharded weights, 8 to 2,048 devices", sharded, 0.05, 0.11, 0.85),
    Bound(
        "the same, kernels stated",
        lambda row: sharded(row) and row.text("attention") != "not stated", 0.07, 0.15, 0.75,
    ),
    Bound("all dense rows", dense, 0.07, 0.15, 0.80),
    Bound("all dense rows but sums of traced parts", timed, 0.07, 0.15, 0.80),
    Bound("all dense rows without vTrain", lambda row: dense(row) and "vtrain" not in row.id),
    Bound("vTrain, several nodes", several_nodes, 0.09, None, 0.75),
    Bound("vTrain, one node", one_node, 0.15, None, 0.85),
    Bound(
        "SimuMax, dense", lambda row: "simumax" in row.id and dense(row), 0.08, None, 0.9
    ),
    Bound("experts", lambda row: not dense(row)),
)  # fmt: skip


def judged(found: Sequence[Prediction], chosen: Chosen) -> list[Prediction]:
    """Usable rows of ``chosen`` that no constant was fitted on."""
    return [
        each for each in found if each.row.usable and not each.fitted_on and chosen(each.row)
    ]


def quarter(found: Sequence[Prediction]) -> frozenset[str]:
    """The quarter of rows with sharded weights with most messages a second of computation."""
    own = [each for each in judged(found, sharded) if each.error is not None]
    own.sort(key=lambda each: -each.intensity)
    return frozenset(each.row.id for each in own[: len(own) // 4])


def all_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Every table, with its title."""
    found = predictions(rows)
    yield "## Errors by kind of row\n\n" + "\n".join(_bounds(found))
    yield "## Negative controls\n\n" + "\n".join(_controls(rows, found))
    yield "## Choosing by prediction\n\n" + "\n".join(_regret(found))
    yield "## Choices that lose most\n\n" + "\n".join(_lost(found))
    yield "## Errors by table\n\n" + "\n".join(_groups(found))
    yield "## Other planners on the same rows\n\n" + "\n".join(_peers(found))
    yield "## Memory\n\n" + "\n".join(_memory(found))
    yield "## Worst rows\n\n" + "\n".join(_worst(found))
    yield "## Constants\n\n" + "\n".join(constants())


def percent(share: float) -> str:
    """``4.8``."""
    return f"{100 * share:.1f}"


def _cells(found: Accuracy) -> str:
    tau = "" if found.tau is None else f"{found.tau:.2f}"
    shares = (found.mean, found.median, found.p90, found.worst)
    return f"{found.rows} | {' | '.join(map(percent, shares))} | {tau}"


def _bounds(found: Sequence[Prediction]) -> Iterator[str]:
    yield "| rows | part | n | mean | median | p90 | worst | tau | bound: mean, p90, tau | kept |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---|---|"
    for bound in BOUNDS:
        own = judged(found, bound.chosen)
        parts = {
            "all": own,
            "chose the form": [each for each in own if chooses_form(each.row.group)],
            "measured it": [each for each in own if not chooses_form(each.row.group)],
        }
        for name, part in parts.items():
            one = accuracy(part)
            if one is None:
                continue
            limits = ["–" if x is None else f"{100 * x:.0f}" for x in (bound.mean, bound.p90)]
            limits.append("–" if bound.tau is None else f"{bound.tau:.2f}")
            stated = name == "all" and bound.mean is not None
            kept = ("yes" if bound.met(one) else "no") if stated else ""
            told = ", ".join(limits) if stated else ""
            yield f"| {bound.name} | {name} | {_cells(one)} | {told} | {kept} |"


def _controls(rows: Sequence[Row], found: Sequence[Prediction]) -> Iterator[str]:
    most = quarter(found)
    kinds: dict[str, Chosen] = {
        "sharded": sharded, "quarter with most messages": lambda row: row.id in most,
        "dense": dense, "dense but sums": timed,
    }  # fmt: skip
    yield "| predictor | " + " | ".join(f"{kind}: mean, p90, tau" for kind in kinds) + " |"
    yield "|---|" + "---|" * len(kinds)
    usable = [row for row in rows if row.usable]
    each: dict[str, list[Prediction]] = {"the planner": list(found)}
    each |= {name: quickly(usable, one) for name, one in CONTROLS.items()}
    each["labels shuffled inside a device"] = shuffled(usable)
    for name, own in each.items():
        cells = []
        for chosen in kinds.values():
            one = accuracy(judged(own, chosen))
            cells.append(
                "" if one is None else f"{percent(one.mean)}, {percent(one.p90)}, {one.tau:.2f}"
            )
        yield f"| {name} | {' | '.join(cells)} |"


def quickly(rows: Sequence[Row], predictor: Predictor) -> list[Prediction]:
    """Predictions without flags."""
    return [predict(row, predictor) for row in rows]


def _regret(found: Sequence[Prediction]) -> Iterator[str]:
    yield "| rows | tasks with four layouts or more | mean loss | best of three | bound |"
    yield "|---|---:|---:|---:|---|"
    for name, chosen in (
        ("all dense rows", dense),
        ("vTrain, several nodes", several_nodes),
        ("vTrain, one node", one_node),
        ("all others", lambda row: dense(row) and "vtrain" not in row.id),
    ):
        one = regret([each for each in found if each.row.usable and chosen(each.row)])
        if one is not None:
            yield (
                f"| {name} | {one.tasks} | {percent(one.mean)} % | "
                f"{percent(one.among_three)} % | 5 %, 90 % |"
            )


def _lost(found: Sequence[Prediction], number: int = 12) -> Iterator[str]:
    """Tasks of the part that chose the form, so that reading them chooses nothing else."""
    yield "| task | layouts | chosen | place | loses | its error | measured best | its error |"
    yield "|---|---:|---|---:|---:|---:|---|---:|"
    own = [each for each in found if each.row.usable and dense(each.row)]
    made = choices([each for each in own if chooses_form(each.row.group)])
    for one in sorted(made, key=lambda one: -one.loss)[:number]:
        row = one.chosen.row
        task = f"{row.text('model')}, {row.text('gpus')} devices, {row.text('global_batch')}"
        yield (
            f"| {task} sequences | {one.layouts} | {_layout(one.chosen.row)} | {one.place} | "
            f"{100 * one.loss:.0f} % | {100 * (one.chosen.error or 0.0):+.0f} % | "
            f"{_layout(one.best.row)} | {100 * (one.best.error or 0.0):+.0f} % |"
        )


def _layout(row: Row) -> str:
    names = ("weight", "tensor", "pipeline", "context", "replicas", "micro_batch")
    return ", ".join(
        f"{name.replace('_', '-')} {row.text(name)}"
        for name in names
        if row.text(name) not in ("", "0", "1")
    )


def _groups(found: Sequence[Prediction]) -> Iterator[str]:
    yield "| source, device, model | software | n | mean | bias | worst | row | chose the form |"
    yield "|---|---|---:|---:|---:|---:|---|---|"
    tables: dict[tuple[str, str], list[Prediction]] = {}
    for each in judged(found, lambda _: True):
        if each.error is not None:
            software = f"{each.row.text('software')} {each.row.text('dtype')}"
            tables.setdefault((each.row.group, software), []).append(each)
    for (group, software), part in sorted(tables.items()):
        errors = [each.error or 0.0 for each in part]
        worst = max(part, key=lambda each: abs(each.error or 0.0))
        form = "yes" if chooses_form(group) else ""
        yield (
            f"| {group.replace('|', ', ')} | {software} | {len(part)} | "
            f"{percent(mean(map(abs, errors)))} | {100 * mean(errors):+.1f} | "
            f"{100 * (worst.error or 0.0):+.0f} | {worst.row.id.rsplit('-', 1)[-1]} | {form} |"
        )


def _peers(found: Sequence[Prediction]) -> Iterator[str]:
    yield "| source | n | seconds: theirs | ours | GiB: theirs | ours |"
    yield "|---|---:|---:|---:|---:|---:|"
    sources: dict[str, list[Prediction]] = {}
    for each in judged(found, lambda _: True):
        sources.setdefault(each.row.text("source"), []).append(each)
    for source, rows in sorted(sources.items()):
        theirs, ours, gib, own = [], [], [], []
        for each in rows:
            peer, memory = each.row.number("peer_seconds"), each.row.number("peer_memory_gib")
            if peer and each.row.seconds and each.error is not None:
                theirs.append(abs(peer / each.row.seconds - 1))
                ours.append(abs(each.error))
            if memory and each.row.gib and each.memory_error is not None:
                gib.append(abs(memory / each.row.gib - 1))
                own.append(abs(each.memory_error))
        if theirs:
            cells = [percent(mean(part)) for part in (theirs, ours, gib, own)]
            yield f"| {source} | {len(theirs)} | {' | '.join(cells)} |"


def _memory(found: Sequence[Prediction]) -> Iterator[str]:
    yield "| source | model | what was measured | n | mean | bias | worst |"
    yield "|---|---|---|---:|---:|---:|---:|"
    tables: dict[tuple[str, str, str], list[float]] = {}
    for each in found:
        if each.row.usable and each.memory_error is not None:
            row = each.row
            key = (row.text("source"), row.text("model"), row.text("memory_kind"))
            tables.setdefault(key, []).append(each.memory_error)
    for (source, model, kind), errors in sorted(tables.items()):
        worst = max(errors, key=abs)
        yield (
            f"| {source} | {model} | {kind} | {len(errors)} | {percent(mean(map(abs, errors)))} | "
            f"{100 * mean(errors):+.1f} | {100 * worst:+.0f} |"
        )


def _worst(found: Sequence[Prediction], number: int = 15) -> Iterator[str]:
    yield "| row | configuration | measured | predicted | error | largest parts |"
    yield "|---|---|---:|---:|---:|---|"
    own = [
        each for each in judged(found, lambda row: "vtrain_single" not in row.id)
        if each.error is not None
    ]  # fmt: skip
    for each in sorted(own, key=lambda one: -abs(one.error or 0.0))[:number]:
        row = each.row
        degrees = ", ".join(
            f"{name} {row.text(name)}"
            for name in ("gpus", "seq_len", "weight", "tensor", "pipeline", "context", "replicas")
            if row.text(name) not in ("", "0", "1")
        )
        total = each.seconds or 1.0
        parts = sorted(each.parts.items(), key=lambda part: -part[1])[:3]
        largest = ", ".join(f"{name} {100 * part / total:.0f} %" for name, part in parts)
        yield (
            f"| {row.id} | {row.text('model')}, {degrees} | {row.seconds:.4g} | "
            f"{each.seconds:.4g} | {100 * (each.error or 0.0):+.0f} % | {largest} |"
        )


def constants() -> Iterator[str]:
    """Fitted constants, and the rows that they were fitted on."""
    yield "| device | products | links | slowdown | fitted on |"
    yield "|---|---:|---:|---:|---|"
    for name, device in devices().items():
        if name == device.name:
            one = device.fitted
            rows = ", ".join(one.rows) or "nothing: assumed"
            yield f"| {name} | {one.products} | {one.links} | {one.slowdown} | {rows} |"
