"""Flags of ``tools/bench_gpu.py``, and their defaults, which are larger on a GPU than on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tools.bench import options

Part = Literal["overhead", "link", "streams", "runs"]
Compile = Literal["off", "on", "both"]

# Blocks of Llama 2 7B, and sizes that a test on a CPU can run in seconds.
LARGE: dict[str, Any] = {
    "hidden": 4096, "heads": 32, "intermediate": 11008, "layers": 4, "sequences": (4096, 32768),
    "compile": "both", "emulated_ranks": 8, "delay_ms": 2.0,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden": 64, "heads": 4, "intermediate": 96, "layers": 4, "sequences": (32,),
    "compile": "off", "emulated_ranks": 2, "delay_ms": 2.0,
}  # fmt: skip


@dataclass(frozen=True)
class Options(options.Trained):
    """Options; unset sizes are 7B-like blocks on a GPU, tiny ones on a CPU."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run; auto uses a GPU if there is one. Figures of a CPU are meaningless."""
    parts: tuple[Part, ...] = ("overhead", "link", "streams", "runs")
    """overhead: one rank, the plain model and FSDP2. link: an EMULATED link. streams: losses with
    random delays on the side streams. runs: internsp train beside its plan."""
    rows: Path | None = None
    """Write each result to this file as it comes; one that is there is not measured again."""
    sequences: tuple[int, ...] | None = None
    """Tokens per sequence; overhead uses each value, the other parts the first."""
    compile: Compile | None = None
    """In overhead, whether to use torch.compile for every block."""
    emulated_ranks: int | None = None
    """Ranks of the emulated weight group."""
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Ratios of communication to compute on the emulated link."""
    delay_ms: float | None = None
    """Maximum random delay before and after a transfer, in streams."""
    warm_up: int = 2
    """Steps of a variant before the first round."""

    def resolve(self, device: str) -> Options:
        """A copy for ``"cuda"`` or ``"cpu"`` with every size set, validated.

        Raises:
            ValueError: values do not fit; names the flag.
        """
        done = self.fill(LARGE if device == "cuda" else TINY)
        done.require_at_least(1, "layers", "rounds", "steps", "warm_up", "batch")
        done.require_at_least(2, "emulated_ranks")
        done.require_multiple("hidden", of="heads")
        for name in ("hidden", "intermediate"):
            done.require_multiple(
                name, of="emulated_ranks",
                why=": the shards must be equal, because they stand for one another",
            )  # fmt: skip
        return done
