"""What is tried: models, ways to train them, recipes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MIB = 1 << 20

LACKS = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "MemoryError")
"""What an allocator says that has no more memory: torch's, the C library's, C++'s, Python's."""

Sections = Mapping[str, Mapping[str, Any]]
"""Of a configuration."""


def lack(printed: str) -> str:
    """The line of a rank's last words that says that memory is short; empty: there is none."""
    lines = [line.strip() for line in printed.splitlines()]
    return next((line for line in reversed(lines) if any(w in line for w in LACKS)), "")


def joined(*parts: Sections) -> dict[str, dict[str, Any]]:
    """Sections of all parts; a later part's keys win."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, values in part.items():
            found[name] = {**found.get(name, {}), **values}
    return found


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        kind: internsp; Hugging Face's own model on one process; the same sharded by FSDP2.
        sections: of the configuration. What is not internsp takes ``[model]``, and checkpoints its
            blocks where ``activation_checkpoint.mode`` says so.
        world: processes.
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
    """A step that a mechanism makes possible.

    Attributes:
        title: what it is called in a table.
        says: the options that are the mechanism.
        common: sections of both runs.
        without, by: further ones of the run that lacks the mechanism, and of the one that has it.
        limit: MiB a process.
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
        """The run with or without it."""
        more = self.by if mechanism else self.without
        return Case(self.title, joined(self.common, more), self.world)


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        died: the allocator's own words; empty: it finished.
        loss: of the long step, nats a token; with ``norm``, the norm of its gradient.
        peak: private bytes of the rank that had most, beyond what it had before the model.
        seconds: of the long step.
    """

    died: str = ""
    loss: float = 0.0
    norm: float = 0.0
    peak: int = 0
    seconds: float = 0.0


def model(**sizes: int) -> Sections:
    """A Llama of bytes; one sequence a step."""
    return {
        "model": {"vocab_size": 257, **sizes},
        "train": {"global_batch": 1, "micro_batches": 1},
    }


NARROW = model(hidden_size=128, heads=2, layers=4, intermediate_size=384)
FULL: Sections = {"activation_checkpoint": {"mode": "full"}}

CHUNKS: Sections = {"train": {"loss_chunk": 256}}

RECIPES = (
    Recipe(
        "ring", "a ring beyond the head count (4 ranks, 1 head)", "parallel.ring = 4",
        joined(model(hidden_size=64, heads=1, layers=6, intermediate_size=64), CHUNKS,
               {"activation_checkpoint": {"mode": "selective"}},
               {"parallel": {"weight": 4, "sequence": 4}}),
        {"parallel": {"ring": 1}}, {"parallel": {"ring": 4}}, 4096, 22, 4,
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


@dataclass(frozen=True)
class Ladder:
    """Cases of which each adds something to the one before."""

    steps: tuple[tuple[str, int, Sections], ...]
    start: Sections = field(default_factory=dict)

    def cases(self) -> list[Case]:
        """All of them, the first without anything."""
        found, sections = [], self.start
        for name, world, more in self.steps:
            sections = joined(sections, more)
            found.append(Case(name, sections, world))
        return found


OURS = Ladder(
    (
        ("internsp", 1, {}),
        ("+ checkpoints", 1, FULL),
        ("+ weights cut over 2", 2, {"parallel": {"weight": 2}, "train": {"global_batch": 2}}),
        ("+ tiles", 2, {"activation_checkpoint": {"tiles": 16}}),
        ("+ offload of activations", 2, {"activation_checkpoint": {"offload": "all"}}),
        ("+ offload of weights and state", 2,
         {"weight_parallel": {"offload": ("weights", "optimizer", "gradients")}}),
        ("+ sequences cut over 2, by heads", 2,
         {"parallel": {"sequence": 2}, "train": {"global_batch": 1}}),
        ("the same, around a ring", 2, {"parallel": {"ring": 2}}),
        ("+ a ring of 2 beyond the 2 heads: 4 ranks", 4,
         {"parallel": {"weight": 4, "sequence": 4, "ring": 2}}),
    ),
    joined(NARROW, {"train": {"loss_chunk": 256}}),
)  # fmt: skip

OTHERS = (
    Case("Hugging Face", NARROW, 1, "huggingface"),
    Case("Hugging Face, its gradient checkpointing", joined(NARROW, FULL), 1, "huggingface"),
    Case("FSDP2 of it, checkpoints of torch", joined(NARROW, FULL), 2, "fsdp2"),
)
