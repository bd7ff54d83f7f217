"""On a GPU: the host queues forward and backward without waiting for the device once.

``torch.cuda.set_sync_debug_mode`` raises at what makes the host wait: a value that is read, a copy
from memory that is not pinned, ``nonzero``. ``tests/ranks/test_host_waits.py`` lists what an
optimizer and a run read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from internsp import ParallelMesh, WeightParallelConfig, parallelize
from internsp.config import ActivationCheckpointConfig
from tests.gpu.test_streams import CUDA, SMALL
from tools.bench.model import process_group
from tools.gpu import emulation
from tools.gpu.link import EmulatedCollectives, Pace, make_link

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


@pytest.mark.parametrize("form", FORMS)
def test_forward_and_backward_never_make_the_host_wait(form: str) -> None:
    settings, checkpoint = FORMS[form]
    count = SMALL.size("emulated_ranks")
    model, weights = emulation._model(SMALL)
    with process_group("fake", count):
        mesh = ParallelMesh.create(weight=count, device_type="cuda")
        blocks = emulation.on_device(model, weights, CUDA)
        link = make_link(CUDA, Pace())
        parallelize(
            blocks,
            mesh,
            WeightParallelConfig(**{"min_shard_elements": 513, **settings}),
            activation_checkpoint=ActivationCheckpointConfig(**(checkpoint or {"mode": "none"})),
            collectives=partial(EmulatedCollectives, link=link),
        )
        made = emulation.trainee("waits", blocks, model, CUDA)
        for _ in range(2):
            made.seconds(CUDA)
        torch.cuda.set_sync_debug_mode("error")
        try:
            made.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        link.close()


def test_a_value_that_is_read_is_seen() -> None:
    value = torch.ones((), device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            float(value)
    finally:
        torch.cuda.set_sync_debug_mode("default")
