"""What a run tells while it trains: lines, ``metrics.jsonl``, other programs' files, alerts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from internsp.app.process.rank_log import RankLog
from internsp.app.report.display import Display
from internsp.app.report.metrics import MetricsWriter, StepMetrics, read_metrics
from internsp.app.report.writers import Writers
from internsp.app.session.session import Session
from internsp.app.train.alerts import Alerts, SlowRanks, Spikes
from internsp.failure.objects import Objects


class Output:
    """The output of one rank. Every rank has a log and tells its program; the rest is rank 0's.

    Args:
        folder: folder of the run.
        run: id of the run.
        program: called with the name of a method of :class:`Callback` and its arguments but the
            first; ``None``: no program looks at the run.
    """

    def __init__(
        self,
        session: Session,
        folder: Path,
        run: str,
        log: RankLog,
        program: Callable[..., Any] | None,
        alerts: Alerts,
    ) -> None:
        self.log, self.program, self._alerts = log, program, alerts
        self._session, self._folder, self._run = session, folder, run
        self._display: Display | None = None
        self._metrics: MetricsWriter | None = None
        self._writers: Writers | None = None
        self._spikes, self._slow = Spikes(), SlowRanks(session.mesh.pipeline_rank)

    def open(self, notes: Sequence[str], done: int, tokens: int) -> int:
        """Begin after ``done`` finished steps and ``tokens``. Collective.

        Returns:
            The number of steps that the run had skipped before, on rank 0.

        Raises:
            ConfigError, MissingDependencyError: on every rank: see :class:`Writers`.
        """
        self._alerts.notify = self.note
        session, train, rows = self._session, self._session.config.train, list[StepMetrics]()
        if session.mesh.rank == 0:
            (self._folder / "config.toml").write_text(session.config.to_toml(), "utf-8")
            first = done + 1 if done else None
            self._metrics = MetricsWriter(self._folder / "metrics.jsonl", first, self._run)
            self._display = Display(
                session.steps, title=train.name, log_every=train.log_every, done_steps=done,
                total_tokens=train.stop_after_tokens, done_tokens=tokens,
            )  # fmt: skip
            size = f"{session.parameters / 1e6:.2f}M parameters"
            self._display.note(f"{size}, {session.mesh.describe()}")
            rows = read_metrics(self._metrics.path) if done else []
        for note in notes:
            self.note(note)
        if session.config.report.writers:
            try:
                Objects().on_first(lambda: self._open_writers(rows))
            except BaseException:
                self.close()
                raise
        return rows[-1].skipped_steps or 0 if rows else 0

    def _open_writers(self, rows: Sequence[StepMetrics]) -> None:
        config = self._session.config
        self._writers = Writers(config, self._folder, self._run, rows, self.note)

    def note(self, text: str) -> None:
        """Write a line to this rank's log and, on rank 0, to the terminal."""
        self.log.write(text)
        if self._display is not None:
            self._display.note(text)

    def evaluation(self, metrics: StepMetrics) -> None:
        """Tell the losses that followed a step."""
        shown = ", ".join(
            f"{name} loss {loss:.4f}{'' if math.isfinite(loss) else ', which is not finite'}"
            for name, loss in metrics.evaluated.items()
        )
        self.note(f"step {metrics.step}: {shown}")
        self.tell("on_evaluation", metrics)

    def keep(self, metrics: StepMetrics | None) -> None:
        """Write the row of a step, if there is one, that :meth:`step` will write with more."""
        if self._metrics is not None and metrics is not None:
            self._metrics.write(metrics)

    def step(self, metrics: StepMetrics, remark: str) -> None:
        """Record a finished step with a ``remark`` on it, if there is one, and send alerts about
        it. Collective if alerts are wanted."""
        if self._metrics is not None:
            self._metrics.write(metrics)
        if self._writers is not None:
            self._writers.write(metrics)
        if self._display is not None:
            self._display.update(metrics)
        # Losses and norms are the same on all ranks: rank 0 tells.
        if self._session.mesh.rank == 0:
            self._warn("skipped", remark)
            self._warn("spike", self._spikes.check(metrics))
        if self._session.config.report.alert is not None:
            self._warn("slow", self._slow.check(metrics))
        self.tell("on_step", metrics)

    def tell(self, event: str, *given: Any) -> None:
        """Tell the program of an event, if there is one."""
        if self.program is not None:
            self.program(event, *given)

    def _warn(self, kind: str, text: str) -> None:
        if text:
            self.note(text)
            self._alerts.send(kind, text)

    def end(self, checkpoint: Path | None, interrupted: bool) -> None:
        """Finish a run that did not fail, and print its summary."""
        self.tell("on_end")
        files: dict[str, Path | str] = {
            "config": self._folder / "config.toml",
            "metrics": self._folder / "metrics.jsonl",
            "report": self._folder / "report.html",
            **(self._writers.files if self._writers is not None else {}),
        }
        if checkpoint is not None:
            again = f"internsp generate {shlex.quote(str(self._folder))}"
            files |= {"checkpoint": checkpoint, "its text": again}
        if self._writers is not None:
            self._writers.close()
        if self._display is not None:
            self._display.finish(files, interrupted)

    def close(self) -> None:
        """Close what is open, after an error, too; may be called more than once."""
        self._alerts.notify = print  # the rank's log will be closed
        if self._display is not None:
            self._display.close()
        if self._writers is not None:
            self._writers.close(well=False)
        if self._metrics is not None:
            self._metrics.close()
