"""Progress of a run while it trains: a line of figures, and on a terminal a bar below the lines.

Only rank 0 has a display.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from internsp.app.config import HELD_OUT
from internsp.app.process.terminal import discard, printable, shows_escapes, write_lines
from internsp.app.report.metrics import StepMetrics
from internsp.app.report.svg import number
from internsp.base.sizes import human

LAST_STEPS = 10  # of the closing mean
_TIMED_STEPS = 20  # whose median gives the time left
_REFRESH_SECONDS = 0.2  # between two drawings of the bar


class Display:
    """Writes a line every ``log_every`` steps, and for the first, last and evaluated ones.

    No method communicates with other ranks.

    Args:
        total_steps: last step of the run; an estimate if ``total_tokens`` is given.
        title: name of the run.
        log_every: steps between lines (the bar counts every step).
        done_steps: steps that an earlier run had finished, if this one resumes.
        total_tokens: tokens after which the run ends; 0: it ends after ``total_steps``.
        done_tokens: tokens that an earlier run had counted.
        stream: where to write; standard output by default.
        environ: environment variables (NO_COLOR, TERM); those of the process by default.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "",
        log_every: int = 1,
        done_steps: int = 0,
        total_tokens: int = 0,
        done_tokens: int = 0,
        stream: TextIO | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        # Of every step, however long the run: eight bytes each.
        self._losses, self._rates, self._seconds = array("d"), array("d"), array("d")
        self._last: StepMetrics | None = None
        self._total, self._done = max(total_steps, done_steps), done_steps
        self._total_tokens, self._tokens = total_tokens, done_tokens
        self._first_tokens, self._every = done_tokens, log_every
        self._evaluated: Mapping[str, float] = {}
        self._began, self._drawn = time.perf_counter(), 0.0
        self._stream: TextIO = stream or sys.stdout
        environ = os.environ if environ is None else environ
        utf8 = (getattr(self._stream, "encoding", None) or "").lower().startswith("utf")
        self.live = utf8 and shows_escapes(self._stream, environ)
        # Redrawn by update() only: a refresh thread would take time from the computing threads.
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), MofNCompleteColumn(), BarColumn(),
            TimeElapsedColumn(), console=Console(file=self._stream, highlight=False),
            auto_refresh=False, disable=not self.live,
        )  # fmt: skip
        self._task = self._bar.add_task(title or "step", total=self._total, completed=done_steps)
        self._bar.start()
        self._line(f"{title}: {self._total} steps".removeprefix(": "))

    def update(self, metrics: StepMetrics) -> None:
        """Add one finished step."""
        first, self._last = self._last is None, metrics
        self._losses.append(metrics.loss)
        self._rates.append(metrics.tokens_per_second)
        self._seconds.append(metrics.step_seconds)
        self._done += 1
        self._total = max(self._total, self._done)
        self._tokens += metrics.tokens
        self._evaluated = metrics.evaluated or self._evaluated
        left: float = max(0, self._total - self._done)
        at_end = not left
        if self._total_tokens:
            at_end = self._tokens >= self._total_tokens
            # As many steps as those so far would take for the tokens left.
            left = max(0, self._total_tokens - self._tokens) * len(self._seconds)
            left /= max(1, self._tokens - self._first_tokens)
        if first or at_end or self._done % self._every == 0 or metrics.evaluated:
            width = len(str(self._total))
            seconds = left * statistics.median(self._seconds[-_TIMED_STEPS:])
            cells = figures(metrics) | {"left": duration(seconds)}
            shown = "".join(f"  {name} {value}" for name, value in cells.items())
            self._line(f"step {self._done:>{width}}/{self._total}{shown}")
        now = time.perf_counter()
        redraw = at_end or now - self._drawn >= _REFRESH_SECONDS
        self._drawn = now if redraw else self._drawn
        with self._may_be_lost():
            self._bar.update(self._task, completed=self._done, refresh=redraw)

    def note(self, text: str) -> None:
        """Print a line, such as the path of a checkpoint."""
        self._line(printable(text))

    def finish(
        self, files: Mapping[str, str | Path] | None = None, interrupted: bool = False
    ) -> None:
        """End the display and print the closing summary, with ``files`` by their names."""
        self.close()
        word = "stopped" if interrupted else "finished"
        took = duration(time.perf_counter() - self._began)
        lines = ["", f"{word} after {self._done}/{self._total} steps, {took}"]
        if self._last is not None:
            last = self._losses[-LAST_STEPS:]  # a single step's batch says little
            mean = f" (mean of the last {len(last)} steps)" if len(last) > 1 else ""
            loss = f"{self._losses[0]:.4f} -> {statistics.fmean(last):.4f}{mean}"
            lines.append(f"  loss        {loss}")
            if skipped := self._last.skipped_steps:
                steps = "1 step" if skipped == 1 else f"{skipped} steps"
                lines.append(f"  skipped     {steps}: gradients were not finite")
            lines += [f"  {_brief(n):<11} {loss:.4f}" for n, loss in self._evaluated.items()]
            rate = statistics.median(self._rates)
            tokens = self._tokens - self._first_tokens
            lines.append(f"  throughput  {rate:,.0f} tokens/s (median), {tokens:,} tokens")
            lines.append(f"  peak memory {human(self._last.peak_memory_bytes)} on this rank")
        if files:
            width = max(len(name) for name in files)
            lines += ["", "files:", *(f"  {name:<{width}}  {path}" for name, path in files.items())]
        for line in lines:
            self._line(line)

    def close(self) -> None:
        """Restore the terminal without a summary, after an error; may be called more than once."""
        with self._may_be_lost():
            self._bar.stop()

    def _line(self, text: str) -> None:
        with self._may_be_lost():
            if self._bar.live.is_started:
                self._bar.console.print(Text(text), soft_wrap=True)
            else:
                write_lines(text, self._stream)

    @contextmanager
    def _may_be_lost(self) -> Iterator[None]:
        """A context that writes to the stream. A run goes on without it: its reader is gone
        (``| head``), its terminal was closed, its disk is full."""
        try:
            yield
        except OSError:
            discard(self._stream)


def figures(metrics: StepMetrics) -> dict[str, str]:
    """The figures shown for a step, by name, with the losses of an evaluation."""
    cells = {"loss": f"{metrics.loss:.4f}"}
    cells |= {_brief(name): f"{loss:.4f}" for name, loss in metrics.evaluated.items()}
    cells["lr"] = f"{metrics.lr:.2e}"
    cells["grad norm"] = f"{metrics.grad_norm:.3g}"
    if metrics.total_tokens is not None:
        cells["tokens"] = number(metrics.total_tokens)
    if metrics.epochs is not None and "" in metrics.epochs:  # of a single text
        cells["epoch"] = f"{metrics.epochs['']:.2f}"
    cells["tokens/s"] = f"{metrics.tokens_per_second:,.0f}"
    if metrics.exposed_step_share is not None:
        cells["exposed"] = f"{metrics.exposed_step_share:.0%} of step"
    if metrics.stage_wait_share is not None:
        cells["other stages"] = f"{metrics.stage_wait_share:.0%} of step"
    return cells


def _brief(name: str) -> str:
    """Heading for a text's loss that cannot be mistaken for another figure of the display."""
    return name if name == HELD_OUT else f"{printable(name)} loss"


def duration(seconds: float) -> str:
    """``75.2`` -> ``1:15``; with hours ``2:03:09``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
