"""Modes of torch that a run enables while it trains: deterministic kernels, profiler, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from internsp.base import accelerator
from internsp.errors import ConfigError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """A context in which torch uses deterministic kernels only; operations without one raise.

    Restores the settings at the end: a Trainer runs in a user's own process.
    """
    if not enabled:
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
    """Why a memory snapshot cannot be recorded on this type of device; empty if it can."""
    if device_type == "cuda":
        return ""
    return (
        "train.memory_snapshot: torch keeps a history of CUDA's memory, and this run is on "
        f"{device_type}: leave it out, or set parallel.device"
    )


class Profiles:
    """Runs torch's profiler, and records device memory, over the chosen steps; one file a rank.

    Args:
        steps: first and last step, counted from 1; ``None``: nothing is profiled.
        memory: whether to record allocations with their stack traces.
        folder: ``torch-rank0.json`` (chrome://tracing, Perfetto) and ``memory-rank0.pickle``
            (pytorch.org/memory_viz) are written there.

    Raises:
        ConfigError: ``memory`` on a device for which torch keeps no history.
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
        self._recording = ExitStack()

    def before_step(self, step: int) -> None:
        """Start the profiler if ``step`` (from 1), which begins now, is the first chosen one."""
        if self._steps is None or step != self._steps[0]:
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if accelerator.has_streams(self._device):
            kinds.append(getattr(torch.profiler.ProfilerActivity, self._device.type.upper()))
        self._profiler = torch.profiler.profile(activities=kinds, record_shapes=True)
        if self._memory:
            # A recomputation that stops early ends by an exception, which torch 2.11 loses while it
            # records what its unwinding frees ("returned NULL without setting an exception").
            self._recording.enter_context(set_checkpoint_early_stop(False))
            torch.cuda.memory._record_memory_history()
        self._profiler.start()

    def after_step(self, step: int) -> list[Path]:
        """Stop the profiler if ``step`` was the last chosen one; returns the files written."""
        if self._steps is None or step < self._steps[1]:
            return []
        return self.close()

    def close(self) -> list[Path]:
        """Stop and write the profile if one is being recorded; returns the files written."""
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
            self._recording.close()
        return written
