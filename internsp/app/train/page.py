"""The page of a run, from what its ranks measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from internsp.app.plan.compared import compared, device_of_run
from internsp.app.plan.offloaded import HOSTED, STAGED
from internsp.app.plan.pipeline import drawn
from internsp.app.plan.step import make_plan
from internsp.app.report.advice import advise
from internsp.app.report.metrics import read_metrics
from internsp.app.report.page import Report
from internsp.app.report.timeline import LANES, build_timeline, window_of
from internsp.app.session.session import Session
from internsp.base.accelerator import device_name
from internsp.base.host import ACTIVATIONS
from internsp.base.trace import Event


def gather_timelines(session: Session, folder: Path, events: list[Event]) -> dict[int, list[Event]]:
    """``events`` of every rank on rank 0; with ``train.profile``, also as files. Collective."""
    mesh = session.mesh
    if session.config.train.profile == "timeline":
        write_chrome_trace(folder / "traces" / f"rank{mesh.rank}.json", events, mesh.rank)
    gathered: list[list[Event] | None] = [None] * mesh.world_size
    dist.gather_object(events, gathered if mesh.rank == 0 else None)
    return {rank: found for rank, found in enumerate(gathered) if found is not None}


def write_chrome_trace(path: Path, events: Sequence[Event], rank: int) -> Path:
    """Write one rank's events of one step: a process for the rank, a thread for each lane.

    It is for ``chrome://tracing`` and ui.perfetto.dev. Times are microseconds since the step began;
    payloads are in ``args.bytes``. The folder of ``path`` is created if missing.
    """
    lanes, begin = build_timeline(events), window_of(events)[0]
    rows: list[dict[str, object]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    ]
    for lane, name in enumerate(LANES):
        thread = {"pid": rank, "tid": lane}
        rows.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": name}})
        for bar in lanes[name]:
            rows.append(
                {
                    "ph": "X",
                    **thread,
                    "name": f"{bar.kind} {bar.weight or bar.unit}".rstrip(),
                    "cat": bar.phase or bar.kind,
                    "ts": 1e6 * (bar.start - begin),
                    "dur": 1e6 * (bar.end - bar.start),
                    "args": {"unit": bar.unit, "phase": bar.phase, "bytes": bar.nbytes},
                }
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
    return path


def write_page(
    session: Session,
    folder: Path,
    timeline: Mapping[int, Sequence[Event]],
    notes: Sequence[str],
    micro_batches: int,
) -> None:
    """Write ``report.html`` and ``report.json``, on rank 0 only."""
    config, shape = session.config, session.mesh.shape
    blocks = len(session.communicators[0].blocks)
    pipelined = session.pipeline is not None
    here = session.mesh.device
    device = device_of_run(folder, here.type, device_name(here))
    predicted = [] if device is None else compared(config, shape, device, timeline)
    report = Report(
        title=config.train.name,
        config_toml=config.to_toml(),
        metrics=read_metrics(folder / "metrics.jsonl"),
        mesh=shape.degrees(),
        memory=components(session),
        timeline=timeline,
        notes=notes,
        schedule=drawn(make_plan(config, shape.world_size)) if pipelined else "",
        advice=advise(timeline, config.weight_parallel, shape, micro_batches, blocks),
        predicted=predicted,
        device="" if device is None else device.name,
    )
    report.write(folder / "report.html")
    report.save(folder / "report.json")


def components(session: Session) -> list[tuple[str, int]]:
    """(component, bytes) of this rank: shards, slots, reduction buffers, optimizer, host memory."""
    total: dict[str, int] = {}
    for communicator, optimizer in zip(session.communicators, session.optimizers, strict=True):
        replicated, pool = communicator.replicated, communicator.state.pool
        shards = sum(w.storage.nbytes for w in replicated.sharded if not w.hosted)
        full = sum(m.storage.numel() * m.storage.element_size() for m in replicated.members)
        rows = [
            ("weight shards", shards),
            ("replicated parameters", full),
            ("unsharded weights (slots)", pool.slot_nbytes if pool.reuse else pool.live_nbytes()),
            ("reduction buffers", communicator.state.reducer.buffers.nbytes),
        ]
        link, activations, hosted = communicator.state.link, communicator.state.activations, []
        if link is not None:
            rows.append((STAGED, link.staging_bytes))
            kinds = [what for what in HOSTED if what != ACTIVATIONS]
            hosted = [(HOSTED[what], link.allocated[what]) for what in kinds]
        if activations is not None:
            hosted.append((HOSTED[ACTIVATIONS], activations.peak))
        for name, nbytes in (*rows, *optimizer.memory(), *hosted):
            total[name] = total.get(name, 0) + nbytes
    return list(total.items())
