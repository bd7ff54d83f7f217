"""The device: its description, its peak, and measurement of time and memory on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def choose(wanted: str) -> torch.device:
    """The device for ``auto``, ``cuda`` or ``cpu``.

    Raises:
        ValueError: ``cuda`` where there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here (torch.cuda.is_available)")
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def name_of(device: torch.device) -> str:
    """A description for reports."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"CPU, {torch.get_num_threads()} threads: a rehearsal, no figure of it means anything"


def matmul_peak(device: torch.device) -> float:
    """FLOP/s measured for a square bf16 matrix product."""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [timed(device, lambda: a @ b) for _ in range(10)]
    return 2 * n**3 / min(times[2:])


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    """Seconds of ``work``, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def allocated(device: torch.device) -> int | None:
    """Bytes of tensors on a GPU now; ``None`` on a CPU, where they are not counted."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_of(device: torch.device, work: Callable[[], Any]) -> int | None:
    """Peak bytes of tensors on a GPU while ``work`` ran; ``None`` on a CPU."""
    if device.type != "cuda":
        work()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)
