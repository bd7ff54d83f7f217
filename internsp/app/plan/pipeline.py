"""What ``internsp plan`` prints of a pipeline: chunks, gathers and reductions, and a picture."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from internsp.app.plan.classes import equal_ranks, ranges, table
from internsp.app.plan.step import Plan, message_bytes, plan_of
from internsp.base.sizes import human
from internsp.pipeline.picture import draw
from internsp.pipeline.schedules import SCHEDULES

_LONGEST_COMPARED = 2_000  # passes of blocks; the comparison plans the step a dozen times


def drawn(plan: Plan) -> str:
    """The schedule as SVG."""
    launched, number = {}, plan.config.train.micro_batches
    for rank in plan.ranks:
        for action, counts in zip(rank.actions, rank.launched, strict=True):
            for kind in {"": "F", "full": "BIW", "input": "I", "weight": "W"}[action.part]:
                launched[action.stage, kind, action.micro_batch] = counts
        for chunk in rank.chunks:  # without a split backward, the other part is empty
            empty = "I" if chunk.stage == 0 else "W" if not chunk.splits else ""
            for one in range(number if empty else 0):
                launched[chunk.stage, empty, one] = (0, 0)
    return draw(plan.timed, launched, f"{plan.kind.name}, {number} micro-batches")


def tables(plan: Plan) -> list[Table]:
    """Tables to print: what each rank holds and launches, and a comparison with other schedules."""
    title = f"{plan.kind.name}: chunks, and collectives of a step with the payload a rank receives"
    columns = ("pipeline rank", "stage", "blocks", "slots", "gathers", "reductions", "messages")
    nbytes = message_bytes(plan.config, plan.shape, plan.config.data.sequence_length)
    rows = []
    figures = []  # what the table shows of a rank besides its stages and blocks
    for each in plan.ranks:
        counts = [(each.schedule.count(k), each.schedule.nbytes(k)) for k in ("AG", "RS")]
        chunks = [(len(chunk.blocks), chunk.plan.policy.slots) for chunk in each.chunks]
        figures.append((*counts, *chunks, each.messages))
    same = equal_ranks(figures)
    for ranks in same.values():
        each = plan.ranks[ranks[0]]
        alike = [plan.ranks[rank].chunks for rank in ranks]
        row = (
            ranges(ranks),
            "\n".join(ranges([c[i].stage for c in alike]) for i in range(len(each.chunks))),
            "\n".join(_blocks_label([c[i].blocks for c in alike]) for i in range(len(each.chunks))),
            "\n".join(str(chunk.plan.policy.slots) for chunk in each.chunks),
            *(f"{each.schedule.count(k)}\n{human(each.schedule.nbytes(k))}" for k in ("AG", "RS")),
            f"{each.messages}\n{human(each.messages * nbytes)}",
        )
        rows.append(row)
    found = [table(title, columns, rows)]
    if plan.tied:
        title = "Weights of several stages, whose gradients are summed once a step"
        rows = [(name, "\n".join(copies), human(nbytes)) for name, copies, nbytes in plan.tied]
        found.append(table(title, ("<weight", "<copies", "a rank receives"), rows))
    if plan.config.model.layers * plan.config.train.micro_batches <= _LONGEST_COMPARED:
        found.append(_comparison(plan))
    return found


def _blocks_label(blocks: list[range]) -> str:
    """``4-7``; for several ranks ``4-15, 4 each`` (in a V schedule the stages may count down)."""
    first, last = min(b.start for b in blocks), max(b.stop for b in blocks) - 1
    return f"{first}-{last}" + (f", {len(blocks[0])} each" if len(blocks) > 1 else "")


def _comparison(plan: Plan) -> Table:
    """Gathers of the busiest rank under each schedule that the degrees and numbers allow."""
    columns = ("<schedule", "chunks", "weights re-gathered", "blocks kept", "time, forwards")
    rows, config = [], plan.config
    for kind in SCHEDULES.values():
        chunks = kind.chunks or max(2, config.pipeline.chunks)
        counts = []
        for keep in (None, "all"):
            changed = config.replaced({"weight_parallel.keep_unsharded": keep})
            try:
                other = plan_of(changed, plan.shape, kind, chunks)
            except ValueError:  # too few blocks or micro-batches for this one
                break
            counts.append(max(rank.schedule.count("AG") for rank in other.ranks))
        if len(counts) == 2:
            time = max(t.end for t in other.timed) / chunks
            rows.append((kind.name, chunks, *counts, f"{time:g}"))
    return table("Gathers of a step by schedule, busiest rank", columns, rows)


def schedule_lines(plan: Plan) -> Iterator[str]:
    """Every rank's actions, a pass on a line."""
    for number, rank in enumerate(plan.ranks):
        count = len(rank.schedule.actions)
        yield f"Schedule of one step, pipeline rank {number} ({count} actions)"
        for action, (gathers, reductions) in zip(rank.actions, rank.launched, strict=True):
            what = f"backward ({action.part})" if action.part else "forward"
            yield (
                f"  stage {action.stage} micro-batch {action.micro_batch} {what:<18} "
                f"{gathers} gathers, {reductions} reductions"
            )
