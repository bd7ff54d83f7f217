"""A run's metrics for Weights & Biases (extra ``[wandb]``): as files, or sent with ``online``."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from internsp.app.config import Config
from internsp.app.report.metrics import StepMetrics, named
from internsp.errors import ConfigError

_SECONDS = 60.0  # limit for a server's answer, at the beginning and at the end


class WeightsAndBiases:
    """Writes ``wandb/`` in a run's folder, or sends the rows to a server.

    Offline, a resumed run writes a new folder with all rows so far and deletes the old ones, so
    that there is one folder to sync and no step twice. Online, steps that the server already has
    are not sent again.

    Args:
        folder: folder of the run.
        run: id of the run, also used as the id of W&B's run.
        rows: rows of earlier steps.
        notify: called with a message for the user.

    Raises:
        ConfigError: there is no login to W&B.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        run: str,
        rows: Sequence[StepMetrics],
        notify: Callable[[str], None],
    ) -> None:
        online = config.report.wandb_mode == "online"
        if not online:
            # wandb reads this when it is imported and when it starts its process: otherwise it
            # would send reports of errors and of its use, even offline.
            os.environ["WANDB_ERROR_REPORTING"] = "false"
        wandb = _import_wandb(folder / "wandb")
        patience = min(_SECONDS, config.parallel.timeout_seconds / 2)  # other ranks wait meanwhile
        older = list((folder / "wandb").glob(f"offline-run-*-{run}"))
        self._run: Any = _init_run(
            wandb,
            mode=config.report.wandb_mode,
            id=run,
            name=config.train.name,
            project=config.report.wandb_project,
            entity=config.report.wandb_entity,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            resume="allow",
            reinit="create_new",  # a program's own W&B run continues in parallel
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False,
                x_disable_stats=True, init_timeout=patience, finish_timeout=_SECONDS,
            ),
        )  # fmt: skip
        self._notify, self._said = notify, False
        self._next = int(self._run.starting_step)  # the server has the steps before this one
        self._again: Sequence[StepMetrics]
        self._older: list[Path]
        path = Path(self._run.dir).parent
        self.location = str(self._run.url) if online else f"wandb sync {path}"
        if online:
            notify(f"Weights & Biases: {self.location}")
        self._again, self._older = ([], []) if online else (rows, older)

    def begin(self) -> None:
        """Offline, write the rows so far."""
        for row in self._again:
            self.write(row)
        for folder in self._older:  # all their rows are in the new folder
            shutil.rmtree(folder, ignore_errors=True)
        self._again, self._older = [], []

    def write(self, row: StepMetrics) -> None:
        """Log one point for each number of the row."""
        if row.step < self._next:
            if not self._said:
                self._said = True
                self._notify(
                    f"Weights & Biases has steps up to {self._next - 1} already: those points stay"
                )
            return
        self._run.log(named(row), step=row.step)

    def close(self, well: bool) -> None:
        """Write, or send, the remaining rows; takes at most a minute."""
        self._run.finish(exit_code=0 if well else 1)


def _init_run(wandb: Any, **options: Any) -> Any:
    try:
        return wandb.init(**options)
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        raise ConfigError(
            f"report.writers: wandb: {str(error).splitlines()[0]} Without a server: "
            'report.wandb_mode = "offline"'
        ) from None


def _import_wandb(folder: Path) -> Any:
    """Import wandb. It creates temporary folders on import, which a rank's process would leave
    behind, as it ends like multiprocessing's processes do; so they are created in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("tmp*"):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder.absolute())
    try:
        import wandb
    finally:
        tempfile.tempdir = before
    for made in folder.glob("tmp*"):
        Finalize(None, shutil.rmtree, (made, True), exitpriority=0)
    return wandb
