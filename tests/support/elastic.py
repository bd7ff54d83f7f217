"""``internsp`` as torchrun starts it, with faults: ``-m tests.support.elastic train ...``.

The environment says what happens: ``INTERNSP_DIE`` is ``RESTART RANK STEP`` (the rank is killed
before that step of that start), ``INTERNSP_SLOW`` how many seconds a step takes at least, and
``INTERNSP_WAIT`` a step before which a rank that is alone waits until it is asked to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from internsp.cli import main
from internsp.train.step import StepRunner
from internsp.train.stop import StopRequest


def faulty() -> None:
    """Steps are late, and one kills its rank."""
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
