"""The training loop of one rank: from the first step to the report's page."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from internsp.app.checkpoint.checkpoint import Resumed
from internsp.app.checkpoint.saver import Saver
from internsp.app.config import HELD_OUT
from internsp.app.process.modes import Profile
from internsp.app.process.stop import SAVE, StopRequest, name_of
from internsp.app.report.metrics import StepMetrics
from internsp.app.session.own import CustomData
from internsp.app.session.session import Session
from internsp.app.train.output import Output
from internsp.app.train.page import gather_timelines, write_page
from internsp.app.train.replicas import compare_replicas
from internsp.app.train.run_folder import RunFolder
from internsp.app.train.step import StepResult, StepRunner
from internsp.base.trace import Event
from internsp.errors import InternspError, NotFiniteError, ReplicaError
from internsp.failure.objects import Objects

# Steps, counted from the first one run, of which the report shows the one of middle length.
_TYPICAL = range(2, 5)


class Loop:
    """One run. Every method is collective.

    Attributes:
        done: steps that the run had finished before, if it resumes.
        step: finished steps.
        tokens: tokens that the loss counted so far.
        failure: why the run ends; raised on all ranks, after the report is written.
    """

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        resumed: Resumed | None,
        stop: StopRequest,
        saver: Saver,
        output: Output,
    ) -> None:
        self.session, self.config, self.folder = session, session.config, folder
        self.stop, self.saver, self.output = stop, saver, output
        self.resumed_notes = resumed.notes if resumed else []
        self.done = self.step = resumed.content.step if resumed else 0
        self.tokens = resumed.content.data.tokens if resumed else 0
        self.runner = StepRunner(session)
        self.runner.sequences = resumed.content.data.sequences if resumed else 0
        train, mesh = self.config.train, session.mesh
        self.profile = Profile(
            train.profile, train.profile_steps, folder.path / "traces", mesh.rank, mesh.device
        )
        self.traced: list[tuple[float, list[Event]]] = []  # seconds and events of a step
        self.skipped_before = 0
        self.interrupted = False
        self.stopped_by = ""
        self.save_requested = False  # by SAVE, and not done yet
        self.remark = ""  # on the step that was read last
        self.failure: Exception | None = None

    def run(self) -> None:
        """Train, then save, evaluate and report.

        What must not be lost comes first. If saving or an evaluation fails, the report is written
        all the same and the error is raised after it.
        """
        notes = [*self.session.source.notes, *self.folder.notes, *self.resumed_notes]
        try:
            self.skipped_before = self.output.open(notes, self.done, self.tokens)
            if self._finished():
                key = "stop_after_tokens" if self.config.train.stop_after_tokens else "steps"
                self.output.note(f"train.{key} is reached already: no step is left")
            try:
                last = self._steps()
            except Exception:
                with suppress(Exception):  # a step that had ended before has a row
                    done = self.runner.finish()
                    self.output.keep(done and self._row(done))
                raise
            timelines = gather_timelines(self.session, self.folder.path, self._typical())
            path = None
            try:
                trusted = not isinstance(self.failure, ReplicaError)
                wanted = self.config.checkpoint.save or self.save_requested
                if wanted and self.step > self.done and trusted:
                    # First: with its checkpoint valid, a killed run has no step left to do.
                    self.output.keep(last)
                    path = self._save(last=True)
                else:  # complete a save that was started
                    self._call_saver(self.saver.finish)
                if self.failure is None:
                    last = last and self._evaluate(last, at_end=True)
            except Exception as error:  # noqa: BLE001 - raised below
                self.failure = self.failure or error
            if last is not None:
                self.output.step(last, self.remark)
            if self.session.mesh.rank == 0:
                micro_batches = self.runner.micro_batches
                notes = self._page_notes()
                write_page(self.session, self.folder.path, timelines, notes, micro_batches)
            if self.failure is not None:
                raise self.failure
            self.output.end(path, self.interrupted)
        finally:
            self.output.close()
            self.saver.close()
            self.profile.close()

    def _steps(self) -> StepMetrics | None:
        """Run all steps; returns the last one's metrics if not yet evaluated and recorded."""
        every, compared = self.config.checkpoint.every, self.config.train.compare_replicas_every
        log = self.output.log
        if every:
            self.saver.prepare()
        while not self._finished():
            source = self.session.source
            if isinstance(source, CustomData) and not source.has_batches(self.runner.sequences):
                self.output.note(f"the program's data ended after step {self.step}")
                return None
            log.begin_step(self.step + 1)
            self.profile.before_step(self.step + 1)
            metrics = self._one_step()
            if path := self.profile.after_step(self.step):
                self.output.note(f"profile {path}")
            if metrics is None:
                continue
            if self.interrupted:
                self._find_signal()
            if compared and self.step % compared == 0 and self.failure is None:
                self.failure = compare_replicas(self.session, self.step)
            if self.interrupted or self.failure is not None or self._finished():
                return metrics
            self.output.step(self._evaluate(metrics), self.remark)
            if self.save_requested or (every and self.step % every == 0):
                self._save()
        return None

    def _is_read_late(self) -> bool:
        """Whether nothing but its row follows from the next step, so that the one after may be
        queued before this one is read."""
        train, number = self.config.train, self.step + 1
        due = (train.eval_every, self.config.checkpoint.every, train.compare_replicas_every)
        return (
            self.runner.late
            and self.output.program is None  # one looks at each step
            and not isinstance(self.session.source, CustomData)
            and not (train.stop_after_tokens or self.session.trace.enabled)
            and not any(every and number % every == 0 for every in due)
            and number < train.steps
        )

    def _finished(self) -> bool:
        """Whether the last step is done; the same on all ranks."""
        train = self.config.train
        if train.stop_after_tokens:
            return self.tokens >= train.stop_after_tokens
        return self.step >= train.steps

    def _one_step(self) -> StepMetrics | None:
        """Train one step, and tell of all that was read: of the step before, or of this one, whose
        metrics are then returned."""
        trace, since = self.session.trace, self.step - self.done
        last = self.step == self.session.steps - 1  # of a run too short for a typical step
        # The first one, whose order of collectives is checked, and those that may be typical.
        trace.enabled = since in (0, *_TYPICAL) or (last and since < _TYPICAL.start)
        trace.clear()
        late = self._is_read_late()
        if not late and (before := self.runner.finish()) is not None:
            self.output.step(self._told(before), self.remark)
        run = self.runner.queue if late else self.runner.step
        done = run(self.step, self.stop, saved=self.saver.progress())
        self.step += 1
        if late:
            if done is not None:
                self.output.step(self._told(done), self.remark)
            if not (self.interrupted or self.save_requested or self.failure):
                return None
            done = self.runner.finish()
        assert done is not None, "it was queued"
        if trace.enabled:
            trace.resolve()
            self.traced.append((done.metrics.step_seconds, list(trace.events)))
        trace.enabled = False
        trace.clear()
        return self._told(done)

    def _told(self, done: StepResult) -> StepMetrics:
        """Note what a step has said, and advance a save that is under way. Returns its row."""
        self.interrupted |= done.interrupted
        self.save_requested |= done.save
        self.failure, self.remark = self.failure or done.failure, done.remark
        metrics = self._row(done)
        self._call_saver(partial(self.saver.advance, done.saved))
        return metrics

    def _row(self, done: StepResult) -> StepMetrics:
        self.tokens += done.metrics.tokens
        return done.metrics.model_copy(
            update={
                "skipped_steps": self.skipped_before + (done.metrics.skipped_steps or 0),
                "total_tokens": self.tokens,
                "epochs": self.session.source.epochs(done.sequences),
            }
        )

    def _typical(self) -> list[Event]:
        """This rank's events of the traced step of middle length, the same step on all ranks."""
        seconds = [took for took, _ in self.traced[1:] or self.traced]
        if not seconds:
            return []
        middle = Objects().on_first(lambda: seconds.index(statistics.median_low(seconds)))
        return (self.traced[1:] or self.traced)[middle][1]

    def _find_signal(self) -> None:
        """Find which signal requested the stop, and on which ranks."""
        numbers = Objects().gather(self.stop.number)
        ranks = [rank for rank, number in enumerate(numbers) if number]
        if not ranks:
            return  # requested by the program, not by a signal
        number = numbers[ranks[0]]
        self.stop.request(number)  # every rank ends with the same status
        self.stopped_by = f" by {name_of(number)}"
        if len(ranks) < len(numbers):
            self.stopped_by += f" to rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        self.output.note(f"stopped{self.stopped_by} after step {self.step}")

    def _evaluate(self, metrics: StepMetrics, at_end: bool = False) -> StepMetrics:
        """``metrics`` with the losses of all texts, if an evaluation is due."""
        train = self.config.train
        due = train.eval_every and metrics.step % train.eval_every == 0
        if not (due or at_end) or not train.eval_batches:
            return metrics
        texts = self.runner.evaluate()
        if not texts:
            return metrics
        found = texts.pop(HELD_OUT, None)
        metrics = metrics.model_copy(update={"eval_loss": found, "eval_losses": texts or None})
        self.output.evaluation(metrics)
        return metrics

    def _save(self, last: bool = False) -> Path | None:
        """Start to save this step; for the ``last`` one, wait and return the checkpoint."""
        self._call_saver(self.saver.finish)
        if self.save_requested:
            self.output.note(f"asked by {name_of(SAVE)}: saving step {self.step}")
        self.save_requested = False
        self.saver.start(self.step, self.runner.sequences, self.tokens)
        return self._call_saver(self.saver.finish, last) if last else None

    def _call_saver(self, call: Callable[[], Path | None], last: bool = False) -> Path | None:
        """Run ``call`` (a method of the saver) and report what became of the save.

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
        if message:
            self.output.note(message)
        if path is not None:
            self.output.tell("on_checkpoint", path)
        return path

    def _page_notes(self) -> list[str]:
        stopped = f"The run was stopped before its last step{self.stopped_by}."
        notes = [stopped] if self.interrupted else []
        skipped = self.skipped_before + self.session.optimizer.skipped_steps
        if skipped:
            notes.append(f"Steps skipped because gradients were not finite: {skipped}.")
        if self.failure is not None:
            known = isinstance(self.failure, InternspError)
            kind = "" if known else f"{type(self.failure).__name__}: "
            notes.append(f"The run failed: {kind}{self.failure}")
        return notes
