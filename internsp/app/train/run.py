"""The training run on one rank, from configuration to report."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from internsp.app.checkpoint import checkpoint
from internsp.app.checkpoint.checkpoint import Resumed
from internsp.app.checkpoint.finite import remark, too_many_skipped
from internsp.app.checkpoint.folder import has_checkpoint
from internsp.app.checkpoint.peer import PeerCopies
from internsp.app.checkpoint.saver import Saver
from internsp.app.config import AVERAGE, HELD_OUT, Config
from internsp.app.plan.pipeline import make_pipeline_plan
from internsp.app.process.modes import Profiles, deterministic
from internsp.app.process.rank_log import RankLog
from internsp.app.process.stop import SAVE, StopRequest, name_of
from internsp.app.report.advice import Setting, advise
from internsp.app.report.chrome import write_chrome_trace
from internsp.app.report.display import Display
from internsp.app.report.metrics import MetricsWriter, StepMetrics, read_metrics
from internsp.app.report.page import Report
from internsp.app.report.writers import Writers
from internsp.app.session.own import CustomData, Listener
from internsp.app.session.session import Session
from internsp.app.train.memory import components
from internsp.app.train.numbers import EarlyStop, Spikes, compare_replicas
from internsp.app.train.run_folder import RunFolder, claimed
from internsp.app.train.sample import sample
from internsp.app.train.step import StepRunner
from internsp.base.trace import Event
from internsp.errors import InternspError, NotFiniteError, ReplicaError
from internsp.failure.objects import Objects
from internsp.pipeline import SchedulerHook

_TIMELINE_STEP = 2  # the step, counted from the first one run, whose timeline the report shows
_Timeline = tuple[dict[str, int], list[Event]]


def train(config: Config, output: Path, hooks: Iterable[SchedulerHook] = ()) -> None:
    """Run a training on this rank. Collective: every rank calls it with the same config.

    Rank 0 writes ``config.toml``, ``metrics.jsonl`` and ``report.html`` into ``output``; all ranks
    write ``checkpoints/``. A stop request (Ctrl-C, SIGTERM, SIGHUP) ends the loop after the current
    step; the checkpoint and the report are still written. SIGUSR1 requests a checkpoint, and the
    run continues. Only one run at a time can use ``output``.

    Args:
        hooks: called at every forward, criterion and backward, with or without a pipeline.

    Raises:
        ConfigError: on every rank: another process uses ``output``, or the checkpoint to resume
            from is damaged or has other settings.
    """
    ours = not dist.is_initialized()
    try:
        with StopRequest() as stop:
            run_session(Session.create(config, hooks), output, stop, Listener())
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()


def run_session(session: Session, output: Path, stop: StopRequest, listener: Listener) -> None:
    """As :func:`train`, with an existing session; does not destroy the process group."""
    with claimed(output, session.mesh.rank == 0) as folder:
        source = _source(session.config, folder.path)
        copies = PeerCopies() if session.config.checkpoint.peer else None
        resumed = None if source is None else checkpoint.load(session, source, copies)
        if copies is not None and resumed is None:
            copies.retain(None)
        folder.begin(resumed)
        with _log(session, folder.path) as log, deterministic(session.config.train.deterministic):
            _Run(session, folder, resumed, stop, log, copies, listener).run()


def _source(config: Config, folder: Path) -> Path | None:
    """The path to resume from, or ``None``. Collective."""
    # torchrun restarts a run by the same command after a fault: it must find its own checkpoints.
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    if config.checkpoint.from_own_folder(elastic):
        saved = folder / "checkpoints"
        return Objects().on_first(lambda: folder if has_checkpoint(saved) else None)
    return None if config.checkpoint.named is None else Path(config.checkpoint.named)


@contextmanager
def _log(session: Session, output: Path) -> Iterator[RankLog]:
    """This rank's log; also logs how the run ends. Collective when it is entered."""
    rank = session.mesh.rank
    opened: list[RankLog] = []
    Objects().on_every(lambda: opened.append(RankLog(output, rank)))
    log = opened[0]
    log.write(f"{session.mesh.describe()}; the configuration is in {output / 'config.toml'}")
    for communicator in session.communicators:
        communicator.state.collectives.comm_context.on_launch = log.record_launch
    try:
        yield log
        log.write("ended well")
    except BaseException as error:
        with suppress(OSError):  # the disk may be full
            log.write_failure(error)
        raise
    finally:
        log.close()


class _Run:
    """One run: the training loop, and everything it writes."""

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        resumed: Resumed | None,
        stop: StopRequest,
        log: RankLog,
        copies: PeerCopies | None,
        listener: Listener,
    ) -> None:
        self.session, self.log = session, log
        self.listener = listener
        self.config = session.config
        self.output = folder.path
        self.id = folder.run
        self.notes = [
            *session.source.notes, *folder.notes, *(resumed.notes if resumed else [])
        ]  # fmt: skip
        self.done = self.step = resumed.step if resumed else 0
        self.sequences = resumed.sequences if resumed else 0
        self.tokens = resumed.tokens if resumed else 0
        self.saver = Saver(session, folder.path / "checkpoints", folder.run, copies)
        self.stop = stop
        self.main = session.mesh.rank == 0
        self.runner = StepRunner(session)
        train = session.config.train
        self.profiles = Profiles(
            train.torch_profile, train.memory_snapshot, folder.path / "traces",
            session.mesh.rank, session.mesh.device,
        )  # fmt: skip
        self.events: list[Event] = []
        self.interrupted = False
        self.save_requested = False  # by SAVE, and not done yet
        self.stopped_by = ""
        self.early = False  # the held-out loss has stopped falling
        self.trusted = True  # whether no replicas are known to differ
        self._spikes, self._early_stop = Spikes(self.config), EarlyStop(self.config)
        self.skipped_before = 0  # skipped steps of the run that this one resumes
        self.writers: Writers | None = None  # writers of other programs' files, on rank 0
        self.failure: Exception | None = None  # raised on all ranks, or after the end

    def run(self) -> None:
        """Train, then save, evaluate, sample and report.

        What must not be lost comes first. If saving, an evaluation or a sample fails, the report is
        written all the same and the error is raised after it.
        """
        display, writer = self._open()
        try:
            last = self._loop(display, writer)
            timelines = self._timelines()
            path, text = None, ""
            try:
                wanted = self.config.checkpoint.save or self.save_requested
                if wanted and self.step > self.done and self.trusted:
                    path = self._save(display, last=True)
                else:  # complete a save that was started
                    self._call_saver(self.saver.finish, display)
                if self.failure is None:
                    if last is not None:
                        last = self._evaluate(last, True, display)
                    text = sample(self.session)
            except Exception as error:  # noqa: BLE001 - raised below
                self.failure = self.failure or error
            if last is not None:
                self._record(last, display, writer)
            if self.main:
                self._report(text, timelines)
            if self.failure is not None:
                raise self.failure
            self.listener.end()
            files = self._files(path)
            if self.writers is not None:
                self.writers.close()
            if display is not None:
                display.finish(text, files, self.interrupted)
        finally:
            if display is not None:
                display.close()
            if self.writers is not None:
                self.writers.close(well=False)
            if writer is not None:
                writer.close()
            self.saver.close()
            self.profiles.close()

    def _open(self) -> tuple[Display | None, MetricsWriter | None]:
        for note in self.notes:
            self.log.write(note)
        display, writer = self._open_first() if self.main else (None, None)
        if self.config.report.writers:
            try:
                Objects().on_first(lambda: self._open_writers(display))
            except BaseException:
                if display is not None:
                    display.close()
                raise
        return display, writer

    def _open_first(self) -> tuple[Display, MetricsWriter]:
        """On rank 0: write the configuration, open the metrics and the display."""
        (self.output / "config.toml").write_text(self.config.to_toml())
        writer = MetricsWriter(
            self.output / "metrics.jsonl",
            resume_step=self.done + 1 if self.done else None,
            run=self.id,
        )
        if self.done and (rows := read_metrics(writer.path)):
            self.skipped_before = rows[-1].skipped_steps or 0
        train = self.config.train
        display = Display(
            self.session.steps,
            title=train.name,
            log_every=train.log_every,
            done_steps=self.done,
            total_tokens=train.stop_after_tokens,
            done_tokens=self.tokens,
        )
        parameters = self.session.parameters
        display.note(f"{parameters / 1e6:.2f}M parameters, {self.session.mesh.describe()}")
        for note in self.notes:
            display.note(note)
        return display, writer

    def _open_writers(self, display: Display | None) -> None:
        def notify(text: str) -> None:
            self.log.write(text)
            if display is not None:
                display.note(text)

        rows = read_metrics(self.output / "metrics.jsonl")
        self.writers = Writers(self.config, self.output, self.id, rows, notify)

    def _out_of_data(self, display: Display | None) -> bool:
        """Whether the program's own data (if any) has ended. Collective."""
        source = self.session.source
        if not isinstance(source, CustomData) or source.has_batches(self.sequences):
            return False
        if display is not None:
            display.note(f"the program's data ended after step {self.step}")
        return True

    def _loop(self, display: Display | None, writer: MetricsWriter | None) -> StepMetrics | None:
        """Run all steps; returns the last one's metrics if not yet evaluated and written."""
        train, trace = self.config.train, self.session.trace
        timeline = min(self.done + _TIMELINE_STEP, self.session.steps - 1)
        every = self.config.checkpoint.every
        if every:
            self.saver.prepare()
        while not self._finished():
            if self._out_of_data(display):
                return None
            self.log.begin_step(self.step + 1)
            trace.enabled = self.step in (self.done, timeline)
            trace.clear()
            self.profiles.before_step(self.step + 1)
            done = self.runner.step(
                self.step, self.stop, taken=self.sequences, saved=self.saver.progress()
            )
            self.interrupted = done.interrupted
            self.save_requested |= done.save
            self.sequences += done.rows
            self.tokens += done.metrics.tokens
            for path in self.profiles.after_step(self.step + 1):
                if display is not None:
                    display.note(f"profile {path}")
            metrics = self._with_totals(done.metrics)
            if self.step % train.log_every == 0:
                self.log.write(f"step {metrics.step}: loss {metrics.loss:.4f}, "
                               f"{metrics.step_seconds:.3f} s")
            if self.step <= timeline:
                trace.resolve()
                self.events = list(trace.events)
            trace.enabled = False
            trace.clear()
            self.step += 1
            self._call_saver(partial(self.saver.advance, done.saved), display)
            if self.interrupted:
                self._find_signal(display)
            self.failure = too_many_skipped(self.session, self.step) or self._check_replicas()
            if self.interrupted or self.failure is not None or self._finished():
                return metrics
            metrics = self._evaluate(metrics, False, display)
            self._record(metrics, display, writer)
            by_average = train.eval_average
            if self._early_stop.reached(metrics.eval_average if by_average else metrics.eval_loss):
                self.early = True
                if display is not None:
                    display.note(
                        f"stopped after step {self.step}: no lower "
                        f"{AVERAGE if by_average else HELD_OUT} loss in "
                        f"{train.early_stop} evaluations (train.early_stop)"
                    )
                return None
            if self.save_requested or (every and self.step % every == 0):
                self._save(display)
        return None

    def _finished(self) -> bool:
        """Whether the last step is done; the same on all ranks."""
        train = self.config.train
        if train.stop_after_tokens:
            return self.tokens >= train.stop_after_tokens
        return self.step >= train.steps

    def _check_replicas(self) -> ReplicaError | None:
        """Compare replicas, in the steps in which it is due; returns an error. Collective."""
        every = self.config.train.compare_replicas_every
        if not every or self.step % every:
            return None
        try:
            compare_replicas(self.session, self.step)
        except ReplicaError as error:  # raised on all ranks together
            self.trusted = False
            return error
        return None

    def _find_signal(self, display: Display | None) -> None:
        """Find which signal requested the stop, and on which ranks. Collective."""
        numbers = Objects().gather(self.stop.number)
        ranks = [rank for rank, number in enumerate(numbers) if number]
        if not ranks:
            return  # requested by the program, not by a signal
        number = numbers[ranks[0]]
        self.stop.request(number)  # every rank ends with the same status
        self.stopped_by = f" by {name_of(number)}"
        if len(ranks) < len(numbers):
            self.stopped_by += f" to rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        self.log.write(f"stopped{self.stopped_by} after step {self.step}")
        if display is not None:
            display.note(f"stopped{self.stopped_by} after step {self.step}")

    def _record(
        self, metrics: StepMetrics, display: Display | None, writer: MetricsWriter | None
    ) -> None:
        if writer is not None:
            writer.write(metrics)
        if self.writers is not None:
            self.writers.write(metrics)
        if display is not None:
            display.update(metrics)
            if message := remark(self.session, metrics.step, metrics.loss):
                display.note(message)
            if message := self._spikes.check(metrics):
                display.note(message)
        self.listener.step(metrics)

    def _save(self, display: Display | None, last: bool = False) -> Path | None:
        """Start to save this step; for the ``last`` one, wait and return the checkpoint."""
        self._call_saver(self.saver.finish, display)
        if self.save_requested and display is not None:
            display.note(f"asked by {name_of(SAVE)}: saving step {self.step}")
        self.save_requested = False
        self.saver.start(self.step, self.sequences, self.tokens)
        return self._call_saver(self.saver.finish, display, last) if last else None

    def _call_saver(
        self, call: Callable[[], Path | None], display: Display | None, last: bool = False
    ) -> Path | None:
        """Run ``call`` (a method of the saver) and report what became of the save. Collective.

        Returns:
            The checkpoint; ``None`` if there is none yet, or if weights are not finite, in which
            case none is written.
        """
        path, message = None, ""
        try:
            path = call()
            if path is not None and not (last and self.failure is None):
                message = f"checkpoint {path}"
        except NotFiniteError as error:  # raised on all ranks together
            message = str(error)
            if last:  # otherwise the run would end as a success without a checkpoint
                self.failure = self.failure or error
        notes, self.saver.notes = self.saver.notes, []
        for note in [*notes, *([message] if message else [])]:
            self.log.write(note)
            if display is not None:
                display.note(note)
        if path is not None:
            self.listener.checkpoint(path)
        return path

    def _with_totals(self, metrics: StepMetrics) -> StepMetrics:
        skipped = self.skipped_before + (metrics.skipped_steps or 0)
        gone = {
            "total_tokens": self.tokens, "epochs": self.session.source.epochs(self.sequences),
        }  # fmt: skip
        return metrics.model_copy(update={"skipped_steps": skipped, **gone})

    def _evaluate(self, metrics: StepMetrics, last: bool, display: Display | None) -> StepMetrics:
        every = self.config.train.eval_every
        due = every and metrics.step % every == 0
        if not (due or last) or not self.config.train.eval_batches:
            return metrics
        found = self.runner.evaluate(), self.runner.evaluate_texts()
        losses = [*([] if found[0] is None else [found[0]]), *found[1].values()]
        if not losses:
            return metrics
        mean = statistics.fmean(losses) if self.config.train.eval_average else None
        gone = {"eval_loss": found[0], "eval_losses": found[1] or None, "eval_average": mean}
        metrics = metrics.model_copy(update=gone)
        if display is not None:
            shown = ", ".join(
                f"{name} loss {loss:.4f}{'' if math.isfinite(loss) else ', which is not finite'}"
                for name, loss in metrics.evaluated.items()
            )
            display.note(f"step {metrics.step}: {shown}")
        self.listener.evaluation(metrics)
        return metrics

    def _files(self, path: Path | None) -> Mapping[str, Path | str]:
        files: dict[str, Path | str] = {
            "config": self.output / "config.toml",
            "metrics": self.output / "metrics.jsonl",
            "report": self.output / "report.html",
            **(self.writers.files if self.writers is not None else {}),
        }
        return files if path is None else {**files, "checkpoint": path}

    def _timelines(self) -> list[_Timeline]:
        """(coordinates in the mesh, events) of every rank, on rank 0. Collective."""
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

    def _report(self, text: str, everyone: list[_Timeline]) -> None:
        """Write the report's page, on rank 0 only."""
        notes = self._notes()
        timeline = {row["rank"]: events for row, events in everyone}
        shape = self.session.mesh.shape
        setting = Setting(
            self.config.weight_parallel,
            weight=shape.weight,
            sequence=shape.sequence,
            zero=shape.zero_size,
            micro_batches=self.runner.micro_batches,
            blocks=len(self.session.communicators[0].blocks),
        )
        report = Report(
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
        report.write(self.output / "report.html")
        report.save(self.output / "report.json")

    def _notes(self) -> list[str]:
        stopped = f"The run was stopped before its last step{self.stopped_by}."
        notes = [stopped] if self.interrupted else []
        if self.early:
            notes.append(f"The run ended early, after step {self.step}: train.early_stop.")
        skipped = self.skipped_before + self.session.optimizer.skipped_steps
        if skipped:
            notes.append(f"Steps skipped because gradients were not finite: {skipped}.")
        if self.failure is not None:
            kind = "" if isinstance(self.failure, InternspError) else type(self.failure).__name__
            notes.append(f"The run failed: {kind}{': ' * bool(kind)}{self.failure}")
        return notes

    def _schedule(self) -> str:
        """A picture of the pipeline's schedule."""
        if self.session.pipeline is None:
            return ""
        return make_pipeline_plan(self.config, self.session.mesh.world_size).picture()
