"""Metrics for TensorBoard and Weights & Biases (``report.writers``), beside ``metrics.jsonl``.

Only rank 0 writes. A writer that fails is reported once, and the run goes on without it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from internsp.app.config import Config
from internsp.app.report.metrics import StepMetrics, named
from internsp.errors import ConfigError, InternspError, MissingDependencyError

_SECONDS = 60  # limit for a server's answer, at the beginning and at the end


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
    """The chosen writers of a run, none of which can end it once it has begun.

    Args:
        folder: folder of the run; each writer has a folder of its own name in it.
        run: id of the run, also the id of W&B's run.
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
        notify: Callable[[str], None],
    ) -> None:
        for error in missing_packages(config):
            raise error
        self._notify = notify
        self._open: dict[str, _TensorBoard | _WeightsAndBiases] = {}
        for name in config.report.writers:
            make = _TensorBoard if name == "tensorboard" else _WeightsAndBiases
            try:
                self._open[name] = make(config, folder, run, rows)
            except InternspError:
                raise
            except Exception as error:  # noqa: BLE001 - of another program: the run goes on
                self._report_failure(name, error)

    @property
    def files(self) -> dict[str, str]:
        """Where each writer's files are, or the command that shows them, by writer."""
        return {name: writer.location for name, writer in self._open.items()}

    def write(self, row: StepMetrics) -> None:
        """Write one row, under the names of :func:`internsp.app.report.metrics.named`."""
        self._each(lambda writer: writer.write(row))

    def close(self, well: bool = True) -> None:
        """Finish all writers (``well``: the run has not failed); may be called more than once."""
        self._each(lambda writer: writer.close(well))
        self._open.clear()

    def _each(self, call: Callable[[Any], None]) -> None:
        for name, writer in list(self._open.items()):
            try:
                call(writer)
            except Exception as error:  # noqa: BLE001 - of another program: the run goes on
                del self._open[name]
                self._report_failure(name, error)

    def _report_failure(self, name: str, error: Exception) -> None:
        why = " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])
        self._notify(f"report.writers: {name} failed ({why}); the run goes on without it")


class _TensorBoard:
    """Event files in ``tensorboard/``. Each row is on the disk when :meth:`write` returns."""

    def __init__(self, config: Config, folder: Path, run: str, rows: Sequence[StepMetrics]) -> None:
        # Imported here, as wandb is: the package is optional and takes a second to import.
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "tensorboard"
        self.location = f"tensorboard --logdir {path}"
        # Readers drop the steps from purge_step on that an earlier process wrote.
        self._writer = SummaryWriter(str(path), purge_step=rows[-1].step + 1 if rows else 1)
        code = "".join(f"    {line}\n" for line in config.to_toml().splitlines())  # as Markdown
        self._writer.add_text("config", code, 0)

    def write(self, row: StepMetrics) -> None:
        for name, value in named(row).items():
            self._writer.add_scalar(name, value, row.step)
        self._writer.flush()

    def close(self, well: bool) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Files in ``wandb/``, or with WANDB_MODE=online rows sent to a server.

    Offline, a resumed run writes a new folder with all rows so far in place of the old ones, so
    that there is one folder to sync. Online, steps that the server has are not sent again.
    """

    def __init__(self, config: Config, folder: Path, run: str, rows: Sequence[StepMetrics]) -> None:
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        if mode != "online":  # read at import; else it sends reports of errors and of use
            os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        path = folder / "wandb"
        older = list(path.glob(f"offline-run-*-{run}"))
        path.mkdir(parents=True, exist_ok=True)
        patience = min(_SECONDS, config.parallel.timeout_seconds / 2)  # other ranks wait meanwhile
        try:
            self._run = wandb.init(
                mode=mode,
                project=os.environ.get("WANDB_PROJECT", "internsp"),
                id=run,
                name=config.train.name,
                dir=str(folder),
                config=config.model_dump(mode="json"),
                resume="allow",
                reinit="create_new",  # a program's own W&B run continues beside it
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, save_code=False,
                    x_disable_stats=True, init_timeout=patience, finish_timeout=_SECONDS,
                ),
            )  # fmt: skip
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(
                f"report.writers: wandb: {str(error).splitlines()[0]} Without a server: "
                "WANDB_MODE=offline"
            ) from None
        self._first = self._run.starting_step  # the server has the steps before this one
        if mode == "offline":
            self.location = f"wandb sync {Path(self._run.dir).parent}"
            for row in rows:
                self.write(row)
            for old in older:  # all their rows are in the new folder
                shutil.rmtree(old, ignore_errors=True)
        else:
            self.location = str(self._run.url or mode)

    def write(self, row: StepMetrics) -> None:
        if row.step >= self._first:
            self._run.log(named(row), step=row.step)

    def close(self, well: bool) -> None:
        self._run.finish(exit_code=0 if well else 1)
