"""Quantized all-gathers: every rank computes with equal rounded values, and nothing else changes.

The reference rounds the weights of one process itself, shard by shard.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig
from internsp.errors import ConfigError
from internsp.mesh import ParallelMesh
from internsp.schedule.simulate import simulate
from internsp.wp.encode import encoder_bytes
from tests.support.compare import close
from tests.support.few import few
from tests.support.models import Block, Tiny, Twin, raises
from tests.support.pipeline import Case, batches, compare, make
from tests.support.ranks import ranks, run_ranks

FULL = ActivationCheckpointConfig(mode="full")
HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
WIDE = partial(Tiny, partial(Block, 22), layers=4, width=22)  # 128 does not divide its shards
KINDS = ("AG", "WAIT", "USE", "FREE", "RS", "FINISH")
LARGE = {"rules": [{"match": ["**.q", "**.wo"], "quantize": "none"}]}  # others: w1 and w2


def rounded(whole: Tensor, ranks: int, kind: str) -> Tensor:
    """The values of ``whole`` after a quantized all-gather, its rows sharded over ``ranks``."""
    rows = -(-len(whole) // ranks)
    parts = []
    for part in whole.detach().split(rows):
        flat = part.flatten().double()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 128)).view(-1, 128)
        largest = {"int8": 127.0, "fp8": 448.0}[kind]
        scale = (blocks.abs().amax(1, keepdim=True) / largest).float().double()
        codes = blocks * scale.clamp(min=1.2e-38).reciprocal()
        codes = codes.clamp(-largest, largest)
        codes = codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn).double()
        parts.append((codes * scale).flatten()[: len(flat)].view_as(part))
    return torch.cat(parts).to(whole.dtype)


class Rounding:
    """Sets rounded weights in a model on one process, and restores the original ones."""

    def __init__(self, model: nn.Module, names: set[str], ranks: int, kind: str) -> None:
        self.members = [(n, p) for n, p in model.named_parameters() if n in names]
        self.ranks, self.kind = ranks, kind

    def __enter__(self) -> None:
        self.kept = [p.detach().clone() for _, p in self.members]
        for _, parameter in self.members:
            parameter.data.copy_(rounded(parameter, self.ranks, self.kind))

    def __exit__(self, *_: object) -> None:
        for (_, parameter), kept in zip(self.members, self.kept, strict=True):
            parameter.data.copy_(kept)


def quantized_names(twin: Twin) -> set[str]:
    sharded = twin.communicator.replicated.sharded
    return {weight.name for weight in sharded if weight.encoding is not None}


CASES: tuple[tuple[str, dict[str, Any], ActivationCheckpointConfig | None], ...] = (
    ("int8", {}, None),
    ("fp8", {"memory_pool": False, "keep_unsharded": 1}, HALF),
    ("int8", {"granularity": "module"}, FULL),
    ("int8", {"prefetch_depth": 2, "gather_before": "mlp"}, HALF),
)
ROLLING = ("int8", {"prefetch_depth": 2, "gather_before": "rolling"}, HALF)


@pytest.mark.unmeasured
@few("cases", (*CASES, ROLLING), 2)
@ranks(2)
def test_loss_and_every_gradient_are_those_of_rounded_weights(cases: list[Any]) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for kind, config, checkpoint in cases:
        bits = []
        for overlap in (True, False):
            what = f"{kind} {config} overlap {overlap}"
            options = {**LARGE, **config, "quantize": kind, "overlap": overlap}
            twin = Twin(WIDE, mesh, checkpoint, **options)
            names = quantized_names(twin)
            assert names == {f"layers.{i}.w{n}.weight" for i in range(4) for n in (1, 2)}
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (twin.plain, twin.ours)]
            for _ in range(3):
                twin.trace.clear()
                with Rounding(twin.plain, names, 2, kind):
                    for _ in range(2):  # micro-batches
                        everybody, mine = twin.batch()
                        wanted, found = twin.plain(*everybody), twin.ours(*mine)
                        whole = found.detach().clone()
                        torch.distributed.all_reduce(whole)
                        close(whole, wanted, f"{what}: loss", 1e-10)
                        wanted.backward()
                        found.backward()
                twin.check_step(optimizers, what)  # of the values without rounding
            with Rounding(twin.plain, names, 2, kind), torch.inference_mode():
                everybody, _ = twin.batch()
                close(twin.ours(*everybody), twin.plain(*everybody), f"{what}: evaluation", 1e-10)
            bits.append([p.full_tensor() for p in twin.ours.parameters()])  # type: ignore[attr-defined]
        for a, b in zip(*bits, strict=True):
            assert torch.equal(a, b), f"{kind} {config}: other bits without overlap"


@pytest.mark.thorough(6)
@pytest.mark.unmeasured
@ranks(2)
def test_gathers_and_buffers_are_those_of_the_plan() -> None:
    """Gathers, payload and buffers are the plan's, and no step allocates after the first."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for kind, config, checkpoint in CASES:
        for overlap in (True, False):
            twin = Twin(WIDE, mesh, checkpoint, overlap=overlap, quantize=kind, **LARGE, **config)
            optimizer = torch.optim.SGD(twin.ours.parameters(), lr=0.1)
            state, plan = twin.communicator.state, twin.communicator.plan
            assert state.encoder is not None
            assert plan is not None
            wanted = simulate(plan, 2, overlap)
            for step in range(3):
                twin.trace.clear()
                state.collectives.counters.reset()
                with twin.communicator.unchanged():
                    for _ in range(2):
                        twin.ours(*twin.batch()[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert twin.trace.lines(KINDS) == wanted.lines(), f"{kind} {config} {overlap}"
                assert state.collectives.counters.gathered_bytes == wanted.nbytes("AG")
                if step == 0:
                    allocated = state.encoder.buffers.allocations
            if config.get("memory_pool", True):
                stated = encoder_bytes(plan, wanted, mesh.shape)
                assert state.encoder.buffers.nbytes == stated
                assert state.encoder.buffers.allocations == allocated
            else:
                assert state.encoder.buffers.nbytes == 0
            one = next(w for u in plan.units for w in u.weights if w.name == "layers.0.w1.weight")
            numel = 23 * 22  # of 45 rows
            blocks = -(-numel // 128)
            assert one.gather_bytes == -(-blocks * (128 + 4) // 16) * 16
            assert one.reduce_bytes == numel * 8, "gradients are not quantized"


def bfloat16(rank: int, world_size: int) -> list[float]:
    """bf16 with fp32 shards, and autocast: all ranks have the same bits in their slots."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    sums = []
    for kind in ("int8", "fp8"):
        for config in ({"compute_dtype": "bfloat16"}, {}):
            twin = Twin(WIDE, mesh, None, torch.float32, quantize=kind, **LARGE, **config)
            master = twin.ours.get_parameter("layers.3.w1.weight")
            before = master.full_tensor().clone()  # type: ignore[attr-defined]
            with torch.autocast("cpu", torch.bfloat16, enabled=not config):
                for _ in range(2):
                    ids, labels = twin.batch()[1]
                    if config:
                        twin.ours.embed.register_forward_hook(lambda m, a, out: out.bfloat16())
                    twin.ours(ids, labels).backward()
            assert torch.equal(master.full_tensor(), before), "the shard is never rounded"  # type: ignore[attr-defined]
            unit = twin.communicator.blocks[3]
            weight = next(w for w in unit.weights if w.name == "layers.3.w1.weight")
            state = twin.communicator.state
            state.perform(state.queue.use(unit, weight, "forward"))
            whole = weight.read()
            assert whole.dtype == torch.bfloat16
            error = (whole.float() - before).abs().amax() / before.abs().amax()
            assert float(error) < {"int8": 0.008, "fp8": 0.04}[kind]
            sums.append(float(whole.double().abs().sum()))
    half = partial(Twin, WIDE, mesh, None, torch.float32, quantize="int8", compute_dtype="float16")
    words = "layers.0.w1.weight", "float16", "weight_parallel.quantize = 'none'"
    raises(ConfigError, partial(half, **LARGE), *words)
    twin = Twin(WIDE, mesh, None, torch.float32, quantize="int8", **LARGE)
    with torch.autocast("cpu", torch.float16):  # the scales' dtype follows autocast
        raises(ConfigError, partial(twin.ours, *twin.batch()[1]), *words)
    return sums


def test_all_ranks_hold_the_same_bits_in_bfloat16_and_shards_stay_exact() -> None:
    first, second = run_ranks(bfloat16, 2)
    assert first == second


def piped(rank: int, world_size: int, case: Case) -> tuple[float, float, bool]:
    trace = Trace(enabled=True)
    pipeline, plain = make(case, trace=trace)
    names = {
        weight.name
        for communicator in pipeline.communicators
        for weight in communicator.replicated.sharded
        if weight.encoding is not None
    }
    every: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(every, names)
    losses = pipeline.step(batches(case, pipeline.mesh))
    same = trace.lines(("AG", "RS")) == pipeline.planned().lines(("AG", "RS"))
    with Rounding(plain, set().union(*every), case.weight, "int8"):
        found = compare(case, pipeline, plain, losses)
    return found.loss, found.gradient, same and bool(names)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_pipelines_weights_travel_quantized(schedule: str) -> None:
    case = Case(
        schedule, chunks=2 if schedule == "ZBVZeroBubble" else 1, weight=2,
        weights={"quantize": "int8", "coalesce_bytes": 0},
    )  # fmt: skip
    for loss, gradient, right in run_ranks(piped, 4, case):
        assert loss < 1e-10
        assert gradient < 1e-10
        assert right


@ranks(2)
def test_gradients_travel_in_the_dtype_that_was_asked_for() -> None:
    """Gradients in another dtype than weights, with sums of one and of several micro-batches."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 2e-2)):
        for options in ({}, {"coalesce_bytes": 4000}, {"accumulation": "full"}):
            twin = Twin(WIDE, mesh, reduce_dtype=dtype, **options)
            assert twin.communicator.plan is not None
            several = twin.communicator.plan.policy.accumulate_whole
            for step in range(3):
                twin.trace.clear()
                if several:
                    with twin.communicator.no_sync():
                        twin.backward()
                twin.backward()
                twin.check_gradients(f"{dtype} {options}", tolerance)
                twin.zero_grad()
                if step == 1:
                    allocated = twin.communicator.state.reducer.buffers.allocations
            assert twin.communicator.state.reducer.buffers.allocations == allocated
            sent = sum(e.nbytes for e in twin.trace.events if e.kind == "RS")
            assert sent == simulate(twin.communicator.plan).nbytes("RS")
            usual = Twin(WIDE, mesh).communicator.plan
            assert usual is not None
            size = {"float32": 4, "bfloat16": 2}[dtype]
            assert sent == simulate(usual).nbytes("RS") * size // 8
