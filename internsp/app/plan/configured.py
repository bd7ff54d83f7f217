"""A configuration as the planner's workload: what internsp is known to do with it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from internsp.app.config import Config
from internsp.app.config.checks import degrees
from internsp.app.config.tiles import tile_count
from internsp.app.models.factory import device_type
from internsp.app.plan.devices import PEAK_NAMES, Device
from internsp.app.plan.workload import Degrees, Habits, ModelShape, Recompute, Workload
from internsp.base.accelerator import HOST
from internsp.base.host import ACTIVATIONS
from internsp.errors import ConfigError
from internsp.mesh import MeshShape
from internsp.mesh.sequence import RING
from internsp.pipeline.schedules import schedule_kind
from internsp.structure.dtypes import DTYPES
from internsp.structure.near import ranks_near

_LAUNCHES = 0.0004  # seconds of the host for a block's forward with its hooks
# Bytes of an element in a run's ZeRO step on a device, without and with 16-bit weights: fused
# AdamW 32, as it writes the gradient that it has divided; the gradient's copies and norm 12 or 10;
# the new weights 6. Such a step does not look for what a program wrote into 16-bit weights.
_STEP_BYTES = (44, 48)


def planned_shape(config: Config, world_size: int) -> MeshShape:
    """The mesh of a plan. Files are not looked at: a run's page is made when they may be gone.

    Raises:
        ConfigError: degrees that do not fit the number of ranks; lists all mistakes.
    """
    if mistakes := [str(problem) for problem in degrees(config, world_size)]:
        raise ConfigError("\n".join(mistakes))
    return MeshShape(world_size, **config.degrees())


def shape_of(config: Config) -> ModelShape:
    """The model's shape, from its section; experts from the config.json of its folder."""
    model = config.model
    experts, topk, expert_ffn = _experts(model.path) if model.family == "hf" else (0, 0, 0)
    shared = 0
    if model.mixtures:
        experts, topk, expert_ffn = model.experts, model.top_k, model.expert_width
    if model.family == "deepseek":
        shared = expert_ffn if model.shared_size is None else model.shared_size
    return ModelShape(
        layers=model.layers,
        hidden=model.hidden_size,
        ffn=model.dense_width,
        gated=True,
        heads=model.heads,
        kv_heads=model.key_value_heads,
        head_dim=model.head_size,
        vocab=model.vocab_size,
        tied=model.tie_embeddings,
        experts=experts,
        topk=topk,
        expert_ffn=expert_ffn,
        shared_ffn=shared,
    )


def _experts(folder: str | None) -> tuple[int, int, int]:
    """Number of experts, how many take a token, and their width, of a model of transformers."""
    try:
        text = (Path(folder or "") / "config.json").read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError):
        return 0, 0, 0
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    number = next((int(found[name]) for name in names if found.get(name)), 0)
    if not number:
        return 0, 0, 0
    width = found.get("moe_intermediate_size") or found.get("intermediate_size") or 0
    return number, int(found.get("num_experts_per_tok") or found.get("moe_k") or 1), int(width)


def reduce_dtype(config: Config) -> torch.dtype:
    """In which a gradient travels."""
    weights = config.weight_parallel
    return DTYPES[weights.reduce_dtype or weights.compute_dtype or config.train.dtype]


def workload_of(config: Config, shape: MeshShape) -> Workload:
    """One step of ``config`` on the ranks of ``shape``."""
    model, train, weights = config.model, config.train, config.weight_parallel
    model_shape = shape_of(config)
    dtype = weights.compute_dtype or train.dtype
    stored = DTYPES[train.dtype].itemsize
    again = config.activation_checkpoint
    share = len(again.selected(model.layers)) / model.layers
    full = share if again.mode == "full" else 0.0
    on_device = device_type(config) != HOST
    near = weights.reduce if isinstance(weights.reduce, int) else 0
    habits = Habits(
        fused="compiled" if weights.compile else "kernels" if on_device else "eager",
        kernel="flash2",
        gather_bytes=DTYPES[dtype].itemsize if weights.quantize == "none" else 1,
        reduce_bytes=reduce_dtype(config).itemsize,
        keeps_gathers=weights.keep_unsharded == "all",
        overlaps=weights.overlap,
        launches=_LAUNCHES / (2 if weights.compile else 1),
        once_an_owner=True,
        sends_ahead=True,
        collectives=5 if model.family == "internlm2" else 7,
        balances_head=True,
        reduce_near=None if weights.reduce == "auto" else near,
        sends_parts=True,
        reduces_in_ring=weights.reduce == "backend",
        shard_bytes=stored,
        sum_bytes=max(stored, 4),
        state_bytes=max(stored, 4) * (config.optimizer.moments + (stored < 4)),
        step_bytes=_STEP_BYTES[stored < 4] if on_device else 0,
        passes_state=on_device,
    )
    away = [*weights.offload, ACTIVATIONS] if again.offload else weights.offload
    return Workload(
        model=model_shape,
        degrees=Degrees(
            devices=shape.world_size,
            weight=shape.data,
            kind="zero3" if shape.weight > 1 else "zero1",
            optimizer=shape.zero_size,
            pipeline=shape.pipeline,
            interleave=config.pipeline.chunks if shape.pipeline > 1 else 1,
            context=shape.sequence,
            ring=shape.ring,
            expert=shape.expert,
            expert_shards=shape.experts.size if model_shape.experts else 0,
            owners_near=config.parallel.fast_links == "expert",
            expert_optimizer=shape.experts.zero if model_shape.experts else 1,
            shards=shape.weight,
            ring_near=config.sequence.fast_links == RING,
            v_shaped=shape.pipeline > 1 and schedule_kind(config.pipeline.schedule).v_shaped,
        ),
        sequence=config.data.sequence_length,
        rows=max(1, train.global_batch // (train.micro_batches * shape.data)),
        micro_batches=train.micro_batches,
        dtype=PEAK_NAMES[dtype],
        recompute=Recompute(share, full, share),
        habits=habits,
        offload=frozenset(away),
        tiled=tile_count(config, shape.data) > 1,
    )


def on_machines(config: Config, world_size: int, device: Device | None) -> Config:
    """``config`` with the number that ``reduce = "auto"`` takes on machines of
    ``device.near_ranks`` ranks; as it is where sums go at once, or without a device."""
    if device is None or config.weight_parallel.reduce != "auto":
        return config
    near = near_on(config, world_size, device)
    return config.replaced({"weight_parallel.reduce": near}) if near else config


def near_on(config: Config, world_size: int, device: Device) -> int:
    """Neighbors that sum first on machines of ``device.near_ranks`` ranks; 0: all at once."""
    machines = {rank: rank // device.near_ranks for rank in range(world_size)}
    shape = MeshShape(world_size, machines=machines, **config.degrees())
    return ranks_near(shape, reduce_dtype(config))
