"""WP-4 over whole steps: each call of a layer on any stream stands behind all that it uses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from internsp import ZeroOptimizer
from internsp.config import ActivationCheckpointConfig
from tests.support.few import some
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, SOME, Block, Tiny, Twin
from tests.support.racing import Racing
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")
HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
MODULE = {"granularity": "module"}
BF16 = {"compute_dtype": "bfloat16"}
QUANTIZED = {"quantize": "int8"}
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "all of a block in one launch": (2, HALF, ALL),
    "large weights": (2, None, {}),
    "a launch of several weights": (2, None, SOME),
    "by module": (2, HALF, MODULE),
    "rolling": (2, FULL, SOME | ROLLING),
    "waits at once": (2, None, SOME | {"overlap": False}),
    "a cast in a group of one": (1, None, SOME | BF16),
    "memory of each weight": (2, None, SOME | {"memory_pool": False}),
    "quantized": (2, None, SOME | QUANTIZED),
    "quantized, waits at once": (2, HALF, QUANTIZED | {"overlap": False}),
}


def train(weight: int, checkpoint: Any, config: dict[str, Any]) -> None:
    racing = Racing()
    racing.install()
    twin = Twin(partial(Tiny, partial(Block, 18), width=18), mesh_of(weight), checkpoint, **config)
    twin.trace.enabled = False  # a trace asks for a USE of each weight, which orders streams, too
    plain = torch.optim.SGD(twin.plain.parameters(), lr=0.01)
    ours = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.01)
    for step in range(3):
        for last in (False, True):
            with twin.communicator.replica_sync(last):
                twin.backward()
        for optimizer in (plain, ours):
            optimizer.step()
            optimizer.zero_grad()
        if config.keys().isdisjoint(BF16 | QUANTIZED):  # which round
            twin.check_parameters(f"step {step}")
    assert racing.hops > 100, "calls came on many streams"
    assert racing.checks > 300


@pytest.mark.parametrize("case", [next(iter(CASES)), *some([*CASES][1:], 3)])
@ranks(2)
def test_every_call_on_any_stream_stands_behind_what_it_uses(case: str) -> None:
    train(*CASES[case])
