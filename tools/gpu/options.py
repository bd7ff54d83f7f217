"""Flags of ``tools/bench_gpu.py``, and what a flag left open gets: more on a GPU than on a CPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

Part = Literal["overhead", "link", "streams", "ranks"]
Compile = Literal["off", "on", "both"]

# Blocks of Llama 2 7B, and what a test on a CPU can run in seconds.
LARGE: dict[str, Any] = {
    "hidden": 4096, "heads": 32, "intermediate": 11008, "layers": 4, "sequences": (4096, 32768),
    "compile": "both", "emulated_ranks": 8, "delay_ms": 2.0,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden": 64, "heads": 4, "intermediate": 96, "layers": 4, "sequences": (32,),
    "compile": "off", "emulated_ranks": 2, "delay_ms": 2.0,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Sizes left at none: 7B-like blocks on a GPU, tiny ones on a CPU."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run; auto takes a GPU if there is one. Figures of a CPU mean nothing here."""
    parts: tuple[Part, ...] = ("overhead", "link", "streams", "ranks")
    """overhead: one rank beside the plain model and FSDP2. link: an EMULATED link. streams: the
    same losses with random delays on the side streams. ranks: several ranks on the device, gloo."""
    hidden: int | None = None
    """Width of the blocks."""
    heads: int | None = None
    """Query heads."""
    intermediate: int | None = None
    """Width of the feed-forward network."""
    layers: int | None = None
    """Blocks."""
    sequences: tuple[int, ...] | None = None
    """Tokens of a sequence; overhead takes each, the other parts the first."""
    batch: int = 1
    """Sequences a step."""
    compile: Compile | None = None
    """torch.compile of every block, in overhead."""
    emulated_ranks: int | None = None
    """Ranks of the emulated weight group."""
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Communication over compute on the emulated link."""
    delay_ms: float | None = None
    """Most random delay before and after a transfer, in streams."""
    ranks: int = 2
    """Processes on the one device, in ranks."""
    rounds: int = 5
    """Rounds; each runs every variant, starting with another one."""
    steps: int = 2
    """Timed steps of a variant in a round."""
    warm_up: int = 2
    """Steps of a variant before the first round."""
    lr: float = 1.0
    """Learning rate of plain SGD; the loss is a mean over elements."""
    seed: int = 0
    """Of weights, data and delays."""
    json: Path | None = None
    """Write everything measured to this file."""
    markdown: Path | None = None
    """Write the tables to this file, between its marks for gpu where it has them."""

    def resolve(self, device: str) -> Options:
        """The same for ``"cuda"`` or ``"cpu"`` with nothing left open, checked.

        Raises:
            ValueError: naming the flag, when values do not fit.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = LARGE if device == "cuda" else TINY
        done = replace(self, **{k: v for k, v in defaults.items() if given[k] is None})
        for name in ("layers", "rounds", "steps", "warm_up", "batch"):
            if getattr(done, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("emulated_ranks", "ranks"):
            if done.number(name) < 2:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 2")
        if done.number("hidden") % done.number("heads"):
            raise ValueError(f"--hidden {done.hidden} is not a multiple of --heads {done.heads}")
        for name in ("hidden", "intermediate"):
            if done.number(name) % done.number("emulated_ranks"):
                raise ValueError(
                    f"--{name} {done.number(name)} is not a multiple of --emulated-ranks "
                    f"{done.emulated_ranks}: the shards must be equal, because they stand for "
                    "one another"
                )
        return done

    def number(self, name: str) -> int:
        """A size that :meth:`resolve` has filled in."""
        value = getattr(self, name)
        assert isinstance(value, int), f"{name} is filled in by resolve"
        return value

    def to_json(self) -> dict[str, Any]:
        """Plain values; paths of outputs are left out."""
        return {k: v for k, v in asdict(self).items() if k not in ("json", "markdown")}
