"""A run's metrics as TensorBoard's event files (extra ``[tensorboard]``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from internsp.app.config import Config
from internsp.app.report.metrics import StepMetrics, named


class TensorBoard:
    """Writes ``tensorboard/`` in a run's folder; each row is flushed before :meth:`write` returns.

    Args:
        folder: folder of the run.
        done: number of finished steps that the run resumes from. Later steps of an earlier process
            are discarded: the new file starts with a marker that makes readers drop them
            (``purge_step``).
    """

    def __init__(self, config: Config, folder: Path, done: int) -> None:
        path = folder / "tensorboard"
        self.location = f"tensorboard --logdir {path}"
        self._writer = SummaryWriter(str(path), purge_step=done + 1)
        self._writer.add_text("config", _as_code(config.to_toml()), 0)
        numbers = (bool, int, float, str)
        settings = {k: v if isinstance(v, numbers) else str(v) for k, v in _flat(config).items()}
        experiment, started, _ = hparams(settings, {"train/loss": None, "eval/held-out": None})
        files = self._writer.file_writer
        assert files is not None, "made by the constructor"
        for summary in (experiment, started):
            files.add_summary(summary)

    def begin(self) -> None:
        """Do nothing."""

    def write(self, row: StepMetrics) -> None:
        """Write one point for each number of the row."""
        for name, value in named(row).items():
            self._writer.add_scalar(name, value, row.step)
        self._writer.flush()

    def close(self, well: bool) -> None:
        """Write the remaining rows and close the file."""
        self._writer.close()


def _as_code(text: str) -> str:
    """Indent the text so that Markdown shows it unchanged."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _flat(config: Config) -> dict[str, Any]:
    """The configuration by ``section.key``, in JSON types."""
    dumped = config.model_dump(mode="json")
    return {f"{s}.{key}": value for s, keys in dumped.items() for key, value in keys.items()}
