"""A row of a table of measured steps, as the planner's workload; or why it has none."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from internsp.app.plan.devices import GIGA, Device, devices
from internsp.app.plan.workload import Degrees, ModelShape, Workload
from tools.planner.software import COMPOSED, FSDP2, UNKNOWN, as_traced, habits_of, recompute_of

DATA = Path("tests/data/published")
KINDS = ("zero3", "zero2", "zero1", "none")


class Unpredictable(ValueError):
    """A row lacks what a prediction needs; the text says what."""


@dataclass(frozen=True)
class Row:
    """One measured step: its columns, and what is predicted from."""

    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell, without spaces around it."""
        return (self.cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """A cell as a number; ``None``: empty.

        Raises:
            Unpredictable: it is not empty, and no number.
        """
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError as error:
            raise Unpredictable(f"{column}: {text!r} is no number") from error
        if not 0 <= value < float("inf"):
            raise Unpredictable(f"{column}: {text} is not a finite number from 0 on")
        return value

    def count(self, column: str, otherwise: int | None = None) -> int:
        """A cell as a whole number; ``otherwise`` if it is empty.

        Raises:
            Unpredictable: it is empty, or no whole number.
        """
        value = self.number(column)
        if value is None:
            if otherwise is None:
                raise Unpredictable(f"{column}: empty")
            return otherwise
        if value != int(value):
            raise Unpredictable(f"{column}: {value:g} is no whole number")
        return int(value)

    @property
    def id(self) -> str:
        """Its name."""
        return self.text("id")

    @property
    def group(self) -> str:
        """Source, device and model: what a split keeps together."""
        return self.text("group") or "|".join(
            self.text(column) for column in ("source", "device", "model")
        )

    @property
    def usable(self) -> bool:
        """No remark excludes it."""
        return not self.text("excluded")

    @property
    def seconds(self) -> float | None:
        """Measured seconds a step; ``None``: not measured, or no number."""
        return self._measured("seconds_per_step")

    @property
    def gib(self) -> float | None:
        """Measured memory; ``None``: not measured."""
        return self._measured("memory_gib")

    def _measured(self, column: str) -> float | None:
        try:
            return self.number(column) or None
        except Unpredictable:
            return None


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return [Row(cells) for cells in csv.DictReader(file)]


def published(folder: Path = DATA) -> list[Row]:
    """All rows of all files."""
    return [row for path in sorted(folder.glob("*.csv")) for row in read(path)]


def device_of(row: Row, known: Mapping[str, Device] | None = None) -> Device:
    """The row's device with the row's links.

    Raises:
        Unpredictable: there is no such device.
    """
    known = known or devices()
    name = row.text("device")
    if name not in known:
        raise Unpredictable(f"device {name or '(empty)'}: not in devices.toml")
    near, far = row.number("near_GBps"), row.number("far_Gbps")
    device = known[name]
    return replace(
        device,
        near=near * GIGA if near else device.near,
        far=far * GIGA / 8 if far else device.far,
    )


def workload_of(row: Row) -> tuple[Workload, list[str]]:
    """What the row's step computes, and what was assumed.

    Raises:
        Unpredictable: what is missing or contradicts itself.
    """
    assumed: list[str] = []
    model = _model(row)
    degrees = _degrees(row)
    software = row.text("software")
    habits = habits_of(software)
    if habits is None:
        habits = FSDP2
        assumed.append(UNKNOWN)
    note = row.text("note")
    if row.text("compile") == "1":
        habits = replace(habits, fused="compiled", launches=0.00015)
    if row.text("attention") == "unfused":
        habits = replace(habits, kernel="unfused")
    elif row.text("attention").startswith("flash") and habits.kernel == "unfused":
        habits = replace(habits, kernel="flash3")
    if row.text("device").startswith("a100") and habits.kernel == "flash3":
        habits = replace(habits, kernel="flash2")
    if "PURE" in note:
        habits = replace(habits, reduce_bytes=2)
    if "async tensor" in note:
        habits = replace(habits, tensor_overlap=True)
    if "with sequence parallel" in note:
        habits = replace(habits, tensor_sequence=True)
    checkpointing = row.text("checkpointing") or "not stated"
    if checkpointing == "not stated":
        assumed.append("checkpointing is not stated: none")
    dtype = row.text("dtype") or "bf16"
    offload = frozenset(filter(None, row.text("offload").replace("none", "").split("+")))
    load = Workload(
        model=model,
        degrees=degrees,
        sequence=row.count("seq_len"),
        rows=row.count("micro_batch"),
        micro_batches=_micro_batches(row, degrees),
        dtype=dtype,
        recompute=recompute_of(software, checkpointing, note, model),
        habits=habits,
        offload=offload,
    )
    if not load.rows * load.sequence * load.micro_batches:
        raise Unpredictable("seq_len, micro_batch or accumulation is 0")
    return as_traced(load) if row.text("source") in COMPOSED else load, assumed


def _model(row: Row) -> ModelShape:
    heads, hidden = row.count("heads"), row.count("hidden")
    if not heads or not hidden or not row.count("layers") or not row.count("vocab"):
        raise Unpredictable("layers, hidden, heads or vocab is 0")
    return ModelShape(
        layers=row.count("layers"),
        hidden=hidden,
        ffn=row.count("ffn"),
        gated=bool(row.count("gated", 0)),
        heads=heads,
        kv_heads=row.count("kv_heads", heads) or heads,
        head_dim=row.count("head_dim", hidden // heads) or hidden // heads,
        vocab=row.count("vocab"),
        tied=bool(row.count("tied", 0)),
        experts=row.count("experts", 0),
        topk=row.count("topk", 0),
        expert_ffn=row.count("expert_ffn", 0),
    )


def _degrees(row: Row) -> Degrees:
    kind = row.text("shard_kind") or "none"
    if kind not in KINDS:
        raise Unpredictable(f"shard_kind: {kind} is none of {', '.join(KINDS)}")
    named = {
        name: row.count(name, 1)
        for name in ("weight", "tensor", "pipeline", "interleave", "context", "replicas")
    }
    if min(named.values()) < 1:
        raise Unpredictable("a degree is 0")
    note = row.text("note")
    zero = re.search(r"zero1 size (-?\d+)", note)
    by_heads = "all-to-all" in note or "over heads" in note
    return Degrees(
        devices=row.count("gpus"),
        kind=kind,
        expert=max(1, row.count("expert_parallel", 1)),
        optimizer=max(0, int(zero[1])) if zero else 0,
        ring=1 if by_heads else named["context"],
        **named,
    )


def _micro_batches(row: Row, degrees: Degrees) -> int:
    number = row.count("accumulation", 0)
    if number:
        return number
    batch = row.count("global_batch")
    each = row.count("micro_batch") * degrees.data
    if batch % each:
        raise Unpredictable(f"global_batch: {batch} is no multiple of {each} sequences")
    return batch // each


def contradictions(row: Row) -> list[str]:
    """What of a row contradicts itself: degrees and devices, batch, tokens and seconds."""
    found = []
    try:
        load, _ = workload_of(row)
        batch, rate = row.number("global_batch"), row.number("tokens_per_second_per_gpu")
    except Unpredictable as error:
        return [str(error)]
    d = load.degrees
    made = d.weight * d.tensor * d.pipeline * d.context * d.replicas
    if made != d.devices:
        found.append(f"degrees make {made} devices, gpus says {d.devices}")
    made_batch = load.rows * d.data * load.micro_batches
    if batch and batch != made_batch:
        found.append(f"micro-batches make {made_batch} sequences, global_batch says {batch:g}")
    if rate and row.seconds and batch and d.devices:
        ours = batch * load.sequence / row.seconds / d.devices
        if abs(ours / rate - 1) > 0.03:
            found.append(f"seconds make {ours:.4g} tokens/s a device, the column says {rate:g}")
    return found
