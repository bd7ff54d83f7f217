"""Python cost of weight parallelism's hooks per block, against a plain model and FSDP2.

Tiny tensors on one CPU process, one thread; the other ranks are torch's ``fake`` process group,
whose collectives return at once. What is left is what the hooks themselves cost, measured in CPU
time of the one thread that runs forward and backward. The three variants run in turn within every
round, so that a slow moment of the machine meets all of them::

    python tools/bench_overhead.py --json overhead.json

A fake gather repeats this rank's shard, so the model is made of weights that consist of one
shard repeated: every variant must then compute the plain model's loss, and is checked to.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from internsp import ParallelMesh, WeightParallelConfig, parallelize

VARIANTS = ("plain", "internsp", "fsdp2")
PHASES = ("forward", "backward", "both")
VOCABULARY = 64
GOAL = 0.5  # our added cost as a share of FSDP2's


@dataclass(frozen=True)
class Options:
    """What to measure."""

    blocks: int = 8
    """Blocks of the model; costs per model (root, end of backward) are spread over them."""
    hidden: int = 48
    """Width; 48 is the smallest whose matrices the default settings cut rather than replicate."""
    tokens: int = 8
    """Tokens in the one batch."""
    world: int = 4
    """Ranks that the fake process group pretends to have; must divide width and vocabulary."""
    coalesce_bytes: int = WeightParallelConfig().coalesce_bytes
    """weight_parallel.coalesce_bytes; 0 gives every weight a gather of its own."""
    rounds: int = 400
    """Rounds; each runs every variant once."""
    batches: int = 5
    """The rounds are also evaluated in this many consecutive parts, to show the spread."""
    warm_up: int = 30
    """Rounds before the first that counts."""
    json: Path | None = None
    """Write options, medians, ratios and all times to this file."""


class Block(nn.Module):
    """A Llama-like block: 7 linear layers, 2 norms, attention with 2 heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk = nn.Linear(hidden, hidden, bias=False)
        self.wv = nn.Linear(hidden, hidden, bias=False)
        self.wo = nn.Linear(hidden, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden)
        self.w1 = nn.Linear(hidden, 2 * hidden, bias=False)
        self.w3 = nn.Linear(hidden, 2 * hidden, bias=False)
        self.w2 = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> the same."""
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(1, (2, -1)).transpose(0, 1) for w in (self.wq, self.wk, self.wv))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(0, 1).flatten(1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, options.hidden)
        self.layers = nn.ModuleList(Block(options.hidden) for _ in range(options.blocks))
        self.head = nn.Linear(options.hidden, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """``[tokens]`` -> ``[tokens, vocabulary]``."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass
class Variant:
    """One way to run the model; ``stepped`` says that an optimizer has changed the weights."""

    model: nn.Module
    stepped: Callable[[], None]


def build(name: str, options: Options) -> Variant:
    """The same model for every variant: each parameter is rank 0's rows, ``world`` times."""
    torch.manual_seed(0)
    model = Model(options)
    with torch.no_grad():
        for parameter in model.parameters():
            rows = parameter[: len(parameter) // options.world]
            parameter.copy_(rows.repeat(options.world, *[1] * (parameter.ndim - 1)))
    if name == "internsp":
        mesh = ParallelMesh.create(weight=options.world, device_type="cpu")
        settings = WeightParallelConfig(coalesce_bytes=options.coalesce_bytes)
        communicator = parallelize(model, mesh, settings)
        return Variant(model, communicator.invalidate)
    if name == "fsdp2":
        mesh = dist.init_device_mesh("cpu", (options.world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return Variant(model, lambda: None)


def step(variant: Variant, ids: Tensor) -> tuple[float, float, float]:
    """One timed forward and backward, then an untimed end of step: loss and two times in us."""
    start = time.thread_time()
    loss = variant.model(ids).square().mean()
    middle = time.thread_time()
    loss.backward()
    end = time.thread_time()
    variant.model.zero_grad(set_to_none=True)
    variant.stepped()  # or we would find the first blocks' weights still gathered
    return loss.item(), 1e6 * (middle - start), 1e6 * (end - middle)


def collectives(variant: Variant, ids: Tensor) -> dict[str, int]:
    """How often one step calls which collective (in an untimed step)."""
    with warnings.catch_warnings(), CommDebugMode() as mode:
        warnings.simplefilter("ignore")  # about the mode's own module hooks
        step(variant, ids)
    return {str(call): count for call, count in mode.get_comm_counts().items()}


def measure(options: Options) -> dict[str, Any]:
    """Run all variants, interleaved, in an existing process group of ``options.world`` ranks.

    Returns:
        ``losses``, ``collectives`` and ``times`` (microseconds a step, by variant and phase) and
        what :func:`summarize` makes of the times.

    Raises:
        RuntimeError: when a variant computes another loss than the plain model.
    """
    variants = {name: build(name, options) for name in VARIANTS}
    ids = torch.randint(VOCABULARY, (options.tokens,))
    losses = {name: step(variant, ids)[0] for name, variant in variants.items()}
    if any(abs(loss / losses["plain"] - 1) > 1e-5 for loss in losses.values()):
        raise RuntimeError(f"the variants disagree about the loss: {losses}")
    counts = {name: collectives(variant, ids) for name, variant in variants.items()}
    times: dict[str, dict[str, list[float]]] = {n: {p: [] for p in PHASES} for n in VARIANTS}
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would be charged to whoever runs when it is due
    for index in range(-options.warm_up, options.rounds):
        turn = index % len(VARIANTS)
        for name in VARIANTS[turn:] + VARIANTS[:turn]:
            _, forward, backward = step(variants[name], ids)
            if index >= 0:
                times[name]["forward"].append(forward)
                times[name]["backward"].append(backward)
                times[name]["both"].append(forward + backward)
        gc.collect()
    gc.enable()
    gc.unfreeze()
    summary = summarize(times, options.blocks, options.batches)
    return {"losses": losses, "collectives": counts, **summary, "times": times}


def summarize(
    times: dict[str, dict[str, list[float]]], blocks: int, batches: int
) -> dict[str, Any]:
    """Medians in microseconds a block, what each variant adds to ``plain``, and the ratios.

    Returns:
        By phase: ``median``, ``quartiles`` and ``added`` (each by variant), ``ratio`` (our added
        cost over FSDP2's, from the medians of all rounds) and ``ratio_batches`` (the same from
        consecutive parts of the rounds).
    """
    phases: dict[str, Any] = {}
    for phase in PHASES:
        each = {name: [t / blocks for t in times[name][phase]] for name in VARIANTS}
        length = max(1, len(each["plain"]) // batches)
        parts = [
            _ratio({n: v[i * length : (i + 1) * length] for n, v in each.items()})
            for i in range(len(each["plain"]) // length)
        ]
        plain = statistics.median(each["plain"])
        phases[phase] = {
            "median": {n: statistics.median(v) for n, v in each.items()},
            "quartiles": {n: statistics.quantiles(v, n=4)[::2] for n, v in each.items()},
            "added": {n: statistics.median(v) - plain for n, v in each.items() if n != "plain"},
            "ratio": _ratio(each),
            "ratio_batches": parts,
        }
    return {"phases": phases}


def _ratio(values: dict[str, list[float]]) -> float:
    plain, ours, other = (statistics.median(values[name]) for name in VARIANTS)
    return (ours - plain) / (other - plain)


def show(result: dict[str, Any], options: Options) -> None:
    """Print the figures."""
    print(
        f"{options.blocks} blocks, width {options.hidden}, {options.tokens} tokens, "
        f"{options.world} ranks (fake), {options.rounds} rounds, torch {torch.__version__}\n"
        "microseconds a block: median (quartiles)\n"
    )
    for phase in PHASES:
        figures = result["phases"][phase]
        for name in VARIANTS:
            low, high = figures["quartiles"][name]
            added = figures["added"].get(name)
            print(
                f"{phase:9}{name:10}{figures['median'][name]:8.1f} ({low:.1f} .. {high:.1f})"
                + ("" if added is None else f"   added {added:7.1f}")
            )
        parts = figures["ratio_batches"]
        print(
            f"{phase:9}internsp adds {figures['ratio']:.2f} of what FSDP2 adds "
            f"({min(parts):.2f} .. {max(parts):.2f} in {len(parts)} parts of the rounds)\n"
        )
    verdict = "holds" if result["phases"]["both"]["ratio"] <= GOAL else "does not hold"
    print(f"goal (at most {GOAL} for both together) {verdict}")


def main(options: Options) -> int:
    """Measure, print, write."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
    result = measure(options)
    dist.destroy_process_group()
    show(result, options)
    if options.json is not None:
        told = {k: v for k, v in asdict(options).items() if k != "json"}
        about = {"options": told, "torch": torch.__version__, "python": sys.version.split()[0]}
        options.json.write_text(json.dumps({**about, **result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
