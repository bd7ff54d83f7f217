"""The library's ways for a device's own backend, in host memory (tests/support/as_nccl.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.on_device import NAME
from tests.support.ranks import ranks

ROOT = Path(__file__).resolve().parents[2]
SHOWN = (
    "test_as_nccl.py::test_what_a_message_fills_is_not_there_before_a_wait",
    "test_rules_plain_loop.py::test_each_step_of_an_ordinary_loop_equals_one_process",
    "test_pipeline_parity.py::test_gradients_of_several_steps_add_up",
    "test_sp_ring.py::test_every_form_equals_one_process",
    "test_zero_parity.py::test_up_to_twenty_steps_in_fp64_equal_one_process",
    "test_two_levels.py::test_sums_in_two_levels_train_as_one_process_and_send_what_the_plan_says",
)


@ranks(2)
def test_what_a_message_fills_is_not_there_before_a_wait(rank: int) -> None:
    here = NAME in os.environ  # else gloo's own, whose values are the same
    mine = torch.full((2,), rank + 1.0)
    whole, sums = torch.zeros(4), torch.zeros(1)
    both = [
        (whole, dist.all_gather_into_tensor(whole, mine, async_op=True)),
        (sums, dist.reduce_scatter_tensor(sums, mine.clone(), async_op=True)),
    ]
    other = torch.zeros(2)
    received = dist.irecv(other, 1 - rank), dist.isend(mine, 1 - rank)
    for values, work in (*both, (other, received[0])):
        assert work is not None
        if here:
            assert values.isnan().all()
        work.wait()
    assert received[1] is not None
    received[1].wait()
    assert whole.tolist() == [1, 1, 2, 2]
    assert sums.tolist() == [3]
    assert other.tolist() == [2 - rank] * 2
    if here:
        dist.all_reduce(mine, dist.ReduceOp.AVG)
        assert mine.tolist() == [1.5, 1.5]


@pytest.mark.slow(25)
def test_ways_of_another_backend_than_gloo_are_right() -> None:
    names = [f"tests/ranks/{name}" for name in SHOWN]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not thorough"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *names],
        cwd=ROOT, env=os.environ | {NAME: "cpu"}, text=True, capture_output=True, check=False,
    )  # fmt: skip
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", last)[0]) >= len(SHOWN)
