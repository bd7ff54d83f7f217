"""How long training stops for a checkpoint, next to the copy to host memory alone.

Run ``python -m tools.bench_checkpoint [--mebibytes 512] [--saves 15] [--folder DIR]``. Both are
taken in turn, as pairs, in processor time, which another program on the machine does not lengthen,
and on the clock, which a run has. Of each the medians are printed, and of the pairs the median
ratio with its interval (95 %, of the order statistics, which no outlier moves).
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

from internsp.config import Config
from internsp.train.checkpoint import state_of
from internsp.train.saver import Saver
from internsp.train.session import Session
from internsp.train.step import StepRunner
from internsp.train.stop import StopRequest


@dataclass(frozen=True)
class Pairs:
    """Seconds for which training stopped, and of the copy alone right before or behind it."""

    stalls: list[float]
    copies: list[float]

    def line(self, clock: str) -> str:
        """In words."""
        ratios = sorted(s / c for s, c in zip(self.stalls, self.copies, strict=True))
        low, high = interval(len(ratios))
        return (
            f"{clock}: training stops for {statistics.median(self.stalls) * 1e3:.1f} ms, the copy "
            f"alone takes {statistics.median(self.copies) * 1e3:.1f} ms; of {len(ratios)} pairs "
            f"the median is {statistics.median(ratios):.3f} of it (95 %: {ratios[low]:.3f} to "
            f"{ratios[high]:.3f})"
        )


def interval(count: int) -> tuple[int, int]:
    """Places in ``count`` sorted values between which the median is, in 95 % of all draws.

    The number of values below a median is that of heads among ``count`` coins. Of fewer than six
    values it is all of them, and less sure.
    """
    below, place = 0.0, 0
    while place < (count - 1) // 2:
        below += math.comb(count, place) / 2**count
        if below > 0.025:
            break
        place += 1
    low = max(place - 1, 0)
    return low, count - 1 - low


def measure(mebibytes: int, saves: int, folder: Path) -> tuple[Pairs, Pairs, int]:
    """In processor time and on the clock; and bytes."""
    hidden = 1024
    layers = max(1, mebibytes * 2**20 // (12 * 12 * hidden * hidden))
    config = Config.model_validate(
        {
            "model": {"hidden_size": hidden, "layers": layers, "heads": 8},
            "data": {"source": "text", "paths": [__file__], "sequence_length": 16, "held_out": 0},
        }
    )
    session = Session.create(config)
    with StopRequest() as stop:  # or there would be no moments
        StepRunner(session).step(0, stop)
    saver = Saver(session, folder, "bench")
    plan, writer = saver.prepare()
    tensors, _ = state_of(session)
    rows: list[tuple[float, ...]] = []
    for step in range(saves + 1):
        # The order of a pair changes: what a save leaves in the caches favors neither.
        if step % 2:
            copied = _timed(lambda: plan.fill(writer.memory, tensors))
        stalled = _timed(partial(saver.start, step, 0))
        saver.finish()  # nothing is written while either is measured
        if not step % 2:
            copied = _timed(lambda: plan.fill(writer.memory, tensors))
        rows.append((*stalled, *copied))
    saver.close()
    # Of the first one the memory is new.
    columns = [list(column) for column in zip(*rows[1:], strict=True)]
    return Pairs(columns[0], columns[2]), Pairs(columns[1], columns[3]), plan.nbytes


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the processor and of the clock."""
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
