"""torchtitan's Trainer over a parallel model: losses, norms and weights as on one process.

torchtitan computes on an accelerator only. Where there is none, the test gives it a stand-in for
the device's module (:class:`Host`, the processor) and takes the Trainer's own steps one by one: its
``train()`` ends the first step with a barrier that gloo does not have.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.support.compare import check
from tests.support.ranks import run_ranks

MISSING = [n for n in ("torchtitan", "triton", "spmd_types", "tensorboard") if not find_spec(n)]
pytestmark = [
    pytest.mark.ranks, pytest.mark.clients, pytest.mark.unmeasured,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]  # fmt: skip
TEXT = str(Path(__file__).parents[1] / "data/text/01_why_cut_sequences.txt")
STEPS, BATCH = 3, 8


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]
    first: dict[str, Tensor]
    weights: dict[str, Tensor]


class Host:
    """What torchtitan asks of a device, for the processor."""

    set_device = synchronize = reset_peak_memory_stats = empty_cache = staticmethod(lambda *_: None)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda _: "processor")
    get_device_properties = staticmethod(lambda _: SimpleNamespace(total_memory=1))
    memory_stats = staticmethod(lambda _: {})


def one(rank: int, world: int, folder: Path, first: dict[str, Tensor] | None) -> Run:
    """Some steps, sharded; or, where ``first`` values are given, of the model as it is."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    from torchtitan.tools import utils

    if not torch.accelerator.is_available():
        utils.device_type, utils.device_module = "cpu", Host  # before the others take them
    from examples import torchtitan_train as example

    config = example.configuration(
        TEXT, str(folder), BATCH // world, mixed_precision_param="float32"
    )
    if first is not None:
        config.model_spec.parallelize_fn = lambda model, **_: model
    trainer = example.Trainer(config)
    model: Any = trainer.model_parts[0]
    if first is not None:
        model.load_state_dict(first)
    losses, norms = [], []

    def noted(step: int, mean: float, most: float, norm: float, **_: Any) -> None:
        losses.append(mean)
        norms.append(norm)

    trainer.metrics_processor.log = noted
    began = whole(model)
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, STEPS + 1):
        trainer.train_step(batches)
    trainer.close()
    return Run(losses, norms, began, whole(model))


def whole(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Any] = dict(model.named_parameters())
    wholes = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in found.items()}
    return {name: p.detach().clone() for name, p in wholes.items()}


def test_the_trainers_steps_are_those_of_one_process(tmp_path: Path) -> None:
    found = run_ranks(one, 2, tmp_path, None, timeout=240)[0]
    wanted = run_ranks(one, 1, tmp_path, found.first, timeout=240)[0]
    check(wanted.first, found.first, "the first values", 0.0)
    assert len(wanted.losses) == STEPS
    assert wanted.losses[-1] < wanted.losses[0] - 0.1, "it learns, so that weights matter"
    assert min(wanted.norms) > 0.5, "every step is clipped"
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    # torch's norm on a processor adds up 500,000 squares in fp32: 1e-4 away from fp64's, and from
    # that of shards. Gradients themselves have the same bits but for the embedding's last ones.
    assert found.norms == pytest.approx(wanted.norms, rel=2e-4)
    check(found.weights, wanted.weights, "weights", 1e-5)
