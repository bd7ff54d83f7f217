"""Rounds of trainees, ordered by :mod:`tools.bench.rounds`; losses are compared before timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from tools.bench.rounds import Spread, order
from tools.gpu.device import allocated, peak_of
from tools.gpu.model import Trainee, disagreement
from tools.gpu.options import Options


class Differs(RuntimeError):
    """A variant trained something else, so that its times are meaningless."""


def run(
    trainees: Mapping[str, Trainee], options: Options, device: torch.device, reference: str
) -> dict[str, dict[str, Any]]:
    """Warm up, compare losses, time, compare again.

    Returns:
        For each trainee: the spread of its step times in seconds, its losses, and the peak bytes of
        one step above what existed before it (``None`` on a CPU).

    Raises:
        Differs: losses differ from those of ``reference``; names the variant.
    """
    peaks = {}
    for name, trained in trainees.items():
        for _ in range(options.warm_up - 1):
            trained.seconds(device)
        before = allocated(device)
        peak = peak_of(device, lambda trained=trained: trained.seconds(device))  # type: ignore[misc]
        peaks[name] = None if peak is None or before is None else peak - before
    compare(trainees, reference)
    seconds: dict[str, list[float]] = {name: [] for name in trainees}
    for turn in range(options.rounds):
        for name in order(list(trainees), turn):
            seconds[name] += [trainees[name].seconds(device) for _ in range(options.steps)]
    compare(trainees, reference)
    return {
        name: {**asdict(Spread.of(times)), "losses": trained.losses, "step_bytes": peaks[name]}
        for (name, trained), times in zip(trainees.items(), seconds.values(), strict=True)
    }


def compare(trainees: Mapping[str, Trainee], reference: str) -> None:
    """Raise :class:`Differs` if losses or the first gradient differ from the reference's."""
    for name, trained in trainees.items():
        reason = disagreement(trained, trainees[reference])
        if reason is not None:
            raise Differs(f"{name} did not train what {reference} did: {reason}")
