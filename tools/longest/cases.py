"""The cases: models, ways to train them, recipes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MIB = 1 << 20

LACKS = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "MemoryError")
"""Out-of-memory messages: of torch, the C library, C++ and Python."""

Sections = Mapping[str, Mapping[str, Any]]
"""Sections of a configuration."""


def lack(printed: str) -> str:
    """The line of a rank's output that reports lack of memory; empty: there is none."""
    lines = [line.strip() for line in printed.splitlines()]
    return next((line for line in reversed(lines) if any(w in line for w in LACKS)), "")


def joined(*parts: Sections) -> dict[str, dict[str, Any]]:
    """Merge the sections; a later part's keys override earlier ones."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, values in part.items():
            found[name] = {**found.get(name, {}), **values}
    return found


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        kind: internsp; Hugging Face's model on one process; the same sharded by FSDP2.
        sections: of the configuration. Kinds other than internsp use ``[model]``, and checkpoint
            their blocks if ``activation_checkpoint.mode`` is set so.
        world: number of processes.
    """

    name: str
    sections: Sections
    world: int = 1
    kind: Literal["internsp", "huggingface", "fsdp2"] = "internsp"

    def settings(self, length: int) -> dict[str, dict[str, Any]]:
        """The sections for sequences of ``length`` tokens."""
        return joined(self.sections, {"data": {"sequence_length": length}})

    @property
    def multiple(self) -> int:
        """Lengths are multiples of this."""
        return 32 * int(self.sections.get("parallel", {}).get("sequence", 1))


@dataclass(frozen=True)
class Recipe:
    """A step that is possible only with a certain mechanism.

    Attributes:
        title: its name in the table.
        says: the options that switch the mechanism on.
        common: sections of both runs.
        without, by: further sections of the run without the mechanism, and of the run with it.
        limit: MiB per process.
    """

    name: str
    title: str
    says: str
    common: Sections
    without: Sections
    by: Sections
    length: int
    limit: int
    world: int = 1

    def case(self, mechanism: bool) -> Case:
        """The run with or without the mechanism."""
        more = self.by if mechanism else self.without
        return Case(self.title, joined(self.common, more), self.world)


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        died: the allocator's error message; empty: it finished.
        loss: of the long step, nats per token; ``norm`` is the norm of its gradient.
        peak: largest private memory of a rank in bytes, beyond that before the model was built.
        seconds: of the long step.
    """

    died: str = ""
    loss: float = 0.0
    norm: float = 0.0
    peak: int = 0
    seconds: float = 0.0


def model(**sizes: int) -> Sections:
    """A byte-level Llama; one sequence per step."""
    return {
        "model": {"vocab_size": 257, **sizes},
        "parallel": {"device": "cpu"},
        "train": {"global_batch": 1, "micro_batches": 1},
        "optimizer": {"schedule": "constant", "warmup_steps": 0},
    }


NARROW = model(hidden_size=128, heads=2, layers=4, intermediate_size=384)
FULL: Sections = {"activation_checkpoint": {"mode": "full"}}

CHUNKS: Sections = {"train": {"loss_chunk": 256}}

RECIPES = (
    Recipe(
        "ring", "a ring beyond the head count (4 ranks, 1 head)", "sequence.ring = 4",
        joined(model(hidden_size=64, heads=1, layers=6, intermediate_size=64), CHUNKS,
               {"activation_checkpoint": {"mode": "selective"}},
               {"parallel": {"weight": 4, "sequence": 4}}),
        {"sequence": {"ring": 1}}, {"sequence": {"ring": 4}}, 4096, 22, 4,
    ),
    Recipe(
        "offload", "offload of activations", 'activation_checkpoint.offload = "all"',
        joined(model(hidden_size=64, heads=2, layers=24, intermediate_size=64), FULL, CHUNKS),
        {}, {"activation_checkpoint": {"offload": "all"}}, 4096, 40,
    ),
    Recipe(
        "tiling", "feed-forwards in tiles", "activation_checkpoint.tiles = 16",
        joined(model(hidden_size=64, heads=2, layers=2, intermediate_size=1024), FULL, CHUNKS),
        {}, {"activation_checkpoint": {"tiles": 16}}, 4096, 64,
    ),
    Recipe(
        "weight", "weight parallel (2 ranks)", "parallel.weight = 2",
        joined(model(hidden_size=128, heads=2, layers=24, intermediate_size=384), FULL, CHUNKS,
               {"parallel": {"sequence": 2}}),
        {"parallel": {"weight": 1}}, {"parallel": {"weight": 2}}, 512, 54, 2,
    ),
    Recipe(
        "sequence", "sequence parallel (2 ranks)", "parallel.sequence = 2",
        joined(NARROW, FULL, CHUNKS, {"parallel": {"weight": 2}, "train": {"global_batch": 2}}),
        {}, {"parallel": {"sequence": 2}, "train": {"micro_batches": 2}}, 4096, 60, 2,
    ),
)  # fmt: skip


_STEPS: tuple[tuple[str, int, Sections], ...] = (
    ("internsp", 1, joined(NARROW, CHUNKS)),
    ("+ checkpoints", 1, FULL),
    ("+ weights cut over 2", 2, {"parallel": {"weight": 2}, "train": {"global_batch": 2}}),
    ("+ tiles", 2, {"activation_checkpoint": {"tiles": 16}}),
    ("+ offload of activations", 2, {"activation_checkpoint": {"offload": "all"}}),
    ("+ offload of weights and state", 2,
     {"weight_parallel": {"offload": ("weights", "optimizer", "gradients")}}),
    ("+ sequences cut over 2, by heads", 2,
     {"parallel": {"sequence": 2}, "train": {"global_batch": 1}}),
    ("the same, around a ring", 2, {"sequence": {"ring": 2}}),
    ("+ a ring of 2 beyond the 2 heads: 4 ranks", 4,
     {"parallel": {"weight": 4, "sequence": 4}, "sequence": {"ring": 2}}),
)  # fmt: skip
OURS = [
    Case(name, joined(*(more for _, _, more in _STEPS[: number + 1])), world)
    for number, (name, world, _) in enumerate(_STEPS)
]
"""Each case adds its mechanism to the one before."""

OTHERS = (
    Case("Hugging Face", NARROW, 1, "huggingface"),
    Case("Hugging Face, its gradient checkpointing", joined(NARROW, FULL), 1, "huggingface"),
    Case("FSDP2 of it, checkpoints of torch", joined(NARROW, FULL), 2, "fsdp2"),
)
