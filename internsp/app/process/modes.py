"""Modes of torch that a run enables while it trains: deterministic kernels, profiler, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

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


class Profile:
    """Runs torch's profiler, or records device memory, over some steps; one file a rank.

    Args:
        kind: ``train.profile``. ``"torch"`` writes ``torch-rank0.json`` (chrome://tracing,
            Perfetto) and ``"memory"`` ``memory-rank0.pickle`` (pytorch.org/memory_viz); others
            write nothing here.
        steps: first and last step, counted from 1.
        folder: the files are written there.

    Raises:
        ConfigError: ``"memory"`` on a device for which torch keeps no history.
    """

    def __init__(
        self, kind: str, steps: tuple[int, int], folder: Path, rank: int, device: torch.device
    ) -> None:
        if kind == "memory" and device.type != "cuda":
            raise ConfigError(
                "train.profile = \"memory\": torch keeps a history of CUDA's memory, and this run "
                f"is on {device.type}: leave it out, or set parallel.device"
            )
        self._kind, self._steps, self._device = kind, steps, device
        self._path = folder / f"{kind}-rank{rank}.{'json' if kind == 'torch' else 'pickle'}"
        self._recording: ExitStack | None = None

    def before_step(self, step: int) -> None:
        """Start if ``step`` (from 1), which begins now, is the first chosen one."""
        if step != self._steps[0] or self._kind not in ("torch", "memory"):
            return
        self._recording, path = ExitStack(), str(self._path)  # its last entry is called first
        if self._kind == "torch":
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if accelerator.has_streams(self._device):
                kinds.append(getattr(torch.profiler.ProfilerActivity, self._device.type.upper()))
            profiler = torch.profiler.profile(activities=kinds, record_shapes=True)
            profiler.start()
            self._recording.callback(profiler.export_chrome_trace, path)
            self._recording.callback(profiler.stop)
            return
        # A recomputation that stops early ends by an exception, which torch 2.11 loses while it
        # records what its unwinding frees ("returned NULL without setting an exception").
        self._recording.enter_context(set_checkpoint_early_stop(False))
        self._recording.callback(torch.cuda.memory._record_memory_history, enabled=None)
        self._recording.callback(torch.cuda.memory._dump_snapshot, path)
        torch.cuda.memory._record_memory_history()

    def after_step(self, step: int) -> Path | None:
        """Stop if ``step`` was the last chosen one; returns the file written, if any."""
        return self.close() if step == self._steps[1] else None

    def close(self) -> Path | None:
        """Stop and write what is being recorded; returns the file written, if any."""
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        recording.close()
        return self._path
