"""``metrics.jsonl``: one row for each optimizer step, written line by line, and its reader."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from internsp.app.config import HELD_OUT, Config
from internsp.errors import InternspError


class StepMetrics(BaseModel):
    """Figures of one optimizer step. A value that is ``None`` is left out of the row.

    JSON has no NaN and no infinity: they are written as the strings ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``, which ``float`` (and JavaScript's ``Number``) read.
    """

    # A row may have keys of later versions.
    model_config = ConfigDict(
        frozen=True, extra="ignore", ser_json_inf_nan="strings", use_attribute_docstrings=True
    )

    step: int
    """Number of the optimizer step."""
    loss: float
    """Nats per valid token, over all ranks and micro-batches."""
    grad_norm: float
    """Global gradient norm before clipping; not finite where the step was skipped."""
    lr: float
    """Learning rate that the step used."""
    tokens: int
    """Valid tokens of the step, over all ranks."""
    sequences: int | None = None
    """Sequences of the step, over all ranks, if their number depends on their tokens."""
    step_seconds: float
    """Wall time of the step on this rank."""
    tokens_per_second: float
    """``tokens / step_seconds``."""
    exposed_comm_seconds: float | None = None
    """Time in which this rank's computing thread waited for communication, if measured: on a device
    in traced steps and in one of ten."""
    gathered_bytes: int
    """Payload of weight all-gathers that this rank received."""
    reduced_bytes: int
    """Payload of gradient reduce-scatters that this rank sent."""
    peak_memory_bytes: int
    """Peak memory of this rank."""
    eval_loss: float | None = None
    """Held-out loss, nats per valid token, if an evaluation followed the step."""
    eval_losses: dict[str, float] | None = None
    """Loss of each text of ``data.evaluation``, by name."""
    stage_wait_seconds: float | None = None
    """Time in which this rank of a pipeline had no pass to run."""
    skipped_steps: int | None = None
    """Number of skipped steps of the run so far: their gradients were not finite, so weights did
    not change."""
    total_tokens: int | None = None
    """Valid tokens of the run up to this step, over all ranks."""
    epochs: dict[str, float] | None = None
    """Epochs of the training text so far: of a mixture's texts by name, of a single text under an
    empty name."""
    tflops: float | None = None
    """Model TFLOP/s of one device, by the formula of :func:`flops_per_token`."""
    mfu: float | None = None
    """``tflops`` over the device's peak, if that is known or configured."""
    expert_load: float | None = None
    """Tokens of the busiest expert over the mean of its block's, in the block where that is most,
    over all ranks and micro-batches; 1 is balanced."""
    router_entropy: float | None = None
    """Entropy of a token's scores, in nats, mean over tokens and routers."""
    dropped_tokens: float | None = None
    """How often a capacity has kept a token from an expert, over all blocks, ranks and
    micro-batches; only with ``model.capacity_factor``."""
    run: str | None = None
    """Id of the run."""

    @property
    def evaluated(self) -> dict[str, float]:
        """Each loss of the evaluation that followed the step, by display name; else empty."""
        held_out = {} if self.eval_loss is None else {HELD_OUT: self.eval_loss}
        return held_out | (self.eval_losses or {})

    @property
    def exposed_step_share(self) -> float | None:
        """Exposed communication as a fraction of the step (0 for one of no time), if measured."""
        return self._share(self.exposed_comm_seconds)

    @property
    def stage_wait_share(self) -> float | None:
        """Waiting for other stages as a fraction of the step; ``None`` without a pipeline."""
        return self._share(self.stage_wait_seconds)

    def _share(self, seconds: float | None) -> float | None:
        if seconds is None:
            return None
        return seconds / self.step_seconds if self.step_seconds > 0 else 0.0


# Dense 16-bit matrix products, TFLOP/s, from the vendors' data sheets; the longest name first.
_PEAKS = {
    "A100": 312.0, "A800": 312.0, "B200": 2250.0, "GH200": 989.4, "H100": 989.4,
    "H100 NVL": 835.5, "H100 PCIe": 756.5, "H20": 148.0, "H200": 989.4, "H800": 989.4, "L4": 121.0,
    "L40S": 362.0, "V100": 125.0,
}  # fmt: skip


def flops_per_token(config: Config, parameters: int) -> float:
    """Floating-point operations of one token, forward and backward.

    ``N`` is the number of parameters that multiply (all but the input embedding, of which a token
    only reads a row). With ``L`` layers of ``h`` heads with ``d`` features, and sequences of ``S``
    tokens::

        6 N + 12 L h d S       forward and backward (PaLM, arXiv 2204.02311, appendix B)

    Recomputation does not count. Attention counts all keys, as if none were masked, so its term is
    too high for causal or packed sequences. MFU is these operations per second over the device's
    peak.

    Of a mixture a token multiplies its own experts only; those of transformers count as dense.

    Args:
        parameters: number of elements of the full model.
    """
    model = config.model
    embedding = model.vocab_size * model.hidden_size
    attention = model.layers * model.heads * model.head_size * config.data.sequence_length
    one = 3 * model.hidden_size * model.expert_width
    others = model.mixtures * (model.experts - model.top_k) * one
    multiplied = parameters - others - (0 if model.tie_embeddings else embedding)
    return 6.0 * multiplied + 12.0 * attention


def peak_tflops(config: Config, device: str) -> float | None:
    """Peak TFLOP/s of the device: ``train.peak_tflops``, or looked up by its name.

    Args:
        device: name from ``torch.cuda.get_device_name``; empty without a GPU.
    """
    if config.train.peak_tflops is not None:
        return config.train.peak_tflops
    dtype = config.weight_parallel.compute_dtype or config.train.dtype
    if dtype not in ("bfloat16", "float16"):
        return None
    return rated_tflops(device)


def rated_tflops(device: str) -> float | None:
    """What the vendor's data sheet says of a device, whose name has all words of the entry's."""
    words = device.replace("-", " ").split()
    for name in sorted(_PEAKS, key=len, reverse=True):
        if all(part in words for part in name.split()):
            return _PEAKS[name]
    return None


def named(row: StepMetrics) -> dict[str, float]:
    """Every number of a row but its step, as ``train/...``, ``eval/...`` and ``epochs/...``."""
    found = {f"eval/{name}": loss for name, loss in row.evaluated.items()}
    for key, value in row:
        if value is None or key in ("step", "run", "eval_loss", "eval_losses"):
            continue
        if isinstance(value, dict):
            found |= {f"{key}/{name or 'text'}": each for name, each in value.items()}
        else:
            found[f"train/{key}"] = value
    return found


class MetricsWriter:
    """Appends one JSON line for each step and flushes it, so that a killed run keeps its rows.

    Args:
        path: the ``metrics.jsonl`` to write; its folder is created if missing.
        resume_step: number of the first step that will be written; ``None`` starts a new file. Rows
            of this and later steps, which an interrupted run wrote, and a torn last line are
            removed first.
        run: id of the run, written into every row if given.
    """

    def __init__(
        self, path: str | Path, resume_step: int | None = None, run: str | None = None
    ) -> None:
        self.path = Path(path)
        self._run = run
        kept: list[str] = []
        if resume_step is not None and self.path.exists():
            kept = [line + "\n" for line, row in _rows(self.path) if row.step < resume_step]
        write_whole("".join(kept), self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._last: tuple[int, int, str] | None = None  # step, where its line begins, the line

    def write(self, metrics: StepMetrics) -> None:
        """Append one row and hand it to the operating system before returning.

        Of the same step as the row before, it takes that row's place.
        """
        row = metrics.model_copy(update={"run": self._run})
        line, at = row.model_dump_json(exclude_none=True) + "\n", self._file.tell()
        if self._last is not None and self._last[0] == row.step:
            _, at, before = self._last
            if line == before:
                return
            self._file.truncate(at)  # not by its path, where another file may lie by now
            self._file.seek(at)
        self._file.write(line)
        self._file.flush()
        self._last = row.step, at, line

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._file.close()


def read_metrics(path: str | Path) -> list[StepMetrics]:
    """Read a ``metrics.jsonl``, also of a run that is still writing or was killed.

    A torn last line and blank lines are skipped.

    Raises:
        InternspError: another line is not a row of metrics; the message names the line.
        OSError: the file cannot be read.
    """
    return [row for _, row in _rows(Path(path))]


def _rows(path: Path) -> list[tuple[str, StepMetrics]]:
    """Every valid row with the text of its line."""
    # A run cut off by a power failure can leave NUL bytes or half a character at the end.
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    rows = []
    last = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            rows.append((line, StepMetrics.model_validate_json(line)))
        except ValidationError as error:
            if i == last:
                break
            mistake = error.errors(include_url=False)[0]
            where = ".".join(map(str, mistake["loc"])) or "the line"
            raise InternspError(
                f"{path}, line {i + 1} is not a row of metrics ({where}: {mistake['msg']}); "
                "remove the line, or start the run under another name"
            ) from error
    return rows


def write_whole(text: str, path: Path) -> Path:
    """Write a file, atomically replacing an older one: a run killed here keeps one of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
    return path
