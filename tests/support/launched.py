"""A launcher to be killed, hung up on and asked to stop.

Two local ranks write ``rankN`` (their process id) and wait to be asked, then write ``savedN``.
Under torchrun (``-m tests.support.launched FOLDER``) each process is a rank of its own.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from internsp.cli.lifetime import end_with_launcher
from internsp.config import Config, LaunchConfig
from internsp.train.stop import StopRequest


def wait(config: Config, folder: Path) -> None:
    """What each rank runs."""
    rank = os.environ["RANK"]
    with StopRequest() as stop:
        partial = folder / f"partial{rank}"
        partial.write_text(str(os.getpid()))
        partial.rename(folder / f"rank{rank}")
        while not stop.requested:
            time.sleep(0.02)
    (folder / f"saved{rank}").touch()


def main() -> int:
    """The launcher, or a rank of torchrun."""
    folder = Path(sys.argv[1])
    if "RANK" in os.environ:
        end_with_launcher()
        wait(Config(), folder)
        return 0
    from internsp.cli.launch import start  # loads torch, which no rank of torchrun needs here

    return start(wait, Config(launch=LaunchConfig(processes=2)), folder)


if __name__ == "__main__":
    sys.exit(main())
