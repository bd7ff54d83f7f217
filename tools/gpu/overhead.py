"""One rank beside the plain model, and FSDP2 by either import: overhead without communication."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import internsp.fsdp
from internsp import ParallelMesh, WeightParallelConfig, parallelize
from internsp.app.report.metrics import rated_tflops
from internsp.base.accelerator import device_name
from tools.bench.model import fresh, initial_weights, process_group
from tools.bench.options import Sizes
from tools.gpu import rounds
from tools.gpu.device import matmul_peak
from tools.gpu.kept import NOTHING, Kept
from tools.gpu.model import Trainee, Weights, step_flops, trainee
from tools.gpu.options import Options

PLAIN, OURS, IMPORT, FSDP2 = "plain", "internsp", "internsp.fsdp", "FSDP2"


def run(options: Options, device: torch.device, kept: Kept = NOTHING) -> list[dict[str, Any]]:
    """A row for each sequence length and each choice of ``torch.compile``."""
    rows = []
    peak = 1e12 * (rated_tflops(device_name(device)) or 0.0)
    reached = matmul_peak(device)
    with process_group("nccl" if device.type == "cuda" else "gloo"):
        mesh = ParallelMesh.create(weight=1, device_type=device.type)
        for sequence in options.sequences or ():
            for compiled in {"off": [False], "on": [True], "both": [False, True]}[
                options.compile or "off"
            ]:
                row = {"sequence": sequence, "compile": compiled, "peak": peak, "reached": reached}
                make = partial(_row, options, sequence, compiled, device, mesh)
                case = f"{sequence}{' compiled' * compiled}"
                rows.append({**row, **kept.result("overhead", case, make)})
                gc.collect()
                torch.compiler.reset()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return rows


def _row(
    options: Options, sequence: int, compiled: bool, device: torch.device, mesh: ParallelMesh
) -> dict[str, Any]:
    model = options.sizes(sequence=sequence, ranks=1)
    weights = initial_weights(model)
    flops = step_flops(model, weights)
    try:
        trainees = {
            t.name: t
            for t in (
                _plain(model, weights, device, compiled),
                _ours(model, weights, device, compiled, mesh),
                _fsdp2(IMPORT, internsp.fsdp.fully_shard, model, weights, device, compiled),
                _fsdp2(FSDP2, fully_shard, model, weights, device, compiled),
            )
        }
        found = rounds.run(trainees, options, device, PLAIN)
    except torch.OutOfMemoryError as error:
        return {"flops": flops, "skipped": f"out of memory: {str(error).splitlines()[0]}"}
    base = found[PLAIN]["median"]
    for result in found.values():
        result["added"] = result["median"] / base - 1
        result["flops_per_second"] = flops / result["median"]
    return {"flops": flops, "variants": found}


def _plain(model: Sizes, weights: Weights, device: torch.device, compiled: bool) -> Trainee:
    blocks = fresh(model, weights, device)
    _compile(blocks, compiled)
    return trainee(PLAIN, blocks, model, device)


def _ours(
    model: Sizes, weights: Weights, device: torch.device, compiled: bool,
    mesh: ParallelMesh,
) -> Trainee:  # fmt: skip
    blocks = fresh(model, weights, device)
    config = WeightParallelConfig(compile=True, gather_before="qkv") if compiled else None
    parallelize(blocks, mesh, config or WeightParallelConfig())
    return trainee(OURS, blocks, model, device)


def _fsdp2(
    name: str, shard: Callable[..., nn.Module], model: Sizes, weights: Weights,
    device: torch.device, compiled: bool,
) -> Trainee:  # fmt: skip
    """A program of FSDP2's with either library's ``fully_shard``."""
    blocks = fresh(model, weights, device)
    _compile(blocks, compiled)
    mesh = dist.init_device_mesh(device.type, (1,))
    for layer in blocks.layers:
        shard(layer, mesh=mesh)
    shard(blocks, mesh=mesh)
    return trainee(name, blocks, model, device)


def _compile(blocks: nn.Module, compiled: bool) -> None:
    layers: Any = blocks.layers
    if compiled:
        for layer in layers:
            layer.compile()
