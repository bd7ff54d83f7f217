"""Runs many cases with one start of ranks; new ranks after a case that has failed."""

from __future__ import annotations

import faulthandler
import functools
import gc
import io
import os
import pickle
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from internsp.mesh import ParallelMesh
from tests.fuzz import faults
from tests.fuzz.allowed import verdict
from tests.fuzz.compare import ERROR, MEANINGLESS, REFUSED, RIGHT, WRONG, run_case
from tests.fuzz.draw import Case, simpler
from tests.support.ranks import RankError, run_ranks

TIMEOUT = 20  # seconds, per collective
STUCK = 75  # seconds, per case: then all ranks print their stacks and end
START = 100  # cases per start of ranks: optimizer hooks are process-wide and accumulate


@dataclass
class Result:
    """The result of a case: ``kind`` is one of ``compare``'s, or ``"died"``."""

    case: Case
    kind: str
    text: str
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.kind not in (RIGHT, REFUSED, MEANINGLESS)


def run(
    cases: Sequence[Case],
    fault: str = "",
    first: bool = False,
    deadline: float = float("inf"),
) -> Iterator[Result]:
    """Results in order, grouped by starts of ranks. All cases have the same world size.

    Args:
        fault: a name of :mod:`tests.fuzz.faults`, applied to the library.
        first: stop at the first failure.
        deadline: of ``time.monotonic()``; cases not started by then are left out.
    """
    left = list(cases)
    while left and time.monotonic() < deadline:
        part = left[:START]
        results = _start(part, fault, first, deadline)
        yield from results
        if not results or (first and results[-1].failed):
            return
        left = left[len(results) :]


def _start(cases: list[Case], fault: str, first: bool, deadline: float) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        trouble = ""
        try:
            run_ranks(
                _cases, cases[0].world, cases, folder, fault, first, deadline,
                timeout=60.0 + 10 * STUCK + 5 * len(cases),
            )  # fmt: skip
        except RankError as error:
            trouble = str(error)
        results = []
        path = Path(folder) / "results"
        with io.BytesIO(path.read_bytes() if path.exists() else b"") as file:
            while file.tell() < len(file.getbuffer()):
                number, kind, text, seconds = pickle.load(file)
                results.append(Result(cases[number], kind, text, seconds))
        if trouble:
            stacks = "\n".join(p.read_text() for p in sorted(Path(folder).glob("stuck*")))
            text = _shortened(f"{trouble}\n{stacks}")
            if len(results) == len(cases):
                raise RankError(text)  # after all cases: not caused by a case
            results.append(Result(cases[len(results)], "died", text))
        return results


def _shortened(text: str) -> str:
    """The stack without the frames that every stack has."""
    left_out = ("Extension modules", "/lib/python3", "<string>", "ranks.py", "/torch/")
    lines = [line for line in text.splitlines() if not any(part in line for part in left_out)]
    return "\n".join(lines)[:6000]


def _cases(
    rank: int, world: int, cases: list[Case], folder: str, fault: str, first: bool, deadline: float
) -> None:
    """Run cases on each rank. Ends early after a failure that may have left messages in flight."""
    faults.put_in(fault, rank)
    file = (Path(folder) / "results").open("ab") if rank == 0 else None
    stuck = (Path(folder) / f"stuck{rank}").open("w")
    fresh = _meshes()
    for number, case in enumerate(cases):
        start = time.monotonic()
        faulthandler.dump_traceback_later(STUCK, exit=True, file=stuck)
        own = run_case(case, rank, fresh(case.weight, case.zero, case.expert_weight, case.machine))
        everyone = [own] * world
        dist.all_gather_object(everyone, own)
        kind, text = verdict(case, everyone)
        late = [time.monotonic() > deadline]
        dist.broadcast_object_list(late)
        faulthandler.cancel_dump_traceback_later()
        if file is not None:
            file.write(pickle.dumps((number, kind, text, time.monotonic() - start)))
            file.flush()
        waited = [time.monotonic() - start > TIMEOUT / 2]
        dist.broadcast_object_list(waited)
        if late[0] or (kind == ERROR and waited[0]) or (first and kind in (ERROR, WRONG)):
            break  # all ranks decide the same
        if kind in (ERROR, REFUSED) and any(o.stage != "parallelize" for o in everyone):
            fresh = _meshes()  # the groups of the old meshes may hold messages in flight
        if number % 16 == 15:
            gc.collect()
    stuck.close()


def _meshes() -> Callable[[int, int | None, int | None, int], ParallelMesh]:
    @functools.cache
    def mesh(
        weight: int, zero: int | None, expert_weight: int | None, machine: int
    ) -> ParallelMesh:
        os.environ["GROUP_RANK"] = str(dist.get_rank() // machine if machine else 0)
        return ParallelMesh.create(
            weight, zero=zero, device_type="cpu", timeout_seconds=TIMEOUT,
            expert_weight=expert_weight,
        )  # fmt: skip

    return mesh


def shrink(failed: Result, seconds: float = 60.0, fault: str = "") -> Result:
    """The simplest case, found within ``seconds``, that fails in the same way."""
    deadline = time.monotonic() + seconds
    best = failed
    tried: list[Case] = []
    while time.monotonic() < deadline:
        candidates = [case for case in simpler(best.case) if case not in tried]
        by_world = [[c for c in candidates if c.world == w] for w in (2, 3, 4)]
        found = None
        for cases in by_world:
            while cases and found is None and time.monotonic() < deadline:
                results = list(run(cases, fault, first=True, deadline=deadline))
                tried += [result.case for result in results]
                if results and _alike(results[-1], failed):
                    found = results[-1]
                cases = cases[len(results) :] if results else []
        if found is None:
            break
        best = found
    return best


def _alike(one: Result, other: Result) -> bool:
    """Whether two failures are alike: both wrong, or raising the same class."""
    return one.kind == other.kind and _class(one.text) == _class(other.text)


def _class(text: str) -> str:
    found = re.search(r"(\w+(?:Error|Exception)):?(.{0,30})", text)
    return found.group(0) if found else ""
