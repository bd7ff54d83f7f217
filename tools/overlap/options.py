"""Options of the benchmark: flags, presets, and values that a preset sets.

Imports no torch, for the reason given in :mod:`tools.bench.options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tools.bench import options
from tools.overlap.laws import HYBRID

Network = Literal["namespaces", "loopback"]
PresetName = Literal["light", "even", "heavy", "four", "tiny"]

DEFAULT_VARIANTS = (
    "compute",
    "ours",
    "ours@free",
    "ours:gather_before=rolling",
    "ours:overlap=false",
    "ours:memory_pool=false",
    "ddp",
    "fsdp2",
    "fsdp2:prefetch",
    "fsdp2:chunked",
    "fsdp2:unshard",
    "fsdp2:chunked+unshard+last",
    "fsdp2:whole",
    "zero3",
)


# With sequence ranks: variants of where the next block's all-gather starts, which competes with
# the all-to-alls of attention.
TRIGGERS = ("compute", "ours", *(f"ours:gather_before={t}" for t in ("mlp", "attention", "qkv")))


@dataclass(frozen=True)
class Preset:
    """Sizes, and the ratio of ideal communication to compute."""

    ranks: int = 2
    ratio: float | None = 1.3
    hidden: int = 512
    heads: int = 8
    layers: int = 8
    sequence: int = 256


PRESETS: dict[str, Preset] = {
    "light": Preset(ratio=0.6),
    "even": Preset(ratio=1.3),
    "heavy": Preset(ratio=2.8, sequence=160),
    "four": Preset(ranks=4, ratio=1.3, sequence=128),
    # For tests and development: takes seconds; its figures are meaningless.
    "tiny": Preset(ratio=1.3, hidden=96, heads=4, layers=3, sequence=16),
}


@dataclass(frozen=True)
class Options(options.Trained):
    """Options; unset sizes come from the preset."""

    preset: PresetName = "even"
    """light, even, heavy: communication 0.6, 1.3, 2.8 times compute; four: 1.3 at four ranks."""
    network: Network = "namespaces"
    """namespaces: a rate-limited link (root, iproute2); loopback: no limit, any user."""
    variants: tuple[str, ...] = DEFAULT_VARIANTS
    """FAMILY[:SETTINGS][@free]. ours: KEY=VALUE,... of weight_parallel, and weight=RANKS per
    group; fsdp2: FORM+FORM of prefetch, chunked, unshard, last, whole,
    full, hybrid; @free: no rate limit. compute is always added."""
    ranks: int | None = None
    """Processes, each with one computing thread."""
    ratio: float | None = None
    """Minimal bytes / rate over compute; the rate follows from the measured compute."""
    rate_mbit: float | None = None
    """Rate of each rank's link, in Mbit/s; overrides the ratio."""
    sequence: int | None = None
    """Tokens of a sequence."""
    sequence_ranks: int = 1
    """Ranks over which a sequence is sharded: its all-to-alls compete for the link. For compute and
    ours only; the default variants then differ in where ours starts the next block's all-gather."""
    micro_batches: int = 1
    """Forward and backward passes per step, each with different data."""
    send_buffer_kib: int = 0
    """Limit of a connection's sent but unacknowledged data (tcp_wmem), in KiB; 0: the host's
    setting, some MiB."""
    lr: float = 20.0
    """Learning rate of plain SGD; large, since gradients of a mean over elements are small."""
    timeout: float = 300.0
    """Seconds allowed for one variant in one round."""
    mark: str = ""
    """Marks in the --markdown page; none: those of the preset."""
    picture: Path | None = None
    """Write bars and timelines to this file (.png or .svg)."""

    def resolve(self) -> Options:
        """A copy with the preset's values where no value was given, validated.

        Raises:
            ValueError: values do not fit; names the flag.
        """
        preset = asdict(PRESETS[self.preset])
        if self.rate_mbit is not None:
            preset["ratio"] = None
            if self.ratio is not None:
                raise ValueError("--ratio and --rate-mbit exclude each other")
        done = self.fill(preset)
        done.require_at_least(1, "layers", "rounds", "steps", "sequence", "batch", "micro_batches")
        done.require_at_least(2, "ranks", why=": one rank sends nothing")
        done.require_multiple("hidden", of="heads")
        if done.sequence_ranks != 1:
            done = done._with_sharded_sequences()
        names = done.variants if "compute" in done.variants else ("compute", *done.variants)
        for name in names:
            Spec.parse(name).require(done.size("ranks"))
        return replace(done, variants=tuple(dict.fromkeys(names)))

    def _with_sharded_sequences(self) -> Options:
        for name in ("ranks", "sequence", "heads"):
            self.require_multiple(name, of="sequence_ranks")
        done = replace(self, variants=TRIGGERS) if self.variants == DEFAULT_VARIANTS else self
        others = [v for v in done.variants if Spec.parse(v).family not in ("compute", "ours")]
        if others:
            raise ValueError(f"--sequence-ranks: {', '.join(others)} cannot shard a sequence")
        return done


FORMS = ("prefetch", "chunked", "unshard", "last", "whole", "full", "hybrid", "import")
FAMILIES = ("compute", "ours", "ddp", "fsdp2", "zero3")


@dataclass(frozen=True)
class Spec:
    """A variant's name, ``family[:settings][@free]``, and what it says.

    Attributes:
        free: without a rate limit.
        forms: of ``fsdp2``.
        arguments: of ``ours``: keys of ``WeightParallelConfig`` and of ``SequenceConfig``.
        weight: of ``ours``: ranks of a weight group; ``None``: all.
    """

    name: str
    family: str
    free: bool = False
    forms: frozenset[str] = frozenset()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weight: Any = None

    @classmethod
    def parse(cls, name: str) -> Spec:
        """Parse a name.

        Raises:
            ValueError: an unknown family or FSDP2 form, or a setting that is not KEY=VALUE.
        """
        body, _, suffix = name.partition("@")
        if suffix not in ("", "free"):
            raise ValueError(f"variant {name!r}: only @free may follow a name")
        family, _, settings = body.partition(":")
        if family not in FAMILIES:
            raise ValueError(f"variant {name!r}: the family is one of {', '.join(FAMILIES)}")
        free = bool(suffix)
        if family == "ours":
            given = _given(name, settings)
            weight = given.pop("weight", None)
            return cls(name, family, free, frozenset(), given, weight)
        forms = frozenset(settings.split("+")) - {""}
        if family == "fsdp2" and forms - set(FORMS):
            raise ValueError(f"variant {name!r}: forms of fsdp2 are {', '.join(FORMS)}")
        if family != "fsdp2" and settings:
            raise ValueError(f"variant {name!r}: {family} has no settings")
        return cls(name, family, free, forms)

    def require(self, ranks: int) -> None:
        """Check that ``ranks`` ranks can form the requested groups.

        Raises:
            ValueError: they cannot; names the variant.
        """
        group = self.weight
        if group is not None and (type(group) is not int or group < 1 or ranks % group):
            raise ValueError(f"variant {self.name!r}: {ranks} ranks are not groups of {group}")
        if "hybrid" in self.forms and (ranks % HYBRID or ranks == HYBRID):
            raise ValueError(
                f"variant {self.name!r}: {ranks} ranks are not several groups of {HYBRID}"
            )

    @property
    def label(self) -> str:
        """The variant's name in tables."""
        return LABELS.get(self.name, self.name)


def _given(name: str, settings: str) -> dict[str, Any]:
    """The values of ``KEY=VALUE,...``."""
    found: dict[str, Any] = {}
    for part in filter(None, settings.split(",")):
        key, sign, value = part.partition("=")
        if not sign:
            raise ValueError(f"variant {name!r}: {part!r} is not KEY=VALUE")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


LABELS = {
    "compute": "compute only",
    "ours": "internsp",
    "ours@free": "internsp, no rate limit",
    "ours:gather_before=rolling": "internsp, rolling",
    "ours:overlap=false": "internsp, no overlap",
    "ours:memory_pool=false": "internsp, no pool",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "fsdp2:prefetch": "FSDP2, explicit prefetch, async",
    "fsdp2:chunked": "FSDP2, chunked async collectives",
    "fsdp2:unshard": "FSDP2, unshard at out-projection",
    "fsdp2:whole": "FSDP2, no reshard",
    "fsdp2:import": "FSDP2's program, internsp's import",
    "zero3": "DeepSpeed ZeRO-3",
}
