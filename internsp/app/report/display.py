"""Progress of a run while it trains: a live panel on a terminal, plain lines elsewhere.

Only rank 0 has a display::

    display = Display(total_steps=300, title="demo")
    display.start()
    for ...:
        display.update(metrics)
    display.finish(sample=text, files={"report": path})
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from internsp.app.config import AVERAGE, HELD_OUT
from internsp.app.process.terminal import printable, shows_escapes, wrap
from internsp.app.report.metrics import StepMetrics
from internsp.base.sizes import human

_REFRESH_SECONDS = 0.2
LAST_STEPS = 10  # of the closing mean
_LEAST_BAR = 12  # columns of the bar and what stands around it
_SPARKS = "▁▂▃▄▅▆▇█"


def can_show_live(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether ``stream`` is a UTF-8 terminal that shows escape sequences, and this is not in CI."""
    if environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    return shows_escapes(stream, environ) and encoding == "utf8"


class RunHistory:
    """Figures that a display computes from the steps so far."""

    def __init__(
        self,
        total_steps: int,
        done_steps: int = 0,
        total_tokens: int = 0,
        done_tokens: int = 0,
    ) -> None:
        self.total = total_steps
        self.done = done_steps
        self.total_tokens, self.done_tokens = total_tokens, done_tokens
        self.began = time.perf_counter()
        self.last: StepMetrics | None = None
        self.evaluated: dict[str, float] = {}
        self.tokens = 0
        # Of every step, however long the run: eight bytes each, no objects.
        self.rates = array("d")
        self.losses = array("d")
        self._recent: deque[float] = deque(maxlen=20)

    def add(self, metrics: StepMetrics) -> None:
        """Add one finished step."""
        self.done += 1
        self.last = metrics
        self.evaluated = metrics.evaluated or self.evaluated
        self.tokens += metrics.tokens
        self.losses.append(metrics.loss)
        self.rates.append(metrics.tokens_per_second)
        self._recent.append(metrics.step_seconds)

    def seconds_left(self) -> float | None:
        """Steps left times the median time of the last steps; ``None`` before the first step."""
        if not self._recent:
            return None
        left: float = max(0, self.total - self.done)
        if self.total_tokens and self.tokens:  # estimated from the tokens counted so far
            left = max(0, self.total_tokens - self.done_tokens - self.tokens)
            left *= len(self.losses) / self.tokens
        return left * statistics.median(self._recent)

    @property
    def ended(self) -> bool:
        """Whether the last step has been shown."""
        if self.total_tokens:
            return self.done_tokens + self.tokens >= self.total_tokens
        return self.done >= self.total

    def elapsed(self) -> float:
        """Seconds since the display was started."""
        return time.perf_counter() - self.began


class Display:
    """A panel redrawn in place on a terminal that can show one, else plain lines.

    A plain line is written every ``log_every`` steps, and for the first, last and evaluated ones.
    No method communicates with other ranks.

    Args:
        total_steps: last step of the run; an estimate if ``total_tokens`` is given.
        title: name of the run.
        log_every: steps between plain lines (the panel shows every step).
        done_steps: steps that an earlier run had finished, if this one resumes.
        total_tokens: tokens after which the run ends; 0: it ends after ``total_steps``.
        done_tokens: tokens that an earlier run had counted.
        stream: where to write; standard output by default.
        environ: environment variables (CI, NO_COLOR, TERM); those of the process by default.
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
        self._history = RunHistory(total_steps, done_steps, total_tokens, done_tokens)
        self._title = title
        self._every = max(1, log_every)
        self._stream: TextIO = stream or sys.stdout
        self.live = can_show_live(self._stream, os.environ if environ is None else environ)
        self._panel = _Panel(self._history, title, self._stream) if self.live else None
        self._drawn = 0.0

    def start(self) -> None:
        """Start the display; output of other code appears above the panel."""
        self._history.began = time.perf_counter()
        if self._panel is not None:
            self._panel.start()
        else:
            self._line(f"{self._title}: {self._history.total} steps".removeprefix(": "))

    def update(self, metrics: StepMetrics) -> None:
        """Add one finished step; the panel is redrawn at most five times a second."""
        history, first = self._history, self._history.last is None
        history.add(metrics)
        last, now = history.ended, time.perf_counter()
        if self._panel is not None:
            if last or now - self._drawn >= _REFRESH_SECONDS:
                self._drawn = now
                self._panel.draw()
        elif first or last or history.done % self._every == 0 or metrics.evaluated:
            self._line(plain_line(metrics, history))

    def note(self, text: str) -> None:
        """Print a line that stays, such as the path of a checkpoint."""
        self._line(printable(text), style="dim")

    def finish(
        self,
        sample: str = "",
        files: Mapping[str, str | Path] | None = None,
        interrupted: bool = False,
    ) -> None:
        """End the display, leave the last panel on the screen, and print the closing summary.

        Args:
            sample: text that the trained model generated; control characters are made harmless.
            files: name -> path of what the run wrote.
            interrupted: whether the run was stopped before its last step.
        """
        if self._panel is not None:
            self._panel.draw()
        self.close()
        for line in summary_lines(self._history, sample, files or {}, interrupted):
            self._line(line)

    def close(self) -> None:
        """Restore the terminal without a summary, after an error; may be called more than once."""
        if self._panel is not None:
            self._panel.stop()

    def _line(self, text: str, style: str = "") -> None:
        if self._panel is not None:
            self._panel.console.print(Text(wrap(text, self._stream), style=style), soft_wrap=True)
            return
        text = wrap(text, self._stream)
        # A log in an ASCII locale must not end the run.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except BrokenPipeError:  # nor must `| head`, which reads no more
            with open(os.devnull, "w") as nothing:  # buffered output goes there, too
                os.dup2(nothing.fileno(), self._stream.fileno())


class _Panel(Progress):
    """Progress bar, figures of the last step, and the loss as a small curve."""

    def __init__(self, history: RunHistory, title: str, stream: TextIO) -> None:
        self._history = history
        self._title = title
        self._screen = Console(file=stream, highlight=False)
        # Redrawn only by draw(): a refresh thread would take time from the computing threads.
        super().__init__(
            TextColumn("{task.description}", style="bold", markup=False),
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[gone]} gone", style="dim"),
            TextColumn("{task.fields[left]}", style="cyan"),
            console=self._screen,
            auto_refresh=False,
            expand=True,
        )
        self.task = self.add_task(title, total=history.total, **self._state())

    def _state(self) -> dict[str, Any]:
        left = self._history.seconds_left()
        return {
            "completed": self._history.done,
            "gone": duration(self._history.elapsed()),
            "left": "starting" if left is None else f"{duration(left)} left",
        }

    def draw(self) -> None:
        """Redraw the panel with the current figures."""
        self.update(self.task, **self._state(), refresh=True)

    def get_renderables(self) -> Iterator[RenderableType]:
        """The parts of the panel, from top to bottom."""
        history, width = self._history, self._screen.width - 1
        state = self._state()
        words = [
            self._title, f"step {history.done}/{history.total}", f"{state['gone']} gone",
            state["left"],
        ]  # fmt: skip
        parts: list[RenderableType] = [self.make_tasks_table(self.tasks)]
        if len(" ".join(words)) + _LEAST_BAR > width:
            parts = [Text(line, no_wrap=True) for line in flow(words, width)]
        if history.last is not None:
            parts += _laid_out(figures(history.last, history.evaluated), width)
        parts.append(Text(sparkline(history.losses, min(60, width)), style="blue"))
        yield Padding(Group(*parts), (1, 0, 0, 1))


def _laid_out(cells: Mapping[str, str], width: int) -> list[RenderableType]:
    """Figures below their names, or, if that is too wide, each next to its name."""
    gap = 3
    if sum(max(map(len, item)) + gap for item in cells.items()) - gap <= width:
        grid = Table.grid(padding=(0, gap))
        grid.add_row(*(Text(name, style="dim") for name in cells))
        grid.add_row(*(Text(value, style="bold") for value in cells.values()))
        return [grid]
    return [Text(line, no_wrap=True) for line in flow([" ".join(i) for i in cells.items()], width)]


def flow(words: Sequence[str], width: int) -> list[str]:
    """Break words, two spaces apart, into lines of at most ``width`` characters."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += f"  {word}"
        else:
            lines.append(word)
    return lines


def figures(metrics: StepMetrics, evaluated: Mapping[str, float]) -> dict[str, str]:
    """The figures shown for a step, by name, with the losses of an evaluation."""
    cells = {"loss": f"{metrics.loss:.4f}"}
    cells |= {_brief(name): f"{loss:.4f}" for name, loss in evaluated.items()}
    cells["lr"] = f"{metrics.lr:.2e}"
    cells["grad norm"] = f"{metrics.grad_norm:.3g}"
    if metrics.total_tokens is not None:
        cells["tokens"] = short_count(metrics.total_tokens)
    if metrics.epochs is not None:
        cells["epoch"] = epochs_text(metrics.epochs)
    cells["tokens/s"] = f"{metrics.tokens_per_second:,.0f}"
    cells["exposed"] = exposed_text(metrics)
    if metrics.stage_wait_share is not None:
        cells["other stages"] = f"{metrics.stage_wait_share:.0%} of step"
    return cells


def _brief(name: str) -> str:
    """Heading for a text's loss that cannot be mistaken for another figure of the display."""
    return name if name in (HELD_OUT, AVERAGE) else f"{printable(name)} loss"


def short_count(number: int) -> str:
    """``1234567`` -> ``1.23M``."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            digits = ".3g" if number < 999.5 * size else ".0f"
            return f"{number / size:{digits}}{unit}"
    return str(number)


_MOST_EPOCHS = 3  # texts of a mixture whose epochs are shown


def epochs_text(epochs: Mapping[str, float]) -> str:
    """Epochs of the text; of a mixture, those of the most repeated texts, by name."""
    if list(epochs) == [""]:
        return f"{epochs['']:.2f}"
    most = sorted(epochs.items(), key=lambda item: -item[1])[:_MOST_EPOCHS]
    more = ", ..." if len(epochs) > len(most) else ""
    return ", ".join(f"{Path(name).name} {passes:.2f}" for name, passes in most) + more


def exposed_text(metrics: StepMetrics) -> str:
    """The exposed share of communication; of the step, if communication is not timed."""
    share = metrics.exposed_comm_share
    if share is not None:
        return f"{share:.0%}"
    return f"{metrics.exposed_step_share:.0%} of step"


def plain_line(metrics: StepMetrics, history: RunHistory) -> str:
    """One step as a line of a log."""
    width = len(str(history.total))
    cells = figures(metrics, metrics.evaluated) | {"left": duration(history.seconds_left() or 0.0)}
    shown = "".join(f"  {name} {value}" for name, value in cells.items())
    return f"step {history.done:>{width}}/{history.total}{shown}"


def summary_lines(
    history: RunHistory, sample: str, files: Mapping[str, str | Path], interrupted: bool
) -> list[str]:
    """The closing summary: figures, sample, files."""
    word = "stopped" if interrupted else "finished"
    lines = [
        "",
        f"{word} after {history.done}/{history.total} steps, {duration(history.elapsed())}",
    ]
    if history.last is not None:
        lines.append(f"  loss        {_loss_text(history.losses)}")
        if skipped := history.last.skipped_steps:
            steps = "1 step" if skipped == 1 else f"{skipped} steps"
            lines.append(f"  skipped     {steps}: gradients were not finite")
        for name, loss in history.evaluated.items():
            lines.append(f"  {_brief(name):<11} {loss:.4f}")
        rate = statistics.median(history.rates)
        lines.append(f"  throughput  {rate:,.0f} tokens/s (median), {history.tokens:,} tokens")
        lines.append(f"  peak memory {human(history.last.peak_memory_bytes)} on this rank")
    if sample:
        lines += ["", "sample:"] + ["  | " + line for line in printable(sample).split("\n")]
    if files:
        width = max(len(name) for name in files)
        lines += ["", "files:"] + [f"  {name:<{width}}  {path}" for name, path in files.items()]
    return lines


def _loss_text(losses: Sequence[float]) -> str:
    """The first finite loss and the mean of the last ones (a single step's batch says little).

    A loss that is not finite counts among the last steps, but not in their mean.
    """
    ending = losses[-LAST_STEPS:]
    last = [loss for loss in ending if math.isfinite(loss)]
    first = next((loss for loss in losses if math.isfinite(loss)), losses[0])
    if not last:
        return f"{first:.4f} -> not finite in the last {len(ending)} steps"
    of = "" if len(last) == len(ending) else f"{len(last)} finite ones of "
    mean = f" (mean of {of}the last {len(ending)} steps)" if len(ending) > 1 else ""
    return f"{first:.4f} -> {statistics.fmean(last):.4f}{mean}"


def duration(seconds: float) -> str:
    """``75.2`` -> ``1:15``; with hours ``2:03:09``."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """``values`` as at most ``width`` block characters; a space where none is finite."""
    if not values:
        return ""
    count = min(width, len(values))
    means = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        finite = [v for v in part if math.isfinite(v)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = [m for m in means if math.isfinite(m)]
    if not known:
        return " " * count
    low, span = min(known), (max(known) - min(known)) or 1.0
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round((m - low) / span * top)] if m == m else " " for m in means)
