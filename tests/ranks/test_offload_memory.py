"""The memory by component that ``internsp plan`` prints is what a run allocates."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from internsp.app.config import Config
from internsp.app.plan import offloaded
from internsp.app.plan.offloaded import HOSTED, PASSING, STAGED, STEPPING
from internsp.app.plan.step import make_plan
from internsp.app.session.session import Session
from internsp.app.train import page, run
from internsp.base import host
from internsp.base.host import HostLink, Pairs
from internsp.optim import streamed
from tests.ranks.test_train import config
from tests.support.late_copies import install
from tests.support.ranks import run_ranks

EVERYTHING = ["weights", "optimizer", "gradients"]
# What no unit of a block has is gathered beside them, and is in a bucket with other such weights.
DIVIDED = {"gather_before": "qkv", "rules": [{"match": "layers.*.feed_forward", "unit": "each"}]}
PART = [{"match": "layers.{0-1}.*.w?", "offload": ["optimizer"]}]
CHANGES: tuple[dict[str, dict[str, Any]], ...] = (
    {},
    {"weight_parallel": {"offload": EVERYTHING}, "parallel": {"weight": 2}},
    {"weight_parallel": {"offload": EVERYTHING}, "train": {"dtype": "bfloat16"}},
    {"weight_parallel": {"offload": ["weights"], "compute_dtype": "bfloat16", **DIVIDED}},
    {"weight_parallel": {"offload": ["gradients"], "accumulation": "full", "rules": PART}},
    {
        "weight_parallel": {"offload": ["optimizer"], **DIVIDED},
        "optimizer": {"name": "sgd", "momentum": 0.9}, "parallel": {"weight": 2},
    },
)  # fmt: skip


class Counted(HostLink):
    """Counts the copies that are in separate device memory, by storage."""

    peak = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.live: dict[int, int] = {}

    def copy_to_device(self, pairs: Pairs) -> Any:
        self.count([to for to, _ in pairs])
        return super().copy_to_device(pairs)

    def _start_copy_to_host(self, run: Any, kept: Any, then: Any) -> None:
        self.count([source for _, source in kept] if isinstance(kept, (list, tuple)) else [kept])
        super()._start_copy_to_host(run, kept, then)

    def count(self, tensors: Any) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == tensor.nbytes and storage.data_ptr() not in self.live:
                self.live[storage.data_ptr()] = tensor.nbytes
                weakref.finalize(tensor, self.live.pop, storage.data_ptr())
        Counted.peak = max(Counted.peak, sum(self.live.values()))


def trained(rank: int, world: int, cases: list[Config], folder: str) -> list[dict[str, int]]:
    install(Counted)
    host.PIECE_BYTES = streamed.PIECE_BYTES = offloaded.PIECE_BYTES = 4096
    found: list[dict[str, int]] = []

    def seen(session: Session) -> list[tuple[str, int]]:
        rows = components(session)
        found.append(dict(rows) | {PASSING: Counted.peak})
        return rows

    components, page.components = page.components, seen  # type: ignore[assignment]
    for number, case in enumerate(cases):
        Counted.peak = 0
        run.train(case, Path(folder) / str(number))
    return found


@pytest.mark.unmeasured
def test_bytes_on_host_and_device_are_those_of_the_plan(tmp_path: Path) -> None:
    train = {"steps": 2, "micro_batches": 2, "eval_batches": 0}
    cases = [config(**{**c, "train": train | c.get("train", {})}) for c in CHANGES]
    found = run_ranks(trained, 2, cases, str(tmp_path), timeout=240)[0]
    assert len(found) == len(cases)
    offloaded.PIECE_BYTES = 4096
    for changes, case, got in zip(CHANGES, cases, found, strict=True):
        plan = make_plan(case, 2)
        wanted = dict(plan.ranks[0].memory)
        for name in (*HOSTED.values(), STAGED):
            assert got.get(name) == wanted.get(name), f"{changes}: {name}"
        slots = "unsharded weights (slots"
        assert got[f"{slots})"] == wanted[f"{slots}, exact)"], changes
        for name in ("weight shards", "optimizer state"):
            assert got[name] == wanted[name], f"{changes}: {name}"
        flags = got["gradient sums"] - wanted["gradient sums"]  # flags for which weights were used
        assert 0 < flags < 256, changes
        assert got[PASSING] <= wanted.get(PASSING, 0) + wanted.get(STEPPING, 0), changes
        if "offload" in changes.get("weight_parallel", {}):
            assert got[PASSING], "something passes the device"
            assert any(wanted.get(name) for name in HOSTED.values())
