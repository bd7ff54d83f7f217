"""Metrics for programs that draw them, beside ``metrics.jsonl``: ``report.writers``.

Rank 0 alone writes, each program's files by a thread of their own. What fails here, or is stuck, is
told once, and neither ends a run nor holds it up.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from internsp.config import Config
from internsp.errors import InternspError, MissingDependencyError
from internsp.report.metrics import StepMetrics

_MOST_ROWS = 20_000  # that wait for a program
_SECONDS = 90.0  # that one may take for what is left at the end


class Writer(Protocol):
    """One program's files of a run. All but the constructor is called by one thread."""

    place: str
    """Where they are, and how to look at them."""

    def begin(self) -> None:
        """What takes long, before the first row."""
        ...

    def write(self, row: StepMetrics) -> None:
        """Hand one row over, under the names of :func:`internsp.report.metrics.named`."""
        ...

    def close(self, well: bool) -> None:
        """No more comes; ``well``: the run has not failed."""
        ...


def missing_packages(config: Config) -> Iterator[MissingDependencyError]:
    """Of the chosen writers, those whose package is not installed."""
    for name in config.report.writers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # W&B leaves folders of its own name behind
            yield MissingDependencyError(
                f'report.writers: "{name}" needs a package that is not installed: '
                f"pip install 'internsp[{name}]', or pip install {name}"
            )


class Writers:
    """The chosen writers of a run, none of which can end it.

    Args:
        folder: of the run; each writer has a folder of its name in it.
        run: id of the run.
        rows: what ``metrics.jsonl`` has of the run so far. The next row follows these: what an
            earlier process has written of later steps is replaced.
        told: called with a sentence for the user.

    Raises:
        MissingDependencyError: a writer's package is not installed.
        ConfigError: a server is to be used, and there is no login to it here.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        run: str,
        rows: Sequence[StepMetrics],
        done: int,
        told: Callable[[str], None],
    ) -> None:
        for error in missing_packages(config):
            raise error
        self._told = told
        self._open: dict[str, _Feeder] = {}
        for name in config.report.writers:
            try:
                writer = _made(name, config, folder, run, rows, done, told)
            except InternspError:
                raise
            except Exception as error:  # noqa: BLE001 - of another program: the run does without
                self._say(name, _in_words(error))
            else:
                self._open[name] = _Feeder(name, writer)

    @property
    def files(self) -> dict[str, str]:
        """Where the files are, by writer."""
        return {name: feeder.writer.place for name, feeder in self._open.items()}

    def write(self, row: StepMetrics) -> None:
        """Hand one row to each; does not wait."""
        for name, feeder in list(self._open.items()):
            if failed := feeder.failed or feeder.give(row):
                del self._open[name]
                self._say(name, failed)

    def close(self, well: bool = True) -> None:
        """Finish all, waiting for each at most a minute and a half; more than once is fine."""
        while self._open:
            name, feeder = self._open.popitem()
            if failed := feeder.failed or feeder.finish(well):
                self._say(name, failed)

    def _say(self, name: str, failed: str) -> None:
        self._told(f"report.writers: {name} failed ({failed}); the run goes on without it")


class _Feeder:
    """Gives rows to a writer in a thread, which may be stuck for good: the process ends without it.

    Attributes:
        failed: why no more rows are taken; empty: they are.
    """

    def __init__(self, name: str, writer: Writer) -> None:
        self.writer, self.failed = writer, ""
        self._rows: queue.Queue[StepMetrics | None] = queue.Queue(_MOST_ROWS)
        self._well = False
        self._thread = threading.Thread(target=self._feed, name=f"internsp {name}", daemon=True)
        self._thread.start()

    def give(self, row: StepMetrics | None) -> str:
        """Have the thread write a row (``None``: close); why it cannot."""
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.failed = f"it has not taken the last {_MOST_ROWS:,} rows"
        return self.failed

    def finish(self, well: bool) -> str:
        """Wait for what is left; what has failed."""
        self._well = well
        if not self.give(None):
            self._thread.join(_SECONDS)
            if self._thread.is_alive():
                self.failed = f"it has not ended in {_SECONDS:.0f} s"
        return self.failed

    def _feed(self) -> None:
        try:
            self.writer.begin()
            while (row := self._rows.get()) is not None:
                self.writer.write(row)
            self.writer.close(self._well)
        except Exception as error:  # noqa: BLE001 - of another program: the run goes on
            self.failed = _in_words(error)
            with suppress(Exception):
                self.writer.close(well=False)


def _in_words(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def _made(
    name: str,
    config: Config,
    folder: Path,
    run: str,
    rows: Sequence[StepMetrics],
    done: int,
    told: Callable[[str], None],
) -> Writer:
    # Imported here: optional packages, of which each takes a second.
    if name == "tensorboard":
        from internsp.report.tensorboard import TensorBoard

        return TensorBoard(config, folder, done)
    from internsp.report.weights_biases import WeightsAndBiases

    return WeightsAndBiases(config, folder, run, rows, told)
