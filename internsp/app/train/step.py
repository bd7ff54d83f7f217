"""One optimizer step, and one evaluation, of a session."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.app.data.batches import Ahead, Batch, DataSource
from internsp.app.process.stop import StopRequest
from internsp.app.report.metrics import StepMetrics, flops_per_token, peak_tflops
from internsp.app.session.session import Session
from internsp.app.train.experts import ExpertLoads
from internsp.app.train.passes import PipelinedStep, PlainStep
from internsp.app.train.rows import StepRows, micro_batch
from internsp.base import accelerator
from internsp.base.accelerator import HostCopy
from internsp.errors import ConfigError, NotFiniteError, OrderError
from internsp.layers.dropout import row_keys
from internsp.schedule.simulate import simulate
from internsp.sp import SequenceLayout
from internsp.sp.dispatch import FIXED_BALANCE

MEASURED = 10
"""On a device the waits of steps that it divides are measured (whose lines are printed with a
``log_every`` of 10, 50 or 100), and those of a run's first one."""


class StepResult(NamedTuple):
    """Result of a step; the same on all ranks.

    Attributes:
        metrics: figures of the step.
        sequences: rows of the training text that were used, from the first one on.
        remark: on gradients or a loss that were not finite, see :func:`remark`.
        failure: ends the run: too many steps were skipped.
        interrupted: some rank got a stop request, before or during the step.
        save: some rank got a save request since the previous step.
        saved: sum of the ranks' progress in saving.
    """

    metrics: StepMetrics
    sequences: int
    remark: str
    failure: NotFiniteError | None
    interrupted: bool
    save: bool
    saved: float


class StepRunner:
    """Runs steps of a session and measures them.

    Attributes:
        micro_batches: number of micro-batches of the last step.
        sequences: rows of the training text that were used, from the first one on; a run that
            resumes sets it.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._passes = PlainStep(session) if session.pipeline is None else PipelinedStep(session)
        self._inputs, self._loads = Ahead(self._next), ExpertLoads(session)
        self._checked = False
        self.micro_batches, self.sequences = session.config.train.micro_batches, 0
        self._saves = 0  # save requests that earlier steps reported
        self._unread: Callable[[], StepResult] | None = None
        self._end: Any = None  # of the last step

    def step(self, number: int, stop: StopRequest, *, saved: float = 0.0) -> StepResult:
        """Train on the next rows, in step ``number`` (from 0). Collective; blocks. The step before
        must have been read (:meth:`finish`).

        Args:
            saved: this rank's progress in saving (:meth:`Saver.progress`).
        """
        self.queue(number, stop, saved=saved, late=False)
        done = self.finish()
        assert done is not None, "it was queued"
        return done

    def finish(self) -> StepResult | None:
        """The result of the last step, unless it was returned already. Collective; blocks."""
        read, self._unread = self._unread, None
        return None if read is None else read()

    @property
    def late(self) -> bool:
        """Whether a step can be read late: its optimizer's verdict is taken on the device."""
        return self.session.optimizer.decides_on_device()

    def queue(
        self, number: int, stop: StopRequest, *, saved: float = 0.0, late: bool = True
    ) -> StepResult | None:
        """As :meth:`step`, but what becomes of it is read by the next call, or by :meth:`finish`.

        Where the optimizer decides on the device, the host only queues work, and waits in the
        middle for the end of the step before, whose result is returned if it is still unread.

        Args:
            late: false if it is read at once: without tokens it is refused before weights change.
        """
        session, config, pipeline = self.session, self.session.config, self.session.pipeline
        counters = [c.state.collectives.counters for c in session.communicators]
        for counter in counters:
            counter.reset()
        session.trace.begin_step(measured=self._end is None or (number + 1) % MEASURED == 0)
        # Steps that follow each other unread have no time between them that belongs to none.
        start = accelerator.moment(session.mesh.device) if self._unread is None else self._end
        rows, batches = self._inputs.take(self.sequences)
        if isinstance(session.source, DataSource):  # a program's own data are an iterator of its
            self._inputs.begin(self.sequences + rows.total)
        own = zip(batches, rows.micro_batches, strict=True)
        layouts = [self._layout(batch, numbers) for batch, numbers in own]
        self.micro_batches = len(layouts)
        valid = float(sum(layout.valid_tokens for layout in layouts))
        lr = session.rate
        count = self._sum(valid)
        tokens = cache(partial(_tokens, HostCopy(count), number + 1))
        # Nothing has run since the last step, and nothing will until this one is read behind all
        # that it has queued: no program sees what lies in host memory, or writes a weight.
        alone = self._unread is not None and not session.hooks
        session.leave_alone(alone)
        loss = self._passes.train(layouts, count[0].clamp(min=1))
        if not late:
            tokens()
        loads, before = self._loads.taken(), self.finish()
        if before is not None:  # its row must not be lost if this step fails
            self._unread = lambda: before
        session.step()
        session.leave_alone(False)
        saves = stop.saves
        flags = float(stop.requested), float(saves > self._saves)
        self._saves = saves
        figures = HostCopy(self._sum(loss, *flags, saved, stages=True))
        self._end = end = accelerator.moment(session.mesh.device)
        waits, measured = session.trace.take_waits(), session.trace.measures
        told = self._loads.told(loads)
        self.sequences += rows.total
        known = {
            "step": number + 1,
            "lr": lr,
            "sequences": rows.total if config.train.batch_tokens else None,
            "gathered_bytes": sum(counter.gathered_bytes for counter in counters),
            "reduced_bytes": sum(counter.reduced_bytes for counter in counters),
            "stage_wait_seconds": pipeline.stage_wait_seconds if pipeline and measured else None,
        }
        times = start, end, waits
        self._unread = partial(self._read, known, tokens, times, self.sequences, figures, told)
        return before

    def _read(
        self, known: dict[str, Any], counted: Callable[[], int],
        times: tuple[Any, Any, Callable[[], float | None]],
        sequences: int, figures: HostCopy, told: Callable[[], dict[str, float]],
    ) -> StepResult:  # fmt: skip
        """The result of a step of which some metrics are ``known``. Blocks until it has ended.

        Args:
            times: its begin, its end, and what tells the seconds of its waits.
        """
        session, tokens = self.session, counted()
        total, stops, save, saved = figures.read()
        start, end, waits = times
        seconds = accelerator.seconds_between(start, end)
        self._check_order(self.micro_batches)
        metrics = StepMetrics(
            **known,
            tokens=tokens,
            loss=total / tokens,
            grad_norm=session.optimizer.grad_norm,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            exposed_comm_seconds=waits(),
            peak_memory_bytes=peak_memory_bytes(session.mesh.device),
            skipped_steps=session.optimizer.skipped_steps,
        )
        metrics = metrics.model_copy(update=self._flops(tokens / seconds) | told())
        about = (session, metrics.step)
        said, failure = remark(*about, metrics.loss), too_many_skipped(*about)
        return StepResult(metrics, sequences, said, failure, stops > 0, save > 0, saved)

    def evaluate(self) -> dict[str, float]:
        """The loss of each evaluated text by name, in nats per token, over the same rows on every
        mesh.

        Collective: every rank runs the same number of batches. Weights are gathered as in training.
        """
        return {name: self._mean_loss(name) for name in self.session.source.evaluated}

    @torch.no_grad()
    def _mean_loss(self, name: str) -> float:
        train, source = self.session.config.train, self.session.source
        assert isinstance(source, DataSource), "a program's own data has no evaluated text"
        total, count = torch.zeros((), dtype=torch.float64, device=self.session.mesh.device), 0
        rows = [micro_batch(i, train, self.session.mesh) for i in range(train.micro_batches)]
        parts = [source.evaluation(name, train.eval_batches, r) for r in rows]
        self._set_training(training=False)
        try:
            for batches in zip(*parts, strict=True):
                layouts = [self._layout(batch) for batch in batches]
                total += self._passes.evaluate(layouts)
                count += sum(layout.valid_tokens for layout in layouts)
        finally:
            self._set_training(training=True)
        loss_sum, tokens = float(self._sum(total, stages=True)), float(self._sum(float(count)))
        return loss_sum / tokens if tokens else math.nan

    def _flops(self, tokens_per_second: float) -> dict[str, float]:
        """TFLOP/s per device and MFU of this step; empty for a program's own model."""
        session = self.session
        if session.custom.model is not None:
            return {}
        each = flops_per_token(session.config, session.parameters)
        rate = each * tokens_per_second / session.mesh.world_size / 1e12
        peak = peak_tflops(session.config, accelerator.device_name(session.mesh.device))
        return {"tflops": rate} if peak is None else {"tflops": rate, "mfu": rate / peak}

    def _set_training(self, training: bool) -> None:
        for each in (*self.session.modules, *self.session.optimizers):
            each.train() if training else each.eval()  # a schedule-free optimizer has two values

    def _next(self, taken: int) -> tuple[StepRows, list[Batch]]:
        """The rows of the step after ``taken`` rows, and each micro-batch of them."""
        config, mesh, source = self.session.config, self.session.mesh, self.session.source
        if wanted := config.train.batch_tokens:
            assert isinstance(source, DataSource), "Custom.check refuses a program's own"
            rows = StepRows.of_tokens(taken, source.rows_with(wanted, taken), config, mesh)
        else:
            rows = StepRows.of_batch(taken, config.train, mesh)
        return rows, [source.batch(own) for own in rows.micro_batches]

    def _layout(self, batch: Batch, numbers: Sequence[int] | None = None) -> SequenceLayout:
        """The sequence layout of a batch.

        Args:
            numbers: numbers of its rows in the order of the data; ``None``: held-out rows.
        """
        mesh = self.session.mesh
        config = self.session.config
        # A pipeline's stages exchange hidden states of one shape, so the split must not depend on
        # the documents.
        balance = config.sequence.balance if mesh.pipeline == 1 else FIXED_BALANCE
        layout = SequenceLayout.create(
            batch.ids, rank=mesh.sequence_rank, size=mesh.sequence, boundaries=batch.boundaries,
            ignored=batch.ignored, ring=mesh.ring, near=mesh.near, balance=balance,
            row_keys=None if numbers is None else row_keys(config.train.seed, numbers),
        )  # fmt: skip
        return layout.to(mesh.device)

    def _sum(self, *values: float | Tensor, stages: bool = False) -> Tensor:
        """Sums over the ranks of this stage, fp64 on the device; with ``stages``, over all stages,
        too. The host waits for none of them, and not for a value on the device."""
        mesh = self.session.mesh
        numbers = [0.0 if isinstance(value, Tensor) else value for value in values]
        tensor = accelerator.copy_to(mesh.device, torch.tensor(numbers, dtype=torch.float64))
        for at, value in enumerate(values):
            if isinstance(value, Tensor):
                tensor[at] = value
        for group in (mesh.stage_group, mesh.pipeline_group)[: 1 + stages]:
            dist.all_reduce(tensor, group=group)
        return tensor

    def _check_order(self, micro_batches: int) -> None:
        """WP-2: compare the first traced step's collectives with the plan, on every rank."""
        trace, plan = self.session.trace, self.session.communicators[0].plan
        pipeline = self.session.pipeline
        if self._checked or not trace.enabled or plan is None:
            return
        if self.session.communicators[0].events.order.learning is not None:
            return  # the order is still being learned: a later step has a plan
        self._checked = True
        kinds = ("AG", "RS")
        overlap = self.session.config.weight_parallel.overlap
        planned = (
            simulate(plan, micro_batches, overlap)
            if pipeline is None
            else pipeline.planned(overlap, micro_batches // pipeline.micro_batches)
        )
        expected = planned.lines(kinds)
        actual = trace.lines(kinds)
        if actual == expected:
            return
        pairs = enumerate(zip_longest(actual, expected))
        at = next(number for number, (a, e) in pairs if a != e)
        raise OrderError(
            f"rank {self.session.mesh.rank} launched {len(actual)} collectives where the schedule "
            f"has {len(expected)}; the first difference is number {at}: "
            f"{actual[at : at + 1]} instead of {expected[at : at + 1]}"
        )


def remark(session: Session, step: int, loss: float) -> str:
    """A message about gradients or a loss that were not finite in ``step``; empty if all were."""
    optimizer = session.optimizer
    if optimizer.not_finite is not None:
        return (
            f"step {step} was skipped: gradients are {optimizer.not_finite} "
            f"({optimizer.skipped_in_a_row} in a row, train.max_skipped_steps = "
            f"{session.config.train.max_skipped_steps})"
        )
    if not math.isfinite(loss) and not optimizer.skipped:
        return f"step {step}: the loss is {loss}, but its gradients are finite: the step was taken"
    return ""


def too_many_skipped(session: Session, step: int) -> NotFiniteError | None:
    """The error that ends a run after ``train.max_skipped_steps``; the same on all ranks."""
    optimizer, most = session.optimizer, session.config.train.max_skipped_steps
    if optimizer.skipped_in_a_row < most:
        return None
    return NotFiniteError(
        f"gradients were not finite in {most} step{'s' * (most > 1)} in a row, the last of them "
        f"step {step}: {optimizer.not_finite}. Weights and optimizer are those of before: look at "
        "the data and the machine of that rank, lower optimizer.lr, or raise "
        "train.max_skipped_steps"
    )


def _tokens(count: HostCopy, step: int) -> int:
    """The valid tokens of a step, over all ranks.

    Raises:
        ConfigError: there are none; on every rank.
    """
    (tokens,) = count.read()
    if not tokens:
        raise ConfigError(
            f"step {step}: no token of the batch has a next one in its own document and "
            "sequence, so there is nothing to learn: raise data.sequence_length or "
            "train.global_batch, or set data.pack = false"
        )
    return int(tokens)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on an accelerator, resident on a CPU."""
    if accelerator.has_streams(device):
        return torch.accelerator.max_memory_allocated(device)
    with suppress(OSError, ValueError):  # Linux: there getrusage counts what a parent had, too
        lines = Path("/proc/self/status").read_text().splitlines()
        (kilobytes,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(kilobytes) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
