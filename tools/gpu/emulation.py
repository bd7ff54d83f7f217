"""The complete schedule over an EMULATED link, on one device: overlap, memory, random delays."""

from __future__ import annotations

import gc
import statistics
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from internsp import ISPCommunicator, ParallelMesh, WeightParallelConfig, parallelize
from internsp.config import ActivationCheckpointConfig
from internsp.schedule.simulate import simulate
from tools.bench.bounds import MBIT, play, shares
from tools.bench.model import fresh, initial_weights, process_group, repeated
from tools.bench.options import Sizes
from tools.gpu import rounds
from tools.gpu.device import allocated, peak_of
from tools.gpu.kept import NOTHING, Kept
from tools.gpu.link import EmulatedCollectives, Link, Pace, make_link
from tools.gpu.model import Trainee, Weights, tied, trainee
from tools.gpu.options import Options

COMPUTE = "compute only"

# Settings that use streams differently: each must train the same as one plain process.
STREAMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "no overlap": ({"overlap": False}, {}),
    "trigger at the block's entry": ({"gather_before": "qkv"}, {}),
    "two blocks ahead": ({"prefetch_depth": 2}, {}),
    "module by module": ({"granularity": "module"}, {}),
    "no pool": ({"memory_pool": False}, {}),
    "small weights together": ({"coalesce_bytes": 1 << 30}, {}),
    "half recomputed": ({}, {"mode": "full", "fraction": 0.5}),
}


def run_link(options: Options, device: torch.device) -> list[dict[str, Any]]:
    """A row for each ratio of communication to compute; all variants interleaved."""
    ranks = options.size("emulated_ranks")
    model, weights = _model(options)
    with ExitStack() as stack:
        stack.enter_context(process_group("fake", ranks))
        mesh = ParallelMesh.create(weight=ranks, device_type=device.type)
        alike = tied(model, weights, device, ranks)
        compute = _compute(model, weights, device, ranks)
        # Compute alone first: the rates follow from it. Measured again in the rounds.
        alone = statistics.median([compute.seconds(device) for _ in range(options.warm_up + 3)][1:])
        payload = _payload(model, weights, device, mesh)
        trainees, links, plans = {alike.name: alike}, {}, {}
        for ratio in options.ratios:
            pace = Pace(payload / (ratio * alone))
            link = links[ratio] = make_link(device, pace)
            stack.callback(link.close)
            name = f"ratio {ratio:g}"
            trainees[name], plans[name] = _ours(name, model, weights, device, mesh, link)
        found = rounds.run(trainees, options, device, alike.name)
        again = [compute.seconds(device) for _ in range(max(3, options.rounds))]
        return [
            _link_row(
                ratio, found[name], trainees[name], links[ratio], plans[name], [alone, *again],
                payload, options, device,
            )
            for ratio, name in ((ratio, f"ratio {ratio:g}") for ratio in options.ratios)
        ]  # fmt: skip


def _link_row(
    ratio: float, found: dict[str, Any], trained: Trainee, link: Link,
    communicator: ISPCommunicator, alone: list[float], payload: float,
    options: Options, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    link.busy_seconds()
    for _ in range(options.steps):
        trained.seconds(device)
    busy = link.busy_seconds() / options.steps
    compute = statistics.median(alone)
    ideal = max(compute, busy)
    return {
        "ratio": ratio,
        **found,
        "compute": compute,
        "communication": busy,
        "ideal": ideal,
        "over_ideal": found["median"] / ideal,
        "bound": _bound(communicator, compute, payload / busy),
        "payload": payload,
    }


def _bound(communicator: ISPCommunicator, compute: float, rate: float) -> float:
    """Duration of the printed schedule on a link of this rate: its first all-gather and its last
    reduction cannot be overlapped. Backward counts as twice forward."""
    plan = communicator.plan
    assert plan is not None, "parallelize always makes a plan"
    actions = simulate(plan).actions
    lines = [(a.kind, a.phase, a.weight, a.nbytes) for a in actions]
    numels = {w.name: w.layout.padded_numel for unit in communicator.blocks for w in unit.weights}
    spent = shares(numels, {"forward": compute / 3, "backward": compute * 2 / 3})
    return play(lines, spent, rate / MBIT)


def run_memory(options: Options, device: torch.device) -> dict[str, Any]:
    """Memory of weight communication compared with the pool's own figures; on a GPU also measured.

    Returns:
        ``predicted``: shards, norms, slots and buffers, computed without measuring the device.
        ``late_allocations``: of pooled buffers after the second step. On a GPU also ``held``, the
        measured bytes between steps, and ``peak`` next to ``predicted_peak``: those bytes plus
        a shard's gradient each and what a plain pass takes (activations, temporary tensors).
    """
    ranks = options.size("emulated_ranks")
    model, weights = _model(options)
    with process_group("fake", ranks):
        mesh = ParallelMesh.create(weight=ranks, device_type=device.type)
        plain_pass = _pass_bytes(model, weights, device)
        gc.collect()
        before = allocated(device)
        link = make_link(device, Pace())
        try:
            made, communicator = _ours("memory", model, weights, device, mesh, link)
            for _ in range(2):
                made.seconds(device)
            pool = communicator.state.pool
            buffers = communicator.state.reducer.buffers
            allocations = buffers.allocations
            held, batch = allocated(device), made.x.nbytes + made.target.nbytes
            peak = peak_of(device, lambda: made.seconds(device))
            made.seconds(device)
        finally:
            link.close()
        kept = sum(m.storage.nbytes for m in communicator.replicated.all_parameters())
        flat = communicator.replicated.flat
        result: dict[str, Any] = {
            "slots": pool.slot_nbytes,
            "buffers": buffers.nbytes,
            "predicted": kept + (0 if flat is None else flat.nbytes)
            + pool.slot_nbytes + buffers.nbytes + batch,
            "late_allocations": buffers.allocations - allocations,
        }  # fmt: skip
        if before is not None and held is not None and peak is not None:
            result["held"] = held - before
            result["peak"] = peak - before
            gradients = sum(p.to_local().nbytes for p in made.model.parameters())
            result["predicted_peak"] = result["predicted"] + gradients + (plain_pass or 0)
        return result


def _pass_bytes(model: Sizes, weights: Weights, device: torch.device) -> int | None:
    """Peak bytes that a plain forward and backward add, where each gradient is dropped as soon as
    it is there; ``None`` on a CPU."""
    plain = _compute(model, weights, device, 1)

    def drop(parameter: nn.Parameter) -> None:
        parameter.grad = None

    for parameter in plain.model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)

    def once() -> None:
        (plain.model(plain.x, plain.target) * plain.scale).backward()
        plain.x.grad = None

    once()
    before = allocated(device)
    peak = peak_of(device, once)
    return None if peak is None or before is None else peak - before


def run_streams(
    options: Options, device: torch.device, kept: Kept = NOTHING
) -> list[dict[str, Any]]:
    """Losses with random delays on the side stream, and NaN in buffers until their data arrives.

    Returns:
        A row for each setting of :data:`STREAMS`: ``reason`` is ``None`` if it trained the same as
        one plain process.
    """
    ranks = options.size("emulated_ranks")
    model, weights = _model(options)
    with process_group("fake", ranks):
        mesh = ParallelMesh.create(weight=ranks, device_type=device.type)
        alike = tied(model, weights, device, ranks)
        for _ in range(options.steps + 1):
            alike.seconds(device)

        def row(number: int, name: str) -> dict[str, Any]:
            delay = (0.0 if options.delay_ms is None else options.delay_ms) / 1e3
            link = make_link(device, Pace(None, delay, poison=True, seed=options.seed + number))
            try:
                made, _ = _ours(name, model, weights, device, mesh, link, *STREAMS[name])
                for _ in range(options.steps + 1):
                    made.seconds(device)
            finally:
                link.close()
            return {"name": name, "losses": made.losses, "reason": _reason(made, alike)}

        return [
            kept.result("streams", name, partial(row, number, name))
            for number, name in enumerate(STREAMS)
        ]


def _reason(made: Trainee, alike: Trainee) -> str | None:
    try:
        rounds.compare({made.name: made, alike.name: alike}, alike.name)
    except rounds.Differs as error:
        return str(error)
    return None


def _model(options: Options) -> tuple[Sizes, Weights]:
    model = options.sizes(sequence=(options.sequences or (1,))[0], ranks=1)
    ranks = options.size("emulated_ranks")
    return model, {
        name: weight if weight.ndim < 2 else repeated(weight, ranks)
        for name, weight in initial_weights(model).items()
    }


def _compute(model: Sizes, weights: Weights, device: torch.device, ranks: int) -> Trainee:
    """The plain model with unsharded weights; its update is as large as that of a shard."""
    blocks = fresh(model, weights, device)
    rows: list[tuple[nn.Parameter, nn.Parameter]] = []
    for parameter in blocks.parameters():
        length = len(parameter) // ranks if parameter.ndim > 1 else len(parameter)
        rows.append((parameter, nn.Parameter(parameter.data[:length])))
    made = trainee(
        COMPUTE, blocks, model, device, torch.optim.SGD([r for _, r in rows], lr=model.lr)
    )

    def hand_over() -> None:
        for parameter, part in rows:
            assert parameter.grad is not None, "backward has just filled it"
            part.grad, parameter.grad = parameter.grad[: len(part)], None

    made.finish = hand_over
    return made


def _ours(
    name: str, model: Sizes, weights: Weights, device: torch.device, mesh: ParallelMesh,
    link: Link, settings: dict[str, Any] | None = None, checkpoint: dict[str, Any] | None = None,
) -> tuple[Trainee, ISPCommunicator]:  # fmt: skip
    blocks = fresh(model, weights, device)
    # Norms are replicated: the norm of an emulated peer is not this rank's shard.
    common = {"min_shard_elements": model.hidden + 1, "coalesce_bytes": 0}
    communicator = parallelize(
        blocks,
        mesh,
        WeightParallelConfig(**{**common, **(settings or {})}),
        activation_checkpoint=ActivationCheckpointConfig(**(checkpoint or {"mode": "none"})),
        collectives=partial(EmulatedCollectives, link=link),
    )
    return trainee(name, blocks, model, device), communicator


def _payload(model: Sizes, weights: Weights, device: torch.device, mesh: ParallelMesh) -> float:
    """Bytes of one step over the link, according to the schedule."""
    link = make_link(device, Pace())
    _, communicator = _ours("plan", model, weights, device, mesh, link)
    link.close()
    assert communicator.plan is not None, "parallelize always makes a plan"
    schedule = simulate(communicator.plan)
    return float(schedule.nbytes("AG") + schedule.nbytes("RS"))
