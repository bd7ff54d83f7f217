"""On a GPU: the host queues forward and backward without waiting for the device once.

``torch.cuda.set_sync_debug_mode`` raises at what makes the host wait: a value that is read, a copy
from memory that is not pinned, ``nonzero``. ``tests/ranks/test_host_waits.py`` lists what an
optimizer and a run read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from internsp import (
    ISPCommunicator,
    ParallelMesh,
    WeightParallelConfig,
    ZeroOptimizer,
    parallelize,
)
from internsp.config import ActivationCheckpointConfig
from tests.gpu.test_streams import CUDA, SMALL
from tools.bench.model import process_group
from tools.gpu import emulation
from tools.gpu.link import EmulatedCollectives, Pace, make_link
from tools.gpu.model import Trainee

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "every weight alone, two ahead": ({"coalesce_bytes": 0, "prefetch_depth": 2}, {}),
    "no pool": ({"memory_pool": False}, {}),
    "quantized": ({"quantize": "int8"}, {}),
    "compiled": ({"compile": True, "gather_before": "qkv"}, {}),
    "weights on the host": ({"offload": ("weights",)}, {}),
    "activations on the host": ({}, {"mode": "full", "offload": "all"}),
    "attention's outputs on the host": ({}, {"mode": "selective", "offload": "all"}),
}


@contextmanager
def emulated(
    settings: dict[str, Any], checkpoint: dict[str, Any] | None = None
) -> Iterator[tuple[ISPCommunicator, Callable[..., Trainee]]]:
    """A parallel model over an emulated link, and what makes its trainee of an optimizer."""
    count = SMALL.size("emulated_ranks")
    model, weights = emulation._model(SMALL)
    with process_group("fake", count):
        mesh = ParallelMesh.create(weight=count, device_type="cuda")
        blocks = emulation.fresh(model, weights, CUDA)
        link = make_link(CUDA, Pace())
        communicator = parallelize(
            blocks,
            mesh,
            WeightParallelConfig(**{"min_shard_elements": 513, **settings}),
            activation_checkpoint=ActivationCheckpointConfig(**(checkpoint or {"mode": "none"})),
            collectives=partial(EmulatedCollectives, link=link),
        )
        yield communicator, partial(emulation.trainee, "waits", blocks, model, CUDA)
        link.close()


@contextmanager
def refused() -> Iterator[None]:
    """What makes the host wait raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("form", FORMS)
def test_forward_and_backward_never_make_the_host_wait(form: str) -> None:
    with emulated(*FORMS[form]) as (_, trainee):
        made = trainee()
        for _ in range(2):
            made.seconds(CUDA)
        with refused():
            made.step()


@pytest.mark.parametrize("offload", [(), ("weights", "optimizer", "gradients")])
@pytest.mark.parametrize("bound", [1.0, None])
def test_a_fused_step_is_queued_while_the_device_is_behind(
    bound: float | None, offload: tuple[str, ...]
) -> None:
    """The norm decides on the device; what the host reads is the step before. What is offloaded is
    left alone, as a run does."""
    with emulated({"offload": offload}) as (communicator, trainee):
        communicator.events.contents.left_alone = True
        zero = ZeroOptimizer(
            communicator, torch.optim.AdamW, lr=1e-3, max_grad_norm=bound, fused=True
        )
        made = trainee(zero)
        made.norms = [0.0]  # those of gradients are read
        for _ in range(3):
            made.seconds(CUDA)
        with refused():
            torch.cuda._sleep(4_000_000_000)  # about two seconds
            ended = torch.cuda.Event()
            ended.record()
            made.step()
            assert not ended.query(), "the host has queued a whole step behind what still runs"
            assert zero.unread is not None
        assert not zero.skipped
        assert ended.query(), "asking for the verdict waits for it"
        assert zero.grad_norm > 0


def test_a_value_that_is_read_is_seen() -> None:
    value = torch.ones((), device=CUDA)
    with refused(), pytest.raises(RuntimeError, match="synchronizing"):
        float(value)
