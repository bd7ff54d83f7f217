"""What ``internsp plan`` prints: one screen, and the whole schedule into a file."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from internsp.app.config import Config
from internsp.app.models.factory import device_type
from internsp.app.plan.answer import FREE, seconds_lines, seconds_table, write_text
from internsp.app.plan.classes import (
    action_line,
    memory_by_rank,
    print_mesh,
    rules_lines,
    table,
)
from internsp.app.plan.configured import near_on, on_machines, reduce_dtype
from internsp.app.plan.devices import Device
from internsp.app.plan.experts import chosen_experts, expert_lines
from internsp.app.plan.longest import MemoryBudget, Rows
from internsp.app.plan.offloaded import with_sums
from internsp.app.plan.pipeline import drawn, schedule_lines, tables
from internsp.app.plan.replayed import StepReplay
from internsp.app.plan.sequences import head_exchange_lines
from internsp.app.plan.step import Plan, check_length
from internsp.app.process import terminal
from internsp.base.accelerator import HOST, device_count
from internsp.base.sizes import human
from internsp.errors import ConfigError
from internsp.mesh import MeshShape
from internsp.schedule.chunk import ChunkLayout, Schedule
from internsp.structure.kept import kept_line

KINDS = {
    "AG": "weight gather",
    "RS": "gradient reduction",
    "USE": "use",
    "FINISH": "sum into the shards",
    "EX": "exchange between replicas",
}
KEPT = "activations that are kept"
LEVERS = {
    KEPT: 'activation_checkpoint.mode = "full" keeps one input of each block',
    "block or loss at work": "activation_checkpoint.tiles and train.loss_chunk compute over parts "
    "of the sequence",
    "weight shards": "parallel.weight over more ranks, or weight_parallel.offload",
    "unsharded weights (slots, exact)": "weight_parallel.prefetch_depth = 0 takes one slot less, "
    "and a plan of units cuts a block into several",
    "reductions in flight (at most)": "weight_parallel.reductions_in_flight = 1 has one block's on "
    "their way",
    "gradient sums": 'weight_parallel.offload = ["gradients"], or more weight ranks',
    "unsharded gradient sums (full accumulation)": 'weight_parallel.accumulation = "sharded"',
    "optimizer state": "more ranks share it (parallel.optimizer_ranks), or "
    'weight_parallel.offload = ["optimizer"]',
}
"""What makes the largest component smaller."""
Part = str | Text | Table


def print_plan(
    config: Config,
    world_size: int,
    console: Console | None = None,
    picture: Path | None = None,
    schedule: Path | None = None,
    device: Device | None = None,
) -> None:
    """Print the plan of a step; of a pipeline, that of every rank.

    Args:
        device: the device whose seconds are predicted, and whose memory the step must fit.
        picture: file for a picture of a pipeline's schedule (SVG).
        schedule: file for the mesh by rank and every action of the step.

    Raises:
        ConfigError: degrees that do not fit; or the step is too long to simulate; or a file cannot
            be written, or ``picture`` is given without a pipeline.
    """
    console = console or terminal.console()
    check_length(config)
    if picture is not None and config.parallel.pipeline == 1:
        raise ConfigError("--picture: there is no pipeline to draw (parallel.pipeline = 1)")
    config = on_machines(chosen_experts(config, world_size), world_size, device)
    budget = MemoryBudget(config, world_size)
    plan = budget.plan
    if picture is not None:
        write_text("--picture", picture, drawn(plan))
    if schedule is not None:
        write_text("--schedule", schedule, listing(plan))
    for part in _screen(config, budget, device):
        console.print(part, markup=False)
    for what, path in (("the picture", picture), ("the whole schedule", schedule)):
        if path is not None:
            console.print(f"{what} is in {path}", markup=False)
    if schedule is None:
        console.print("--schedule FILE writes the mesh by rank and every action of the step")


def _screen(config: Config, budget: MemoryBudget, device: Device | None) -> Iterator[Part]:
    plan = budget.plan
    yield _title(config, plan)
    found = [budget.at(config.data.sequence_length, rank) for rank in range(len(budget.ranks))]
    yield from _verdict(config, found, device)
    predicted = None
    if device is not None:
        predicted = StepReplay(plan).on(device)
        yield from seconds_lines(config, plan.shape, device, predicted)
    if config.train.batch_tokens:
        yield (
            f"A step has as many micro-batches as {config.train.batch_tokens:,} tokens need "
            f"(train.batch_tokens); planned are {config.train.micro_batches}."
        )
    if plan.rules.matched:
        yield Text("Rules of the plan", style="bold")
    yield from rules_lines(plan.rules)
    yield from _chunk(plan) if len(plan.ranks) == 1 else _stages(plan)
    ranks = plan.shape.world_size
    if device is not None:
        chunks = [chunk.plan for chunk in plan.ranks[0].chunks]
        yield from sums_lines(config, chunks, ranks, device)
    yield from expert_lines(config, ranks, None if device is None else device.near_ranks)
    yield _memory_table(config, found)
    if predicted is not None:
        yield seconds_table(predicted)


def _chunk(plan: Plan) -> Iterator[Part]:
    (rank,) = plan.ranks
    yield _traffic_table(plan)
    yield from block_lines(plan.chunk, rank.schedule)
    if plan.chunk.policy.kept:
        yield kept_line([plan.chunk])
    largest = max(plan.chunk.blocks, key=lambda unit: unit.slot_bytes)
    yield (
        f"{len(plan.chunk.blocks)} units are gathered in turn, the largest {largest.name} "
        f"({human(largest.slot_bytes)}): slots of {human(sum(plan.chunk.slots()))}, at least "
        f"{human(plan.chunk.min_slot_bytes())} (prefetch_depth = 0, none kept)"
    )


def _title(config: Config, plan: Plan) -> str:
    """Parameters, ranks and their degrees, in a line."""
    shape = plan.shape
    degrees = {
        "pipeline": shape.pipeline, "data": shape.data, "sequence": shape.sequence,
        "weight": shape.weight, "zero": shape.zero_size,
    }  # fmt: skip
    told = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if shape.separate:
        owners = [f"expert {shape.expert}"] if shape.expert > 1 else []
        told += [*owners, f"expert weight {shape.experts.size}"]
    axes = f" (sequence of {shape.sequence_axes})" if shape.ring > 1 else ""
    on = f"{shape.world_size} ranks: " + (", ".join(told) or "each alone")
    on = "1 rank" if shape.world_size == 1 else on + axes
    return f"{plan.parameters:,} parameters in {config.model.layers} blocks, on {on}"


def _traffic_table(plan: Plan) -> Table:
    rows: list[tuple[object, ...]] = []
    schedule = plan.ranks[0].schedule
    experts = {w.name for u in plan.chunk.units for w in u.weights if w.expert}
    for kind in ("AG", "RS"):
        rows.append((KINDS[kind], schedule.count(kind), human(schedule.nbytes(kind))))
        near = [a.nbytes for a in schedule.actions if a.kind == kind and a.near]
        if near:
            rows.append(("  of it within near groups", len(near), human(sum(near))))
        if experts:
            own = [a.nbytes for a in schedule.actions if a.kind == kind and a.weight in experts]
            size = plan.shape.experts.size
            rows.append((f"  of it experts, over {size} ranks", len(own), human(sum(own))))
    rows += [(name, "", human(nbytes)) for name, nbytes in plan.ranks[0].traffic]
    exchanges, received = plan.ranks[0].matrices()
    if exchanges:
        rows.append(("matrices to and from owners (mean)", exchanges, human(received)))
    title = "Collectives of one step, payload a rank receives"
    return table(title, ("<what", "count", "bytes"), rows)


def block_lines(chunk: ChunkLayout, schedule: Schedule) -> Iterator[str]:
    """The way of one block's weights in a step: what happens while which unit runs.

    The block is one in the middle, whose gathers are those of most. Lines of later micro-batches
    that say the same are one with those of the first.
    """
    block = chunk.run_order[(len(chunk.blocks) - 1) // 2]
    own = {weight.name for weight in block.weights}
    unit_of = {w.name: unit.name for unit in chunk.units for w in unit.weights}
    yield f"The weights of {block.name} in a step:"
    running = ""
    told: dict[tuple[str, str, str], list[int]] = {}  # what, when, while what runs -> bytes of each
    for action in schedule.actions:
        if action.kind == "USE":
            running = unit_of.get(action.weight, running)
        if action.weight in own and action.kind in KINDS:
            told.setdefault((KINDS[action.kind], action.phase, running), []).append(action.nbytes)
    for (kind, phase, where), each in told.items():
        amount = f", {human(sum(each))} in {len(each)} collectives" if any(each) else ""
        at = "" if where in ("", block.name) else f" while {where} runs"
        yield f"  {phase:<10} {kind}{at}{amount}"


def _stages(plan: Plan) -> Iterator[Part]:
    yield from tables(plan)
    for number, rank in enumerate(plan.ranks):
        exchanges, received = rank.matrices()
        if exchanges:
            yield (
                f"Pipeline rank {number}: a step has {exchanges} exchanges of matrices to and from "
                f"owners, {human(received)} received (mean)"
            )
        for name, nbytes in rank.traffic:
            yield f"Pipeline rank {number}: {name}: {human(nbytes)} a step"
        if any(chunk.plan.policy.kept for chunk in rank.chunks):
            kept = kept_line([chunk.plan for chunk in rank.chunks])
            yield f"Pipeline rank {number}: {kept}"
    yield "Simulated with the messages between ranks: no rank waits forever."


def _verdict(
    config: Config, found: Sequence[tuple[Rows, Rows]], device: Device | None
) -> Iterator[str]:
    """Whether the step fits, and what makes the largest component of the fullest rank smaller.

    Args:
        device: whose memory there is for a rank; ``None``: this machine's.
    """
    limit = _memory_here(config) if device is None else int(device.memory)
    on_host = device_type(config) == HOST  # what is offloaded stays in the same memory
    memory = [[*here, *there] if on_host else here for here, there in found]
    needed = [sum(nbytes for _, nbytes in rows) for rows in memory]
    full = needed.index(max(needed))
    if limit is None:
        verdict = f"a rank needs {human(needed[full])} of its device"
    else:
        where = "this machine" if device is None else device.name
        fits = "fits" if needed[full] <= limit else "does NOT fit"
        verdict = f"{fits}: a rank needs {human(needed[full])}, and {where} has {human(limit)}"
        if device is None and on_host and config.launch.processes > 1:
            verdict += f" for each of {config.launch.processes} ranks"
        if limit >= needed[full] > FREE * limit:
            verdict += "; steps become slower where less than 10% stays free"
        elif device is None and limit < needed[full]:
            verdict += "; --device NAME plans for other machines"
    if not on_host and (hosted := sum(nbytes for _, nbytes in found[full][1])):
        verdict += f"; and {human(hosted)} of host memory"
    yield verdict
    name, nbytes = max(memory[full], key=lambda row: row[1])
    lever = next((text for what, text in LEVERS.items() if name.startswith(what)), None)
    again = config.activation_checkpoint
    if lever == LEVERS[KEPT] and again.mode == "full":
        part = "activation_checkpoint.fraction = 1 recomputes every block; "
        lever = ("" if again.fraction == 1 else part) + (
            "activation_checkpoint.offload puts their inputs into host memory"
        )
    if lever is not None:
        share = f"{nbytes / needed[full]:.0%} of it are {name}"
        yield f"{share}. Less: {lever}"


def sums_lines(config: Config, chunks: Sequence[ChunkLayout], world_size: int, device: Device
) -> Iterator[str]:  # fmt: skip
    """What reductions receive from other machines, as planned and by the other forms.

    Args:
        config: with its key as :func:`on_machines` leaves it.
    """
    planned: int | str = chunks[0].reduce_near
    near = chunks[0].reduce_near or near_on(config, world_size, device)
    shape = MeshShape(world_size, **config.degrees())
    itemsize = reduce_dtype(config).itemsize
    at_once = levels = ring = 0.0
    for weight in {w for c in chunks for u in c.units for w in u.weights if w.trainable}:
        size = shape.axis(weight.expert).size
        if near and size > near:
            part = weight.gradient_bytes / size
            at_once += (size - near) * part
            levels += (size // near - 1) * part * max(itemsize, 4) / itemsize
            ring += (size - 1) / near * part
    if not at_once:
        return
    if config.weight_parallel.reduce == "backend":
        planned = '"backend"'
    forms = {
        near: f"in two levels {human(int(levels))}",
        0: f"at once {human(int(at_once))}",
        '"backend"': f"in a ring over all adapters {human(int(ring))}",
    }
    first = forms.pop(planned)
    others = ", ".join(f"{text} (weight_parallel.reduce = {key})" for key, text in forms.items())
    yield (
        f"Gradients that a rank's backward receives from other machines of {near} ranks: "
        f"{first}; {others}"
    )


def _memory_table(config: Config, found: Sequence[tuple[Rows, Rows]]) -> Table:
    """Components in the memory of the device and of the host; equal pipeline ranks together."""
    title = f"Memory of a rank, with sequences of {config.data.sequence_length:,} tokens"
    # Ranks of a pipeline have other numbers of passes in flight: one row for all of them.
    memory = [
        {re.sub(r", \d+ in flight$", "", name): nbytes for name, nbytes in (*here, *there)}
        for here, there in found
    ]
    if len(memory) == 1:
        rows = [(name, human(nbytes)) for name, nbytes in with_sums([*memory[0].items()])]
        return table(title, ("<component", "bytes"), rows)
    names = dict.fromkeys(name for mine in memory for name in mine)  # ranks may lack rows
    return memory_by_rank({n: [mine.get(n, 0) for mine in memory] for n in names}, title)


def _memory_here(config: Config) -> int | None:
    """Bytes that this machine has for a rank; ``None`` if the run's device is not here."""
    kind = device_type(config)
    if kind != HOST:
        module = torch.get_device_module(kind) if device_count(kind) else None
        told = getattr(module, "mem_get_info", None)
        return None if told is None else int(told()[1])
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // config.launch.processes


def listing(plan: Plan) -> str:
    """The mesh by rank, how attention exchanges heads, and every action."""
    out = io.StringIO()
    print_mesh(plan.shape, Console(file=out, width=160, soft_wrap=True))
    device, split = device_type(plan.config), plan.kind.splits_backward
    lines = head_exchange_lines(plan.config, plan.shape, device, split)
    if len(plan.ranks) > 1:
        lines += schedule_lines(plan)
    else:
        actions = plan.ranks[0].schedule.actions
        lines.append(f"Schedule of one step ({len(actions)} actions a rank)")
        lines += (f"  {action_line(a.kind, a.phase, a.weight, a.nbytes)}" for a in actions)
    return out.getvalue() + "\n".join([*lines, ""])
