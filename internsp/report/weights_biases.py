"""A run's metrics for Weights & Biases (extra ``[wandb]``): files, unless ``online`` is said."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from internsp.config import Config
from internsp.errors import ConfigError
from internsp.report.metrics import StepMetrics, named

_SECONDS = 60.0  # that a server may take, at the beginning and at the end


class WeightsAndBiases:
    """Writes ``wandb/`` in a run's folder, or sends the rows.

    Offline, a run that goes on begins a folder with all rows so far, in place of the one before:
    there is one folder to sync, without a step twice. Online, steps that the server has are not
    sent again.

    Args:
        folder: of the run.
        run: its id, which is that of W&B's run, too.
        rows: of the steps before.
        told: called with a sentence for the user.

    Raises:
        ConfigError: there is no login to W&B here.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        run: str,
        rows: Sequence[StepMetrics],
        told: Callable[[str], None],
    ) -> None:
        online = config.report.wandb_mode == "online"
        if not online:
            # Read when wandb is imported and when it starts its process: its reports of errors and
            # use would go out, offline or not.
            os.environ["WANDB_ERROR_REPORTING"] = "false"
        wandb = _imported(folder / "wandb")
        patience = min(_SECONDS, config.parallel.timeout_seconds / 2)  # the other ranks wait
        older = list((folder / "wandb").glob(f"offline-run-*-{run}"))
        self._run: Any = _begun(
            wandb,
            mode=config.report.wandb_mode,
            id=run,
            name=config.train.name,
            project=config.report.wandb_project,
            entity=config.report.wandb_entity,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            resume="allow",
            reinit="create_new",  # a program's own run of W&B goes on beside
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False,
                x_disable_stats=True, init_timeout=patience, finish_timeout=_SECONDS,
            ),
        )  # fmt: skip
        self._told, self._said = told, False
        self._next = int(self._run.starting_step)  # the server has those before
        self._again: Sequence[StepMetrics]
        self._older: list[Path]
        path = Path(self._run.dir).parent
        self.place = str(self._run.url) if online else f"wandb sync {path}"
        if online:
            told(f"Weights & Biases: {self.place}")
        self._again, self._older = ([], []) if online else (rows, older)

    def begin(self) -> None:
        """Offline, the rows so far."""
        for row in self._again:
            self.write(row)
        for folder in self._older:  # their rows are all in the new one
            shutil.rmtree(folder, ignore_errors=True)
        self._again, self._older = [], []

    def write(self, row: StepMetrics) -> None:
        """A point of each number."""
        if row.step < self._next:
            if not self._said:
                self._said = True
                self._told(
                    f"Weights & Biases has steps up to {self._next - 1} already: those points stay"
                )
            return
        self._run.log(named(row), step=row.step)

    def close(self, well: bool) -> None:
        """Write, or send, what is left; at most a minute."""
        self._run.finish(exit_code=0 if well else 1)


def _begun(wandb: Any, **options: Any) -> Any:
    try:
        return wandb.init(**options)
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        raise ConfigError(
            f"report.writers: wandb: {str(error).splitlines()[0]} Without a server: "
            'report.wandb_mode = "offline"'
        ) from None


def _imported(folder: Path) -> Any:
    """The package. It makes temporary folders when it is imported, which a rank's process, ending
    as those of multiprocessing do, would leave behind: they are made in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("tmp*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder.absolute())
    try:
        import wandb
    finally:
        tempfile.tempdir = before
    for made in folder.glob("tmp*"):
        Finalize(None, shutil.rmtree, (made, True), exitpriority=0)
    return wandb
