"""What the plan says of runs that Arctic long-sequence training (arXiv 2506.13996) has published.

    python -m tools.longest.published

Nothing is run. The lengths, and the devices' memory where it is told, stand in their recipes
(github.com/snowflakedb/ArcticTraining, projects/sequence-parallelism/run-h*.yml, comments behind
``max_length``). The plan is of internsp's own step with the same mechanisms: weights cut over all
ranks, sequences by heads, full checkpoints, activations, gradients and optimizer state in host
memory (weights too on one device), feed-forwards in tiles, loss in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GIB, GB = 1 << 30, 10**9

LLAMA: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "layers": 32, "heads": 32, "intermediate_size": 14336},
    "70B": {"hidden_size": 8192, "layers": 80, "heads": 64, "intermediate_size": 28672},
}


@dataclass(frozen=True)
class Run:
    """A recipe.

    Attributes:
        tokens: of a sequence.
        used: GB of device memory that the recipe tells, or None.
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
    """Of the same step by internsp."""
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
    from internsp.config import Config
    from internsp.plan.longest import Budget  # torch

    print("| model | devices | memory, GiB | published | theirs, GB | ours at it, GB | host, GB "
          "| longest of ours | ratio |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|")  # fmt: skip
    for run in RUNS:
        budget = Budget(Config.model_validate(settings(run)), run.devices)
        here, there = (sum(n for _, n in rows) / GB for rows in budget.at(run.tokens))
        longest = budget.longest(run.has * GIB).length
        cells = [
            f"Llama {run.model}", str(run.devices), str(run.has), f"{run.tokens:,}",
            "" if run.used is None else f"{run.used:.1f}", f"{here:.1f}", f"{there:.0f}",
            f"{longest:,}", f"{longest / run.tokens:.2f}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
