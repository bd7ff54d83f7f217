"""How long a checkpoint stops training, compared with only copying its tensors to host memory.

Run ``python -m tools.bench_checkpoint [--mebibytes 512] [--saves 15] [--folder DIR]``. The two are
measured alternately, as pairs, in processor time, which other programs on the machine do not
affect, and in wall-clock time, which is what a run waits for. Prints the median of each, and the
median ratio of the pairs with its 95 % confidence interval (from order statistics, which are
robust against outliers).
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from internsp.app.checkpoint.checkpoint import state_of
from internsp.app.checkpoint.saver import Saver
from internsp.app.config import Config
from internsp.app.process.stop import StopRequest
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner


@dataclass(frozen=True)
class Pairs:
    """Seconds for which a save stopped training, and those of a copy alone next to it."""

    stalls: list[float]
    copies: list[float]

    def line(self, clock: str) -> str:
        """The result as a sentence."""
        ratios = sorted(s / c for s, c in zip(self.stalls, self.copies, strict=True))
        low, high = interval(len(ratios))
        return (
            f"{clock}: training stops for {statistics.median(self.stalls) * 1e3:.1f} ms, the copy "
            f"alone takes {statistics.median(self.copies) * 1e3:.1f} ms; of {len(ratios)} pairs "
            f"the median is {statistics.median(ratios):.3f} of it (95 %: {ratios[low]:.3f} to "
            f"{ratios[high]:.3f})"
        )


def interval(count: int) -> tuple[int, int]:
    """Indexes in ``count`` sorted values that bracket the median with 95 % confidence.

    The number of values below the median is binomial, with a deviation of half the root of
    ``count``. With fewer than six values the bracket is all of them, with less confidence.
    """
    low = max(math.floor(count / 2 - 0.98 * math.sqrt(count)), 0)
    return low, count - 1 - low


def measure(mebibytes: int, saves: int, folder: Path) -> tuple[Pairs, Pairs, int]:
    """Pairs in processor time and in wall-clock time, and the number of bytes."""
    hidden = 1024
    layers = max(1, mebibytes * 2**20 // (12 * 12 * hidden * hidden))
    config = Config.model_validate(
        {
            "model": {"hidden_size": hidden, "layers": layers, "heads": 8},
            "data": {"source": "text", "paths": [__file__], "sequence_length": 16, "held_out": 0},
        }
    )
    session = Session.create(config)
    with StopRequest() as stop:  # without it there would be no optimizer moments
        StepRunner(session).step(0, stop)
    saver = Saver(session, folder, "bench")
    plan, memory = saver.prepare()
    tensors, _ = state_of(session)
    rows: list[tuple[float, ...]] = []
    for step in range(saves + 1):
        # The order within a pair alternates: the caches' contents favor neither.
        if step % 2:
            copied = _timed(lambda: plan.fill(memory, tensors))
        stalled = _timed(partial(saver.start, step, 0))
        saver.finish()  # no write is in progress during either measurement
        if not step % 2:
            copied = _timed(lambda: plan.fill(memory, tensors))
        rows.append((*stalled, *copied))
    saver.close()
    # The first save allocates new memory.
    columns = [list(column) for column in zip(*rows[1:], strict=True)]
    return Pairs(columns[0], columns[2]), Pairs(columns[1], columns[3]), plan.nbytes


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Processor seconds and wall-clock seconds."""
    used, start = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - used, time.perf_counter() - start


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--saves", type=int, default=15)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        processor, clock, nbytes = measure(options.mebibytes, options.saves, Path(folder))
    print(f"{nbytes / 2**20:.0f} MiB")
    print(processor.line("processor time"))
    print(clock.line("wall time"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
