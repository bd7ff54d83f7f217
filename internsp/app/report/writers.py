"""Writers of metrics for other programs (``report.writers``), in addition to ``metrics.jsonl``.

Only rank 0 writes, each program's files in a thread of their own. A writer that fails or hangs is
reported once; it neither ends the run nor delays it.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from internsp.app.config import Config
from internsp.app.report.metrics import StepMetrics
from internsp.errors import InternspError, MissingDependencyError

_MOST_ROWS = 20_000  # largest number of rows that wait for a writer
_SECONDS = 90.0  # limit for a writer to write its remaining rows at the end


class Writer(Protocol):
    """Writes one program's files. All methods but the constructor run in one thread."""

    location: str
    """The location of the files, and how to open them."""

    def begin(self) -> None:
        """Do slow work before the first row."""
        ...

    def write(self, row: StepMetrics) -> None:
        """Write one row, under the names of :func:`internsp.app.report.metrics.named`."""
        ...

    def close(self, well: bool) -> None:
        """Finish: no more rows follow; ``well``: whether the run has not failed."""
        ...


def missing_packages(config: Config) -> Iterator[MissingDependencyError]:
    """An error for each chosen writer whose package is not installed."""
    for name in config.report.writers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # W&B leaves folders with the package's name
            yield MissingDependencyError(
                f'report.writers: "{name}" needs a package that is not installed: '
                f"pip install 'internsp[{name}]', or pip install {name}"
            )


class Writers:
    """The chosen writers of a run, none of which can end it.

    Args:
        folder: folder of the run; each writer has a folder of its own name in it.
        run: id of the run.
        rows: rows in ``metrics.jsonl`` so far. Later steps that an earlier process wrote are
            replaced.
        notify: called with a message for the user.

    Raises:
        MissingDependencyError: a writer's package is not installed.
        ConfigError: a server is to be used, and there is no login to it.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        run: str,
        rows: Sequence[StepMetrics],
        done: int,
        notify: Callable[[str], None],
    ) -> None:
        for error in missing_packages(config):
            raise error
        self._notify = notify
        self._open: dict[str, _Feeder] = {}
        for name in config.report.writers:
            try:
                writer = _make_writer(name, config, folder, run, rows, done, notify)
            except InternspError:
                raise
            except Exception as error:  # noqa: BLE001 - of another program: the run goes on
                self._report_failure(name, _in_words(error))
            else:
                self._open[name] = _Feeder(name, writer)

    @property
    def files(self) -> dict[str, str]:
        """Location of the files, by writer."""
        return {name: feeder.writer.location for name, feeder in self._open.items()}

    def write(self, row: StepMetrics) -> None:
        """Queue one row for each writer; does not block."""
        for name, feeder in list(self._open.items()):
            if failed := feeder.failed or feeder.put(row):
                del self._open[name]
                self._report_failure(name, failed)

    def close(self, well: bool = True) -> None:
        """Finish all writers; waits at most 90 s for each. May be called more than once."""
        while self._open:
            name, feeder = self._open.popitem()
            if failed := feeder.failed or feeder.finish(well):
                self._report_failure(name, failed)

    def _report_failure(self, name: str, failed: str) -> None:
        self._notify(f"report.writers: {name} failed ({failed}); the run goes on without it")


class _Feeder:
    """Passes rows to a writer in a daemon thread, so that a writer that hangs can be abandoned.

    Attributes:
        failed: why the writer takes no more rows; empty if it does.
    """

    def __init__(self, name: str, writer: Writer) -> None:
        self.writer, self.failed = writer, ""
        self._rows: queue.Queue[StepMetrics | None] = queue.Queue(_MOST_ROWS)
        self._well = False
        self._thread = threading.Thread(target=self._feed, name=f"internsp {name}", daemon=True)
        self._thread.start()

    def put(self, row: StepMetrics | None) -> str:
        """Queue a row for the thread (``None``: close); returns why it cannot, or ""."""
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.failed = f"it has not taken the last {_MOST_ROWS:,} rows"
        return self.failed

    def finish(self, well: bool) -> str:
        """Wait until the remaining rows are written; returns what failed, or ""."""
        self._well = well
        if not self.put(None):
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
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _make_writer(
    name: str,
    config: Config,
    folder: Path,
    run: str,
    rows: Sequence[StepMetrics],
    done: int,
    notify: Callable[[str], None],
) -> Writer:
    # Imported here: the packages are optional, and each takes a second to import.
    if name == "tensorboard":
        from internsp.app.report.tensorboard import TensorBoard

        return TensorBoard(config, folder, done)
    from internsp.app.report.weights_biases import WeightsAndBiases

    return WeightsAndBiases(config, folder, run, rows, notify)
