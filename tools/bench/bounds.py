"""Lower bounds: the duration of a schedule on one computing thread and one link, computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MBIT = 125_000.0  # bytes per second


def play(
    lines: Iterable[tuple[str, str, str, int]],
    seconds: Mapping[tuple[str, str], float],
    rate_mbit: float,
) -> float:
    """Seconds of a schedule on one computing thread and one link that sends a message at a time.

    ``AG`` and ``RS`` enter the link in the order of launch and take ``nbytes / rate``; ``USE``
    computes; ``WAIT`` lasts until the last message launched for its weight has arrived. Every rank
    does the same at the same time and the link is full duplex, so one rank stands for all. The
    result is a bound: communication itself costs no processor time here.

    Args:
        lines: kind, phase, weight and bytes of each action.
        seconds: compute time of a use, by ``(phase, weight)``.
    """
    now = free = 0.0
    arrives: dict[str, float] = {}
    for kind, phase, weight, nbytes in lines:
        if kind in ("AG", "RS"):
            free = max(free, now) + nbytes / (rate_mbit * MBIT)
            arrives[weight] = free
        elif kind == "WAIT":
            now = max(now, arrives.get(weight, now))
        elif kind == "USE":
            now += seconds.get((phase, weight), 0.0)
    return now


def shares(numels: Mapping[str, int], phases: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Compute seconds of every use: each phase's total, divided among weights by their size."""
    total = sum(numels.values())
    return {
        (phase, weight): seconds * numel / total
        for phase, seconds in phases.items()
        for weight, numel in numels.items()
    }
