"""The part of one rank of the benchmark: serves the requests of :mod:`tools.bench.ranks`."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.memory import free, status
from tools.bench.model import exchanged_bytes, initial_weights
from tools.overlap.measure import Sampler, WaitClock, peak_of, reset_peak, sent
from tools.overlap.options import Options, Spec
from tools.overlap.variants import Ours, Setting, Variant, make, reference, unavailable

PROFILED = ("AG", "RS", "EX", "A2A", "USE", "WAIT", "A2A_WAIT", "PUBLISH")
"""Kinds of events of the profiled step that are sent to the parent."""


class Worker:
    """Keeps the process group and the initial weights; a variant exists for one request."""

    def __init__(self, options: Options, interface: str) -> None:
        self.options = options
        self.interface = interface
        self.clock = WaitClock()
        self.clock.install()
        self.setting = Setting(options, initial_weights(options.sizes()))

    def hello(self) -> dict[str, Any]:
        """Versions, sizes of the weights, and which variants cannot run, with reasons."""
        weights = self.setting.weights
        names = self.options.variants
        reasons = {name: unavailable(Spec.parse(name), self.options) for name in names}
        return {
            "torch": torch.__version__,
            "reasons": {name: reason for name, reason in reasons.items() if reason},
            "numels": {name: w.numel() for name, w in weights.items() if w.ndim > 1},
            "exchanged": exchanged_bytes(self.setting.sizes),
            "itemsize": next(iter(weights.values())).element_size(),
        }

    def reference(self, steps: int) -> list[float]:
        """On rank 0: losses of one process with all the data."""
        return reference(self.setting, steps) if self.setting.rank == 0 else []

    def link(self, nbytes: int, repeats: int) -> list[float]:
        """Seconds in which all ranks send ``nbytes`` each at the same time, in pieces of 1 MiB."""
        pieces = max(1, nbytes >> 20)
        world = self.setting.world
        numel = world * ((1 << 20) // (world - 1))
        send = [torch.zeros(numel, dtype=torch.uint8) for _ in range(8)]
        seconds: list[float] = []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            flying: list[Any] = []
            for index in range(pieces):
                if len(flying) >= 8:
                    flying.pop(0)[0].wait()
                source = send[index % 8]
                received = torch.empty_like(source)
                work = dist.all_to_all_single(received, source, async_op=True)
                flying.append((work, received))
            for work, _ in flying:
                work.wait()
            seconds.append(time.perf_counter() - start)
        return seconds

    def run(self, variant: str, warm_up: int, steps: int, probe: bool) -> dict[str, Any]:
        """Build a variant, warm it up, time it, profile one more step, and remove it."""
        spec = Spec.parse(variant)
        free()
        base = status("VmRSS")
        reset_peak()
        made = make(self.setting, spec)
        try:
            return self._run(made, base, warm_up, steps, probe)
        finally:
            made.close()
            del made
            free()

    def _run(
        self, variant: Variant, base: int, warm_up: int, steps: int, probe: bool
    ) -> dict[str, Any]:
        losses: list[float] = []
        result: dict[str, Any] = {}
        figure = variant.unsharded_bytes
        for index in range(warm_up):
            if probe and index == 0 and figure() is not None:
                with peak_of(variant.blocks, lambda: figure() or 0) as peak:
                    losses.append(variant.step())
                result["unsharded_bytes"] = peak[0]
            else:
                losses.append(variant.step())
        result.update(self._timed(variant, steps, losses))
        result["peak_bytes"] = status("VmHWM") - base
        if probe:
            result["profile"] = self._profile(variant)
        return {**result, "losses": losses, **variant.report()}

    def _timed(self, variant: Variant, steps: int, losses: list[float]) -> dict[str, Any]:
        ends: list[float] = []
        phases: dict[str, float] = {}
        marks: list[tuple[str, float]] = []
        dist.barrier()
        self.clock.take()
        before = sent(self.interface)
        process, thread = time.process_time(), time.thread_time()
        start = time.perf_counter()
        for _ in range(steps):
            losses.append(variant.step(lambda name: marks.append((name, time.perf_counter()))))
            ends.append(time.perf_counter())
        used = time.thread_time() - thread
        others = time.process_time() - process - used
        waits = self.clock.take()
        dist.barrier()
        after = sent(self.interface)
        for (name, begin), (_, end) in itertools.pairwise(marks):
            phases[name] = phases.get(name, 0.0) + (end - begin) / steps
        phases.pop("end", None)
        return {
            "start": start,
            "ends": ends,
            "phases": phases,
            "waited": sum(b - a for a, b in waits) / steps,
            "other_cpu": others / steps,
            "sent": None if before is None or after is None else (after - before) / steps,
        }

    def _profile(self, variant: Variant) -> dict[str, Any]:
        marks: list[tuple[str, float]] = []
        trace = variant.trace
        dist.barrier()
        self.clock.take()
        if trace is not None:
            trace.clear()
            trace.enabled = True
        with Sampler(self.interface) as sampler:
            zero = time.perf_counter()
            variant.step(lambda name: marks.append((name, time.perf_counter() - zero)))
            over = time.perf_counter()
        events = list(trace.events) if trace is not None else []
        if trace is not None:
            trace.enabled = False
        return {
            "zero": zero,
            "marks": marks,
            "waits": [(a - zero, b - zero) for a, b in self.clock.take()],
            "link": [(t - zero, n) for t, n in sampler.samples],
            "events": [
                (
                    e.kind,
                    e.unit,
                    e.weight,
                    e.phase,
                    e.start - zero,
                    (e.end or over) - zero,
                    e.nbytes,
                )
                for e in events
                if isinstance(variant, Ours) and (e.kind in PROFILED or e.nbytes)
            ],
        }
