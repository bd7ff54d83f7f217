"""``train``: one rank of a training run, from configuration to report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from internsp.config import Config
from internsp.pipeline import SchedulerHook
from internsp.stop import StopRequest, name_of
from internsp.trace import Event
from internsp.train import checkpoint
from internsp.train.advice import Setting, advise
from internsp.train.causes import checkpoint_causes
from internsp.train.chrome import write_chrome_trace
from internsp.train.display import Display, make_display
from internsp.train.memory import components
from internsp.train.metrics import MetricsWriter, StepMetrics, read_metrics
from internsp.train.pipeline_plan import make_pipeline_plan
from internsp.train.report import write_report
from internsp.train.sample import sample
from internsp.train.session import Session
from internsp.train.step import StepRunner

_TIMELINE_STEP = 2  # the step, counted from the first one run, whose timeline the report shows
_Timeline = tuple[dict[str, int], list[Event]]


def train(config: Config, output: Path, hooks: Iterable[SchedulerHook] = ()) -> None:
    """Run the whole training on this rank. Collective: every rank calls it with the same config.

    Rank 0 writes ``config.toml``, ``metrics.jsonl`` and ``report.html`` into ``output``; all ranks
    write ``checkpoints/``. A stop request (Ctrl-C, SIGTERM, SIGHUP) ends the loop after the current
    step; the checkpoint and the report are written all the same.

    Args:
        hooks: told of every forward, criterion and backward, with a pipeline or without.
    """
    ours = not dist.is_initialized()
    try:
        with StopRequest() as stop:
            session = Session.create(config, hooks)
            done = 0
            if config.checkpoint.resume is not None:
                path = Path(config.checkpoint.resume)
                with checkpoint_causes("loading a checkpoint", path):
                    done = checkpoint.load(session, path)
            _Run(session, output, done, stop).run()
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()


class _Run:
    """The loop and what it leaves behind."""

    def __init__(self, session: Session, output: Path, done: int, stop: StopRequest) -> None:
        self.session = session
        self.config = session.config
        self.output = output
        self.done = self.step = done
        self.stop = stop
        self.main = session.mesh.rank == 0
        self.runner = StepRunner(session)
        self.events: list[Event] = []
        self.interrupted = False
        self.why = ""

    def run(self) -> None:
        """Train, then save, evaluate, sample and report.

        What must not be lost comes first. An evaluation or a sample that fails costs neither the
        checkpoint nor the report: the error is raised when both are written.
        """
        display, writer = self._open()
        try:
            last = self._loop(display, writer)
            timelines = self._timelines()
            path, text, failure = None, "", None
            try:
                if self.config.checkpoint.save:
                    path = self._save(self.step)
                if last is not None:
                    last = self._evaluated(last, True, display)
                text = sample(self.session)
            except Exception as error:  # noqa: BLE001 - raised below
                failure = error
            if last is not None:
                self._record(last, display, writer)
            if self.main:
                self._report(text, timelines, failure)
            if display is not None:
                display.finish(text, self._files(path), self.interrupted)
            if failure is not None:
                raise failure
        finally:
            if display is not None:
                display.close()
            if writer is not None:
                writer.close()

    def _open(self) -> tuple[Display | None, MetricsWriter | None]:
        if not self.main:
            return None, None
        moved = None if self.done else set_aside(self.output)
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / "config.toml").write_text(self.config.to_toml())
        writer = MetricsWriter(
            self.output / "metrics.jsonl", resume_step=self.done + 1 if self.done else None
        )
        train = self.config.train
        display = make_display(
            train.steps, title=train.name, log_every=train.log_every, done_steps=self.done
        )
        display.start()
        parameters = self.session.parameters
        display.note(f"{parameters / 1e6:.2f}M parameters, {self.session.mesh.describe()}")
        if moved is not None:
            display.note(f"the run that was in {self.output} is now in {moved}")
        return display, writer

    def _loop(self, display: Display | None, writer: MetricsWriter | None) -> StepMetrics | None:
        """All steps; the last one's metrics, neither evaluated nor written yet."""
        train, trace = self.config.train, self.session.trace
        timeline = min(self.step + _TIMELINE_STEP, train.steps - 1)
        first = self.step
        while self.step < train.steps:
            trace.enabled = self.step in (first, timeline)
            trace.clear()
            metrics, self.interrupted = self.runner.step(self.step, self.stop)
            if self.step <= timeline:
                trace.resolve()
                self.events = list(trace.events)
            trace.enabled = False
            trace.clear()
            self.step += 1
            if self.interrupted:
                self._learn_why(display)
            if self.interrupted or self.step == train.steps:
                return metrics
            self._record(self._evaluated(metrics, False, display), display, writer)
            every = self.config.checkpoint.every
            if every and self.step % every == 0:
                path = self._save(self.step)
                if display is not None:
                    display.note(f"checkpoint {path}")
        return None

    def _learn_why(self, display: Display | None) -> None:
        """Which signal asked which rank to stop. Collective, when any of them was asked."""
        numbers = [0] * self.session.mesh.world_size
        dist.all_gather_object(numbers, self.stop.number)
        asked = [rank for rank, number in enumerate(numbers) if number]
        if not asked:
            return  # by the program, not by a signal
        number = numbers[asked[0]]
        self.stop.ask(number)  # every rank ends with the same status
        self.why = name_of(number)
        if len(asked) < len(numbers):
            self.why += f" to rank{'s' * (len(asked) > 1)} {', '.join(map(str, asked))}"
        if display is not None:
            display.note(f"stopped by {self.why} after step {self.step}")

    def _record(
        self, metrics: StepMetrics, display: Display | None, writer: MetricsWriter | None
    ) -> None:
        if writer is not None:
            writer.write(metrics)
        if display is not None:
            display.update(metrics)

    def _save(self, step: int) -> Path:
        folder = self.output / "checkpoints"
        with checkpoint_causes("saving a checkpoint", folder):
            return checkpoint.save(self.session, folder, step)

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
            display.note(f"step {metrics.step}: held-out loss {loss:.4f}")
        return replace(metrics, eval_loss=loss)

    def _files(self, path: Path | None) -> Mapping[str, Path]:
        files = {
            "config": self.output / "config.toml",
            "metrics": self.output / "metrics.jsonl",
            "report": self.output / "report.html",
        }
        return files if path is None else {**files, "checkpoint": path}

    def _timelines(self) -> list[_Timeline]:
        """Every rank's place in the mesh and events, on rank 0. Collective."""
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
        gathered: list[_Timeline | None] = [None] * mesh.world_size
        dist.gather_object((place, self.events), gathered if self.main else None)
        return [g for g in gathered if g is not None]

    def _report(self, text: str, everyone: list[_Timeline], failure: Exception | None) -> None:
        """Write the page, on rank 0 alone."""
        notes = []
        if self.interrupted:
            by = f" by {self.why}" if self.why else ""
            notes.append(f"The run was stopped before its last step{by}.")
        if failure is not None:
            lines = str(failure).strip().splitlines() or [""]
            notes.append(f"After training, rank 0 met {type(failure).__name__}: {lines[-1]}")
        timeline = {row["rank"]: events for row, events in everyone}
        shape = self.session.mesh.shape
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

    def _schedule(self) -> str:
        """The pipeline's schedule as a picture."""
        if self.session.pipeline is None:
            return ""
        return make_pipeline_plan(self.config, self.session.mesh.world_size).picture()



def set_aside(output: Path) -> Path | None:
    """Move an older run out of ``output``, so that a fresh one neither loses nor mixes with it.

    Returns:
        Where the older run is now, or ``None`` when there was none.
    """
    if not (output / "metrics.jsonl").exists():
        return None
    number = 1
    while (target := output.with_name(f"{output.name}.{number}")).exists():
        number += 1
    output.rename(target)
    return target
