"""Python cost of weight parallelism's hooks per block, against a plain model and FSDP2.

Tiny tensors on one CPU process, one thread; torch's ``fake`` process group stands for the other
ranks, and its collectives return at once. What remains is the cost of the hooks, measured in CPU
time of the one thread that runs forward and backward. The three variants run in turn within every
round, so that a temporary slowdown of the machine affects all of them::

    python tools/bench_overhead.py --json overhead.json

A fake all-gather repeats this rank's shard, so each weight of the model is one shard repeated:
every variant must compute the plain model's loss, which is checked.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from internsp import ParallelMesh, WeightParallelConfig, parallelize
from tools.bench import options
from tools.bench.model import process_group, repeated
from tools.bench.report import Page, Table, write
from tools.bench.rounds import Spread, order

VARIANTS = ("plain", "internsp", "fsdp2")
PHASES = ("forward", "backward", "both")
VOCABULARY = 64
GOAL, GOAL_ALONE = 0.50, 0.80  # our added cost over FSDP2's; with one collective per weight


@dataclass(frozen=True)
class Options(options.Options):
    """What to measure."""

    blocks: int = 8
    """Blocks of the model; costs per model (root, end of backward) are divided among them."""
    hidden: int = 48
    """Width; 48 is the smallest whose matrices the default settings shard rather than replicate."""
    tokens: int = 8
    """Tokens of the batch."""
    world: int = 4
    """Ranks that the fake process group pretends to have; must divide width and vocabulary."""
    coalesce_bytes: int = WeightParallelConfig().coalesce_bytes
    """weight_parallel.coalesce_bytes; 0: one all-gather per weight."""
    rounds: int = 400
    """Rounds; each runs every variant once, in a different order."""
    batches: int = 5
    """Evaluate the rounds also in this many consecutive parts, to show the spread."""
    warm_up: int = 30
    """Rounds before the first measured one."""


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
        """``[tokens, hidden]`` -> the same shape."""
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
    """One way to run the model; ``stepped`` reports that an optimizer has changed the weights."""

    model: nn.Module
    stepped: Callable[[], None]


def build(name: str, options: Options) -> Variant:
    """The same model for every variant: each parameter repeats rank 0's rows ``world`` times."""
    torch.manual_seed(0)
    model = Model(options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(repeated(parameter, options.world))
    if name == "internsp":
        mesh = ParallelMesh.create(weight=options.world, device_type="cpu")
        settings = WeightParallelConfig(coalesce_bytes=options.coalesce_bytes)
        communicator = parallelize(model, mesh, settings)
        return Variant(model, communicator.invalidate)
    if name == "fsdp2":
        flat = dist.init_device_mesh("cpu", (options.world,))
        for layer in model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(model, mesh=flat)
    return Variant(model, lambda: None)


def step(variant: Variant, ids: Tensor) -> tuple[float, float, float]:
    """One timed forward and backward, then an untimed end of step: loss and two times in us."""
    start = time.thread_time()
    loss = variant.model(ids).square().mean()
    middle = time.thread_time()
    loss.backward()
    end = time.thread_time()
    variant.model.zero_grad(set_to_none=True)
    variant.stepped()  # otherwise the first blocks' weights would still be unsharded
    return loss.item(), 1e6 * (middle - start), 1e6 * (end - middle)


def collectives(variant: Variant, ids: Tensor) -> dict[str, int]:
    """How often one (untimed) step calls each collective."""
    with warnings.catch_warnings(), CommDebugMode() as mode:
        warnings.simplefilter("ignore")  # about the dispatch mode's own module hooks
        step(variant, ids)
    return {str(call): count for call, count in mode.get_comm_counts().items()}


def measure(options: Options) -> dict[str, Any]:
    """Run all variants, interleaved, in an existing process group of ``options.world`` ranks.

    Returns:
        ``losses``, ``collectives`` and ``times`` (microseconds a step, by variant and phase) and
        what :func:`summarize` makes of the times.

    Raises:
        RuntimeError: a variant's loss differs from the plain model's.
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
    gc.disable()  # otherwise one variant would pay for a collection of all variants' garbage
    for index in range(-options.warm_up, options.rounds):
        for name in order(VARIANTS, index):
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
        spreads = {name: Spread.of(values) for name, values in each.items()}
        plain = spreads["plain"].median
        phases[phase] = {
            "median": {n: s.median for n, s in spreads.items()},
            "quartiles": {n: (s.low, s.high) for n, s in spreads.items()},
            "added": {n: s.median - plain for n, s in spreads.items() if n != "plain"},
            "ratio": _ratio(each),
            "ratio_batches": parts,
        }
    return {"phases": phases}


def _ratio(values: dict[str, list[float]]) -> float:
    plain, ours, other = (statistics.median(values[name]) for name in VARIANTS)
    return (ours - plain) / (other - plain)


def page(result: dict[str, Any], options: Options) -> Page:
    """The figures, and below them how they compare with the goal."""
    facts = [
        f"{options.blocks} blocks, width {options.hidden}, {options.tokens} tokens, "
        f"{options.world} ranks (fake), {options.rounds} rounds, torch {torch.__version__}",
        "microseconds a block, and what a variant adds to plain",
    ]
    rows, remarks = [("variant", "phase", "median", "quartiles", "added")], []
    for phase, figures in result["phases"].items():
        for name, median in figures["median"].items():
            low, high = figures["quartiles"][name]
            added = figures["added"].get(name)
            rows.append(
                (name, phase, f"{median:.1f}", f"{low:.1f} .. {high:.1f}",
                 "-" if added is None else f"{added:.1f}")
            )  # fmt: skip
        parts = figures["ratio_batches"]
        remarks.append(
            f"{phase:9}internsp adds {figures['ratio']:.2f} of what FSDP2 adds "
            f"({min(parts):.2f} .. {max(parts):.2f} in {len(parts)} parts of the rounds)"
        )
    alone = not options.coalesce_bytes
    goal, how = (GOAL_ALONE, "every weight alone") if alone else (GOAL, "small weights together")
    verdict = "holds" if result["phases"]["both"]["ratio"] <= goal else "does not hold"
    remarks.append(f"goal (at most {goal:.2f} for both, with {how}) {verdict}")
    return Page(facts, [Table(rows, remarks=remarks)])


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    options = Options.read(arguments, __doc__)
    torch.set_num_threads(1)
    with process_group("fake", options.world):
        result = measure(options)
    printed = page(result, options)
    print(printed.text())
    about = {"options": options.to_json(), "torch": torch.__version__}
    summary = {**about, "python": sys.version.split()[0], **result}
    write(options, summary, printed, ["python", "tools/bench_overhead.py", *arguments], "overhead")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
