"""What ``internsp plan --device NAME`` says of a step: seconds, rates, what bounds it, what helps.

Seconds are predictions: their errors on steps that others measured are in
docs/dev/results/planner.md, and none of those ran internsp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from internsp.app.config import Config
from internsp.app.plan.classes import table
from internsp.app.plan.configured import workload_of
from internsp.app.plan.devices import Device
from internsp.app.plan.longest import MemoryBudget
from internsp.app.plan.observe import Observations
from internsp.app.plan.seconds import Part, StepSeconds, step_seconds
from internsp.app.report.timeline import human_seconds
from internsp.config.words import in_words
from internsp.errors import ConfigError
from internsp.mesh import MeshShape

FREE = 0.9  # share of a device's memory above which steps become slower
_WORTH = 0.01  # share of the seconds that a change must save to be named
_BOUNDS = {
    "products": (Part.PRODUCTS, Part.RECOMPUTE, Part.HEAD),
    "attention": (Part.ATTENTION,),
    "memory bandwidth": (Part.PASSES, Part.OPTIMIZER),
    "links": (
        Part.GATHERS, Part.REDUCTIONS, Part.REPLICAS, Part.SEQUENCES, Part.TENSOR, Part.EXPERTS,
    ),
    "pipeline's idle time": (Part.BUBBLE,),
    "the host": (Part.HOST, Part.COPIES),
}  # fmt: skip


def bound_of(found: StepSeconds) -> tuple[str, float]:
    """What most of the seconds are spent on, and its share."""
    sums = {
        name: sum(found.parts.get(part, 0.0) for part in parts)
        for name, parts in _BOUNDS.items()
    }
    name = max(sums, key=lambda key: sums[key])
    return name, sums[name] / found.total


def exposed(found: StepSeconds) -> float:
    """Share of the seconds in which messages are not hidden."""
    return sum(found.parts.get(part, 0.0) for part in _BOUNDS["links"]) / found.total


def seconds_lines(
    config: Config, shape: MeshShape, device: Device, found: StepSeconds
) -> Iterator[str]:
    """The seconds of a step, its rates and what bounds it, and the change that helps most."""
    load = workload_of(config, shape)
    rate = found.rate(load)
    yield (
        f"a step takes about {human_seconds(found.total)} on {device.name}: {rate:,.0f} tokens/s "
        f"a device, {rate * shape.world_size:,.0f} in all, MFU {found.mfu(load, device):.0%}"
    )
    name, share = bound_of(found)
    yield f"{share:.0%} of it is bound by {name}; {exposed(found):.0%} are messages in the open"
    if not device.fitted.rows:
        yield f"{device.name} is an assumption that no measured step was fitted to"
    best = best_change(config, shape, device)
    if best is not None:
        keys, saved = best
        yield f"{keys} would save {saved:.0%}"


def best_change(
    config: Config, shape: MeshShape, device: Device
) -> tuple[str, float] | None:
    """The one change of the configuration that saves most seconds and fits, and its share."""
    now = step_seconds(workload_of(config, shape), device).total
    saving: list[tuple[float, Mapping[str, Any], Config]] = []
    for change in changes(config):
        other = changed(config, change)
        if other is None or other.check(shape.world_size):
            continue
        load = workload_of(other, MeshShape(shape.world_size, **other.degrees()))
        saved = 1 - step_seconds(load, device).total / now
        if saved >= _WORTH:
            saving.append((saved, change, other))
    saving.sort(key=lambda one: -one[0])
    known = Observations()
    for saved, change, other in saving:
        budget = MemoryBudget(other, shape.world_size, observations=known)
        if budget.most(other.data.sequence_length) <= FREE * device.memory:
            return ", ".join(f"{key} = {in_words(value)}" for key, value in change.items()), saved
    return None


def changes(config: Config) -> Iterator[Mapping[str, Any]]:
    """Changes of one setting each that keep the tokens of a step."""
    parallel, weights, train = config.parallel, config.weight_parallel, config.train
    for key in ("weight", "sequence", "pipeline"):
        degree = getattr(parallel, key)
        for other in {2 * degree, degree // 2} - {0, degree}:
            yield {f"parallel.{key}": other}
    for mode in {"none", "selective", "full"} - {config.activation_checkpoint.mode}:
        yield {"activation_checkpoint.mode": mode}
    for number in {2 * train.micro_batches, train.micro_batches // 2} - {0}:
        yield {"train.micro_batches": number}
    if not weights.compile:
        yield {"weight_parallel.compile": True, "weight_parallel.gather_before": "qkv"}
    if not weights.overlap:
        yield {"weight_parallel.overlap": True}


def changed(config: Config, change: Mapping[str, Any]) -> Config | None:
    """``config`` with other values at ``section.key``; ``None`` if that is refused."""
    try:
        return Config.model_validate(config.replaced(change).model_dump())
    except ValueError:  # of pydantic, and a ConfigError
        return None


def seconds_table(found: StepSeconds) -> Table:
    """Seconds by what they are spent on, the most first."""
    rows = [
        (name, human_seconds(seconds), f"{seconds / found.total:.0%}")
        for name, seconds in sorted(found.parts.items(), key=lambda part: -part[1])
        if seconds >= found.total / 1000
    ]
    title = f"Seconds of a step (predicted), {human_seconds(found.total)}"
    return table(title, ("<what", "seconds", "share"), rows)


def write_text(option: str, path: Path, text: str) -> None:
    """Write the file that ``option`` names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from error
