"""A run that torchrun restarts: rank 1 kills itself once a checkpoint is valid.

``-m tests.support.restarted FOLDER``: first all tensor files of the checkpoint are removed or
damaged, so that only the copies in memory are left. A copy of the checkpoints in that state is kept
next to the folder under :data:`LOST`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from internsp.app.process.lifetime import end_with_launcher
from internsp.app.train.run import train
from internsp.pipeline import SchedulerHook
from tests.ranks.test_checkpoint_meshes import config

STEPS = 16
LOST = "lost"


class Killed(SchedulerHook):
    """Checks before each forward whether there is a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = folder / "checkpoints" / "step-000003"

    def before_forward(self, *_: Any, **__: Any) -> None:
        """Damage the checkpoint and kill rank 1, once."""
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and os.environ["RANK"] == "1" and (self._checkpoint / "manifest.json").exists():
            (self._checkpoint / "rank-00001.safetensors").unlink()
            with (self._checkpoint / "rank-00000.safetensors").open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\xff")
            run = self._checkpoint.parents[1]
            shutil.copytree(run / "checkpoints", run.with_name(LOST) / "checkpoints")
            os.kill(os.getpid(), signal.SIGKILL)


def settings(**checkpoint: Any) -> Any:
    """Save at step 3 only, so that there is no other checkpoint to resume from."""
    checkpoint = {"every": 3, "keep_last": 1, **checkpoint}
    return config({"weight": 2}, train={"steps": STEPS}, checkpoint=checkpoint)


def main() -> None:
    """Run one rank."""
    end_with_launcher()
    folder = Path(sys.argv[1])
    train(settings(peer=True), folder, [Killed(folder)])


if __name__ == "__main__":
    main()
