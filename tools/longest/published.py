"""The plan's predictions for published runs of Arctic long-sequence training (arXiv 2506.13996).

    python -m tools.longest.published

Nothing is run. The lengths, and the devices' memory where given, are those of their recipes
(github.com/snowflakedb/ArcticTraining, projects/sequence-parallelism/run-h*.yml, comments after
``max_length``). The plan is that of internsp with the same mechanisms: weights sharded over all
ranks, sequences by heads, full activation checkpointing, activations, gradients and optimizer state
in host memory (weights too on one device), tiled feed-forwards, chunked loss. The longest sequence
is that for the device's memory and a rank's share of the node's host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from internsp.app.config import Config
from internsp.app.plan.longest import MemoryBudget

GIB, GB = 1 << 30, 10**9
HOST, A_NODE = 1900 * GB, 8
"""Bytes of host memory of a node ("1.9TB of cpu memory available per node", section 5.3.2 of the
paper; "1.9TiB" in 5.3.3, of which the smaller is taken), and its devices (section 5.2)."""

LLAMA: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "layers": 32, "heads": 32, "intermediate_size": 14336},
    "70B": {"hidden_size": 8192, "layers": 80, "heads": 64, "intermediate_size": 28672},
}


@dataclass(frozen=True)
class Run:
    """A recipe.

    Attributes:
        tokens: per sequence.
        used: GB of device memory according to the recipe, or None.
        has: GiB of device memory.
    """

    model: str
    devices: int
    tokens: int
    used: float | None = None
    has: int = 80


RUNS = (
    Run("8B", 1, 500_000),
    Run("8B", 8, 3_800_000),
    Run("70B", 32, 4_000_000, 47.70),
    Run("8B", 1, 1_200_000, 136.15, 141),
)


def settings(run: Run) -> dict[str, Any]:
    """Bytes of the same step with internsp."""
    away = ("weights", "optimizer", "gradients") if run.devices == 1 else ("optimizer", "gradients")
    return {
        "model": {"vocab_size": 128256, "kv_heads": 8, **LLAMA[run.model]},
        "data": {"sequence_length": 4096},
        "train": {"global_batch": 1, "micro_batches": 1, "dtype": "bfloat16", "loss_chunk": 4096},
        "parallel": {"weight": run.devices, "sequence": run.devices, "device": "cuda"},
        "activation_checkpoint": {"mode": "full", "offload": "all", "tiles": "auto"},
        "weight_parallel": {"offload": away},
    }


def main() -> None:
    """Print a table."""
    print("| model | devices | memory, GiB | host, GB | published | theirs, GB | ours at it, "
          "GB | host of ours at it, GB | longest of ours | ratio | bound by |\n|---|---:|---:|---:|"
          "---:|---:|---:|---:|---:|---:|---|")  # fmt: skip
    for run in RUNS:
        budget = MemoryBudget(Config.model_validate(settings(run)), run.devices)
        here, there = (sum(n for _, n in each) / GB for each in budget.at(run.tokens))
        host = HOST // min(run.devices, A_NODE)
        found = budget.longest(run.has * GIB, host)
        cells = [
            f"Llama {run.model}", str(run.devices), str(run.has), f"{host / GB:.0f}",
            f"{run.tokens:,}", "" if run.used is None else f"{run.used:.1f}",
            f"{here:.1f}", f"{there:.0f}",
            f"{found.length:,}", f"{found.length / run.tokens:.2f}", found.bound,
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
