"""Alerts of a run: rank 0 runs the command ``report.alert`` with a message as its last argument.

There are four kinds: the run fails, a step is skipped (or its loss is not finite), a spike, and a
slow rank. Of one kind, at most one alert is sent in ten minutes. The command is run without a
shell, without input, and its output is discarded. It neither ends the run nor delays it: a thread
waits for it, and kills it after a minute; what still runs three seconds after the run is left to
itself.
"""

from __future__ import annotations

import math
import shlex
import shutil
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

from internsp.app.report.metrics import StepMetrics
from internsp.base.background import in_background
from internsp.errors import ConfigError
from internsp.failure.objects import Objects

_AGAIN = 600.0  # seconds between two alerts of one kind
_SECONDS = 60.0  # limit for the command
_LAST_SECONDS = 3.0  # of waiting for it at the end: a launcher ends ranks 4 s after a failed one
_REMEMBERED, _FEWEST = 50, 10  # steps before, whose median a spike is compared with
_LOSS_SPIKE, _NORM_SPIKE = 2.0, 10.0  # times the median
_SLOW = 1.5  # times the median of the ranks


class Alerts:
    """Sends alerts.

    Args:
        command: ``report.alert``; ``None``, as on all ranks but 0: nothing is sent.
        title: name of the run, with which each message begins.

    Attributes:
        notify: called with a message for the user: what became of the command.

    Raises:
        ConfigError: there is no such command.
    """

    def __init__(self, command: str | None, title: str) -> None:
        self._words, self._title = shlex.split(command or ""), title
        self._sent: dict[str, float] = {}
        self._running: list[Future[None]] = []
        self.notify: Callable[[str], None] = print
        if self._words and shutil.which(self._words[0]) is None:
            raise ConfigError(
                f"report.alert: rank 0 finds no command {self._words[0]!r}: give its whole path"
            )

    def send(self, kind: str, text: str) -> None:
        """Run the command with ``text``, if none of this ``kind`` was sent lately; do not wait."""
        now = time.monotonic()
        if not self._words or now < self._sent.get(kind, -math.inf) + _AGAIN:
            return
        self._sent[kind] = now
        words = [*self._words, f"{self._title}: {text}"]
        self._running.append(in_background(partial(self._run, words), "alert"))

    def close(self) -> None:
        """Wait for commands that still run, three seconds at most."""
        wait(self._running, _LAST_SECONDS)

    def _run(self, words: Sequence[str]) -> None:
        nothing = subprocess.DEVNULL
        try:
            subprocess.run(
                words, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True,
                timeout=_SECONDS, check=True,
            )  # fmt: skip
        except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: a NUL
            self.notify(f"report.alert: {error}")


class Spikes:
    """Reports a step whose loss or gradient norm is far above those of the steps before.

    A loss above twice, and a gradient norm above ten times the median of the last 50 steps (of at
    least 10).
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)

    def check(self, metrics: StepMetrics) -> str:
        """A message about this step; empty if there is no spike."""
        messages = []
        for what, value, before, ratio in (
            ("loss", metrics.loss, self._losses, _LOSS_SPIKE),
            ("gradient norm", metrics.grad_norm, self._norms, _NORM_SPIKE),
        ):
            if not math.isfinite(value):
                continue  # reported by `finite.remark`
            usual = statistics.median(before) if len(before) >= _FEWEST else math.inf
            if value > ratio * usual:
                messages.append(
                    f"step {metrics.step}: the {what} is {value:.4g}, {value / usual:.1f} times "
                    f"the median of the {len(before)} steps before"
                )
            before.append(value)
        return "; ".join(messages)


class SlowRanks:
    """Finds ranks that compute for longer than others, every 50 steps.

    Ranks wait for each other, so that their steps take equally long: what differs is the part in
    which a rank does not wait. Stages of a pipeline have different work and are not compared.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._own: list[float] = []
        self._steps = 0

    def check(self, metrics: StepMetrics) -> str:
        """A message about slow ranks; empty if there is none. Collective, every 50th call."""
        self._steps += 1
        if metrics.exposed_comm_seconds is not None:  # on a device: of one step in ten
            waited = metrics.exposed_comm_seconds + (metrics.stage_wait_seconds or 0.0)
            self._own.append(metrics.step_seconds - waited)
        if self._steps % _REMEMBERED:
            return ""
        found = Objects().gather((self._stage, statistics.median(self._own)))
        self._own.clear()
        return slow_ranks(found)


def slow_ranks(found: Sequence[tuple[int, float]]) -> str:
    """A message about ranks that take 1.5 times the median of their stage; empty if there is none.

    Args:
        found: (stage, seconds of a step in which it did not wait) of each rank.
    """
    lines = []
    for rank, (stage, seconds) in enumerate(found):
        usual = statistics.median_low([other for at, other in found if at == stage])
        if seconds > _SLOW * usual:
            lines.append(f"rank {rank} computes {seconds:.3g} s of a step, others {usual:.3g} s")
    return f"{'; '.join(lines)} (medians of {_REMEMBERED} steps)" if lines else ""
