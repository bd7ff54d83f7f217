"""``train``: one rank of a training run, from configuration to report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from internsp.config import Config
from internsp.errors import NotFiniteError
from internsp.pipeline import SchedulerHook
from internsp.stop import StopRequest
from internsp.trace import Event
from internsp.train import checkpoint
from internsp.train.advice import Setting, advise
from internsp.train.checkpoint import Resumed
from internsp.train.chrome import write_chrome_trace
from internsp.train.display import Display, make_display
from internsp.train.finite import remark, too_many_skipped
from internsp.train.memory import components
from internsp.train.metrics import MetricsWriter, StepMetrics, read_metrics
from internsp.train.pipeline_plan import make_pipeline_plan
from internsp.train.report import write_report
from internsp.train.run_folder import RunFolder, claimed
from internsp.train.sample import sample
from internsp.train.session import Session
from internsp.train.step import StepRunner

_TIMELINE_STEP = 2  # the step, counted from the first one run, whose timeline the report shows


def train(config: Config, output: Path, hooks: Iterable[SchedulerHook] = ()) -> None:
    """Run the whole training on this rank. Collective: every rank calls it with the same config.

    Rank 0 writes ``config.toml``, ``metrics.jsonl`` and ``report.html`` into ``output``; all ranks
    write ``checkpoints/``. A stop request (Ctrl-C) ends the loop after the current step; the
    checkpoint and the report are written all the same. One run at a time holds ``output``.

    Args:
        hooks: told of every forward, criterion and backward, with a pipeline or without.

    Raises:
        ConfigError: on every rank: ``output`` is another process's, or what there is to resume
            from is damaged or of other settings.
    """
    ours = not dist.is_initialized()
    try:
        with StopRequest() as stop:
            session = Session.create(config, hooks)
            with claimed(output, session.mesh.rank == 0) as folder:
                resumed = None
                if config.checkpoint.resume is not None:
                    resumed = checkpoint.load(session, Path(config.checkpoint.resume))
                folder.begin(resumed)
                _Run(session, folder, resumed, stop).run()
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()


class _Run:
    """The loop and what it leaves behind."""

    def __init__(
        self, session: Session, folder: RunFolder, resumed: Resumed | None, stop: StopRequest
    ) -> None:
        self.session = session
        self.config = session.config
        self.output = folder.path
        self.id = folder.run
        self.notes = [*folder.notes, *(resumed.notes if resumed else [])]
        self.done = resumed.step if resumed else 0
        self.stop = stop
        self.main = session.mesh.rank == 0
        self.runner = StepRunner(session)
        self.events: list[Event] = []
        self.interrupted = False
        self.skipped_before = 0  # steps of the run that this one goes on
        self.failure: NotFiniteError | None = None  # of all ranks together

    def run(self) -> None:
        """Train, then save, sample and report."""
        display, writer = self._open()
        try:
            step = self._loop(display, writer)
            path = None
            if self.config.checkpoint.save and step > self.done:
                path = self._save(step, display, last=True)
            text = sample(self.session) if self.failure is None else ""
            self._report(text)
            if self.failure is not None:
                raise self.failure
            if display is not None:
                display.finish(text, self._files(path), self.interrupted)
        finally:
            if display is not None:
                display.close()
            if writer is not None:
                writer.close()

    def _open(self) -> tuple[Display | None, MetricsWriter | None]:
        if not self.main:
            return None, None
        (self.output / "config.toml").write_text(self.config.to_toml())
        writer = MetricsWriter(
            self.output / "metrics.jsonl",
            resume_step=self.done + 1 if self.done else None,
            run=self.id,
        )
        if self.done and (rows := read_metrics(writer.path)):
            self.skipped_before = rows[-1].skipped_steps or 0
        train = self.config.train
        display = make_display(
            train.steps, title=train.name, log_every=train.log_every, done_steps=self.done
        )
        display.start()
        parameters = self.session.parameters
        display.note(f"{parameters / 1e6:.2f}M parameters, {self.session.mesh.describe()}")
        for note in self.notes:
            display.note(note)
        return display, writer

    def _loop(self, display: Display | None, writer: MetricsWriter | None) -> int:
        train, trace = self.config.train, self.session.trace
        step = self.done
        timeline = min(self.done + _TIMELINE_STEP, train.steps - 1)
        while step < train.steps:
            trace.enabled = step in (self.done, timeline)
            trace.clear()
            metrics, asked = self.runner.step(step, self.stop.requested)
            metrics = self._counted(metrics)
            if step <= timeline:
                trace.resolve()
                self.events = list(trace.events)
            trace.enabled = False
            trace.clear()
            step += 1
            self.interrupted = asked
            self.failure = too_many_skipped(self.session, step)
            last = step == train.steps or asked or self.failure is not None
            metrics = self._evaluated(metrics, last and self.failure is None, display)
            if writer is not None:
                writer.write(metrics)
            if display is not None:
                display.update(metrics)
                if said := remark(self.session, step, metrics.loss):
                    display.note(said)
            every = self.config.checkpoint.every
            if every and not last and step % every == 0:
                self._save(step, display)
            if last:
                break
        return step

    def _save(self, step: int, display: Display | None, last: bool = False) -> Path | None:
        """Collective. ``None``: weights are not finite, so nothing is written; it is said."""
        path = None
        try:
            path = checkpoint.save(self.session, self.output / "checkpoints", step, self.id)
            said = "" if last and self.failure is None else f"checkpoint {path}"
        except NotFiniteError as error:  # of all ranks together
            said = str(error)
            if last:  # the run has nothing to show for itself
                self.failure = self.failure or error
        if display is not None and said:
            display.note(said)
        return path

    def _counted(self, metrics: StepMetrics) -> StepMetrics:
        return replace(metrics, skipped_steps=self.skipped_before + (metrics.skipped_steps or 0))

    def _evaluated(
        self, metrics: StepMetrics, last: bool, display: Display | None
    ) -> StepMetrics:
        every = self.config.train.eval_every
        due = every and metrics.step % every == 0
        if not (due or last) or not self.config.train.eval_batches:
            return metrics
        loss = self.runner.evaluate()
        if loss is None:
            return metrics
        if display is not None:
            finite = "" if math.isfinite(loss) else ", which is not finite"
            display.note(f"step {metrics.step}: held-out loss {loss:.4f}{finite}")
        return replace(metrics, eval_loss=loss)

    def _files(self, path: Path | None) -> Mapping[str, Path]:
        files = {
            "config": self.output / "config.toml",
            "metrics": self.output / "metrics.jsonl",
            "report": self.output / "report.html",
        }
        return files if path is None else {**files, "checkpoint": path}

    def _report(self, text: str) -> None:
        """Collect every rank's timeline on rank 0 and write the page. Collective."""
        mesh = self.session.mesh
        if self.config.train.profile:
            path = self.output / "traces" / f"rank{mesh.rank}.json"
            write_chrome_trace(path, self.events, mesh.rank)
        place = {
            "rank": mesh.rank,
            "pipeline": mesh.pipeline_rank,
            "weight": mesh.weight_rank,
            "replica": mesh.replica_rank,
            "zero": mesh.zero_rank,
            "sequence": mesh.sequence_rank,
            "data": mesh.data_rank,
        }
        gathered: list[tuple[dict[str, int], list[Event]] | None] = [None] * mesh.world_size
        dist.gather_object((place, self.events), gathered if self.main else None)
        if not self.main:
            return
        everyone = [g for g in gathered if g is not None]
        notes = self._notes()
        timeline = {row["rank"]: events for row, events in everyone}
        shape = mesh.shape
        setting = Setting(
            self.config.weight_parallel,
            weight=shape.weight,
            sequence=shape.sequence,
            zero=shape.zero_size,
            micro_batches=self.config.train.micro_batches,
            blocks=len(self.session.communicators[0].blocks),
        )
        write_report(
            self.output / "report.html",
            title=self.config.train.name,
            config_toml=self.config.to_toml(),
            metrics=read_metrics(self.output / "metrics.jsonl"),
            mesh=shape.degrees(),
            ranks=[row for row, _ in everyone],
            memory=components(self.session),
            timeline=timeline,
            sample=text,
            notes=notes,
            schedule=self._schedule(),
            advice=advise(timeline, setting),
        )

    def _notes(self) -> list[str]:
        notes = ["The run was stopped before its last step."] if self.interrupted else []
        skipped = self.skipped_before + self.session.optimizer.skipped_steps
        if skipped:
            notes.append(f"Steps skipped because gradients were not finite: {skipped}.")
        return notes if self.failure is None else [*notes, f"The run failed: {self.failure}"]

    def _schedule(self) -> str:
        """The pipeline's schedule as a picture."""
        if self.session.pipeline is None:
            return ""
        return make_pipeline_plan(self.config, self.session.mesh.world_size).picture()
