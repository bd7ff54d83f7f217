"""How long training stops for a checkpoint, next to the copy to host memory alone.

Run ``python -m tools.bench_checkpoint [--mebibytes 512] [--saves 5] [--folder DIR]``. Prints
the median of each in processor time, which another program on the machine does not lengthen, and
their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from internsp.config import Config
from internsp.train.checkpoint import state_of
from internsp.train.saver import Saver
from internsp.train.session import Session
from internsp.train.step import StepRunner
from internsp.train.stop import StopRequest


def measure(mebibytes: int, saves: int, folder: Path) -> tuple[float, float, int]:
    """Seconds for which training stops and of the copy alone (medians), and bytes."""
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
    stalls, copies = [], []
    tensors, _ = state_of(session)
    for step in range(saves + 1):
        start = time.process_time()
        saver.start(step, 0)
        stalls.append(time.process_time() - start)
        saver.finish()
        start = time.process_time()
        plan.fill(writer.memory, tensors)
        copies.append(time.process_time() - start)
    saver.close()
    # Of the first one the memory is new.
    return statistics.median(stalls[1:]), statistics.median(copies[1:]), plan.nbytes


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        stall, copy, nbytes = measure(options.mebibytes, options.saves, Path(folder))
    print(
        f"{nbytes / 2**20:.0f} MiB: training stops for {stall * 1e3:.1f} ms, "
        f"the copy alone takes {copy * 1e3:.1f} ms: {stall / copy:.3f} of it"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
