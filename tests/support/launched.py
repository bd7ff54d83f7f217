"""A launcher for tests that kill it, send SIGHUP, or request a stop.

Two local ranks write ``rankN`` (their process id), wait for a stop request, then write ``savedN``.
Under torchrun (``-m tests.support.launched FOLDER``) each process is one rank.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from internsp.app.config import Config
from internsp.app.config.sections import LaunchConfig
from internsp.app.process.lifetime import end_with_launcher
from internsp.app.process.stop import StopRequest


def wait(config: Config, folder: Path, stop: StopRequest) -> None:
    """The function that each rank runs."""
    rank = os.environ["RANK"]
    partial = folder / f"partial{rank}"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / f"rank{rank}")
    while not stop.requested:
        time.sleep(0.02)
    (folder / f"saved{rank}").touch()


def main() -> int:
    """Run the launcher, or one rank under torchrun."""
    folder = Path(sys.argv[1])
    if "RANK" in os.environ:
        end_with_launcher()
        with StopRequest() as stop:
            wait(Config(), folder, stop)
        return 0
    from internsp.app.launch.launch import (
        start,  # imports torch, which a torchrun rank does not need here
    )

    return start(wait, Config(launch=LaunchConfig(processes=2)), folder)


if __name__ == "__main__":
    sys.exit(main())
