"""A run's metrics as TensorBoard's event files (extra ``[tensorboard]``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from internsp.config import Config
from internsp.report.metrics import StepMetrics, named


class TensorBoard:
    """Writes ``tensorboard/`` in a run's folder; each row is on its way to disk when it returns.

    Args:
        folder: of the run.
        done: steps that it goes on from. Later ones of an earlier process are taken back: the new
            file begins with a mark by which every reader drops them (``purge_step``).
    """

    def __init__(self, config: Config, folder: Path, done: int) -> None:
        path = folder / "tensorboard"
        self.place = f"tensorboard --logdir {path}"
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
        """Nothing takes long."""

    def write(self, row: StepMetrics) -> None:
        """A point of each number."""
        for name, value in named(row).items():
            self._writer.add_scalar(name, value, row.step)
        self._writer.flush()

    def close(self, well: bool) -> None:
        """Write what is left."""
        self._writer.close()


def _as_code(text: str) -> str:
    """As Markdown shows it unchanged."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _flat(config: Config) -> dict[str, Any]:
    """The configuration by ``section.key``, in types of JSON."""
    dumped = config.model_dump(mode="json")
    return {f"{s}.{key}": value for s, keys in dumped.items() for key, value in keys.items()}
