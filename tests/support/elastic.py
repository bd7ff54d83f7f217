"""``internsp`` under torchrun, with faults: ``-m tests.support.elastic train ...``.

Environment variables choose the faults: ``INTERNSP_DIE`` is ``RESTART RANK STEP`` (the rank is
killed before that step of that restart), ``INTERNSP_SLOW`` the least duration of a step in seconds,
and ``INTERNSP_WAIT`` a step before which a rank that runs alone waits for a stop request.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from internsp.app.cli import main
from internsp.app.process.stop import StopRequest
from internsp.app.train.step import StepRunner


def faulty() -> None:
    """Slow down steps, and kill one rank."""
    step = StepRunner.step
    dies = [int(word) for word in os.environ.get("INTERNSP_DIE", "").split()]
    here = [int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK")]
    pause = float(os.environ.get("INTERNSP_SLOW", "0"))
    alone = os.environ["WORLD_SIZE"] == "1"
    waits = int(os.environ.get("INTERNSP_WAIT", "0"))

    def wrong(self: Any, number: int, stop: StopRequest, **options: Any) -> Any:
        if [*here, number + 1] == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)
        while alone and number + 1 == waits and not stop.requested:
            time.sleep(0.05)
        return step(self, number, stop, **options)

    StepRunner.step = wrong  # type: ignore[method-assign]


if __name__ == "__main__":
    faulty()
    sys.exit(main())
