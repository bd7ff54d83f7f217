"""What a run switches on in torch while it trains, and off again: determinism, profiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from internsp import accelerator
from internsp.errors import ConfigError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Within it torch takes deterministic kernels only; an operation that has none raises.

    The process is afterwards as it was: a Trainer runs in a user's own.
    """
    if not asked:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    # cuBLAS reads it when its handle is made; without it torch refuses matrix products on CUDA.
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def memory_mistake(device_type: str) -> str:
    """Why the memory of a device cannot be written down; empty: it can."""
    if device_type == "cuda":
        return ""
    return (
        "train.memory_snapshot: torch keeps a history of CUDA's memory, and this run is on "
        f"{device_type}: leave it out, or set parallel.device"
    )


class Profiles:
    """torch's profiler over the chosen steps, and a device's memory over the same, one file a rank.

    Args:
        steps: the first and the last one, counted from 1; ``None``: nothing is profiled.
        memory: whether to write what was allocated, and where from.
        folder: ``torch-rank0.json`` (chrome://tracing, Perfetto) and ``memory-rank0.pickle``
            (pytorch.org/memory_viz) are written there.

    Raises:
        ConfigError: memory is asked for on a device of which torch keeps no history.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None,
        memory: bool,
        folder: Path,
        rank: int,
        device: torch.device,
    ) -> None:
        if memory and (mistake := memory_mistake(device.type)):
            raise ConfigError(mistake)
        self._steps, self._memory, self._folder, self._rank = steps, memory, folder, rank
        self._device = device
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Step ``step``, from 1, begins."""
        if self._steps is None or step != self._steps[0]:
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if accelerator.has_streams(self._device):
            kinds.append(getattr(torch.profiler.ProfilerActivity, self._device.type.upper()))
        self._profiler = torch.profiler.profile(activities=kinds, record_shapes=True)
        if self._memory:
            torch.cuda.memory._record_memory_history()
        self._profiler.start()

    def after(self, step: int) -> list[Path]:
        """It has ended; the files that were written."""
        if self._steps is None or step < self._steps[1]:
            return []
        return self.close()

    def close(self) -> list[Path]:
        """Write what there is, if anything is going on."""
        if self._profiler is None:
            return []
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        written = [self._folder / f"torch-rank{self._rank}.json"]
        profiler.export_chrome_trace(str(written[0]))
        if self._memory:
            written.append(self._folder / f"memory-rank{self._rank}.pickle")
            torch.cuda.memory._dump_snapshot(str(written[1]))
            torch.cuda.memory._record_memory_history(enabled=None)
        return written
